"""The proof of a restored shard: count and digest of every window's messages, and of all of them, in one pass.

The window metadata says what the message store must hold; nothing is taken on trust from the replay. The pass reads the
messages piece by piece, so it works however many there are.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import Protocol

import numpy as np
import xxhash

from backend.batch import Proof
from backend.errors import RestoreMismatch
from backend.rocks import RocksStore
from backend.store.protocol import Region, region_range
from backend.store.workspace import Workspace
from recovery.commit.pointer import CommitRecord

PAGE_BYTES = 16 * 1024 * 1024
"""Bytes of keys and values that are looked at at once, about."""
_FIRST_PAGE_ROWS = 1024
_PAGE_ROWS = 65_536
_NAMED_DIFFERENCES = 5


class Proving(Protocol):
    """The part of an operator that a restore needs."""

    def proofs(self, work: Workspace) -> Iterable[Proof]:
        """Give what the message store must hold according to the window metadata."""


def prove(store: RocksStore, record: CommitRecord, proofs: Sequence[Proof]) -> int:
    """Compare the message store with the window metadata and the commit record; give the number of messages.

    Raises:
        RestoreMismatch: They differ; names the windows.
    """
    sums, count, digest = _measure(store, record, proofs)
    wrong = _differences(record, proofs, sums, count, digest)
    if not wrong:
        return count
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
    return _differences(record, proofs, *_measure(store, record, proofs))


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
    store: RocksStore, record: CommitRecord, proofs: Sequence[Proof]
) -> tuple[dict[bytes, tuple[int, int]], int, int]:
    """Count and sum up the messages below every edge of a proof, and all of them; not what the bound hides."""
    start, end = region_range(Region.MESSAGES)
    start = record.bounds.get(Region.MESSAGES, start)
    edges = sorted({edge for proof in proofs for edge in (proof.start, max(proof.start, proof.end))})
    sums: dict[bytes, tuple[int, int]] = {}
    count = digest = 0
    for keys, values in pages(store, start, end):
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


def pages(
    store: RocksStore, start: bytes, end: bytes, page_bytes: int | None = None
) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Read `[start, end)` in pieces of about so many bytes; none is empty."""
    rows = _FIRST_PAGE_ROWS
    while True:
        keys, values = store.scan_arrays(start, end, limit=rows)
        if keys:
            yield keys, values
        if len(keys) < rows:
            return
        start = keys[-1] + b"\x00"
        length = sum(map(len, keys)) + sum(map(len, values))
        rows = max(1, min(_PAGE_ROWS, rows * (page_bytes or PAGE_BYTES) // max(1, length)))
