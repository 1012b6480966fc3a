"""The contract of a changelog over files: on a local path, and on another fsspec filesystem."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from recovery.changelog import Changelog, FileChangelog, file
from recovery.changelog.file import OWNER
from recovery.changelog.protocol import MOST_DELTAS, READ_BYTES, Entry, Growth
from recovery.files import open_files
from tests.contracts.changelog import ChangelogContract, Make, Own, changes, commit, record
from tests.support.bases import based


class TestFileChangelog(ChangelogContract):
    @pytest.fixture(params=["local", "memory"])
    def make(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
        base = str(tmp_path / "log") if request.param == "local" else f"memory://{uuid.uuid4().hex}/log"
        made: list[Changelog] = []
        self.base = base

        def build(owner: str = "") -> Changelog:
            made.append(based(FileChangelog(base, owner=owner), 4, 10_000))
            return made[-1]

        yield build
        for log in made:
            log.rest()

    @pytest.fixture
    def own(self, make: Make) -> Own:
        return make

    def intrude(self, other: FileChangelog) -> None:
        other.files.write(f"{OWNER}{'2' * 32}", [b""])

    def empty(self, shard: int) -> None:
        open_files(self.base).delete_folder(str(shard))


def test_a_worker_that_goes_on_with_anothers_shard_lists_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing on an object store takes longer than the append. What must be known is in the pointer."""
    log = based(FileChangelog(tmp_path))
    location = ""
    monkeypatch.setattr(log.files, "list", None)
    for version in range(5):
        if version:
            assert log.wants_base(0, commit(version - 1), location) == (version >= 3)
        row = record(version, commit(version - 1) if version else None)
        location = log.append(row, changes({b"\x03a": b"1"})).location
        file._GROWN[log.files.uri].clear()  # the next micro-batch is another process's
    monkeypatch.undo()
    file._GROWN[log.files.uri].clear()
    assert log.wants_base(0, commit(4)), "a pointer of before says nothing: then it is measured"


@pytest.mark.parametrize(
    ("growth", "due"),
    [
        (Growth(deltas=63, delta_bytes=6_300), False),
        (Growth(deltas=64, delta_bytes=6_400), True),
        (Growth(deltas=64, delta_bytes=6_400, base_bytes=64 * READ_BYTES), True),
        (Growth(deltas=64, delta_bytes=6_400, base_bytes=64 * READ_BYTES + 1), False),
        (Growth(deltas=MOST_DELTAS - 1, delta_bytes=1, base_bytes=2**40), False),
        (Growth(deltas=MOST_DELTAS, delta_bytes=1, base_bytes=2**40), True),
        (Growth(deltas=1, delta_bytes=10_001, base_bytes=10_000), True),
        (Growth(deltas=1, delta_bytes=9_999, base_bytes=0), False),
    ],
)
def test_a_long_base_is_not_written_again_for_a_few_small_deltas(growth: Growth, due: bool) -> None:
    assert growth.wants_base(max_deltas=64, min_base_bytes=10_000) is due


def test_what_is_pruned_while_it_is_verified_is_not_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = based(FileChangelog(tmp_path))
    for version in range(6):
        log.append(record(version, commit(version - 1) if version else None), changes({b"\x03a": b"1"}))
    log.append_base(record(4, commit(3)), [(b"\x03a", b"1")])
    listed = log.entries

    def pruned(shard: int) -> Sequence[Entry]:
        found = listed(shard)
        monkeypatch.setattr(log, "entries", listed)
        assert log.prune(shard, [commit(4), commit(5)]), "the driver's housekeeping, between listing and reading"
        return found

    monkeypatch.setattr(log, "entries", pruned)
    assert log.verify(0, commit(5)) == []
    (tmp_path / f"0/{commit(5).name}.delta").unlink()
    assert [error.code for error in log.verify(0, commit(5))] == ["ChangelogDamaged"], "what is needed is missed"
