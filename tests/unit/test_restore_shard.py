"""A restored shard holds exactly what was committed; else the error names the window, and there is no commit row."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import xxhash

from backend.batch import Position, Proof
from backend.errors import KeyInvalid, RestoreMismatch
from backend.rocks import RocksStore
from backend.store.protocol import Changes
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from recovery.changelog import FileChangelog, History
from recovery.commit.pointer import COMMIT_KEY, Commit, CommitRecord, decode_record
from recovery.restore.build import accepting, restore_shard
from recovery.restore.prove import Tally, check_messages, pages

WINDOW = 10
COMMIT = Commit(4, "c" * 32)


def key_of(time: int, offset: int) -> bytes:
    return b"\x01" + time.to_bytes(8, "big") + offset.to_bytes(8, "big")


def value_of(offset: int) -> bytes:
    return hashlib.sha256(str(offset).encode()).digest()


def digest_of(rows: Iterable[tuple[bytes, bytes]]) -> int:
    return sum(xxhash.xxh3_64(key + value).intdigest() for key, value in rows) % 2**64


class Windows:
    """Tumbling windows: `\\x03 <start>` -> (count, digest) of the messages in `[start, start + 10)`."""

    def proofs(self, work: Workspace) -> Iterator[Proof]:
        for key, value in work.scan(b"\x03", b"\x04"):
            start = int.from_bytes(key[1:], "big")
            count, digest = msgspec.msgpack.decode(value)
            low, high = (b"\x01" + time.to_bytes(8, "big") for time in (start, start + WINDOW))
            yield Proof(f"window [{start}, {start + WINDOW})", low, high, count, digest)


def committed(rows: dict[bytes, bytes], bounds: dict[int, bytes] | None = None, base: Path | None = None) -> History:
    """Log what a commit with these messages would have logged."""
    windows: dict[int, list[tuple[bytes, bytes]]] = {}
    for key, value in rows.items():
        windows.setdefault(int.from_bytes(key[1:9], "big") // WINDOW * WINDOW, []).append((key, value))
    meta = {
        b"\x03" + start.to_bytes(8, "big"): msgspec.msgpack.encode((len(inside), digest_of(inside)))
        for start, inside in windows.items()
    }
    record = CommitRecord(
        shard=0,
        commit=COMMIT,
        parent=None,
        time_ms=0,
        positions=[(0, 0, Position(1000, 0, 0))],
        bounds=bounds or {},
        replay_from=[(0, 0, 0)],
        message_count=len(rows),
        message_digest=digest_of(rows.items()),
    )
    log = FileChangelog(base or "memory://restore-shard")
    keys = sorted(meta)
    log.append(record, Changes(keys, [meta[key] for key in keys]))
    return log.read(0, COMMIT)


def chunks(rows: dict[bytes, bytes], size: int, seed: int = 1) -> list[StoreRows]:
    """Deal rows out to chunks that overlap each other, each sorted."""
    dealt = list(rows)
    random.Random(seed).shuffle(dealt)
    parts = [sorted(dealt[at : at + size]) for at in range(0, len(dealt), size)]
    return [StoreRows.of(part, [rows[key] for key in part]) for part in parts]


def content(path: Path) -> dict[bytes, bytes]:
    with RocksStore.open(path, create=False) as store:
        return dict(store.scan(b"", None))


MESSAGES = {key_of(time, offset): value_of(offset) for offset, time in enumerate([0, 3, 3, 9, 10, 11, 25, 29, 30] * 40)}


@pytest.mark.parametrize("run_bytes", [1, 5_000, 10**9])
def test_everything_is_there_and_the_commit_row_too(tmp_path: Path, run_bytes: int) -> None:
    history = committed(MESSAGES)
    told = restore_shard(history, chunks(MESSAGES, 50), Windows(), tmp_path / "db", run_bytes=run_bytes)
    found = content(tmp_path / "db")
    assert {key: value for key, value in found.items() if key[0] == 1} == MESSAGES
    assert {key: value for key, value in found.items() if key[0] == 3} == dict(
        zip(history.keys.to_pylist(), history.values.to_pylist(), strict=True)
    )
    assert decode_record(found[COMMIT_KEY]) == history.record
    assert (told.messages, told.rows, told.proofs) == (len(MESSAGES), history.rows, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["db"], "nothing else is left"


def test_a_message_twice_is_one(tmp_path: Path) -> None:
    twice = chunks(MESSAGES, 50) + chunks(MESSAGES, 33, seed=2)
    told = restore_shard(committed(MESSAGES), twice, Windows(), tmp_path / "db")
    assert told.messages == len(MESSAGES)


def test_messages_that_were_written_are_not_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> Iterator[tuple[list[bytes], list[bytes]]]:
        raise AssertionError("they were counted where they were written")

    monkeypatch.setattr("recovery.restore.prove.pages", read)
    told = restore_shard(committed(MESSAGES), chunks(MESSAGES, 50), Windows(), tmp_path / "db", run_bytes=5_000)
    assert (told.messages, told.proofs) == (len(MESSAGES), 4)


def test_messages_of_many_windows_are_read_from_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(store: RocksStore, start: bytes, end: bytes) -> Iterator[tuple[list[bytes], list[bytes]]]:
        started.append(start)
        return pages(store, start, end)

    started: list[bytes] = []
    monkeypatch.setattr("recovery.restore.prove.pages", read)
    monkeypatch.setattr("recovery.restore.build.FEW_PROOFS", 3)
    told = restore_shard(committed(MESSAGES), chunks(MESSAGES, 50), Windows(), tmp_path / "db")
    assert (told.messages, told.proofs, started) == (len(MESSAGES), 4, [b"\x01"])


def test_a_message_that_the_changelog_brings_is_one_too_many(tmp_path: Path) -> None:
    history = committed(MESSAGES)
    keys, values = ([*column.to_pylist()] for column in (history.keys, history.values))
    columns = (pa.array([stray, *found], pa.large_binary()) for stray, found in ((key_of(1, 7), keys), (b"", values)))
    error = mismatch(tmp_path, MESSAGES, History(history.record, *columns))
    assert "window [0, 10): 161 messages, 160 were committed" in error.why


class Careless(Windows):
    """Deletes a message that its windows count."""

    def settle(self, work: Workspace) -> None:
        work.delete_many([key_of(25, 6)])


def test_what_was_deleted_behind_a_replay_is_missed(tmp_path: Path) -> None:
    with pytest.raises(RestoreMismatch) as caught:
        restore_shard(committed(MESSAGES), chunks(MESSAGES, 50), Careless(), tmp_path / "db")
    assert "window [20, 30): 79 messages, 80 were committed" in caught.value.why


@pytest.mark.parametrize("seed", range(20))
def test_a_tally_of_parts_in_any_order_is_what_was_counted_one_by_one(seed: int) -> None:
    rng = random.Random(seed)
    rows = {bytes(rng.choices(range(4), k=3)): bytes([rng.randrange(4)]) for _ in range(rng.randrange(1, 60))}
    edges = [bytes(rng.choices(range(4), k=rng.randrange(1, 4))) for _ in range(rng.randrange(0, 20))]
    tally = Tally([Proof("", rng.choice(edges), rng.choice(edges), 0, 0) for _ in edges])
    for part in chunks(rows, rng.randrange(1, 20), seed):
        tally.add(*part.lists())
    assert (tally.count, tally.digest) == (len(rows), digest_of(rows.items()))
    for edge, found in tally.below().items():
        inside = {key: value for key, value in rows.items() if key < edge}
        assert found == (len(inside), digest_of(inside.items()))


def test_files_of_chunks_in_order_of_their_first_keys_do_not_overlap(tmp_path: Path) -> None:
    # two source partitions over the same times, each a chunk for every 300 of its offsets
    rows = {
        key_of(time, 2 * time + partition): value_of(2 * time + partition)
        for partition in (0, 1)
        for time in range(3000)
    }
    partitions = [[key for key in sorted(rows) if key[-1] % 2 == partition] for partition in (0, 1)]
    parts = sorted(keys[at : at + 300] for keys in partitions for at in range(0, 3000, 300))
    given = [StoreRows.of(part, [rows[key] for key in part]) for part in parts]
    told = restore_shard(committed(rows), given, Windows(), tmp_path / "db", run_bytes=30_000)
    assert told.messages == len(rows)
    with RocksStore.open(tmp_path / "db", create=False) as store:
        levels = [int(store.property(f"rocksdb.num-files-at-level{level}") or 0) for level in range(7)]
    assert levels[6] >= 8, (
        "each file of messages lies in the last level, where RocksDB takes what overlaps with nothing"
    )
    assert levels[1:6] == [0] * 5


def mismatch(tmp_path: Path, rows: dict[bytes, bytes], history: History | None = None) -> RestoreMismatch:
    with pytest.raises(RestoreMismatch) as caught:
        restore_shard(history or committed(MESSAGES), chunks(rows, 50), Windows(), tmp_path / "db")
    assert COMMIT_KEY not in content(tmp_path / "db"), "what is not proven is not committed"
    assert caught.value.command
    assert "shard 0" in caught.value.where
    return caught.value


def test_memory_is_bounded_where_small_index_rows_wait_longer_than_their_messages(tmp_path: Path) -> None:
    rows = {key_of(0, offset): bytes([offset % 251]) * 2_000 for offset in range(6_000)}
    bare = pa.total_allocated_bytes()
    taken: list[int] = []

    def made() -> Iterator[StoreRows]:
        for start in range(0, 6_000, 100):
            keys = [key_of(0, offset) for offset in range(start, start + 100)]
            index = [b"\x02" + bytes(8) + key[1:] for key in keys]  # 25 bytes each: all together less than a file
            yield StoreRows.of(keys + index, [rows[key] for key in keys] + [b""] * 100)
            taken.append(pa.total_allocated_bytes() - bare)

    restore_shard(committed(rows), made(), Windows(), tmp_path / "db", run_bytes=300_000)
    found = content(tmp_path / "db")
    assert {key: value for key, value in found.items() if key[0] == 1} == rows
    assert sum(key[0] == 2 for key in found) == 6_000
    assert max(taken) < 3_000_000, "of 12 million bytes"


def test_a_lost_message_is_named_by_its_window(tmp_path: Path) -> None:
    rows = dict(MESSAGES)
    del rows[key_of(25, 6)]
    error = mismatch(tmp_path, rows)
    assert "window [20, 30): 79 messages, 80 were committed" in error.why
    assert "window [0, 10)" not in error.why


def test_the_last_message_counts(tmp_path: Path) -> None:
    rows = dict(MESSAGES)
    del rows[max(rows)]
    assert "window [30, 40): 39 messages, 40 were committed" in mismatch(tmp_path, rows).why


def test_a_message_too_many_is_named(tmp_path: Path) -> None:
    assert "window [10, 20): 81 messages, 80" in mismatch(tmp_path, {**MESSAGES, key_of(12, 999): b""}).why


def test_another_value_is_found_by_the_digest(tmp_path: Path) -> None:
    error = mismatch(tmp_path, {**MESSAGES, key_of(30, 8): b"another"})
    assert "window [30, 40): 40 messages, as committed, but others" in error.why


def test_a_message_outside_all_windows_is_found_by_the_totals(tmp_path: Path) -> None:
    assert "in all 361 messages, 360 were committed" in mismatch(tmp_path, {**MESSAGES, key_of(500, 999): b""}).why


def test_another_message_outside_all_windows_is_found_by_the_digest(tmp_path: Path) -> None:
    rows = {key_of(1, 1): b"kept outside all windows"}
    record = CommitRecord(0, COMMIT, None, 0, [], {}, [], [], [], 1, digest_of(rows.items()))
    empty = pa.array([], pa.large_binary())
    error = mismatch(tmp_path, {key_of(1, 1): b"another"}, History(record, empty, empty))
    assert "in all 1 messages, as committed, but others" in error.why


def test_many_differences_are_counted(tmp_path: Path) -> None:
    rows = {key_of(at * 10, at): b"v" for at in range(20)}
    error = mismatch(tmp_path, {}, committed(rows))
    assert error.why.count("were committed") == 5
    assert "and 16 more" in error.why  # 20 windows and the total


def test_a_restore_that_died_is_made_again_elsewhere(tmp_path: Path) -> None:
    def dying() -> Iterator[StoreRows]:
        yield chunks(MESSAGES, 50)[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_shard(committed(MESSAGES), dying(), Windows(), tmp_path / "db")
    assert COMMIT_KEY not in content(tmp_path / "db")
    with pytest.raises(FileExistsError):
        restore_shard(committed(MESSAGES), chunks(MESSAGES, 50), Windows(), tmp_path / "db")
    restore_shard(committed(MESSAGES), chunks(MESSAGES, 50), Windows(), tmp_path / "again")
    assert COMMIT_KEY in content(tmp_path / "again")


def test_what_is_below_the_bound_is_left_out(tmp_path: Path) -> None:
    bounds = {1: key_of(10, 0)}
    live = {key: value for key, value in MESSAGES.items() if key >= bounds[1]}
    restore_shard(committed(live, bounds), chunks(MESSAGES, 50), Windows(), tmp_path / "db")
    assert {key for key in content(tmp_path / "db") if key[0] == 1} == set(live)


def test_expired_index_rows_take_their_messages_along(tmp_path: Path) -> None:
    # key-first layout: the message key says nothing of time; the index row does
    rows = {b"\x01user-" + bytes([at]) + at.to_bytes(8, "big"): value_of(at) for at in range(100)}
    index = {b"\x02" + (at * 5).to_bytes(8, "big") + key[1:]: b"" for at, key in enumerate(rows)}
    bound = b"\x02" + (250).to_bytes(8, "big")
    live = {key: value for at, (key, value) in enumerate(rows.items()) if at >= 50}

    class NoWindows:
        def proofs(self, work: Workspace) -> Sequence[Proof]:
            return []

    record = CommitRecord(0, COMMIT, None, 0, [], {2: bound}, [], [], [], len(live), digest_of(live.items()))
    empty = pa.array([], pa.large_binary())
    together = [({**{k: rows[k] for k in part}, **{i: b"" for i in index if i[9:] in {k[1:] for k in part}}})
                for part in (list(rows)[:70], list(rows)[70:])]  # fmt: skip
    given = [StoreRows.of(sorted(part), [part[key] for key in sorted(part)]) for part in together]
    restore_shard(History(record, empty, empty), given, NoWindows(), tmp_path / "db")
    found = content(tmp_path / "db")
    assert {key: value for key, value in found.items() if key[0] == 1} == live
    assert {key for key in found if key[0] == 2} == {key for key in index if key >= bound}


def test_rows_of_another_region_and_unsorted_ones_are_refused(tmp_path: Path) -> None:
    for number, keys in enumerate([[b"\x00commit"], [b"\x01a", b"\x03a"], [b"\x40a"]]):
        with pytest.raises(ValueError, match="another region"):
            restore_shard(committed({}), [StoreRows.of(keys, [b""] * len(keys))], Windows(), tmp_path / str(number))
    with pytest.raises(KeyInvalid):
        restore_shard(committed({}), [StoreRows.of([b"\x01b", b"\x01a"], [b"", b""])], Windows(), tmp_path / "db")


def test_without_messages_the_changelog_is_all(tmp_path: Path) -> None:
    restore_shard(committed({}), [], Windows(), tmp_path / "db")
    assert decode_record(content(tmp_path / "db")[COMMIT_KEY]).commit == COMMIT


def test_proofs_that_overlap_are_measured_in_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {key_of(at, at): value_of(at) for at in range(200)}
    with RocksStore.open(tmp_path / "db") as store:
        keys = sorted(rows)
        store.write(Changes(keys, [rows[key] for key in keys]))
        proofs = []
        for start in range(0, 190, 5):  # hopping: 25 wide, every 5
            inside = {
                key: value for key, value in rows.items() if start <= int.from_bytes(key[1:9], "big") < start + 25
            }
            low, high = (b"\x01" + time.to_bytes(8, "big") for time in (start, start + 25))
            proofs.append(Proof(str(start), low, high, len(inside), digest_of(inside.items())))
        record = CommitRecord(0, COMMIT, None, 0, [], {}, [], [], [], len(rows), digest_of(rows.items()))
        assert check_messages(store, record, proofs) == []
        monkeypatch.setattr("recovery.restore.prove._FIRST_PAGE_ROWS", 7)
        assert check_messages(store, record, proofs) == []
        monkeypatch.setattr("recovery.restore.prove.PAGE_BYTES", 1000)
        cut = [len(keys) for keys, _ in pages(store, b"\x01", b"\x02")]
        assert sum(cut) == 200
        assert max(cut) * (17 + 32) <= 1000, "a page is as large as it may be, not as many rows"
        broken = [*proofs[:-1], Proof("odd", proofs[-1].start, proofs[-1].end, 1, 0)]
        assert check_messages(store, record, broken) == ["odd: 15 messages, 1 were committed"]


def test_rejected_and_foreign_offsets_are_left_out() -> None:
    record = CommitRecord(
        shard=0,
        commit=COMMIT,
        parent=None,
        time_ms=0,
        positions=[(0, 0, Position(50, 0, 0)), (0, 1, Position(5, 0, 0)), (1, 0, Position(9, 0, 0))],
        bounds={},
        replay_from=[(0, 0, 47), (0, 1, 3), (1, 0, 9)],
        rejected=[(0, 0, 48), (0, 1, 48), (1, 0, 3)],
    )
    offsets = [(0, 0, at) for at in range(45, 52)] + [(0, 1, at) for at in range(2, 6)] + [(1, 0, 3), (1, 0, 9)]
    table = pa.table(
        {
            "_stream": pa.array([at[0] for at in offsets], pa.uint16()),
            "_partition": pa.array([at[1] for at in offsets], pa.int32()),
            "_offset": pa.array([at[2] for at in offsets], pa.int64()),
        }
    )
    left = [tuple(row.values()) for row in accepting(record)(table).to_pylist()]
    assert left == [(0, 0, 47), (0, 0, 49), (0, 1, 3), (0, 1, 4)]


def older(tmp_path: Path, rows: dict[bytes, bytes]) -> Path:
    """A database at an ancestor: these messages, and metadata that the later commit no longer has."""
    restore_shard(committed(rows), chunks(rows, 50), Windows(), tmp_path / "older")
    with RocksStore.open(tmp_path / "older") as store:
        store.write(Changes([b"\x03" + (10**9).to_bytes(8, "big"), b"\x07clock", b"\x40user"], [b"gone", b"1", b"2"]))
    return tmp_path / "older"


def test_an_older_copy_is_caught_up_with_what_came_since(tmp_path: Path) -> None:
    before = {key: MESSAGES[key] for key in sorted(MESSAGES)[: len(MESSAGES) // 2]}
    since = {key: value for key, value in MESSAGES.items() if key not in before}
    with RocksStore.open(older(tmp_path, before)) as store:
        untouched = dict(store.scan(b"", None))
        told = restore_shard(committed(MESSAGES), chunks(since, 30), Windows(), tmp_path / "db", older=store)
        assert dict(store.scan(b"", None)) == untouched
    restore_shard(committed(MESSAGES), chunks(MESSAGES, 50), Windows(), tmp_path / "whole")
    assert content(tmp_path / "db") == content(tmp_path / "whole")
    assert told.messages == len(MESSAGES)
    assert told.length < sum(len(key) + len(value) for key, value in MESSAGES.items()), "only what came since"


def test_a_message_of_an_older_copy_that_was_not_committed_is_found(tmp_path: Path) -> None:
    copy = older(tmp_path, {key_of(12, 999): b"stray"})
    with RocksStore.open(copy) as store, pytest.raises(RestoreMismatch) as caught:
        restore_shard(committed(MESSAGES), chunks(MESSAGES, 30), Windows(), tmp_path / "db", older=store)
    assert "window [10, 20): 81 messages, 80 were committed" in caught.value.why
    assert COMMIT_KEY not in content(tmp_path / "db")


def test_what_is_not_there_is_not_deleted_range_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each delete of a range is a file of the database; there are 256 regions."""
    ranges: list[bytes] = []
    delete = RocksStore.delete_range

    def noted(store: RocksStore, low: bytes, high: bytes) -> None:
        ranges.append(low)
        delete(store, low, high)

    with RocksStore.open(older(tmp_path, MESSAGES)) as store:
        monkeypatch.setattr(RocksStore, "delete_range", noted)
        restore_shard(committed(MESSAGES), [], Windows(), tmp_path / "db", older=store)
    assert ranges == [b"\x03", b"\x07", b"\x40"]  # the regions of metadata that `older` has


def test_an_older_copy_that_lacks_more_is_refused(tmp_path: Path) -> None:
    before = {key: MESSAGES[key] for key in sorted(MESSAGES)[: len(MESSAGES) // 2]}
    since = {key: value for key, value in MESSAGES.items() if key not in before}
    del before[key_of(3, 1)]
    with RocksStore.open(older(tmp_path, before)) as store, pytest.raises(RestoreMismatch, match="window"):
        restore_shard(committed(MESSAGES), chunks(since, 30), Windows(), tmp_path / "db", older=store)
    assert COMMIT_KEY not in content(tmp_path / "db"), "not even the ancestor's"


def test_what_has_expired_since_is_gone_from_the_older_copy(tmp_path: Path) -> None:
    bounds = {1: key_of(10, 0)}
    live = {key: value for key, value in MESSAGES.items() if key >= bounds[1]}
    with RocksStore.open(older(tmp_path, MESSAGES)) as store:
        restore_shard(committed(live, bounds), [], Windows(), tmp_path / "db", older=store)
    assert {key for key in content(tmp_path / "db") if key[0] == 1} == set(live)


def test_expired_index_rows_take_messages_of_the_older_copy_along(tmp_path: Path) -> None:
    rows = {b"\x01user-" + bytes([at]) + at.to_bytes(8, "big"): value_of(at) for at in range(100)}
    index = {b"\x02" + (at * 5).to_bytes(8, "big") + key[1:]: b"" for at, key in enumerate(rows)}
    live = {key: value for at, (key, value) in enumerate(rows.items()) if at >= 50}

    class NoWindows:
        def proofs(self, work: Workspace) -> Sequence[Proof]:
            return []

    bound = b"\x02" + (250).to_bytes(8, "big")
    record = CommitRecord(0, COMMIT, None, 0, [], {2: bound}, [], [], [], len(live), digest_of(live.items()))
    empty = pa.array([], pa.large_binary())
    with RocksStore.open(tmp_path / "older") as store:
        both = sorted({**rows, **index}.items())
        store.write(Changes([key for key, _ in both], [value for _, value in both]))
        restore_shard(History(record, empty, empty), [], NoWindows(), tmp_path / "db", older=store)
    found = content(tmp_path / "db")
    assert {key: value for key, value in found.items() if key[0] == 1} == live
    assert {key for key in found if key[0] == 2} == {key for key in index if key >= bound}
