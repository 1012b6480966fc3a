"""The rules of the commit where only Spark can show them: its state, its retries, its plan, a lost disk."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from itertools import count as count_up
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import RDD
from pyspark.sql.conf import RuntimeConfig

from backend import archive, count, kafka, max_, median, session, stream, tumbling
from backend.errors import CheckpointInUse, HistoryLost, ManifestMismatch, PointerDamaged
from backend.sources.archive_files import write_archive
from backend.spark import start as starting
from backend.spark.observed import observed
from backend.spark.session import file_manager, settings
from backend.spark.session.jvm import CHECKPOINT_FILES, checkpoint_files
from backend.spark.session.settings import apart
from recovery.commit.outputs import NAME, forget_outputs
from recovery.failures import Kind, read
from recovery.restore import replay
from recovery.restore.replay import read_pointers
from tests.support.collecting import CollectSink
from tests.support.taken_back import newest_commit, take_back
from tests.support.waiting import ended, until

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

MINUTE = 60_000
START = 1_700_000_040_000  # a full minute


def messages(n, *, first=0, partitions=2):
    """Message i of n: key k<i % 3>, value i % 10, one per second and partition, every 7th two minutes back."""
    rows = []
    for i in range(first, n):
        at = START + (i // partitions) * 1000 - (2 * MINUTE if i % 7 == 0 else 0)
        rows.append({"key": f"k{i % 3}", "x": i % 10, "at": at, "partition": i % partitions, "offset": i // partitions})
    return rows


def write(path: Path, rows):
    table = pa.table(
        {
            "topic": ["t"] * len(rows),
            "partition": pa.array([row["partition"] for row in rows], pa.int32()),
            "offset": pa.array([row["offset"] for row in rows], pa.int64()),
            "timestamp": pa.array([row["at"] for row in rows], pa.timestamp("ms", tz="UTC")),
            "key": pa.array([None] * len(rows), pa.binary()),
            "value": pa.array([json.dumps(row).encode() for row in rows], pa.binary()),
        }
    )
    write_archive(path, table)


def job(path: Path):
    source = archive(str(path / "archive"), value="key string, x long, at long", max_offsets_per_batch=200)
    return (
        stream(source, event_time="at", key="key")
        .window(tumbling("1 minute"), retention="1 hour", max_ahead=None)
        .aggregate(n=count(), worst=max_("x"), typical=median("x"))
    )


def start(spark, path: Path, **options):
    return job(path).start(
        spark,
        checkpoint=path / "checkpoint",
        results=path / "results",
        errors=path / "errors",
        **{"shards": 2, "local_dir": path / "local", "trigger": "0 seconds", "until": "end", "retain": 100, **options},
    )


def last_revisions(spark, path: Path):
    rows = spark.read.parquet(str(path / "results")).collect()
    newest = {}
    for row in sorted(rows, key=lambda row: row["revision"]):
        start_ms = round(row["window_start"].timestamp() * 1000)
        newest[(start_ms, row["key"])] = (row["n"], row["worst"], row["typical"])
    return newest


def expected(rows):
    """The windows by plain loops: retention is longer than the disorder, so every message counts."""
    windows = {}
    for row in rows:
        windows.setdefault((row["at"] // MINUTE * MINUTE, row["key"]), []).append(row["x"])
    found = {}
    for window, unsorted in windows.items():
        values = sorted(unsorted)
        middle = len(values) // 2
        typical = values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2
        found[window] = (len(values), values[-1], float(typical))
    return found


def test_a_drain_that_runs_again_does_not_end_a_run_before_the_windows_of_new_input_are_sent(spark, tmp_path):
    """The last driver died in its drain; what comes then is read after that drain, and is to be drained too."""
    write(tmp_path / "archive", messages(300))
    ended(start(spark, tmp_path))
    take_back(tmp_path / "checkpoint", newest_commit(tmp_path / "checkpoint"))
    write(tmp_path / "more", messages(600, first=300))
    for path in (tmp_path / "more").glob("*.parquet"):
        path.rename(tmp_path / "archive" / f"more-{path.name}")
    ended(start(spark, tmp_path))
    assert last_revisions(spark, tmp_path) == expected(messages(600))


def test_runs_that_end_before_spark_copies_its_state_copy_it_themselves(spark, tmp_path, monkeypatch):
    """Spark does once a minute, and cannot write behind 864 versions without; a run behind some has them copied."""

    def newest(shard):
        names = [file.name for file in (tmp_path / "checkpoint" / "state" / "0" / shard).glob("[0-9]*_*.*")]
        version = max(int(name.partition("_")[0]) for name in names)
        return version, {name.rpartition(".")[2] for name in names if int(name.partition("_")[0]) == version}

    versions = []
    for run, (most, kinds) in enumerate([(200, {"changelog"}), (3, {"zip"}), (20, {"changelog"})]):
        monkeypatch.setattr(settings, "MOST_DELTAS_OF_SHORT", most)
        write(tmp_path / "more", messages(1000 * (run + 1), first=1000 * run))
        (tmp_path / "archive").mkdir(exist_ok=True)
        for path in (tmp_path / "more").glob("*.parquet"):
            path.rename(tmp_path / "archive" / f"run-{run}-{path.name}")
        ended(start(spark, tmp_path))
        found = [newest(shard) for shard in "01"]
        versions.append(found[0][0])
        assert [one for _, one in found] == [kinds] * 2
        assert last_revisions(spark, tmp_path) == expected(messages(1000 * (run + 1)))
    assert 3 < versions[0] < versions[1] < versions[2] < versions[1] + 20


def test_sessions_that_are_made_of_one_with_queries_have_their_own(spark, ran, tmp_path):
    """Spark hands on what is registered for one, and lets nothing else have the name."""
    for number, own in enumerate((spark.newSession(), spark, spark.newSession())):
        path = tmp_path / str(number)
        write(path / "archive", messages(300))
        ended(start(own, path))
        assert last_revisions(own, path) == expected(messages(300))


@pytest.fixture(scope="module")
def ran(spark, tmp_path_factory):
    """One job that ran to its end, for the tests that only look."""
    path = tmp_path_factory.mktemp("rules")
    write(path / "archive", messages(1000))
    query = start(spark, path)
    ended(query)
    return path, query


def test_the_windows_are_right_whatever_the_cuts(spark, ran):
    path, query = ran
    assert query.progress.rows == 1000
    assert last_revisions(spark, path) == expected(messages(1000))


def test_sparks_progress_has_the_figures_of_each_micro_batch(ran):
    """What a `StreamingQueryListener` is told; counts by hand, or by what was published."""
    path, query = ran
    told = [progress["observedMetrics"]["rewind"] for progress in query.query.recentProgress if _ran(progress)]
    assert sum(figures["rows"] or 0 for figures in told) == 1000
    results = pq.read_table(path / "results", columns=["reason", "shard", "window_start"])
    published = results["reason"].to_pylist()
    begun = set(zip(results["shard"].to_pylist(), results["window_start"].to_pylist(), strict=True))
    assert sum(figures["opened"] or 0 for figures in told) == len(begun)
    assert sum(figures["results"] or 0 for figures in told) == len(published)
    assert sum(figures["results_late"] or 0 for figures in told) == published.count("late") > 0
    assert told[-1]["messages_stored"] == 1000
    clock = START + 499_000  # of both partitions' last message
    still = [start for _, start in begun if round(start.timestamp() * 1000) + MINUTE > clock]
    assert told[-1]["windows_open"] == len(still) == 2  # one of each shard
    first = max(told, key=lambda figures: figures["rows"] or 0)
    assert first["staged_bytes"] > first["logged_bytes"] > 0  # the messages are staged and not logged
    assert first["operate_ms"] > 0
    assert max(figures["ingest_ms"] or 0 for figures in told) > 0


def test_the_figures_are_parsed_once_a_row(spark):
    """Within each of them it would be a parser made in each task."""
    states = spark.sql("""select 1 as shard, concat('{"rows": ', id, '}') as metrics from range(3)""")
    told = observed(states)
    assert told.columns == ["shard", "metrics"]
    assert told._jdf.queryExecution().executedPlan().toString().count("from_json(") == 1


def _ran(progress):
    return "addBatch" in progress["durationMs"]


def test_sparks_state_holds_the_pointer_only(spark, ran):
    path, _ = ran
    pointers = read_pointers(spark, str(path / "checkpoint"), 2)
    assert sorted(pointers) == [0, 1]
    spark.streams.active  # noqa: B018 - starts the coordinator that the reader asks for
    rows = (
        apart(spark, 2, 1000)
        .read.format("statestore")
        .option("stateVarName", "pointer")
        .load(str(path / "checkpoint"))
        .selectExpr("length(value.value) as bytes")
        .collect()
    )
    assert len(rows) == 2
    assert all(row["bytes"] < 1000 for row in rows)


@pytest.mark.parametrize(
    ("place", "damage"),
    [
        ("0/4_*.changelog", "flipped"),
        ("1/4_*.changelog", "gone"),
        ("_metadata/v2/0", "cut"),
        ("_metadata/v2/0", "empty"),
        ("_metadata/v2/0", "gone"),
    ],
)
def test_a_damaged_file_of_sparks_state_is_named(spark, ran, place, damage):
    """Where it cannot be read, there are no pointers: a start ends by name, before anything is touched."""
    path, _ = ran
    (file,) = (path / "checkpoint" / "state" / "0").glob(place)
    sound = file.read_bytes()
    changed = {"cut": sound[:10], "empty": b"", "flipped": bytes([*sound[:200], sound[200] ^ 1, *sound[201:]])}
    try:
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(changed[damage])
        with pytest.raises(PointerDamaged, match="its state") as caught:
            read_pointers(spark, str(path / "checkpoint"), 2)
        known = place.startswith("_metadata") and damage != "gone"
        assert caught.value.where.endswith(str(file) if known else f"{path}/checkpoint/state")
        assert caught.value.why
        assert "from a copy" in caught.value.command
        with pytest.raises(PointerDamaged):
            start(spark, path)
    finally:
        file.write_bytes(sound)
    assert len(read_pointers(spark, str(path / "checkpoint"), 2)) == 2


@pytest.mark.parametrize("log", ["commits", "offsets"])
def test_a_damaged_file_of_sparks_log_is_named_and_no_state_is_to_be_put_back(spark, ran, log):
    path, _ = ran
    newest = max(int(one.name) for one in (path / "checkpoint" / "commits").iterdir() if one.name.isdigit())
    file = path / "checkpoint" / log / str(newest)
    sound = file.read_bytes()
    try:
        file.write_bytes(bytes([*sound[:-2], sound[-2] ^ 1, sound[-1]]))
        with pytest.raises(PointerDamaged, match="its log") as caught:
            read_pointers(spark, str(path / "checkpoint"), 2)
        assert caught.value.where == str(file)
        assert "leave the rest" in caught.value.command
    finally:
        file.write_bytes(sound)


def test_the_damaged_file_of_what_is_planned_may_be_removed(spark, tmp_path):
    """The driver died between plan and commit, and its disk damaged the plan: nothing else has it."""
    write(tmp_path / "archive", messages(300))
    ended(start(spark, tmp_path))
    newest = newest_commit(tmp_path / "checkpoint")
    take_back(tmp_path / "checkpoint", newest)
    file = tmp_path / "checkpoint" / "offsets" / str(newest)
    file.write_bytes(b"\xff\x00{[")
    with pytest.raises(PointerDamaged, match="is damaged") as caught:
        start(spark, tmp_path)
    assert caught.value.where == str(file)
    assert "remove both" in caught.value.command
    file.unlink()
    file.with_name(f".{newest}.crc").unlink()
    ended(start(spark, tmp_path))
    assert last_revisions(spark, tmp_path) == expected(messages(300))


def test_sparks_damaged_metadata_ends_a_start_by_name(spark, ran):
    """Spark would try to read it again and again: one bit of the id, which stays JSON."""
    path, _ = ran
    file = path / "checkpoint" / "metadata"
    sound = file.read_bytes()
    try:
        file.write_bytes(bytes([*sound[:-4], sound[-4] ^ 1, *sound[-3:]]))
        with pytest.raises(PointerDamaged, match="is damaged") as caught:
            start(spark, path)
        assert caught.value.where == str(file)
    finally:
        file.write_bytes(sound)


def modes(checkpoint: Path) -> set[tuple[str, str]]:
    """Give the modes of what Spark wrote, by name; numbers and random names are one each.

    Snapshots are left out, and what was half written when the query was stopped.
    """
    found = set()
    for path in (path for folder in ("commits", "offsets", "state") for path in (checkpoint / folder).rglob("*")):
        name = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+", "0", str(path.relative_to(checkpoint)))
        found.add((name, oct(path.stat().st_mode)))
    return {(name, mode) for name, mode in found if not any(part in name for part in ("SSTs", ".zip", ".tmp"))}


def test_a_checkpoint_is_written_as_spark_writes_it_without_a_process_for_a_mode(spark, tmp_path, monkeypatch):
    """Names, modes, checksums, what is there already; a mode that Java has no word for is Hadoop's to set."""
    hadoop, conf = spark._jvm.org.apache.hadoop.fs, spark._jsc.hadoopConfiguration()
    stat = Path(f"/proc/{spark._jvm.java.lang.ProcessHandle.current().pid()}/stat")
    left, numbers = [], count_up()

    def processes(manager, folder) -> bool:
        """Write a file and give whether processes of the JVM have ended meanwhile, by their page faults."""
        begun = stat.read_text().rpartition(")")[2].split()[8]
        manager.createAtomic(hadoop.Path(folder, str(next(numbers))), False).close()
        return stat.read_text().rpartition(")")[2].split()[8] != begun

    for name in (file_manager.OURS, file_manager.SPARKS):
        path = tmp_path / name
        write(path / "archive", messages(300))
        if name == file_manager.SPARKS:
            monkeypatch.setattr(file_manager, "is_defined", lambda _: False)
        assert checkpoint_files(spark, str(path))[CHECKPOINT_FILES] == name
        ended(start(spark, path))
        folder, file = hadoop.Path(str(path / "files")), hadoop.Path(str(path / "files" / "file"))
        manager = getattr(spark._jvm, name)(folder, conf)
        manager.mkdirs(folder)
        # what ends behind one file or another may be a source's Python
        assert all(processes(manager, folder) for _ in range(20)) is (name == file_manager.SPARKS)
        for overwrite in (False, True):
            stream = manager.createAtomic(file, overwrite)
            stream.write(bytearray(b"overwritten" if overwrite else b"first"))
            stream.close()
        with pytest.raises(Exception, match=r"(?i)already.?exists"):
            manager.createAtomic(file, False).close()
        written = path / "files" / "file"
        left.append((modes(path / "checkpoint"), written.read_bytes(), oct(written.stat().st_mode)))
        written.write_bytes(b"other")
        with pytest.raises(Exception, match="ChecksumException"):
            manager.open(file).read()
        (path / "files").chmod(0o2755)  # what is made there is its group's
        manager.mkdirs(hadoop.Path(folder, "below"))
        assert oct((path / "files" / "below").stat().st_mode) == "0o42755"
        manager.fs().setPermission(folder, hadoop.permission.FsPermission("1777"))
        assert oct((path / "files").stat().st_mode & 0o1777) == "0o1777"
    assert left[0][0] ^ left[1][0] == set()
    assert left[0][1:] == left[1][1:]
    assert {("commits/.0.crc", "0o100644"), ("offsets/0", "0o100644"), ("state/0", "0o40755")} <= left[0][0]


def test_a_disk_that_does_not_give_a_snapshot_is_no_damage(spark, tmp_path):
    """Spark then tries older ones, and tells only that the oldest is gone, which it deleted itself long ago."""
    write(tmp_path / "archive", messages(1000))
    often = {"minDeltasForSnapshot": "3", "maintenanceInterval": "200ms"}
    names = {f"spark.sql.streaming.stateStore.{name}": value for name, value in often.items()}
    before = {name: spark.conf.get(name) for name in names}
    try:
        for name, value in names.items():
            spark.conf.set(name, value)
        ended(start(spark, tmp_path))
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
    state = tmp_path / "checkpoint" / "state" / "0" / "1"
    until(lambda: list(state.glob("*.zip")), what="a snapshot")
    spark._jvm.org.apache.spark.sql.execution.streaming.state.StateStore.stop()  # else it may write a newer one yet
    versions = {file: int(file.name.partition("_")[0]) for file in state.glob("[0-9]*_*")}
    snapshot = max(state.glob("*.zip"), key=versions.__getitem__)
    for file, version in versions.items():
        if version < versions[snapshot]:
            file.unlink()
    sound = snapshot.read_bytes()
    (state / f".{snapshot.name}.crc").unlink()
    snapshot.unlink()
    snapshot.symlink_to("/proc/self/mem")  # reading its beginning is an input/output error
    with pytest.raises(Exception, match="STATE_STORE") as caught:
        read_pointers(spark, str(tmp_path / "checkpoint"), 2)
    assert read(caught.value).kind is Kind.PASSES
    assert not isinstance(read(caught.value).error, PointerDamaged)
    snapshot.unlink()
    snapshot.write_bytes(sound)
    assert len(read_pointers(spark, str(tmp_path / "checkpoint"), 2)) == 2


def test_pointers_are_read_again_where_a_query_ran_on_beneath_the_reader(spark, ran, monkeypatch):
    """Spark deletes old state beside a reader; where nothing was committed, what is gone is gone."""
    path, _ = ran
    (file,) = (path / "checkpoint" / "state" / "0").glob("0/4_*.changelog")
    sound, versions = file.read_bytes(), replay.versions_in
    looks = []

    def committed_meanwhile(checkpoint, log):
        looks.append(checkpoint)
        if len(looks) == 4:  # behind the second failure: a micro-batch was committed, and what it needs is there
            file.write_bytes(sound)
        return [*versions(checkpoint, log), *([1_000] if len(looks) > 3 else [])]

    try:
        file.unlink()
        monkeypatch.setattr(replay, "versions_in", committed_meanwhile)
        assert len(read_pointers(spark, str(path / "checkpoint"), 2)) == 2
        assert len(looks) == 5
    finally:
        file.write_bytes(sound)


def test_what_only_reads_changes_no_setting_of_the_users_session(spark, ran, monkeypatch):
    path, _ = ran
    changed, change, to_dataframe = [], RuntimeConfig.set, RDD.toDF
    monkeypatch.setattr(RuntimeConfig, "set", lambda conf, *words: changed.append(conf) or change(conf, *words))
    spark.createDataFrame([(1,)], "n int").createOrReplaceTempView("users")
    assert len(read_pointers(spark, str(path / "checkpoint"), 2)) == 2
    clone = apart(spark, 7, 1000)
    assert changed
    assert all(conf is not spark.conf for conf in changed)
    found = [one.conf.get("spark.sql.shuffle.partitions") for one in (clone, spark)]
    assert found == ["7", "2"]
    checksums = "spark.sql.streaming.checkpoint.fileChecksum.enabled"
    reader = apart(spark, 2, 1000, str(path / "checkpoint"))
    found = [one.conf.get(checksums) for one in (reader, clone, spark)]
    assert found == ["false", "true", "true"], "state is read as our queries write it: Spark warned of each file else"
    assert clone.table("users").collect() == [(1,)], "it has what the session has"
    assert RDD.toDF is to_dataframe, "what RDDs become belongs to whom it did"
    spark.catalog.dropTempView("users")


def test_each_shard_staged_once_per_micro_batch(ran):
    """Two actions on a micro-batch would run the operator twice: two staged files of one version."""
    path, query = ran
    for shard in ("0", "1"):
        staged = Counter(int(file.name.split("_")[0]) for file in (path / "local").glob(f"*/{shard}/*/staged/*.sst"))
        assert staged
        assert set(staged.values()) == {1}
        assert max(staged) == query.progress.version


def test_nothing_shuffles_after_the_operator(spark, ran, capsys):
    _, query = ran
    query.query.explain()
    plan = capsys.readouterr().out
    above, operator, below = plan.partition("TransformWithStateInPySpark")
    assert operator
    assert "Exchange" not in above
    assert below.count("Exchange") == 1


def test_a_lost_disk_is_restored_and_the_end_is_the_same(spark, ran, tmp_path):
    path, _ = ran
    again = tmp_path / "again"
    shutil.copytree(path, again, symlinks=True)
    for moved in ("results", "errors"):
        shutil.rmtree(again / moved)
    # the same checkpoint, no local state, and three hundred messages more
    write(again / "archive" / "more", messages(1300, first=1000))
    shutil.rmtree(again / "local")
    seen = []

    class Listener:
        def start(self, restoring):
            why = "its state was missing, and its input is queued"
            seen.append(("start", restoring.shard, restoring.how, why in restoring.why))

        def batch(self, *_):
            seen.append(("batch",))

        def suspended(self, restoring, why):
            seen.append(("suspended", why))

        def end(self, restoring, records, length, seconds):
            seen.append(("end", restoring.shard))

    path.rename(away := path.with_name("away"))  # nothing may still be read at the place that the copy was made of
    with pytest.raises(ManifestMismatch, match="rewind outputs"):  # its outputs were not moved with it
        start(spark, again)
    forget_outputs(str(again / "checkpoint"))
    try:
        query = start(spark, again, listeners=(Listener(),))
        ended(query)
    finally:
        away.rename(path)
    assert (query.progress.restores, query.progress.adopted) == (0, 2)
    assert ("start", 0, "replay", True) in seen
    assert ("start", 1, "replay", True) in seen
    assert {event for event in seen if event[0] == "end"} == {("end", 0), ("end", 1)}
    touched = expected(messages(1300))
    found = last_revisions(spark, again)
    assert {window: found[window] for window in found} == {window: touched[window] for window in found}
    assert {window for window in touched if touched[window] != expected(messages(1000)).get(window)} <= set(found)


def test_another_window_on_an_old_checkpoint_is_refused_with_the_difference(spark, ran, tmp_path):
    path, _ = ran
    source = archive(str(path / "archive"), value="key string, x long, at long")
    other = (
        stream(source, event_time="at", key="key")
        .window(tumbling("2 minutes"), retention="1 hour")
        .aggregate(n=count(), worst=max_("x"), typical=median("x"))
    )
    with pytest.raises(ManifestMismatch, match="window"):
        other.start(spark, checkpoint=path / "checkpoint", results=tmp_path / "r", errors=tmp_path / "e", shards=2)


def test_a_refused_start_leaves_the_checkpoint_as_it_was(spark, ran, tmp_path):
    """`rewind restore` and `verify` go by what the manifest says: not by a wrong option that was refused."""
    path, _ = ran
    ours = path / "checkpoint" / "rewind"
    before = {file.name: file.read_bytes() for file in ours.glob("*.json")}
    with pytest.raises(HistoryLost, match="the changelog has lost a shard's state"):
        start(spark, path, changelog=str(tmp_path / "wrong"), local_dir=tmp_path / "lost")
    assert {file.name: file.read_bytes() for file in ours.glob("*.json")} == before
    assert not (tmp_path / "wrong").exists()


def test_a_start_that_waited_for_another_query_does_not_go_by_what_it_saw_before(spark, tmp_path, monkeypatch):
    write(tmp_path / "archive", messages(100))
    take = starting.take_lease

    def late(checkpoint, what, undo):
        monkeypatch.setattr(starting, "take_lease", take)
        ended(start(spark, tmp_path))  # another host's query, which this start waits for
        return take(checkpoint, what, undo)

    monkeypatch.setattr(starting, "take_lease", late)
    with pytest.raises(CheckpointInUse, match="another query ran on the checkpoint while this start waited for it"):
        start(spark, tmp_path)
    ended(start(spark, tmp_path))
    assert last_revisions(spark, tmp_path) == expected(messages(100))


class Told(CollectSink):
    """A sink that takes note of what it is told before it is opened, and opens for nobody."""

    planned = None

    def resume_from(self, planned):
        self.planned = planned

    def open(self, query):
        raise ValueError("this sink stays closed")


def test_a_sink_is_told_the_newest_planned_micro_batch_before_it_is_opened(spark, ran, tmp_path):
    path, _ = ran
    planned = [int(name.name) for name in (path / "checkpoint" / "offsets").iterdir() if name.name.isdecimal()]
    shutil.copytree(path / "archive", tmp_path / "archive")
    forget_outputs(str(path / "checkpoint"))
    for where, newest in ((path, -1), (path, max(planned)), (tmp_path, -1)):
        sink = Told()
        if newest >= 0:  # a checkpoint that says nothing of its outputs
            (where / "checkpoint" / NAME).unlink()
        with pytest.raises(ValueError, match="this sink stays closed"):
            job(where).start(spark, checkpoint=where / "checkpoint", sink=sink, shards=2, until="end", retain=100)
        assert sink.planned == newest


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"route": "nowhere"}, "route='nowhere'"),
        ({"shards": 0}, "shards=0"),
        ({"until": "noon"}, "until='noon'"),
        ({"trigger": "often"}, "trigger='often'"),
        ({"retain": 0}, "retain=0"),
        ({"snapshots": True}, "snapshots=True"),
    ],
)
def test_bad_options_fail_before_anything_starts(spark, tmp_path, options, named):
    write(tmp_path / "archive", messages(10))
    with pytest.raises(ValueError, match=named):
        start(spark, tmp_path, **options)
    assert not (tmp_path / "checkpoint").exists()


@pytest.mark.parametrize("option", ["checkpoint", "results", "errors", "local_dir", "changelog"])
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("another/out", "lies in the checkpoint of another query"),
        ("a_file", "a_file is a file: allowed is a directory|must be a directory on a POSIX"),
        ("a_file/in/it", "a_file is a file: allowed is a directory|must be a directory on a POSIX"),
    ],
)
def test_a_place_that_is_another_s_or_a_file_is_refused_and_nothing_is_made(spark, ran, tmp_path, option, place, says):
    write(tmp_path / "archive", messages(10))
    (tmp_path / "a_file").touch()
    (tmp_path / "another").symlink_to(ran[0] / "checkpoint")
    before = sorted(tmp_path.rglob("*"))
    places = {name: tmp_path / name for name in ("checkpoint", "results", "errors", "local_dir")}
    with pytest.raises(ValueError, match=f"^{option}='.*{place}': .*({says})"):
        job(tmp_path).start(spark, **{**places, option: str(tmp_path / place)}, shards=2, until="end")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("event_time", "key", "named"),
    [("nowhen", "key", "event_time='nowhen'"), ("key", "key", "event_time='key'"), ("at", "nokey", "key='nokey'")],
)
def test_unknown_fields_fail_before_anything_starts(spark, tmp_path, event_time, key, named):
    write(tmp_path / "archive", messages(10))
    source = archive(str(tmp_path / "archive"), value="key string, x long, at long")
    with pytest.raises(ValueError, match=named):
        stream(source, event_time=event_time, key=key).window(tumbling("1 minute"), retention="1 hour").aggregate(
            n=count()
        ).start(spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e")


def test_a_typing_error_in_the_fields_is_a_value_error(spark):
    with pytest.raises(ValueError, match=r"value='user strnig': is not Spark DDL.*STRNIG"):
        archive("nowhere", value="user strnig").fields()
    with pytest.raises(ValueError, match=r"value='k string, K string': the field 'k' is named twice"):
        archive("nowhere", value="k string, K string").fields()
    with pytest.raises(ValueError, match="key='user strnig': is not Spark DDL"):
        kafka("t", servers="localhost:1", value="x long", key="user strnig").fields()


def test_windows_without_a_key_and_sessions_by_number_need_one_shard_or_partition_routing(spark, tmp_path):
    write(tmp_path / "archive", messages(10))
    source = archive(str(tmp_path / "archive"), value="key string, x long, at long")
    whole = stream(source, event_time="at").window(tumbling("1 minute"), retention="1 hour").aggregate(n=count())
    with pytest.raises(ValueError, match="shards=2"):
        whole.start(spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e", shards=2)
    visits = stream(source, event_time="at", key="key").window(session(messages=5)).aggregate(n=count())
    with pytest.raises(ValueError, match="shards=2"):
        visits.start(spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e", shards=2)


def test_the_shards_grouping_values_fall_into_their_partitions(spark):
    from backend.spark.pack.routing import grouping_values, murmur3_int

    found = spark.sql("select hash(0) a, hash(1) b, hash(12345) c, hash(-7) d").collect()[0]
    assert (found.a, found.b, found.c, found.d) == tuple(murmur3_int(v) for v in (0, 1, 12345, -7))
    for shards in (1, 2, 3, 8):
        values = grouping_values(shards)
        rows = spark.createDataFrame([(value,) for value in values], "v int").repartition(shards, "v")
        placed = rows.selectExpr("v", "spark_partition_id() as p").collect()
        assert {row.v: row.p for row in placed} == {value: shard for shard, value in enumerate(values)}
