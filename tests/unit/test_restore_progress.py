"""Listeners hear of each chunk of a replay once, while it goes on and at its end."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from backend.errors import StorageFailed
from recovery.files import LocalFiles
from recovery.listener import Listeners, Restoring
from recovery.restore import all_shards as rebuild
from tests.support.waiting import PATIENCE_S, until


class Heard:
    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int]] = []

    def start(self, restoring: Restoring) -> None: ...

    def batch(self, restoring: Restoring, end: Any, records: int, length: int) -> None:
        assert end == {}, "chunks come in no order of offsets"
        self.batches.append((restoring.shard, records, length))

    def suspended(self, restoring: Restoring, why: str) -> None: ...

    def end(self, restoring: Restoring, records: int, length: int, seconds: float) -> None: ...


def test_each_chunk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "POLL_S", 0.01)
    heard, files = Heard(), LocalFiles(tmp_path)
    under_way = {shard: Restoring(shard, "c", "no local state", "replay") for shard in (0, 1)}
    with rebuild.following(Listeners([heard]), under_way, files, "run"):
        files.write("run/0/12-aa.arrow", [b"12345"])
        deadline = time.monotonic() + 10
        while not heard.batches and time.monotonic() < deadline:
            time.sleep(0.01)
        assert heard.batches == [(0, 12, 5)]
        files.write("run/1/3-bb.arrow", [b"1"])
    assert sorted(heard.batches) == [(0, 12, 5), (1, 3, 1)]


def test_a_look_that_fails_ends_neither_the_following_nor_the_restore(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "POLL_S", 0.01)
    failed, heard = threading.Event(), Heard()

    class Failing(LocalFiles):
        def list(self, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
            if threading.current_thread() is not threading.main_thread() and not failed.is_set():
                failed.set()
                raise StorageFailed("s3://chunks does not answer")
            return super().list(folder, temporary=temporary)

    files = Failing(tmp_path)
    with rebuild.following(Listeners([heard]), {0: Restoring(0, "c", "no local state", "replay")}, files, "run"):
        assert failed.wait(PATIENCE_S)
        files.write("run/0/12-aa.arrow", [b"12345"])
        until(lambda: bool(heard.batches), what="a look behind the one that failed")
    assert heard.batches == [(0, 12, 5)]


def test_a_restore_that_is_done_is_done_though_its_last_look_fails(tmp_path: Path) -> None:
    class Failing(LocalFiles):
        def list(self, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
            raise StorageFailed("s3://chunks does not answer")

    restoring = {0: Restoring(0, "c", "no local state", "replay")}
    with rebuild.following(Listeners([Heard()]), restoring, Failing(tmp_path), "run"):
        pass
