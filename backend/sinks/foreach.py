"""Sinks that hand a micro-batch to a function of the user's.

`BatchSink` gives DataFrames of what the tasks wrote to the outbox (`backend.sinks.outbox`): nothing passes through the
driver, and any number of actions run the operator once. What the function is given is noted beside the checkpoint
before it is called, `<outbox>/given.json` (format 1: `{"format": 1, "version": n, "results": [rows, digest], "errors":
[rows, digest]}`): it is called again with the same rows after a crash, and with others never (`OutputDiffers`). A start
deletes the note of a micro-batch that its checkpoint has not planned: that was taken back.

`ForeachSink` gives Arrow tables: all rows of a micro-batch pass through the driver's memory. The function is called at
least once per micro-batch: again with the same version after a crash before Spark's commit, and with the same rows
unless the job is not deterministic:
there is no place here for a record of what it was given, so other rows are not noticed (`backend.sinks.record`). With
`version` and the rows' `id` it can make that exactly once: by replacing what it wrote for this version, or by writing
rows and version in one transaction and skipping a version it has seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from backend.boundary import check_function, user_code
from backend.chunks import contains
from backend.sinks.outbox import OutboxSink, Written
from backend.sinks.record import check_whole
from backend.sinks.sealing import Sealing
from backend.sinks.tables import (
    ERRORS,
    KINDS,
    RESULTS,
    by_shard,
    empty_errors,
    merge_metrics,
    read_frames,
    summary,
)
from recovery.files import read_struct
from recovery.killpoints import kill_point

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from backend.batch import Operator

Consumer = Callable[[pa.Table, pa.Table, int], None]
"""(results, errors, version) -> None."""
BatchFunction = Callable[["DataFrame", "DataFrame", int], None]
"""(results, errors, version) -> None."""
FORMAT = 1
GIVEN = "given.json"
_GIVEN = (RESULTS, ERRORS, "version")


def foreach_sink(function: Consumer) -> ForeachSink:
    """Call `function(results, errors, version)` per micro-batch, at least once; see `backend.sinks.foreach`.

    Raises:
        ValueError: It is no function of these.
    """
    return ForeachSink(function)


class ForeachSink(Sealing):
    """Calls `function(results, errors, version)` on the driver for each micro-batch that has rows.

    Args:
        function: Gets tables in order of (shard, sequence) with the columns of the Parquet sink. Without results the
            first table has neither rows nor columns. What it raises stops the query, the micro-batch is not committed.
    """

    def __init__(self, function: Consumer) -> None:
        check_function("function", function, _GIVEN)
        self._function = function

    def open(self, query: str) -> None:
        """Do nothing: whose output it is, is the function's matter."""

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Collect, then call the function."""
        return self.take(self.collect(frames, version), version)

    def take(self, rows: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
        """Hand collected frames on: the second half of `publish`."""
        tables: dict[str, list[pa.Table]] = {RESULTS: [], ERRORS: []}
        summaries = []
        for shard, given in by_shard(rows, version).items():
            counts = {}
            for kind in KINDS:
                shown = [table for _, table in read_frames(given, kind, shard, version)]
                tables[kind] += shown
                counts[kind] = sum(table.num_rows for table in shown)
            metrics = merge_metrics(row["metrics"] for row in given)
            summaries.append(summary(shard, counts[RESULTS], counts[ERRORS], metrics))
        if any(part.num_rows for parts in tables.values() for part in parts):
            results = pa.concat_tables(tables[RESULTS]) if tables[RESULTS] else pa.table({})
            errors = pa.concat_tables(tables[ERRORS]) if tables[ERRORS] else empty_errors()
            with user_code(f"the function of the sink, in micro-batch {version},"):
                self._function(results, errors, version)
        return summaries

    def describe(self) -> dict[str, object]:
        """Return the kind and the function's name."""
        return {"kind": "foreach", "function": _name(self._function)}


def foreach_batch(function: BatchFunction, *, accept_published: int | None = None) -> BatchSink:
    """Call `function(results, errors, version)` with DataFrames per micro-batch, at least once.

    The tasks write a micro-batch once; any number of actions on the DataFrames read that, until the function returns.
    See `backend.sinks.foreach`.

    Args:
        function: What it raises stops the query.
        accept_published: A micro-batch that ran again and made other rows than the function was given, as
            `OutputDiffers` says: what was given counts, and the query goes on without calling it.

    Raises:
        ValueError: Of a bad option, naming it.
    """
    return BatchSink(function, accept_published)


class Given(msgspec.Struct, frozen=True):
    """What the function was given last: number and digest of rows, by output."""

    version: int
    results: tuple[int, str]
    errors: tuple[int, str]
    format: int = FORMAT


class BatchSink(OutboxSink):
    """Calls `function(results, errors, version)` with DataFrames for each micro-batch that has rows.

    Args:
        function: See `foreach_batch`.
        accept_published: See there.
    """

    def __init__(self, function: BatchFunction, accept_published: int | None = None) -> None:
        check_function("function", function, _GIVEN)
        super().__init__(accept_published)
        self._function = function
        self._session: SparkSession | None = None

    def begin(self, outbox: str, operator: Operator) -> None:
        """Take note as every sink of the outbox, having seen that Spark reads what the tasks write.

        Raises:
            ValueError: A column is of a type that it does not.
        """
        super().begin(outbox, operator)
        for table in self._empty.values():
            for field in table.schema:
                if contains(field.type, _is_unread):
                    raise ValueError(
                        f"foreach_batch: column {field.name!r}: Spark reads no {field.type} from files; cast it"
                    )

    def open(self, query: str) -> None:
        """Clear what a crash left, and forget what was given of a history that was taken back; durable on return."""
        super().open(query)
        if self._planned is not None and (before := self._given()) is not None and before.version > self._planned:
            self._outbox.delete([GIVEN])

    def publish(self, frames: DataFrame, version: int) -> list[dict[str, Any]]:
        """Write to the outbox with one action, then call the function.

        Raises:
            OutputDiffers: It was given other rows for this version.
        """
        self._session = frames.sparkSession
        return super().publish(frames, version)

    def describe(self) -> dict[str, object]:
        """Return the kind and the function's name."""
        return {"kind": "foreach_batch", "function": _name(self._function)}

    def _bring_out(self, written: Written, version: int) -> None:
        kill_point("before_publish", version)
        due = self._is_due(Given(version, written.content(RESULTS), written.content(ERRORS)))
        kill_point("during_publish", version)
        if due:
            results, errors = self._frame(written, RESULTS), self._frame(written, ERRORS)
            with user_code(f"the function of the sink, in micro-batch {version},"):
                self._function(results, errors, version)
        kill_point("after_publish", version)

    def _frame(self, written: Written, kind: str) -> DataFrame:
        from pyspark.sql.pandas.types import from_arrow_schema

        spark = self._session
        assert spark is not None, "publish() comes first"
        schema, paths = from_arrow_schema(self._schemas[kind]), [*map(_literal, written.paths(kind))]
        return spark.read.schema(schema).parquet(*paths) if paths else spark.createDataFrame([], schema)

    def _is_due(self, now: Given) -> bool:
        """Return whether the function is to be called, and note what it is given; durable on return."""
        before, where = self._given(), f"{self._outbox.uri}/{GIVEN}"
        if before is not None and before.version == now.version:
            for kind in KINDS:
                known, made = getattr(before, kind), getattr(now, kind)
                if not check_whole(kind, known, made, version=now.version, where=where, accept=self._accept):
                    return False
        if not (now.results[0] or now.errors[0]):
            return False
        if now != before:
            self._outbox.write(GIVEN, [msgspec.json.encode(now)])
        return True

    def _given(self) -> Given | None:
        return read_struct(
            self._outbox,
            GIVEN,
            Given,
            FORMAT,
            what="what the function of the sink was given cannot be read",
            command="install the release that wrote it; or delete the file: then other rows on a second run are not"
            " noticed once",
        )


def _is_unread(kind: pa.DataType) -> bool:
    """Return whether Spark cannot read a type from Parquet, or takes its values for others."""
    types = pa.types
    if types.is_dictionary(kind):
        return _is_unread(kind.value_type)
    if types.is_timestamp(kind):
        return bool(kind.unit == "ns")
    if types.is_time(kind) or types.is_duration(kind):
        return bool(kind.unit != "us")
    return bool(types.is_decimal256(kind) or types.is_float16(kind))


def _literal(path: str) -> str:
    r"""Return a path that Spark takes for one file, not for a pattern.

    >>> _literal("/jobs[eu]/a*")
    '/jobs\\[eu\\]/a\\*'
    """
    return re.sub(r"([\[\]{}*?\\])", r"\\\1", path)


def _name(function: Callable[..., None]) -> str:
    return getattr(function, "__qualname__", repr(function))
