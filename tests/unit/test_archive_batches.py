"""What is handed out at once of an archive is bounded in bytes, whatever the files' encoding hides."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from backend.sources.archive_files import BATCH_BYTES, WRITE_SCHEMA, read_range, write_archive
from backend.sources.archive_index import Archive


def test_long_messages_come_in_small_batches(tmp_path: Path) -> None:
    count, long = 40_000, b"x" * 1_500  # 60 MB, of which a dictionary in the file leaves next to nothing
    times = pa.array([0] * count, pa.timestamp("ms", tz="UTC"))
    rows = pa.table(
        [["t"] * count, [0] * count, list(range(count)), times, [None] * count, [long] * count], schema=WRITE_SCHEMA
    )
    write_archive(tmp_path / "a", rows, row_group_rows=count)
    slices, gaps = Archive(str(tmp_path / "a")).partitions()["t", 0].cut(0, count)
    batches = list(read_range(str(tmp_path / "a"), "t", 0, (0, count), slices, gaps, WRITE_SCHEMA))
    assert sum(batch.num_rows for batch in batches) == count
    assert max(batch.get_total_buffer_size() for batch in batches) < 2 * BATCH_BYTES
