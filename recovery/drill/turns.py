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


def hold(folder: Path, turn: int, _: object) -> None:
    """Hold the slot of the executor that this runs on, and tell which one it is by its disk."""
    draft = folder / f".{turn}"
    draft.write_text(os.environ["SPARK_EXECUTOR_DIRS"])
    draft.rename(folder / f"held-{turn}")
    until((folder / f"release-{turn}").exists, f"turn {turn} is not released")


class Turns:
    """Whose turn it is; two executors of one core each.

    Args:
        spark: The session.
        folder: Made here; driver and executors share it.
    """

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._context, self._folder, self._turn = context_of(spark), folder, -1
        folder.mkdir(parents=True)

    def next(self) -> str:
        """Hold the slot that is free and release the other one, while no other task runs; give the held one's disk."""
        self._turn += 1
        task = partial(hold, self._folder, self._turn)
        threading.Thread(target=lambda: self._context.parallelize([0], 1).foreach(task), daemon=True).start()
        held = self._folder / f"held-{self._turn}"
        until(held.exists, f"turn {self._turn} found no slot")
        (self._folder / f"release-{self._turn - 1}").touch()
        return held.read_text()

    def end(self) -> None:
        """Release the slot that is held."""
        (self._folder / f"release-{self._turn}").touch()


class InTurns(ParquetSink):
    """The Parquet sink, with another executor's turn at every micro-batch.

    Args:
        results: As in `ParquetSink`.
        errors: As in `ParquetSink`.
        turns: Whose turn it is.
    """

    def __init__(self, results: Path, errors: Path, turns: Turns) -> None:
        super().__init__(results, errors)
        self._turns = turns

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Let the other executor run the micro-batch."""
        self._turns.next()
        return super().publish(frames, version)
