"""Turns: one executor only runs the tasks of a micro-batch, another one those of the next.

Nothing in Spark says where a task must run. So a task that only waits holds the slot of every other executor: with two
executors of one core each, whoever had the last turn.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.sinks.parquet import ParquetSink
from backend.spark.session.jvm import context_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_S = 240.0
_POLL_S = 0.01


def until(there: Callable[[], bool], what: str) -> None:
    """Wait for something.

    Raises:
        TimeoutError: It did not happen within `WAIT_S`.
    """
    deadline = time.monotonic() + WAIT_S
    while not there():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(_POLL_S)


def hold(folder: Path, number: int, _: object) -> None:
    """Hold the slot of the executor that this runs on, and tell which one it is by its disk."""
    draft = folder / f".{number}"
    draft.write_text(os.environ["SPARK_EXECUTOR_DIRS"])
    draft.rename(folder / f"taken-{number}")
    until((folder / f"release-{number}").exists, f"round {number} is not released")


class Alternation:
    """Whose turn it is; two executors of one core each.

    Args:
        spark: The session.
        folder: Made here; driver and executors share it.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._context, self._folder, self._round = context_of(spark), folder, -1
        folder.mkdir(parents=True)

    def next(self) -> str:
        """Hold the slot that is free and release the other one, while no other task runs; give the held one's disk."""
        self._round += 1
        task = partial(hold, self._folder, self._round)
        threading.Thread(target=lambda: self._context.parallelize([0], 1).foreach(task), daemon=True).start()
        mark = self._folder / f"taken-{self._round}"
        until(mark.exists, f"round {self._round} found no slot")
        (self._folder / f"release-{self._round - 1}").touch()
        return mark.read_text()

    def end(self) -> None:
        """Release the slot that is held."""
        (self._folder / f"release-{self._round}").touch()


class AlternatingSink(ParquetSink):
    """The Parquet sink, with another executor's turn at every micro-batch.

    Args:
        results: As in `ParquetSink`.
        errors: As in `ParquetSink`.
        alternation: Whose turn it is.
    """

    def __init__(self, results: Path, errors: Path, alternation: Alternation) -> None:
        super().__init__(results, errors)
        self._alternation = alternation

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Let the other executor run the micro-batch."""
        self._alternation.next()
        return super().publish(frames, version)
