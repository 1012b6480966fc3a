"""The disk of one of two shards is taken under the running query: it queues its input, and the query goes on.

Where what it queued is lost too, that is read from the source again.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backend import archive, count, median, policies, stream, sum_, tumbling
from backend.sinks.parquet import ParquetSink
from backend.spark import start as starting
from backend.spark.session.jvm import UNIX_SOCKETS, run_on_tasks
from recovery.queue.seals import read_seal
from recovery.restore.all_shards import Restores
from recovery.restore.replay import DIRECTORY
from recovery.supervise.beside import Beside
from tests.spark.test_moving_shards import expected, found, make
from tests.support.waiting import PATIENCE_S, ended, until

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
        assert "results_file" in frames.columns, "the operator's own tasks write: no second function in the query"
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


class Failing(Taking):
    """Fails once, between the publication and the commit of the first micro-batch that shard 0 has queued."""

    at = LOST_AT + 1

    def publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        shards = super().publish(frames, version)
        if version == self.at:
            raise RuntimeError("the sink is wrong")
        return shards


class FailingLater(Failing):
    """Fails when it is committed that shard 0 has queued."""

    at = LOST_AT + 2


class Sealed(ParquetSink):
    """Keeps what is sealed of each micro-batch when it is published, and what shards decided in it."""

    def __init__(self, out: Path) -> None:
        super().__init__(out / "results", out / "errors")
        self.checkpoint, self.decided, self.sealed = str(out / "checkpoint"), dict[int, Any](), dict[int, Any]()

    def publish(self, frames: Any, version: int) -> list[dict[str, Any]]:
        shards = super().publish(frames, version)
        found = {shard["shard"]: shard["metrics"].get("decision") for shard in shards}
        self.decided[version] = {shard: decision for shard, decision in found.items() if decision is not None}
        self.sealed[version] = {shard: one.value for shard, one in read_seal(self.checkpoint, version).items()}
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
    # what takes less of each micro-batch: workers that come from now on have sockets without TCP, and no process is
    # started for a file
    assert spark.sparkContext._jsc.sc().conf().get(UNIX_SOCKETS) == "true"
    assert (tmp_path / "checkpoint/commits/.0.crc").exists(), "Spark's other way to write it leaves none"
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


def test_a_stop_ends_a_restore_beside_the_query_and_the_next_start_makes_it(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = make(tmp_path / "data", ROWS * BATCHES)
    begun = tmp_path / "begun"

    def for_ever(items: Any) -> Any:
        begun.touch()
        time.sleep(2 * PATIENCE_S)
        yield from items

    with monkeypatch.context() as patch:
        patch.setattr(Restores, "carry_out", lambda run, plans: run_on_tasks(run.spark, [0], for_ever))
        query = job(tmp_path / "data", median("x")).start(
            spark, checkpoint=tmp_path / "checkpoint", sink=Taking(tmp_path), shards=2, trigger="0 seconds",
            local_dir=tmp_path / "local",
        )  # fmt: skip
        until(begun.exists, what="a restore beside the query", alive=lambda: query.is_active)
        stopping = threading.Thread(target=query.stop)
        stopping.start()
        stopping.join(PATIENCE_S)
        assert not stopping.is_alive(), "it waits for a restore that does not end"
    assert query.exception is None
    ended(
        job(tmp_path / "data", median("x")).start(
            spark, checkpoint=tmp_path / "checkpoint",
            sink=ParquetSink(tmp_path / "results", tmp_path / "errors"), shards=2, trigger="0 seconds", until="end",
            local_dir=tmp_path / "local",
        )
    )  # fmt: skip
    assert found(tmp_path / "results") == (expected(messages), 0)


def test_a_start_without_a_queue_of_its_own_seals_what_an_earlier_one_left(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 0 has queued a micro-batch that is out and not committed: it queues again, and adopts, sealed each time."""
    messages = make(tmp_path / "data", ROWS * BATCHES)
    bounds: list[tuple[int, int]] = []

    class Bounded(Beside):
        def __init__(self, restore: Any, most_bytes: int, most_count: int, restoring: Any) -> None:
            bounds.append((most_bytes, most_count))
            super().__init__(restore, most_bytes, most_count, restoring)

    monkeypatch.setattr(starting, "Beside", Bounded)
    spark.conf.set("spark.sql.streaming.minBatchesToRetain", "40")
    try:
        for queue_bytes, sink in ((1 << 20, Failing(tmp_path)), ("off", Sealed(tmp_path))):
            query = job(tmp_path / "data", median("x")).start(
                spark, checkpoint=tmp_path / "checkpoint", sink=sink, shards=2, trigger="0 seconds", until="end",
                local_dir=tmp_path / "local", queue_bytes=queue_bytes,
            )  # fmt: skip
            if queue_bytes != "off":
                with pytest.raises(RuntimeError, match="the sink is wrong"):
                    ended(query)
    finally:
        spark.conf.unset("spark.sql.streaming.minBatchesToRetain")
    ended(query)
    assert bounds == [(1 << 20, 20), (0, 20)], "a queue ends long before Spark forgets where it began"
    assert sink.decided[LOST_AT + 1] == {0: "queued"}
    assert {0: "adopted"} in sink.decided.values()
    assert sink.sealed == sink.decided
    assert found(tmp_path / "results") == (expected(messages), 0)


def test_a_start_knows_since_when_a_shard_queues_though_its_queue_is_gone(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read again for it runs under the options of its own micro-batch."""
    messages = make(tmp_path / "data", ROWS * BATCHES)
    begun: list[Sequence[int]] = []
    terms_of = starting.terms_of

    def noting(job: Any, settled: Any, checkpoint: str, queued: Sequence[int] = ()) -> Any:
        begun.append(queued)
        return terms_of(job, settled, checkpoint, queued)

    monkeypatch.setattr(starting, "terms_of", noting)
    left = tmp_path / "checkpoint" / DIRECTORY / "of a driver that died"
    for sink in (FailingLater(tmp_path), ParquetSink(tmp_path / "results", tmp_path / "errors")):
        query = job(tmp_path / "data", median("x")).start(
            spark, checkpoint=tmp_path / "checkpoint", sink=sink, shards=2, trigger="0 seconds", until="end",
            local_dir=tmp_path / "local",
        )  # fmt: skip
        if isinstance(sink, Failing):
            with pytest.raises(RuntimeError, match="the sink is wrong"):
                ended(query)
            shutil.rmtree(tmp_path / "checkpoint/rewind/queue")
            left.mkdir(parents=True)
    ended(query)
    assert begun == [[], [LOST_AT + 1]]
    assert not left.exists()
    assert found(tmp_path / "results") == (expected(messages), 0)
