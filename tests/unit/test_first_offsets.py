"""Where a query begins: asked once, kept as Spark's connector keeps it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backend.errors import UnknownFormat
from backend.spark import start
from backend.spark.first_offsets import first_positions, known_positions
from backend.spark.job import Input, Job


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


class Topic:
    """Holds offsets from 0; a new query begins at its end, which moves on."""

    def __init__(self, name: str, end: int) -> None:
        self.topics, self.end = (name,), end

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {(self.topics[0], 0): (0, self.end)}

    def first_positions(self) -> dict[tuple[str, int], int]:
        self.end += 1
        return {(self.topics[0], 0): self.end - 1}


class Archive:
    """Says nothing of where a query begins: where it does itself."""

    topics = ("a",)

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {("a", 0): (3, 9)}


def test_joins_count_from_where_the_query_begins(tmp_path: Path) -> None:
    """With `starting="latest"` they counted a million orders that nobody read, and nothing met any more."""
    sources: dict[str, Any] = {"left": Topic("orders", 1_000_000), "right": Topic("shipments", 5_000), "": Archive()}
    pipeline: Any = SimpleNamespace(
        sides=tuple(sources), streams=[SimpleNamespace(source=source) for source in sources.values()]
    )
    nobody: Any = None
    checkpoint = str(tmp_path)
    firsts = start._first_offsets(pipeline, nobody, checkpoint)
    assert firsts == [[0, 0, 1_000_000], [1, 0, 5_000], [2, 0, 3]]
    job = Job(tuple(Input(source, None, (), name) for name, source in sources.items()), "key", (0,), nobody, (), None)
    job.begin(checkpoint, firsts)
    assert known_positions(checkpoint, 0) == {("orders", 0): 1_000_000}, "`streaming` goes by it"
    assert job.began(checkpoint) == {(0, 0): 1_000_000, (1, 0): 5_000}
    assert known_positions(checkpoint, 2) is None
    assert start._first_offsets(pipeline, nobody, checkpoint) == firsts, "a start that dies before its manifest"
    assert start._first_offsets(pipeline, nobody)[0] == [0, 0, 1_000_001]
