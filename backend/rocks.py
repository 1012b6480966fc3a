"""The RocksDB store: the only module that imports rocksdict.

What was measured of rocksdict 0.3.29, and is guarded against here:

* `items`, `keys` and `values` end without an error at a corrupt block. Only a raw iterator has a status, so every scan
  ends by asking one (`_ended`), and a scan that stopped early is `StateCorrupted`, never a short result.
* `set_iterate_lower_bound` sets the upper bound: scans against the order check their start themselves.
* `close` keeps the LOCK while an iterator or a snapshot lives: scans that are still open are released first.
* An iterator points to the upper bound inside its `ReadOptions` and does not keep them: once they are let go of, the
  scan ends early and silently. Every scan keeps its own.
* The default mode pickles; `raw_mode` is given to options, writers and batches alike. Options are not remembered by the
  files: `RocksOptions` is applied again at every open, and named for the column family, or else a reopened store takes
  compression from its own options file, and has neither bloom filter nor this process's cache.
* Ingesting a hard link with `move_files` takes 1 ms where copying 16 MB takes 50, and leaves the staged file's bytes
  as they were.
"""

from __future__ import annotations

import gc
import os
import random
import re
import shutil
import time
import uuid
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import rocksdict
from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    IngestExternalFileOptions,
    Options,
    Rdict,
    ReadOptions,
    SstFileWriter,
    WriteBatch,
    WriteBufferManager,
    WriteOptions,
)

from backend.bounds import FORMAT_KEY, FORMAT_VALUE, check_format, rows_of
from backend.errors import (
    KeyInvalid,
    RewindError,
    StateCorrupted,
    StateUnavailable,
    StoreClosed,
    StoreLocked,
    ValueInvalid,
)
from backend.staging import VERIFY, seal, sync_directory, verify
from backend.store import Changes, Staged

_COMPRESSIONS = ("lz4", "none", "snappy", "zstd")
_ROOM_WAIT_S = 30.0
_LOCK_HELD = re.compile(r"lock hold by current process|While lock file")


_LIMITS = {
    "block_cache_bytes": (1024 * 1024, 2**40),
    "write_buffer_bytes": (1024 * 1024, 2**40),
    "bloom_bits": (0, 32),
    "block_bytes": (1024, 4 * 1024 * 1024),
    "open_files": (16, 1_000_000),
    "background_jobs": (1, 64),
    "level0_files": (8, 1000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RocksOptions:
    """How RocksDB is run; everything is bounded. Applied at each open, none of it is stored.

    Attributes:
        block_cache_bytes: One block cache per process, shared by the stores that name the same sizes; index and filter
            blocks are in it.
        write_buffer_bytes: Memory of all write buffers of the process.
        compression: `lz4`, `none`, `snappy` or `zstd`.
        bloom_bits: Bits per key of the bloom filters; 0 for none.
        block_bytes: Size of a data block before compression.
        open_files: Files kept open per store.
        background_jobs: Threads for compaction and flush per store.
        level0_files: Unmerged files at which `confirm` first waits for the compaction that merges them: every ingested
            file is one more, and a store that is closed soon after it was opened could put compactions off for ever.
    """

    block_cache_bytes: int = 64 * 1024 * 1024
    write_buffer_bytes: int = 32 * 1024 * 1024
    compression: str = "lz4"
    bloom_bits: int = 10
    block_bytes: int = 16 * 1024
    open_files: int = 256
    background_jobs: int = 2
    level0_files: int = 20

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSIONS:
            raise ValueError(f"compression={self.compression!r}: allowed are {', '.join(_COMPRESSIONS)}")
        for name, (low, high) in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name}={value!r}: an int from {low} to {high} is allowed")


@lru_cache(maxsize=8)
def _budget(cache_bytes: int, buffer_bytes: int) -> tuple[Cache, WriteBufferManager]:
    """Give the process's block cache and write-buffer budget of these sizes."""
    return Cache(cache_bytes), WriteBufferManager(buffer_bytes, False)


def _options(options: RocksOptions) -> Options:
    cache, buffers = _budget(options.block_cache_bytes, options.write_buffer_bytes)
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_block_size(options.block_bytes)
    table.set_format_version(5)
    table.set_cache_index_and_filter_blocks(True)
    table.set_pin_l0_filter_and_index_blocks_in_cache(True)
    if options.bloom_bits:
        table.set_bloom_filter(options.bloom_bits, False)
    native = Options(raw_mode=True)
    native.create_if_missing(True)
    native.set_block_based_table_factory(table)
    native.set_compression_type(getattr(DBCompressionType, options.compression)())
    native.set_write_buffer_manager(buffers)
    native.set_write_buffer_size(max(64 * 1024, options.write_buffer_bytes // 4))
    native.set_max_open_files(options.open_files)
    native.set_max_background_jobs(options.background_jobs)
    native.set_keep_log_file_num(2)
    native.set_max_log_file_size(1024 * 1024)
    native.set_max_manifest_file_size(4 * 1024 * 1024)
    native.set_stats_dump_period_sec(0)
    native.set_stats_persist_period_sec(0)
    return native


class RocksStore:
    """One shard's RocksDB, opened by `RocksStore.open`; used by one thread, closed by its opener."""

    def __init__(self, path: Path, native: Rdict, options: RocksOptions) -> None:
        self._path, self._options = path, options
        self._native: Rdict | None = native
        self._scans: weakref.WeakSet[_Scan] = weakref.WeakSet()
        self._sync = WriteOptions()
        self._sync.sync = True

    @classmethod
    def open(
        cls,
        path: Path,
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
        options = options or RocksOptions()
        fresh = not (path / "CURRENT").exists()
        if fresh and (read_only or not create):
            raise StateUnavailable("there is no store here", where=str(path), command="rewind restore <checkpoint>")
        store = cls(path, _open_locked(path, _options(options), wait_s, read_only), options)
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
        try:
            return native.get(key)
        except Exception as error:
            raise _translated(error, self._path) from error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values of many keys, in their order; fastest when they are sorted."""
        native = self._open
        try:
            found: list[bytes | None] = native.get(keys if type(keys) is list else list(keys))  # type: ignore[assignment]
            return found
        except Exception as error:
            raise _translated(error, self._path) from error

    def scan(self, start: bytes, end: bytes | None, *, reverse: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Iterate over `[start, end)` in key order (or against it), as it was when the scan began.

        A scan that is still open when the store closes raises `StoreClosed` at its next row.

        Raises:
            StateCorrupted: A block could not be read; raised by the scan where it happens.
        """
        native = self._open
        options = _until(end)
        scan = _Scan(self._path, native.iter(options), options, start, end, reverse)
        self._scans.add(scan)
        return scan

    def scan_arrays(self, start: bytes, end: bytes | None) -> tuple[list[bytes], list[bytes]]:
        """Return keys and values of `[start, end)` as two lists, in key order: the fastest way to read.

        Raises:
            StateCorrupted: A block could not be read.
        """
        keys: list[bytes] = []
        values: list[bytes] = []
        snapshot = self._open.snapshot()
        options = _until(end)
        try:
            add_key, add_value = keys.append, values.append
            for key, value in snapshot.items(from_key=start, read_opt=options):
                add_key(key)  # type: ignore[arg-type]
                add_value(value)
            _ended(snapshot.iter(options), keys[-1] if keys else None, start, self._path)
        except Exception as error:
            raise _translated(error, self._path) from error
        finally:
            del snapshot
        return keys, values

    def write(self, changes: Changes) -> None:
        """Apply changes at once, atomically and durably: the standalone way, without Spark."""
        native = self._open
        batch = WriteBatch(raw_mode=True)
        try:
            for key, value in zip(*rows_of(changes), strict=True):
                if value is None:
                    batch.delete(key)
                else:
                    batch[key] = value
            native.write(batch, self._sync)
        except Exception as error:
            raise _translated(error, self._path) from error

    def stage(self, changes: Changes, path: Path) -> Staged:
        """Write changes to a new SST file at `path` and sync file and directory; the store itself is not touched.

        Raises:
            FileExistsError: There is a file already: names of staged files are never used again.
        """
        _ = self._open
        return write_sst(path, *rows_of(changes), options=self._options)

    def confirm(self, staged: Staged) -> None:
        """Check length and digest of a staged file, then apply it atomically. The file is left where it is.

        The database takes a hard link of the file where the filesystem can, so the two share their bytes. Confirming an
        older file again brings old values back: the caller compares commits first, under the LOCK.

        Raises:
            StateCorrupted: The file is missing or not the one that was staged; nothing was applied.
        """
        native = self._open
        verify(staged)
        self._make_room(native)
        link = staged.path.with_name(f".{staged.path.name}.{uuid.uuid4().hex}")
        try:
            os.link(staged.path, link)
        except OSError:  # no hard links on this filesystem
            shutil.copyfile(staged.path, link)
        ingest = IngestExternalFileOptions()
        ingest.set_move_files(True)
        try:
            native.ingest_external_file([str(link)], ingest)
        except Exception as error:
            raise _translated(error, staged.path) from error
        finally:
            link.unlink(missing_ok=True)

    def _make_room(self, native: Rdict) -> None:
        deadline = time.monotonic() + _ROOM_WAIT_S
        while (native.property_int_value("rocksdb.num-files-at-level0") or 0) >= self._options.level0_files:
            if time.monotonic() >= deadline:
                return  # reads get slower, which is better than not to go on
            time.sleep(0.01)

    def delete_range(self, start: bytes, end: bytes) -> None:
        """Delete `[start, end)`: the janitor's way to reclaim what a bound already hides; idempotent."""
        if start >= end:
            return
        native = self._open
        try:
            native.delete_range(start, end)
        except Exception as error:
            raise _translated(error, self._path) from error

    def checkpoint(self, path: Path) -> None:
        """Make a consistent copy in a new directory at `path`, by hard links on the same filesystem.

        The copy is a store of its own. Its parent directory is synced, so the copy is durable on return.

        Raises:
            FileExistsError: There is something at `path` already.
        """
        native = self._open
        if path.exists():
            raise FileExistsError(f"a checkpoint needs a new directory: {path}")
        try:
            Checkpoint(native).create_checkpoint(str(path))
        except Exception as error:
            raise _translated(error, self._path) from error
        sync_directory(path.parent)

    def property(self, name: str) -> str | None:
        """Give one of RocksDB's own properties, such as `rocksdb.estimate-num-keys`; None when it has no such."""
        return self._open.property_value(name)

    def close(self) -> None:
        """Release every handle and the LOCK; closing twice does nothing."""
        native, self._native = self._native, None
        if native is None:
            return
        for scan in list(self._scans):
            scan.release()
        try:
            native.close()
        except Exception as error:
            raise _translated(error, self._path) from error
        finally:
            del native

    def __enter__(self) -> RocksStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Scan(Iterator[tuple[bytes, bytes]]):
    """A scan over a raw iterator, which knows whether it ended or failed; lets go of it at its end or at `release`."""

    def __init__(
        self,
        path: Path,
        native: rocksdict.RdictIter,
        options: ReadOptions,
        start: bytes,
        end: bytes | None,
        reverse: bool,
    ) -> None:
        self._path, self._start, self._reverse = path, start, reverse
        self._options = options  # they own the bytes of the upper bound, to which the iterator only points
        self._native: rocksdict.RdictIter | None = native
        self._done = False
        if not reverse:
            native.seek(start)
        elif end is None:
            native.seek_to_last()
        else:
            native.seek_for_prev(end)  # the upper bound keeps `end` itself out

    def __next__(self) -> tuple[bytes, bytes]:
        native = self._native
        if native is None:
            if self._done:
                raise StopIteration
            raise StoreClosed("the store was closed during a scan", where=str(self._path))
        if not native.valid():
            self._done, self._native = True, None
            try:
                native.status()
            except Exception as error:
                raise _translated(error, self._path) from error
            raise StopIteration
        key: bytes = native.key()
        if self._reverse and key < self._start:
            self._done, self._native = True, None
            raise StopIteration
        row = key, native.value()
        if self._reverse:
            native.prev()
        else:
            native.next()
        return row

    def release(self) -> None:
        """Let go of the database."""
        self._native = None


def write_sst(
    path: Path, keys: Sequence[bytes], values: Sequence[bytes | None], *, options: RocksOptions | None = None
) -> Staged:
    """Write sorted rows to a new SST file, without a store: None is a point delete. File and directory are synced.

    Raises:
        FileExistsError: There is a file already.
        KeyInvalid: The keys are not strictly increasing; the file is gone again.
    """
    if path.exists():
        raise FileExistsError(f"a staged file is never written over: {path}")
    writer = SstFileWriter(_options(options or RocksOptions()))
    try:
        writer.open(str(path))
        if None in values:
            for key, value in zip(keys, values, strict=True):
                if value is None:
                    del writer[key]
                else:
                    writer[key] = value
        else:
            deque(map(writer.__setitem__, keys, values), maxlen=0)  # a loop without bytecode: this is the hot path
        writer.finish()
    except Exception as error:
        path.unlink(missing_ok=True)
        raise _translated(error, path) from error
    return seal(path, len(keys))


def _until(end: bytes | None) -> ReadOptions:
    options = ReadOptions()
    if end is not None:
        options.set_iterate_upper_bound(end)
    return options


def _ended(probe: rocksdict.RdictIter, last: bytes | None, start: bytes, path: Path) -> None:
    """Check that rows which ended after `last` ended because there are no more, not because of a corrupt block."""
    probe.seek(start if last is None else last)
    if last is not None and probe.valid():
        probe.next()
    if not probe.valid():
        probe.status()
        return
    raise StateCorrupted("a scan stopped before its end", where=str(path), why=f"after {last!r}", command=VERIFY)


def _open_locked(path: Path, native: Options, wait_s: float, read_only: bool) -> Rdict:
    access = AccessType.read_only(False) if read_only else AccessType.read_write()
    deadline = time.monotonic() + wait_s
    pause_s = 0.005
    while True:
        try:
            return Rdict(str(path), native, column_families={"default": native}, access_type=access)
        except Exception as error:
            if not _LOCK_HELD.search(str(error)):
                raise _translated(error, path) from error
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StoreLocked(
                    "another process holds the store's LOCK",
                    where=str(path),
                    why=f"waited {wait_s:g} s; {_holder(path, str(error))}",
                    command="end the other process, or wait for it, and run again",
                ) from error
        gc.collect(0)  # a forgotten iterator of this process may hold it
        time.sleep(min(left_s, pause_s * random.uniform(0.5, 1.5)))
        pause_s = min(0.25, pause_s * 2)


def _holder(path: Path, text: str) -> str:
    """Say who holds the LOCK, as far as the system tells."""
    if "current process" in text:
        return f"held by this process, {os.getpid()}"
    try:
        inode = (path / "LOCK").stat().st_ino
        table = Path("/proc/locks").read_text(encoding="ascii")
    except OSError:
        return "the holder is not known"
    for line in table.splitlines():
        words = line.split()
        if len(words) >= 6 and words[5].rpartition(":")[2] == str(inode) and words[4] != "0":
            return f"held by process {words[4]}"
    return "the holder is not known"


def _translated(error: Exception, path: Path) -> Exception:
    """Give the named error for what rocksdict raised: the one place that knows its texts."""
    text = str(error)
    if isinstance(error, ValueError) and "raw mode" in text:
        return ValueInvalid("a value must be bytes", where=str(path), why=text)
    if isinstance(error, RewindError | OSError | ValueError):
        return error
    if isinstance(error, rocksdict.DbClosedError):
        return StoreClosed("the store is closed", where=str(path))
    if isinstance(error, KeyError | TypeError) or "strict ascending order" in text:
        return KeyInvalid("keys must be bytes, sorted where a file is written", where=str(path), why=text)
    if text.startswith("Corruption") or "No such file or directory" in text:
        return StateCorrupted("the database cannot be read", where=str(path), why=text, command=VERIFY)
    return OSError(f"RocksDB at {path}: {text}")
