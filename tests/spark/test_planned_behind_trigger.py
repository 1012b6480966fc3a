"""With a trigger, micro-batches are planned a moment behind it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import archive, count, stream, tumbling
from backend.sources.archive_files import WRITE_SCHEMA, write_archive
from tests.support.noted_archive import Noted

pytestmark = [pytest.mark.spark, pytest.mark.gentle]

PATIENCE_S = 180


def test_a_source_is_asked_a_moment_behind_the_trigger(spark: Any, tmp_path: Path) -> None:
    times = pa.array([0] * 7, pa.timestamp("ms", "UTC"))
    values = [b'{"n": %d}' % number for number in range(7)]
    table = pa.table([["t"] * 7, [0] * 7, list(range(7)), times, [b"k"] * 7, values], schema=WRITE_SCHEMA)
    write_archive(tmp_path / "a", table, rows_per_file=3)
    plain = archive(str(tmp_path / "a"), value="n int")
    source = Noted(**{name: getattr(plain, name) for name in plain.__dataclass_fields__})
    query = (
        stream(source, event_time="n", key="n")
        .window(tumbling("1 second"), retention="1 second")
        .aggregate(messages=count())
        .start(
            spark, checkpoint=tmp_path / "c", results=tmp_path / "r", errors=tmp_path / "e",
            local_dir=tmp_path / "l", shards=1, trigger="1 second",
        )
    )  # fmt: skip
    try:
        asked, until = Path(f"{tmp_path / 'a'}-asked"), time.monotonic() + PATIENCE_S
        while len(noted := asked.read_text().split() if asked.exists() else []) < 8 and time.monotonic() < until:
            time.sleep(0.2)
    finally:
        query.stop()
    assert len(noted) >= 8
    assert min(float(at) % 1 for at in noted) >= 0.0499, noted
