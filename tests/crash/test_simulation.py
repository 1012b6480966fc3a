"""Two hundred seeded runs of the whole protocol under faults; each rare event must have happened in them."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.crash.simulation import RARE, simulate

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "200"))
FIRST = int(os.environ.get("SIMULATION_FIRST", "0"))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recovery.changelog.rejected.MOST", 0)


@pytest.mark.long
def test_every_seed_ends_with_the_oracle_s_results_and_the_control_run_s_state():
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        seen.update(simulate(seed).seen)
    assert [event for event in RARE if not seen[event]] == []


def test_the_same_seed_is_the_same_run():
    def happened(seed: int) -> Counter[str]:
        return simulate(seed).seen

    assert happened(3) == happened(3)


def test_a_few_seeds_on_the_real_database():
    for seed in range(1000, 1000 + max(5, SEEDS // 40)):
        simulate(seed, rocks=True)
