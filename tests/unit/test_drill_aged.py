"""A source that a drill lets age has lost its beginning, whichever way a replay reads it."""

from __future__ import annotations

from typing import Any

import pytest

from backend.errors import HistoryLost
from backend.sources import is_direct, remembers
from recovery.drill.job import Aged

TOPIC = ("sales", 0)


class Rows:
    """Holds offsets 100 to 199, and gives what it was asked for."""

    topics = ("sales",)

    def offsets(self, spark: Any) -> dict[tuple[str, int], tuple[int, int]]:
        return {TOPIC: (100, 200)}

    def batch(self, spark: Any, ranges: Any) -> Any:
        return "batch", ranges

    def stream(self, spark: Any) -> Any: ...

    def parse(self, timezone: str) -> Any: ...

    def fields(self) -> Any: ...

    def describe(self) -> Any: ...


class Workers(Rows):
    direct = True

    def stream_reader(self, names: Any = None, first: Any = None) -> Any: ...

    def pieces(self, spark: Any, ranges: Any, names: Any = None) -> Any:
        return "pieces", ranges, names


def test_what_is_gone_is_refused_and_what_is_left_is_read() -> None:
    aged = Aged(Workers(), 0.5)
    assert aged.offsets(None) == {TOPIC: (150, 200)}
    refused = "sales partition 0; why: offsets from 149 wanted, the earliest is 150"
    with pytest.raises(HistoryLost, match=refused):
        aged.batch(None, {TOPIC: (149, 160)})
    with pytest.raises(HistoryLost, match=refused):
        aged.pieces(None, {TOPIC: [(149, 160)]}, ["cents"])
    assert aged.batch(None, {TOPIC: (150, 160)}) == ("batch", {TOPIC: (150, 160)})
    assert aged.pieces(None, {TOPIC: [(150, 160)]}, ["cents"]) == ("pieces", {TOPIC: [(150, 160)]}, ["cents"])


def test_it_is_read_in_the_workers_if_the_source_is() -> None:
    assert is_direct(Aged(Workers(), 0.5))
    assert not is_direct(Aged(Rows(), 0.5))
    assert remembers(Aged(Workers(), 0.5))
