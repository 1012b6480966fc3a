"""What the supervisor does when a query fails: restore, start again, or give up, each within bounds."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from backend.errors import HistoryLost, RestoreFailed, StateUnavailable
from backend.sinks.tables import merge_metrics, summary
from recovery import supervisor
from recovery.housekeeping import Housekeeping
from recovery.listener import LoggingListener
from recovery.package import Snapshots
from recovery.pointer import Commit
from recovery.supervisor import QueryPlan, RewindQuery
from recovery.told import Recorder, Try

LATE = "org.apache.spark.SparkException: Python worker failed to connect back."
CRASHED = (
    "Job aborted due to stage failure: Task 0 in stage 5.0 failed 4 times, most recent failure: Lost task 0.3 in stage"
    " 5.0 (TID 12): org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)"
)
LOST = (
    "Job aborted due to stage failure: Task 1 in stage 5.0 failed 4 times, most recent failure: Lost task 1.3 in stage"
    " 5.0 (TID 12) (10.0.0.1 executor 3): ExecutorLostFailure (executor 3 exited caused by one of the running tasks)"
)
GONE = str(HistoryLost("offsets are gone", where="t-0"))
MISSING = str(StateUnavailable("no local state", where="shard 0"))


class Failing:
    """One of Spark's queries: publishes some micro-batches, then fails, or ends well."""

    lastProgress = None  # noqa: N815 - Spark's name
    isActive = False  # noqa: N815 - Spark's name

    def __init__(self, text: str | None) -> None:
        self.text = text

    def exception(self) -> Exception | None:
        return RuntimeError(self.text) if self.text is not None else None

    def stop(self) -> None:
        pass


class Job:
    def __init__(self, failures: list[str | None], restore: Callable[[str], int] = lambda why: 1) -> None:
        self.failures, self.launched, self.restored = list(failures), 0, list[str]()
        self._restore = restore

    def launch(self, publish: Any) -> Any:
        self.launched += 1
        return Failing(self.failures.pop(0))

    def restore(self, why: str) -> int:
        self.restored.append(why)
        return self._restore(why)

    def run(self) -> None:
        plan = QueryPlan(
            spark=None,  # type: ignore[arg-type]
            checkpoint="checkpoint",
            launch=self.launch,
            publish=lambda frames, version: [],
            restore=self.restore,
            drain=lambda: None,
            housekeeping=Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
            shards=1,
        )
        assert RewindQuery(plan).await_termination(30)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.0)


def test_missing_state_is_restored_and_the_query_goes_on() -> None:
    job = Job([MISSING, None])
    job.run()
    assert (job.launched, len(job.restored)) == (2, 1)
    assert "no local state" in job.restored[0]


@pytest.mark.parametrize("text", [LATE, CRASHED, LOST])
def test_a_worker_that_did_not_come_up_or_died_is_tried_again_without_a_restore(text: str) -> None:
    job = Job([text, text, None])
    job.run()
    assert (job.launched, job.restored) == (3, [])


def test_without_progress_the_tries_are_bounded() -> None:
    for text in (LATE, MISSING):
        job = Job([text] * 99)
        with pytest.raises(RestoreFailed, match="4 new starts without progress"):
            job.run()
        assert job.launched == 1 + supervisor.MAX_TRIES


def test_a_restore_that_spark_failed_is_tried_again() -> None:
    tries = iter([RuntimeError(LATE), None])

    def restore(why: str) -> int:
        error = next(tries)
        if error is not None:
            raise error
        return 1

    job = Job([MISSING, MISSING, None], restore)
    job.run()
    assert len(job.restored) == 2


def test_errors_in_user_code_are_not_tried_again() -> None:
    job = Job(["ValueError: the user's own", None])
    with pytest.raises(RuntimeError, match="the user's own"):
        job.run()
    assert (job.launched, job.restored) == (1, [])


@pytest.mark.parametrize(
    ("durations", "committed"),
    [({"addBatch": 3, "triggerExecution": 9}, 7), ({"latestOffset": 1, "triggerExecution": 2}, 6)],
)
def test_a_trigger_without_work_tells_of_no_commit(durations, committed):
    """Spark numbers the progress of an idle trigger like the micro-batch that has not run yet."""

    class Idle:
        lastProgress = {"batchId": 7, "durationMs": durations}  # noqa: N815, RUF012 - Spark's name

    assert supervisor._committed(Idle()) == committed
    assert supervisor._committed(Failing(None)) == -1


def test_partitions_that_come_while_the_query_runs_are_announced_once(caplog):
    def progress(end, start=None):
        control = {"startOffset": None, "endOffset": {"logOffset": 0}}
        return {"sources": [{"startOffset": start, "endOffset": end}, control]}

    query = RewindQuery.__new__(RewindQuery)
    query._partitions = {}
    query._announce(progress('{"t": {"0": 5, "1": 7}}'))
    query._announce(progress({"t": {"0": 9, "1": 7}}))
    assert caplog.text == ""
    for _ in range(2):
        query._announce(progress({"t": {"0": 9, "1": 7, "2": 1}}))
    assert caplog.text.count("topic t has a new partition, 2") == 1
    again = RewindQuery.__new__(RewindQuery)
    again._partitions = {}
    again._announce(progress({"t": {"0": 9, "1": 7, "2": 1, "3": 0}}, start={"t": {"0": 9, "1": 7, "2": 1}}))
    assert caplog.text.count("a new partition, 3") == 1


def test_what_a_shard_tells_of_a_micro_batch_reaches_housekeeping_and_listeners() -> None:
    commit, heard = Commit(3, "a" * 32), Recorder()
    tried = Recorder()
    tried.tries = [Try(0, commit.name, "no local state", "package", failed="a byte is wrong in 3.sst")]
    tried.tries += [Try(0, commit.name, "a byte is wrong in 3.sst", "package", length=900, seconds=0.5)]
    told = json.dumps({"rows": 7, "drained": -1, "commit": commit.name, **tried.metrics()})
    plan = QueryPlan(
        spark=None,  # type: ignore[arg-type]
        checkpoint="checkpoint",
        launch=lambda publish: publish(None, 3) or Failing(None),
        publish=lambda frames, version: [summary(0, 1, 0, merge_metrics([told]))],  # as every sink does
        restore=lambda why: 0,
        drain=lambda: None,
        housekeeping=Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
        shards=1,
        listeners=(heard, LoggingListener()),
    )
    query = RewindQuery(plan)
    assert query.await_termination(30)
    assert list(plan.housekeeping._made[0]) == [commit], "what is pruned is told by it"
    assert heard.tries == tried.tries
    assert (query.progress.rows, query.progress.moves, query.progress.restores) == (7, 1, 0)


class Running(Failing):
    """A query in the middle of a micro-batch that `stop` interrupts: what its sink raised then ends it."""

    def __init__(self, publish: Any, own: str | None = None) -> None:
        super().__init__(own)
        self.isActive, self._publish = True, publish

    def stop(self) -> None:
        try:
            self._publish(None, 0)
        except Exception as error:
            self.text = self.text or traceback.format_exc()
            self.error = error
        self.isActive = False


def stopped(own: str | None = None) -> tuple[RewindQuery, Running]:
    """Start a query whose running action fails as Spark's do when the thread is interrupted, and stop it."""
    made: list[Running] = []

    def launch(publish: Any) -> Any:
        made.append(Running(publish, own))
        return made[-1]

    def publish(frames: Any, version: int) -> list[Any]:
        text = "py4j.protocol.Py4JJavaError: An error occurred while calling o1\n"
        raise RuntimeError(text + "at x\n" * 9000)

    plan = QueryPlan(
        spark=None,  # type: ignore[arg-type]
        checkpoint="checkpoint",
        launch=launch,
        publish=publish,
        restore=lambda why: 0,
        drain=lambda: None,
        housekeeping=Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
        shards=1,
    )
    query = RewindQuery(plan)
    query.stop()
    return query, made[0]


def test_spark_can_read_in_few_characters_that_a_sink_was_interrupted() -> None:
    """The expression is Spark's own (StreamExecution.PROXY_ERROR, Spark 4.2); it needs stack for each character."""
    query, spark_query = stopped()
    found = re.search(
        r"py4j.protocol.Py4JJavaError: An error occurred while calling"
        r"((.|\r\n|\r|\n)*)(java.lang.InterruptedException)",
        str(spark_query.text),
    )
    assert found is not None
    assert len(found[0]) < 200
    assert len(str(spark_query.text)) < 2000, "the JVM's own text is not in it"
    assert query.exception is None


@pytest.mark.parametrize(("text", "kept"), [("no worker", False), (MISSING, False), (GONE, True)])
def test_what_a_stop_interrupts_is_no_failure_of_the_query_but_a_named_error_is(text: str, kept: bool) -> None:
    query, _ = stopped(text)
    assert (query.exception is not None) == kept
    assert query.progress.restores == 0
