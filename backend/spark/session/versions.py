"""Which PySpark, and which kind of session, Rewind runs on; docs/versions.md says what was run."""

from __future__ import annotations

from typing import Any

OLDEST = (4, 2)


def check_pyspark(version: str) -> None:
    """Refuse a PySpark that is too old.

    Raises:
        ImportError: Names the version, why, and what to install.

    >>> check_pyspark("4.2.0")
    """
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        raise ImportError(
            f"PySpark {version} is too old for Rewind: Python sources have no ReadLimit before 4.2, so micro-batches"
            " could not be bounded; install: pip install 'pyspark>=4.2,<4.4'",
            name="pyspark",
        )


def check_not_connect(spark: Any) -> None:
    """Refuse a session of Spark Connect.

    Raises:
        ValueError: Names the session's class, and why.
    """
    kind = type(spark)
    if kind.__module__.startswith("pyspark.sql.connect"):
        raise ValueError(
            f"spark={kind.__module__}.{kind.__qualname__}: a Spark Connect session has no driver in this process, where"
            " restores run and sinks publish: allowed is a classic session, made without remote() or SPARK_REMOTE, in"
            " the driver's own process"
        )
