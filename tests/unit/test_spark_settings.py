"""The settings of a user's session: one start at a time changes them, and puts them back."""

from __future__ import annotations

import socket
import threading
import uuid
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.java_gateway import JavaGateway
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StringType, StructType

from backend import count, stream, tumbling
from backend.spark.job import Job
from backend.spark.session import file_manager
from backend.spark.session.jvm import (
    LONGEST_FOLDER,
    WORKER_TIME,
    checkpoint_files,
    give_workers_time,
    use_unix_sockets,
)
from backend.spark.session.settings import SESSION, is_copied, session_entries, settings
from backend.spark.start import StartOptions, build_job, check_session
from recovery.files import open_files
from recovery.restore.read_again import _read
from recovery.restore.replay import write_chunks
from tests.unit.test_path_in import place

SHARDS = "spark.sql.shuffle.partitions"
PATIENCE_S = 30


class Conf:
    """The settings of a session, as PySpark's `RuntimeConfig` gives them."""

    def __init__(self, **values: str) -> None:
        self.values = values

    def get(self, name: str, *default: str | None) -> str | None:
        return self.values.get(name, *default) if default else self.values[name]

    def set(self, name: str, value: str) -> None:
        self.values[name] = value

    def unset(self, name: str) -> None:
        del self.values[name]


class Core:
    """The settings of a context, as the JVM's `SparkConf` gives them."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values, self.contains, self.set = values, values.__contains__, values.__setitem__

    def get(self, name: str, default: str) -> str:
        return self.values.get(name, default)


class Session:
    """A session, as far as it is asked, of a JVM with files by default on a local disk and a folder for its own."""

    def __init__(
        self, core: dict[str, str] | None = None, *, folder: str = "/tmp", files: str = "file", **hadoop: str
    ) -> None:
        self.conf = Conf(**{"spark.sql.session.timeZone": "UTC", SHARDS: "200"})
        conf, uri = Core(core if core is not None else {}), SimpleNamespace(getScheme=lambda: files)
        context = SimpleNamespace(sc=lambda: SimpleNamespace(conf=lambda: conf), hadoopConfiguration=lambda: hadoop)
        self.sparkContext = SimpleNamespace(master="local[2]", _jsc=context)
        classes = SimpleNamespace(fs=SimpleNamespace(FileSystem=SimpleNamespace(getDefaultUri=lambda _: uri)))
        system = SimpleNamespace(getProperty=lambda _: folder)
        has_ours = SimpleNamespace(forName=[file_manager.OURS].index)
        self._jvm = SimpleNamespace(
            org=SimpleNamespace(apache=SimpleNamespace(hadoop=classes)),
            java=SimpleNamespace(lang=SimpleNamespace(System=system, Class=has_ours)),
        )


def job_of(shards: int, *, direct: bool = False, ranked: bool = False) -> Any:
    """Return a job, as far as its session's settings depend on it."""
    return SimpleNamespace(shards=shards, direct=direct, ranked=frozenset({0} if ranked else ()), session={})


def test_two_starts_side_by_side_see_their_own_settings_and_leave_the_users() -> None:
    spark: Any = Session()
    users = dict(spark.conf.values)
    first_is_in, first_may_go, second_is_in = threading.Event(), threading.Event(), threading.Event()
    seen: dict[str, str | None] = {}

    def first() -> None:
        with settings(spark, job_of(3), 1024, "s3://bucket/c"):
            first_is_in.set()
            assert first_may_go.wait(PATIENCE_S)
            seen["first"] = spark.conf.get(SHARDS)

    def second() -> None:
        assert first_is_in.wait(PATIENCE_S)
        with settings(spark, job_of(5, direct=True), 1024, "s3://bucket/c"):
            second_is_in.set()
            seen["second"] = spark.conf.get(SHARDS)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    assert not second_is_in.wait(0.2), "the first has not put back yet what it found"
    first_may_go.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert seen == {"first": "3", "second": "5"}
    assert spark.conf.values == users


@pytest.mark.parametrize("ranked", [False, True])
def test_what_would_hold_a_query_up_is_set_and_put_back(ranked: bool) -> None:
    """Spark checks shuffles of DataFrames only: a user's plan may not be deterministic, what reads topics is."""
    spark: Any = Session()
    checks = [f"spark.sql.shuffle.orderIndependentChecksum.{one}" for one in ("enabled", "enableFullRetryOnMismatch")]
    large, no_data = "spark.sql.execution.arrow.useLargeVarTypes", "spark.sql.streaming.noDataMicroBatches.enabled"
    spark.conf.values |= {checks[0]: "true", large: "true", no_data: "false"}
    users = dict(spark.conf.values)
    with settings(spark, job_of(2, ranked=ranked), 1024, "/data/c"):
        assert [spark.conf.get(name, None) for name in checks] == (["true", None] if ranked else ["false", "false"])
        assert (spark.conf.get(large), spark.conf.get(no_data)) == ("false", "true")
    assert spark.conf.values == users


def test_what_only_costs_time_is_set_unless_the_user_has() -> None:
    copies = "spark.sql.streaming.stateStore.minDeltasForSnapshot"
    for users, seen in (({}, ["50"]), ({copies: "3"}, ["3"])):
        spark: Any = Session()
        spark.conf.values |= users
        before = dict(spark.conf.values)
        with settings(spark, job_of(2), 1024, "/data/c"):
            assert [spark.conf.get(name) for name in (copies,)] == seen
        assert spark.conf.values == before


@pytest.mark.parametrize("scheme", ["", "memory://"])
@pytest.mark.parametrize(
    ("committed", "copied", "ends", "copies"),
    [(599, 400, True, False), (599, 399, True, True), (599, 0, False, False), (600, 0, False, True)],
)
def test_a_shard_whose_newest_copy_is_old_is_copied_in_each_micro_batch(
    scheme: str, committed: int, copied: int, ends: bool, copies: bool
) -> None:
    """Spark can not write behind 864 versions without one. By hand: a micro-batch's number is one below its version."""
    checkpoint = place() if not scheme else f"memory://{uuid.uuid4().hex}"
    files = open_files(checkpoint)
    files.write(f"commits/{committed}", [b"v1"])
    files.write(f"state/0/0/{committed + 1}_{uuid.uuid4()}.zip", [b"copy"])
    files.write(f"state/0/1/{committed + 1}_{uuid.uuid4()}.changelog", [b"changes"])
    for version in filter(None, (copied and 7, copied)):
        files.write(f"state/0/1/{version}_{uuid.uuid4()}.zip", [b"copy"])
    assert is_copied(checkpoint, 2, ends=ends) == copies


BERLIN = {"timezone": "Europe/Berlin", "ansi": "false"}


class Topic:
    """A source with a text and a time."""

    topics = ("t",)

    def fields(self) -> StructType:
        return StructType().add("who", StringType()).add("at", LongType())

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {("t", 0): (0, 1)}


def test_a_job_reads_messages_under_the_settings_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the session is set to when its query is started anew, or when a replay reads beside it."""
    spark: Any = Session()
    for name, setting in SESSION.items():
        spark.conf.set(setting, BERLIN[name])
    source: Any = Topic()
    pipeline = (
        stream(source, event_time="at", key="who").window(tumbling("1 day"), retention="1 hour").aggregate(n=count())
    )
    job = build_job(pipeline, spark, StartOptions(shards=2), stored=None, first_offsets=list)
    others = {"timezone": "Asia/Tokyo", "ansi": "true"}
    for name, setting in SESSION.items():
        spark.conf.set(setting, others[name])
    assert job.session == BERLIN
    assert job._pack_input(job.inputs[0]).timezone == "Europe/Berlin"
    with settings(spark, job, 1024, "s3://bucket/c"):
        assert session_entries(spark) == BERLIN
    assert session_entries(spark) == others

    found: list[dict[str, str]] = []
    monkeypatch.setattr("backend.spark.session.settings.cloned", lambda _: Session())

    def replay(_: Job, clone: Any, *__: Any) -> None:
        found.append(session_entries(clone))

    monkeypatch.setattr(Job, "replay", replay)
    draft: Any = SimpleNamespace(entry=SimpleNamespace(time_ms=0))
    assert _read(spark, job, job, draft, {(0, 0): (0, 1)}, None, 10) == []
    monkeypatch.setattr("recovery.restore.replay.replay_ranges", lambda _: {(0, 0): (0, 1)})
    monkeypatch.setattr("recovery.restore.replay.chunk_writer", lambda *_: None)
    records: Any = {0: None}
    assert write_chunks(spark, job, "", "run", records, 10) == {}
    assert found == [BERLIN, BERLIN]
    assert session_entries(spark) == others


def test_a_jvm_whose_threads_are_not_pinned_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PIN_THREAD", "false")
    monkeypatch.setattr(SparkContext, "_gateway", object.__new__(JavaGateway))
    with pytest.raises(ValueError, match=r"^PYSPARK_PIN_THREAD='false': .* allowed is 'true'"):
        check_session(object.__new__(SparkSession), snapshots=True)


@pytest.mark.parametrize(("said", "found"), [(None, "120s"), ("20s", "20s"), ("900s", "900s")])
def test_workers_get_time_to_connect_unless_the_user_has_said_how_long(said: str | None, found: str) -> None:
    values = {} if said is None else {WORKER_TIME[0]: said}
    spark: Any = Session(values)
    give_workers_time(spark)
    assert values == {"spark.python.authenticate.socketTimeout": found}


def test_workers_are_talked_to_through_unix_sockets_unless_the_user_has_said_it_or_they_cannot_be(
    tmp_path: Path,
) -> None:
    def used(values: dict[str, str], folder: str = "/tmp", master: str = "local[2]") -> str | None:
        spark: Any = Session(values, folder=folder)
        spark.sparkContext.master = master
        use_unix_sockets(spark)
        return values.get("spark.python.unix.domain.socket.enabled")

    assert used({}) == "true"
    assert used({"spark.python.unix.domain.socket.enabled": "false"}) == "false"
    assert used({}, master="local-cluster[2,1,1024]") is None, "executors have folders of their own"
    assert used({}, folder=str(tmp_path / ("x" * 80))) is None
    assert used({}, folder=str(tmp_path / "missing")) is None
    assert used({"spark.python.unix.domain.socket.dir": str(tmp_path / "missing")}) is None
    with socket.socket(socket.AF_UNIX) as one, chdir(tmp_path):
        with pytest.raises(OSError, match="too long"):
            one.bind("y" * (LONGEST_FOLDER + 6) + f"/.{uuid.uuid4()}.sock")
        Path("y" * LONGEST_FOLDER).mkdir()
        one.bind("y" * LONGEST_FOLDER + f"/.{uuid.uuid4()}.sock")


@pytest.mark.parametrize(
    ("checkpoint", "files", "set_by_us"),
    [
        ("/data/c", "file", True),
        ("file:/data/c", "hdfs", True),
        ("file:///data/c", "hdfs", True),
        ("/data/c", "hdfs", False),
        ("s3a://bucket/c", "file", False),
        ("hdfs:/data/c", "file", False),
        ("data:1/c", "file", True),
    ],
)
def test_a_checkpoint_on_a_local_disk_is_written_without_processes(
    checkpoint: str, files: str, set_by_us: bool
) -> None:
    spark: Any = Session(files=files)
    name, ours = "spark.sql.streaming.checkpointFileManagerClass", "RewindCheckpointFileManager"
    checksums = "spark.sql.streaming.checkpoint.fileChecksum.enabled"
    with settings(spark, job_of(2), 1024, checkpoint):
        assert str(spark.conf.get(name, None)).rpartition(".")[2] == (ours if set_by_us else "None")
        assert spark.conf.get(checksums, None) == ("false" if set_by_us else None)
    assert spark.conf.get(name, None) is spark.conf.get(checksums, None) is None
    spark.conf.set(checksums, "true")
    with settings(spark, job_of(2), 1024, checkpoint):
        assert spark.conf.get(checksums, None) == "true", "the user's"
    spark.conf.unset(checksums)
    spark.conf.set(name, "the.Users")
    with settings(spark, job_of(2), 1024, checkpoint):
        assert spark.conf.get(name, None) == "the.Users"
        assert spark.conf.get(checksums, None) is None, "that one may write no checksums of its own"


def test_local_files_by_another_class_keep_sparks_checksums() -> None:
    spark: Any = Session(**{"fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem"})
    with settings(spark, job_of(2), 1024, "/data/c"):
        assert spark.conf.get("spark.sql.streaming.checkpointFileManagerClass", None) == file_manager.SPARKS
        assert spark.conf.get("spark.sql.streaming.checkpoint.fileChecksum.enabled", None) is None


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2,4]", "local-cluster[2,1,1024]", "yarn"])
def test_executors_of_their_own_have_not_the_class_that_the_driver_compiled(master: str) -> None:
    spark: Any = Session()
    spark.sparkContext.master = master
    used = checkpoint_files(spark, "/data/c")["spark.sql.streaming.checkpointFileManagerClass"]
    assert used == (file_manager.OURS if master in {"local", "local[*]", "local[2,4]"} else file_manager.SPARKS)


class Java:
    """A JVM that compiles and defines classes, as far as it is asked; `fails` where it defines none."""

    def __init__(self, *, fails: bool = False) -> None:
        self.defined: list[bytes] = []
        self.compiled, self.fails = 0, fails
        beside = SimpleNamespace(getClassLoader=lambda: None)
        lookup = SimpleNamespace(defineClass=self.define)
        handles = SimpleNamespace(lookup=lambda: None, privateLookupIn=lambda *_: lookup)
        codes = {file_manager.OURS: b"it", f"{file_manager.OURS}$Raw": b"what it uses"}
        compiler = SimpleNamespace(setParentClassLoader=lambda _: None, cook=self.cook, getBytecodes=lambda: codes)
        named = {"org.apache.hadoop.fs.FilterFileSystem": beside}
        classes = SimpleNamespace(forName=lambda name: named[name] if name in named else self.defined.index(b"it"))
        self.java = SimpleNamespace(lang=SimpleNamespace(Class=classes, invoke=SimpleNamespace(MethodHandles=handles)))
        self.org = SimpleNamespace(codehaus=SimpleNamespace(janino=SimpleNamespace(SimpleCompiler=lambda: compiler)))

    def cook(self, source: str) -> None:
        self.compiled += 1
        assert f"class {file_manager.OURS.rpartition('.')[2]} extends" in source

    def define(self, code: bytes) -> None:
        if self.fails:
            raise Py4JError("LinkageError")
        self.defined.append(code)


def test_the_class_is_compiled_once_in_a_jvm() -> None:
    java = Java()
    assert [file_manager.is_defined(java), file_manager.is_defined(java)] == [True, True]
    assert (java.compiled, java.defined) == (1, [b"what it uses", b"it"])


@pytest.mark.parametrize("without", ["compiler", "definition"])
def test_sparks_own_class_is_used_where_the_jvm_cannot_have_ours(without: str) -> None:
    java: Any = Java(fails=without == "definition")
    if without == "compiler":
        java.org.codehaus.janino.SimpleCompiler = "as TypeError as a package of py4j that is called"
    assert not file_manager.is_defined(java)
    spark: Any = Session()
    spark._jvm.java, spark._jvm.org.codehaus = java.java, java.org.codehaus
    with settings(spark, job_of(2), 1024, "/data/c"):
        assert spark.conf.get("spark.sql.streaming.checkpointFileManagerClass", None) == file_manager.SPARKS
        assert spark.conf.get("spark.sql.streaming.checkpoint.fileChecksum.enabled", None) == "false"


def test_a_start_beside_another_takes_nothing_of_it_for_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    spark: Any = Session(files="file")
    name = "spark.sql.streaming.checkpointFileManagerClass"
    found, waits = [], threading.Event()

    class Lock:
        """Tells when the second start waits for it."""

        def __init__(self) -> None:
            self.lock = threading.RLock()

        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                waits.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    def second() -> None:
        with settings(spark, job_of(2), 1024, "/data/two"):
            found.append(spark.conf.get(name, None))

    thread = threading.Thread(target=second)
    monkeypatch.setattr("backend.spark.session.settings._ONE_START", Lock())
    with settings(spark, job_of(2), 1024, "/data/one"):
        first = spark.conf.get(name, None)
        thread.start()
        assert waits.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert found == [first] != [None]
    assert spark.conf.get(name, None) is None
