"""A small hunt with changed options; `python -m tests.model.changed_options --runs 10000` is the large one."""

from __future__ import annotations

import os
from typing import Any

import pytest

from backend.windows.count_retention import NONE_GONE
from backend.windows.retention import Gone
from tests.model.changed_options import CASES, CRASHES, direction, hunt, untried

RUNS = int(os.environ.get("CHANGED_OPTIONS_RUNS", "220"))


@pytest.mark.slow
def test_changed_options_lose_nothing_and_send_nothing_twice():
    tried, failed = hunt(list(CASES), range(RUNS))
    assert failed == []
    assert untried(tried) == []
    for kind, counts in tried.items():
        for aim in sorted(counts):
            print(kind, *aim, counts[aim])


@pytest.mark.slow
def test_the_hunt_finds_a_job_that_asks_todays_retention_what_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the clock of before, as the first release did: what its state says is gone is not asked."""

    def of(kind: Any, turn: Any) -> Gone:
        before, (each, counted) = kind.gone_by_time(turn.clock), kind.newest.judge(turn, NONE_GONE)
        return Gone(before, max(before, counted, kind.gone_by_time(turn.clock_after)), each)

    monkeypatch.setattr(Gone, "of", of)
    _, failed = hunt(["tumbling", "hopping", "sliding"], range(60), ["retention_ms"])
    said = "\n".join(failed)
    assert "BoundViolated" in said, "a message reopens what is gone"
    assert "AssertionError: too many: " in said, "a window is sent that the oracle does not know"


def test_directions_of_a_change():
    ways = [direction((None, 0, 4), *pair) for pair in ((None, 0), (0, None), (0, 4), (4, 0))]
    assert ways == ["on", "off", "more", "less"]
    assert direction((False, True), True, False) == "off"
    assert direction((0, 7), 0, 7) == "more"


def test_each_kind_aims_at_every_crash():
    for case in CASES.values():
        assert {aim[2] for aim in case.aims()} == set(CRASHES)
