"""What tests of windows by number of messages share: cutting, and what the message store must hold."""

from __future__ import annotations

from itertools import pairwise

import pyarrow as pa

from backend.batch import MESSAGE_FIELDS
from backend.messages.rows import digest
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from tests.unit.one_shard import SCHEMA, OneShard, Row


def cut(rows: list[Row], cuts: list[int]) -> list[list[Row]]:
    edges = [0, *sorted(min(c, len(rows)) for c in cuts), len(rows)]
    return [rows[a:b] for a, b in pairwise(edges)]


def check_messages(s: OneShard) -> None:
    """The message store holds what the ledger, the proofs and a settled replay say."""
    assert s.outcome is not None
    work = Workspace(s.store, s.bounds)
    keys, values = work.scan_arrays(bytes([Region.MESSAGES]), bytes([Region.MESSAGES + 1]))
    assert (s.outcome.message_count, s.outcome.message_digest) == (len(keys), digest(keys, values))
    assert sum(proof.count for proof in s.operator.proofs(work)) == len(keys)
    for proof in s.operator.proofs(work):
        found = work.scan_arrays(proof.start, proof.end)
        assert (len(found[0]), digest(*found)) == (proof.count, proof.digest), proof.label


def check_replay(s: OneShard, batches: list[dict[int, list[Row]]]) -> None:
    """Replaying the source from `replay_from` and settling gives the message store back."""
    assert s.outcome is not None
    work = Workspace(s.store, s.bounds)
    before = dict(work.scan(bytes([Region.MESSAGES]), bytes([Region.WINDOWS])))
    work.delete_many(list(before))
    start = s.outcome.replay_from
    columns = [
        (0, partition, offset, time, 0, key, value)
        for partition in (0, 1)
        for batch in batches
        for offset, time, key, value in batch.get(partition, [])
        if (0, partition) in start and offset >= start[0, partition]
    ]
    schema = pa.schema([*MESSAGE_FIELDS, *SCHEMA])
    table = pa.table([pa.array([c[at] for c in columns], f.type) for at, f in enumerate(schema)], schema=schema)
    work.put_many(*s.operator.replay_rows(table).lists())
    s.operator.settle(work)
    assert dict(work.scan(bytes([Region.MESSAGES]), bytes([Region.WINDOWS]))) == before
