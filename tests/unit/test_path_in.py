"""What a checkpoint says of the way in: which hash sends a key to its shard, which parser read JSON, the batch time."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from backend.errors import ManifestMismatch
from backend.sources.archive import archive
from backend.spark import task
from recovery.commit.manifest import FIRST_HASH, Manifest, record, settle
from recovery.files import open_files


def place() -> str:
    return f"memory://path-in-{uuid.uuid4().hex}"


def start(checkpoint: str, **entries: Any) -> None:
    record(checkpoint, settle(checkpoint, Manifest(1, (0,), entries), used=False))


def test_a_manifest_without_a_hash_means_the_first_one() -> None:
    checkpoint = place()
    start(checkpoint, route="key")
    start(checkpoint, route="key", hash=FIRST_HASH)
    with pytest.raises(ManifestMismatch, match="hash: was 'xxhash64', is 'another'"):
        start(checkpoint, route="key", hash="another")


def test_json_of_another_parser_is_refused_by_name() -> None:
    checkpoint = place()
    before = archive("nowhere", value="n int", topics=["t"]).describe()
    before["value"] = {**before["value"], "parser": 1}  # type: ignore[dict-item] # as release 0.1 wrote it
    start(checkpoint, input=before)
    with pytest.raises(ManifestMismatch, match=r"input\.value\.parser: was 1, is 2"):
        start(checkpoint, input=archive("nowhere", value="n int", topics=["t"]).describe())
    typed = archive("nowhere", value="n int", topics=["t"], format="typed").describe()
    assert typed["value"] == {"format": "typed", "schema": "n int", "parser": 1}


def test_the_batch_time_is_what_spark_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a line with the log's version, one with the micro-batch's metadata, then the offsets."""
    checkpoint = place()
    metadata = b'{"batchWatermarkMs":0,"batchTimestampMs":1700000000123,"conf":{}}'
    open_files(checkpoint).write("offsets/7", [b"v1\n" + metadata + b'\n{"t":{"0":5}}'])
    monkeypatch.setattr(task, "query_and_version", lambda: ("query", 7))
    assert task.batch_time(checkpoint) == 1_700_000_000_123
