"""Spark forks its Python workers from the daemon that has imported what they need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.spark


def test_workers_of_both_kinds_come_from_the_daemon(spark: Any) -> None:
    def of_arrow(batches: Iterator[Any]) -> Iterator[Any]:
        import gc

        import psutil
        import pyarrow as pa

        for _ in batches:
            parent = " ".join(psutil.Process().parent().cmdline())
            yield pa.RecordBatch.from_pydict({"parent": [parent], "frozen": [gc.get_freeze_count()]})

    def of_rdd(_: Iterator[int]) -> Iterator[int]:
        import gc

        yield gc.get_freeze_count()

    (row,) = spark.range(1).repartition(1).mapInArrow(of_arrow, "parent string, frozen long").collect()
    (frozen,) = spark.sparkContext.parallelize([0], 1).mapPartitions(of_rdd).collect()
    assert "-m recovery.daemon" in row["parent"]
    assert row["frozen"] > 100_000, "the worker shares what the daemon has imported"
    assert frozen > 100_000
