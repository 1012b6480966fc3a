"""The contract of a changelog over files: on a local path, and on another fsspec filesystem."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from recovery.changelog import Changelog, FileChangelog
from recovery.changelog.file import OWNER
from recovery.files import open_files
from tests.contracts.changelog import ChangelogContract, Make, Own


class TestFileChangelog(ChangelogContract):
    @pytest.fixture(params=["local", "memory"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
        base = str(tmp_path / "log") if request.param == "local" else f"memory://{uuid.uuid4().hex}/log"
        made: list[Changelog] = []
        self.base = base

        def build(owner: str = "") -> Changelog:
            made.append(FileChangelog(base, owner=owner, max_deltas=4, min_base_bytes=10_000))
            return made[-1]

        yield build
        for log in made:
            log.close()

    @pytest.fixture
    def own(self, make: Make) -> Own:
        return make

    def intrude(self, other: FileChangelog) -> None:
        other.files.write(f"{OWNER}{'2' * 32}", [b""])

    def empty(self, shard: int) -> None:
        open_files(self.base).delete_folder(str(shard))
