"""Aggregates over the messages of a window: incremental partial states, or computed from all messages.

>>> import pyarrow as pa, numpy as np
>>> plan = compile_incremental({"orders": count(), "best": max_("value")}, pa.schema({"value": pa.int64()}))
>>> morning = plan.fold(pa.table({"value": [0, 5]}), np.array([0, 0]), 1)
>>> late = plan.fold(pa.table({"value": [9]}), np.array([0]), 1)
>>> plan.result(plan.merge(pa.concat_tables([morning, late]), np.array([0, 0]), 1)).to_pylist()
[{'orders': 3, 'best': 9}]
"""

from backend.aggregates.chosen import first, last, max_, min_
from backend.aggregates.full import collect_list, collect_set, median, quantile, top_k
from backend.aggregates.incremental import count, mean, stddev, sum_, variance
from backend.aggregates.model import Aggregate
from backend.aggregates.plans import FullPlan, IncrementalPlan, compile_full, compile_incremental
from backend.aggregates.sketch import approx_distinct
from backend.aggregates.userdefined import over_all, reducer

__all__ = [
    "Aggregate",
    "FullPlan",
    "IncrementalPlan",
    "approx_distinct",
    "collect_list",
    "collect_set",
    "compile_full",
    "compile_incremental",
    "count",
    "first",
    "last",
    "max_",
    "mean",
    "median",
    "min_",
    "over_all",
    "quantile",
    "reducer",
    "stddev",
    "sum_",
    "top_k",
    "variance",
]
