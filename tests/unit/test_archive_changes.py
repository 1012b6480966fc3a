"""An archive that changes below what was read, or holds what it must not, is an error by name before anything is read.

The stream's reader is called as Spark calls it: `latestOffset` plans, Spark logs, `partitions` and `read` run.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import LongType, StructField, StructType

from backend.errors import SourceDamaged, SourceGap, SourceInvalid, SourceWentBack, UnknownFormat
from backend.sources import archive_index
from backend.sources.archive import ArchiveSource, archive
from backend.sources.archive_files import WRITE_SCHEMA, read_range, write_archive
from backend.sources.archive_index import INDEX_NAME, Archive
from backend.sources.archive_reader import ArchiveStreamReader, Piece
from backend.sources.formats import MALFORMED, ValueFormat


def messages(offsets: list[int], *, topic: str = "t", partition: int = 0, value: bytes = b"v") -> pa.Table:
    n = len(offsets)
    times = pa.array([1000 + offset for offset in offsets], pa.int64()).cast(pa.timestamp("ms", tz="UTC"))
    return pa.table([[topic] * n, [partition] * n, offsets, times, [b"k"] * n, [value] * n], schema=WRITE_SCHEMA)


def put(directory: Path, name: str, offsets: list[int], **more: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(messages(offsets, **more), directory / name)


def declare(directory: Path, *gaps: tuple[int, int]) -> None:
    entries = [{"topic": "t", "partition": 0, "start": start, "end": end} for start, end in gaps]
    (directory / INDEX_NAME).write_text(json.dumps({"format": 1, "gaps": entries}))


class Query:
    """A query that reads to the end of an archive at each `run`, as Spark would; a new one is a new start."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.checkpoint = tmp_path / "c"
        source = archive(tmp_path / "a", format="raw", **options)
        log = self.checkpoint / "logged.json"
        self.offset = json.loads(log.read_text()) if log.exists() else None
        known = list(self.offset["next"]) if self.offset else []
        self.source: ArchiveSource = source.remembering(known, str(self.checkpoint), 0)
        positions = {(t, int(p)): n for t, of in (self.offset or {"next": {}})["next"].items() for p, n in of.items()}
        if positions:
            self.source.check_positions(positions)
        self.reader = ArchiveStreamReader(self.source)
        self.offset = self.offset or self.reader.initialOffset()

    def plan(self) -> dict[str, Any]:
        end = self.reader.latestOffset(self.offset, ReadAllAvailable())
        self.checkpoint.mkdir(exist_ok=True)
        (self.checkpoint / "logged.json").write_text(json.dumps(end))
        return end

    def run(self) -> list[tuple[int, int]]:
        end = self.plan()
        pieces = self.reader.partitions(self.offset, end)
        rows = [row for piece in pieces for batch in self.reader.read(piece) for row in batch.to_pylist()]
        self.offset = end
        return sorted((row["partition"], row["offset"]) for row in rows)


@pytest.fixture(params=["running", "at the start"])
def go_on(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """What reads on after the archive changed: the running query, or a new start."""
    return lambda query: query.run() if request.param == "running" else Query(tmp_path).run()


def test_lower_offsets_that_come_later_are_named(tmp_path: Path, go_on: Any) -> None:
    put(tmp_path / "a", "later.parquet", [5, 6])
    put(tmp_path / "a", "other.parquet", [8, 9], partition=1)
    query = Query(tmp_path)
    assert query.run() == [(0, 5), (0, 6), (1, 8), (1, 9)]
    put(tmp_path / "a", "new.parquet", [7], partition=1)
    with pytest.raises(SourceWentBack, match=r"new\.parquet, t-1.*offset 7.*began with 8 and reads 10.*rewind reset"):
        go_on(query)
    (tmp_path / "a" / "new.parquet").unlink()
    put(tmp_path / "a", "earlier.parquet", [0, 1, 2, 3, 4])
    with pytest.raises(SourceWentBack, match=r"earlier\.parquet, t-0.*offset 0.*began with 5 and reads 7"):
        go_on(query)
    (tmp_path / "a" / "earlier.parquet").unlink()
    assert go_on(query) == []


def test_a_partition_that_comes_later_is_held_to_where_it_began(tmp_path: Path, go_on: Any) -> None:
    put(tmp_path / "a", "0.parquet", [0])
    query = Query(tmp_path)
    query.run()
    put(tmp_path / "a", "1.parquet", [50], partition=1)
    assert query.run() == [(1, 50)]
    put(tmp_path / "a", "2.parquet", [49], partition=1)
    with pytest.raises(SourceWentBack, match=r"2\.parquet, t-1"):
        go_on(query)


def test_a_gap_that_is_filled_below_the_position_is_named(tmp_path: Path, go_on: Any) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1, 4])
    declare(tmp_path / "a", (2, 4))
    query = Query(tmp_path)
    assert query.run() == [(0, 0), (0, 1), (0, 4)]
    put(tmp_path / "a", "a.parquet", [0, 1])
    put(tmp_path / "a", "gap.parquet", [2, 3])
    put(tmp_path / "a", "end.parquet", [4])
    declare(tmp_path / "a")
    with pytest.raises(SourceWentBack, match=r"gap\.parquet, t-0.*gap was 2 to 3.*reads 5 next"):
        go_on(query)


def test_a_gap_above_the_position_may_be_filled(tmp_path: Path) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1])
    declare(tmp_path / "a", (2, 4))
    query = Query(tmp_path)
    query.run()
    put(tmp_path / "a", "gap.parquet", [2, 3])
    declare(tmp_path / "a")
    assert query.run() == [(0, 2), (0, 3)]


@pytest.mark.parametrize(("offsets", "value"), [([0, 1, 2], b"other"), ([0, 1, 2, 3, 4], b"v")])
def test_a_file_that_is_replaced_after_it_was_read_is_named(
    tmp_path: Path, go_on: Any, offsets: list[int], value: bytes
) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1, 2])
    query = Query(tmp_path)
    query.run()
    put(tmp_path / "a", "a.parquet", offsets, value=value)
    with pytest.raises(SourceWentBack, match=r"a\.parquet; why: it held t-0 0 to 2 .*put the file back"):
        go_on(query)
    put(tmp_path / "a", "a.parquet", [0, 1, 2])
    put(tmp_path / "a", "b.parquet", [3])
    assert go_on(query) == [(0, 3)]


def test_a_file_that_is_replaced_is_named_also_where_an_index_has_no_digests(tmp_path: Path, go_on: Any) -> None:
    """As other tools, and releases before, have written it."""

    def index() -> None:
        Archive(tmp_path / "a").write_index()
        path = tmp_path / "a" / INDEX_NAME
        content = json.loads(path.read_text())
        for entry in content["files"]:
            del entry["digest"]
        path.write_text(json.dumps(content))

    put(tmp_path / "a", "a.parquet", [0, 1, 2])
    index()
    query = Query(tmp_path)
    query.run()
    put(tmp_path / "a", "a.parquet", [0, 1, 2, 3, 4], value=b"other")
    index()
    with pytest.raises(SourceWentBack, match=r"a\.parquet; why: it held t-0 0 to 2 "):
        go_on(query)


def test_files_that_are_not_begun_may_change_and_read_ones_may_go(tmp_path: Path) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1])
    put(tmp_path / "a", "b.parquet", [2, 3])
    query = Query(tmp_path, max_offsets_per_batch=2)
    end = query.reader.latestOffset(query.offset, query.reader.getDefaultReadLimit())
    assert end["next"] == {"t": {"0": 2}}
    put(tmp_path / "a", "b.parquet", [2, 3], value=b"corrected before anyone read it")
    query.offset = end
    assert query.run() == [(0, 2), (0, 3)]
    (tmp_path / "a" / "a.parquet").unlink()
    put(tmp_path / "a", "c.parquet", [4])
    assert Query(tmp_path).run() == [(0, 4)]


def test_a_planned_micro_batch_is_not_read_from_other_files(tmp_path: Path) -> None:
    """Spark plans it again by its logged offsets, and asks for no latest offset before."""
    put(tmp_path / "a", "a.parquet", [0, 1])
    query = Query(tmp_path)
    end = query.plan()
    put(tmp_path / "a", "a.parquet", [0, 1], value=b"other")
    again = ArchiveStreamReader(query.source)
    with pytest.raises(SourceWentBack, match=r"a\.parquet"):
        again.partitions(again.initialOffset(), end)


def test_a_checkpoint_of_a_release_that_did_not_remember_goes_on(tmp_path: Path) -> None:
    put(tmp_path / "a", "b.parquet", [5])
    Query(tmp_path).run()
    (tmp_path / "c" / "rewind" / "archive" / "0.json").unlink()
    put(tmp_path / "a", "c.parquet", [6])
    assert Query(tmp_path).run() == [(0, 6)]
    (tmp_path / "c" / "rewind" / "archive" / "0.json").unlink()
    put(tmp_path / "a", "a.parquet", [4])
    with pytest.raises(SourceWentBack, match=r"a\.parquet"):
        Query(tmp_path).run()


def test_what_was_read_is_of_a_known_format(tmp_path: Path) -> None:
    put(tmp_path / "a", "b.parquet", [5])
    Query(tmp_path).run()
    path = tmp_path / "c" / "rewind" / "archive" / "0.json"
    whole = path.read_text()
    for text in ('{"format": 9}', "{", '{"format": 1, "files": 3}', whole.replace('"first":5', '"first":4')):
        assert text != whole
        path.write_text(text)
        with pytest.raises(UnknownFormat, match=r"rewind/archive/0\.json"):
            Query(tmp_path)


def test_a_file_of_another_topic_is_named_and_does_not_brick(tmp_path: Path, go_on: Any) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1])
    query = Query(tmp_path)
    query.run()
    put(tmp_path / "a", "stray.parquet", [0], topic="u")
    put(tmp_path / "a", "b.parquet", [2])
    words = r"another topic, 'u'.*a/stray\.parquet.*topics=\['t'\]"
    with pytest.raises(SourceInvalid, match=words):
        go_on(query)
    with pytest.raises(SourceInvalid, match=words):
        query.reader.reportLatestOffset()
    assert Query(tmp_path, topics=["t"]).run() == [(0, 2)]
    (tmp_path / "a" / "stray.parquet").unlink()
    put(tmp_path / "a", "c.parquet", [3])
    assert Query(tmp_path).run() == [(0, 3)]


def test_what_is_wrong_with_other_topics_stops_no_query_of_this_one(tmp_path: Path) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1])
    put(tmp_path / "a", "other.parquet", [0, 1], topic="u")
    put(tmp_path / "a", "gap.parquet", [7, 8], topic="u")
    rows = messages([9], topic="v").set_column(5, "value", pa.array([{"x": 1}]))
    pq.write_table(rows, tmp_path / "a" / "typed.parquet")
    source = archive(str(tmp_path / "a"), format="raw", topics=["t"])
    assert source.offsets() == {("t", 0): (0, 2)}
    with pytest.raises(SourceGap):
        archive(str(tmp_path / "a"), format="raw", topics=["t", "u"]).offsets()
    with pytest.raises(SourceInvalid, match=r"typed\.parquet"):
        archive(str(tmp_path / "a"), format="raw", topics=["v"]).offsets()


def test_topics_are_those_of_the_first_start(tmp_path: Path) -> None:
    put(tmp_path / "a", "a.parquet", [0])
    source = archive(tmp_path / "a", format="raw").remembering([], "", 0)
    put(tmp_path / "a", "u.parquet", [0], topic="u")
    assert source.topics == ("t",)
    assert source.describe()["topics"] == ["t"]
    with pytest.raises(SourceInvalid, match="another topic"):
        source.offsets()
    assert archive(tmp_path / "a", format="raw").remembering([], "", 0).topics == ("t", "u")


def test_an_empty_archive_needs_topics(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(ValueError, match=r"topics=\[\.\.\.\]"):
        archive(tmp_path / "a", format="raw").remembering([], "", 0)
    query = Query(tmp_path, topics=["t"])
    assert query.run() == []
    put(tmp_path / "a", "a.parquet", [0])
    assert query.run() == [(0, 0)]


# -- files that are none ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "values", "word"),
    [
        ("topic", pa.array([b"t"]), "the column topic is binary.*accepted: text"),
        ("partition", pa.array([0.0]), "the column partition is double.*accepted: integers"),
        ("offset", pa.array(["1"]), "the column offset is string.*accepted: integers"),
        ("offset", pa.array([-1]), "at least 0"),
        ("offset", pa.array([None], pa.int64()), "must not be null"),
        ("timestamp", pa.array(["2026"]), "the column timestamp is string.*milliseconds"),
        ("key", pa.array([1]), "the column key is int64.*bytes or text"),
        ("value", pa.array([1.5]), "the column value is double"),
        ("value", pa.array([{"n": 1}]), "holds structs.*needs bytes or text.*typed"),
    ],
)
def test_a_column_of_another_type_is_a_value_error_before_anything_is_made(
    tmp_path: Path, column: str, values: pa.Array, word: str
) -> None:
    rows = messages([1])
    at = rows.schema.get_field_index(column)
    (tmp_path / "a").mkdir()
    pq.write_table(rows.set_column(at, column, values), tmp_path / "a" / "odd.parquet")
    with pytest.raises(ValueError, match=word) as caught:
        Query(tmp_path)
    assert "odd.parquet" in str(caught.value)
    assert isinstance(caught.value, SourceInvalid)
    assert not (tmp_path / "c").exists()


def test_typed_needs_structs_also_by_the_index(tmp_path: Path) -> None:
    write_archive(tmp_path / "a", messages([0, 1]))
    with pytest.raises(ValueError, match=r"holds bytes or text.*needs structs"):
        archive(tmp_path / "a", format="typed", value="n int").offsets()


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("topic", pa.large_string()),
        ("topic", pa.dictionary(pa.int32(), pa.string())),
        ("partition", pa.int64()),
        ("partition", pa.uint8()),
        ("offset", pa.int32()),
        ("offset", pa.uint64()),
        ("timestamp", pa.int64()),
        ("timestamp", pa.timestamp("s")),
        ("timestamp", pa.timestamp("ns", tz="Europe/Paris")),
        ("key", pa.string()),
        ("key", pa.null()),
        ("key", pa.binary(1)),
        ("value", pa.large_binary()),
        ("value", pa.string()),
        ("value", pa.dictionary(pa.int32(), pa.binary())),
        ("value", pa.dictionary(pa.int32(), pa.string())),
    ],
)
def test_accepted_types_are_read(tmp_path: Path, column: str, kind: pa.DataType) -> None:
    rows = messages([0, 1, 2])
    at = rows.schema.get_field_index(column)
    values = pa.nulls(3) if pa.types.is_null(kind) else rows.column(column).combine_chunks()
    if column == "timestamp" and pa.types.is_timestamp(kind):
        values = values.cast(pa.int64()).cast(pa.timestamp("ms", kind.tz)).cast(kind, safe=False)
    elif pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type).dictionary_encode()
    else:
        values = values.cast(kind)
    (tmp_path / "a").mkdir()
    pq.write_table(rows.set_column(at, column, values), tmp_path / "a" / "a.parquet")
    query = Query(tmp_path)
    [piece] = query.reader.partitions(query.offset, query.plan())
    [batch] = query.reader.read(piece)
    second = datetime.fromtimestamp(1 if kind == pa.timestamp("s") else 1.001, UTC)
    assert batch.slice(1, 1).to_pylist() == [
        {
            "topic": "t",
            "partition": 0,
            "offset": 1,
            "timestamp": second,
            "key": None if pa.types.is_null(kind) else b"k",
            "value": b"v",
        }
    ]


def test_a_time_in_nanoseconds_is_rounded_down(tmp_path: Path) -> None:
    times = pa.array([-1, 1_999], pa.timestamp("ns", tz="UTC"))
    (tmp_path / "a").mkdir()
    pq.write_table(messages([0, 1]).set_column(3, "timestamp", times), tmp_path / "a" / "a.parquet")
    schema = WRITE_SCHEMA.set(3, pa.field("timestamp", pa.timestamp("us", tz="UTC")))
    slices, gaps = Archive(str(tmp_path / "a")).partitions()["t", 0].cut(0, 2)
    [batch] = read_range(str(tmp_path / "a"), Piece("t", 0, 0, 2, slices, gaps), schema)
    assert batch.column("timestamp").cast(pa.int64()).to_pylist() == [-1, 1]


def typed(home: Path, value: pa.Array, declared: pa.DataType) -> pa.RecordBatch:
    """Read a field `x` of one message as another type."""
    home.mkdir(exist_ok=True)
    rows = messages([0]).set_column(5, "value", pa.StructArray.from_arrays([value], ["x"]))
    pq.write_table(rows, home / "a.parquet")
    schema = WRITE_SCHEMA.set(5, pa.field("value", pa.struct([("x", declared)]))).append(
        pa.field(MALFORMED, pa.string())
    )
    slices, gaps = Archive(str(home)).partitions()["t", 0].cut(0, 1)
    [batch] = read_range(str(home), Piece("t", 0, 0, 1, slices, gaps), schema)
    return batch


AT = pa.timestamp("us", "UTC")
MOMENT = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "declared", "found"),
    [
        (pa.array([1_700_000_000_000]), AT, MOMENT),
        (pa.array([[1_700_000_000_000, None]]), pa.list_(AT), [MOMENT, None]),
        (pa.array([[("a", 1_700_000_000_000)]], pa.map_(pa.string(), pa.int64())), pa.map_(pa.string(), AT),
         [("a", MOMENT)]),
        (pa.array([[-1, 1_999]], pa.list_(pa.timestamp("ns"))), pa.list_(pa.timestamp("us")),
         [datetime(1969, 12, 31, 23, 59, 59, 999_999), datetime(1970, 1, 1, 0, 0, 0, 1)]),
        (pa.array([[7]], pa.large_list(pa.int32())), pa.list_(pa.int64()), [7]),
        (pa.array([[7, 8]], pa.list_(pa.int32(), 2)), pa.list_(pa.int64()), [7, 8]),
        (pa.array([2], pa.int32()), pa.decimal128(10, 2), Decimal("2.00")),
        (pa.array([-2]), pa.decimal128(18, 0), Decimal(-2)),
        (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(22, 2), Decimal(2**64 - 1)),
        (pa.array([10**8], pa.int32()), pa.decimal128(10, 2), None),
    ],
)  # fmt: skip
def test_a_typed_value_is_read_as_its_declared_type_wherever_it_is(
    tmp_path: Path, value: pa.Array, declared: pa.DataType, found: object
) -> None:
    batch = typed(tmp_path / "a", value, declared)
    if found is None:
        assert "does not fit its field 'x'" in batch.column(MALFORMED)[0].as_py()
        return
    assert batch.column("value").to_pylist() == [{"x": found}]
    assert batch.column(MALFORMED).to_pylist() == [None]


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        (pa.array([[1]]), pa.int64()),
        (pa.array([{"a": 1}]), pa.string()),
        (pa.array([True]), pa.timestamp("us")),
    ],
)
def test_types_that_are_never_read_as_one_another_are_no_damage(
    tmp_path: Path, value: pa.Array, declared: pa.DataType
) -> None:
    with pytest.raises(SourceInvalid, match=r"a\.parquet.*declare the types that the files have"):
        typed(tmp_path / "a", value, declared)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("topic", pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())),
        ("offset", pa.array([2**63], pa.uint64())),
        ("partition", pa.array([2**31])),
    ],
)
def test_places_that_no_message_has_are_named_with_their_file(tmp_path: Path, column: str, values: pa.Array) -> None:
    rows = messages([0])
    rows = rows.set_column(rows.schema.get_field_index(column), column, values)
    pq.write_table(rows, tmp_path / "a.parquet")
    with pytest.raises(SourceInvalid, match=r"archive file a\.parquet"):
        Archive(tmp_path).partitions()


def test_fields_that_a_file_does_not_have_are_null(tmp_path: Path) -> None:
    rows = messages([0, 1])
    for name, struct in (("old", {"n": 1, "x": 2.5}), ("none", {"y": 1})):
        value = pa.array([struct, None])
        (tmp_path / name).mkdir()
        pq.write_table(rows.set_column(5, "value", value), tmp_path / name / "a.parquet")
        schema = WRITE_SCHEMA.set(5, pa.field("value", pa.struct([("n", pa.int32()), ("later", pa.string())])))
        slices, gaps = Archive(str(tmp_path / name)).partitions()["t", 0].cut(0, 2)
        [batch] = read_range(str(tmp_path / name), Piece("t", 0, 0, 2, slices, gaps), schema)
        n = 1 if name == "old" else None
        assert batch.column("value").to_pylist() == [{"n": n, "later": None}, None]


def test_torn_and_foreign_files_are_named(tmp_path: Path) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1])
    query = Query(tmp_path)
    query.run()
    whole = (tmp_path / "a" / "a.parquet").read_bytes()
    for content in (b"", b"PAR1", whole[: len(whole) // 2], b"a text, not Parquet"):
        (tmp_path / "a" / "b.parquet").write_bytes(content)
        with pytest.raises(SourceDamaged, match=r"a/b\.parquet.*begins with _ or \."):
            query.run()
    (tmp_path / "a" / "b.parquet").unlink()
    for name in ("_b.parquet", ".b.parquet", "notes.txt", "b.parquet.tmp", "_temporary/b.parquet", ".x/b.parquet"):
        (tmp_path / "a" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "a" / name).write_bytes(b"anything")
    assert query.run() == []
    put(tmp_path / "a" / "sub" / "deep", "b.parquet", [2])
    assert query.run() == [(0, 2)]


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a", "a.parquet", [0])

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(archive_index, "read_entry", refuse)
    with pytest.raises(SourceDamaged, match=r"a/a\.parquet.*Permission denied"):
        Query(tmp_path)


def test_links(tmp_path: Path) -> None:
    put(tmp_path / "elsewhere", "b.parquet", [1])
    put(tmp_path / "a", "a.parquet", [0])
    (tmp_path / "a" / "b.parquet").symlink_to(tmp_path / "elsewhere" / "b.parquet")
    assert Query(tmp_path).run() == [(0, 0), (0, 1)]
    (tmp_path / "a" / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SourceInvalid, match=r"link to a directory: more"):
        Query(tmp_path)
    (tmp_path / "a" / "more").unlink()
    (tmp_path / "a" / "c.parquet").symlink_to(tmp_path / "nowhere.parquet")
    with pytest.raises(SourceDamaged, match=r"a/c\.parquet.*must lead to a file"):
        Query(tmp_path)


def test_a_file_that_goes_while_it_is_looked_at_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a", "a.parquet", [0])
    put(tmp_path / "a", "b.parquet", [1])
    real = archive_index.read_entry

    def late(handle: Any, path: str, *rest: Any) -> Any:
        if path == "b.parquet":
            (tmp_path / "a" / path).unlink()
            raise FileNotFoundError(path)
        return real(handle, path, *rest)

    monkeypatch.setattr(archive_index, "read_entry", late)
    assert Archive(str(tmp_path / "a")).partitions()["t", 0].range == (0, 1)


def test_a_file_of_the_same_length_is_looked_at_again(tmp_path: Path) -> None:
    """The index remembers footers by length: a file that was changed after it was written is not believed."""
    write_archive(tmp_path / "a", messages([0, 1, 2]))
    [file] = (tmp_path / "a").glob("*.parquet")
    running = Archive(str(tmp_path / "a"))
    assert running.partitions()["t", 0].range == (0, 3)
    length = file.stat().st_size
    put(tmp_path / "a", file.name, [1, 2, 3])
    later = (tmp_path / "a" / INDEX_NAME).stat().st_mtime + 10
    os.utime(file, (later, later))
    assert file.stat().st_size - length in range(-400, 400)
    index = json.loads((tmp_path / "a" / INDEX_NAME).read_text())
    index["files"][0]["bytes"] = file.stat().st_size
    (tmp_path / "a" / INDEX_NAME).write_text(json.dumps(index))
    os.utime(tmp_path / "a" / INDEX_NAME, (later - 10, later - 10))
    assert Archive(str(tmp_path / "a")).partitions()["t", 0].range == (1, 4)
    assert running.partitions()["t", 0].range == (1, 4)


@pytest.mark.parametrize("name", ["LastModified", "last_modified", "created"])
def test_a_file_of_the_same_length_is_looked_at_again_on_object_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Their time of a change is a date, and each calls it otherwise."""
    write_archive(tmp_path / "a", messages([0, 1, 2]))
    [file] = (tmp_path / "a").glob("*.parquet")
    index = json.loads((tmp_path / "a" / INDEX_NAME).read_text())
    written, sound = {INDEX_NAME: 10}, archive_index.files_below

    def listed(*place: Any) -> dict[str, dict[str, Any]]:
        return {
            path: {"size": info["size"], "name": info["name"], name: datetime.fromtimestamp(written.get(path, 5), UTC)}
            for path, info in sound(*place).items()
        }

    monkeypatch.setattr(archive_index, "files_below", listed)
    running = Archive(str(tmp_path / "a"))
    assert running.partitions()["t", 0].range == (0, 3)
    put(tmp_path / "a", file.name, [1, 2, 3])
    index["files"][0]["bytes"] = file.stat().st_size
    (tmp_path / "a" / INDEX_NAME).write_text(json.dumps(index))
    written[file.name] = 20
    assert Archive(str(tmp_path / "a")).partitions()["t", 0].range == (1, 4)
    assert running.partitions()["t", 0].range == (1, 4)


def test_a_step_back_between_files_is_still_a_gap(tmp_path: Path) -> None:
    put(tmp_path / "a", "a.parquet", [0, 1])
    query = Query(tmp_path)
    query.run()
    put(tmp_path / "a", "b.parquet", [1])
    with pytest.raises(SourceGap, match=r"b\.parquet"):
        query.run()


def test_the_reader_knows_the_kind_of_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a", "a.parquet", [0])
    typed = StructType([StructField("n", LongType())])
    source = archive(tmp_path / "a", format="typed", value="n long", topics=["t"])
    monkeypatch.setattr(ValueFormat, "fields", lambda self: typed)
    with pytest.raises(SourceInvalid, match="needs structs"):
        ArchiveStreamReader(source).latestOffset({"format": 1, "next": {}, "first": {}}, ReadAllAvailable())
