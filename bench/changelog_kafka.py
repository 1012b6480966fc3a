"""Reading a shard's changelog from a Kafka topic: `python -m bench.changelog_kafka [--quick] [--records N]`.

The topic holds a base of N records and five deltas that change a twentieth of them each. Shown, each by a changelog
that has seen nothing yet: `read` (topic -> rows in key order, every checksum looked at) and `restore` (the same, into
a new RocksDB database, proven). Records are what lies in the log, base and deltas; CPU is this process's, all threads.
One Kafka message carries a piece of a record of up to 768 KiB, some ten thousand rows: no row passes through Python
before it is written to the database.
"""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from backend.batch import Proof
from backend.store.protocol import Changes
from bench.table import Options, report
from recovery.changelog import History
from recovery.changelog.kafka.log import KafkaChangelog
from recovery.commit.pointer import Commit, CommitRecord
from recovery.restore.build import restore_shard
from recovery.testing.broker import open_broker

DELTAS = 5


class NoMessages:
    """An operator whose windows hold no messages: nothing to replay, nothing to prove."""

    def proofs(self, state: Any) -> Iterator[Proof]:
        """Give none."""
        return iter(())


def record(version: int) -> CommitRecord:
    """Make the record of a commit without messages."""
    parent = Commit(version - 1, "a" * 32) if version else None
    return CommitRecord(0, Commit(version, "a" * 32), parent, version, [], {}, [], [], [], 0, 0)


def row(number: int, version: int) -> tuple[bytes, bytes]:
    """Make a row of a keyed aggregate: window, key, a partial."""
    key = b"\x03" + (number // 1000).to_bytes(8, "big") + b"customer-%06d" % (number % 1000)
    return key, b"%016x" % (number * 2654435761 % 2**64) + version.to_bytes(8, "big")


def fill(log: KafkaChangelog, records: int) -> int:
    """Write the base and the deltas; give the records written."""
    log.append_base(record(0), (row(number, 0) for number in range(records)))
    written = records
    for version in range(1, DELTAS + 1):
        keys, values = zip(*(row(number, version) for number in range(version, records, 20)), strict=True)
        log.append(record(version), Changes(list(keys), list(values)))
        written += len(keys)
    return written


def measure(what: str, records: int, length: int, action: Callable[[], History]) -> dict[str, Any]:
    """Run and time one action, which reads so many records of so many bytes."""
    wall, cpu = time.perf_counter(), time.process_time()
    history = action()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "what": what,
        "records": records,
        "rows": history.rows,
        "MB": length / 1e6,
        "seconds": wall,
        "CPU s": cpu,
        "records/s": round(records / wall),
        "records/CPU s": round(records / cpu),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and report."""
    parser = Options("changelog_kafka", __doc__)
    parser.add_argument("--records", type=int, default=3_000_000)
    options = parser.parse(arguments)
    broker, close = open_broker()
    try:
        topic = f"bench-changelog-{uuid.uuid4().hex[:8]}"
        writer = KafkaChangelog(broker.settings, topic)
        writer.prepare(1)
        records = fill(writer, 20_000 if options.quick else options.records)
        length = sum(entry.length for entry in writer.entries(0))
        writer.rest()
        newest = Commit(DELTAS, "a" * 32)

        def read() -> History:
            log = KafkaChangelog(broker.settings, topic)
            try:
                return log.read(0, newest)
            finally:
                log.rest()

        def restore() -> History:
            history = read()
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                restored = restore_shard(history, (), NoMessages(), Path(scratch) / "db")
            assert restored.rows == history.rows
            return history

        read()  # what comes first finds nothing of the broker's files in memory
        rows = [measure(what, records, length, action) for what, action in (("read", read), ("restore", restore))]
        wanted = 20_000 if options.quick else options.records
        assert all(line["rows"] == wanted for line in rows), rows
        for line in rows:
            print(json.dumps(line), flush=True)
        assert pa.compute.all(pa.compute.is_valid(read().values)).as_py()
    finally:
        close()
    report(
        "changelog-kafka",
        options,
        "Reading a shard's changelog from Kafka, one shard, broker on the same two cores",
        rows,
    )


if __name__ == "__main__":
    main()
