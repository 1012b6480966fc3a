"""The connector's "data loss" by name, and where a query goes on according to Spark's offset log."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from backend.errors import HistoryLost, SourceWentBack, StateCorrupted
from backend.kafka_client.loss import named_loss
from backend.spark import resume
from backend.spark.resume import check_resumable, clear_unplanned, committed_positions
from recovery.commit.option_sets import newest_in
from recovery.failures import Link, QueryFailed, losses_named, read

SAID = (
    "[KAFKA_DATA_LOSS.{}] Some data may have been lost because they are not available "
    "in Kafka any more; either the data was aged out by Kafka or the topic may have been deleted before all the data "
    "in the topic was processed. If you don't want your streaming query to fail on such cases, set the source option "
    "failOnDataLoss to false. Reason: {} SQLSTATE: 22000"
)
AGED = SAID.format("START_OFFSET_RESET", "Starting offset for t-0 was 3 but consumer reset to 6.")


@pytest.mark.parametrize(
    ("kind", "reason", "expected"),
    [
        ("START_OFFSET_RESET", "Starting offset for t-0 was 3 but consumer reset to 6.", HistoryLost),
        ("COULD_NOT_READ_OFFSET_RANGE", "Could not read records in offset [3, 6) for topic partition t-0", HistoryLost),
        ("PARTITION_OFFSET_CHANGED", "Partition t-0 offset was changed from 3 to 6.", HistoryLost),
        ("PARTITION_OFFSET_CHANGED", "Partition t-0 offset was changed from 6 to 3.", SourceWentBack),
        ("PARTITIONS_DELETED", "Partitions t-1 have been deleted.", SourceWentBack),
    ],
)
def test_each_kind_of_loss_is_named_with_its_reason_and_without_sparks_advice(kind, reason, expected):
    found = named_loss(SAID.format(kind, reason))
    assert type(found) is expected
    assert reason in str(found)
    assert kind in str(found)
    assert "failOnDataLoss" not in str(found)
    assert found.command


def test_only_the_connectors_loss_is_renamed():
    def nothing_is_gone() -> None:
        asked.append(1)

    def gone() -> None:
        raise HistoryLost("found when it was asked again")

    asked: list[int] = []
    with pytest.raises(HistoryLost, match="START_OFFSET_RESET"), losses_named(gone):
        raise QueryFailed("", (Link("org.apache.spark.SparkException", AGED),))
    with pytest.raises(HistoryLost, match="asked again"), losses_named(gone):
        raise RuntimeError("task failed: UnknownReason")
    with pytest.raises(KeyError), losses_named(nothing_is_gone):
        raise KeyError("x")
    assert asked == [1]
    with pytest.raises(SourceWentBack, match="mine"), losses_named(gone):
        raise SourceWentBack("mine")
    for said in (AGED, f"org.apache.spark.SparkException: {AGED}"):  # what a user's function can say, too
        plain = RuntimeError(said)
        assert read(plain).error is plain


class Told:
    def __init__(self) -> None:
        self.asked: list[object] = []

    def check_positions(self, positions: object) -> None:
        self.asked.append(positions)


def test_the_last_committed_micro_batch_says_where_it_goes_on(tmp_path: Path):
    sources = [Told(), object(), Told()]
    check_resumable(str(tmp_path), sources)
    assert sources[0].asked == []
    for version, offset in ((9, 70), (10, 80), (11, 90)):
        lines = ["v1", '{"batchWatermarkMs":0}', f'{{"t":{{"0":{offset},"10":5}}}}', "-", '{"logOffset":0}']
        (tmp_path / "offsets").mkdir(exist_ok=True)
        (tmp_path / "offsets" / str(version)).write_text("\n".join(lines))
    (tmp_path / "commits").mkdir()
    for name in ("9", "10", ".11.crc"):  # 11 is planned, not committed
        (tmp_path / "commits" / name).write_text("v1")
    assert committed_positions(str(tmp_path)) == [{("t", 0): 80, ("t", 10): 5}, {}, {}]
    check_resumable(str(tmp_path), sources)
    assert (sources[0].asked, sources[2].asked) == ([{("t", 0): 80, ("t", 10): 5}], [])

    (tmp_path / "offsets" / "10").unlink()
    with pytest.raises(StateCorrupted, match="commits/10 says that") as caught:
        check_resumable(str(tmp_path), sources)
    assert caught.value.where.endswith("offsets/10") and "rewind reset" in caught.value.command


def test_nothing_planned_leaves_nothing_behind_but_what_is_not_sparks_own(tmp_path: Path):
    def put(name: str) -> Path:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("v1")
        return tmp_path / name

    # what Spark's maintenance uploads late, and what a driver leaves that dies while it writes
    late = ["state/0/0/11_f96debf9-23d0-4212-a18f-c8449647d635.zip", "state/0/1/SSTs/.000015-457ce9b2.sst.crc"]
    drafts = ["offsets/.0.e0774d60-ebe9-435c-86c6-62265b0eeb73.tmp", "offsets/..0.e0774d60.tmp.crc", "commits/.0.crc"]
    found = [put(name) for name in (*late, *drafts)]
    clear_unplanned(str(tmp_path))
    assert not any(one.exists() for one in found)
    assert not (tmp_path / "state/0").exists()

    for name, text in (
        ("state/0/_metadata/v2/0", "state/0"),
        ("state/0/readme", "state/0"),
        ("state/mine/0/photo.jpg", "state/mine"),
        ("state/readme", "state/readme"),
        ("offsets/readme", "offsets/readme"),
        ("commits/x/y", "commits/x"),
    ):
        there = put(name)
        with pytest.raises(StateCorrupted, match="neither offsets nor commits") as caught:
            clear_unplanned(str(tmp_path))
        assert caught.value.where == f"{tmp_path}/{text}"
        assert "rewind reset" in caught.value.command
        assert there.exists(), "nobody else's is deleted"
        shutil.rmtree(tmp_path / Path(name).parts[0])

    for planned in ("offsets/0", "commits/0"):
        kept = [put(planned), *map(put, late)]
        clear_unplanned(str(tmp_path))
        assert all(one.exists() for one in kept)
        kept[0].unlink()


@pytest.mark.parametrize(
    ("offsets", "hole"), [((3, 4), False), ((3, 4, 5), False), ((3, 4, 6), True), ((4, 5, 6), True)]
)
def test_logs_that_were_taken_back_in_part_are_named(tmp_path: Path, offsets: tuple[int, ...], hole: bool) -> None:
    for log, versions in (("commits", (3, 4)), ("offsets", offsets)):
        (tmp_path / log).mkdir()
        for version in versions:
            (tmp_path / log / str(version)).write_text('v1\n{}\n{"t": {"0": 5}}')
    says = pytest.raises(StateCorrupted, match="micro-batch 6 is planned, and the last one that is committed is 4")
    with says if hole else nullcontext():
        check_resumable(str(tmp_path), [])


def test_a_query_that_runs_meanwhile_makes_no_hole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(checkpoint: str, log: str) -> int:
        found = newest_in(checkpoint, log)
        for kind, version in (("commits", newest[0] + 1), ("offsets", newest[0] + 2)):
            (tmp_path / kind / str(version)).write_text("v1\n{}")
        newest[0] += 1
        return found

    newest = [0]
    for log, versions in (("commits", (0,)), ("offsets", (0, 1))):
        (tmp_path / log).mkdir()
        for version in versions:
            (tmp_path / log / str(version)).write_text("v1\n{}")
    monkeypatch.setattr(resume, "newest_in", goes_on)
    check_resumable(str(tmp_path), [])
    assert newest[0] > 1


@pytest.mark.parametrize(("offsets", "gone"), [((0,), False), ((0, 1), True), ((3,), True)])
def test_a_log_of_commits_that_is_gone_is_named(tmp_path: Path, offsets: tuple[int, ...], gone: bool) -> None:
    (tmp_path / "offsets").mkdir()
    for version in offsets:
        (tmp_path / "offsets" / str(version)).write_text('v1\n{}\n{"t": {"0": 5}}')
    says = pytest.raises(StateCorrupted, match=f"micro-batch {offsets[-1]} is planned, and none is committed")
    with says if gone else nullcontext() as caught:
        check_resumable(str(tmp_path), [])
    if caught is not None:
        assert caught.value.where == f"{tmp_path}/commits"
        assert "rewind reset" in caught.value.command
