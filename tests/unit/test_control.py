"""The control stream's offsets and rows, without Spark."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from backend.errors import ControlDamaged, UnknownFormat
from backend.spark import control
from backend.spark.control import (
    ControlReader,
    ask_to_adopt,
    ask_to_drain,
    control_rows,
    drain_of,
    forget_requests,
)  # fmt: skip

LIMIT = ReadAllAvailable()


def rows(reader, start, end):
    return [row for part in reader.partitions(start, end) for row in reader.read(part)]


def test_the_first_row_asks_for_nothing_and_each_request_for_one_drain(tmp_path):
    reader = ControlReader(str(tmp_path))
    first = reader.initialOffset()
    begun = reader.latestOffset(first, LIMIT)
    assert rows(reader, first, begun) == [(False, "{}")]
    assert reader.latestOffset(begun, LIMIT) == begun
    ask_to_drain(str(tmp_path))
    asked = reader.latestOffset(begun, LIMIT)
    assert asked != begun
    assert rows(reader, begun, asked) == [(True, "{}")]
    assert reader.latestOffset(asked, LIMIT) == asked
    ask_to_drain(str(tmp_path))
    ask_to_drain(str(tmp_path))
    again = reader.latestOffset(asked, LIMIT)
    assert rows(reader, asked, again) == [(True, "{}")]
    assert 0 == begun["asked"] < asked["asked"] < again["asked"] - 1  # two requests, one drain


def test_a_request_before_the_first_micro_batch_drains_it(tmp_path):
    ask_to_drain(str(tmp_path))
    reader = ControlReader(str(tmp_path))
    assert rows(reader, reader.initialOffset(), reader.latestOffset(reader.initialOffset(), LIMIT)) == [(True, "{}")]


def test_a_micro_batch_is_the_same_again_also_without_its_files(tmp_path):
    ask_to_drain(str(tmp_path))
    reader = ControlReader(str(tmp_path))
    begun = {"format": 1, "asked": 0}
    asked = reader.latestOffset(begun, LIMIT)
    for file in (tmp_path / "rewind/control").iterdir():
        file.unlink()
    again = ControlReader(str(tmp_path))
    assert rows(again, begun, asked) == [(True, "{}")]
    assert again.latestOffset(asked, LIMIT) == asked  # never back
    time.sleep(0.002)
    ask_to_drain(str(tmp_path))
    assert rows(again, asked, again.latestOffset(asked, LIMIT)) == [(True, "{}")]


def test_offsets_of_sparks_file_source_are_read(tmp_path):
    """An earlier release's checkpoint: `start.json` is in the first micro-batch, each later file asks for a drain."""
    (tmp_path / "rewind/control").mkdir(parents=True)
    (tmp_path / "rewind/control/start.json").write_text('{"format": 1, "drain": false}')
    (tmp_path / "rewind/control/drain-e0ba483f304e4910b3060b56d1a59492.json").write_text('{"format": 1, "drain": true}')
    reader = ControlReader(str(tmp_path))
    begun = reader.latestOffset({"logOffset": 1}, LIMIT)
    assert rows(reader, {"logOffset": 1}, begun) == [(False, "{}")]
    assert rows(reader, {"logOffset": 0}, {"logOffset": 1}) == [(True, "{}")]
    assert rows(reader, reader.initialOffset(), {"logOffset": 0}) == [(False, "{}")]
    ask_to_drain(str(tmp_path))
    assert rows(reader, {"logOffset": 1}, reader.latestOffset({"logOffset": 1}, LIMIT)) == [(True, "{}")]


def test_what_another_release_wrote_is_named(tmp_path):
    reader = ControlReader(str(tmp_path))
    with pytest.raises(UnknownFormat, match="format 7"):
        reader.latestOffset({"format": 7, "asked": 1}, LIMIT)
    ask_to_drain(str(tmp_path))
    (request,) = (tmp_path / "rewind/control").iterdir()
    request.write_text('{"format": 3, "drain": true}')
    with pytest.raises(UnknownFormat, match=r"drain-\d+.json"):
        reader.latestOffset(reader.initialOffset(), LIMIT)


@pytest.mark.parametrize(
    "content", ["", "{", '"drain"', "[" * 50_000, '{"format": 2, "drain": false}', '{"format": 3}']
)
def test_a_request_that_cannot_be_read_is_named(tmp_path, content):
    ask_to_drain(str(tmp_path))
    (request,) = (tmp_path / "rewind/control").iterdir()
    request.write_text(content)
    reader = ControlReader(str(tmp_path))
    with pytest.raises((ControlDamaged, UnknownFormat)) as caught:
        reader.latestOffset(reader.initialOffset(), None)
    assert request.name in caught.value.where
    assert caught.value.command
    assert request.read_text() == content


def test_a_start_asks_for_one_row_whatever_was_asked_before(tmp_path):
    first = ControlReader(str(tmp_path))
    begun = first.latestOffset(first.initialOffset(), LIMIT)
    second = ControlReader(str(tmp_path), "a1")
    started = second.latestOffset(begun, LIMIT)
    assert started == {**begun, "start": "a1"}
    assert rows(second, begun, started) == [(False, "{}")]
    assert second.latestOffset(started, LIMIT) == started
    ask_to_drain(str(tmp_path))
    third = ControlReader(str(tmp_path), "b2")
    asked = third.latestOffset(started, LIMIT)
    assert (asked["start"], rows(third, started, asked)) == ("b2", [(True, "{}")])
    assert first.latestOffset(asked, LIMIT) == asked


def test_a_request_to_adopt_that_is_seen_after_a_later_drain_is_not_lost(tmp_path):
    """Two threads ask at once, and the drain is planned before the other file is there."""
    place, commit = str(tmp_path), f"{3:020d}_{'a' * 32}"
    reader = ControlReader(place)
    begun = reader.latestOffset(reader.initialOffset(), LIMIT)
    ask_to_adopt(place, {0: commit})
    [adopt] = (tmp_path / "rewind/control").iterdir()
    ask_to_drain(place)
    content = adopt.read_bytes()
    adopt.unlink()
    drained = reader.latestOffset(begun, LIMIT)
    assert rows(reader, begun, drained) == [(True, "{}")]
    adopt.write_bytes(content)
    asked = reader.latestOffset(drained, LIMIT)
    assert rows(reader, drained, asked) == [(False, f'{{"0": "{commit}"}}')]
    assert reader.latestOffset(asked, LIMIT) == asked


def test_which_drain_a_micro_batch_carries_is_in_sparks_log(tmp_path):
    number = ask_to_drain(str(tmp_path))
    planned = ControlReader(str(tmp_path)).latestOffset({"format": 1, "asked": 0}, None)
    (tmp_path / "offsets").mkdir()
    for version, offset in enumerate((ControlReader(str(tmp_path)).initialOffset(), planned)):
        text = f'v1\n{{"batchWatermarkMs":0}}\n{{"asked":{{"0":5}}}}\n{json.dumps(offset)}'
        (tmp_path / "offsets" / str(version)).write_text(text)
    assert [drain_of(str(tmp_path), version) for version in (0, 1)] == [0, number]


def planned(place, *offsets):
    """Write Spark's log of offsets: a data source's, then the control stream's."""
    (place / "offsets").mkdir(exist_ok=True)
    for file in (place / "offsets").iterdir():
        file.unlink()
    for version, offset in enumerate(offsets):
        (place / "offsets" / str(version)).write_text("\n".join(["v1", "{}", "{}", json.dumps(offset)]))


def there(place):
    return sorted(int(path.stem.partition("-")[2]) for path in (place / "rewind/control").iterdir())


def test_a_request_of_a_history_that_was_taken_back_is_forgotten_and_one_that_is_not_planned_yet_is_not(tmp_path):
    reader, place = ControlReader(str(tmp_path)), str(tmp_path)
    offsets = [reader.latestOffset(reader.initialOffset(), LIMIT)] * 4
    planned(tmp_path, *offsets)
    first = ask_to_drain(place)  # behind micro-batch 3
    forget_requests(place)
    assert there(tmp_path) == [first], "it was asked, and the query died before it was planned"
    planned(tmp_path, *offsets[:2])  # taken back
    forget_requests(place)
    assert there(tmp_path) == []
    assert reader.latestOffset(offsets[0], LIMIT) == offsets[0], "nobody asked this history to drain"
    again = ask_to_drain(place)
    forget_requests(place)
    assert there(tmp_path) == [again]
    (tmp_path / f"rewind/control/drain-{again}.json").write_text('{"format": 2, "drain": true}')  # a release before
    forget_requests(place)
    assert there(tmp_path) == [again]


def test_requests_that_are_done_before_what_spark_retains_go_but_for_the_newest(tmp_path):
    reader, place = ControlReader(str(tmp_path)), str(tmp_path)
    at, offsets = reader.latestOffset(reader.initialOffset(), LIMIT), []
    numbers = []
    for number in range(5):
        numbers.append(ask_to_drain(place) if number != 2 else None)
        if number == 2:
            ask_to_adopt(place, {0: "0" * 20 + "_" + "a" * 32})
        at = reader.latestOffset(at, LIMIT)
        offsets.append(at)
    planned(tmp_path, *offsets)
    (tmp_path / "offsets" / "0").unlink()
    (tmp_path / "offsets" / "1").unlink()
    (tmp_path / "offsets" / "2").unlink()
    forget_requests(place)
    assert there(tmp_path) == numbers[4:]
    assert ControlReader(place).latestOffset(at, LIMIT) == at
    forget_requests(place)
    assert there(tmp_path) == numbers[4:]


def test_each_start_asks_for_a_row_of_its_own_also_in_one_process(tmp_path, monkeypatch):
    planned(tmp_path, {"format": 1, "asked": 0})
    readers: list[ControlReader] = []
    monkeypatch.setattr(control, "streamed", lambda _, reader, *__, **___: readers.append(reader))
    for _ in range(3):
        control_rows(cast(Any, None), str(tmp_path))
    at = {"format": 1, "asked": 0}
    for reader in readers:
        after = reader.latestOffset(at, LIMIT)
        assert after != at
        at = after
