"""Reading and writing the files of an archive: Arrow in, Arrow out, no Spark.

`read_range` and `write_archive` are inverse: what was written comes back in offset order, every row checked on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from backend.chunks import contains, is_coded, plain, rebuilt, repeated
from backend.errors import SourceInvalid
from backend.sources.archive_footer import REQUIRED, readable
from backend.sources.archive_index import Archive, Gap, check_absent, check_rows
from backend.sources.formats import MALFORMED
from backend.texts import one_line

if TYPE_CHECKING:
    from backend.sources.archive_reader import Piece

BATCH_ROWS = 131_072
"""Rows of one Arrow batch handed to Spark: large, because each batch costs a round trip."""
CODED_ROWS = 65_536
"""Texts are read as a dictionary from row groups that have so many rows on average."""
CODED_BYTES, CODED_DICTIONARY_BYTES = 4, 256 * 1024
"""What they may take there: a row with its share of the dictionary; the dictionary as it lies in the file."""
_ENCODINGS = frozenset({"PLAIN", "RLE", "BIT_PACKED", "PLAIN_DICTIONARY", "RLE_DICTIONARY"})
_SAMPLE_ROWS = 256
BATCH_BYTES = 16 * 1024 * 1024
"""Bytes of one, about: a worker has several copies of a batch at once."""

WRITE_SCHEMA = pa.schema(
    [
        pa.field("topic", pa.string(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("timestamp", pa.timestamp("ms", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
    ]
)
"""What `write_archive` takes and writes; `value` may be a struct instead (format `typed`)."""


def read_range(uri: str, wanted: Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Read the half-open offset range of one source partition in offset order.

    Args:
        uri: The archive.
        wanted: The range and what the index has for it.
        schema: Of the batches: `archive_index.REQUIRED` in this order, and `formats.MALFORMED` where values are
            structs. Fields of values that it does not have are not read. Texts that it has as a dictionary come as one
            where the file has a small one, else as texts.

    Raises:
        SourceGap: Rows are missing, come twice or step back; nothing of the batch concerned is handed out.
        SourceDamaged: A file cannot be read.
    """
    filesystem, root = fsspec.core.url_to_fs(uri)
    topic, partition, start, end, gaps = wanted.topic, wanted.partition, wanted.start, wanted.end, wanted.gaps
    expected = start
    for piece in wanted.slices:
        where = f"{root}/{piece.path}"
        with readable(where), filesystem.open(where, "rb") as handle:
            parquet = pq.ParquetFile(handle, page_checksum_verification=True)
            groups = _row_groups(parquet, start, end)
            likely = {"topic": topic, "partition": partition, "key": None}
            known = [path for path, value in likely.items() if _is_all(parquet, groups, path, value)]
            columns = [path for path in _columns(schema, parquet.schema_arrow) if path not in known]
            rows_at_once = batch_rows(parquet, groups, columns, len(topic.encode()) if "topic" in known else 0)
            coded = _coded(parquet, groups, schema) if rows_at_once >= CODED_ROWS else []
            own = schema if coded else pa.schema([field.with_type(plain(field.type)) for field in schema])
            if coded:
                parquet = pq.ParquetFile(
                    handle, metadata=parquet.metadata, page_checksum_verification=True, read_dictionary=coded
                )
            for batch in _batches(parquet, groups, columns, rows_at_once, coded=bool(coded)):
                rows = rows_of(batch, wanted)
                expected = check_rows(rows.column("offset"), expected, gaps, piece.path, topic, partition)
                if rows.num_rows:
                    yield cast(rows, own, where)
        check_absent(gaps, expected, min(end, piece.last + 1), piece.path, topic, partition)
    last = wanted.slices[-1].path if wanted.slices else uri
    check_absent(gaps, expected, end, last, topic, partition)


def _coded(parquet: pq.ParquetFile, groups: Sequence[int], schema: pa.Schema) -> list[str]:
    """Return the paths of texts to be read as dictionaries: those of the schema, if small in all of the row groups.

    Read as a dictionary, a few texts take a third of the time; many take several times as long.
    """
    here, paths = parquet.schema_arrow.field("value").type, []
    for field in schema.field("value").type if is_coded(schema.field("value").type) else ():
        at = here.get_field_index(field.name) if pa.types.is_struct(here) else -1
        if pa.types.is_dictionary(field.type):
            if at < 0 or here.field(at).type != pa.string() or "." in field.name:
                return []
            paths.append(f"value.{field.name}")
    rows = [parquet.metadata.row_group(group) for group in groups]
    if not paths or sum(group.num_rows for group in rows) < CODED_ROWS * len(groups):
        return []
    return paths if all(_are_few(_chunks(parquet, groups, path)) for path in paths) else []


def _are_few(texts: Sequence[pq.ColumnChunkMetaData]) -> bool:
    coded = all(
        one.has_dictionary_page
        and _ENCODINGS.issuperset(one.encodings)
        and one.data_page_offset - one.dictionary_page_offset <= CODED_DICTIONARY_BYTES
        for one in texts
    )
    return coded and sum(one.total_uncompressed_size - CODED_BYTES * one.num_values for one in texts) <= 0


def _batches(
    parquet: pq.ParquetFile, groups: Sequence[int], columns: list[str], rows: int, *, coded: bool
) -> Iterator[pa.RecordBatch]:
    """Give at most so many rows at once of row groups; one by one where there are dictionaries within nested values.

    Of several at once Arrow makes none.
    """
    kinds = {path: _type_of(parquet.schema_arrow, path) for path in columns}
    nested = [kind for path, kind in kinds.items() if "." in path or not pa.types.is_dictionary(kind)]
    if not coded and not any(contains(kind, pa.types.is_dictionary) for kind in nested):
        yield from parquet.iter_batches(rows, row_groups=groups, columns=columns, use_threads=False)
        return
    for group in groups:
        parts = -(-parquet.metadata.row_group(group).num_rows // rows)
        rows_of_each = -(-parquet.metadata.row_group(group).num_rows // max(1, parts))  # no small one at the end
        yield from parquet.iter_batches(max(1, rows_of_each), row_groups=[group], columns=columns, use_threads=False)


def _row_groups(parquet: pq.ParquetFile, start: int, end: int) -> list[int]:
    """Leave out the row groups whose statistics exclude the range."""
    found = [one.statistics for one in _chunks(parquet, range(parquet.num_row_groups), "offset")]
    return [
        number
        for number, one in enumerate(found)
        if one is None or not one.has_min_max or (one.min < end and one.max >= start)
    ]


def _chunks(parquet: pq.ParquetFile, groups: Sequence[int], path: str) -> list[pq.ColumnChunkMetaData]:
    """Return what the footer says of a column in row groups; it is per leaf, a struct before one shifts it."""
    schema = parquet.metadata.schema
    found = [number for number in range(parquet.metadata.num_columns) if schema.column(number).path == path]
    if not found:
        raise LookupError(f"there is no column {path!r}")
    return [parquet.metadata.row_group(group).column(found[0]) for group in groups]


def _is_all(parquet: pq.ParquetFile, groups: Sequence[int], path: str, value: object) -> bool:
    """Return whether the statistics say that a column has one value in every row of row groups: it need not be read.

    A minimum and a maximum that are cut are never the same.

    Args:
        parquet: The file.
        groups: Row groups.
        path: Of the column.
        value: None where every row is to be null.
    """
    for chunk in _chunks(parquet, groups, path):
        found = chunk.statistics
        if found is None or not found.has_null_count or found.null_count != (chunk.num_values if value is None else 0):
            return False
        if value is not None and not (found.has_min_max and found.min == found.max == value):
            return False
    return True


def batch_rows(parquet: pq.ParquetFile, groups: Sequence[int], columns: list[str], more: int) -> int:
    """Return the rows of an Arrow batch: fewer where the first ones are long, or those of a row group.

    Numbers and times are as wide in every row; of the others the first rows are looked at. Footers tell encoded
    lengths, which may be far less, and more where the first rows are short. `more` bytes each come to what is read.
    """
    schema = parquet.schema_arrow
    leaves = {path: _type_of(schema, path) for path in columns}
    wide: int = more + sum((kind.bit_width + 7) // 8 for kind in leaves.values() if pa.types.is_primitive(kind))
    others = [path for path, kind in leaves.items() if not pa.types.is_primitive(kind)]
    sample = parquet.iter_batches(_SAMPLE_ROWS, row_groups=groups[:1], columns=others, use_threads=False)
    first = next(sample, None) if others else None
    if first is not None:
        wide += -(-first.nbytes // max(1, first.num_rows))
    wide = max([wide, *(_encoded_bytes(parquet.metadata.row_group(group), columns) for group in groups)])
    return max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, wide)))


def _encoded_bytes(group: pq.RowGroupMetaData, columns: Sequence[str]) -> int:
    """Return how many bytes a row of a row group has in the file before compression, on average, of these columns."""
    chunks = (group.column(at) for at in range(group.num_columns))
    wanted = tuple(f"{path}." for path in columns)
    total = sum(one.total_uncompressed_size for one in chunks if f"{one.path_in_schema}.".startswith(wanted))
    return int(-(-total // max(1, group.num_rows)))


def _type_of(schema: pa.Schema, path: str) -> pa.DataType:
    name, _, inner = (path, "", "") if path in schema.names else path.partition(".")
    kind = schema.field(name).type
    at = kind.get_field_index(inner) if inner else -1  # -1 also where there are two of the name
    return kind.field(at).type if at >= 0 else kind


def _columns(schema: pa.Schema, here: pa.Schema) -> list[str]:
    """Return what is read of a file: of values that are structs the fields of the schema only."""
    value, found = schema.field("value").type, here.field("value").type
    if not pa.types.is_struct(value) or any("." in field.name for field in [*value, *found]):  # a path: another field
        return list(REQUIRED)
    named = {field.name for field in found}
    wanted = [field.name for field in value if field.name in named] or [field.name for field in found][:1]
    return [*REQUIRED[:-1], *(f"value.{name}" for name in wanted)]


def rows_of(batch: pa.RecordBatch, wanted: Piece) -> pa.RecordBatch:
    """Return the rows of a range, with the columns that were not read because it is known what they are."""
    offset, count, names = batch.column("offset"), batch.num_rows, batch.schema.names
    masks, ends = [], pc.min_max(offset)
    if not count or offset.null_count or ends["min"].as_py() < wanted.start or ends["max"].as_py() >= wanted.end:
        masks = [pc.greater_equal(offset, wanted.start), pc.less(offset, wanted.end)]
    if "partition" in names:
        masks.append(pc.equal(batch.column("partition"), wanted.partition))
    else:
        batch = batch.append_column("partition", pa.array(np.full(count, wanted.partition, np.int32)))
    if "topic" in names:
        masks.append(pc.equal(batch.column("topic").cast(pa.string()), wanted.topic))
    else:
        batch = batch.append_column("topic", repeated(wanted.topic, count))
    if "key" not in names:
        batch = batch.append_column("key", pa.nulls(count, pa.binary()))
    mask = reduce(pc.and_, masks) if masks else None
    return batch if mask is None or mask.true_count == len(mask) else batch.filter(mask)


def cast(batch: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return rows of a file in the types of a schema.

    A timestamp that Spark has no timestamp for is null. So is a value that does not fit; `MALFORMED` says why.

    Raises:
        SourceInvalid: The file has a column of a type that is never read as the schema's.
    """
    columns: dict[str, pa.Array] = {}
    for field in schema:
        if field.name == MALFORMED:
            continue
        column = batch.column(field.name)
        try:
            if field.name == "timestamp":
                columns[field.name], _ = _fitting(column, field.type)
            elif field.name == "value" and MALFORMED in schema.names:
                columns[field.name], columns[MALFORMED] = _fitting(column, field.type)
            else:
                columns[field.name] = _as(column, field.type)
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise SourceInvalid(
                f"a file has a column {field.name} of a type that cannot be read as the declared one",
                where=where,
                why=f"{column.type}; declared {field.type}: {one_line(str(error))}",
                command="declare the types that the files have, in the value= of archive(...)",
            ) from error
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


def _fitting(values: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.Array]:
    """Return a column of a file as another type, null where a value does not fit it, and the reasons why not."""
    try:
        return _as(values, kind), pa.nulls(len(values), pa.string())
    except pa.ArrowInvalid:
        if not (pa.types.is_struct(kind) and pa.types.is_struct(values.type)):
            made, misfits = _halved(values, kind)
            return made, pc.if_else(misfits, f"the value does not fit {kind}", pa.scalar(None, pa.string()))
    columns, why = [], pa.nulls(len(values), pa.string())
    flat = values.flatten()  # null where the struct is
    for field in kind:
        at = values.type.get_field_index(field.name)
        column, misfits = _halved(flat[at], field.type) if at >= 0 else (pa.nulls(len(values), field.type), None)
        columns.append(column)
        if misfits is not None:
            text = f"the value does not fit its field {field.name!r}, {field.type}"
            why = pc.if_else(pc.and_(misfits, why.is_null()), text, why)
    absent = pc.or_(values.is_null(), why.is_valid())
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=absent), why


def _halved(column: pa.Array, kind: pa.DataType) -> tuple[pa.Array, pa.BooleanArray]:
    """Return a column as another type, null where a value does not fit it, and where that is."""
    try:
        return _as(column, kind), pa.array(np.zeros(len(column), bool))
    except pa.ArrowInvalid:
        if len(column) == 1:
            return pa.nulls(1, kind), pa.array([True])
    half = len(column) // 2
    parts = [_halved(column[:half], kind), _halved(column[half:], kind)]
    return pa.concat_arrays([made for made, _ in parts]), pa.concat_arrays([misfits for _, misfits in parts])


def _as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column of a file as another type; a struct's fields that the file does not have are null."""
    if column.type == kind:
        return column
    if pa.types.is_struct(kind) and pa.types.is_struct(column.type):
        here = [field.name for field in column.type]
        flat = column.flatten()  # null where the struct is
        fields = [
            _as(flat[here.index(field.name)], field.type) if field.name in here else pa.nulls(len(column), field.type)
            for field in kind
        ]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=column.is_null())
    if (pa.types.is_list(kind) and _is_list(column.type)) or (pa.types.is_map(kind) and pa.types.is_map(column.type)):
        return rebuilt(column, kind, _as)
    if pa.types.is_decimal128(kind) and pa.types.is_integer(column.type):
        column = column.cast(pa.decimal256(20 + max(0, kind.scale), kind.scale))  # room for the widest of integers
    if pa.types.is_timestamp(kind):
        if pa.types.is_integer(column.type):
            column = column.cast(pa.int64()).cast(pa.timestamp("ms", tz="UTC"))  # milliseconds, as Kafka has them
        elif pa.types.is_timestamp(column.type) and column.type.unit == "ns" and kind.unit != "ns":
            per = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}[kind.unit]
            ticks = np.asarray(column.cast(pa.int64()).fill_null(0), np.int64) // per
            return pa.array(ticks, mask=np.asarray(column.is_null())).cast(kind)  # rounded down
    elif pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_fixed_size_binary(column.type):
        column = column.cast(pa.binary())
    return column.cast(kind)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def write_archive(
    directory: str | Path,
    rows: pa.Table,
    *,
    rows_per_file: int = 100_000,
    row_group_rows: int = 25_000,
    gaps: str = "refuse",
) -> list[Gap]:
    """Write messages as an archive: files per source partition in offset order, then the index.

    Args:
        directory: A local directory without archive files; made when missing.
        rows: `WRITE_SCHEMA`, in any order; `value` may be a struct.
        rows_per_file: Upper bound.
        row_group_rows: Smaller groups let a bounded micro-batch read less around its offsets.
        gaps: `refuse` or `declare`: what to do when offsets are missing between a partition's first and last.

    Returns:
        The gaps that were declared.

    Raises:
        SourceGap: Offsets are missing (with `refuse`) or come twice.
        ValueError: Of a bad option, or of files that are already there.
    """
    if gaps not in ("refuse", "declare"):
        raise ValueError(f"gaps={gaps!r}: allowed are 'refuse', 'declare'")
    if rows_per_file < 1 or row_group_rows < 1:
        raise ValueError(f"rows_per_file={rows_per_file}, row_group_rows={row_group_rows}: must be at least 1")
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    if next(target.rglob("*.parquet"), None) is not None:
        raise ValueError(f"directory={str(target)!r}: already holds Parquet files")
    value = rows.schema.field("value")
    schema = WRITE_SCHEMA.set(5, value) if pa.types.is_struct(value.type) else WRITE_SCHEMA
    rows = rows.select(schema.names).cast(schema)
    rows = rows.sort_by([("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")])
    coded = [path for path in _leaves(rows.schema) if path != "offset"]
    declared: list[Gap] = []
    pairs = rows.select(["topic", "partition"]).group_by(["topic", "partition"]).aggregate([]).to_pylist()
    for pair in sorted(pairs, key=lambda pair: (pair["topic"], pair["partition"])):
        topic, partition = pair["topic"], pair["partition"]
        part = rows.filter((pc.field("topic") == topic) & (pc.field("partition") == partition))
        if gaps == "declare":
            declared += _holes(part.column("offset").to_numpy(), topic, partition)
        for at in range(0, part.num_rows, rows_per_file):
            piece = part.slice(at, rows_per_file)
            name = f"{topic}-{partition}-{piece.column('offset')[0].as_py():020d}.parquet"
            pq.write_table(
                piece,
                target / name,
                row_group_size=row_group_rows,
                compression="zstd",
                write_page_checksum=True,
                use_dictionary=coded,
                column_encoding={"offset": "DELTA_BINARY_PACKED"},
            )
    Archive(str(target)).write_index(declared)
    return declared


def _leaves(schema: pa.Schema) -> list[str]:
    """Return the paths of a Parquet file's columns."""
    file = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), file)
    columns = pq.read_metadata(pa.BufferReader(file.getvalue())).schema
    return [columns.column(number).path for number in range(len(columns))]


def _holes(offsets: object, topic: str, partition: int) -> list[Gap]:
    values = np.asarray(offsets, dtype=np.int64)
    at = np.nonzero(np.diff(values) > 1)[0]
    return [Gap(topic, partition, int(values[i]) + 1, int(values[i + 1])) for i in at.tolist()]
