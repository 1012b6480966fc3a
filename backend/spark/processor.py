"""The wrapper that Spark's stateful operator calls: one ValueState per shard holds the pointer, one timer wakes it.

Spark also starts it on the driver, in a process of its own that asks for the state's schema and nothing else. So what
it does with rows is made when there are some (`backend.spark.shard_task`), and this module imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    StatefulProcessorHandle,
    TimerValues,
)
from pyspark.sql.types import BinaryType, StructField, StructType

from backend.spark.deferred import Deferred

if TYPE_CHECKING:
    import pandas as pd

    from backend.spark.shard_task import ProcessorPlan

STATE_VARIABLE = "pointer"
STATE_SCHEMA = StructType([StructField("value", BinaryType())])


class ShardProcessor(StatefulProcessor):
    """One shard per grouping value."""

    def __init__(self, plan: ProcessorPlan) -> None:
        self._plan = Deferred(plan)

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state; runs once on the driver too, where there is no task."""
        self._handle = handle
        self._pointer = handle.getValueState(STATE_VARIABLE, STATE_SCHEMA)

    def handleInputRows(  # noqa: N802 - Spark's name
        self,
        key: Any,
        rows: Iterator[pd.DataFrame],
        timerValues: TimerValues,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Run an attempt on the packed rows of one shard."""
        return self._plan().task(self._handle, self._pointer).on_rows(key, rows)

    def handleExpiredTimer(  # noqa: N802 - Spark's name
        self,
        key: Any,
        timerValues: TimerValues,  # noqa: N803
        expiredTimerInfo: ExpiredTimerInfo,  # noqa: N803
    ) -> Iterator[pd.DataFrame]:
        """Run an attempt without rows if something is due, or a drain was asked for."""
        now = timerValues.getCurrentProcessingTimeInMs()
        return self._plan().task(self._handle, self._pointer).on_timer(key, now)
