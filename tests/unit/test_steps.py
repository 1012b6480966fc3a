"""Steps before a window: equal under any cuts, by plain Python as the oracle; what raises is one message's error."""

from __future__ import annotations

import functools
import pickle
import random
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark import cloudpickle

from backend.errors import UserCodeFailed, ValueInvalid
from backend.sources.archive import archive
from backend.spark.pack.frames import decode_header, from_ipc
from backend.spark.pack.pack_input import PackInput, pack_input
from backend.spark.pack.packing import PackPlan, is_good, pack
from backend.spark.start import StartOptions
from backend.spark.stream import stream
from backend.steps import DROPPED, PASSED, POISON, Step, Steps, schema_after

SOURCE = pa.schema([("x", pa.int64()), ("name", pa.string())])
Row = tuple[int, int, int | None, str]  # partition, offset, x (None: malformed), name


def parsed(rows: list[Row]) -> pa.RecordBatch:
    values = [None if x is None else {"x": x, "name": name} for _, _, x, name in rows]
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.array(["t"] * len(rows), pa.string()),
            "partition": pa.array([row[0] for row in rows], pa.int32()),
            "offset": pa.array([row[1] for row in rows], pa.int64()),
            "timestamp": pa.array([datetime.fromtimestamp(row[1], UTC) for row in rows], pa.timestamp("us", "UTC")),
            "key": pa.array([b"k"] * len(rows), pa.binary()),
            "fields": pa.array(values, pa.struct(list(SOURCE))),
            "raw": pa.array([str(row[2]).encode() for row in rows], pa.binary()),
            "malformed": pa.array(["no JSON" if row[2] is None else None for row in rows], pa.string()),
        }
    )


def steps_of(*steps: Step, **options: Any) -> Steps:
    return Steps(lambda rows: rows, steps, schema_after(steps, SOURCE), **options)


def tenth(table: pa.Table) -> pa.Table:
    if 13 in table["x"].to_pylist():
        raise ArithmeticError("thirteen\nis bad")
    kept = table.filter(pc.not_equal(table["x"], 10))
    return kept.append_column("tenth", pc.divide(kept["x"], 10)).take(pa.array(range(kept.num_rows)[::-1], pa.int64()))


STEPS = (
    Step("where", {"": pc.field("x") > 3}),
    Step("with_columns", {"y": pc.field("x") * 2, "at": lambda table: table["_offset"]}),
    Step("map_batches", {"": tenth}),
    Step("where", {"": lambda table: pc.not_equal(table["x"], 7)}),
    Step("select", dict.fromkeys(["tenth", "y", "at"])),
)


def oracle(rows: list[Row]) -> list[tuple[int, dict[str, int] | None]]:
    found: list[tuple[int, dict[str, int] | None]] = []
    for _, offset, x, _ in rows:
        if x is None:
            found.append((PASSED, None))
        elif x == 13:
            found.append((POISON, None))
        elif x <= 3 or x in (7, 10):
            found.append((DROPPED, None))
        else:
            found.append((PASSED, {"tenth": x // 10, "y": 2 * x, "at": offset}))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_steps_give_the_same_under_any_cuts(seed: int) -> None:
    dice = random.Random(seed)
    rows: list[Row] = [
        (partition, offset, None if dice.random() < 0.1 else dice.randrange(20), "n")
        for partition in range(2)
        for offset in range(dice.randrange(1, 40))
    ]
    run = pickle.loads(cloudpickle.dumps(steps_of(*STEPS, debug=bool(seed % 2))))
    at, found = 0, []
    while at < len(rows):
        size = dice.choice([1, 2, 7, 50])
        got = run(parsed(rows[at : at + size]))
        found += list(zip(got["verdict"].to_pylist(), got["fields"].to_pylist(), strict=True))
        poison = [text for text, one in zip(got["malformed"].to_pylist(), got["verdict"].to_pylist(), strict=True)
                  if one == POISON]  # fmt: skip
        assert set(poison) <= {"step 3, map_batches(): ArithmeticError: thirteen\\nis bad"}
        at += size
    assert found == oracle(rows)


def test_a_message_that_came_twice_in_a_batch_goes_through_the_steps_once() -> None:
    rows: list[Row] = [(0, 0, 5, "a"), (0, 1, 13, "b"), (0, 1, 13, "b"), (0, 2, 30, "c"), (0, 2, 30, "c")]
    got = steps_of(Step("map_batches", {"": tenth}))(parsed(rows))
    assert got["verdict"].to_pylist() == [PASSED, POISON, DROPPED, PASSED, DROPPED]
    assert [one["tenth"] for one in got["fields"].to_pylist() if one] == [0, 3]


def test_rows_without_offsets_are_told_apart_by_their_number_in_the_batch() -> None:
    """The rows of a DataFrame all come with offset 0."""
    rows: list[Row] = [(0, 0, x, "") for x in (40, 2, 13, None, 40, 10)]  # type: ignore[misc]
    steps = steps_of(Step("where", {"": pc.field("x") > 3}), Step("map_batches", {"": tenth}), ranked=True)
    got = steps(parsed(rows))
    assert got["verdict"].to_pylist() == [PASSED, DROPPED, POISON, PASSED, PASSED, DROPPED]
    assert [one and one["tenth"] for one in got["fields"].to_pylist()] == [4, None, None, None, 4, None]
    assert got["offset"].to_pylist() == [0] * 6


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (
            lambda table: table.append_column("z", table["x"]),
            "z came, too.*of an empty table it gives x int64, name string, now it gave x int64, name string, z int64",
        ),
        (
            lambda table: table.drop_columns(["x"]),
            "of an empty table it gives x int64, name string, now it gave name string",
        ),
        (
            lambda table: table.set_column(0, "x", pa.array(["one"] * table.num_rows)),
            "now it gave x string, name string",
        ),
        (lambda table: table.set_column(0, "x", pa.array([0.5] * table.num_rows)), "now it gave x double, name string"),
    ],
)
def test_a_step_that_gives_other_fields_than_of_an_empty_table_is_named(function: Any, why: str) -> None:
    steps = steps_of(Step("map_batches", {"": lambda table: function(table) if table.num_rows else table}))
    with pytest.raises(
        ValueInvalid, match=rf"other fields than it declared; where: step 1, map_batches\(\); why: .*{why}"
    ):
        steps(parsed([(0, 0, 1, "a"), (0, 1, 2, "b")]))


@pytest.mark.parametrize("xs", [[1, 2, 3], [3, 2, 1], [2, 9, 2]])
def test_the_index_of_a_frame_of_pandas_is_no_field(xs: list[int]) -> None:
    """A frame that was sorted or filtered has one in its Arrow table, an empty one has none."""

    def some(table: pa.Table) -> pa.Table:
        frame = table.to_pandas().sort_values("x")
        return pa.Table.from_pandas(frame[frame["x"] > 1])

    steps = steps_of(Step("select", {"x": None}), Step("map_batches", {"": some}))
    assert steps.schema.names == ["x"]
    got = steps(parsed([(0, at, x, "") for at, x in enumerate(xs)]))
    assert [one and one["x"] for one in got["fields"].to_pylist()] == [x if x > 1 else None for x in xs]
    own = pa.schema([("__index_level_0__", pa.int64())])
    assert Step("map_batches", {"": lambda table: table}).schema_after(own, "step 1") == own


@pytest.mark.parametrize(
    "step",
    [
        Step("select", {"x": None, "name": None}),
        Step("where", {"": pc.field("x") >= 0}),
        Step("with_columns", {"name": lambda table: pc.utf8_upper(table["name"])}),
        Step(
            "with_columns", {"x": lambda table: pa.array([len(one) for one in table["name"].to_pylist()], pa.int64())}
        ),
    ],
)
def test_a_text_that_is_no_utf8_is_malformed_before_a_step_sees_it(step: Step) -> None:
    """Columns of a typed archive, or of Spark, may hold anything."""
    raw = pa.array([b"fine", b"\xff\xfe", b"good"], pa.binary())
    names = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    rows = parsed([(0, at, at, "") for at in range(3)])
    made = pa.StructArray.from_arrays([pa.array([0, 1, 2], pa.int64()), names], fields=list(SOURCE))
    rows = rows.set_column(rows.schema.get_field_index("fields"), "fields", made)
    rows = rows.set_column(rows.schema.get_field_index("raw"), "raw", pa.nulls(3))
    got = steps_of(step)(rows)
    assert got["verdict"].to_pylist()[::2] == [PASSED, PASSED]
    assert "a field cannot be read: Invalid UTF8" in got["malformed"][1].as_py()
    assert got["malformed"].to_pylist()[::2] == [None, None]
    assert got["raw"][1].as_py() == {"x": 1, "name": "\ufffd\ufffd"}
    got["fields"].validate(full=True)


def test_times_that_a_step_gives_are_those_of_microseconds() -> None:
    """Fractions are rounded down, what no timestamp has is the message's own error, and ends no query."""

    def times(unit: str, per: int) -> Step:
        return Step("with_columns", {"at": lambda table: pc.multiply(table["x"], per).cast(pa.timestamp(unit, "UTC"))})

    rows: list[Row] = [(0, 0, 1, ""), (0, 1, -1, ""), (0, 2, 3, "")]
    micros = pa.schema([*SOURCE, ("at", pa.timestamp("us", "UTC"))])
    run = Steps(lambda given: given, (times("ns", 1_001),), micros)
    got = run(parsed(rows))
    assert [one["at"].microsecond for one in got["fields"].to_pylist()] == [1, 999_998, 3]
    for unit in ("s", "ms"):
        run = Steps(lambda given: given, (times(unit, 1),), micros)
        far = 2**60
        got = run(parsed([(0, 0, 1, ""), (0, 1, far, ""), (0, 2, 3, "")]))
        assert got["verdict"].to_pylist() == [PASSED, POISON, PASSED]
        assert got["malformed"][1].as_py() == "step 1, with_columns(at): a time that no timestamp has"
        assert [one and one["x"] for one in got["fields"].to_pylist()] == [1, None, 3]


NS, DAY = pa.timestamp("ns"), 86_400_000


@pytest.mark.parametrize(
    ("kind", "declared", "values", "wanted"),
    [
        (pa.list_(NS), pa.list_(pa.timestamp("us")), [[1_999, None], None, [-1]], [[1, None], None, [-1]]),
        (pa.struct([("t", NS)]), pa.struct([("t", pa.timestamp("us"))]), [{"t": 1_999}, {"t": None}, None],
         [{"t": 1}, {"t": None}, None]),
        (pa.map_(pa.string(), NS), pa.map_(pa.string(), pa.timestamp("us")), [[("a", -1)], [], None],
         [[("a", -1)], [], None]),
        (pa.list_(pa.timestamp("s")), pa.list_(pa.timestamp("us")), [[1], [2**60], []], [[1_000_000], "far", []]),
        (pa.struct([("t", pa.timestamp("ms"))]), pa.struct([("t", pa.timestamp("us"))]),
         [{"t": -(2**60)}, {"t": 1}, None], ["far", {"t": 1_000}, None]),
        (pa.date64(), pa.date32(), [DAY + 1, -1, None], [1, -1, None]),
        (pa.large_list(NS), pa.list_(pa.timestamp("us")), [[1_999], None, []], [[1], None, []]),
        (pa.list_(NS, 1), pa.list_(pa.timestamp("us")), [[1_999], [-1], [0]], [[1], [-1], [0]]),
        (pa.list_(pa.date64()), pa.list_(pa.date32()), [[DAY - 1], [2**62 // DAY * DAY], None], [[0], "far", None]),
    ],
)  # fmt: skip
def test_times_within_lists_structs_and_maps_are_taken_as_those_beside_them(
    kind: pa.DataType, declared: pa.DataType, values: list[Any], wanted: list[Any]
) -> None:
    """By hand: fractions are rounded down; what has no place is the message's own error."""
    numbers = pa.array(values, plain_numbers(kind))
    step = Step(
        "map_batches", {"": lambda table: table.append_column("at", view(numbers, kind).slice(0, table.num_rows))}
    )
    schema = pa.schema([*SOURCE, ("at", declared)])
    got = Steps(lambda rows: rows, (step,), schema)(parsed([(0, 0, 1, ""), (0, 1, 2, ""), (0, 2, 3, "")]))
    assert got["verdict"].to_pylist() == [POISON if one == "far" else PASSED for one in wanted]
    fields = got["fields"].filter(pc.equal(got["verdict"], PASSED))
    assert view(pc.struct_field(fields, "at"), plain_numbers(declared)).to_pylist() == [
        one for one in wanted if one != "far"
    ]


def test_a_step_that_gives_another_type_beside_a_time_is_named() -> None:
    """Text where a number was declared is no time that does not fit: it is the step, not the message."""

    def function(table: pa.Table) -> pa.Table:
        kind = pa.struct([("t", pa.timestamp("us")), ("n", pa.int64() if not table.num_rows else pa.string())])
        return table.append_column("at", pa.array([{"t": 1, "n": "x"}] * table.num_rows, kind))

    step = Step("map_batches", {"": function})
    with pytest.raises(ValueInvalid, match="a step gave other fields than it declared"):
        steps_of(step)(parsed([(0, 0, 1, ""), (0, 1, 2, "")]))


def plain_numbers(kind: pa.DataType) -> pa.DataType:
    """Return a type with integers where it has times."""
    if pa.types.is_large_list(kind):
        return pa.large_list(plain_numbers(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain_numbers(kind.value_type), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(plain_numbers(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(one.name, plain_numbers(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, plain_numbers(kind.item_type))
    if pa.types.is_string(kind):
        return kind
    return pa.int32() if pa.types.is_date32(kind) else pa.int64()


def has_no_offsets(kind: pa.DataType) -> bool:
    return pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind)


def view(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return the same buffers as another type, which they fit: nothing is looked at."""
    children = [array.field(at) for at in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        children = [array.values]
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([array.keys, view(array.items, kind.item_type)], ["key", "value"])
        return pa.MapArray.from_arrays(array.offsets, entries.field(0), entries.field(1), mask=array.is_null())
    inner = [view(child, kind.field(at).type) for at, child in enumerate(children)]
    return pa.Array.from_buffers(kind, len(array), array.buffers()[: 1 if has_no_offsets(kind) else 2], children=inner)


def test_a_step_that_would_end_the_worker_is_an_error_of_its_message() -> None:
    def leaves(table: pa.Table) -> pa.Table:
        if 2 in table["x"].to_pylist():
            raise SystemExit(3)
        return table

    got = steps_of(Step("map_batches", {"": leaves}))(parsed([(0, 0, 1, "a"), (0, 1, 2, "b"), (0, 2, 3, "c")]))
    assert got["verdict"].to_pylist() == [PASSED, POISON, PASSED]
    assert got["malformed"].to_pylist()[1] == "step 1, map_batches(): SystemExit: 3"


def test_a_step_s_error_that_cannot_say_what_it_is_is_an_error_of_its_message() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise LookupError("nothing")

    def mute(table: pa.Table) -> pa.Table:
        if 2 in table["x"].to_pylist():
            raise Mute
        return table

    rows: list[Row] = [(0, 0, 1, "a"), (0, 1, 2, "b"), (0, 2, 3, "c")]
    got = steps_of(Step("map_batches", {"": mute}))(parsed(rows))
    assert got["verdict"].to_pylist() == [PASSED, POISON, PASSED]
    assert got["malformed"].to_pylist()[1].endswith("Mute: it cannot say: LookupError")
    with pytest.raises(UserCodeFailed, match="it cannot say: LookupError"):
        replace(steps_of(Step("map_batches", {"": mute})), poison_limit=0)(parsed(rows))


@pytest.mark.parametrize("names", [["Who"], ["who", "who"]])
def test_a_field_that_was_declared_and_does_not_come_is_named(names: list[str]) -> None:
    declared = pa.schema([("who", pa.int64())])

    def function(table: pa.Table) -> pa.Table:
        for name in names:
            table = table.append_column(name, table["x"])
        return table

    steps = Steps(lambda rows: rows, (Step("map_batches", {"": function}, schema=declared),), declared)
    with pytest.raises(ValueInvalid, match=r"map_batches gave other fields than its schema= says.*who did not come"):
        steps(parsed([(0, 0, 1, "")]))


def test_what_is_dropped_moves_positions_and_is_no_error_and_poison_is_one() -> None:
    rows: list[Row] = [(0, 0, 5, ""), (0, 1, 13, ""), (0, 2, 99, ""), (0, 3, None, "")]
    steps = steps_of(Step("map_batches", {"": tenth}), Step("where", {"": pc.field("x") < 50}))
    what = PackInput({"t": 0}, "x", (), False, 1, ((pa.field("tenth", pa.int64()), "tenth"),), widen=False)
    batch = pack_input(steps(parsed(rows)), what)
    assert is_good(batch).to_pylist() == [True, False, False, False]
    [packed] = pack(batch, PackPlan((7,), (pa.field("tenth", pa.int64()),), False, None, {0: "t"}), 1_000).to_pylist()
    [piece] = decode_header(packed["header"]).slices
    assert (piece.first, piece.next, piece.newest) == (0, 4, 5)
    assert from_ipc(packed["frame"])["_offset"].to_pylist() == [0]
    errors = from_ipc(packed["errors"]).select(["offset", "reason", "value", "key"]).to_pylist()
    assert [tuple(row.values()) for row in errors] == [(1, "poison", b"13", b"k"), (3, "malformed", b"None", b"k")]


def test_so_many_in_a_row_end_the_job_by_name_but_no_replay() -> None:
    rows: list[Row] = [(0, offset, 13, "") for offset in range(4)]
    bad = Step("map_batches", {"": tenth})
    assert steps_of(bad, poison_limit=4)(parsed(rows))["verdict"].to_pylist() == [POISON] * 4
    with pytest.raises(UserCodeFailed, match=r"step 1, map_batches\(\), for more than poison_limit=3 messages"):
        steps_of(bad, poison_limit=3)(parsed(rows))
    one_by_one = steps_of(Step("where", {"": pc.field("x") > 0}), bad, poison_limit=3)
    with pytest.raises(UserCodeFailed, match="poison_limit=3"):
        for row in rows:
            one_by_one(parsed([row]))
    assert steps_of(bad, poison_limit=None)(parsed(rows * 1))["verdict"].to_pylist() == [POISON] * 4


def test_a_step_that_depends_on_cuts_is_named() -> None:
    rows: list[Row] = [(0, offset, offset, "") for offset in range(20)]
    steps = [Step("where", {"": pc.field("x") > 2}),
             Step("with_columns", {"share": lambda t: pc.subtract(t["x"], pc.mean(t["x"]))})]  # fmt: skip
    steps_of(*steps)(parsed(rows))
    with pytest.raises(UserCodeFailed, match=r"step 2, with_columns\(share\) depends on where batches are cut"):
        steps_of(*steps, debug=True)(parsed(rows))


def test_steps_are_compared_under_cuts_also_with_times_that_python_has_not() -> None:
    far = Step("with_columns", {"at": lambda t: pc.add(t["x"], 400_000_000_000_000_000).cast(pa.timestamp("us"))})
    got = steps_of(far, debug=True)(parsed([(0, offset, offset, "") for offset in range(5)]))
    assert got["verdict"].to_pylist() == [PASSED] * 5


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda t: pa.concat_tables([t, t]), "a row came back twice"),
        (lambda t: t.set_column(4, "_offset", pc.add(t["_offset"], 100)), "that was not given"),
        (lambda t: t.select(["x", "name"]), "_topic, _partition, _offset, _timestamp did not come"),
        (lambda t: 3, "it gave int"),
    ],
)
def test_rows_that_do_not_come_back_as_they_went_are_named(function: Any, said: str) -> None:
    steps = Steps(lambda rows: rows, (Step("map_batches", {"": function}, "1", SOURCE),), SOURCE)
    with pytest.raises(ValueInvalid, match=said):
        steps(parsed([(0, 0, 5, ""), (0, 1, 6, "")]))


def test_the_manifest_has_text_and_version() -> None:
    steps = stream(archive("/a", format="raw")).where(pc.field("x") > 3).map_batches(tenth, version="2").steps
    where, mapped = (step.describe() for step in steps)
    assert where == {"step": "where", "text": {"": "(x > 3)"}, "version": "", "schema": None}
    assert mapped["text"][""].startswith("def tenth(table: pa.Table) -> pa.Table:\n    if 13 in")
    assert mapped["version"] == "2"


def test_bad_options_are_named() -> None:
    one = stream(archive("/a", format="raw"))
    made = eval("lambda table: table")
    for call, said in [
        (lambda: one.where("x > 3"), r"where='x > 3': must be a pyarrow.compute expression or a function"),
        (lambda: one.with_columns(y=3), r"y=3: must be"),
        (one.with_columns, r"with_columns\(\): must name"),
        (lambda: one.with_columns(_offset=pc.field("x")), "'_offset' is no field"),
        (one.select, r"select\(\): must name"),
        (lambda: one.map_batches(pc.field("x")), "must be a function of an Arrow table"),
        (lambda: one.map_batches(made), "give version="),
        (lambda: one.map_batches(functools.partial(tenth)), "give version="),
        (lambda: one.map_batches(tenth, version=2), "version=2: must be a text"),
        (lambda: one.map_batches(tenth, schema="x long"), "schema='x long': must be"),
        (lambda: schema_after(one.select("nope").steps, SOURCE), r"\['nope'\] are no fields; allowed are x, name"),
        (lambda: schema_after(one.where(pc.field("nope") > 1).steps, SOURCE), r"step 1, where\(\): does not take"),
        (lambda: schema_after(one.where(pc.field("x")).steps, SOURCE), "true or false"),
        (lambda: schema_after(one.with_columns(X=pc.field("x")).steps, SOURCE), "must be different names"),
        (lambda: StartOptions(poison_limit=-1), "poison_limit=-1"),
        (lambda: StartOptions(debug_steps=1), "debug_steps=1: allowed are True and False"),
    ]:
        with pytest.raises(ValueError, match=said):
            call()


def test_a_step_whose_type_goes_with_the_values_may_raise_for_one_of_them() -> None:
    def halved(table: pa.Table) -> pa.Array:
        values = table["v"].to_pylist()
        if 2 in values:
            raise ValueError("two")
        whole = bool(values) and all(value % 2 == 0 for value in values)
        return pa.array([value / 2 for value in values], pa.int64() if whole else pa.float64())

    step = Step("with_columns", {"w": halved}, version="1")
    schema = schema_after((step,), pa.schema([("v", pa.int64())]))
    values = [4, 2, 1, 3]
    rows = {
        "topic": ["t"] * 4, "partition": pa.array([0] * 4, pa.int32()), "offset": pa.array(range(4), pa.int64()),
        "timestamp": pa.nulls(4, pa.timestamp("us", "UTC")), "key": pa.nulls(4, pa.binary()),
        "fields": pa.StructArray.from_arrays([pa.array(values)], names=["v"]), "raw": pa.nulls(4),
        "malformed": pa.nulls(4, pa.string()),
    }  # fmt: skip
    made = Steps(lambda records: records, (step,), schema)(pa.RecordBatch.from_pydict(rows))
    assert made.column("verdict").to_pylist() == [PASSED, POISON, PASSED, PASSED]
    assert [row["w"] for row in made.column("fields").to_pylist() if row] == [2.0, 0.5, 1.5]


def test_a_field_within_a_struct_that_is_not_declared_is_named() -> None:
    declared = pa.schema([("who", pa.struct([("x", pa.int64())]))])

    def steps(name: str) -> Steps:
        def function(table: pa.Table) -> pa.Table:
            made = pa.array([{name: 7}] * table.num_rows, pa.struct([(name, pa.int64())]))
            return table.append_column("who", made)

        return Steps(lambda rows: rows, (Step("map_batches", {"": function}, schema=declared),), declared)

    assert steps("x")(parsed([(0, 0, 1, "")]))["fields"].to_pylist() == [{"who": {"x": 7}}]
    with pytest.raises(ValueInvalid, match=r"map_batches gave other fields than its schema= says.*who\.X: one of"):
        steps("X")(parsed([(0, 0, 1, "")]))


def test_what_a_step_raises_for_a_row_that_was_not_given_is_no_other_messages_error() -> None:
    """It was the last message's, which had done nothing, and the row that had gone was dropped without a word."""

    def strange(table: pa.Table) -> pa.Table:
        offsets = [100 if x == 1 else offset for x, offset in zip(*table.select(["x", "_offset"]).to_pydict().values())]  # noqa: B905
        return table.set_column(table.schema.get_field_index("_offset"), "_offset", pa.array(offsets, pa.int64()))

    def raises(table: pa.Table) -> pa.Table:
        if 1 in table["x"].to_pylist():
            raise ArithmeticError("one is bad")
        return table

    steps = steps_of(Step("map_batches", {"": strange}), Step("map_batches", {"": raises}))
    with pytest.raises(ValueInvalid, match="that was not given"):
        steps(parsed([(0, 0, 1, "a"), (0, 1, 2, "b"), (0, 2, 3, "c")]))
