"""In what the demo's processes run: what their environment says, and their settings of Spark."""

from __future__ import annotations

import sys

WORKERS = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
"""In the environment: Spark's Python workers run this interpreter."""

SPARK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",  # small data: re-planning costs more than it saves
}
"""Beside what `recovery.inspect.user_job.session` sets."""
