"""One run of a job over an archive, to its end, under the PySpark of this interpreter: `python -m ... <directory>`.

Prints the version of PySpark.
"""

from __future__ import annotations

import sys
from pathlib import Path

from backend import archive, count, median, stream, sum_, tumbling
from recovery.inspect.user_job import session

VALUE = "key string, x long, at long"


def run(place: Path) -> None:
    """Run a job with incremental and full state in two shards until the archive's end."""
    source = archive(str(place / "in"), value=VALUE, max_offsets_per_batch=50)
    windows = stream(source, event_time="at", key="key").window(
        tumbling("1 minute"), retention="1 hour", max_ahead=None
    )
    with session() as spark:
        print("pyspark", spark.version, flush=True)
        query = windows.aggregate(n=count(), total=sum_("x"), typical=median("x")).start(
            spark, checkpoint=place / "checkpoint", results=place / "results", errors=place / "errors",
            local_dir=place / "local", shards=2, trigger="0 seconds", until="end",
        )  # fmt: skip
        if not query.await_termination(240):
            raise SystemExit("not at the end after 240 s")


if __name__ == "__main__":
    run(Path(sys.argv[1]))
