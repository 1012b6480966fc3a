"""In what the demo's processes run: their environment, and their settings of Spark."""

from __future__ import annotations

import os
import sys

from recovery import ROOT


def environment() -> dict[str, str]:
    """Give the environment in which Spark's Python workers find this interpreter and this package."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **os.environ,
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }


SPARK = {
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",  # small data: re-planning costs more than it saves
}
"""Beside what `recovery.inspect.user_job.session` sets."""
