"""Hooks of the docs' site: pages that lie elsewhere in the repository, and links to them."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = {"README.md": "docs/index.md", "CHANGELOG.md": "docs/changelog.md", "bench/README.md": "docs/benchmarks.md"}
"""A file of the repository, and the page of `docs/` that it is on the site."""
_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)")


def linked(text: str, source: str, page: str) -> str:
    """Return a text with its links as they are on the site.

    Args:
        text: Markdown.
        source: Where it lies in the repository; its links lead from there.
        page: The page that it is on the site, below `docs/` too.
    """

    def link(found: re.Match[str]) -> str:
        target = normpath(join(Path(source).parent.as_posix(), found[1]))
        return f"]({relpath(ELSEWHERE.get(target, target), Path(page).parent.as_posix())}"

    return _LINK.sub(link, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie elsewhere."""
    for source, page in ELSEWHERE.items():
        text = linked((ROOT / source).read_text(), source, page)
        files.append(File.generated(config, page.removeprefix("docs/"), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of `docs/` to the pages of the site."""
    here = f"docs/{page.file.src_uri}"
    return markdown if here in ELSEWHERE.values() else linked(markdown, here, here)
