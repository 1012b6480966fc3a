"""A job into a sink, to be killed: `python -m tests.support.sink_job <directory> <sink>`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from backend import delta_sink, foreach_batch, iceberg_sink, parquet_sink, policies, sql_sink
from tests.crash import kill_job

MESSAGES = 200
BUCKET = "s3://out"
LOGS = ("foreach", "s3")
ERRORS = ("partition", "offset", "reason")


def catalog(home: Path) -> dict[str, str]:
    """Return the properties of the Iceberg catalog."""
    return {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": f"file://{home}/warehouse"}


def sink_of(home: Path, kind: str) -> Any:
    """Return a sink that keeps the newest rows, or `LOGS` of all; the function makes itself exactly once."""
    if kind == "delta":
        return delta_sink(home / "windows", mode="newest")
    if kind == "iceberg":
        return iceberg_sink("db.windows", catalog=catalog(home), mode="newest")
    if kind == "sql":
        return sql_sink(f"sqlite:///{home}/out.db", "windows", mode="newest")
    if kind == "s3":
        return parquet_sink(f"{BUCKET}/windows", f"{BUCKET}/windows-errors")

    def function(results: Any, errors: Any, version: int) -> None:
        for name, frame in (("windows", results), ("windows-errors", errors)):
            if frame.count():
                frame.write.mode("overwrite").parquet(f"{home}/{name}/batch={version}")

    return foreach_batch(function)


def start(spark: Any, home: Path, sink: Any) -> Any:
    """Start the job on its checkpoint."""
    os.environ[kill_job.ARCHIVE] = str(home / "archive")
    job = kill_job.job(spark, policies=policies(late="each"))
    return job.start(
        spark, checkpoint=home / "checkpoint", sink=sink, trigger="0 seconds", until="end", local_dir=home / "local"
    )


def main(home: Path, kind: str) -> None:
    """Run to the end, unless something kills this process."""
    from recovery.inspect.user_job import session

    with session("local[2]") as spark:
        start(spark, home, sink_of(home, kind)).await_termination()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
