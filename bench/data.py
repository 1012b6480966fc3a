"""The same messages for both sides: as an archive of a topic, and as plain Parquet files, two per micro-batch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from backend import archive
from backend.sources.archive_files import write_archive

START_MS = 1_700_000_000_000
"""Event time of the first message."""
TIME = pa.timestamp("ms", tz="UTC")
FILES = 2
"""Of a micro-batch: a single one of so few megabytes Spark scans in one task, while its other core waits."""


def topic_rows(
    partition: int, first_offset: int, at: np.ndarray[Any, np.dtype[np.int64]], value: pa.Array, topic: str = "t"
) -> pa.Table:
    """Lay out messages of one topic partition as an archive has them, with offsets from `first_offset` on.

    Args:
        partition: The partition.
        first_offset: Offset of the first message.
        at: Milliseconds since the epoch.
        value: Structs (`format="typed"`) or bytes.
        topic: The topic.
    """
    rows = len(at)
    return pa.table(
        {
            "topic": pa.repeat(pa.scalar(topic), rows),
            "partition": pa.array(np.full(rows, partition, np.int32)),
            "offset": pa.array(np.arange(first_offset, first_offset + rows)),
            "timestamp": pa.array(at, TIME),
            "key": pa.nulls(rows, pa.binary()),
            "value": value,
        }
    )


def typed(**fields: pa.Array) -> pa.Array:
    """Give structs of fields: values for `format="typed"`."""
    return pa.StructArray.from_arrays([*fields.values()], [*fields])


def write_both(directory: Path, name: str, batches: Sequence[pa.Table]) -> None:
    """Write micro-batches of equal size as `<name>-archive` and as `<name>-files`, in the same order."""
    rows = batches[0].num_rows
    write_archive(
        directory / f"{name}-archive", pa.concat_tables(batches), rows_per_file=rows, row_group_rows=rows // 4
    )
    files = directory / f"{name}-files"
    files.mkdir()
    share = -(-rows // FILES)
    for number, table in enumerate(batches):
        value = table["value"].combine_chunks()
        whole = pa.table([value.field(at) for at in range(value.type.num_fields)], names=[*value.type.names])
        for part in range(FILES):
            path = files / f"{number:05d}-{part}.parquet"
            pq.write_table(whole.slice(part * share, share), path, row_group_size=rows // 4)
            os.utime(path, (START_MS // 1000 + number * FILES + part,) * 2)  # Spark's source reads them in this order


def read_archive(directory: Path, name: str, value: str, rows: int) -> Any:
    """Give our source: so many messages per micro-batch, in two tasks."""
    return archive(
        str(directory / f"{name}-archive"), value=value, format="typed",
        max_offsets_per_batch=rows, max_offsets_per_task=(rows + 1) // 2,
    )  # fmt: skip


def read_files(spark: Any, directory: Path, name: str, value: str) -> Any:
    """Give Spark's own source: the same messages per micro-batch, in two tasks."""
    return spark.readStream.schema(value).option("maxFilesPerTrigger", FILES).parquet(str(directory / f"{name}-files"))
