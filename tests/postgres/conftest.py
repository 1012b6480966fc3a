"""A PostgreSQL server for the tests: the one of `REWIND_POSTGRES`, or one that is started from an installation here."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NEEDS = (
    "needs PostgreSQL 12 or newer: install it (apt install postgresql), or name a database of your own:"
    " REWIND_POSTGRES=postgresql+psycopg://user:password@host/database"
)


def programs() -> Path | None:
    """Return the directory of `initdb` and `pg_ctl`, the newest there is."""
    found = shutil.which("initdb")
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    return Path(found).resolve().parent if found else installed[-1].parent if installed else None


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """Give the URL of a database; skipped where there is no server, failed where `REWIND_POSTGRES=need`."""
    given, bin_ = os.environ.get("REWIND_POSTGRES", ""), programs()
    if given not in ("", "need"):
        yield given
    elif bin_ is None:
        (pytest.fail if given else pytest.skip)(NEEDS)
    else:
        with tempfile.TemporaryDirectory(prefix="rewind-postgres-") as home:
            yield from started(bin_, Path(home))


def started(bin_: Path, home: Path) -> Iterator[str]:
    """Start a server on a socket in a directory, and end it; PostgreSQL does not run as root, so not as that."""
    other: dict[str, Any] = {"user": "postgres", "group": "postgres"} if os.geteuid() == 0 else {}
    if other:
        shutil.chown(home, **other)

    def run(*command: str) -> None:
        called = [str(bin_ / command[0]), *command[1:]]
        done = subprocess.run(called, check=False, capture_output=True, text=True, cwd=home, **other)
        assert done.returncode == 0, done.stdout + done.stderr

    data = str(home / "data")
    run("initdb", "-D", data, "-U", "rewind", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C")
    options = f"-k {home} -c listen_addresses='' -c fsync=off"
    run("pg_ctl", "-D", data, "-w", "-l", str(home / "log"), "-o", options, "start")
    try:
        yield f"postgresql+psycopg://rewind@/postgres?host={home}"
    finally:
        run("pg_ctl", "-D", data, "-w", "-m", "immediate", "stop")
