"""Seeded runs of the whole protocol over a DataFrame under faults; each rare event must have happened in them."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.crash.frame_simulation import RARE, simulate

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "200"))


@pytest.mark.long
def test_every_seed_ends_with_the_oracle_s_results_and_the_state_of_a_run_without_faults():
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen.update(simulate(seed).seen)
    assert [event for event in RARE if not seen[event]] == []


def test_a_few_seeds():
    for seed in range(1000, 1008):
        simulate(seed)
