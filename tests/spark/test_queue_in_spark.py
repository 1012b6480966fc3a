"""The disk of one of two shards is taken under the running query: it queues its input, and the query goes on.

Where what it queued is lost too, that is read from the source again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from backend import archive, count, median, policies, stream, sum_, tumbling
from backend.sinks.parquet import ParquetSink
from tests.spark.test_moving_shards import expected, found, make
from tests.support.waiting import ended

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

ROWS, BATCHES, LOST_AT = 300, 16, 3


class Taking(ParquetSink):
    """Takes shard 0's local state once a micro-batch is published, and keeps what each one said.

    Args:
        out: Directory of the test.
        queue_too: Take the entries too that shard 0 has queued by two micro-batches later.
    """

    def __init__(self, out: Path, *, queue_too: bool = False) -> None:
        super().__init__(out / "results", out / "errors")
        self.local, self.said = out / "local", dict[int, dict[int, dict[str, Any]]]()
        self.queue, self.taken = (out / "checkpoint/rewind/queue/0" if queue_too else None), 0

    def publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        shards = super().publish(frames, version)
        self.said[version] = {shard["shard"]: shard["metrics"] for shard in shards}
        if version == LOST_AT:
            [mine] = self.local.glob("*/0")
            shutil.rmtree(mine)
        if version == LOST_AT + 2 and self.queue is not None:
            for path in self.queue.iterdir():
                path.unlink()
                self.taken += 1
        return shards


def job(data: Path, typical: Any) -> Any:
    source = archive(str(data), value="key string, at timestamp, x long", format="typed", max_offsets_per_batch=ROWS)
    windows = stream(source, event_time="at", key="key").window(
        tumbling("10 seconds"), retention="1 hour", max_ahead=None, policies=policies(late="off")
    )
    return windows.aggregate(n=count(), total=sum_("x"), typical=typical)


def test_the_other_shard_goes_on_and_the_lost_one_catches_up(spark: Any, tmp_path: Path) -> None:
    messages = make(tmp_path / "data", ROWS * BATCHES)
    sink = Taking(tmp_path)
    query = job(tmp_path / "data", median("x")).start(
        spark, checkpoint=tmp_path / "checkpoint", sink=sink, shards=2, trigger="0 seconds", until="end",
        local_dir=tmp_path / "local", queue_bytes=1 << 26,
    )  # fmt: skip
    run = str(query.query.runId)
    ended(query)
    assert str(query.query.runId) == run
    assert query.progress.restores == 0
    assert found(tmp_path / "results") == (expected(messages), 0)
    decided = {version: shards.get(0, {}).get("decision") for version, shards in sink.said.items()}
    queued = [version for version, decision in decided.items() if decision == "queued"]
    [adopted] = [version for version, decision in decided.items() if decision == "adopted"]
    assert queued == list(range(LOST_AT + 1, adopted))
    assert sink.said[adopted][0]["fetched_bytes"] == 0  # its snapshot lay where it runs
    assert not any("decision" in shards.get(1, {}) for shards in sink.said.values())
    whole = [shards[1]["rows"] for version, shards in sink.said.items() if version in queued and 1 in shards]
    assert sum(whole) > 0  # the other shard ran every micro-batch in its own
    print(f"shard 0 queued micro-batches {queued[0]} to {queued[-1]} of {len(decided)}, and adopted in {adopted}")


@pytest.mark.parametrize(
    "combined",
    [pytest.param(False, id="each message"), pytest.param(True, id="combined messages", marks=pytest.mark.long)],
)
def test_what_was_queued_and_is_lost_too_is_read_again(
    spark: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, combined: bool
) -> None:
    messages = make(tmp_path / "data", ROWS * BATCHES)
    sink = Taking(tmp_path, queue_too=True)
    query = job(tmp_path / "data", count() if combined else median("x")).start(
        spark, checkpoint=tmp_path / "checkpoint", sink=sink, shards=2, trigger="0 seconds", until="end",
        local_dir=tmp_path / "local",
    )  # fmt: skip
    ended(query)
    assert sink.taken >= 1
    again = [record for record in caplog.records if "is made again from the source" in record.getMessage()]
    assert len(again) >= sink.taken
    assert query.progress.restores == 1
    wanted = expected(messages)
    if combined:
        wanted = {window: (n, total, n) for window, (n, total, _) in wanted.items()}
    assert found(tmp_path / "results") == (wanted, 0)
