"""The proof of a restored shard: count and digest of every window's messages, and of all of them, in one pass.

The window metadata says what the message store must hold; nothing is taken on trust from the replay. Messages are
counted where they are handed to RocksDB, which writes them to new files; or they are read from the store: where it held
some before, where some were deleted since, where windows are many, and where what was counted does not fit. Either way
it goes piece by piece, however many there are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import add

import numpy as np
import xxhash

from backend.batch import Proof
from backend.errors import RestoreMismatch
from backend.rocks import RocksStore
from backend.store.protocol import Region, region_range
from recovery.commit.pointer import CommitRecord

PAGE_BYTES = 16 * 1024 * 1024
"""Bytes of keys and values that are looked at at once, about."""
_FIRST_PAGE_ROWS = 1024
_PAGE_ROWS = 65_536
_NAMED_DIFFERENCES = 5
FEW_PROOFS = 10_000
"""Each part of the messages is cut at the edges of proofs that lie in it. Where group keys have windows of their own, a
part reaches over most of them: of more proofs than these the store is read, once."""


class Tally:
    """Counts messages, and sums up their hashes, below every edge of what is to be proven.

    Args:
        proofs: What each window must hold; ranges may overlap.
    """

    def __init__(self, proofs: Iterable[Proof]) -> None:
        self._edges = sorted({edge for proof in proofs for edge in (proof.start, max(proof.start, proof.end))})
        # what lies below the first edge, between each two, and from the last one on
        self._counts = np.zeros(len(self._edges) + 1, np.int64)
        self._sums = np.zeros(len(self._edges) + 1, np.uint64)

    def add(self, keys: Sequence[bytes], values: Sequence[bytes]) -> None:
        """Add messages that are sorted by key, one or more; their parts may come in any order."""
        hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, map(add, keys, values)), np.uint64, len(keys))
        running = np.concatenate([np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)])
        first, last = bisect_right(self._edges, keys[0]), bisect_right(self._edges, keys[-1])
        cuts = np.array([0, *(bisect_left(keys, edge) for edge in self._edges[first:last]), len(keys)])
        self._counts[first : last + 1] += np.diff(cuts)
        self._sums[first : last + 1] += np.diff(running[cuts])

    @property
    def count(self) -> int:
        """How many messages there were."""
        return int(self._counts.sum())

    @property
    def digest(self) -> int:
        """The sum of their hashes modulo 2**64."""
        return int(self._sums.sum())

    def below(self) -> dict[bytes, tuple[int, int]]:
        """Give count and digest of the messages below each edge."""
        counts, sums = np.cumsum(self._counts).tolist(), np.cumsum(self._sums).tolist()
        return dict(zip(self._edges, zip(counts, sums, strict=True), strict=False))


def prove(store: RocksStore, record: CommitRecord, proofs: Sequence[Proof], written: Tally | None = None) -> int:
    """Compare the message store with the window metadata and the commit record; give the number of messages.

    Args:
        store: The database.
        record: The commit.
        proofs: What each window must hold.
        written: Of all messages that were written, where the store has no others; None to read what it has. A message
            may have been written twice: where they do not fit, what is in the store decides.

    Raises:
        RestoreMismatch: They differ; names the windows.
    """
    if written is not None and not _differences(record, proofs, written):
        return written.count
    tally = _read(store, record, proofs)
    wrong = _differences(record, proofs, tally)
    if not wrong:
        return tally.count
    more = f"; and {len(wrong) - _NAMED_DIFFERENCES} more" if len(wrong) > _NAMED_DIFFERENCES else ""
    raise RestoreMismatch(
        "the replayed messages are not the ones that were committed",
        where=f"shard {record.shard}, commit {record.commit.name}",
        why="; ".join(wrong[:_NAMED_DIFFERENCES]) + more,
        command="rewind verify <checkpoint> --against-source <module:function>; rewind reset <checkpoint> accepts the"
        " loss, begins anew",
    )


def check_messages(store: RocksStore, record: CommitRecord, proofs: Sequence[Proof]) -> list[str]:
    """Say what differs between the message store and the metadata, one sentence each; empty when all is equal.

    Args:
        store: The database.
        record: Its commit.
        proofs: What each window must hold; ranges may overlap.
    """
    return _differences(record, proofs, _read(store, record, proofs))


def _differences(record: CommitRecord, proofs: Sequence[Proof], tally: Tally) -> list[str]:
    wrong, below = [], tally.below()
    for proof in proofs:
        (low, low_sum), (high, high_sum) = below[proof.start], below[max(proof.start, proof.end)]
        if high - low != proof.count:
            wrong.append(f"{proof.label}: {high - low} messages, {proof.count} were committed")
        elif (high_sum - low_sum) % 2**64 != proof.digest:
            wrong.append(f"{proof.label}: {proof.count} messages, as committed, but others")
    if tally.count != record.message_count:
        wrong.append(f"in all {tally.count} messages, {record.message_count} were committed")
    elif tally.digest != record.message_digest:
        wrong.append(f"in all {tally.count} messages, as committed, but others")
    return wrong


def _read(store: RocksStore, record: CommitRecord, proofs: Sequence[Proof]) -> Tally:
    """Count what the message store holds; not what the bound hides."""
    start, end = region_range(Region.MESSAGES)
    tally = Tally(proofs)
    for keys, values in pages(store, record.bounds.get(Region.MESSAGES, start), end):
        tally.add(keys, values)
    return tally


def pages(store: RocksStore, start: bytes, end: bytes) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Read `[start, end)` in pieces of about `PAGE_BYTES`; none is empty."""
    rows = _FIRST_PAGE_ROWS
    while True:
        keys, values = store.scan_arrays(start, end, limit=rows)
        if keys:
            yield keys, values
        if len(keys) < rows:
            return
        start = keys[-1] + b"\x00"
        length = sum(map(len, keys)) + sum(map(len, values))
        rows = max(1, min(_PAGE_ROWS, rows * PAGE_BYTES // max(1, length)))
