"""Options that changed between starts: which set a micro-batch runs under, whatever was planned, committed or removed.

Expected sets are written by hand from DESIGN: they take effect at the first version that was not planned.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend.aggregates import count, max_, min_
from backend.batch import Operator
from backend.errors import ManifestMismatch, StateCorrupted
from backend.joins.operator import JoinOperator
from backend.joins.spec import join_spec
from backend.process import ProcessOperator, key_value_store, session_store, value_state, window_store
from backend.spark.job import Input, Job
from backend.spark.start import terms_of
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.policies import policies
from backend.windows.spec import window_spec
from recovery.commit.manifest import NAME, Manifest, read_manifest, record, settle, write_manifest
from recovery.commit.option_sets import FREE, OPTIONS, OptionSet, options_of
from recovery.files import open_files
from recovery.inspect.known_operator import window_operator

SCHEMA = pa.schema([("user", pa.string()), ("x", pa.int64())])


@dataclass
class Checkpoint:
    """What Spark's logs say, and what `settle` makes of it."""

    location: str = field(default_factory=lambda: f"memory://sets-{uuid.uuid4().hex}")

    def plan(self, *versions: int) -> None:
        for version in versions:
            open_files(self.location).write(f"offsets/{version}", [b"v1"])

    def remove(self, *versions: int) -> None:
        for version in versions:
            open_files(self.location).delete([f"offsets/{version}"])

    def start(self, retention_ms: int, **more: Any) -> list[tuple[int, int]]:
        """Start with a retention; give (first version, retention) of the sets that are kept."""
        entries = {"operator": {"window": {"size": 3}, "retention_ms": retention_ms}, **more}
        record(self.location, settle(self.location, Manifest(1, (0,), entries), used=False))
        found = read_manifest(self.location)
        assert found is not None
        return [(one.since, one.options["operator.retention_ms"]) for one in found.sets]


def test_a_change_takes_effect_at_the_first_version_that_was_not_planned() -> None:
    spark = Checkpoint()
    assert spark.start(10) == [(0, 10)]
    spark.plan(0, 1, 2)  # whether 2 is committed does not matter: it is not planned again
    assert spark.start(20) == [(0, 10), (3, 20)]
    spark.plan(3)
    assert spark.start(20) == [(0, 10), (3, 20)], "nothing changed"
    assert spark.start(10) == [(0, 10), (3, 20), (4, 10)]


def test_changes_before_anything_is_planned_leave_the_last_one() -> None:
    spark = Checkpoint()
    spark.start(10)
    assert spark.start(20) == [(0, 20)]
    spark.plan(0)
    assert spark.start(30) == [(0, 20), (1, 30)]
    assert spark.start(40) == [(0, 20), (1, 40)], "1 was never planned under 30"
    assert spark.start(20) == [(0, 20)], "back to what 0 was planned with"


def test_sets_that_no_retained_version_needs_are_dropped() -> None:
    spark = Checkpoint()
    spark.start(10)
    spark.plan(0, 1)
    spark.start(20)
    spark.plan(2, 3)
    spark.start(30)
    spark.remove(0)
    assert spark.start(30) == [(0, 10), (2, 20), (4, 30)], "1 is there and ran under the first set"
    spark.remove(1)
    assert spark.start(30) == [(2, 20), (4, 30)]
    spark.remove(2)
    assert spark.start(30) == [(2, 20), (4, 30)], "3 ran under it"
    spark.plan(4)
    spark.remove(3)
    assert spark.start(30) == [(4, 30)]


def test_a_checkpoint_that_was_taken_back_plans_what_was_removed_anew() -> None:
    spark = Checkpoint()
    spark.start(10)
    spark.plan(0, 1)
    spark.start(20)
    spark.plan(2, 3)
    spark.remove(2, 3)  # taken back to 1: 2 is planned again, with the options of that start
    assert spark.start(30) == [(0, 10), (2, 30)]
    spark.plan(2, 3)
    spark.remove(3)  # 2 is planned still: it runs under what it was planned with
    assert spark.start(40) == [(0, 10), (2, 30), (3, 40)]


def test_a_manifest_of_format_1_says_what_its_planned_versions_ran_under() -> None:
    spark = Checkpoint()
    old = {"format": 1, "shards": 1, "grouping": [0], "operator": {"window": {"size": 3}, "retention_ms": 10}}
    open_files(spark.location).write(NAME, [json.dumps(old).encode()])
    spark.plan(5, 6)
    assert spark.start(20) == [(0, 10), (7, 20)]


def test_what_is_not_free_is_refused_and_changes_no_set() -> None:
    spark = Checkpoint()
    spark.start(10, route="key")
    with pytest.raises(ManifestMismatch, match="route"):
        spark.start(20, route="partition")
    with pytest.raises(ManifestMismatch, match="topics_of"):  # begins like a free entry, and is another
        spark.start(20, route="key", topics_of="x")
    assert spark.start(10, route="key", topics={"t": 1}, changelog="elsewhere") == [(0, 10)]


def test_the_list_of_free_options_is_the_one_that_is_documented() -> None:
    assert set(OPTIONS) == {
        "operator.policies", "operator.retention_ms", "operator.retention_messages", "operator.idle_after_ms",
        "operator.max_ahead_ms", "operator.free", "max_ahead_ms", "partitions",
    }  # fmt: skip
    assert set(FREE) - set(OPTIONS) == {"first_offsets", "topics", "changelog", "place", "places", "release"}


@pytest.mark.parametrize("sets", [[{"since": 3, "options": {}}] * 2, [{"since": 3}], [{"since": 3, "options": 4}], [7]])
def test_sets_that_cannot_be_are_damage(tmp_path: Path, sets: Any) -> None:
    (tmp_path / "rewind").mkdir()
    (tmp_path / NAME).write_text(json.dumps({"format": 2, "shards": 1, "grouping": [0], "sets": sets}))
    with pytest.raises(StateCorrupted):
        read_manifest(str(tmp_path))


def test_sets_are_written_and_read_back(tmp_path: Path) -> None:
    sets = (OptionSet(0, {"operator.retention_ms": 1}), OptionSet(7, {"operator.policies": {"late_ms": None}}))
    write_manifest(str(tmp_path), Manifest(1, (0,), {"route": "key"}, sets))
    assert read_manifest(str(tmp_path)) == Manifest(1, (0,), {"route": "key"}, sets)


# -- operators under the options of a set --------------------------------------------------------------------


def windows(**options: Any) -> WindowOperator:
    given = {"retention": 10, "retention_messages": None, "policies": policies(), "idle_after": 60, "max_ahead": 70}
    return WindowOperator(window_spec(tumbling(5), SCHEMA, {"n": count()}, keys=["user"], **{**given, **options}))


def joins(**options: Any) -> JoinOperator:
    given = {"left_retention": 10, "right_retention": 20, "idle_after": 60, "max_ahead": 70}
    return JoinOperator(join_spec(SCHEMA, SCHEMA, on="user", within=5, how="left", **{**given, **options}))


def processes(**durations: Any) -> ProcessOperator:
    given = {"retention": 10, "size": 2, "grace": 3, "sessions": 9, "ttl": 5, **durations}
    stores = [
        window_store("w", retention=given["retention"], window_size=given["size"], grace=given["grace"]),
        session_store("s", retention=given["sessions"], num_segments=5, min_segment_interval=1),
        value_state("v", ttl=given["ttl"]),
        key_value_store("k"),
    ]
    return ProcessOperator(print, SCHEMA, stores=stores, fields=["user"])


CHANGES: list[tuple[Any, dict[str, Any]]] = [
    (windows, {"retention": 99}),
    (windows, {"retention_messages": 4}),
    (windows, {"policies": policies(early=1_000, full=False, late="each")}),
    (windows, {"policies": policies(late=None)}),
    (windows, {"idle_after": None}),
    (windows, {"max_ahead": None}),
    (joins, {"left_retention": 99, "right_retention": 1}),
    (joins, {"left_retention_messages": 7}),
    (joins, {"on_time_update_period": 30, "late_update_period": 40}),
    (joins, {"idle_after": None, "max_ahead": 1}),
    (processes, {"retention": 50, "size": 20, "grace": 0}),
    (processes, {"sessions": 1}),
    (processes, {"ttl": None}),
]


@pytest.mark.parametrize(("make", "changed"), CHANGES, ids=[f"{m.__name__}-{'-'.join(c)}" for m, c in CHANGES])
def test_an_operator_under_the_options_of_another_start_is_that_starts(make: Any, changed: dict[str, Any]) -> None:
    first, then = make(), make(**changed)
    stored = json.loads(json.dumps(options_of({"operator": first.describe()})))
    assert stored != json.loads(json.dumps(options_of({"operator": then.describe()}))), "the change must be in a set"
    again = then.with_options({path.removeprefix("operator."): value for path, value in stored.items()})
    assert again.describe() == first.describe()
    assert type(again) is type(first)
    if not isinstance(first, ProcessOperator):
        assert again.spec == first.spec


class Topic:
    """A source with two partitions."""

    topics = ("t",)


def job_of(operator: Operator, max_ahead_ms: int | None) -> Job:
    return Job((Input(Topic(), "x", ("user",)),), "key", (3, 4), operator, (), max_ahead_ms)  # type: ignore[arg-type]


def test_a_task_finds_the_terms_of_its_version() -> None:
    """The pack stage's `max_ahead` and the partitions that hold windows open go by version as the operator does."""
    spark = Checkpoint()

    def start(operator: WindowOperator, partitions: list[list[int]], queued: Sequence[int] = ()) -> Any:
        job = job_of(operator, operator.spec.max_ahead_ms)
        entries = {"operator": operator.describe(), "max_ahead_ms": job.max_ahead_ms, "partitions": partitions}
        settled = record(spark.location, settle(spark.location, Manifest(2, (3, 4), entries), used=False))
        return terms_of(job, settled, spark.location, queued)

    first = windows(retention=10, max_ahead=70)
    then = windows(retention=99, max_ahead=None)
    assert start(first, [[0, 0]]).only
    spark.plan(0, 1)
    open_files(spark.location).write("commits/0", [b"v1"])
    terms = start(then, [[0, 0], [0, 1]])
    planned, new = terms.at(1), terms.at(2)
    assert (planned.operator.spec.retention_ms, planned.max_ahead_ms) == (10, 70)
    assert planned.sources == {0: ((0, 0),), 1: ((0, 0),)}
    assert new.operator.spec is then.spec, "today's job runs as it was made"
    assert (new.operator.spec.retention_ms, new.max_ahead_ms) == (99, None)
    assert new.sources == {0: ((0, 0), (0, 1)), 1: ((0, 0), (0, 1))}
    open_files(spark.location).write("commits/1", [b"v1"])
    assert start(then, [[0, 0], [0, 1]]).only, "what is committed does not run again"
    waits = start(then, [[0, 0], [0, 1]], queued=[1])
    assert waits.at(1).operator.spec.retention_ms == 10, "but what a shard has queued does"
    assert waits.at(2).operator.spec.retention_ms == 99


def test_aggregates_in_another_order_are_another_job() -> None:
    """What is stored of them has no names: the least and the greatest changed places."""
    of = {"lo": min_("x"), "hi": max_("x")}

    def wanted(*names: str) -> Manifest:
        spec = window_spec(tumbling(10), SCHEMA, {name: of[name] for name in names}, keys=["user"], retention=0)
        return Manifest(1, (0,), {"operator": spec.describe()})

    spark = Checkpoint()
    record(spark.location, settle(spark.location, wanted("lo", "hi"), used=False))
    settle(spark.location, wanted("lo", "hi"), used=True)
    with pytest.raises(ManifestMismatch, match=r"operator\.columns: was \['lo', 'hi'\], is \['hi', 'lo'\]"):
        settle(spark.location, wanted("hi", "lo"), used=True)


def test_a_manifest_that_does_not_say_the_order_takes_that_of_the_next_start() -> None:
    spec = window_spec(tumbling(10), SCHEMA, {"hi": max_("x"), "lo": min_("x")}, keys=["user"], retention=0)
    before: dict[str, Any] = {name: value for name, value in spec.describe().items() if name != "columns"}
    spark = Checkpoint()
    record(spark.location, settle(spark.location, Manifest(1, (0,), {"operator": before}), used=False))
    record(spark.location, settle(spark.location, Manifest(1, (0,), {"operator": spec.describe()}), used=True))
    stored = read_manifest(spark.location)
    assert stored is not None
    assert stored.entries["operator"]["columns"] == ["hi", "lo"]
    assert window_operator(stored.entries["operator"]).describe()["columns"] == ["hi", "lo"]
