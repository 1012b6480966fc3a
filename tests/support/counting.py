"""An operator for tests of the commit protocol: simple enough that its state can be checked by hand.

It stores every message under `<timestamp>_<offset>` (value: its offset as text), counts messages per value of the field
`key` in the aggregates region, and emits the running count of each key a micro-batch touched. Nothing expires.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa

from backend.batch import ERROR_SCHEMA, OFFSET, PARTITION, STREAM, TIME, MicroBatch, Outcome, Proof
from backend.store.protocol import Region, region_range
from backend.store.rows import StoreRows

MASK = 2**64 - 1


def message_key(time: int, stream: int, partition: int, offset: int) -> bytes:
    return (
        bytes([Region.MESSAGES])
        + (time + 2**63).to_bytes(8, "big")
        + stream.to_bytes(2, "big")
        + (partition + 2**31).to_bytes(4, "big")
        + (offset + 2**63).to_bytes(8, "big")
    )


def plain_digest(keys, values) -> int:
    import xxhash

    return sum(xxhash.xxh3_64_intdigest(k + v) for k, v in zip(keys, values, strict=True)) & MASK


class CountingOperator:
    result_schema = pa.schema([pa.field("key", pa.string()), pa.field("count", pa.int64())])
    input_fields = ("key",)
    replays = True

    def process(self, batch: MicroBatch, work) -> Outcome:
        keys, values = self.replay_rows(batch.messages).lists()
        work.put_many(keys, values)
        counts = Counter(batch.messages["key"].to_pylist())
        rows = []
        for key, more in sorted(counts.items()):
            name = bytes([Region.AGGREGATES]) + key.encode()
            total = int(work.get(name) or b"0") + more
            work.put(name, str(total).encode())
            rows.append({"key": key, "count": total})
        state = bytes([Region.OPERATOR]) + b"totals"
        count, digest, first = (int(x) for x in (work.get(state) or b"0 0 -1").split())
        count, digest = count + len(keys), (digest + plain_digest(keys, values)) & MASK
        work.put(state, f"{count} {digest} {first}".encode())
        replay_from = {}
        for stream, partition in batch.after:
            name = bytes([Region.WINDOWS]) + f"{stream}:{partition}".encode()
            known = work.get(name)
            if known is None:
                mine = [
                    o
                    for s, p, o in zip(
                        *(batch.messages[c].to_pylist() for c in (STREAM, PARTITION, OFFSET)), strict=True
                    )
                    if (s, p) == (stream, partition)
                ]
                if not mine:
                    continue
                known = str(min(mine)).encode()
                work.put(name, known)
            replay_from[(stream, partition)] = int(known)
        if batch.drain:
            rows.append({"key": "drained", "count": count})
        return Outcome(
            results=pa.Table.from_pylist(rows, self.result_schema),
            errors=ERROR_SCHEMA.empty_table(),
            replay_from=replay_from,
            message_count=count,
            message_digest=digest,
        )

    def replay_rows(self, messages: pa.Table):
        columns = [np.asarray(messages[c]).tolist() for c in (TIME, STREAM, PARTITION, OFFSET)]
        rows = sorted(
            (message_key(*row), f"{row[3]} {key}".encode())
            for row, key in zip(zip(*columns, strict=True), messages["key"].to_pylist(), strict=True)
        )
        return StoreRows.of([k for k, _ in rows], [v for _, v in rows])

    def proofs(self, work):
        count, digest, _ = (int(x) for x in (work.get(bytes([Region.OPERATOR]) + b"totals") or b"0 0 -1").split())
        start, end = region_range(Region.MESSAGES)
        yield Proof("all messages", start, end, count, digest)

    def describe(self) -> dict[str, object]:
        return {"operator": "counting"}
