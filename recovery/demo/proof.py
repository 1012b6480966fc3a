"""The proof: everything that the job should have emitted, recomputed in one go by Spark's batch SQL.

Nothing of the product is used here: the archive's Parquet files are read by Spark's own reader, the JSON is picked
apart by `get_json_object`, windows are arithmetic, lateness is a window function over the offsets, the median is
`percentile`.

With one source partition per shard the design promises more than the last revision of each window: also *which*
messages were on time, late, or too late is decided message by message, wherever micro-batches were cut. So the first
emission of each closed window is compared as well, and every row of the errors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

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

_EXPECTED_ERRORS = """
SELECT partition, offset, 'out_of_retention' AS reason FROM fates WHERE fate = 'too late'
UNION ALL
SELECT a.partition, a.offset, 'malformed' AS reason FROM archive a
LEFT ANTI JOIN messages m ON a.partition = m.partition AND a.offset = m.offset
"""


_TWICE = """
SELECT (SELECT count(*) FROM (SELECT 1 FROM emitted GROUP BY origin, start, revision HAVING count(*) > 1))
     + (SELECT count(*) FROM (SELECT 1 FROM errors GROUP BY partition, offset HAVING count(*) > 1))
"""


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
        on_time: Counted before their window closed.
        late: Counted after it closed.
        too_late: Out of retention.
        malformed: Did not parse.
        windows: Last revision of every window.
        full: First emission of every window that closed.
        errors: Rows of the errors output, by partition, offset and reason.
        duplicates: Rows emitted more than once: results by (origin, window, revision), errors by (partition, offset).
    """

    messages: int
    on_time: int
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
    spark.read.parquet(str(archive)).createOrReplaceTempView("archive")
    spark.read.parquet(str(results)).createOrReplaceTempView("results")
    spark.read.parquet(str(errors)).createOrReplaceTempView("errors")
    _view(spark, "messages", _MESSAGES.format(size=size_ms))
    _view(spark, "fates", _FATES.format(retention=retention_ms)).cache()
    _view(spark, "emitted", _EMITTED).cache()
    _view(spark, "expected_last", _LAST)
    _view(spark, "expected_full", _FULL)
    _view(spark, "given_last", _EMITTED_LAST)
    _view(spark, "given_full", "SELECT * FROM emitted WHERE reason = 'full'")
    fates = {row.fate: row.n for row in spark.sql("SELECT fate, count(*) AS n FROM fates GROUP BY fate").collect()}
    total = spark.table("archive").count()
    proof = Proof(
        messages=total,
        on_time=fates.get("on time", 0),
        late=fates.get("late", 0),
        too_late=fates.get("too late", 0),
        malformed=total - sum(fates.values()),
        windows=_compared(spark, "expected_last", "given_last"),
        full=_compared(spark, "expected_full", "given_full"),
        errors=_errors(spark),
        duplicates=int(spark.sql(_TWICE).collect()[0][0]),
    )
    spark.catalog.clearCache()
    return proof


def _view(spark: SparkSession, name: str, query: str) -> DataFrame:
    frame = spark.sql(query)
    frame.createOrReplaceTempView(name)
    return frame


def _compared(spark: SparkSession, expected: str, given: str) -> Comparison:
    _view(spark, "compared", _COMPARED.format(expected=expected, given=given)).cache()
    return _outcome(spark, "compared", "equal")


def _errors(spark: SparkSession) -> Comparison:
    _view(spark, "expected_errors", _EXPECTED_ERRORS)
    _view(
        spark,
        "compared_errors",
        """SELECT coalesce(e.partition, g.partition) AS partition, coalesce(e.offset, g.offset) AS offset,
                  e.reason AS expected, g.reason AS given, e.reason <=> g.reason AS equal
           FROM expected_errors e FULL OUTER JOIN errors g ON e.partition = g.partition AND e.offset = g.offset""",
    ).cache()
    return _outcome(spark, "compared_errors", "equal")


def _outcome(spark: SparkSession, view: str, column: str) -> Comparison:
    counts: Row = spark.sql(f"SELECT count(*) AS total, count_if({column}) AS equal FROM {view}").collect()[0]
    samples = ()
    if counts.equal < counts.total:
        rows = spark.sql(f"SELECT * FROM {view} WHERE NOT {column} ORDER BY 1, 2 LIMIT 5").collect()
        samples = tuple(", ".join(f"{name}={value}" for name, value in row.asDict().items()) for row in rows)
    return Comparison(counts.equal, counts.total, samples)
