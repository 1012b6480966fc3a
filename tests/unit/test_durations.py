from __future__ import annotations

from datetime import timedelta

import pytest

from backend.stores.durations import milliseconds


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (0, 0),
        (-5, -5),
        (2**63 - 1, 2**63 - 1),
        (timedelta(hours=1, milliseconds=1), 3_600_001),
        (timedelta(milliseconds=-1), -1),
        (timedelta.max - timedelta(microseconds=999), 86_399_999_999_999_999 + 0),
        ("5 minutes", 300_000),
        ("1 hour 30 minutes", 5_400_000),
        ("250ms", 250),
        ("1.5 s", 1_500),
        ("2 days", 172_800_000),
        ("1 week", 604_800_000),
        ("-1 hour", -3_600_000),
        ("10 SECONDS", 10_000),
        ("3 min", 180_000),
        ("3 m", 180_000),
        ("3 secs", 3_000),
    ],
)
def test_a_duration_becomes_milliseconds(given: object, expected: int) -> None:
    assert milliseconds(given, "size") == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, True, 1.5, b"1 hour", object()])
def test_a_type_that_is_no_duration_is_a_type_error(given: object) -> None:
    with pytest.raises(TypeError, match='Invalid value for parameter "size"'):
        milliseconds(given, "size")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [2**63, -(2**63), "10000000000000 weeks", timedelta(microseconds=1), "0.5 ms"])
def test_what_does_not_fit_into_milliseconds_is_a_value_error(given: object) -> None:
    with pytest.raises(ValueError, match="It can't be converted to milliseconds"):
        milliseconds(given, "size")  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["", "hour", "5", "5 fortnights", "5 minutes later", "1 hour and 5 minutes"])
def test_text_that_is_no_duration_is_a_value_error(given: str) -> None:
    with pytest.raises(ValueError, match='parameter "size"'):
        milliseconds(given, "size")
