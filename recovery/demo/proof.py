"""The proof: everything that the job should have emitted, recomputed in one go by Spark's batch SQL.

Nothing of the product is used here: the archive's Parquet files are read by Spark's own reader, the JSON is picked
apart by `get_json_object`, windows are arithmetic, lateness is a window function over the offsets, the median is
`percentile`. It runs in a process of its own, which prints the `Proof` as JSON:
`python -m recovery.demo.proof <output directory>`.

With one source partition per shard the design promises more than the last revision of each window: also *which*
messages were on time, late, or too late is decided message by message, wherever micro-batches were cut. So the first
emission of each closed window is compared as well, and every row of the errors.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recovery.demo.session import SPARK
from recovery.inspect.user_job import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ARCHIVE, RESULTS, ERRORS = "departures", "windows", "errors"
"""Directories below the demo's output directory."""
HOUR_MS = 3_600_000
RETENTION_MS = 120 * 24 * HOUR_MS
"""Size and retention of the demo's windows."""

_MESSAGES = """
SELECT partition, offset, origin, delay, t, t - pmod(t, {size}) AS start, t - pmod(t, {size}) + {size} AS stop,
       max(t) OVER (PARTITION BY partition ORDER BY offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
FROM (SELECT partition, offset,
             get_json_object(text, '$.origin') AS origin,
             try_cast(get_json_object(text, '$.delay') AS double) AS delay,
             unix_millis(try_cast(get_json_object(text, '$.scheduled') AS timestamp)) AS t
      FROM (SELECT partition, offset, cast(value AS string) AS text FROM archive))
WHERE delay IS NOT NULL AND t IS NOT NULL
"""

_FATES = """
SELECT *, CASE WHEN before >= stop + {retention} THEN 'too late'
               WHEN before >= stop THEN 'late' ELSE 'on time' END AS fate
FROM messages
"""

_AGGREGATES = """
count(*) AS flights, avg(delay) AS mean, max(delay) AS worst, percentile(delay, 0.5) AS typical
"""

_LAST = f"SELECT origin, start, {_AGGREGATES} FROM fates WHERE fate <> 'too late' GROUP BY origin, start"

# a window closes when a message of its partition comes that is not before its end
_FULL = f"""
SELECT origin, start, {_AGGREGATES}
FROM fates JOIN (SELECT partition AS of, max(t) AS newest FROM messages GROUP BY partition) ON partition = of
WHERE fate = 'on time' AND newest >= stop
GROUP BY origin, start
"""

_EMITTED = """
SELECT origin, unix_millis(window_start) AS start, reason, revision, flights, mean, worst, typical FROM results
"""

_EMITTED_LAST = """
SELECT origin, start, last.* FROM (
    SELECT origin, start, max_by(struct(flights, mean, worst, typical), revision) AS last
    FROM emitted GROUP BY origin, start)
"""

_COMPARED = """
SELECT coalesce(e.origin, g.origin) AS origin, timestamp_millis(coalesce(e.start, g.start)) AS start,
       e.flights AS expected_flights, g.flights AS given_flights,
       e.typical AS expected_median, g.typical AS given_median,
       e.flights <=> g.flights AND e.worst <=> g.worst AND e.typical <=> g.typical
           AND coalesce(abs(e.mean - g.mean) <= 1e-9 * greatest(1, abs(e.mean)), false) AS equal
FROM {expected} e FULL OUTER JOIN {given} g ON e.origin = g.origin AND e.start = g.start
"""

_ERRORS = """
SELECT coalesce(e.partition, g.partition) AS partition, coalesce(e.offset, g.offset) AS offset,
       e.reason AS expected, g.reason AS given, e.reason <=> g.reason AS equal
FROM (SELECT a.partition, a.offset, if(f.fate = 'too late', 'out_of_retention', 'malformed') AS reason
      FROM archive a LEFT JOIN fates f ON a.partition = f.partition AND a.offset = f.offset
      WHERE f.fate IS NULL OR f.fate = 'too late') e
FULL OUTER JOIN errors g ON e.partition = g.partition AND e.offset = g.offset
"""

_PARTS = ("windows", "full", "errors")

# one query for all counts: planning and starting jobs would cost more than the work
_COUNTS = (
    "".join(
        f"SELECT '{part}' AS name, count(*) AS total, count_if(equal) AS equal FROM compared_{part} UNION ALL "
        for part in _PARTS
    )
    + """
SELECT fate, count(*), 0 FROM fates GROUP BY fate UNION ALL
SELECT 'messages', count(*), 0 FROM archive UNION ALL
SELECT 'twice', count(*), 0 FROM (SELECT 1 FROM emitted GROUP BY origin, start, revision HAVING count(*) > 1) UNION ALL
SELECT 'twice', count(*), 0 FROM (SELECT 1 FROM errors GROUP BY partition, offset HAVING count(*) > 1)
"""
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many are equal, of how many; `samples` shows some that are not."""

    equal: int
    total: int
    samples: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether there is something, and all of it is equal."""
        return self.total > 0 and self.equal == self.total


@dataclass(frozen=True, slots=True)
class Proof:
    """What the recomputation says.

    Attributes:
        messages: Messages in the archive.
        late: Counted after it closed.
        too_late: Out of retention.
        malformed: Did not parse.
        windows: Last revision of every window.
        full: First emission of every window that closed.
        errors: Rows of the errors output, by partition, offset and reason.
        duplicates: Rows emitted more than once: results by (origin, window, revision), errors by (partition, offset).
    """

    messages: int
    late: int
    too_late: int
    malformed: int
    windows: Comparison
    full: Comparison
    errors: Comparison
    duplicates: int

    @property
    def holds(self) -> bool:
        """Whether everything is as recomputed."""
        return self.windows.holds and self.full.holds and self.errors.holds and self.duplicates == 0


def prove(spark: SparkSession, archive: Path, results: Path, errors: Path, *, size_ms: int, retention_ms: int) -> Proof:
    """Recompute and compare.

    Args:
        spark: A session in UTC.
        archive: Directory of the archive.
        results: Directory of the job's results.
        errors: Directory of its errors.
        size_ms: Size of the tumbling windows.
        retention_ms: Their retention.
    """
    for name, path in (("archive", archive), ("results", results), ("errors", errors)):
        spark.read.parquet(str(path)).createOrReplaceTempView(name)
    _view(spark, "messages", _MESSAGES.format(size=size_ms))
    _view(spark, "fates", _FATES.format(retention=retention_ms)).cache()
    _view(spark, "emitted", _EMITTED).cache()
    _view(spark, "expected_last", _LAST)
    _view(spark, "expected_full", _FULL)
    _view(spark, "given_last", _EMITTED_LAST)
    _view(spark, "given_full", "SELECT * FROM emitted WHERE reason = 'full'")
    _view(spark, "compared_windows", _COMPARED.format(expected="expected_last", given="given_last"))
    _view(spark, "compared_full", _COMPARED.format(expected="expected_full", given="given_full"))
    _view(spark, "compared_errors", _ERRORS)
    totals: Counter[str] = Counter()
    equals: Counter[str] = Counter()
    for row in spark.sql(_COUNTS).collect():
        totals[row.name] += row.total
        equals[row.name] += row.equal
    parts = {part: Comparison(equals[part], totals[part], _samples(spark, part, equals, totals)) for part in _PARTS}
    spark.catalog.clearCache()
    parsed = totals["on time"] + totals["late"] + totals["too late"]
    return Proof(
        messages=totals["messages"],
        late=totals["late"],
        too_late=totals["too late"],
        malformed=totals["messages"] - parsed,
        windows=parts["windows"],
        full=parts["full"],
        errors=parts["errors"],
        duplicates=totals["twice"],
    )


def prove_demo(spark: SparkSession, out: Path) -> Proof:
    """Recompute and compare what is in the demo's output directory."""
    paths = [out / name for name in (ARCHIVE, RESULTS, ERRORS)]
    return prove(spark, *paths, size_ms=HOUR_MS, retention_ms=RETENTION_MS)


def _view(spark: SparkSession, name: str, query: str) -> DataFrame:
    frame = spark.sql(query)
    frame.createOrReplaceTempView(name)
    return frame


def _samples(spark: SparkSession, part: str, equals: Counter[str], totals: Counter[str]) -> tuple[str, ...]:
    if equals[part] == totals[part]:
        return ()
    rows = spark.sql(f"SELECT * FROM compared_{part} WHERE NOT equal ORDER BY 1, 2 LIMIT 5").collect()
    return tuple(", ".join(f"{name}={value}" for name, value in row.asDict().items()) for row in rows)


def main() -> int:
    """Prove the output in a directory of the demo."""
    with session(conf=SPARK) as spark:
        proof = prove_demo(spark, Path(sys.argv[1]))
    print(json.dumps(asdict(proof)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
