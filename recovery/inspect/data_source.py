"""State as a table in Spark: `spark.read.format("rewind")`, a PySpark data source, one partition per shard.

::

    spark.dataSource.register(RewindStateSource)
    spark.read.format("rewind").option("table", "windows").load("checkpoints/departures")

Options, named as those of Spark's `statestore` reader where they mean the same:

============ =================================================================================
`path`       The checkpoint.
`table`      `windows`, `aggregates`, `rows` (every row of the committed state as bytes), or a store of
             `process()` by its name.
`batchId`    As of this micro-batch; the newest committed one unless given. A version that is
             gone is an error that lists those to be had.
============ =================================================================================

Read from the changelog, so the job may be running, and no executor needs its local state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.tables import Wanted, as_of_one, read_table, table_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

OPTIONS = ("path", "table", "batchid")


class RewindStateSource(DataSource):  # type: ignore[misc]  # pyspark is not typed here
    """The data source `rewind`."""

    @classmethod
    def name(cls) -> str:
        """Give the format's name."""
        return "rewind"

    def schema(self) -> StructType:
        """Give the table's schema, out of the manifest.

        Raises:
            ValueError: An unknown option, or no such table.
        """
        checkpoint, wanted = _asked(self.options)
        return from_arrow_schema(_signed(table_schema(checkpoint, wanted.table)))

    def reader(self, schema: StructType) -> DataSourceReader:
        """Give the reader of a batch query, with the place that a relative path names here: executors are elsewhere."""
        options = {name.lower(): value for name, value in self.options.items()}
        return _Reader({**options, "path": _asked(options)[0].location})


class _Reader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        checkpoint, wanted = _asked(self._options)
        version = as_of_one(checkpoint, wanted).version
        return [InputPartition((shard, version)) for shard in checkpoint.shards]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        checkpoint, wanted = _asked(self._options)
        shard, version = partition.value
        table = read_table(checkpoint, shard, replace(wanted, version=version))
        yield from table.cast(_signed(table.schema)).to_batches()


def _asked(options: dict[str, str]) -> tuple[Checkpoint, Wanted]:
    """Check the options; their names come in any case."""
    found = {name.lower(): value for name, value in options.items()}
    for name, value in found.items():
        if name not in OPTIONS:
            raise ValueError(f"{name}={value!r}: not an option; allowed are path, table and batchId")
    if "path" not in found:
        raise ValueError("path: give the checkpoint, as in load(checkpoint)")
    version = found.get("batchid")
    if version is not None and not version.isdecimal():
        raise ValueError(f"batchId={version!r}: must be the number of a micro-batch")
    return Checkpoint(found["path"]), Wanted(
        found.get("table", "windows"), version=int(version) if version is not None else None
    )


def _signed(schema: pa.Schema) -> pa.Schema:
    """Give the schema with types that Spark has: a digest's 64 bits become a decimal."""
    return pa.schema(
        [pa.field(f.name, pa.decimal128(20) if f.type == pa.uint64() else f.type, f.nullable) for f in schema]
    )
