"""The contract of a changelog over files: on a local path, and on another fsspec filesystem."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.changelog import Changelog, FileChangelog
from tests.contracts.changelog import ChangelogContract, Make


class TestFileChangelog(ChangelogContract):
    @pytest.fixture(params=["local", "memory"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
        base = str(tmp_path / "log") if request.param == "local" else f"memory://{uuid.uuid4().hex}/log"
        made: list[Changelog] = []

        def build() -> Changelog:
            made.append(FileChangelog(base, max_deltas=4, min_base_bytes=10_000))
            return made[-1]

        yield build
        for log in made:
            log.close()
