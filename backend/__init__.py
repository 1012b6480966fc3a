"""Rewind's public names: exactly-once window state for PySpark.

The names and their homes stand once, in `__init__.pyi`, which type checkers read too. Each is imported when it is first
used, so `import backend` stays light in every Python worker.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
_HOME_OF = {
    name.name: str(line.module) for line in _STUB.body if isinstance(line, ast.ImportFrom) for name in line.names
}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605 - a list, made of the stub


def __getattr__(name: str) -> Any:
    """Import a public name from its home at its first use."""
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'backend' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
