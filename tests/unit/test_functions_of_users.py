"""A function that a user gives is checked where it is given: that it can be called as it will be."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from backend import foreach_batch, foreach_sink, kafka, over_all, reducer, stream
from backend.boundary import check_function
from backend.process import ProcessOperator
from backend.stores.session_windows import SessionWindows, aggregate, reduce

WINDOWS = SessionWindows.inactivity_gap(5)
INT = pa.int64()
READ = partial(kafka, "t", servers="localhost:9", value="a int", reader="client")

PLACES: dict[str, tuple[Callable[[Any], object], int]] = {
    "function=": (foreach_sink, 3),
    "function= of batches": (foreach_batch, 3),
    "function= of process": (lambda f: ProcessOperator(f, pa.schema([("n", INT)])), 2),
    "reducer: init=": (lambda f: reducer("a", init=f, add=max, merge=max, output=INT), 0),
    "reducer: add=": (lambda f: reducer("a", "b", init=int, add=f, merge=max, output=INT), 3),
    "reducer: merge=": (lambda f: reducer("a", init=int, add=max, merge=f, output=INT), 2),
    "reducer: result=": (lambda f: reducer("a", init=int, add=max, merge=max, result=f, output=INT), 1),
    "over_all: function=": (lambda f: over_all("a", function=f, output=INT), 1),
    "where=": (lambda f: stream(READ(), event_time="timestamp").where(f), 1),
    "b=": (lambda f: stream(READ(), event_time="timestamp").with_columns(b=f), 1),
    "map_batches=": (lambda f: stream(READ(), event_time="timestamp").map_batches(f, version="1"), 1),
    "format=": (lambda f: READ(format=f), 1),
    "initializer=": (lambda f: aggregate(f, print, print, WINDOWS, "n"), 0),
    "aggregator=": (lambda f: aggregate(list, f, print, WINDOWS, "n"), 3),
    "session_merger=": (lambda f: aggregate(list, print, f, WINDOWS, "n"), 3),
    "reducer=": (lambda f: reduce(f, WINDOWS, "n"), 2),
}
"""What the error begins with -> gives the function, and the number of arguments that it is called with."""


NOT_ONLY = {"where=", "b=", "format=", "reducer: result="}
"""Where something else than a function may stand: an expression, a name, None."""


OF = (lambda: None, lambda a: None, lambda a, b: None, lambda a, b, c: None, lambda a, b, c, d: None)
"""By the number of arguments."""


@pytest.mark.parametrize("option", PLACES)
def test_it_must_take_what_it_will_be_given(option: str) -> None:
    give, count = PLACES[option]
    begins = option.partition(" of ")[0]
    give(lambda *_: None)
    for wrong in [count + 1, *([count - 1] if count else [])]:
        with pytest.raises(ValueError, match="must be a function of") as caught:
            give(OF[wrong])
        assert str(caught.value).startswith(begins)
        assert "argument" in str(caught.value)


@pytest.mark.parametrize(
    "option", [name for name in PLACES if name not in ("where=", "b=", "format=", "reducer: result=")]
)
@pytest.mark.parametrize("what", [3, "f", None])
def test_it_must_be_a_function(option: str, what: object) -> None:
    give, _ = PLACES[option]
    with pytest.raises(ValueError, match="must be a function") as caught:
        give(what)
    assert str(caught.value).startswith(option.partition(" of ")[0])


def test_defaults_bound_arguments_methods_and_builtins_that_do_not_say_are_taken() -> None:
    class Taker:
        def take(self, first: object, second: object = None) -> None: ...

    check_function("f", Taker().take, ("a",))
    check_function("f", Taker().take, ("a", "b"))
    check_function("f", partial(lambda a, b, c: None, 1), ("b", "c"))
    check_function("f", max, ("a", "b"))  # has no signature
    check_function("f", lambda *, key=None: None, ())
    with pytest.raises(ValueError, match=r"f=.*: must be a function of \(a\): .*key"):
        check_function("f", lambda a, *, key: None, ("a",))
