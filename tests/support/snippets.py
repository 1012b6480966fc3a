"""The Python in README.md and docs/: found, and run as it stands there but for places and ends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_FENCED = re.compile(r"^```python\n(.*?)^```", re.S | re.M)


def snippets() -> dict[str, str]:
    """Return every snippet under `<page>:<number>`, numbers from 1 in each page."""
    found = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]:
        for number, text in enumerate(_FENCED.findall(page.read_text()), 1):
            found[f"{page.relative_to(ROOT).as_posix()}:{number}"] = text
    return found


def run(name: str, given: Mapping[str, Any], replaced: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run a snippet.

    Args:
        name: Of `snippets`.
        given: Names that the page's reader has already.
        replaced: Texts that stand for something of the reader's own, such as a host; each must be there.

    Returns:
        The names afterwards.
    """
    text = snippets()[name]
    for old, new in (replaced or {}).items():
        assert old in text, f"{name} has no {old!r}"
        text = text.replace(old, new)
    names: dict[str, Any] = {"__name__": "snippet", **given}
    exec(compile(text, name, "exec"), names)
    return names
