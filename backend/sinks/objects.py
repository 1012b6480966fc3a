"""Parquet files on object stores and other filesystems of fsspec, which cannot replace a directory in one step.

Layout::

    <root>/batch=<version>/results-<shard>-<rows>-<digest>.parquet   what readers see
    <root>/_rewind/newest.json        {"format": 1, "owner": "<query>/<kind>", "version": n, "rows": n, "digest": "..."}
    <results>/_rewind/outbox/         tasks write here

Tasks write to the outbox; the driver lets the store copy each file to its name (or moves it, where a copy can be seen
half done; or reads and writes it, where the store only begins a copy, as Azure's and Oracle's do), then replaces
`newest.json`, the record (`backend.sinks.table_sink`). So a file is there whole or not at all, once. What a reader can
see of a micro-batch while it is brought out, and after a crash until the query runs again, is a part of its shards: up
to the version of `newest.json` everything is whole.

A file's name is a function of what it holds. Where a micro-batch died on the way out and then makes other rows, files
are there that it does not make: the query stops by name. Every micro-batch looks for them, one without rows too: the
checkpoint may have been taken back behind the one that died, and nothing says so.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path

import fsspec
import msgspec
import pyarrow as pa

from backend.errors import OutputDiffers
from backend.places import check_apart
from backend.sinks.record import CAUSES
from backend.sinks.table_sink import Record, Table, TableSink, check_owner, reaching
from backend.sinks.tables import ERRORS, KINDS, RESULTS
from recovery.files import check_place, copies_later, is_object_store, move_file, open_files, read_struct

FORMAT = 1
_NEWEST = "_rewind/newest.json"
_OUTBOX = "_rewind/outbox"
_UUID = re.compile(r"-[0-9a-f]{32}(?=\.parquet$)")


class Newest(msgspec.Struct, frozen=True):
    """The file `newest.json`; version -1 before the first micro-batch."""

    owner: str
    version: int = -1
    rows: int = 0
    digest: str = ""
    format: int = FORMAT


def object_files(results: str | Path, errors: str | Path) -> TableSink:
    """Make what `backend.sinks.parquet_sink` returns for URIs."""
    places = {RESULTS: check_place(results, RESULTS).rstrip("/"), ERRORS: check_place(errors, ERRORS).rstrip("/")}
    check_apart([(ERRORS, places[ERRORS]), (RESULTS, places[RESULTS])])
    schemes = {place.partition("://")[0] for place in places.values()}
    if len(schemes) > 1:
        raise ValueError(f"errors={str(errors)!r}: must be on the filesystem of results={str(results)!r}")
    outputs = {kind: ObjectOutput(places[kind]) for kind in KINDS}
    return _Objects(outputs, {"kind": "parquet", **places}, outbox=f"{places[RESULTS]}/{_OUTBOX}")


class _Objects(TableSink):
    """Publishes file by file."""

    def _check_nothing(self, table: Table, version: int) -> None:
        assert isinstance(table, ObjectOutput), "there are no others"
        table.check_strays(version, ())


class ObjectOutput:
    """One directory; see `backend.sinks.table_sink.Table`.

    Args:
        place: URI.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._files = open_files(place)
        self._fs, self._root = fsspec.core.url_to_fs(place)
        self._owner = ""

    def owner(self) -> str | None:
        """Read whose it is."""
        found = self._newest()
        return found.owner if found is not None else None

    def open(self, schema: pa.Schema, owner: str) -> None:
        """Mark the directory where it has no mark."""
        with reaching(self.place):
            found = self._newest()
            # as many names as there are micro-batches: nobody asks for them where there is a mark
            empty = found is None and not any(name.startswith("batch=") for name in self._files.folders())
            check_owner(found.owner if found is not None else None, owner, empty=empty, where=self.place)
            if found is None:
                self._files.write(_NEWEST, [msgspec.json.encode(Newest(owner))])
        self._owner = owner

    def last(self) -> Record:
        """Read the record."""
        found = self._newest()
        return Record() if found is None else Record(found.version, found.rows, found.digest)

    def append(self, paths: Sequence[str], rows: Iterator[pa.RecordBatch], record: Record) -> None:
        """Copy or move the files to their names."""
        folder = f"batch={record.version}"
        names = {_UUID.sub("", path.rpartition("/")[2]): path for path in paths}
        with reaching(self.place):
            self.check_strays(record.version, names)
            self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
            for name, path in names.items():
                self._bring(path, f"{folder}/{name}")
            self._files.write(_NEWEST, [msgspec.json.encode(Newest(self._owner, *record))])

    def _bring(self, path: str, name: str) -> None:
        if copies_later(self._fs):
            source, file = path.rsplit("/", 1)
            self._files.write(name, open_files(source).chunks(file))
            return
        bring = self._fs.cp_file if is_object_store(self._fs) else partial(move_file, self._fs)
        bring(fsspec.core.url_to_fs(path)[1], f"{self._root}/{name}")

    def check_strays(self, version: int, names: Collection[str]) -> None:
        """Check that a micro-batch that is to be brought out has no files but some of those that it makes.

        Raises:
            OutputDiffers: It has others.
        """
        folder = f"batch={version}"
        with reaching(self.place):
            strays = sorted(set(self._files.list(folder)) - set(names))
        if strays:
            raise OutputDiffers(
                f"micro-batch {version} was published in part, ran again, and made other rows",
                where=f"{self.place}/{folder}",
                why=f"there are {len(strays)} files that it does not make, such as {strays[0]}: {CAUSES}",
                command=f"to publish what it makes now instead, delete {self.place}/{folder} and start the query again",
            )

    def _newest(self) -> Newest | None:
        with reaching(self.place):
            return read_struct(
                self._files,
                _NEWEST,
                Newest,
                FORMAT,
                what="the file that says what is published cannot be read",
                command="install the release that wrote it, or choose another directory",
            )
