"""What a drill's process tells on its standard output can be read line by line, whoever tells at the same time."""

from __future__ import annotations

import io
import json
import sys

import pytest

from recovery.drill.job import tell


class Pieces(io.StringIO):
    """Keeps each write apart: between two of them another thread may write."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_an_event_is_one_write_of_one_whole_line(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Pieces()
    monkeypatch.setattr(sys, "stdout", out)
    tell("published", version=2, why="two\nlines")
    tell("ended")
    assert len(out.pieces) == 2
    assert all(piece.endswith("\n") and piece.count("\n") == 1 for piece in out.pieces)
    first, last = (json.loads(piece) for piece in out.pieces)
    assert (first["event"], first["version"], first["why"], last["event"]) == ("published", 2, "two\nlines", "ended")
