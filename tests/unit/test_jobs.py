"""Where an executor keeps a shard's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import place


def test_executors_have_directories_of_their_own_when_told_by_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Path("$SPARK_EXECUTOR_DIRS/rewind")
    monkeypatch.setenv("SPARK_EXECUTOR_DIRS", "/disks/spark-1/executor-7")
    assert place(told, 0) == place(told, 5) == Path("/disks/spark-1/executor-7/rewind")
    monkeypatch.setenv("SPARK_EXECUTOR_DIRS", "/one/executor-8:/two/executor-8")
    assert [place(told, shard) for shard in range(3)] == [
        Path("/one/executor-8/rewind"),
        Path("/two/executor-8/rewind"),
        Path("/one/executor-8/rewind"),
    ]
    assert place(Path("${SPARK_EXECUTOR_DIRS}/rewind"), 1) == Path("/two/executor-8/rewind")


def test_without_variables_executors_of_a_host_share_one() -> None:
    assert place(Path("/var/rewind"), 3) == Path("/var/rewind")


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("REWIND_NOWHERE", raising=False)
    if value is not None:
        monkeypatch.setenv("REWIND_NOWHERE", value)
    with pytest.raises(ValueError, match="not set"):
        ShardDirectory(place(Path("$REWIND_NOWHERE/rewind"), 0), "query", 0)
