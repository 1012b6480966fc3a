"""One shard's RocksDB.

`raw_mode` is given to options, writers and batches alike: rocksdict's default mode pickles. Ingesting a hard link with
`move_files` takes 1 ms where copying 16 MB takes 50, and leaves the staged file's bytes as they were (measured).
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from rocksdict import Checkpoint, IngestExternalFileOptions, Rdict, WriteBatch, WriteOptions

from backend.errors import StateCorrupted, StateUnavailable, StorageFailed, StoreClosed
from backend.rocks import parts
from backend.rocks.blocks import check_blocks
from backend.rocks.errors import Named, translated
from backend.rocks.files import write_columns, write_staged
from backend.rocks.lock import Links, open_locked
from backend.rocks.options import RocksOptions, native_options
from backend.rocks.scans import Scan, check_ended, until
from backend.store.bounds import FORMAT_KEY, FORMAT_VALUE, check_format, rows_of
from backend.store.protocol import Changes, Seen, Staged, nothing, unseen
from backend.store.rows import StoreRows
from backend.store.staging import sync, verify
from backend.store.storage import storage

log = logging.getLogger("rewind.store")

_ROOM_WAIT_S = 30.0
_TOO_MANY = 10
"""Times the unmerged files that are wanted."""


class RocksStore:
    """One shard's RocksDB, opened by `RocksStore.open`; used by one thread, closed by its opener."""

    def __init__(self, path: Path, native: Rdict, options: RocksOptions, links: Links | None = None) -> None:
        self._path, self._options, self._links = path, options, links
        self._native: Rdict | None = native
        self._named = Named(path)
        self._scans: weakref.WeakSet[Scan] = weakref.WeakSet()
        self._sync = WriteOptions()
        self._sync.sync = True

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        options: RocksOptions | None = None,
        wait_s: float = 10.0,
        create: bool = True,
        read_only: bool = False,
    ) -> RocksStore:
        """Open the store in a directory, or make it; its parent must exist.

        Args:
            path: The directory; RocksDB owns everything in it.
            options: As this process runs RocksDB.
            wait_s: How long to wait for a LOCK that another process, or this one, holds.
            create: Make a new store when there is none.
            read_only: Take no LOCK and refuse writes: for looking into the store of a running job. What is committed
                later is not seen.

        Raises:
            StoreLocked: The LOCK was held longer than `wait_s`; names the holder when the system tells.
            StateUnavailable: There is no store, and none is to be made.
            StateCorrupted: The database's own files are damaged or missing.
            UnknownFormat: Another release wrote the store.
        """
        path, options = Path(path), options or RocksOptions()
        make = create and not read_only
        with storage(str(path)):
            fresh = not (path / "CURRENT").exists()
            left = [file.suffix in (".sst", ".log") for file in path.iterdir()] if fresh and path.is_dir() else []
            if any(left) and (path / "CURRENT").exists():  # another process has just made it
                fresh, left = False, []
        if any(left) or (left and not make):
            # RocksDB would make a new, empty database over the files of the old one
            raise StateCorrupted("the database's CURRENT file is missing", where=str(path))
        if fresh and not make:
            raise StateUnavailable(
                "there is no store here", where=str(path), command="rewind restore <checkpoint> <module:function>"
            )
        if fresh:
            with storage(str(path)):
                if path.exists() and not path.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(path))
                path.mkdir(mode=0o700, exist_ok=True)
        native = native_options(options)
        links = Links(path) if read_only and not os.access(path, os.W_OK) else None
        store = cls(path, open_locked(path, native, wait_s, read_only, links), options, links)
        try:
            found = store.get(FORMAT_KEY)
            if found is None and not read_only and next(store.scan(b"", None), None) is None:
                store.write(Changes([FORMAT_KEY], [FORMAT_VALUE]))
            else:
                check_format(found, str(path))
        except BaseException:
            store.close()
            raise
        return store

    @property
    def path(self) -> Path:
        """The directory."""
        return self._path

    @property
    def _open(self) -> Rdict:
        if self._native is None:
            raise StoreClosed("the store is closed", where=str(self._path))
        return self._native

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key, None when there is none. An empty value is a value."""
        native = self._open
        try:  # once per key: `Named` would take a third as long again
            return native.get(key)
        except Exception as error:
            raise translated(error, self._path) from error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, in their order; fastest when they are sorted."""
        native = self._open
        with self._named:
            found: list[bytes | None] = native.get(keys if type(keys) is list else list(keys))  # type: ignore[assignment]
            return found

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over `[start, end)` in key order (or against it), as it was when the scan began.

        A scan that is still open when the store closes raises `StoreClosed` at its next row.

        Raises:
            StateCorrupted: A block could not be read; raised by the scan where it happens.
        """
        scan = Scan(self._path, self._open, start, end, reverse)
        self._scans.add(scan)
        return scan

    def scan_arrays(
        self, start: bytes, end: bytes | None, *, limit: int | None = None
    ) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists, in key order: the fastest way to read.

        Args:
            start: First key, inclusive.
            end: Last key, exclusive; None to the end of the store.
            limit: Rows at most; as many come when there are so many.

        Raises:
            StateCorrupted: A block could not be read.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        native = self._open
        options = until(end)  # no snapshot: letting go of one has the bottom files with sequence numbers rewritten
        with self._named:
            add_key, add_value = keys.append, values.append
            for key, value in islice(native.items(from_key=start, read_opt=options), limit):
                add_key(key)  # type: ignore[arg-type]
                add_value(value)
            if limit is None or len(keys) < limit:
                check_ended(native.iter(options), keys[-1] if keys else None, start, self._path)
        return keys, values

    def write(self, changes: Changes) -> None:
        """Apply changes at once, atomically and durably: the standalone way, without Spark."""
        native = self._open
        batch = WriteBatch(raw_mode=True)
        with self._named:
            for key, value in zip(*rows_of(changes), strict=True):
                if value is None:
                    batch.delete(key)
                else:
                    batch[key] = value
            native.write(batch, self._sync)

    def stage(self, changes: Changes, path: Path, *, midway: Callable[[], object] = nothing) -> Staged:
        """Write changes to a new file at `path` and sync file and directory; the store itself is not touched.

        `midway` is called when half of the rows are written.

        Raises:
            FileExistsError: There is a file already: names of staged files are never used again.
        """
        _ = self._open
        return write_staged(path, *rows_of(changes), options=self._options, midway=midway)

    def stage_columns(self, rows: StoreRows, path: Path, *, seen: Seen = unseen) -> Staged:
        """Write rows that are columns, sorted and one or more, to a new file at `path` as `stage` does.

        `seen` is called with the keys and values of each part of them that was written, in order.
        """
        _ = self._open
        return write_columns(path, rows, options=self._options, seen=seen)

    def confirm(self, staged: Staged) -> None:
        """Check length and digest of a staged file, then apply it atomically. The file is left where it is.

        The database takes a hard link of the file where the filesystem can, so the two share their bytes; of a file of
        several parts it takes a copy of each, all or none of them. Confirming an older file again brings old values
        back: the caller compares commits first, under the LOCK.

        Raises:
            StateCorrupted: The file is missing or not the one that was staged; nothing was applied.
            StorageFailed: The disk does not give it, or has had no room for compactions for long.
            UnknownFormat: A newer release staged it.
        """
        native = self._open
        verify(staged)
        with storage(str(staged.path)):
            lengths = parts.part_lengths(staged.path)
        self._make_room(native)
        ingest = IngestExternalFileOptions()
        ingest.set_move_files(True)
        stem = f".{staged.path.name}.{uuid.uuid4().hex}"
        links = [staged.path.with_name(f"{stem}.{number}") for number in range(len(lengths) or 1)]
        try:
            with Named(staged.path):
                with storage(str(staged.path)):
                    start = 0
                    for length, link in zip(lengths, links, strict=False):
                        parts.part(staged.path, start, length, link)
                        start += length
                    if not lengths:
                        _link(staged.path, links[0])
                native.ingest_external_file([str(link) for link in links], ingest)
        finally:
            for link in links:
                link.unlink(missing_ok=True)

    def _make_room(self, native: Rdict) -> None:
        deadline = time.monotonic() + _ROOM_WAIT_S
        wanted = self._options.level0_files
        while (files := native.property_int_value("rocksdb.num-files-at-level0") or 0) >= wanted:
            if time.monotonic() >= deadline:
                self._check_merging(files, native.property_int_value("rocksdb.background-errors") or 0)
                return  # reads get slower, which is better than not to go on
            time.sleep(0.01)

    def _check_merging(self, files: int, failures: int) -> None:
        if not failures:
            return
        wanted = self._options.level0_files
        why = f"{failures} merges failed since it was opened; {files} unmerged files, wanted are fewer than {wanted}"
        if files < _TOO_MANY * wanted:
            log.warning("the database's files cannot be merged, which makes reads slower: %s: %s", self._path, why)
            return
        raise StorageFailed(
            "the database's files cannot be merged",
            where=str(self._path),
            why=why,
            command="see why in the file LOG there, make room (df -h), then start the query again",
        )

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `[start, end)`: the janitor's way to reclaim what a bound already hides; idempotent."""
        if start >= end:
            return
        native = self._open
        with self._named:
            native.delete_range(start, end)
            native.flush()  # into a file of its own: with another region's deletes it would span all between them

    def checkpoint(self, path: Path) -> None:
        """Make a consistent copy in a new directory at `path`, by hard links on the same filesystem.

        The copy is a store of its own. Its parent directory is synced, so the copy is durable on return.

        Raises:
            FileExistsError: There is something at `path` already.
        """
        native = self._open
        if path.exists():
            raise FileExistsError(f"a checkpoint needs a new directory: {path}")
        with self._named:
            Checkpoint(native).create_checkpoint(str(path))
        sync(path.parent)

    def check_files(self) -> None:
        """Check every block of every file of the database against its checksum, from the disk.

        Reads are no such check: RocksDB knows a file by what is written in it, wherever it lies, so the process's block
        cache answers for a copy, and for one damaged since; and what a range delete covers is passed over until a
        compaction reads it.

        Raises:
            StateCorrupted: A file is damaged or missing.
            StorageFailed: The disk does not give one.
        """
        for file in self._open.live_files():
            path = self._path / str(file["name"]).lstrip("/")
            try:
                check_blocks(path)
            except FileNotFoundError as error:
                raise StateCorrupted("a file of the database is missing", where=str(path)) from error

    def property(self, name: str) -> str | None:
        """Give one of RocksDB's own properties, such as `rocksdb.estimate-num-keys`; None when it has no such."""
        return self._open.property_value(name)

    def settle(self, wait_s: float = 1.0) -> None:
        """Wait, so long at most, for a compaction that runs.

        One that closing interrupts was for nothing, and begins again at each open: for a store that is opened for a
        moment again and again.
        """
        deadline = time.monotonic() + wait_s
        while self._open.property_int_value("rocksdb.num-running-compactions") and time.monotonic() < deadline:
            time.sleep(0.002)

    def close(self) -> None:
        """Release every handle and the LOCK; closing twice does nothing."""
        native, self._native = self._native, None
        if native is None:
            return
        for scan in list(self._scans):
            scan.release()
        try:
            with self._named:
                native.close()
        finally:
            del native
            if self._links is not None:
                self._links.clear()

    def __enter__(self) -> RocksStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _link(path: Path, link: Path) -> None:
    try:
        os.link(path, link)
    except OSError:  # no hard links on this filesystem
        shutil.copyfile(path, link)
