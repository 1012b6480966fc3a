"""The shape of the product in numbers: `python -m tests.support.shape`.

Lines of code by folder (no blanks, comments, docstrings), and identifiers that have a word which the project's
vocabulary has retired: one word for one thing, and the field's where it has one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("backend", "recovery")

RETIRED = {
    "closing": "watermark",
    "epoch": "interval (of stream time), version (of a micro-batch)",
    "fact": "row",
    "held": "available, stored, waiting",
    "kept": "stored, retained, remaining",
    "ladder": "fallback order",
    "launch": "incarnation",
    "launched": "started",
    "opening": "open shard",
    "package": "snapshot",
    "partial": "accumulator",
    "story": "what it is about",
    "survey": "checkpoint view",
    "told": "what was said: errors, names, progress",
    "turn": "execution",
}
"""Word -> the word to use instead; plurals likewise."""

THE_FIELDS = re.compile(
    r"partial"  # functools
    r"|PackageNotFoundError"  # importlib
    r"|_?UNIX_EPOCH(_DAY)?"
    r"|set_max_file_opening_threads"  # RocksDB
    r"|(\w+_)?(leader|LEADER|PRODUCER)_(epochs?|EPOCHS?)"  # Kafka
)
"""Identifiers in which such a word is a library's, or means what the field means by it."""


def modules() -> Iterator[Path]:
    """Give the product's modules, sorted."""
    for package in PACKAGES:
        yield from sorted((ROOT / package).rglob("*.py"))


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Give each use of a name in a module: variables, attributes, functions, arguments, keywords, imports."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), *([other] if other else []))
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.ImportFrom(module=str(name)):
                yield from name.split(".")


def words(identifier: str) -> set[str]:
    """Split an identifier at `_` and where the case changes.

    >>> sorted(words("_readHeldRows2"))
    ['2', 'held', 'read', 'rows']
    """
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)}


def retired(source: str) -> list[tuple[str, str]]:
    """Give each identifier of a module that has a retired word, with the word, sorted."""
    return sorted(
        {
            (name, word)
            for name in identifiers(ast.parse(source))
            if not THE_FIELDS.fullmatch(name)
            for word in RETIRED
            if words(name) & {word, f"{word}s", f"{word}es", word.removesuffix("y") + "ies"}
        }
    )


def lines_of_code(source: str) -> int:
    """Count the lines that have code.

    >>> lines_of_code('"A docstring."' + "\\n\\n# a comment\\nx = (1,\\n     2)\\n")
    2
    """
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    said: set[int] = set()
    for node in (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)):
        for line in node.body:  # docstrings, of attributes too
            if (
                isinstance(line, ast.Expr)
                and isinstance(line.value, ast.Constant)
                and isinstance(line.value.value, str)
            ):
                said.update(range(line.lineno, (line.end_lineno or line.lineno) + 1))
    nothing = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {at for one in tokens if one.type not in nothing for at in range(one.start[0], one.end[0] + 1)}
    return len(code - said)


def main() -> int:
    """Print both; the exit status is 1 where a retired word is used."""
    lines, found = Counter[str](), 0
    for path in modules():
        source, here = path.read_text(), path.relative_to(ROOT)
        lines[str(here.parent)] += lines_of_code(source)
        for name, word in retired(source):
            found += 1
            print(f"{here}: {name}: not {word!r} but {RETIRED[word]}")
    for folder, count in sorted(lines.items()):
        print(f"{count:7,} {folder}")
    print(f"{lines.total():7,} in all, {found} identifiers with a retired word")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
