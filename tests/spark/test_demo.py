"""The demo, small: a disk is taken under a job, then it dies inside a micro-batch; what it emits is right all the same.

In between the restore is broken on purpose, by leaving out a single replayed message: it must not get away with it.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recovery.demo.chapters import Demo, Failed
from recovery.demo.proof import prove_demo
from recovery.demo.run import show

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(1800)]


def test_a_disaster_changes_nothing_and_a_broken_restore_is_found(spark: Any, tmp_path: Path) -> None:
    text = io.StringIO()
    story = Demo(tmp_path / "demo", Console(file=text, width=200), days=20, offsets=300)
    story.prepare()
    story.disaster()
    assert (story.observed.queued > 0, story.observed.others > 0, story.observed.beside > 0) == (True, True, True)
    assert story.observed.restores == 0  # all that before anything stopped
    killed_in = int(text.getvalue().partition("inside micro-batch ")[2].partition(",")[0])
    assert not (tmp_path / "demo/checkpoint/commits" / str(killed_in)).exists()
    assert (tmp_path / "demo/checkpoint/offsets" / str(killed_in)).exists()

    with pytest.raises(Failed, match="RestoreMismatch"):
        story.restart(break_restore=True)
    assert not (tmp_path / "demo/checkpoint/commits" / str(killed_in)).exists()

    story.restart()
    assert story.observed.replayed > 0
    proof = prove_demo(spark, story.out)
    assert proof.holds, proof
    assert proof.malformed > 0
    assert proof.late > 0

    show(Console(file=text, width=200), proof, story.observed, 1.0)
    assert f"{proof.windows.total:,} of {proof.windows.total:,} windows equal" in text.getvalue()


def test_a_directory_of_somebody_else_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(ValueError, match="not empty"):
        Demo(tmp_path, Console(file=io.StringIO())).prepare()
    assert (tmp_path / "precious").exists()
