"""Restore one shard: a new database from the changelog's rows and the replayed messages, proven before it counts.

No Spark in here: the replay job gives the messages as chunks of rows, in any order of chunks, each sorted by key. They
become SST files of bounded size, so a shard whose messages do not fit in memory restores in a small part of it. Count
and digest of every window are compared with what the window metadata says, and the totals with the commit record.
Only then is the commit row written: a restore that died half-way is a directory without one, and is made again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from backend.batch import OFFSET, PARTITION, STREAM, Operator, Settling, SourcePartition
from backend.errors import KeyInvalid
from backend.messages.keys import TIME_BYTES
from backend.rocks import RocksOptions, RocksStore
from backend.store.bounds import reclaim
from backend.store.protocol import REPLAYED, Changes, Region, Seen, region_range, unseen
from backend.store.rows import StoreRows
from backend.store.workspace import Workspace
from recovery.changelog.protocol import History
from recovery.commit.pointer import COMMIT_KEY, CommitRecord, encode_record
from recovery.killpoints import kill_point
from recovery.restore.planner import replay_ranges
from recovery.restore.prove import FEW_PROOFS, Tally, prove

RUN_BYTES = 32 * 1024 * 1024
"""Bytes of keys and values that are gathered before they become an SST file."""
METADATA_CHUNK_ROWS = 131_072
LAST_REGION = 0xFF
"""Beyond every region."""
OPTIONS = RocksOptions(merged_files=4)
"""Where an operator settles, or the proof reads the store, everything is scanned: what overlaps is merged soon."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore came to.

    Attributes:
        record: The commit that the database is at.
        rows: Rows from the changelog.
        messages: Messages in the message store.
        length: Bytes of keys and values written.
        proofs: Windows whose count and digest were compared.
        seconds: How long it took.
    """

    record: CommitRecord
    rows: int
    messages: int
    length: int
    proofs: int
    seconds: float


def accepting(record: CommitRecord) -> Callable[[pa.Table], pa.Table]:
    """Return what leaves out of replayed messages those that a commit did not accept: out of range, or rejected.

    What lies below the bounds is left out by `restore_shard`, by key. The messages have `_stream`, `_partition` and
    `_offset`; there may be other offsets of the same source partitions among them.

    Args:
        record: The commit that is restored.
    """
    rejected: dict[SourcePartition, list[int]] = {}
    for s, p, at in record.rejected:
        rejected.setdefault((s, p), []).append(at)
    ranges = [(key, *ends, np.array(rejected.get(key, []), np.int64)) for key, ends in replay_ranges(record).items()]

    def accepted(messages: pa.Table) -> pa.Table:
        keep = np.zeros(messages.num_rows, bool)
        stream, partition, offset = (messages[name].to_numpy() for name in (STREAM, PARTITION, OFFSET))
        for (s, p), start, end, out in ranges:
            here = (stream == s) & (partition == p) & (offset >= start) & (offset < end)
            keep |= here & ~np.isin(offset, out) if len(out) else here
        return messages if keep.all() else messages.filter(pa.array(keep))

    return accepted


def above_bounds(rows: StoreRows, bounds: dict[int, bytes]) -> StoreRows:
    """Leave out of a chunk of message-store rows what is expired, with the messages of expired index rows.

    Args:
        rows: Messages and their index rows, sorted by key; a message and its index row are in the same chunk.
        bounds: Of the commit that is restored.
    """
    expired = bounds.get(Region.MESSAGE_INDEX)
    if expired is not None:
        index, cut = rows.find(region_range(Region.MESSAGE_INDEX)[0]), rows.find(expired)
        if index < cut:
            entries = rows.part(index, cut).keys.to_pylist()
            gone = pa.array([bytes([Region.MESSAGES]) + key[1 + TIME_BYTES :] for key in entries], pa.large_binary())
            stay = pc.invert(pc.is_in(rows.keys, gone)).to_numpy(zero_copy_only=False)
            stay[index:cut] = False
            rows = StoreRows(rows.keys.filter(pa.array(stay)), rows.values.filter(pa.array(stay)))
    bound = bounds.get(Region.MESSAGES)
    return rows if bound is None else rows.part(rows.find(bound))


def restore_shard(
    history: History,
    messages: Iterable[StoreRows],
    operator: Operator,
    directory: Path,
    *,
    older: RocksStore | None = None,
    run_bytes: int = RUN_BYTES,
) -> Restored:
    """Build a shard's database at a commit and prove it.

    Args:
        history: From the changelog.
        messages: Accepted messages' rows (`Operator.replay_rows`), each chunk sorted by key; what is below the bounds
            is left out here. Any order of chunks will do, that of their first keys is the fastest.
        operator: Knows what the windows must hold.
        directory: Where to make the database; must not exist, its parent must. `<directory>.runs` is used besides.
        older: The shard's database at an ancestor, to catch up with the commit: its messages stay, `messages` are those
            accepted since, everything else is small and comes from the changelog. Open, and not changed: the new
            database shares its files by hard links.
        run_bytes: Rows gathered in memory before they become a file.

    Returns:
        Totals; the database is closed, durable, and its commit row is the history's record.

    Raises:
        RestoreMismatch: Count or digest of a window, or the totals, differ: the database has no commit row.
        KeyInvalid: A chunk is not sorted.
        ValueError: A chunk holds rows of another region.
    """
    started, record, written = time.monotonic(), history.record, None
    if directory.exists():
        raise FileExistsError(f"a restore needs a new directory: {directory}")
    if older is not None:
        older.checkpoint(directory)
    low, high = region_range(Region.MESSAGES)
    with RocksStore.open(directory, create=older is None, options=OPTIONS) as store:
        if older is not None:
            _strip(store, record.bounds)
        with _Runs(store, directory, run_bytes) as runs:
            logged = StoreRows(history.keys, history.values)
            for start in range(0, len(logged), METADATA_CHUNK_ROWS):
                runs.add_whole(logged.part(start, min(start + METADATA_CHUNK_ROWS, len(logged))))
            store.write(Changes([], [], record.bounds))
            proofs = list(operator.proofs(Workspace(store, record.bounds)))
            if older is None and len(proofs) <= FEW_PROOFS and logged.find(low) == logged.find(high):
                written = Tally(proofs)
                runs.seen = written.add
            for chunk in messages:
                runs.add(above_bounds(chunk, record.bounds))
            runs.flush()
            settled = _settled(store, record, operator)
            kill_point("restore_proof", record.commit.version)
            count = prove(store, record, proofs, written if not settled else None)
            kill_point("restore_commit", record.commit.version)
            store.write(Changes([COMMIT_KEY], [encode_record(record)], record.bounds))
    return Restored(record, history.rows, count, runs.length, len(proofs), time.monotonic() - started)


def _strip(store: RocksStore, bounds: dict[int, bytes]) -> None:
    """Leave the messages alone in a copy of an older database, and of them what has not expired since."""
    store.write(Changes([COMMIT_KEY], [None]))  # from here on it is at nothing, until it is proven
    for region in range(Region.COMMIT + 1, LAST_REGION):
        ends = region_range(region)
        if region not in REPLAYED and next(store.scan(*ends), None) is not None:  # each delete is a file
            store.delete_range(*ends)
    expired = bounds.get(Region.MESSAGE_INDEX)
    if expired is not None:
        low = region_range(Region.MESSAGE_INDEX)[0]
        while True:
            keys, _ = store.scan_arrays(low, expired, limit=METADATA_CHUNK_ROWS)
            gone = sorted(bytes([Region.MESSAGES]) + key[1 + TIME_BYTES :] for key in keys)
            store.write(Changes(gone, [None] * len(gone)))
            if len(keys) < METADATA_CHUNK_ROWS:
                break
            low = keys[-1] + b"\x00"
    reclaim(store, bounds)


def _settled(store: RocksStore, record: CommitRecord, operator: Operator) -> bool:
    """Delete replayed messages that no window has; say whether there were any."""
    if not isinstance(operator, Settling):
        return False
    work = Workspace(store, record.bounds)
    operator.settle(work)
    changes = work.changes()
    if changes.keys:
        store.write(changes)
    return bool(changes.keys)


@dataclass
class _Run:
    """Rows of one region that wait to become a file."""

    region: int
    parts: list[StoreRows] = field(default_factory=list)
    length: int = 0


class _Runs:
    """Turns chunks into SST files and applies them; the files are gone at the end.

    Attributes:
        length: Bytes of keys and values.
        seen: Takes the messages that are written.
    """

    def __init__(self, store: RocksStore, directory: Path, run_bytes: int) -> None:
        self._store = store
        self._scratch = directory.with_name(f"{directory.name}.runs")
        self._run_bytes = run_bytes
        self._open = {int(region): _Run(int(region)) for region in REPLAYED}
        self._files = 0
        self.length = 0
        self.seen: Seen = unseen

    def __enter__(self) -> _Runs:
        self._scratch.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._scratch)

    def add(self, rows: StoreRows) -> None:
        """Take a chunk of message-store rows."""
        if not rows.increasing():
            raise KeyInvalid("a chunk of messages is not sorted by key", why="keys must be strictly increasing")
        at = 0
        for region in sorted(self._open):
            start, end = region_range(region)
            if rows.find(start) != at:
                break
            last = rows.find(end)
            if at < last:
                self._extend(self._open[region], rows.part(at, last))
            at = last
        if at != len(rows):
            raise ValueError(f"a chunk of messages holds another region's key: {rows.keys[at].as_py()[:16].hex()}")

    def add_whole(self, rows: StoreRows) -> None:
        """Make a file of sorted rows at once."""
        self.length += rows.nbytes
        self._write(rows)

    def flush(self) -> None:
        """Make files of what waits."""
        for run in self._open.values():
            self._close(run)

    def _extend(self, run: _Run, rows: StoreRows) -> None:
        run.parts.append(rows.detached())
        run.length += rows.nbytes
        self.length += rows.nbytes
        if run.length >= self._run_bytes:
            self._close(run, rows.keys[0].as_py())

    def _close(self, run: _Run, first: bytes | None = None) -> None:
        """Make a file of what waits, or, told the first key of the newest chunk, of what lies below it.

        Where chunks come in order of their first keys, no file overlaps with another then, and RocksDB merges none.
        Where less than half lies below, all becomes a file, so that what waits is bounded: chunks of sessions, or of
        more source partitions than fit into a file side by side, overlap.
        """
        if not run.parts:
            return
        # chunks that overlap become one file: many small overlapping files would be compacted again and again
        rows = StoreRows.joined(run.parts).sorted()
        cut = rows.find(first) if first is not None else len(rows)
        if cut < len(rows) / 2:
            cut = len(rows)
        self._write(rows.part(0, cut), self.seen if run.region == Region.MESSAGES else unseen)
        rest = rows.part(cut)
        run.parts, run.length = [rest.detached()] if len(rest) else [], rest.nbytes

    def _write(self, rows: StoreRows, seen: Seen = unseen) -> None:
        path = self._scratch / f"{self._files:08d}.sst"
        self._files += 1
        self._store.confirm(self._store.stage_columns(rows, path, seen=seen))
        path.unlink()
