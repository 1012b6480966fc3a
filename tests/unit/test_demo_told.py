"""What the demo says of its restores: a task that takes what was restored is no restore of its own."""

from __future__ import annotations

import json

import pytest

from recovery.demo.job import Teller
from recovery.listener import Restoring


def test_what_tasks_take_afterwards_is_not_told_as_restored(capsys: pytest.CaptureFixture[str]) -> None:
    teller = Teller()
    for shard, how, records in ((0, "replay", 143), (1, "replay", 136), (0, "package", 0), (1, "steps", 0)):
        restoring = Restoring(shard, "commit", "no local state", how, records=records, ranges={})
        teller.start(restoring)
        teller.end(restoring, records, 10, 0.1)
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["event"], one["shard"], one["how"]) for one in told] == [
        ("restoring", 0, "replay"),
        ("restored", 0, "replay"),
        ("restoring", 1, "replay"),
        ("restored", 1, "replay"),
    ]
    assert [one["records"] for one in told if one["event"] == "restored"] == [143, 136]
