from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

import msgspec
import numpy as np
import pytest

from backend.errors import ManifestMismatch, StateCorrupted, UnknownFormat, ValueInvalid
from backend.stores.values import ValueCodec, describe_type, without_modules


@dataclasses.dataclass
class Visit:
    pages: int
    last: str | None = None


@dataclasses.dataclass(eq=False, repr=False)
class Least:
    total: float = 0.0
    least: float = float("nan")


class Point(msgspec.Struct):
    x: float


@dataclasses.dataclass
class Loose:
    extra: dict[str, Any]


class LooseStruct(msgspec.Struct):
    extra: dict[str, Any]


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [
        *(0, -(2**63), 2**64 - 1, 0.0, -1.5, float("inf"), "", "ä\0", b"", b"\xff", False, True),
        *([], [None, 1, ["x"]], {}, {"a": None, 2: [b"x"], True: 2.5}),
    ],
)
def test_plain_values_come_back_with_their_types(value: object) -> None:
    codec = ValueCodec()
    back = codec.decode(codec.encode(value))
    assert back == value
    assert repr(back) == repr(value)
    assert codec.encode(value)[0] == 1


@pytest.mark.parametrize(
    "value",
    [
        *((1,), {1}, frozenset(), Decimal(1), dt.date(2020, 1, 1), Visit(1), Point(1.0), Colour.RED, object(), 1j),
        *(np.datetime64(1, "ns"), np.timedelta64(1, "ns"), np.datetime64("20000-01-01"), np.timedelta64(1, "Y")),
        *(2**64, [(1,)], {"a": {1}}, {(1, 2): 3}, {None: 1}, "\ud800", bytearray(b"x"), np.array([1])),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(value: object) -> None:
    with pytest.raises(ValueInvalid):
        ValueCodec().encode(value)


def test_nesting_is_bounded() -> None:
    value: list[Any] = []
    for _ in range(2_000):
        value = [value]
    with pytest.raises(ValueInvalid, match="deep"):
        ValueCodec().encode(value)


@pytest.mark.parametrize(
    ("value_type", "value"),
    [
        (Visit, Visit(3, "x")),
        (Point, Point(1.5)),
        (Colour, Colour.RED),
        (tuple[int, str], (1, "x")),
        (set[int], {1, 2}),
        (Decimal, Decimal("1.50")),
        (dt.datetime, dt.datetime(2020, 1, 1, tzinfo=dt.UTC)),
        (dt.date, dt.date(2020, 1, 1)),
        (int | None, 5),
    ],
)
def test_a_value_type_comes_back_as_it_went_in(value_type: Any, value: object) -> None:
    codec = ValueCodec(value_type)
    assert codec.decode(codec.encode(value)) == value


def test_a_value_of_another_type_is_refused_before_it_is_written() -> None:
    with pytest.raises(ValueInvalid, match="value_type is int"):
        ValueCodec(int).encode("5")
    with pytest.raises(ValueInvalid):
        ValueCodec(list[int]).encode([1, "x"])
    with pytest.raises(ValueInvalid, match="None is no value"):
        ValueCodec(int | None).encode(None)


def test_numpy_scalars_are_the_values_that_they_hold() -> None:
    codec = ValueCodec()
    for value in (np.int64(5), np.float32(1.5), np.bool_(True), np.str_("x")):
        back = codec.decode(codec.encode(value))
        assert back == value.item()
        assert type(back) is type(value.item())


def test_a_time_of_numpy_that_python_has_none_for_is_refused_whatever_the_type() -> None:
    for kind in (None, int, dt.datetime, dt.timedelta):
        for value in (np.datetime64(1, "ns"), np.timedelta64(1, "ns")):
            with pytest.raises(ValueInvalid, match="a time of a value is one that Python has none for"):
                ValueCodec(kind).encode(value)
    assert ValueCodec(dt.datetime).encode(np.datetime64(1, "us"))
    assert ValueCodec(dt.timedelta).encode(np.timedelta64(1, "us"))


def test_a_type_that_msgspec_does_not_know_is_refused_at_once() -> None:
    with pytest.raises(TypeError):
        ValueCodec(5)


def test_damage_and_unknown_formats_are_named() -> None:
    codec = ValueCodec(int)
    with pytest.raises(UnknownFormat, match="format 02"):
        codec.decode(b"\x02\x05")
    with pytest.raises(UnknownFormat, match="missing"):
        codec.decode(b"")
    for data in (b"\x01", b"\x01\xc1", b"\x01\xa2x", codec.encode(300)[:-1]):
        with pytest.raises(StateCorrupted):
            codec.decode(data)


def test_a_value_that_another_type_wrote_is_no_damage() -> None:
    """The class has gained a field: what lies there is sound, and no restore would change it."""

    @dataclasses.dataclass
    class Later:
        pages: int
        last: str | None
        user: str

    for kind, data in ((Later, ValueCodec(Visit).encode(Visit(3))), (int, ValueCodec(str).encode("x"))):
        with pytest.raises(ManifestMismatch, match=rf"value_type is .*{kind.__name__}"):
            ValueCodec(kind).decode(data)
    damaged = ValueCodec(Visit).encode(Visit(3))[:-1]
    with pytest.raises(StateCorrupted):
        ValueCodec(Later).decode(damaged)


@pytest.mark.parametrize("kind", [Loose, LooseStruct])
def test_a_field_that_would_come_back_as_another_one_is_refused(kind: Any) -> None:
    codec = ValueCodec(kind)
    for extra in ({"xy": (1, 2)}, {"at": dt.datetime(2026, 1, 1)}, {"in": kind({"xy": (1, 2)})}):
        with pytest.raises(ValueInvalid, match="come back"):
            codec.encode(kind(extra))
    value = kind({"xy": [1, float("nan")]})
    assert repr(codec.decode(codec.encode(value)).extra) == repr(value.extra)


def test_a_class_has_the_same_text_whatever_its_module_was_imported_as() -> None:
    assert describe_type(Visit) == "Visit"
    assert describe_type(list[Visit]) == "list[Visit]"
    assert describe_type(dict[str, Visit] | None) == "dict[str, Visit] | None"
    assert without_modules("typing.Optional[job.parts.Visit]") == "Optional[Visit]"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (dict, {"a": (1, 2)}), (Any, (1,)), (list, [Decimal("1.5")]), (list, [{1}]),
        (dict, {"a": dt.timedelta(days=1)}), (str, Decimal("1.5")), (float, 2**53 + 1), (list[float], [2**53 + 1]),
    ],
)  # fmt: skip
def test_a_value_that_would_come_back_as_another_one_is_refused(kind: Any, value: object) -> None:
    with pytest.raises(ValueInvalid, match="come back"):
        ValueCodec(kind).encode(value)


def test_values_that_are_not_equal_to_themselves_come_back() -> None:
    nan = float("nan")
    codec = ValueCodec(list[float])
    assert repr(codec.decode(codec.encode([nan, 1]))) == "[nan, 1.0]"
    means = ValueCodec(dict[str, float])
    assert repr(means.decode(means.encode({"sum": 3, "mean": nan}))) == "{'sum': 3.0, 'mean': nan}"
    assert len(ValueCodec(set[float]).encode({nan, 1.0, 2.5})) > 1
    assert ValueCodec(Least).decode(ValueCodec(Least).encode(Least(5))).total == 5.0
    for hour in (dt.datetime(2024, 10, 27, 2, 30), dt.datetime(2024, 3, 31, 2, 30)):  # which clocks have twice, or not
        for fold in (0, 1):
            when = hour.replace(tzinfo=ZoneInfo("Europe/Berlin"), fold=fold)
            back = ValueCodec(dt.datetime).decode(ValueCodec(dt.datetime).encode(when))
            assert back.timestamp() == when.timestamp()
