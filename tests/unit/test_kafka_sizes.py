"""What goes to a topic in place of a row that is larger than it takes: measured, marked, told from others."""

from __future__ import annotations

import json
import random
import string
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import xxhash

from backend.kafka_client.settings import KafkaSettings
from backend.sinks.kafka.delivery import Publication
from backend.sinks.kafka.fitting import send_fitted, tell
from backend.sinks.kafka.rows import Message
from backend.sinks.kafka.sizes import LEAST_LIMIT, batch_bytes, fit, producer_sizes

IDS = {"id": "7-2-0", "version": 7, "shard": 2, "sequence": 0, "query_id": "0" * 32}


def message(key: bytes = b"k", **columns: object) -> Message:
    return Message("t", key, json.dumps(IDS | columns).encode())


def varint(number: int) -> int:
    """Bytes of a zigzag varint."""
    number <<= 1
    length = 1
    while number > 127:
        number >>= 7
        length += 1
    return length


def test_a_batch_of_one_is_never_larger_than_it_is_taken_for():
    """By the fields of a record in Kafka's message format 2: attributes, times, lengths; no headers."""
    for key, value in [(0, 0), (1, 5), (300, 70), (70_000, 3_000_000), (5, 60_000_000)]:
        record = 1 + varint(0) + varint(0) + varint(key) + key + varint(value) + value + 1
        whole = 61 + varint(record) + record
        assumed = batch_bytes(b"k" * key, b"v" * value)
        assert whole <= assumed <= whole + 36


def test_a_row_at_the_limit_goes_whole_and_one_byte_more_does_not():
    row = message(text="x" * 2000)
    limit = batch_bytes(row.key, row.value)
    assert fit(row, limit) is row
    cut = fit(row, limit - 1)
    assert batch_bytes(cut.key, cut.value) <= limit - 1
    said = json.loads(cut.value)
    assert said == IDS | {
        "too_large": {
            "bytes": len(row.value), "digest": xxhash.xxh3_128_hexdigest(row.value), "columns": 1, "cut": ["text"],
        }
    }  # fmt: skip


def test_what_says_which_window_or_message_it_is_stays_before_smaller_columns():
    row = message(
        **{f"c{n:03d}": n for n in range(900)},
        window_start=-3_600_000,
        window_end=0,
        reason="full",
        revision=0,
        tails=["N14228"] * 100_000,
    )
    said = json.loads(fit(row, LEAST_LIMIT).value)
    assert (said["window_start"], said["window_end"], said["reason"], said["revision"]) == (-3_600_000, 0, "full", 0)
    assert "tails" not in said
    kept = [name for name in said if name.startswith("c")]
    assert kept
    assert said["too_large"]["columns"] == 901 - len(kept)


def test_an_error_keeps_its_coordinates():
    row = message(
        topic="flights", stream=0, partition=3, offset=77, timestamp=None, reason="malformed", value="A" * 10**6
    )
    said = json.loads(fit(row, 100_000).value)
    assert (said["topic"], said["partition"], said["offset"], said["reason"]) == ("flights", 3, 77, "malformed")
    assert said["too_large"]["cut"] == ["value"]


def test_all_rows_of_a_key_have_the_same_key_whatever_their_size():
    for length in (1, 511, 512, 513, 600, 5000, 2_000_000):
        key = "x" * length
        keys = {
            fit(message(key.encode(), origin=key, n=n, text="y" * n), LEAST_LIMIT).key for n in (0, 1, 300, 900, 10_000)
        }
        assert len(keys) == 1
        if length > 512:
            assert keys == {xxhash.xxh3_128_digest(key.encode())}


def test_every_row_fits_whatever_its_columns_and_keeps_what_tells_it_from_others():
    draw = random.Random(5)
    far = {
        "id": f"{2**63 - 1}-{2**31 - 1}-e{2**63 - 1}",
        "version": 2**63 - 1,
        "shard": 2**31 - 1,
        "sequence": 2**63 - 1,
    }
    for _ in range(600):
        ids = draw.choice([IDS, IDS | far])
        columns = {
            "".join(draw.choices(string.ascii_letters + '"\\é€', k=draw.randint(1, 200))): draw.choice(
                [None, draw.random(), "é" * draw.randint(0, 3000), ['"'] * draw.randint(0, 400), {"a": "\\" * 100}]
            )
            for _ in range(draw.randint(0, 30))
        }
        value = json.dumps(ids | columns, ensure_ascii=draw.random() < 0.5).encode()
        row = Message("t", b"k" * draw.choice([0, 5, 500, 512, 513, 10_000]), value)
        limit = draw.choice([LEAST_LIMIT, 1500, 10_000])
        cut = fit(row, limit)
        assert batch_bytes(cut.key, cut.value) <= limit
        said = json.loads(cut.value)
        assert {name: said[name] for name in ids} == ids
        if cut is row:
            continue
        mark = said.pop("too_large")
        whole = ids | columns
        assert all(said[name] == whole[name] for name in said)
        assert mark["columns"] == len(whole) - len(said)
        assert set(mark["cut"]) <= set(whole) - set(said)
        assert (mark["bytes"], mark["digest"]) == (len(value), xxhash.xxh3_128_hexdigest(value))


def test_the_whole_value_is_kept_where_asked_for_and_what_was_cut_is_told(tmp_path, caplog):
    small, large = message(n=1), message(text="x" * 5000)
    sent: list[tuple[str, bytes, bytes]] = []
    delivery: Any = SimpleNamespace(send=lambda *message: sent.append(message))
    to = Publication(KafkaSettings("h:1"), {}, (), "q", {"t": 2000}, 1.0, str(tmp_path / "overflow"))
    cut = send_fitted(delivery, [small, large, large], to)  # the last one is another try
    assert sent[0] == (small.topic, small.value, small.key)
    assert sent[1] == sent[2]
    (kept,) = (tmp_path / "overflow").iterdir()
    assert kept.name == json.loads(sent[1][1])["too_large"]["digest"] + ".json"
    assert kept.read_bytes() == large.value
    tell(7, [cut, (0, [])])
    assert "micro-batch 7: 2 rows are larger" in caplog.text
    assert "7-2-0 for t" in caplog.text
    assert send_fitted(delivery, [large], replace(to, overflow=None))[0] == 1


def test_what_says_what_was_published_may_be_larger_than_a_row():
    """Its topic is another one, and it has about 48 bytes for each shard and output."""
    assert producer_sizes({"results": LEAST_LIMIT, "errors": LEAST_LIMIT}) == {
        "message.max.bytes": 1_001_000,
        "batch.size": LEAST_LIMIT,
    }
