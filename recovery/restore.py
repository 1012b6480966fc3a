"""Restore one shard: a new database from the changelog's rows and the replayed messages, proven before it counts.

No Spark in here: the replay job gives the messages as chunks of rows, in any order of chunks, each sorted by key. They
become SST files of bounded size, so a shard whose messages do not fit in memory restores in a small part of it. Then
count and digest of every window are compared with what the window metadata says, and the totals with the commit record.
Only then is the commit row written: a restore that died half-way is a directory without one, and is made again.
"""

from __future__ import annotations

import shutil
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from operator import add, lt
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import xxhash

from backend.batch import OFFSET, PARTITION, STREAM, Proof, Settling
from backend.errors import KeyInvalid, RestoreMismatch
from backend.messages import TIME_BYTES, sorted_rows
from backend.rocks import RocksOptions, RocksStore
from backend.store import REPLAYED, Changes, Region, region_range
from backend.workspace import Workspace
from recovery.changelog.protocol import History
from recovery.planner import replay_ranges
from recovery.pointer import COMMIT_KEY, CommitRecord, encode_record

Rows = tuple[Sequence[bytes], Sequence[bytes]]
"""Keys and values of one chunk, sorted by key."""

RUN_BYTES = 32 * 1024 * 1024
"""Bytes of keys and values that are gathered before they become an SST file."""
METADATA_CHUNK_ROWS = 131_072
_SAMPLE_ROWS = 4096
_PAGE_SAMPLES = 16
_NAMED_DIFFERENCES = 5


class Proving(Protocol):
    """The part of an operator that a restore needs."""

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold according to the window metadata."""


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


def accepted(messages: pa.Table, record: CommitRecord) -> pa.Table:
    """Leave out of replayed messages what the commit did not accept: offsets out of range, and the rejected ones.

    What lies below the bounds is left out by `restore_shard`, by key.

    Args:
        messages: Has `_stream`, `_partition`, `_offset`; may hold other offsets of the same source partitions.
        record: The commit that is restored.
    """
    keep = np.zeros(messages.num_rows, bool)
    stream, partition, offset = (messages[name].to_numpy() for name in (STREAM, PARTITION, OFFSET))
    for (s, p), (start, end) in replay_ranges(record).items():
        here = (stream == s) & (partition == p) & (offset >= start) & (offset < end)
        refused = [at for rs, rp, at in record.rejected if (rs, rp) == (s, p)]
        keep |= here & ~np.isin(offset, refused) if refused else here
    return messages if keep.all() else messages.filter(pa.array(keep))


def above_bounds(rows: Rows, bounds: dict[int, bytes]) -> Rows:
    """Leave out of a chunk of message-store rows what is expired, with the messages of expired index rows.

    Args:
        rows: Messages and their index rows, sorted by key; a message and its index row are in the same chunk.
        bounds: Of the commit that is restored.
    """
    keys, values = list(rows[0]), list(rows[1])
    if not keys:
        return keys, values
    index = bisect_left(keys, region_range(Region.MESSAGE_INDEX)[0])
    expired = bounds.get(Region.MESSAGE_INDEX)
    if expired is not None:
        cut = bisect_left(keys, expired, index)
        gone = {bytes([Region.MESSAGES]) + key[1 + TIME_BYTES :] for key in keys[index:cut]}
        del keys[index:cut], values[index:cut]
        if gone:
            kept = [at for at, key in enumerate(keys) if key not in gone]
            keys, values = [keys[at] for at in kept], [values[at] for at in kept]
    bound = bounds.get(Region.MESSAGES)
    if bound is not None:
        cut = bisect_left(keys, bound)
        del keys[:cut], values[:cut]
    return keys, values


def restore_shard(
    history: History,
    messages: Iterable[Rows],
    operator: Proving,
    directory: Path,
    *,
    options: RocksOptions | None = None,
    run_bytes: int = RUN_BYTES,
) -> Restored:
    """Build a shard's database at a commit and prove it.

    Args:
        history: From the changelog.
        messages: Accepted messages' rows (`Operator.replay_rows`), each chunk sorted by key; what is below the bounds
            is left out here.
        operator: Knows what the windows must hold.
        directory: Where to make the database; must not exist, its parent must. `<directory>.runs` is used besides.
        options: How RocksDB is run.
        run_bytes: Rows gathered in memory before they become a file.

    Returns:
        Totals; the database is closed, durable, and its commit row is the history's record.

    Raises:
        RestoreMismatch: Count or digest of a window, or the totals, differ: the database has no commit row.
        KeyInvalid: A chunk is not sorted.
        ValueError: A chunk holds rows of another region.
    """
    started = time.monotonic()
    record = history.record
    if directory.exists():
        raise FileExistsError(f"a restore needs a new directory: {directory}")
    with RocksStore.open(directory, options=options) as store, _Runs(store, directory, run_bytes) as runs:
        for keys, values in history.chunks(METADATA_CHUNK_ROWS):
            runs.add_whole(keys, values)
        store.write(Changes([], [], record.bounds))
        for chunk in messages:
            runs.add(above_bounds(chunk, record.bounds))
        runs.flush()
        if isinstance(operator, Settling):
            work = Workspace(store, record.bounds)
            operator.settle(work)
            store.write(work.changes())
        proofs = list(operator.proofs(Workspace(store, record.bounds)))
        count = _prove(store, record, proofs, runs.pages())
        store.write(Changes([COMMIT_KEY], [encode_record(record)], record.bounds))
    return Restored(record, history.rows, count, runs.length, len(proofs), time.monotonic() - started)


def check_messages(
    store: RocksStore, record: CommitRecord, proofs: Sequence[Proof], pages: Iterable[bytes] = ()
) -> list[str]:
    """Compare the message store with the window metadata and the commit record, in one pass over the messages.

    Args:
        store: The database.
        record: Its commit.
        proofs: What each window must hold; ranges may overlap.
        pages: Keys at which to cut the pass into pieces that fit in memory, sorted.

    Returns:
        What differs, one sentence each; empty when all is equal.
    """
    found = _measure(store, proofs, pages)
    return _differences(record, proofs, *found)


def _prove(store: RocksStore, record: CommitRecord, proofs: Sequence[Proof], pages: Iterable[bytes]) -> int:
    sums, count, digest = _measure(store, proofs, pages)
    wrong = _differences(record, proofs, sums, count, digest)
    if not wrong:
        return count
    more = f"; and {len(wrong) - _NAMED_DIFFERENCES} more" if len(wrong) > _NAMED_DIFFERENCES else ""
    raise RestoreMismatch(
        "the replayed messages are not the ones that were committed",
        where=f"shard {record.shard}, commit {record.commit.name}",
        why="; ".join(wrong[:_NAMED_DIFFERENCES]) + more,
        command="rewind verify <checkpoint> --against-source; rewind reset <checkpoint> accepts the loss, begins anew",
    )


def _differences(
    record: CommitRecord, proofs: Sequence[Proof], sums: dict[bytes, tuple[int, int]], count: int, digest: int
) -> list[str]:
    wrong = []
    for proof in proofs:
        (low, low_sum), (high, high_sum) = sums[proof.start], sums[max(proof.start, proof.end)]
        if high - low != proof.count:
            wrong.append(f"{proof.label}: {high - low} messages, {proof.count} were committed")
        elif (high_sum - low_sum) % 2**64 != proof.digest:
            wrong.append(f"{proof.label}: {proof.count} messages, as committed, but others")
    if count != record.message_count:
        wrong.append(f"in all {count} messages, {record.message_count} were committed")
    elif digest != record.message_digest:
        wrong.append(f"in all {count} messages, as committed, but others")
    return wrong


def _measure(
    store: RocksStore, proofs: Sequence[Proof], pages: Iterable[bytes]
) -> tuple[dict[bytes, tuple[int, int]], int, int]:
    """Count and sum up the messages below every edge of a proof, and all of them."""
    start, end = region_range(Region.MESSAGES)
    edges = sorted({edge for proof in proofs for edge in (proof.start, max(proof.start, proof.end))})
    sums: dict[bytes, tuple[int, int]] = {}
    count = digest = 0
    for keys, values in _paged(store, start, end, pages):
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, map(add, keys, values)), np.uint64, len(keys))
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        first, last = len(sums), bisect_left(edges, keys[-1] + b"\x00")
        for edge in edges[first:last]:
            at = bisect_left(keys, edge)
            sums[edge] = count + at, (digest + int(running[at])) % 2**64
        count += len(keys)
        digest = (digest + int(running[-1])) % 2**64
    sums.update((edge, (count, digest)) for edge in edges[len(sums) :])
    return sums, count, digest


def _paged(
    store: RocksStore, start: bytes, end: bytes, pages: Iterable[bytes]
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    cuts = [start, *(page for page in pages if start < page < end), end]
    for low, high in pairwise(cuts):
        keys, values = store.scan_arrays(low, high)
        if keys:
            yield keys, values


@dataclass
class _Run:
    """Rows of one region that wait to become a file; `ordered`: they happen to be sorted."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    length: int = 0
    ordered: bool = True


class _Runs:
    """Turns chunks into SST files and applies them; the files are gone at the end."""

    def __init__(self, store: RocksStore, directory: Path, run_bytes: int) -> None:
        self._store = store
        self._scratch = directory.with_name(f"{directory.name}.runs")
        self._run_bytes = run_bytes
        self._open = {int(region): _Run() for region in REPLAYED}
        self._files = 0
        self._samples: list[bytes] = []
        self.length = 0

    def __enter__(self) -> _Runs:
        self._scratch.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._scratch)

    def add(self, rows: Rows) -> None:
        """Take a chunk of message-store rows."""
        keys, values = rows
        if not all(map(lt, keys, islice(keys, 1, None))):
            raise KeyInvalid("a chunk of messages is not sorted by key", why="keys must be strictly increasing")
        at = 0
        for region in sorted(self._open):
            low, high = region_range(region)
            first, last = bisect_left(keys, low), bisect_left(keys, high)
            if first != at:
                raise ValueError(f"a chunk of messages holds another region's key: {keys[at][:16].hex()}")
            if first < last:
                self._extend(self._open[region], keys[first:last], values[first:last])
            at = last
        if at != len(keys):
            raise ValueError(f"a chunk of messages holds another region's key: {keys[at][:16].hex()}")

    def add_whole(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Make a file of sorted rows at once."""
        self.length += _bytes(keys) + _bytes(values)
        self._write(keys, values)

    def flush(self) -> None:
        """Make files of what waits."""
        for run in self._open.values():
            self._close(run)

    def pages(self) -> list[bytes]:
        """Give keys that cut the messages into pieces of bounded size, however the runs overlap."""
        return sorted(self._samples)[_PAGE_SAMPLES::_PAGE_SAMPLES]

    def _extend(self, run: _Run, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        run.ordered = run.ordered and not (run.keys and keys[0] <= run.keys[-1])
        run.keys.extend(keys)
        run.values.extend(values)
        length = _bytes(keys) + _bytes(values)
        run.length += length
        self.length += length
        if run.length >= self._run_bytes:
            self._close(run)

    def _close(self, run: _Run) -> None:
        if run.keys:
            # chunks that overlap become one file: many small overlapping files would be compacted again and again
            keys, values = (run.keys, run.values) if run.ordered else sorted_rows(run.keys, run.values)
            if keys[0][0] == Region.MESSAGES:
                self._samples.extend(keys[::_SAMPLE_ROWS])
            self._write(keys, values)
        run.keys, run.values, run.length, run.ordered = [], [], 0, True

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        path = self._scratch / f"{self._files:08d}.sst"
        self._files += 1
        self._store.confirm(self._store.stage(Changes(keys, values), path))
        path.unlink()


def _bytes(rows: Sequence[bytes]) -> int:
    return sum(map(len, rows))
