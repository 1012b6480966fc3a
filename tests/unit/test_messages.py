from __future__ import annotations

import itertools

import pyarrow as pa
import pytest

from backend.errors import BoundViolated, KeyInvalid, StateCorrupted
from backend.keys import encode, encode_columns
from backend.messages.keys import message_keys
from backend.messages.layout import MATRIX, OFFSET_FIRST, TIME_FIRST, MessageLayout, Part, choose_layout
from backend.messages.rows import MessageCodec, digest, expire_messages
from backend.rows import RowCodec
from backend.store.memory import MemoryStore
from backend.store.protocol import Changes
from backend.store.workspace import Workspace
from tests.support.message_store import add_messages, expire_before, message_rows, read_messages

FIELDS = pa.schema([("item", pa.int64()), ("user", pa.string())])
CODEC = RowCodec(FIELDS)

S, E, T, O = Part.SESSION, Part.EQUAL, Part.TIME, Part.OFFSET  # noqa: E741
LAYOUTS = [
    MessageLayout(parts)
    for parts in [(O,), (T, O), (E, O), (E, T, O), (T, E, O), (S, O), (S, T, O), (S, E, O), (S, E, T, O), (S, T, E, O)]
]

# (stream, partition, offset, time, item, user): two streams, two partitions, negative times, equal times
ROWS = [
    (0, 0, 0, -5, 1, "user_1"),
    (0, 0, 1, 10, 2, "user_12"),
    (0, 0, 2, 10, 1, "user_1"),
    (0, 1, 0, 10, 1, "user_1"),
    (0, 1, 7, 25, 2, None),
    (1, 0, 0, 9, 1, ""),
    (1, 0, 3, 2**40, 2, "user_1"),
]


def table(rows: list[tuple[object, ...]]) -> pa.Table:
    names = ["_stream", "_partition", "_offset", "_time", "item", "user"]
    kinds = [pa.uint16(), pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.string()]
    columns = list(zip(*rows, strict=True)) or [()] * 6
    return pa.table([pa.array(column, kind) for column, kind in zip(columns, kinds, strict=True)], names=names)


def codes(messages: pa.Table, layout: MessageLayout) -> dict[str, pa.BinaryArray]:
    """Items are the equal fields, users the session key."""
    found = {}
    if E in layout.parts:
        found["equal"] = encode_columns([messages["item"]])
    if S in layout.parts:
        found["session"] = encode_columns([messages["user"]])
    return found


def fill(layout: MessageLayout, rows: list[tuple[object, ...]]) -> Workspace:
    work = Workspace(MemoryStore())
    messages = table(rows)
    add_messages(work, layout, CODEC, messages, **codes(messages, layout))
    return work


def seen(found: pa.Table, layout: MessageLayout) -> set[tuple[object, ...]]:
    """Rows without what the layout does not keep."""
    names = ["_stream", "_partition", "_offset", *(["_time"] if layout.timed else []), "item", "user"]
    assert found.column_names == names
    rows = list(zip(*(found[name].to_pylist() for name in names), strict=True))
    assert len(set(rows)) == len(rows)
    return set(rows)


def wanted(layout: MessageLayout, rows: list[tuple[object, ...]]) -> set[tuple[object, ...]]:
    return {row if layout.timed else (*row[:3], *row[4:]) for row in rows}


# the table of SAMZA-552, "Message Store", read off by hand; N/A stands for both
@pytest.mark.parametrize(
    ("measure", "equal", "time_range", "large", "key"),
    [
        ("tuple", False, None, None, "offset"),
        ("tuple", True, None, False, "offset"),
        ("tuple", True, None, True, "equal_offset"),
        ("time", False, False, None, "time_offset"),
        ("time", False, True, None, "time_offset"),
        ("time", True, False, None, "equal_time_offset"),
        ("time", True, True, False, "time_equal_offset"),
        ("time", True, True, True, "equal_time_offset"),
    ],
)
def test_the_matrix_of_message_keys_of_joins(
    measure: str, equal: bool | None, time_range: bool | None, large: bool | None, key: str
) -> None:
    both = (False, True)
    for e, r, size in itertools.product(*(both if given is None else (given,) for given in (equal, time_range, large))):
        by_number = measure == "tuple"
        layout = choose_layout(by_number=by_number, equal_fields=e, time_range=r, large=size)
        assert layout.name == key
        sessions = choose_layout(by_number=by_number, equal_fields=e, time_range=r, large=size, session=True)
        assert sessions.name == "session_" + key


def test_the_message_keys_of_aggregates() -> None:
    assert (OFFSET_FIRST.name, TIME_FIRST.name) == ("offset", "time_offset")


def test_each_row_of_the_matrix_can_be_reached() -> None:
    assert {row[4] for row in MATRIX} == {layout.parts for layout in LAYOUTS if S not in layout.parts}


def test_key_bytes_of_format_1() -> None:
    messages = table([(1, -1, 5, -2, 7, "a")])
    time, place = "7ffffffffffffffe", "00017fffffff8000000000000005"
    item, user = "208000000000000007", "30610001"
    for parts, hexed in [
        ((T, O), time + place),
        ((O,), place),
        ((E, T, O), item + time + place),
        ((T, E, O), time + item + place),
        ((S, E, O), user + item + place),
    ]:
        layout = MessageLayout(parts)
        (key,) = message_keys(layout, messages, {Part(name): code for name, code in codes(messages, layout).items()})
        assert key.hex() == "01" + hexed


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_all_messages_come_back(layout: MessageLayout) -> None:
    assert seen(read_messages(fill(layout, ROWS), layout, CODEC), layout) == wanted(layout, ROWS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_replays_and_duplicates_are_stored_once(layout: MessageLayout) -> None:
    work = fill(layout, [*ROWS, *ROWS[::-1]])
    before = work.changes()
    messages = table(ROWS[2:5])
    add_messages(work, layout, CODEC, messages, **codes(messages, layout))
    assert work.changes() == before
    assert len(read_messages(work, layout, CODEC)) == len(ROWS)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_replay_writes_the_same_bytes_in_any_order(layout: MessageLayout) -> None:
    work = fill(layout, ROWS)
    messages = table(ROWS[::-1])
    keys, values = message_rows(layout, CODEC, messages, **codes(messages, layout))
    assert (keys, values) == (work.changes().keys, work.changes().values)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_window_is_one_range(layout: MessageLayout) -> None:
    work = fill(layout, ROWS)
    if layout.timed:
        cases = [
            ((start, end), lambda row, a=start, b=end: a <= row[3] < b) for start in (-5, 10, 11) for end in (10, 26)
        ]
    else:
        cases = [(((0, 0, 1), (0, 1, 7)), lambda row: (0, 0, 1) <= row[:3] < (0, 1, 7))]
    for (start, end), holds in cases:
        expected = [row for row in ROWS if holds(row)]
        if S not in layout.parts:
            assert seen(read_messages(work, layout, CODEC, start, end), layout) == wanted(layout, expected)
        if E in layout.parts and S not in layout.parts:
            found = read_messages(work, layout, CODEC, start, end, equal=encode(1))
            assert seen(found, layout) == wanted(layout, [row for row in expected if row[4] == 1])
        if S in layout.parts:
            given = {"session": encode("user_1")} | ({"equal": encode(1)} if E in layout.parts else {})
            mine = [row for row in expected if row[5] == "user_1" and (row[4] == 1 or E not in layout.parts)]
            assert seen(read_messages(work, layout, CODEC, start, end, **given), layout) == wanted(layout, mine)
        if layout.indexed:
            assert seen(read_messages(work, layout, CODEC, start, end), layout) == wanted(layout, expected)
        if S in layout.parts:
            found = read_messages(work, layout, CODEC, start, end, session=encode("user_1"))
            mine = [row for row in expected if row[5] == "user_1"]
            assert seen(found, layout) == wanted(layout, mine)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.indexed], ids=lambda layout: layout.name)
def test_all_messages_of_a_key(layout: MessageLayout) -> None:
    work = fill(layout, ROWS)
    if layout.parts[0] is S:
        found, mine = (
            read_messages(work, layout, CODEC, session=encode("user_1")),
            [r for r in ROWS if r[5] == "user_1"],
        )
    else:
        found, mine = read_messages(work, layout, CODEC, equal=encode(2)), [r for r in ROWS if r[4] == 2]
    assert seen(found, layout) == wanted(layout, mine)


def test_a_range_needs_the_parts_before_it() -> None:
    work = Workspace(MemoryStore())
    for layout in LAYOUTS:
        if S in layout.parts and E in layout.parts:
            with pytest.raises(KeyInvalid, match="needs session"):
                read_messages(work, layout, CODEC, *((1, 2) if layout.timed else ((0, 0, 1), None)), equal=encode(1))
        for part, name in ((S, "session"), (E, "equal")):
            if part not in layout.parts:
                with pytest.raises(KeyInvalid, match=f"has no {name}"):
                    read_messages(work, layout, CODEC, **{name: encode(1)})


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("before", [-6, 10, 11, 2**41])
def test_expiry_evicts_what_is_before_and_leaves_the_rest(layout: MessageLayout, before: int) -> None:
    work = fill(layout, ROWS)
    at = before if layout.timed else (0, 0, max(before - 10, 0))
    gone = [row for row in ROWS if (row[3] < before if layout.timed else row[:2] == (0, 0) and row[:3] < at)]
    for count in (len(gone), 0):
        assert expire_before(work, layout, at) == (count if layout.indexed or not layout.timed else -1)
        assert seen(read_messages(work, layout, CODEC), layout) == wanted(layout, [r for r in ROWS if r not in gone])
    assert work.scan_arrays(b"\x02", b"\x03")[0] == sorted(work.scan_arrays(b"\x02", b"\x03")[0])
    assert len(work.scan_arrays(b"\x02", b"\x03")[0]) == (len(ROWS) - len(gone) if layout.indexed else 0)


@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x.timed], ids=lambda layout: layout.name)
def test_nothing_is_written_below_what_is_expired(layout: MessageLayout) -> None:
    work = fill(layout, ROWS)
    expire_messages(work, layout, 10)
    before = work.changes()
    messages = table([(0, 0, 9, 10, 1, "user_1"), (0, 0, 8, 9, 1, "user_1")])
    with pytest.raises(BoundViolated):
        add_messages(work, layout, CODEC, messages, **codes(messages, layout))
    assert work.changes() == before


def test_expiry_reads_only_what_it_evicts() -> None:
    class Counting(MemoryStore):
        read = 0

        def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
            keys, values = super().scan_arrays(start, end)
            self.read += len(keys)
            return keys, values

        def scan(self, *_: object, **__: object) -> None:  # type: ignore[override]
            raise AssertionError("not a way to expire")

    layout = MessageLayout((E, T, O))
    messages = table([(0, 0, n, n, n % 3, "u") for n in range(1000)])
    keys, values = message_rows(layout, CODEC, messages, **codes(messages, layout))
    store = Counting()
    store.write(Changes(keys, values))
    work = Workspace(store)
    assert expire_messages(work, layout, 7) == 7
    assert store.read == 7
    assert sum(value is None for value in work.changes().values) == 7


def test_bad_columns_and_codes_are_refused() -> None:
    messages = table(ROWS)
    nulls = messages.set_column(3, "_time", pa.array([None] * len(ROWS), pa.int64()))
    with pytest.raises(KeyInvalid):
        message_keys(MessageLayout((T, O)), nulls)
    with pytest.raises(KeyInvalid):
        message_keys(MessageLayout((E, T, O)), messages)
    with pytest.raises(KeyInvalid):
        message_keys(MessageLayout((E, T, O)), messages, {E: encode_columns([messages["item"]])[:2]})


def test_an_index_row_without_its_message_is_damage() -> None:
    layout = MessageLayout((E, T, O))
    work = fill(layout, ROWS)
    work.delete(work.scan_arrays(b"\x01", b"\x02")[0][0])
    with pytest.raises(StateCorrupted):
        read_messages(work, layout, CODEC, -100, 2**50)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_short_keys_are_damage(layout: MessageLayout) -> None:
    with pytest.raises(StateCorrupted):
        MessageCodec(layout, FIELDS).decode([b"\x01abc"], CODEC.encode(table(ROWS[:1])))


def test_no_messages_are_no_rows() -> None:
    for layout in LAYOUTS:
        messages = table([])
        assert message_rows(layout, CODEC, messages, **codes(messages, layout)) == ([], [])
        assert len(read_messages(Workspace(MemoryStore()), layout, CODEC)) == 0


def test_the_digest_is_additive_and_sees_each_byte() -> None:
    keys, values = [b"a", b"b", b"c"], [b"1", b"2", b""]
    whole = digest(keys, values)
    assert 0 <= whole < 2**64
    assert whole == digest(keys[::-1], values[::-1])
    assert whole == (digest(keys[:1], values[:1]) + digest(keys[1:], values[1:])) % 2**64
    assert digest([], []) == 0
    assert len({whole, digest(keys, [b"1", b"2", b"3"]), digest(keys[:2], values[:2]), digest(keys, values[::-1])}) == 4
