"""Reading a job's results as the source of another job; how they lie is in `backend.sources.results_files`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import fsspec
import pyarrow.parquet as pq

from backend.sources.archive import DEFAULT_MAX_OFFSETS, ArchiveSource, archive
from backend.sources.archive_footer import readable
from backend.sources.results_files import TOPIC, ResultsArchive
from recovery.files import check_place


def results_of(path: str | Path, *, value: str = "", max_rows_per_batch: int = DEFAULT_MAX_OFFSETS) -> ArchiveSource:
    """Read a job's Parquet results as a stream: windows over windows, joins of what two jobs made.

    Every row is a message, each revision of a window too: `policies(late="off")` in the first job sends a window once.

    Args:
        path: The `results` directory of the first job: a path or URI that every executor sees.
        value: Columns as Spark DDL, such as `"window_start timestamp, origin string, flights long"`; by default all
            that the first results have, which must be there then.
        max_rows_per_batch: Bound on the rows of each shard in one micro-batch.

    Raises:
        ValueError: Of a bad option.
        HistoryLost: There is no such directory.
    """
    place = check_place(path, "path")
    if isinstance(max_rows_per_batch, bool) or not isinstance(max_rows_per_batch, int) or max_rows_per_batch < 1:
        raise ValueError(f"max_rows_per_batch={max_rows_per_batch!r}: must be an integer of at least 1")
    columns = value or _columns(place)
    source = archive(place, value=columns, format="typed", topics=[TOPIC], max_offsets_per_batch=max_rows_per_batch)
    return replace(source, results=True)


def _columns(place: str) -> str:
    """Return the columns of the first results, as Spark DDL.

    Raises:
        ValueError: There are none yet.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    from backend.sinks.table_rows import plain_schema

    found = ResultsArchive(place).partitions()
    if not found:
        raise ValueError(f"results_of({place!r}): there are no results yet: say what they will be: value='...'")
    first = min((index.slices[0].path for index in found.values()), key=lambda name: int(name.split("/")[0][6:]))
    filesystem, root = fsspec.core.url_to_fs(place)
    with readable(f"{root}/{first}"), filesystem.open(f"{root}/{first}", "rb") as handle:
        schema = from_arrow_schema(plain_schema(pq.read_schema(handle)))
    return ", ".join(f"`{field.name.replace('`', '``')}` {field.dataType.simpleString()}" for field in schema)
