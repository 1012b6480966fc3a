"""Which failures of a read of Spark's state are damage of its files: not what passes, and not what has a name."""

from __future__ import annotations

import pytest

from recovery import failures
from recovery.failures import Link, state_damage

OUTER = Link("org.apache.spark.SparkException", "Job aborted due to stage failure: Task 0 in stage 1.0")
CHECKSUM = Link("org.apache.hadoop.fs.ChecksumException", "Checksum error: file:/c/state/0/0/7.changelog at 0", io=True)


@pytest.mark.parametrize(
    ("bottom", "damage"),
    [
        (CHECKSUM, True),
        (Link("java.io.EOFException", "", io=True), True),
        (Link("java.io.FileNotFoundException", "File file:/c/state/0/0/7.changelog does not exist", io=True), True),
        (Link("java.io.IOException", "Connection reset by peer", io=True), False),
        (Link("java.io.IOException", 'Cannot run program "chmod": error=12, Cannot allocate memory', io=True), False),
        (Link("java.io.IOException", "No space left on device", io=True), False),
        (Link("java.io.FileNotFoundException", "/c: No space left on device", io=True), False),
        (Link("java.lang.OutOfMemoryError", "Java heap space"), False),
    ],
)
def test_what_lies_at_the_bottom_tells(monkeypatch: pytest.MonkeyPatch, bottom: Link, damage: bool) -> None:
    monkeypatch.setattr(failures, "chain", lambda _: (OUTER, bottom))
    said = state_damage(RuntimeError("a call failed"))
    assert (said is not None) == damage
    if said is not None:
        assert bottom.kind in said
