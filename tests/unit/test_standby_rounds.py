"""When a round of copies is due, towards what, and what becomes of one that fails."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.errors import StateCorrupted
from backend.store.storage import storage_failed
from recovery.commit.pointer import Commit
from recovery.restore import standby as copies
from recovery.restore.standby import Disks, Given, Round, bring_copies, keep_copies
from recovery.snapshots.publisher import Snapshots
from recovery.supervise import standby as rounds
from recovery.supervise.housekeeping import Housekeeping
from recovery.supervise.standby import BUSY_S, IDLE_S, Standby


def commit(version: int) -> Commit:
    return Commit(version, f"{version % 10}" * 32)


def jobs_on(directory: Path) -> Any:
    """Return what makes the job of a shard, for a host whose disk is a directory."""
    return lambda shard: SimpleNamespace(query_id="q", local_dir=directory, shard=shard, where=f"shard {shard}")


def one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the two tasks of a round here."""
    monkeypatch.setattr(copies, "cores", lambda _: 1)
    monkeypatch.setattr(copies, "run_on_tasks", lambda _, items, work: [out for item in items for out in work([item])])


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def rounds_of(standby: Standby, clock: Clock, commits: Mapping[int, Commit], *after_s: float) -> None:
    for pause_s in after_s:
        clock.at += pause_s
        standby.look(commits)
        if standby._thread is not None:
            standby._thread.join()


def test_rounds_follow_commits_and_go_on_slowly_without_any() -> None:
    clock, asked = Clock(), list[tuple[float, dict[int, Commit]]]()

    def copy(commits: Mapping[int, Commit]) -> Round:
        asked.append((clock.at, dict(commits)))
        return Round(7)

    standby = Standby(copy, {1: commit(3)}, clock=clock)
    rounds_of(standby, clock, {}, 0, 1, IDLE_S - 1)
    rounds_of(standby, clock, {0: commit(4)}, BUSY_S - 0.5, 0.5, 1)
    rounds_of(standby, clock, {0: commit(5)}, BUSY_S)
    assert [at - 100 for at, _ in asked] == [0, IDLE_S, IDLE_S + BUSY_S, IDLE_S + 2 * BUSY_S + 1]
    known = [{1: commit(3)}, {1: commit(3)}, {0: commit(4), 1: commit(3)}, {0: commit(5), 1: commit(3)}]
    assert [commits for _, commits in asked] == known
    assert standby.fetched == 28


def test_a_copy_that_lacks_more_is_brought_on_at_once_one_that_gets_nothing_slowly() -> None:
    clock, at, answers = Clock(), list[float](), [Round(7, behind=True), Round(7, behind=True), Round(0, behind=True)]
    standby = Standby(
        lambda _: at.append(clock.at) or (answers.pop(0) if answers else Round()),  # type: ignore[func-returns-value]
        {0: commit(3)},
        clock=clock,
    )
    rounds_of(standby, clock, {}, 0, BUSY_S - 0.5, 0.5, BUSY_S, BUSY_S, IDLE_S - BUSY_S, BUSY_S)
    assert [one - 100 for one in at] == [0, BUSY_S, 2 * BUSY_S, 2 * BUSY_S + IDLE_S]


def test_nothing_is_copied_before_something_is_committed() -> None:
    standby = Standby(lambda _: pytest.fail("nothing to copy"), {}, clock=Clock())
    standby.look({})
    assert standby._thread is None


def test_what_fails_is_told_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, answers = Clock(), list[Any]()
    answers += [RuntimeError("Job 7 cancelled\nat org.apache.spark"), Round(0, {3: "shard 3: no space"}), Round(5)]

    def copy(_: Mapping[int, Commit]) -> Round:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    standby = Standby(copy, {0: commit(1)}, clock=clock)
    rounds_of(standby, clock, {}, 0, IDLE_S, IDLE_S)
    said = [record.getMessage().partition("again: ")[2] for record in caplog.records]
    assert said == ["Job 7 cancelled", "shard 3: no space"]
    assert standby.fetched == 5


def test_one_round_at_a_time_and_join_ends_it() -> None:
    begun, ended, many = threading.Event(), threading.Event(), []

    def copy(_: Mapping[int, Commit]) -> Round:
        many.append(1)
        begun.set()
        assert ended.wait(20)
        return Round()

    clock = Clock()
    standby = Standby(copy, {0: commit(1)}, cancel=ended.set, clock=clock)
    standby.look({})
    assert begun.wait(20)
    clock.at += 2 * IDLE_S
    standby.look({0: commit(2)})
    standby.join()
    assert len(many) == 1


def test_join_cancels_until_the_round_has_ended_and_outlives_a_session_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended, cancels = threading.Event(), []

    def cancel() -> None:
        cancels.append(1)
        if len(cancels) == 3:  # the first ones came before the job was submitted
            ended.set()
        raise AttributeError("'NoneType' object has no attribute 'sc'")

    monkeypatch.setattr(rounds, "CANCEL_S", 0.01)
    standby = Standby(lambda _: Round(int(ended.wait(20))), {0: commit(1)}, cancel=cancel, clock=Clock())
    standby.join()  # before the first round
    standby.look({})
    standby.join()
    assert (len(cancels), standby.fetched) == (3, 1)
    standby.join()
    assert len(cancels) == 3


def test_join_waits_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "CANCEL_S", 0.01)
    monkeypatch.setattr(rounds, "JOIN_S", 0.1)
    ended = threading.Event()
    standby = Standby(lambda _: Round(int(ended.wait(20))), {0: commit(1)}, clock=Clock())
    standby.look({})
    standby.join()
    assert standby._thread is not None
    assert standby._thread.is_alive()
    ended.set()
    standby._thread.join()


def test_copies_go_towards_what_spark_has_committed(tmp_path: Path) -> None:
    keeping = Housekeeping(lambda: pytest.fail("not pruned"), Snapshots(str(tmp_path)), 100)
    for version in (3, 4, 5):
        keeping.made(0, commit(version))
    keeping.made(1, commit(5))
    assert keeping.newest(4) == {0: commit(4)}
    assert keeping.newest(5) == {0: commit(5), 1: commit(5)}


def test_one_task_works_on_a_disk_and_what_fails_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    made = jobs_on(tmp_path)

    def keep(job: Any, to: Commit, most: int) -> Given:
        seen.append((job.shard, to))
        if len(seen) == 1:  # while it works, another task of the round comes to the same disk
            assert copies._on_this_disk(5, [made(0)], [to], Disks.ALL) == Round(busy=True)
        if job.shard == 1:
            raise OSError("no space left")
        return Given(10)

    monkeypatch.setattr(copies, "keep_copy", keep)
    one_after_another(monkeypatch)
    commits = {2: commit(7), 0: commit(6), 1: commit(7)}
    failed = {1: "shard 1: no space left"}
    whole = dict.fromkeys((0, 1), frozenset({0, 2}))
    assert keep_copies(None, made, commits, Disks.ALL) == Round(40, failed, whole=whole)  # type: ignore[arg-type]
    assert seen == [(0, commit(6)), (1, commit(7)), (2, commit(7))] * 2
    assert keep_copies(None, made, {}, Disks.ALL) == Round()  # type: ignore[arg-type]


@pytest.mark.parametrize("behind", [True, False])
def test_a_round_is_behind_where_one_copy_is(behind: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_after_another(monkeypatch)
    monkeypatch.setattr(copies, "keep_copy", lambda job, *_: Given(5, behind) if job.shard == 0 else Given(1))
    made = keep_copies(None, jobs_on(tmp_path), {0: commit(3), 1: commit(3)}, Disks.ALL)  # type: ignore[arg-type]
    whole = frozenset({1} if behind else {0, 1})
    assert made == Round(12, behind=behind, whole={0: whole, 1: whole})


def test_a_package_is_brought_whole_to_where_its_shard_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = {0: [10, 5], 1: [10]}

    monkeypatch.setattr(copies, "keep_copy", lambda job, *_: Given(left[job.shard].pop(0) if left[job.shard] else 0))
    one_after_another(monkeypatch)
    (tmp_path / "q" / "0").mkdir(parents=True)
    assert not bring_copies(None, jobs_on(tmp_path), {0: commit(3), 1: commit(3)})  # type: ignore[arg-type]
    assert left == {0: [], 1: [10]}
    assert caplog.records == []
    (tmp_path / "q" / "1").mkdir()
    left[0], left[1] = [10], [10, 10]

    def keep(job: Any, *_: object) -> Given:
        if job.shard == 0:
            raise OSError("no space left")
        return Given(left[1].pop() if left[1] else 0)

    monkeypatch.setattr(copies, "keep_copy", keep)
    found = bring_copies(None, jobs_on(tmp_path), {0: commit(3), 1: commit(3)})  # type: ignore[arg-type]
    assert found == frozenset(), "its task fetches it"
    assert left[1] == [], "one that fails ends nothing for the others"
    assert "shard 0 was not brought to where it runs: shard 0: no space left" in caplog.text


def test_only_what_is_wrong_with_a_snapshot_itself_is_called_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_after_another(monkeypatch)
    input_output, full = OSError(errno.EIO, "Input/output error"), OSError(errno.ENOSPC, "No space left on device")
    here, there = str(tmp_path / "q" / "standby-1" / "db" / "1.sst"), str(tmp_path / "snapshots" / "0" / "1.sst")
    errors: list[Exception] = [
        StateCorrupted("a snapshot cannot be used", where=there),
        storage_failed(input_output, there),
        StateCorrupted("a snapshot cannot be used", where="s3a://bucket/0/1.sst"),
        StateCorrupted("the local copy is damaged", where=here),
        storage_failed(input_output, here),
        storage_failed(full, here),
        storage_failed(OSError(errno.ETIMEDOUT, "timed out"), "s3a://bucket/0/1.sst"),
        FileExistsError("there is something already"),
    ]

    def keep(job: Any, *_: object) -> Given:
        raise errors[job.shard]

    monkeypatch.setattr(copies, "keep_copy", keep)
    commits = {shard: commit(3) for shard in range(len(errors))}
    for shard in commits:
        (tmp_path / "q" / str(shard)).mkdir(parents=True)
    assert bring_copies(None, jobs_on(tmp_path), commits) == {0, 1, 2}  # type: ignore[arg-type]


def test_what_is_given_back_is_copied_to_new_disks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of one that was left has other shards too; a new one has none, or what this put there."""
    seen: list[int] = []
    monkeypatch.setattr(copies, "keep_copy", lambda job, *_: seen.append(job.shard) or Given(1))  # type: ignore[func-returns-value]
    one_after_another(monkeypatch)
    made, commits = jobs_on(tmp_path), {0: commit(3), 1: commit(3)}

    def copied(*there: int) -> list[int]:
        seen.clear()
        for shard in there:
            (tmp_path / "q" / str(shard)).mkdir(parents=True, exist_ok=True)
        found = keep_copies(None, made, commits, Disks.NEW)  # type: ignore[arg-type]
        assert found.whole == dict.fromkeys((0, 1), frozenset(seen)), "what it passed over is not there"
        return seen[: len(seen) // 2]  # of the first of two tasks

    assert copied() == [0, 1]
    (tmp_path / "q" / "incoming-1").mkdir()
    assert copied(0) == [0, 1]
    assert copied(7) == [0], "its own is brought on"
    assert copied(1) == [0, 1]


def test_without_a_standby_there_are_rounds_while_shards_are_to_be_given_back() -> None:
    clock, asked, given = Clock(), list[dict[int, Commit]](), list[str]()
    placement = SimpleNamespace(
        returning=frozenset[int](),
        look=lambda _: given.append("looked"),
        copied=lambda _, copies: given.append(f"copied {copies}"),
    )
    made = lambda commits: asked.append(commits) or Round()  # type: ignore[func-returns-value]  # noqa: E731
    standby = Standby(made, {}, placement=placement, clock=clock, always=False)  # type: ignore[arg-type]
    commits = {shard: commit(3) for shard in (0, 1, 2)}
    rounds_of(standby, clock, commits, IDLE_S, IDLE_S)
    assert asked == []
    placement.returning = frozenset({1})
    rounds_of(standby, clock, commits, 0)
    assert asked == [{1: commit(3)}]
    rounds_of(standby, clock, commits | {1: commit(4)}, BUSY_S)
    assert len(asked) == 1, "the first one brought nothing"
    rounds_of(standby, clock, {}, IDLE_S - BUSY_S)
    placement.returning = frozenset()
    rounds_of(standby, clock, commits, IDLE_S)
    assert asked[1:] == [{1: commit(4)}]
    assert given == ["looked"] * 4 + ["copied []", "looked", "looked", "copied []"]


def test_what_spark_raises_or_a_busy_standby_does_not_end_a_restore(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[Any] = [Round(busy=True), Round(busy=True), Round(9), Round(), RuntimeError("no executors\nat")]

    def keep(*_: object, **__: object) -> Round:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    monkeypatch.setattr(copies, "keep_copies", keep)
    monkeypatch.setattr(copies, "WAIT_S", 0.0)
    assert not bring_copies(None, None, {0: commit(3)})  # type: ignore[arg-type]
    assert len(answers) == 1
    assert not bring_copies(None, None, {0: commit(3)})  # type: ignore[arg-type]
    assert "shard 0 was not brought to where it runs: no executors" in caplog.text
