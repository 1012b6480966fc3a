"""Where a query begins: asked once, kept as Spark's connector keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.errors import UnknownFormat
from backend.spark.first_offsets import first_positions


def test_it_is_asked_once_in_the_life_of_a_checkpoint(tmp_path: Path) -> None:
    asked = []

    def ask() -> dict[tuple[str, int], int]:
        asked.append(len(asked))
        return {("t", 0): 5 + len(asked), ("t", 1): 7}

    first = first_positions(str(tmp_path), 1, ask)
    assert first == {("t", 0): 6, ("t", 1): 7}
    assert first_positions(str(tmp_path), 1, ask) == first
    assert asked == [0]
    assert first_positions(str(tmp_path), 0, ask) == {("t", 0): 7, ("t", 1): 7}  # another source of the query
    assert (tmp_path / "sources/1/0").read_bytes() == b'\0v1\n{"t": {"0": 6, "1": 7}}'


def test_what_the_connector_wrote_is_read(tmp_path: Path) -> None:
    """Its form: `KafkaSourceInitialOffsetWriter`, version 1."""
    (tmp_path / "sources/0").mkdir(parents=True)
    (tmp_path / "sources/0/0").write_bytes(b'\0v1\n{"t":{"1":3,"0":4}}')
    assert first_positions(str(tmp_path), 0, lambda: {}) == {("t", 0): 4, ("t", 1): 3}
    (tmp_path / "sources/0/0").write_bytes(b'\0v2\n{"t":{"1":3,"0":4}}')
    with pytest.raises(UnknownFormat, match="sources/0/0"):
        first_positions(str(tmp_path), 0, lambda: {})
