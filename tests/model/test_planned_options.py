"""A small hunt between publishing and committing; `python -m tests.model.planned_options` is the large one."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from recovery.commit import manifest
from recovery.commit.option_sets import OptionSet
from tests.model.planned_options import KINDS, hunt, never_changed

RUNS = int(os.environ.get("PLANNED_OPTIONS_RUNS", "112"))


@pytest.mark.long
def test_options_that_change_between_publishing_and_committing_change_no_row() -> None:
    changed, failed = hunt([*KINDS, "join", "join"], range(RUNS))  # a join has most options
    assert failed == []
    assert never_changed(changed) == []
    print(sum(changed.values(), Counter[str]()))


def test_the_hunt_finds_a_job_that_forgets_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "following", lambda stored, options, planned: (OptionSet(0, options),))
    _, failed = hunt(["tumbling", "session", "process"], range(12))
    assert any("OutputDiffers" in said for said in failed)
