"""`foreach_batch`: called at least once with the same rows, never with others, and nothing is left in the outbox."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend import foreach_batch
from backend.errors import OutputDiffers, UnknownFormat, UserCodeFailed
from backend.process import ProcessOperator
from tests.support.sink_story import Player, Story, check_seen, operator, scratch


class Home:
    """A query with a function; frames come as lists of ids."""

    def __init__(self, home: Path, story: Story) -> None:
        self.home, self.story, self.calls, self.fail = home, story, [], ""

    def start(self, planned: int, **options: Any) -> Any:
        def function(results: list[str], errors: list[str], version: int) -> None:
            self.calls.append((version, results, errors))
            if self.fail:
                raise LookupError(self.fail)

        sink = foreach_batch(function, **options)
        sink.begin(scratch(self.home), operator())
        sink.resume_from(planned)
        sink.open("q")
        sink._frame = ids
        return sink

    def publish(self, sink: Any, version: int, frames: Any = None) -> None:
        Player(lambda: sink, "", self.story, 0).publish(sink, version, frames or self.story.frames[version])

    def wanted(self, version: int) -> tuple[Any, ...]:
        return version, [row[0] for row in self.story.rows[version]], [row[0] for row in self.story.errors[version]]


def ids(written: Any, kind: str) -> list[str]:
    """Read as many times as one likes."""
    found = [[name for batch in written.batches(kind) for name in batch.column("id").to_pylist()] for _ in range(2)]
    assert found[0] == found[1]
    return found[0]


def test_a_sink_of_another_query_has_that_ones_outbox(home: Home, tmp_path: Path) -> None:
    sink = home.start(-1)
    home.publish(sink, 1)
    given = [path.read_bytes() for path in Path(scratch(home.home)).rglob("*") if path.is_file()]
    assert given
    sink.begin(str(tmp_path / "another"), operator())
    sink.resume_from(-1)
    sink.open("another")
    home.publish(sink, 0)
    assert [path.read_bytes() for path in Path(scratch(home.home)).rglob("*") if path.is_file()] == given
    assert list((tmp_path / "another").iterdir())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path, Story(7, 8))


def rows_of(written: Any, kind: str) -> list[tuple[Any, ...]]:
    """Read results as (id, reason, shard, start in ms, key, n, total), errors as (id, offset)."""
    rows = [row for batch in written.batches(kind) for row in batch.to_pylist()]
    if kind == "errors":
        return [(row["id"], row["offset"]) for row in rows]
    names = ("id", "reason", "shard", "window_start", "origin", "n", 'odd "total".x')
    return [tuple(ms(row[name]) if name == "window_start" else row[name] for name in names) for row in rows]


def ms(at: datetime) -> int:
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        (pa.timestamp("ns"), True),
        (pa.list_(pa.timestamp("ns", "UTC")), True),
        (pa.time32("s"), True),
        (pa.struct([("a", pa.duration("s"))]), True),
        (pa.decimal256(50, 0), True),
        (pa.float16(), True),
        (pa.timestamp("us"), False),
        (pa.timestamp("ms", "UTC"), False),
        (pa.duration("us"), False),
        (pa.decimal128(38, 2), False),
        (pa.map_(pa.string(), pa.list_(pa.float32())), False),
    ],
)
def test_a_column_that_spark_does_not_read_is_refused_before_anything_starts(
    kind: pa.DataType, refused: bool, tmp_path: Path
) -> None:
    """Their first rows ended the query, as an error of the function; a duration in seconds came as microseconds."""
    job = ProcessOperator(lambda messages, context: None, pa.schema([("t", kind)]))
    with pytest.raises(ValueError, match=r"foreach_batch: column 't': Spark reads no") if refused else nullcontext():
        foreach_batch(lambda results, errors, version: None).begin(scratch(tmp_path), job)


@pytest.mark.parametrize(("batches", "deaths"), [(5, 9), pytest.param(40, 100, marks=pytest.mark.long)])
def test_a_function_that_replaces_what_it_wrote_has_every_row_once_wherever_the_driver_dies(
    batches: int, deaths: int, tmp_path: Path
) -> None:
    story = Story(17, batches)
    kept: dict[int, tuple[Any, Any]] = {}

    def function(results: Any, errors: Any, version: int) -> None:
        assert kept.setdefault(version, (results, errors)) == (results, errors), "called again with other rows"

    def make() -> Any:
        sink = foreach_batch(function)
        sink._frame = rows_of
        return sink

    player = Player(
        make,
        scratch(tmp_path),
        story,
        deaths,
        commits=("_function",),
        tables=lambda sink: [sink],
        is_out=lambda sink, version: version in kept,
        look=lambda: dict(kept),
    )
    player.run()
    given = zip(story.rows, story.errors, strict=True)
    assert kept == {version: (rows, errors) for version, (rows, errors) in enumerate(given) if rows or errors}
    assert [path.name for path in Path(scratch(tmp_path)).iterdir()] == ["given.json"]
    check_seen(player.seen, deaths)


def with_rows(story: Story) -> int:
    return next(version for version, rows in enumerate(story.rows) if rows)


def test_each_micro_batch_with_rows_is_given_in_order(home: Home, tmp_path: Path) -> None:
    sink = home.start(-1)
    for version in range(8):
        home.publish(sink, version)
    assert home.calls == [home.wanted(v) for v in range(8) if any(home.wanted(v)[1:])]
    assert [path.name for path in Path(scratch(tmp_path)).iterdir()] == ["given.json"]


def test_what_it_raised_is_named_and_it_is_called_again_with_the_same_rows_and_never_with_others(home: Home) -> None:
    version = with_rows(home.story)
    home.fail = "no such table"
    with pytest.raises(UserCodeFailed, match="LookupError"):
        home.publish(home.start(-1), version)
    home.fail = ""
    other = [dict(one, results=None) for one in home.story.frames[version]]
    with pytest.raises(OutputDiffers, match=r"published \d+ results, now 0") as caught:
        home.publish(home.start(version), version, other)
    assert f"accept_published={version}" in caught.value.command
    home.publish(home.start(version), version)
    assert home.calls == [home.wanted(version)] * 2
    home.publish(home.start(version, accept_published=version), version, other)
    assert len(home.calls) == 2


def test_a_checkpoint_that_was_taken_back_gives_what_it_plans_anew(home: Home) -> None:
    version = with_rows(home.story)
    home.publish(home.start(-1), version)
    home.publish(home.start(version - 1), version, [dict(one, errors=None) for one in home.story.frames[version]])
    assert home.calls[1] == (version, home.wanted(version)[1], [])


def test_what_was_taken_back_is_forgotten_however_many_starts_it_takes(home: Home, tmp_path: Path) -> None:
    version = with_rows(home.story)
    home.publish(home.start(-1), version)
    home.start(version - 1)
    other = [dict(one, errors=None) for one in home.story.frames[version]]
    sink = home.start(version)  # it was planned anew, and the driver died before it was given
    home.fail = "no such table"
    with pytest.raises(UserCodeFailed, match="LookupError"):
        home.publish(sink, version, other)
    home.fail = ""
    with pytest.raises(OutputDiffers):
        home.publish(sink, version, [dict(one, results=None) for one in other])
    home.publish(sink, version, other)
    assert home.calls[1:] == [(version, home.wanted(version)[1], [])] * 2


def test_what_was_given_last_must_be_readable(home: Home, tmp_path: Path) -> None:
    version = with_rows(home.story)
    home.publish(home.start(-1), version)
    for bad, why in (
        (b'{"format": 2}', "format 2, this release reads 1"),  # another release's, whatever its fields
        (b"{", "truncated"),
        (b"[1]", "Expected `object`"),
    ):
        Path(scratch(tmp_path), "given.json").write_bytes(bad)
        with pytest.raises(UnknownFormat, match=rf"given\.json; why: .*{why}"):
            home.publish(home.start(version), version)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="function=3: must be a function of"):
        foreach_batch(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accept_published='1'"):
        foreach_batch(print, accept_published="1")  # type: ignore[arg-type]


def test_the_file_of_what_was_given_has_this_form() -> None:
    """Format 1, frozen."""
    import msgspec

    from backend.sinks.foreach import Given

    text = b'{"version":4,"results":[2,"00ff"],"errors":[0,"01aa"],"format":1}'
    assert msgspec.json.encode(Given(4, (2, "00ff"), (0, "01aa"))) == text
    assert msgspec.json.decode(text, type=Given) == Given(4, (2, "00ff"), (0, "01aa"))
