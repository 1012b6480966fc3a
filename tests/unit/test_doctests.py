"""The examples in the docstrings of what is pure."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import backend
import recovery


def _modules() -> Iterator[str]:
    for package in (backend, recovery):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found = importlib.util.find_spec(module.name)
            if found is not None and found.origin is not None and ">>> " in Path(found.origin).read_text("utf-8"):
                yield module.name


@pytest.mark.parametrize("name", sorted(_modules()))
def test_examples(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert tried.attempted and not tried.failed
