"""`rewind show` and `export` of every kind of windows and of every kind of store, decoded out of the manifest alone."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from backend import aggregates as agg
from backend.joins.operator import JoinOperator
from backend.joins.spec import join_spec
from backend.process import (
    ProcessOperator,
    key_value_store,
    list_state,
    map_state,
    session_store,
    value_state,
    window_store,
)
from backend.rocks import RocksStore
from backend.store.protocol import Region, region_range
from backend.stores.session_store import SessionKey
from backend.windows import definitions as win
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.cli import app
from recovery.commit.manifest import Manifest, write_manifest
from recovery.inspect import report
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.compare import local_differences
from recovery.inspect.known_operator import type_of
from recovery.inspect.stores import as_json
from recovery.testing import OperatorTester
from recovery.testing.tester import QUERY_ID
from tests.support.windows import FIELDS, make_checkpoint


def show(home: Path, *options: str, code: int = 0) -> Any:
    local = ("--local-dir", str(home / "local"))
    result = CliRunner().invoke(app, ["show", str(home / "checkpoint"), *options, *local, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)["rows"] if code == 0 else result.output


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make the checkpoint of a kind of windows, once. Messages: anna at 1, 11 and 25 s, bert at 2 and 26 s."""
    windows = {
        "sliding": win.sliding("10 s"),
        "session": win.session("12 s"),
        "by number": win.tumbling(messages=2),
        "tumbling": win.tumbling("10 s"),
    }
    homes: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in homes:
            homes[name] = tmp_path_factory.mktemp("tables")
            spec = window_spec(
                windows[name],
                pa.schema(FIELDS),
                {
                    "n": agg.count(),
                    "mid": agg.quantile("x", 0.5),
                    "edge": agg.first("x", ignore_nulls=True),
                    "own": agg.over_all("x", function=len, output=pa.int64()),
                },
                keys=["k"],
                retention="1 hour" if name != "by number" else None,
                max_ahead=None,
            )
            operator = WindowOperator(spec)
            make_checkpoint(homes[name], operator, tuple(pa.schema(FIELDS).field(f) for f in operator.input_fields))
        return homes[name]

    return make


def moment(second: int) -> str:
    return f"1970-01-01T00:00:{second:02d}.000Z"


def test_sessions(made: Callable[[str], Path]) -> None:
    rows = show(made("session"), "windows")
    assert [(row["k"], row["start"], row["end"]) for row in rows] == [
        ("anna", moment(1), moment(11)),
        ("bert", moment(2), moment(2)),
        ("anna", moment(25), moment(25)),
        ("bert", moment(26), moment(26)),
    ]
    later = show(made("session"), "windows", "--from", "1970-01-01T00:00:11", "--key", "anna")
    assert [row["start"] for row in later] == [moment(1), moment(25)]


def test_sliding_windows(made: Callable[[str], Path]) -> None:
    rows = show(made("sliding"), "windows", "--key", "anna")
    assert [(row["start"], row["end"]) for row in rows] == [
        ("1969-12-31T23:59:51.000Z", moment(1)),
        (moment(1), moment(11)),
        (moment(15), moment(25)),
    ]


def test_windows_by_number_of_messages(made: Callable[[str], Path]) -> None:
    rows = show(made("by number"), "windows")
    assert [(row["k"], row["start_offset"], row["last_offset"]) for row in rows] == [("anna", 3, 3)]
    assert "no event time" in show(made("by number"), "windows", "--from", "1970-01-01", code=2)


@pytest.mark.parametrize("name", ["session", "by number", "join"])
def test_a_database_whose_messages_have_lost_their_index_is_not_the_changelogs(
    made: Callable[[str], Path], name: str, tmp_path: Path
) -> None:
    """As a restore would leave it that forgets the index: a drill finds it though no message expires afterwards."""
    if name == "join":
        join_checkpoint(tmp_path, message_key="join_fields")
    else:
        shutil.copytree(made(name), tmp_path, dirs_exist_ok=True)
    checkpoint = Checkpoint(str(tmp_path / "checkpoint"), tmp_path / "local")
    assert local_differences(checkpoint) == []
    local = checkpoint.local(0)
    assert local is not None
    with RocksStore.open(local.path / "db", create=False) as store:
        store.delete_range(*region_range(Region.MESSAGE_INDEX))
    [found] = local_differences(checkpoint)
    assert "messages without their row among 0" in found


def test_what_a_table_cannot_tell_is_refused(made: Callable[[str], Path]) -> None:
    said = " ".join(show(made("session"), "windows", "--version", "2", code=2).split())
    assert "version=2: allowed are at most 1, the newest committed micro-batch" in said
    assert len(show(made("session"), "windows", "--version", "1")) == 4
    said = " ".join(show(made("tumbling"), "windows", "--key", "anna", code=2).split())
    assert "key='anna': a row of this table is a window with all its keys: allowed is none" in said
    assert {row["k"] for row in show(made("tumbling"), "aggregates", "--key", "anna")} == {"anna"}
    for options in (["--key", "anna"], ["--from", "1970-01-01"], ["--to", "1970-01-02"]):
        said = " ".join(show(made("session"), "rows", *options, code=2).split())
        assert "from, to, key: rows that are shown as bytes have no times and keys; allowed are none" in said


@pytest.mark.parametrize("name", ["sliding", "session", "by number"])
def test_messages_of_every_kind(made: Callable[[str], Path], name: str) -> None:
    """Those of the confirmed micro-batch: anna at 1 and 11 s, bert at 2 s; of windows that are full none is kept."""
    rows = show(made(name), "messages")
    found = sorted((row["_offset"], row["k"], row["x"]) for row in rows)
    kept = [(0, "anna", 1.0), (1, "bert", 2.0), (2, "anna", 3.0)]
    assert found == kept if name != "by number" else set(found) <= set(kept)
    assert {row["k"] for row in show(made(name), "messages", "--key", "bert")} == {"bert"}


def test_only_what_there_is(made: Callable[[str], Path], tmp_path: Path) -> None:
    said = show(made("session"), "aggregates", code=2)
    assert "allowed are windows, messages, rows" in " ".join(said.split())
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export", str(made("session") / "checkpoint"), str(out), "--table", "windows"])
    assert result.exit_code == 0, result.output
    assert pq.read_table(out)["start"].to_pylist() == [1000, 2000, 25_000, 26_000]


def join_checkpoint(home: Path, more: pa.DataType | None = None, value: Any = None, **options: Any) -> Path:
    """Left: anna at 1 and 11 s, bert at 2 s; right: anna at 5 s. One micro-batch confirmed, an empty one staged."""
    side = pa.schema([("k", pa.string()), ("x", pa.int64()), ("unused", pa.binary()), ("more", more or pa.int8())])
    fields = ["x", "more"]
    kept = {"left_retention": "1 hour", "right_retention": "1 hour", "left_fields": fields, "right_fields": fields}
    spec = join_spec(side, side, on="k", within="10 s", max_ahead=None, **kept, **options)
    operator = JoinOperator(spec)
    tester = OperatorTester(operator, pa.schema([f for s in spec.sides for f in s.columns]), home, now_ms=9_000)
    left = [("anna", 1, 10), ("bert", 2, 20), ("anna", 11, 30)]
    tester.send([{"_time": at * 1000, "left.k": k, "left.x": x, "left.more": value} for k, at, x in left], stream=0)
    tester.send([{"_time": 5_000, "right.k": "anna", "right.x": 40, "right.more": value}], stream=1)
    tester.batch()
    tester.batch()
    location = home / "checkpoint"
    entries = {"operator": operator.describe(), "changelog": str(home / "changelog")}
    write_manifest(str(location), Manifest(1, (0,), entries))
    (location / "metadata").write_text(json.dumps({"id": QUERY_ID}))
    (location / "commits").mkdir()
    for version in range(2):
        (location / "commits" / str(version)).write_text("v1")
    return home


def test_sides_of_a_join(tmp_path: Path) -> None:
    home = join_checkpoint(tmp_path)
    left = show(home, "left")
    assert show(home) == left, "the first table of the job"
    assert [(row["_offset"], row["k"], row["x"]) for row in left] == [(0, "anna", 10), (1, "bert", 20), (2, "anna", 30)]
    assert [row["x"] for row in show(home, "right")] == [40]
    assert [row["x"] for row in show(home, "left", "--key", "anna", "--from", "1970-01-01T00:00:02")] == [30]
    assert "unused" not in left[0]
    assert "version: messages are only as of" in " ".join(show(home, "right", "--version", "0", code=2).split())
    for table in ("windows", "messages"):
        assert "allowed are left, right, rows" in " ".join(show(home, table, code=2).split())
    (home / "local").rename(tmp_path / "away")
    assert "allowed are left, right, rows" in " ".join(show(home, "messages", code=2).split())
    assert f"rewind show {home / 'checkpoint'} left --local-dir" in show(home, "left", code=1)


NESTED = pa.struct(
    [("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.binary())), ("m", pa.map_("string", "int8"))]
)


def test_sides_of_a_join_with_nested_fields(tmp_path: Path) -> None:
    home = join_checkpoint(tmp_path, NESTED, {"at": 0, "tags": [b"\xde\xad", None], "m": [("a", 1)]})
    whole = {"at": "1970-01-01T00:00:00+00:00", "tags": ["dead", None], "m": [["a", 1]]}
    assert [row["more"] for row in show(home)] == [whole] * 3


def test_a_side_whose_types_have_no_certain_names_is_shown_as_bytes(tmp_path: Path) -> None:
    home = join_checkpoint(tmp_path, pa.struct([("a: b", pa.int8())]))
    assert [len(show(home, side)) for side in ("left", "right")] == [3, 1]
    assert {*show(home)[0]} == {"key", "value", "shard", "commit"}


@pytest.mark.parametrize("window", [win.session("12 s"), win.sliding("10 s")])
def test_windows_of_messages_with_nested_fields(window: Any, tmp_path: Path) -> None:
    fields = pa.schema([("k", pa.string()), ("x", NESTED)])
    own = {"own": agg.over_all("x", function=len, output=pa.int64())}
    operator = WindowOperator(window_spec(window, fields, own, keys=["k"], retention="1 hour", max_ahead=None))
    tester = OperatorTester(operator, fields, tmp_path, now_ms=9_000)
    tester.batch([{"_time": 1_000, "k": "anna", "x": {"tags": [b"\xde\xad"]}}])
    tester.batch()
    location = tmp_path / "checkpoint"
    entries = {"operator": operator.describe(), "changelog": str(tmp_path / "changelog")}
    write_manifest(str(location), Manifest(1, (0,), entries))
    (location / "metadata").write_text(json.dumps({"id": QUERY_ID}))
    (location / "commits").mkdir()
    for version in range(2):
        (location / "commits" / str(version)).write_text("v1")
    assert [row["k"] for row in show(tmp_path)] == ["anna"]
    assert [row["x"]["tags"] for row in show(tmp_path, "messages")] == [["dead"]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.field("element", pa.decimal128(10, -2), nullable=False)),
        pa.large_list(pa.list_(pa.binary(16), 3)),
        pa.struct([("a", pa.int8()), ("b c", pa.struct([])), ("d, e", pa.timestamp("ns", "+01:00"))]),
        pa.map_(pa.string(), pa.list_(NESTED), keys_sorted=True),
        pa.map_(pa.field("k", pa.string(), nullable=False), pa.field("v", NESTED)),
        pa.dictionary(pa.int32(), pa.large_string(), ordered=True),
    ],
)
def test_types_are_known_by_their_names(kind: pa.DataType) -> None:
    assert type_of(str(kind)) == kind


@pytest.mark.parametrize(
    "name",
    ["", "struct<a: b: int8>", "struct<a: int8, >", "list<int8>", "list<item: int8>>", "decimal128(1)", "mine<>"],
)
def test_names_that_no_type_has_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be told from its name"):
        type_of(name)


@pytest.mark.parametrize(
    ("kind", "table"), [("session", "windows"), ("tumbling", "aggregates"), ("session", "messages")]
)
def test_keys_are_chosen_as_they_are_shown(kind: str, table: str, tmp_path: Path) -> None:
    """Bytes as hex, times in ISO 8601, those that Python has not too; no key is none of them."""
    stamp = pa.timestamp("us", "UTC")
    fields = pa.schema([("k", pa.binary()), ("d", stamp)])
    far = 400_000_000_000_000_000  # microseconds: a year of five digits
    rows = [(b"\xde\xad", 0), (None, far), (b"None", None)]
    window = win.session("12 s") if kind == "session" else win.tumbling("12 s")
    wanted = {"n": agg.count(), "own": agg.over_all("d", function=len, output=pa.int64())}
    spec = window_spec(window, fields, wanted, keys=["k", "d"], retention="1 hour", max_ahead=None)
    operator = WindowOperator(spec)
    tester = OperatorTester(operator, fields, tmp_path, now_ms=9_000)
    tester.send([{"_time": 1_000, "k": k, "d": pa.scalar(at, pa.int64()).cast(stamp)} for k, at in rows])
    tester.batch()
    tester.batch()
    location = tmp_path / "checkpoint"
    entries = {"operator": operator.describe(), "changelog": str(tmp_path / "changelog")}
    write_manifest(str(location), Manifest(1, (0,), entries))
    (location / "metadata").write_text(json.dumps({"id": QUERY_ID}))
    (location / "commits").mkdir()
    for version in range(2):
        (location / "commits" / str(version)).write_text("v1")
    told = show(tmp_path, table)
    assert {(row["k"] or "", row["d"] or "") for row in told} == {
        ("", "14645-06-30T15:06:40.000000Z"), ("4e6f6e65", ""), ("dead", "1970-01-01T00:00:00+00:00")
    }  # fmt: skip
    assert {row["k"] for row in show(tmp_path, table, "--key", "dead")} == {"dead"}
    assert {row["k"] for row in show(tmp_path, table, "--key", "1970-01-01T")} == {"dead"}
    assert show(tmp_path, table, "--key", "None") == []


@pytest.mark.parametrize("key", ["start", "messages", "expires", "shard", "partial_bytes"])
@pytest.mark.parametrize("kind", ["session", "tumbling"])
def test_fields_called_like_a_tables_own_columns_are_told_apart(key: str, kind: str, tmp_path: Path) -> None:
    fields = pa.schema([(key, pa.int64()), ("end", pa.int64())])
    window = win.session("12 s") if kind == "session" else win.tumbling("12 s")
    wanted = {"n": agg.count(), "own": agg.over_all("end", function=len, output=pa.int64())}
    spec = window_spec(window, fields, wanted, keys=[key], retention="1 hour", max_ahead=None)
    operator = WindowOperator(spec)
    tester = OperatorTester(operator, fields, tmp_path, now_ms=9_000)
    tester.send([{"_time": 1_000, key: 7, "end": 9}])
    tester.batch()
    tester.batch()
    location = tmp_path / "checkpoint"
    entries = {"operator": operator.describe(), "changelog": str(tmp_path / "changelog")}
    write_manifest(str(location), Manifest(1, (0,), entries))
    (location / "metadata").write_text(json.dumps({"id": QUERY_ID}))
    (location / "commits").mkdir()
    for version in range(2):
        (location / "commits" / str(version)).write_text("v1")
    (row,) = show(tmp_path, "windows" if kind == "session" else "aggregates")
    assert (row[f"{key}_"], row["start"]) == (7, moment(1 if kind == "session" else 0))
    (row,) = show(tmp_path, "messages")
    assert (row[f"{key}_"], row["end_"], row["_time"]) == (7, 9, moment(1))


STORES = [
    window_store("hours", retention="1 day", window_size="1 hour"),
    session_store("visits", retention="1 day"),
    value_state("last", ttl="1 hour"),
    list_state("all", ttl="1 hour"),
    map_state("by second"),
    key_value_store("totals"),
]


def remember(messages: pa.Table, context: Any) -> None:
    for row in messages.to_pylist():
        key, time, x = row["k"], row["_time"], row["x"]
        context["hours"].put(key, x, time)
        context["visits"].put(SessionKey(key, time, time), {"x": x})
        context["last"].update(key, x)
        context["all"].append_value(key, x)
        context["by second"].update_value(key, time // 1000, x)
        context["totals"].put((key, "n"), (context["totals"].get((key, "n")) or 0) + 1)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("stores")
    operator = ProcessOperator(remember, pa.schema([("a", pa.int64())]), stores=STORES, fields=["k", "x"])
    make_checkpoint(home, operator, FIELDS)
    return home


EXPIRES = "1970-01-01T01:00:09.000Z"  # batch time 9 s and an hour


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("hours", {"key": '"bert"', "start": moment(26), "value": "5.0"}),
        ("visits", {"key": '"bert"', "start": moment(26), "end": moment(26), "value": '{"x":5.0}'}),
        ("last", {"key": '"bert"', "expires": EXPIRES, "value": "5.0"}),
        ("all", {"key": '"bert"', "expires": EXPIRES, "value": "5.0"}),
        ("by second", {"key": '"bert"', "map_key": "26", "value": "5.0"}),
        ("totals", {"key": '["bert","n"]', "value": "2"}),
    ],
)
def test_stores_by_name(stores: Path, name: str, wanted: dict[str, str]) -> None:
    rows = show(stores, name, "--key", "bert")
    assert {name: value for name, value in rows[-1].items() if value is not None} == {"shard": 0, **wanted}
    assert all("bert" in row["key"] for row in rows)


def test_bytes_in_stores_are_hex_and_numbers_that_json_has_not_are_texts(tmp_path: Path) -> None:
    declared = [key_value_store("totals"), map_state("by name"), session_store("visits", retention="1 day")]

    def put(messages: pa.Table, context: Any) -> None:
        for key in messages["k"].to_pylist():
            context["totals"].put((key, b"\xde\xad"), [float("nan"), float("inf"), -float("inf"), {"raw": b"\xff"}])
            context["totals"].put(b"\xbe\xef", 1.5)
            context["by name"].update_value(key, b"\x00\x01", float("inf"))
            context["visits"].put(SessionKey(float("inf"), 1, 2), b"\xff")

    operator = ProcessOperator(put, pa.schema([("a", pa.int64())]), stores=declared, fields=["k", "x"])
    make_checkpoint(tmp_path, operator, FIELDS)
    value = '["NaN","Infinity","-Infinity",{"raw":"ff"}]'
    rows = show(tmp_path, "totals")
    assert {row["key"]: row["value"] for row in rows} == {
        '"beef"': "1.5", '["anna","dead"]': value, '["bert","dead"]': value
    }  # fmt: skip
    assert [row["key"] for row in show(tmp_path, "totals", "--key", "dead")] == ['["anna","dead"]', '["bert","dead"]']
    assert [row["value"] for row in show(tmp_path, "totals", "--key", "beef")] == ["1.5"]
    assert {(row["map_key"], row["value"]) for row in show(tmp_path, "by name")} == {('"0001"', '"Infinity"')}
    assert [(row["key"], row["value"]) for row in show(tmp_path, "visits", "--key", "Inf")] == [('"Infinity"', '"ff"')]
    assert as_json({(1, b"\x01"): 1, None: True, 1.5: None}) == '{"[1,\\"01\\"]":1,"null":true,"1.5":null}'


def test_numbers_that_json_has_not_are_texts_in_every_table(tmp_path: Path) -> None:
    fields = pa.schema([("k", pa.float64()), ("x", pa.list_(pa.float64()))])
    own = {"own": agg.over_all("x", function=len, output=pa.int64())}
    spec = window_spec(win.session("12 s"), fields, own, keys=["k"], retention="1 hour", max_ahead=None)
    tester = OperatorTester(WindowOperator(spec), fields, tmp_path, now_ms=9_000)
    tester.batch([{"_time": 1_000, "k": -math.inf, "x": [math.nan, math.inf, 1.5]}])
    tester.batch()
    location = tmp_path / "checkpoint"
    entries = {"operator": WindowOperator(spec).describe(), "changelog": str(tmp_path / "changelog")}
    write_manifest(str(location), Manifest(1, (0,), entries))
    (location / "metadata").write_text(json.dumps({"id": QUERY_ID}))
    (location / "commits").mkdir()
    for version in range(2):
        (location / "commits" / str(version)).write_text("v1")
    assert [(row["k"], row["x"]) for row in show(tmp_path, "messages", "--key", "-Infinity")] == [
        ("-Infinity", ["NaN", "Infinity", 1.5])
    ]
    with pytest.raises(ValueError, match="JSON"):
        report.print_json(math.nan)


def test_stores_by_time(stores: Path) -> None:
    assert len(show(stores, "hours")) == 5
    assert [row["start"] for row in show(stores, "hours", "--from", "1970-01-01T00:00:25")] == [moment(25), moment(26)]
    assert show(stores, "last", "--to", "1970-01-01T01:00:00") == [], "none expires before that"
    assert len(show(stores, "last", "--from", "1970-01-01T01:00:00")) == 2
    assert "allowed are all, by second, hours, last, totals, visits, rows" in " ".join(
        show(stores, "lions", code=2).split()
    )


def test_a_store_may_be_called_messages(tmp_path: Path) -> None:
    def count_them(messages: pa.Table, context: Any) -> None:
        for key in messages["k"].to_pylist():
            context["messages"].put(key, (context["messages"].get(key) or 0) + 1)

    declared = [key_value_store("messages")]
    operator = ProcessOperator(count_them, pa.schema([("a", pa.int64())]), stores=declared, fields=["k", "x"])
    make_checkpoint(tmp_path, operator, FIELDS)
    assert [(row["key"], row["value"]) for row in show(tmp_path, "messages")] == [('"anna"', "3"), ('"bert"', "2")]
    first = show(tmp_path, "messages", "--version", "0")
    assert [(row["key"], row["value"]) for row in first] == [('"anna"', "2"), ('"bert"', "1")]


def test_messages_of_windows_have_no_version(made: Callable[[str], Path]) -> None:
    said = show(made("session"), "messages", "--version", "0", code=2)
    assert "version: messages are only as of" in " ".join(said.split())
