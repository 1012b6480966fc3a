"""What the supervisor does when a query fails: restore, start again, or give up, each within bounds."""

from __future__ import annotations

import errno
import gc
import json
import logging
import re
import threading
import traceback
import weakref
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from backend.boundary import CrossedError, crossing, user_code
from backend.errors import (
    AccessRefused,
    ChangelogUnavailable,
    CheckpointTaken,
    HistoryLost,
    ManifestMismatch,
    QueryStopped,
    RestoreFailed,
    RewindError,
    SinkUnavailable,
    SourceDamaged,
    SourceUnavailable,
    SparkUnavailable,
    StateUnavailable,
    StorageFailed,
    UserCodeFailed,
)
from backend.sinks.tables import merge_metrics, summary
from backend.spark import start
from backend.spark.pack.routing import grouping_values
from backend.store.storage import storage_failed
from recovery import failures
from recovery.commit.lease import DIRECTORY, leased
from recovery.commit.manifest import Manifest, write_manifest
from recovery.commit.pointer import Commit, Pointer, RestoringPointer, encode
from recovery.failures import Kind, Link, QueryFailed, java_chain, read
from recovery.files import open_files
from recovery.listener import LoggingListener
from recovery.restore.tries import Recorder, Try
from recovery.snapshots.publisher import Snapshots
from recovery.supervise import patience, supervisor
from recovery.supervise.beside import Beside
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.supervisor import Progress, QueryPlan, RewindQuery
from tests.support.heard import Heard
from tests.support.quick_java import PATIENCE_S

SPARK = "org.apache.spark.SparkException"
NO_FILESYSTEM = "org.apache.hadoop.fs.UnsupportedFileSystemException"
LATE = QueryFailed(
    "",
    (
        Link(SPARK, "Python worker failed to connect back."),
        Link("java.net.SocketTimeoutException", "Timed out while waiting for the worker", io=True),
    ),
)
CRASHED = QueryFailed(
    "",
    (
        Link(SPARK, "Python worker exited unexpectedly (crashed)."),
        Link("java.io.IOException", "Broken pipe", io=True),
    ),
)
RUNNER = QueryFailed(
    "", (Link("org.apache.spark.sql.streaming.StreamingQueryException", "[STREAM_FAILED]"), Link("x.EOF", "", io=True))
)
LOST = QueryFailed(
    "",
    (
        Link(
            SPARK,
            "Job aborted due to stage failure: Task 1 in stage 5.0 failed 4 times, most recent failure: Lost task 1.3"
            " in stage 5.0 (TID 12) (10.0.0.1 executor 3): ExecutorLostFailure (executor 3 exited caused by one of the"
            " running tasks) Reason: Remote RPC client disassociated.",
        ),
    ),
)
STALLED = QueryFailed(
    "",
    (
        Link(
            SPARK,
            "Job aborted due to stage failure: Task 1 in stage 5.0 failed 1 times, most recent failure: Lost task 1.0"
            " in stage 5.0 (TID 12) (10.0.0.1 executor 3): java.util.concurrent.TimeoutException: Cannot fetch record"
            " for offset 7 in 120000 milliseconds",
        ),
    ),
)
FULL = StorageFailed("there is no room to write", where="/checkpoint", why="[Errno 28]", command="make room there")
GONE = HistoryLost("offsets are gone", where="t-0")
MISSING = StateUnavailable("no local state", where="shard 0")


class Failing:
    """One of Spark's queries: publishes some micro-batches, then fails, or ends well."""

    lastProgress = None  # noqa: N815 - Spark's name
    isActive = False  # noqa: N815 - Spark's name

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def exception(self) -> Exception | None:
        return self.error

    def stop(self) -> None:
        pass


class Job:
    def __init__(
        self,
        failures: list[Exception | None],
        restore: Callable[[str], int] = lambda why: 1,
        launches: list[Exception | None] | None = None,
    ) -> None:
        self.failures, self.launched, self.restored = list(failures), 0, list[str]()
        self._restore, self._launches = restore, list(launches or [])

    def launch(self, publish: Any) -> Any:
        self.launched += 1
        error = self._launches.pop(0) if self._launches else None
        if error is not None:
            raise error
        return Failing(self.failures.pop(0))

    def restore(self, why: str) -> int:
        self.restored.append(why)
        return self._restore(why)

    def run(self) -> None:
        plan = QueryPlan(
            lease=Leased(),  # type: ignore[arg-type]
            checkpoint="checkpoint",
            start_query=self.launch,
            publish=lambda frames, version: [],
            restore=self.restore,
            drain=lambda: 1,
            drain_of=lambda version: 1,
            housekeeping=Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
            shards=1,
            patience_s=0.0,
        )
        query = RewindQuery(plan)
        self.progress = query.progress
        assert query.await_termination(30)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.0)


def test_missing_state_is_restored_and_the_query_goes_on() -> None:
    job = Job([MISSING, None])
    job.run()
    assert (job.launched, len(job.restored)) == (2, 1)
    assert "no local state" in job.restored[0]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("ShuffleMapStage 4 (call at F.java:1) has failed the maximum allowable number of times: 4. Most", Kind.PASSES),
        (
            "ShuffleMapStage 4 (name=call at F.java:1) has been resubmitted for the maximum allowable number of times:"
            " 8, which is the max value of config",
            Kind.PASSES,
        ),
        ("ResultStage 5 (x) has exceeded the maximum allowable total stage attempts: 16. Most recent", Kind.PASSES),
        (
            "A shuffle map stage with indeterminate output was failed and retried. However, Spark cannot rollback the"
            " ResultStage 5 to re-process the input data, and has to fail this job. Please eliminate the indeterminacy"
            " by checkpointing the RDD before repartition and try again.",
            Kind.PASSES,
        ),
        (
            "Task with indeterminate results from old attempt succeeded, aborting the stage ResultStage 5 to ensure"
            " data correctness.",
            Kind.PASSES,
        ),
        ("cannot rollback a running result stage, please re-run the query to ensure data correctness", Kind.PASSES),
        ("cannot rollback completed result stages HashSet(5), please re-run the query to ensure data", Kind.PASSES),
        ("Task not serializable: A shuffle map stage with indeterminate output was failed and retried.", Kind.FINAL),
    ],
)
def test_a_stage_that_cannot_be_run_again_alone_is_run_with_its_micro_batch(said: str, kind: Kind) -> None:
    whole = f"Job aborted due to stage failure: {said}\nDriver stacktrace:"
    assert read(QueryFailed("", (Link(SPARK, whole),))).kind is kind
    assert read(QueryFailed("", (Link(SPARK, f"x {whole}"),))).kind is Kind.FINAL, "its beginning tells"


@pytest.mark.parametrize("error", [LATE, CRASHED, RUNNER, LOST, STALLED, FULL])
def test_what_died_or_did_not_come_up_is_tried_again_without_a_restore(error: Exception) -> None:
    job = Job([error, error, None])
    job.run()
    assert (job.launched, job.restored) == (3, [])


@pytest.mark.parametrize(
    ("error", "named", "words"),
    [
        (LATE, SparkUnavailable, "connect back.*tried 5 times.*load"),
        (FULL, StorageFailed, "no room.*tried 5 times.*make room there"),
        (MISSING, RestoreFailed, "4 restores without progress.*rewind verify"),
    ],
)
def test_without_progress_and_patience_the_tries_are_bounded_and_the_error_fits(error, named, words) -> None:
    job = Job([error] * 99)
    with pytest.raises(named, match=words):
        job.run()
    assert job.launched == 5


def test_a_launch_that_fails_is_tried_again_and_one_that_is_wrong_is_not() -> None:
    job = Job([CRASHED, None], launches=[LATE, None, LATE, FULL])
    job.run()
    assert job.launched == 5
    for launches in ([ValueError("option")], [LATE, ValueError("option")], [None, ValueError("option")]):
        job = Job([CRASHED, None], launches=launches)
        with pytest.raises(ValueError, match="option"):
            job.run()
        assert job.launched == len(launches)


def test_an_error_inside_a_restore_reaches_the_user_by_its_name() -> None:
    def restore(why: str) -> int:
        def build() -> None:
            raise HistoryLost("offsets are gone", where="t-0", command="put them back")

        try:
            crossing(build)()
        except CrossedError:  # as Spark brings a task's exception to the driver
            raise RuntimeError(f"An error occurred while calling collect\n{traceback.format_exc()}") from None
        raise AssertionError

    with pytest.raises(HistoryLost, match=r"^\[rewind:HistoryLost\] offsets are gone; where: t-0; next: put") as caught:
        Job([MISSING, None], restore).run()
    assert caught.value.command == "put them back"


@pytest.mark.parametrize(
    "said",
    [
        "[rewind:StateUnavailable] no local state",
        "x\nbackend.errors.HistoryLost: [rewind:HistoryLost] gone; next: rewind reset checkpoint --yes",
        "Python worker exited unexpectedly (crashed)",
        "Job aborted due to stage failure: Task 1 in stage 5.0 failed 4 times, most recent failure: Lost task 1.3 in"
        " stage 5.0 (TID 12) (10.0.0.1 executor 3): ExecutorLostFailure (executor 3 exited)",
        "[KAFKA_DATA_LOSS.START_OFFSET_RESET] Reason: gone",
        '[rewind-mark-1 0] {"code": "StateUnavailable", "what": "", "where": "", "why": "", "command": ""}',
    ],
)
def test_what_a_function_of_the_user_says_decides_nothing(said: str) -> None:
    def function() -> None:
        with user_code("the function"):
            raise ValueError(said)

    for raised in (function, crossing(function)):
        job = Job([_python_exception(raised), None])
        with pytest.raises(UserCodeFailed, match="the function raised ValueError") as caught:
            job.run()
        assert "\n" not in str(caught.value)
        assert (job.launched, job.restored) == (1, [])

    def bare() -> None:  # as where no wrapper of ours stands
        raise ValueError(said)

    job = Job([_python_exception(bare), None])
    with pytest.raises(QueryFailed):
        job.run()
    assert (job.launched, job.restored) == (1, [])


def _python_exception(raised: Callable[[], object]) -> Exception:
    """Make what Spark says of a task whose Python code raised, with the pipe to its worker broken too."""
    try:
        raised()
    except RewindError as error:
        return error  # in the driver itself, as of a sink's function
    except Exception:
        text = traceback.format_exc()
    aborted = (
        "Job aborted due to stage failure: Task 0 in stage 5.0 failed 1 times, most recent failure: Lost task 0.0 in"
        f" stage 5.0 (TID 7) (host executor driver): org.apache.spark.api.python.PythonException: {text}\n\tat java"
    )
    links = (Link(SPARK, aborted), Link("org.apache.spark.api.python.PythonException", text), Link("x", "", io=True))
    return QueryFailed("", links)


def test_patience_is_a_duration_that_progress_begins_anew(caplog) -> None:
    now = [0.0]
    waits = patience.Patience(60.0, "checkpoint", clock=lambda: now[0])
    failure = read(LATE)
    for _ in range(9):  # at 0, 7, ..., 56 seconds
        waits.after(failure, 4)
        now[0] += 7.0
    waits.after(failure, 5)  # at 63 seconds: too late, but a micro-batch was committed
    assert caplog.text.count("given up in 60 s") == 2
    for _ in range(3):  # four new starts are made in any case
        now[0] += 30.0
        waits.after(failure, 5)
    with pytest.raises(SparkUnavailable, match="tried 5 times in 90 s"):
        waits.after(failure, 5)


def test_failures_long_ago_count_no_more_once_the_query_ran_and_found_nothing() -> None:
    """A topic that is quiet at night: away for a second, three hours without a message, and away again."""
    now = [0.0]
    waits = patience.Patience(600.0, "checkpoint", clock=lambda: now[0])
    away = read(SourceUnavailable("no broker answers", where="host:9092"))
    waits.after(away, 41)
    waits.healthy()
    now[0] += 3 * 3600.0
    for _ in range(9):
        waits.after(away, 41)
        now[0] += 60.0
    with pytest.raises(SourceUnavailable, match=r"tried 1\d times in 6\d\d s"):
        for _ in range(9):
            waits.after(away, 41)
            now[0] += 60.0


class Stubborn(Failing):
    """Runs until it was asked a few times to stop: Spark's own bound on a stop runs out before."""

    def __init__(self, asked: int, reports: list[dict[str, Any]] | None = None) -> None:
        super().__init__(None)
        self.isActive, self.left, self.reports = True, asked, reports or []

    @property
    def lastProgress(self) -> Any:
        return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0] if self.reports else None

    def stop(self) -> None:
        self.left -= 1
        if self.left > 0:
            raise RuntimeError("[STREAMING_STOP_TIMEOUT] the stream did not stop in 60 seconds")
        self.isActive = False


def followed(monkeypatch: pytest.MonkeyPatch, query: Any, raised: Exception) -> tuple[Job, Any]:
    """Run a job whose first query goes on while the supervisor finds something wrong; give it and what ended it."""
    job, queries, looks = Job([]), [query, Failing(None)], [raised]
    monkeypatch.setattr(job, "launch", lambda publish: queries.pop(0))

    def look(committed: int) -> None:
        if looks:
            raise looks.pop()

    monkeypatch.setattr(Beside, "look", lambda self, committed: look(committed))
    try:
        job.run()
    except Exception as error:
        return job, error
    return job, None


def test_a_query_that_stops_late_is_restored_when_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    job, error = followed(monkeypatch, Stubborn(3), MISSING)
    assert error is None
    assert len(job.restored) == 1


def test_what_ends_a_query_that_does_not_stop_keeps_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STOP_S", 0.2)
    job, error = followed(monkeypatch, Stubborn(10_000), CheckpointTaken("a newer start has it", where="checkpoint"))
    assert isinstance(error, CheckpointTaken)
    job, error = followed(monkeypatch, Stubborn(10_000), MISSING)
    assert "STREAMING_STOP_TIMEOUT" in str(error)
    assert job.restored == [], "nothing is restored under a query that runs"


def test_a_trigger_that_found_nothing_is_told_to_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(patience.Patience, "healthy", lambda self: told.append(1))
    reports = [{"batchId": 7, "durationMs": {"addBatch": 3}, "sources": []}] * 3
    followed(monkeypatch, Stubborn(1, reports), GONE)
    assert not told
    idle = [{"batchId": 7, "durationMs": {"latestOffset": 1}, "sources": []}]
    followed(monkeypatch, Stubborn(1, idle), GONE)
    assert told


class Published(Failing):
    """Publishes micro-batches, each some looks after the one before was reported; counts what it is asked."""

    def __init__(self, publish: Callable[[Any, int], None]) -> None:
        super().__init__(None)
        self.publish, self.looks, self.version, self.at, self.asked = publish, 0, -1, 0, list[int]()

    @property
    def isActive(self) -> bool:
        self.looks += 1
        if self.looks in (5, 35):
            self.version, self.at = self.version + 1, self.looks
            self.publish(None, self.version)
        return self.looks < 45

    @property
    def lastProgress(self) -> Any:
        self.asked.append(self.looks)
        out = self.version - (self.looks < self.at + 2)
        return {"batchId": out, "durationMs": {"addBatch": 1}, "sources": []} if out >= 0 else None


def test_sparks_last_report_is_asked_for_where_a_micro_batch_is_out_and_now_and_then(monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "POLL_S", 0.0)
    made: list[Published] = []
    seen: list[int] = []
    beside = SimpleNamespace(
        shards={}, pace=lambda stopped: None, look=seen.append, join=lambda *_: None, published=lambda *_: None
    )
    plan = one_shard(start_query=lambda publish: made.append(Published(publish)) or made[-1], beside=beside)  # type: ignore[func-returns-value]
    query = RewindQuery(plan)
    assert query.await_termination(PATIENCE_S)
    assert made[0].asked == [1, 5, 6, 7, 21, 35, 36, 37, 41, 45], "the last one at its end"
    assert seen == [-1] * 6 + [0] * 30 + [1] * 8, "a commit is seen at the first look after its report"


def test_pauses_grow_to_half_a_minute(monkeypatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.5)
    waits = patience.Patience(600.0, "checkpoint", clock=lambda: 0.0)
    assert [waits.after(read(LATE), -1) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_restore_that_fails_for_what_passes_is_waited_for(monkeypatch) -> None:
    """A broker that is away at a restore: as many tries as patience has room for, and at its end its own name."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.5)
    now = [0.0]
    waits = patience.Patience(60.0, "checkpoint", clock=lambda: now[0])
    assert waits.after(read(MISSING), 4) == 0.0
    away = replace(read(SourceUnavailable("no broker answers", where="host:9092")), kind=Kind.RESTORE)
    for _ in range(9):
        assert waits.after(away, 4) > 0.0
        now[0] += 7.0
    assert waits.after(read(MISSING), 5) == 0.0, "a micro-batch was committed"
    now[0] += 61.0
    with pytest.raises(SourceUnavailable, match=r"no broker answers.*tried 5 times in 61 s"):
        for _ in range(9):
            waits.after(away, 5)


def test_a_restore_that_spark_failed_is_tried_again() -> None:
    tries = iter([LATE, None])

    def restore(why: str) -> int:
        error = next(tries)
        if error is not None:
            raise error
        return 1

    job = Job([MISSING, None], restore)
    job.run()
    assert (job.launched, len(job.restored)) == (2, 2)
    said = r"the query failed: .*; next try in 0\.0 s, given up in 0 s unless it gets on"
    assert re.fullmatch(said, job.progress.waiting), "no micro-batch has come since"


class Thrown:
    """An exception of the JVM, with the classes that it extends."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds

    def getClass(self) -> Any:
        return self

    def getName(self) -> str:
        return self.kinds[0]

    def getSuperclass(self) -> Any:
        return Thrown(*self.kinds[1:]) if self.kinds[1:] else None

    def getMessage(self) -> str:
        return "said"

    def getCause(self) -> None:
        return None


KAFKA = "org.apache.kafka.common.errors."


@pytest.mark.parametrize(
    ("kinds", "kind", "named"),
    [
        (["NotCoordinatorException", "RetriableException", "ApiException"], Kind.PASSES, None),
        (["NotLeaderOrFollowerException", "InvalidMetadataException", "RetriableException"], Kind.PASSES, None),
        (["RecordTooLargeException", "ApiException"], Kind.FINAL, None),
        (["SaslAuthenticationException", "AuthenticationException", "ApiException"], Kind.FINAL, AccessRefused),
        (["TopicAuthorizationException", "AuthorizationException", "ApiException"], Kind.FINAL, AccessRefused),
    ],
)
def test_what_the_connectors_client_threw_is_told_by_its_classes(monkeypatch, kinds, kind, named) -> None:
    monkeypatch.setattr(failures, "gateway", lambda: None)
    monkeypatch.setattr("py4j.java_gateway.is_instance_of", lambda *_: False)
    links = java_chain(Thrown(*[KAFKA + one for one in kinds], "java.lang.RuntimeException", "java.lang.Object"))
    found = read(QueryFailed("", (Link(SPARK, "outer"), *links)))
    assert found.kind is kind
    assert type(found.error) is (named or QueryFailed)


def test_what_only_calls_itself_kafkas_is_not_kafkas(monkeypatch) -> None:
    monkeypatch.setattr(failures, "gateway", lambda: None)
    monkeypatch.setattr("py4j.java_gateway.is_instance_of", lambda *_: False)
    links = java_chain(Thrown("mine.RetriableException", f"{KAFKA}RetriableException", "java.lang.Object"))
    assert read(QueryFailed("", links)).kind is Kind.FINAL


@pytest.mark.parametrize(
    "error",
    [
        SourceUnavailable("away"),
        SinkUnavailable("away"),
        ChangelogUnavailable("away"),
        StorageFailed("away"),
        QueryFailed("away", (Link("java.io.IOException", "away", io=True),)),
    ],
)
def test_the_start_of_a_query_that_has_run_waits_and_holds_nothing_meanwhile(monkeypatch, caplog, error) -> None:
    taken: list[str] = []
    given: list[bool] = []
    tries = iter([error, error, None])

    def plan(*arguments: Any) -> Any:
        *_, had_run, stack = arguments
        given.append(had_run)
        taken.append("taken")
        stack.push(lambda *_: taken.append("given back"))
        failure = next(tries)
        if failure is not None:
            raise failure
        return "plan"

    def supervised(given: Any) -> Any:
        taken.append("runs")
        return given

    monkeypatch.setattr(start, "_plan", plan)
    monkeypatch.setattr(start, "RewindQuery", supervised)
    monkeypatch.setattr(start, "_spark_has_committed", lambda _: True)
    monkeypatch.setattr(start, "check_not_connect", lambda _: None)
    options = start.StartOptions(patience="1 minute")
    nothing = cast(Any, None)
    assert start.start(nothing, nothing, "checkpoint", nothing, options) == "plan"
    assert taken[:4] == ["taken", "given back"] * 2
    assert taken[4:6] == ["taken", "runs"]
    assert caplog.text.count("the query does not start: ") == 2
    forbidden = storage_failed(PermissionError(errno.EACCES, "not yours"), "/new/results")
    for final in (ValueError("a wrong option"), forbidden, QueryFailed("", (Link(NO_FILESYSTEM, "gs", io=True),))):
        tries = iter([final])
        with pytest.raises(type(final)):
            start.start(nothing, nothing, "checkpoint", nothing, options)
    tries, there = iter([error, None]), iter([True])
    monkeypatch.setattr(start, "_spark_has_committed", lambda _: next(there))
    assert start.start(nothing, nothing, "checkpoint", nothing, options) == "plan"
    assert given[-2:] == [False, True], "each try is told whether the query had run"
    tries = iter([error])
    monkeypatch.setattr(start, "_spark_has_committed", lambda _: False)
    with pytest.raises(type(error), match="away"):
        start.start(nothing, nothing, "checkpoint", nothing, options)


def test_a_checkpoint_that_is_away_is_no_new_one(monkeypatch) -> None:
    """Its filesystem is not mounted: a query that began anew there would give all of its input again."""
    monkeypatch.setattr(start, "_spark_has_committed", lambda _: False)
    assert not start._is_used("checkpoint", was=False)
    with pytest.raises(StorageFailed, match="the checkpoint that was here is not here any more"):
        start._is_used("checkpoint", was=True)


@pytest.mark.parametrize(
    ("given", "used"), [("state", "{here}/state"), ("/a/b", "/a/b"), ("$DISK/state", "$DISK/state")]
)
def test_a_relative_local_dir_means_what_it_meant_when_it_was_given(given, used, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    assert str(start._local_dir(start.StartOptions(local_dir=given))) == used.format(here=tmp_path)


def test_a_changed_job_is_refused_before_its_changelog_and_sources_are_asked(monkeypatch, tmp_path) -> None:
    """With another number of shards than a Kafka changelog has partitions, none are to be added to it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("changelog: the topic 'log' has 4 partitions; 8 are needed")

    monkeypatch.setattr(start, "open_changelog", lambda *_: SimpleNamespace(check=refuse))
    monkeypatch.setattr(start, "_begin_sink", lambda *_: None)
    monkeypatch.setattr(start, "queue_limit", lambda *_: None)
    entries = {"query": "q", "changelog": "kafka://h:1/log", "topics": {}}
    stored = Manifest(4, grouping_values(4), entries)
    write_manifest(str(tmp_path), stored)
    job = SimpleNamespace(shards=8, grouping=grouping_values(8), operator=None, check_sources=refuse)
    options, nothing = start.StartOptions(shards=8, changelog="kafka://h:1/log"), cast(Any, None)
    with pytest.raises(ManifestMismatch, match="shards: was 4, is 8"):
        start._open(nothing, str(tmp_path), nothing, options, cast(Any, job), entries, stored, True, nothing)


@pytest.mark.parametrize(
    ("first", "moment", "done"),
    [
        (True, "look", []),
        (True, "record", ["forget", "record"]),
        (True, "prepare", ["forget", "record", "prepare"]),
        (True, None, ["forget", "record", "prepare", "open"]),
        (False, "look", []),
        (False, "open", ["forget", "open"]),
        (False, None, ["forget", "open", "record", "prepare"]),
    ],
)
def test_of_two_starts_at_once_the_one_that_has_lost_takes_nothing_more(
    monkeypatch, tmp_path, first, moment, done
) -> None:
    """Both wrote the manifest and claimed the sink, each after the other, and both ended."""
    checkpoint = str(tmp_path)
    found: list[str] = []

    def step(name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            found.append(name)
            if name == moment:
                open_files(checkpoint).write(f"{DIRECTORY}/{9:012d}-{'a' * 32}.json", [b"{}"])

        return call

    class Reached(Exception):
        """Everything is taken."""

    def reached(*_: Any) -> Any:
        raise Reached

    changelog = SimpleNamespace(check=lambda *_, **__: None, prepare=step("prepare"))
    for name, stub in {
        "open_changelog": lambda *_: changelog,
        "queue_limit": lambda *_: None,
        "forget_requests": step("forget"),
        "record": step("record"),
        "check_state": step("look"),
        "_begin_sink": lambda *_: None,
        "_open_sink": step("open"),
        "terms_of": reached,
    }.items():
        monkeypatch.setattr(start, name, stub)
    job: Any = SimpleNamespace(
        shards=1, grouping=grouping_values(1), operator=None, inputs=(), message_fields=(), logged=False
    )
    job.pinned, job.check_sources, job.begin = lambda _: job, lambda *_, **__: None, lambda *_, **__: None
    entries = {"query": "q", "changelog": "rewind/changelog", "topics": {}, "place": checkpoint, "first_offsets": []}
    stored = None if first else Manifest(1, grouping_values(1), entries)
    if stored is not None:
        write_manifest(checkpoint, stored)
    nothing = cast(Any, None)
    with leased(checkpoint, "a query") as lease, pytest.raises(Reached if moment is None else CheckpointTaken):
        start._open(nothing, checkpoint, nothing, start.StartOptions(), job, entries, stored, False, lease)
    assert [name for name in found if name != "look"] == done


def test_the_start_of_a_query_is_given_up_after_its_patience_by_name(monkeypatch) -> None:
    def plan(*_: Any) -> Any:
        raise SourceUnavailable("away", where="h:1")

    monkeypatch.setattr(start, "_plan", plan)
    monkeypatch.setattr(start, "_spark_has_committed", lambda _: True)
    monkeypatch.setattr(start, "check_not_connect", lambda _: None)
    with pytest.raises(SourceUnavailable, match="away; where: h:1; why: tried 5 times in"):
        nothing = cast(Any, None)
        start.start(nothing, nothing, "checkpoint", nothing, start.StartOptions(patience="0 seconds"))


def test_errors_in_user_code_are_not_tried_again() -> None:
    job = Job([RuntimeError("ValueError: the user's own"), None])
    with pytest.raises(RuntimeError, match="the user's own"):
        job.run()
    assert (job.launched, job.restored) == (1, [])


@pytest.mark.parametrize(
    ("durations", "committed"),
    [({"addBatch": 3, "triggerExecution": 9}, 7), ({"latestOffset": 1, "triggerExecution": 2}, 6)],
)
def test_a_trigger_without_work_tells_of_no_commit(durations, committed):
    """Spark numbers the progress of an idle trigger like the micro-batch that has not run yet."""

    assert supervisor._committed({"batchId": 7, "durationMs": durations}) == committed
    assert supervisor._committed(None) == -1


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


def test_a_file_that_spark_cannot_read_is_named_by_sparks_condition_and_never_by_data() -> None:
    said = "[FAILED_READ_FILE.NO_HINT] Encountered error while reading file x.parquet. SQLSTATE: KD001"
    found = read(QueryFailed("", (Link("org.apache.spark.SparkException", said),)))
    assert (type(found.error), found.kind) == (SourceDamaged, Kind.FINAL)
    assert "x.parquet" in str(found.error)
    for link in (
        Link("org.apache.spark.SparkException", f"[CANNOT_PARSE] the value is {said}"),
        Link("org.example.Mine", said),
        Link("org.apache.spark.SparkException", said, io=True),  # a filesystem that does not answer
    ):
        assert not isinstance(read(QueryFailed("", (link,))).error, SourceDamaged)


def test_a_drain_that_an_earlier_start_asked_for_does_not_end_a_run() -> None:
    """It was planned and not committed, or queued, and runs again in this start: before what lies in the source now."""
    requests = {3: 7, 4: 7, 5: 9}
    query = RewindQuery.__new__(RewindQuery)
    query._asked, query._quiet, query._drained = None, None, {}
    query._plan = SimpleNamespace(
        targets=({("t", 0): 5},),
        shards=2,
        drain=lambda: 9,
        drain_of=requests.__getitem__,
        beside=SimpleNamespace(shards={}, pace=lambda wait: None),
        window_ends=None,
    )  # type: ignore[assignment]

    def ends(version: int, offset: int) -> bool:
        progress = {"batchId": version, "sources": [{"endOffset": {"t": {"0": offset}}}]}
        return query._reached_end(progress, version)

    def drained(version: int, *shards: int) -> None:
        query._drained.update({shard: (version, query._plan.drain_of(version)) for shard in shards})

    drained(3, 0, 1)
    assert not ends(3, 3)
    assert not ends(4, 5), "it asks now"
    assert not ends(4, 5), "both drained, for somebody else"
    drained(5, 0)
    assert not ends(5, 5)
    drained(5, 1)
    assert not ends(4, 5), "Spark has not committed it"
    query._plan.beside.shards[0] = 1
    assert not ends(5, 5), "a shard has a queue yet"
    query._plan.beside.shards.clear()
    assert ends(5, 5)


def test_the_end_is_looked_for_while_a_micro_batch_notes_who_drained() -> None:
    """They do so in two threads: what comes between two looks at the shards is no error."""
    query = RewindQuery(one_shard(start_query=lambda publish: Failing(None), shards=3))

    class Request(int):
        def __ge__(self, asked: object) -> bool:
            query._drained[2] = 7, 5
            return True

    query._drained, query._asked = {0: (7, Request(5)), 1: (7, Request(5))}, 5
    assert not query._reached_end(None, 7)
    assert query._reached_end(None, 7)


def test_a_source_that_spark_reads_is_at_its_end_when_a_micro_batch_of_this_start_finds_nothing_new() -> None:
    drained: list[bool] = []
    query = RewindQuery.__new__(RewindQuery)
    query._asked, query._quiet = None, None
    query._plan = SimpleNamespace(targets=({("t", 0): 5}, None), drain=lambda: drained.append(True))  # type: ignore[assignment]

    def after(version: int, topic: int, start: int | None, end: int) -> bool:
        sources = [{"endOffset": {"t": {"0": topic}}}, {"startOffset": start, "endOffset": end}, {"endOffset": 0}]
        query._reached_end({"batchId": version, "sources": sources}, version)
        return bool(drained)

    assert not after(3, 5, 7, 7), "an earlier start may have planned it, before what is there now came"
    assert not after(3, 5, 7, 7), "the same progress, looked at again"
    assert not after(4, 5, 7, 9), "it found something"
    assert not after(5, 4, 9, 9), "the topic is not at its end"
    assert after(6, 5, 9, 9)


def test_what_a_shard_tells_of_a_micro_batch_reaches_housekeeping_and_listeners() -> None:
    commit, heard = Commit(3, "a" * 32), Heard()
    tried = Recorder()
    tried.tries = [Try(0, commit.name, "no local state", "snapshot", failed="a byte is wrong in 3.sst")]
    tried.tries += [Try(0, commit.name, "a byte is wrong in 3.sst", "snapshot", length=900, seconds=0.5)]
    told = json.dumps({"rows": 7, "drained": -1, "commit": commit.name, "adopted": 2, **tried.metrics()})
    plan = QueryPlan(
        lease=Leased(),  # type: ignore[arg-type]
        checkpoint="checkpoint",
        start_query=lambda publish: publish(None, 3) or Failing(None),
        publish=lambda frames, version: [summary(0, 1, 0, merge_metrics([told]))],  # as every sink does
        restore=lambda why: 0,
        drain=lambda: 1,
        drain_of=lambda version: 1,
        housekeeping=Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
        shards=1,
        listeners=(heard, LoggingListener()),
    )
    query = RewindQuery(plan)
    assert query.await_termination(30)
    assert list(plan.housekeeping._made[0]) == [commit], "what is pruned is told by it"
    assert heard.tries == tried.tries
    told = query.progress
    assert (told.rows, told.moves, told.restores, told.adopted) == (7, 1, 0, 1)


def test_a_micro_batch_that_spark_runs_again_is_counted_once() -> None:
    def publish_some(publish: Callable[[Any, int], None]) -> Failing:
        for version in (2, 3, 3, 4, 4, 4):
            publish(None, version)
        return Failing(None)

    plan = one_shard(start_query=publish_some, publish=lambda frames, version: [summary(0, 2, 1, {"rows": 10})])
    query = RewindQuery(plan)
    assert query.await_termination(30)
    told = query.progress
    assert (told.version, told.micro_batches, told.rows, told.results, told.errors) == (4, 3, 30, 6, 3)


def test_tidying_ends_no_query(caplog: pytest.LogCaptureFixture) -> None:
    class HttpError(Exception):
        """As a filesystem's client has it."""

    def refuse(committed: int) -> None:
        raise HttpError("slow down")

    class Reported(Failing):
        lastProgress = {"batchId": 7, "durationMs": {"addBatch": 1}, "sources": []}  # noqa: N815, RUF012 - Spark's name
        looks = 0

        @property
        def isActive(self) -> bool:
            self.looks += 1
            return self.looks < 3

    tidying = SimpleNamespace(maintain=refuse)
    query = RewindQuery(one_shard(start_query=lambda publish: Reported(None), housekeeping=tidying))
    assert query.await_termination(30)
    assert query._committed == 7
    assert "old files are not pruned now" in caplog.text
    assert "slow down" in caplog.text


def test_what_fails_behind_a_publication_is_the_micro_batchs_failure() -> None:
    """By its name: such as a read of Spark's log of which a filesystem gives nothing for a moment."""
    away = StorageFailed("a filesystem failed", where="s3://bucket")
    seen: list[Exception] = []

    def gone(version: int) -> int:
        raise away

    def publish_some(publish: Callable[[Any, int], None]) -> Failing:
        try:
            publish(None, 3)
        except Exception as error:
            seen.append(error)
        return Failing(None)

    metrics = {"rows": 1, "drained": 3}
    plan = one_shard(
        start_query=publish_some, publish=lambda *_: [summary(0, 1, 0, metrics)], drain_of=gone, targets={("t", 0): 1}
    )
    query = RewindQuery(plan)
    query.stop()
    assert [type(error) for error in seen] == [supervisor.MicroBatchFailed]
    assert query._raised is away


def test_a_micro_batch_that_is_mostly_refused_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = [
        {"received": 6, "errors": 4, "errors_in_future": 4, "leaps": 2, "leap": "t-0, offset 7: by 9 ms"},
        {"received": 2, "errors": 1, "errors_malformed": 1},
    ]
    for shards, told in (
        (metrics, ["watermarks moved by more than max_ahead with 2 messages: t-0, offset 7: by 9 ms",
                   "5 of 8 messages were refused (in_future 4, malformed 1)"]),
        ([{"received": 8, "errors": 4}], []),
    ):  # fmt: skip
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rewind.supervisor"):
            given = [summary(number, 0, 0, one) for number, one in enumerate(shards)]
            plan = QueryPlan(
                lease=Leased(),  # type: ignore[arg-type]
                checkpoint="checkpoint",
                start_query=lambda publish: publish(None, 3) or Failing(None),
                publish=lambda frames, version, given=given: given,
                restore=lambda why: 0,
                drain=lambda: 1,
                drain_of=lambda version: 1,
                housekeeping=Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
                shards=2,
            )
            query = RewindQuery(plan)
            query.await_termination(10)
        assert query.progress.warnings == [f"micro-batch 3: {text}" for text in told]
        messages = [record.getMessage() for record in caplog.records]
        assert [text for text in messages if text.startswith("micro-batch")] == query.progress.warnings


class Running(Failing):
    """A query in the middle of a micro-batch that `stop` interrupts: what its sink raised then ends it."""

    def __init__(self, publish: Any, own: Exception | None = None) -> None:
        super().__init__(own)
        self.isActive, self._publish = True, publish

    def stop(self) -> None:
        try:
            self._publish(None, 0)
        except Exception as error:
            self.text = traceback.format_exc()
            self.error = self.error or error
        self.isActive = False


def stopped(own: Exception | None = None) -> tuple[RewindQuery, Running]:
    """Start a query whose running action fails as Spark's do when the thread is interrupted, and stop it."""
    made: list[Running] = []

    def launch(publish: Any) -> Any:
        made.append(Running(publish, own))
        return made[-1]

    def publish(frames: Any, version: int) -> list[Any]:
        text = "py4j.protocol.Py4JJavaError: An error occurred while calling o1\n"
        raise RuntimeError(text + "at x\n" * 9000)

    plan = QueryPlan(
        lease=Leased(),  # type: ignore[arg-type]
        checkpoint="checkpoint",
        start_query=launch,
        publish=publish,
        restore=lambda why: 0,
        drain=lambda: 1,
        drain_of=lambda version: 1,
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


@pytest.mark.parametrize(("error", "kept"), [(RuntimeError("x"), False), (MISSING, False), (GONE, True)])
def test_what_a_stop_interrupts_is_no_failure_of_the_query_but_a_named_error_is(error: Exception, kept: bool) -> None:
    query, _ = stopped(error)
    assert (query.exception is not None) == kept
    assert query.progress.restores == 0


@pytest.mark.parametrize("error", [None, GONE])
def test_an_ended_query_that_nobody_uses_is_gone_though_spark_has_its_callback(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(supervisor.log, "disabled", True)  # pytest keeps what is logged, and the error with it
    callbacks: list[Callable[[Any, int], None]] = []
    raised: list[Exception] = []  # Spark keeps that, too

    def stream(publish: Callable[[Any, int], None]) -> None:
        try:
            publish(None, 0)
        except Exception as failed:
            raised.append(failed)

    def launch(publish: Callable[[Any, int], None]) -> Failing:
        callbacks.append(publish)
        thread = threading.Thread(target=stream, args=(publish,))
        thread.start()
        thread.join(PATIENCE_S)
        return Failing(raised[0] if raised else None)

    class Output:
        def publish(self, frames: Any, version: int) -> list[Any]:
            if error is not None:
                raise type(error)("of this query", where="t-0")
            return []

        def close(self) -> None:
            closed.append("closed")

    closed: list[str] = []
    output = Output()
    query = RewindQuery(one_shard(start_query=launch, publish=output.publish, close=output.close))
    assert query._done.wait(PATIENCE_S)
    query._thread.join(PATIENCE_S)
    assert isinstance(query.exception, HistoryLost) == (error is not None)
    assert closed == ["closed"]
    gone = weakref.ref(query), weakref.ref(output)
    del query, output
    gc.collect()
    assert [one() for one in gone] == [None, None]
    with pytest.raises(InterruptedError):
        callbacks[0](None, 1)


def test_a_sink_that_cannot_be_closed_changes_nothing_of_how_a_query_ended(caplog: pytest.LogCaptureFixture) -> None:
    def refuse() -> None:
        raise RuntimeError("no connection")

    query = RewindQuery(one_shard(start_query=lambda publish: Failing(None), close=refuse))
    assert query.await_termination(PATIENCE_S)
    assert "the sink could not be closed: RuntimeError: no connection" in caplog.text


def test_a_sink_writes_for_one_query_at_a_time() -> None:
    closed: list[str] = []
    watch = SimpleNamespace(close=lambda: closed.append("watch"))
    sink: Any = SimpleNamespace(close=lambda: closed.append("sink"))

    def begin(sink: Any, checkpoint: str) -> None:
        start.use_alone(sink, checkpoint, ExitStack())

    begin(sink, "one")
    with pytest.raises(ValueError, match=r"sink=.*another query writes to it, that on one"):
        begin(sink, "two")
    begin(other := object(), "three")
    start._close(cast(Any, sink), cast(Any, watch))
    start._close(cast(Any, other), cast(Any, watch))
    assert closed == ["watch", "sink", "watch"]
    with pytest.raises(LookupError), ExitStack() as undo:
        start.use_alone(cast(Any, sink), "two", undo)
        raise LookupError("it did not start")
    begin(sink, "four")
    start._close(cast(Any, sink), cast(Any, watch))


SPARKS_STOP = QueryFailed("", (Link(SPARK, "above"), Link("java.lang.InterruptedException", "")))
CANCELLED = QueryFailed("", (Link(SPARK, "[SPARK_JOB_CANCELLED] Job 7 cancelled part of cancelled job group 4-2"),))
INTERRUPTED_IO = QueryFailed("", (Link("java.io.InterruptedIOException", "", io=True),))
BY_A_FUNCTION = UserCodeFailed("the function of the sink raised SparkException")
BY_A_FUNCTION.__cause__ = CANCELLED


@pytest.mark.parametrize("error", [SPARKS_STOP, CANCELLED, INTERRUPTED_IO, BY_A_FUNCTION])
@pytest.mark.parametrize("bounded", [False, True])
def test_sparks_own_stop_inside_a_micro_batch_is_no_failure(error: Exception, bounded: bool) -> None:
    """Spark takes what its stop makes of a sink for no failure if it knows it by the text that it looks for."""
    query = handle_of_interrupted(error, bounded=bounded, stopped=True)
    assert isinstance(query.exception, QueryStopped) if bounded else query.exception is None


@pytest.mark.parametrize("error", [GONE, LATE, UserCodeFailed("the function of the sink raised ValueError")])
def test_what_fails_when_spark_stops_its_query_keeps_its_name(error: Exception) -> None:
    query = handle_of_interrupted(error, stopped=True)
    assert query.exception is not None


def test_an_interruption_without_a_stop_ends_the_query_by_what_it_was() -> None:
    query = handle_of_interrupted(SPARKS_STOP, stopped=False)
    assert query.exception is SPARKS_STOP


def handle_of_interrupted(error: Exception, *, stopped: bool, bounded: bool = False) -> RewindQuery:
    """Let Spark's query end in the middle of a micro-batch whose publication raises, by a stop or by itself."""

    class Interrupted(Failing):
        def __init__(self, publish: Callable[[Any, int], None]) -> None:
            super().__init__(None)
            try:
                publish(None, 0)
            except Exception as raised:
                if not (stopped and isinstance(raised, InterruptedError)):
                    self.error = raised

    def publish(frames: Any, version: int) -> list[Any]:
        raise error

    targets = ({("t", 0): 9},) if bounded else None
    query = RewindQuery(one_shard(start_query=Interrupted, publish=publish, targets=targets, patience_s=0.0))
    assert query._done.wait(PATIENCE_S)
    return query


def test_a_micro_batch_that_begins_while_the_end_is_found_is_published_before_the_stop() -> None:
    """Neither waits for the other: a micro-batch is held only when the supervisor no longer waits for one."""
    done: list[str] = []
    query = RewindQuery.__new__(RewindQuery)
    query._ending, query._stopping = False, threading.Event()
    query._publishing, query._counted = set(), (-1, Counter())
    query._query = SimpleNamespace(isActive=True, stop=lambda: done.append("stopped"))  # type: ignore[assignment]
    query._plan = SimpleNamespace(  # type: ignore[assignment]
        publish=lambda *_: done.append("published") or [],
        watch=lambda: None,
        lease=Leased(),
        beside=SimpleNamespace(shards={}, pace=lambda wait: None),
        window_ends=None,
    )
    query.progress = Progress()
    gate = threading.Lock()

    class Contended:
        """The lock, which a micro-batch takes right before the supervisor does."""

        def acquire(self, timeout: float) -> bool:
            thread = threading.Thread(target=query._publish_one, args=(None, 1), daemon=True)
            thread.start()
            thread.join(5)
            return gate.acquire(timeout=0.1)

        release = gate.release

        def __enter__(self) -> None:
            gate.acquire()

        def __exit__(self, *_: object) -> None:
            gate.release()

    query._gate = Contended()  # type: ignore[assignment]
    query._stop_between(query.query)
    assert done == ["published", "stopped"]


def test_what_ended_the_query_stands_below_sparks_own_text() -> None:
    links = (Link("StreamingQueryException", "[STREAM_FAILED] Query x"), Link(SPARK, "y"))
    failed = QueryFailed("[STREAM_FAILED] Query x terminated\n=== Streaming Query ===\n" + "plan\n" * 60, links)
    with pytest.raises(QueryFailed) as caught:
        Job([failed]).run()
    assert caught.value.__notes__ == [f"What ended the query: {SPARK}: y"]


def test_the_query_says_what_it_does() -> None:
    class Spoken(Failing):
        lastProgress = {  # noqa: N815, RUF012 - Spark's name
            "batchId": 4,
            "durationMs": {"addBatch": 1},
            "sources": [
                {"endOffset": '{"t": {"0": 5, "1": 7}}', "latestOffset": '{"t": {"0": 9, "1": 7}}'},
                {"endOffset": '{"format": 1, "asked": 0}', "latestOffset": None},
            ],
        }

    said: list[str] = []
    job = Job([MISSING, None])
    job._restore = lambda why: said.append(repr(query[0])) or 1  # type: ignore[func-returns-value]
    query: list[RewindQuery] = []

    class Told(RewindQuery):
        def _drive(self) -> None:
            query.append(self)
            super()._drive()

    launched = [Spoken(MISSING), Spoken(None)]
    plan = QueryPlan(
        lease=Leased(),  # type: ignore[arg-type]
        checkpoint="checkpoint",
        start_query=lambda publish: launched.pop(0),  # type: ignore[arg-type]
        publish=lambda frames, version: [],
        restore=job.restore,
        drain=lambda: 1,
        drain_of=lambda version: 1,
        housekeeping=Housekeeping(lambda: None, Snapshots("c"), 2),  # type: ignore[arg-type,return-value]
        shards=3,
    )
    one = Told(plan)
    assert one.await_termination(30)
    one.progress.last = [{"metrics": {"errors_out_of_retention": 2}}, {"metrics": {}}]
    rest = "shards 3, micro-batch -1, lag 4 messages, too late"
    assert said == [f"<RewindQuery checkpoint: restoring; {rest} 0>"]
    assert repr(one) == f"<RewindQuery checkpoint: ended; {rest} 2>"


class Busy:
    """One of Spark's queries, which runs until it is stopped, and has committed micro-batch 5."""

    lastProgress = {"batchId": 5, "durationMs": {"addBatch": 1}, "sources": []}  # noqa: N815, RUF012 - Spark's name

    def __init__(self) -> None:
        self.isActive = True

    def exception(self) -> Exception | None:
        return None

    def stop(self) -> None:
        self.isActive = False


def one_shard(**more: Any) -> QueryPlan:
    """What is driven, of one shard whose query is busy, but for what a test says."""
    known: dict[str, Any] = {
        "lease": Leased(),
        "checkpoint": "checkpoint",
        "start_query": lambda publish: Busy(),
        "publish": lambda frames, version: [],
        "restore": lambda why: 1,
        "drain": lambda: 1,
        "drain_of": lambda version: 1,
        "housekeeping": Housekeeping(None, Snapshots("memory://supervisor"), 100),  # type: ignore[arg-type]
        "shards": 1,
    }
    return QueryPlan(**known | more)


def test_a_queue_that_is_too_long_stops_the_query_for_a_restore_once(tmp_path: Path) -> None:
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "5").write_text("v1")
    queries: list[Any] = [Busy(), Failing(None)]
    restored: list[str] = []
    beside = Beside(lambda *_: None, 100, 10, {})
    since = b64encode(encode(Pointer(0, Commit(4, "a" * 32), None, 1, "", [], {}, ""))).decode()
    beside.published(0, 5, {"decision": "queued", "since": since, "queued": 11, "queued_bytes": 50})
    plan = one_shard(
        start_query=lambda publish: queries.pop(0),
        restore=lambda why: restored.append(why) or 1,  # type: ignore[func-returns-value]
        beside=beside,
        checkpoint=str(tmp_path),
    )
    query = RewindQuery(plan)
    assert query.await_termination(30)
    assert len(restored) == 1
    assert "11 micro-batches, 50 bytes are queued" in restored[0]
    assert queries == []
    beside.look(6)  # it was asked to adopt: nothing more is to be done


class Queueing(Busy):
    """Its only shard queues one micro-batch more, and does not say that it has adopted any; then it is committed."""

    def __init__(self, publish: Any, version: int, commits: Path) -> None:
        super().__init__()
        publish(None, version)
        (commits / str(version)).write_text("v1")
        self.lastProgress = {"batchId": version, "durationMs": {"addBatch": 1}, "sources": []}


def test_a_shard_whose_adoption_always_fails_ends_the_query_though_micro_batches_are_committed(tmp_path: Path) -> None:
    (commits := tmp_path / "commits").mkdir()
    restored: list[str] = []
    since = b64encode(encode(queueing().since)).decode()
    queued = {"decision": "queued", "since": since, "queued": 1, "queued_bytes": 101, "queued_why": "no way there"}

    def restore(why: str) -> int:
        restored.append(why)
        assert len(restored) <= patience.MAX_RESTORES
        return 1

    plan = one_shard(
        start_query=lambda publish: Queueing(publish, 5 + len(restored), commits),
        publish=lambda frames, version: [{"shard": 0, "metrics": queued}],
        restore=restore,
        beside=Beside(lambda *_: None, 100, 10, {}),
        checkpoint=str(tmp_path),
    )
    query = RewindQuery(plan)
    with pytest.raises(RestoreFailed, match="no way there"):
        query.await_termination(PATIENCE_S)
    assert len(restored) == patience.MAX_RESTORES


def queueing() -> RestoringPointer:
    since = Pointer(0, Commit(4, "a" * 32), None, 1, "", [], {}, "")
    at = Commit(4, "c" * 32)
    return RestoringPointer(0, at, since.commit, 1, "", [], {}, "", since=since, queued=0, queued_bytes=0)


def test_what_a_restore_beside_the_query_found_lost_ends_the_query_by_name() -> None:
    def lost(*_: object) -> None:
        raise GONE

    beside = Beside(lost, 100, 10, {0: queueing()})
    query = RewindQuery(one_shard(beside=beside))
    with pytest.raises(HistoryLost, match="offsets are gone"):
        query.await_termination(30)


def test_nothing_is_restored_or_started_while_a_restore_runs_beside() -> None:
    """Its jobs use the session, its request to adopt would come in the middle: the supervisor waits for its end."""
    events: list[str] = []

    class Waited:
        """Restores beside the query, and copies: what the supervisor waits for."""

        shards: ClassVar[dict[int, Any]] = {}
        fetched = 0

        def __init__(self, name: str) -> None:
            self.name = name

        def look(self, *_: object) -> None:
            """Begin nothing."""

        def restored(self, committed: int) -> None:
            events.append("asked")

        def join(self, cancel: object = None) -> None:
            events.append(f"{self.name} {'ended' if cancel is None else 'cancelled'}")

    queries = [Failing(LATE), Failing(MISSING), Failing(None)]

    def launch(publish: Any) -> Any:
        events.append("started")
        return queries.pop(0)

    query = RewindQuery(
        one_shard(
            start_query=launch,
            restore=lambda why: events.append("restored") or 1,  # type: ignore[func-returns-value]
            beside=Waited("beside"),
            standby=Waited("copies"),
        )
    )
    assert query.await_termination(30)
    again = ["beside ended", "started"]
    restored = ["beside cancelled", "copies ended", "restored", "asked"]
    assert events == ["started", *again, *restored, *again, "beside ended", "copies ended"]


def test_the_end_of_a_restore_beside_the_query_is_waited_for() -> None:
    going, free, over = threading.Event(), threading.Event(), threading.Event()

    def restore(*_: object) -> None:
        going.set()
        free.wait(30)
        over.set()

    beside = Beside(restore, 100, 10, {0: queueing()})
    beside.look(4)
    assert going.wait(30)
    threading.Timer(0.05, free.set).start()
    beside.join()
    assert over.is_set()


class FailingLater(Busy):
    """Fails, by what passes unless told otherwise, once a restore runs beside it."""

    def __init__(self, going: threading.Event, error: Exception = LATE) -> None:
        self._going, self._error = going, error

    @property
    def isActive(self) -> bool:  # type: ignore[override]
        return not self._going.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def stop(self) -> None:
        """It has ended."""


@pytest.mark.parametrize("where", ["beside the query", "with the query stopped", "beside one that is to start again"])
def test_a_stop_ends_the_restore_that_runs(where: str) -> None:
    """Its jobs are cancelled until one of them was one of it: between two jobs there is nothing to cancel."""
    going, ended, asked, raised = threading.Event(), threading.Event(), list[bool](), list[str]()

    def restore(*_: object) -> Any:
        going.set()
        if not ended.wait(30):
            raised.append("it was not cancelled")
        raise RuntimeError("Job 7 cancelled part of cancelled job group")

    def cancel() -> None:
        asked.append(query._stopping.is_set())
        if len(asked) == 1:
            raise RuntimeError("the JVM does not answer")
        ended.set()

    more: dict[str, Any] = {"beside": Beside(restore, 100, 10, {0: queueing()})} if "beside" in where else {}
    first = {"beside the query": Busy(), "with the query stopped": Failing(MISSING)}.get(where, FailingLater(going))
    queries: list[Any] = [first, Busy()]
    query = RewindQuery(
        one_shard(start_query=lambda publish: queries.pop(0), restore=restore, end_restores=cancel, **more)
    )
    assert going.wait(30)
    query.stop()
    assert not query.is_active
    assert (asked[:2], raised, query.exception) == ([True, True], [], None)


def test_what_ends_the_query_ends_the_restore_beside_it() -> None:
    """Nobody waits for it any more: whoever waits for the query is told, and the lease is given back."""
    going, ended = threading.Event(), threading.Event()

    def restore(*_: object) -> Any:
        going.set()
        ended.wait(PATIENCE_S)
        raise RuntimeError("Job 7 cancelled part of cancelled job group")

    queries: list[Any] = [FailingLater(going, UserCodeFailed("a function raised"))]
    query = RewindQuery(
        one_shard(
            start_query=lambda publish: queries.pop(0),
            end_restores=ended.set,
            beside=Beside(restore, 100, 10, {0: queueing()}),
        )
    )
    with pytest.raises(UserCodeFailed, match="a function raised"):
        query.await_termination(PATIENCE_S)
    assert ended.is_set()
    assert not query.is_active


def test_a_restore_with_the_query_stopped_does_not_wait_for_the_one_beside_it() -> None:
    """It restores the same shards, and all at once."""
    going, ended, restored = threading.Event(), threading.Event(), list[bool]()

    def restore(*_: object) -> Any:
        going.set()
        ended.wait(PATIENCE_S)
        raise RuntimeError("Job 7 cancelled part of cancelled job group")

    queries: list[Any] = [FailingLater(going, MISSING), Failing(None)]
    query = RewindQuery(
        one_shard(
            start_query=lambda publish: queries.pop(0),
            restore=lambda why: restored.append(ended.is_set()) or 1,  # type: ignore[func-returns-value]
            end_restores=ended.set,
            beside=Beside(restore, 100, 10, {0: queueing()}),
        )
    )
    assert query.await_termination(PATIENCE_S)
    assert restored == [True]


class Leased:
    """A lease that tells whether it was given back."""

    lost: BaseException | None = None
    released = False

    def check(self) -> None:
        """Nobody else has the checkpoint."""

    def release(self) -> None:
        """Give it back."""
        self.released = True


class GoneStandby:
    """Copies whose session is gone."""

    fetched = 0

    def look(self, commits: object, query: object) -> None:
        """Begin nothing."""

    def join(self) -> None:
        """Fail, as whatever asks a stopped session."""
        raise AttributeError("'NoneType' object has no attribute 'sc'")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_fails_at_the_end_the_query_has_ended_and_its_lease_is_given_back() -> None:
    lease = Leased()
    query = RewindQuery(one_shard(lease=lease, standby=GoneStandby()))
    query.stop()
    assert query.await_termination(30)
    assert lease.released
