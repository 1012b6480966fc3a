"""A source that a drill lets age has lost its beginning, whichever way a replay reads it."""

from __future__ import annotations

from typing import Any

import pytest

from backend.errors import HistoryLost
from backend.sources import Bundling
from recovery.drill_job import Aged

TOPIC = ("sales", 0)


class Rows:
    """Holds offsets 100 to 199, and gives what it was asked for."""

    topics = ("sales",)

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {TOPIC: (100, 200)}

    def batch(self, spark: Any, ranges: Any) -> Any:
        return "batch", ranges

    def stream(self, spark: Any) -> Any: ...

    def fields(self) -> Any: ...

    def describe(self) -> Any: ...


class Bundles(Rows):
    bundled = True

    def stream_bundles(self, spark: Any, names: Any) -> Any: ...

    def pieces(self, spark: Any, ranges: Any, names: Any) -> Any:
        return "pieces", ranges, names


def test_what_is_gone_is_refused_and_what_is_left_is_read() -> None:
    aged = Aged(Bundles(), 0.5)
    assert aged.offsets(None) == {TOPIC: (150, 200)}
    for ask in (aged.batch, lambda spark, ranges: aged.pieces(spark, ranges, ["cents"])):
        with pytest.raises(HistoryLost, match="sales partition 0; why: offsets from 149 wanted, the earliest is 150"):
            ask(None, {TOPIC: (149, 160)})
    assert aged.batch(None, {TOPIC: (150, 160)}) == ("batch", {TOPIC: (150, 160)})
    assert aged.pieces(None, {TOPIC: (150, 160)}, ["cents"]) == ("pieces", {TOPIC: (150, 160)}, ["cents"])


def test_it_hands_over_bundles_if_the_source_does() -> None:
    assert isinstance(Aged(Bundles(), 0.5), Bundling)
    assert not isinstance(Aged(Rows(), 0.5), Bundling)
