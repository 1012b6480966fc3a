"""The message log: what is written is read back or named as damaged, few segments stay, and what expired is freed."""

from __future__ import annotations

import base64
import zlib
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
import xxhash

from backend.batch import BEFORE, MESSAGE_FIELDS, NO_TIME, OFFSET, Position
from backend.errors import ChangelogDamaged, UnknownFormat
from recovery.changelog import message_log
from recovery.changelog.message_log import MessageLog, decode, needed
from recovery.commit.pointer import Commit, CommitRecord, Segment

SCHEMA = pa.schema([*MESSAGE_FIELDS, pa.field("user", pa.string())])


def commit(version: int) -> Commit:
    return Commit(version, f"{version:032x}")


def messages(version: int, count: int = 2, stream: int = 0) -> pa.Table:
    offsets = [(version << 32) + rank for rank in range(count)]
    columns = [[stream] * count, [0] * count, offsets, [5] * count, [1] * count, ["u"] * count]
    return pa.table(columns, schema=SCHEMA)


def record(version: int, segments: list[Segment]) -> CommitRecord:
    positions = [(0, 0, Position((version + 1) << 32, 0, 0))]
    return CommitRecord(0, commit(version), None, 0, positions, {}, segments=segments)


def offsets(log: MessageLog, segments: list[Segment], above: Commit | None = None) -> list[int]:
    found = list(log.messages(record(99, segments), above))
    assert all(table.schema.equals(SCHEMA) for table in found)
    assert {value for table in found for value in table[BEFORE].to_pylist()} <= {NO_TIME}
    return [offset for table in found for offset in table[OFFSET].to_pylist()]


def test_only_the_streams_that_cannot_be_read_again_are_logged(tmp_path: Path) -> None:
    log = MessageLog(str(tmp_path), frozenset({1}))
    assert log.append(0, commit(4), [], messages(4, stream=0)) == []
    assert not list(tmp_path.iterdir()), "nothing to log, no file"
    [segment] = log.append(0, commit(4), [], pa.concat_tables([messages(4), messages(4, 3, stream=1)]))
    assert log.read(0, segment)["_stream"].to_pylist() == [1, 1, 1]
    assert segment.length == (tmp_path / "0" / f"{commit(4).name}.messages").stat().st_size


def test_segments_stay_few_and_hold_every_message_once(tmp_path: Path) -> None:
    log, segments, written = MessageLog(str(tmp_path), frozenset({0})), list[Segment](), 0
    for version in range(300):
        segments = log.append(0, commit(version), segments, messages(version))
        written += segments[-1].length
    # 300 in base 16 is 1, 2, 12: one segment of 256 commits, two of 16, twelve of one
    assert [segment.tier for segment in segments] == [2] + [1] * 2 + [0] * 12
    assert offsets(log, segments) == [(version << 32) + rank for version in range(300) for rank in (0, 1)]
    assert offsets(log, segments, commit(287)) == [(v << 32) + rank for v in range(288, 300) for rank in (0, 1)]


def test_large_segments_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, segments = MessageLog(str(tmp_path), frozenset({0})), list[Segment]()
    monkeypatch.setattr(message_log, "MERGED_BYTES", 5 * len(message_log.encode(0, commit(0), log.of(messages(0)))))
    for version in range(60):
        segments = log.append(0, commit(version), segments, messages(version))
    assert sorted(offsets(log, segments)) == [(version << 32) + rank for version in range(60) for rank in (0, 1)]
    assert len(segments) < 60


def test_what_lies_below_the_smallest_retained_offset_is_free(tmp_path: Path) -> None:
    log, segments = MessageLog(str(tmp_path), frozenset({0})), list[Segment]()
    for version in (3, 5, 8):
        segments = log.append(0, commit(version), segments, messages(version))
    assert [s.commit.version for s in needed(segments, {(0, 0): (5 << 32) + 1, (1, 0): 0}, {0})] == [5, 8]
    assert needed(segments, {(1, 0): 0}, {0}) == []
    log.append(0, Commit(5, "f" * 32), [], messages(5))  # of an attempt that Spark did not commit
    log.append(0, Commit(9, "f" * 32), [], messages(9))  # under way
    (tmp_path / "0" / f"{commit(3).name}.messages.tmp-1").write_bytes(b"")
    deleted = log.prune(record(8, segments[1:]))
    assert sorted(deleted) == sorted(
        [f"0/{commit(3).name}.messages", f"0/{Commit(5, 'f' * 32).name}.messages", f"0/{commit(3).name}.messages.tmp-1"]
    )
    assert offsets(log, segments[1:]) == [(version << 32) + rank for version in (5, 8) for rank in (0, 1)]
    assert (tmp_path / "0" / f"{Commit(9, 'f' * 32).name}.messages").exists()


def test_every_damaged_byte_is_found_and_a_lost_segment_is_named(tmp_path: Path) -> None:
    log = MessageLog(str(tmp_path), frozenset({0}))
    [segment] = log.append(0, commit(4), [], messages(4))
    path = tmp_path / "0" / f"{commit(4).name}.messages"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ChangelogDamaged, match="do not match their checksum"):
            log.read(0, segment)
    path.write_bytes(data)
    with pytest.raises(ChangelogDamaged, match="of shard 0"):
        decode(data, 1, commit(4), "there")
    path.unlink()
    [error] = log.verify(record(4, [segment]))
    assert "it is not there" in error.why
    assert str(tmp_path) in error.where


def test_another_format_is_named(tmp_path: Path) -> None:
    log = MessageLog(str(tmp_path), frozenset({0}))
    log.append(0, commit(4), [], messages(4))
    data = bytearray((tmp_path / "0" / f"{commit(4).name}.messages").read_bytes()[:-16])
    data[5] = 2
    with pytest.raises(UnknownFormat, match="format 2, this release reads 1"):
        decode(bytes(data) + xxhash.xxh3_128_digest(bytes(data)), 0, commit(4), "there")


FROZEN = (
    "eNoLCvf1YWBkYGBQn8wwieWmggF+YML0HwgSgBoEGECAi4GHgY2BlYEDyAICRhYgnwHI4wCSLFCSASjPwPAHiNcAcQUQuwCxCAPI"
    "DBGgGjYGdrAuAaiZjKwgWgaqlwFKlxanFkHYLGB+CtAdQIoJpFYCSS3IrviSzNxUID0HoobRAUhMwaGeHaQ+Py2tOLWE4QyS+iNI"
    "6lWQ1IP8GV+QWFSSWZKZnwfyKw8Qs4P9CtKrAPcXA5q/IGYpoNtdXFKUmpgLZLEB9bAASUjYgsK5gBESTiDAA3Q1JKR5wKYyMLOA"
    "w+gAAwLwMMgB9bLA1TyAuh3kXyYGZMAGdjMb1M3cDLiBKJSWQBOH8SWhtAWaPIyvCKUT0OQT0OQ70ORhfFkovQJKCyOpYcXwF+V8"
    "WNxobNX/q8CiCBfnQBbncMQIJwFkeYFGhGGMSIZiU8eK5BmUuERSx5MIjSmEg5mQ5ZkEgRmkFMz/D0m3DG9mcrmukStYm3dhX05L"
    "xAx3AMMjWu0="
)
"""A segment of format 1, compressed by zlib, base64."""


def test_a_frozen_segment_is_read() -> None:
    data = zlib.decompress(base64.b64decode(FROZEN))
    assert decode(data, 0, commit(4), "frozen").to_pydict() == messages(4).drop_columns([BEFORE]).to_pydict()
    assert msgspec.msgpack.decode(data[10 : 10 + int.from_bytes(data[6:10], "big")]) == [0, [4, f"{4:032x}"], 2]
