"""How RocksDB is run: bounded memory, and every option given again at each open.

Options are not remembered by the files. They are named for the column family too, or else a reopened store takes its
compression from its own options file and has neither bloom filter nor this process's cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rocksdict import BlockBasedOptions, Cache, DBCompressionType, DBRecoveryMode, Options, WriteBufferManager

_COMPRESSIONS = ("lz4", "none", "snappy", "zstd")
_LIMITS = {
    "block_cache_bytes": (1024 * 1024, 2**40),
    "write_buffer_bytes": (1024 * 1024, 2**40),
    "bloom_bits": (0, 32),
    "block_bytes": (1024, 4 * 1024 * 1024),
    "open_files": (16, 1_000_000),
    "background_jobs": (1, 64),
    "level0_files": (8, 1000),
    "merged_files": (2, 1000),
}


_NEVER = 2**30
"""More unmerged files than there can be."""
_LEVEL_BYTES = 8 * 1024 * 1024
_FILE_BYTES = 4 * 1024 * 1024
"""Size of the first level below the ingested files, and of its files; twice that in each level further down.

A micro-batch's metadata, and messages where they are few or keyed, overlap with everything: a few such files are merged
with all of the first level, at RocksDB's own 256 megabytes with forty times of what is new. The store is open for a
moment only, and a compaction that has not ended soon after was for nothing."""


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
        merged_files: Unmerged files at which they are merged with the first level. More of them are merged more seldom;
            single rows are found past them by bloom filters, scans read all of them.
    """

    block_cache_bytes: int = 64 * 1024 * 1024
    write_buffer_bytes: int = 32 * 1024 * 1024
    compression: str = "lz4"
    bloom_bits: int = 10
    block_bytes: int = 16 * 1024
    open_files: int = 256
    background_jobs: int = 2
    level0_files: int = 20
    merged_files: int = 8

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


def native_options(options: RocksOptions) -> Options:
    """Give the options as rocksdict takes them, for a database and for the files staged beside it."""
    cache, buffers = _budget(options.block_cache_bytes, options.write_buffer_bytes)
    table = BlockBasedOptions()
    table.set_block_cache(cache)
    table.set_block_size(options.block_bytes)
    table.set_format_version(5)  # the one that `check_blocks` reads
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
    native.set_level_zero_file_num_compaction_trigger(options.merged_files)
    # closing flushes, and waits till a flush would not slow writes down: for ever on a full disk, which nothing merges
    # on. `RocksStore.confirm` is what bounds unmerged files
    native.set_level_zero_slowdown_writes_trigger(_NEVER)
    native.set_level_zero_stop_writes_trigger(_NEVER)
    native.set_soft_pending_compaction_bytes_limit(0)
    native.set_hard_pending_compaction_bytes_limit(0)
    native.set_max_bytes_for_level_base(_LEVEL_BYTES)
    native.set_target_file_size_base(_FILE_BYTES)
    native.set_target_file_size_multiplier(2)
    native.set_max_open_files(options.open_files)
    native.set_max_background_jobs(options.background_jobs)
    native.set_max_file_opening_threads(1)  # by default sixteen are started and ended at each open
    # a record cut short by a crash is at the log's end; anything else is damage, and not to be skipped in silence
    native.set_wal_recovery_mode(DBRecoveryMode.tolerate_corrupted_tail_records())
    native.set_keep_log_file_num(2)
    native.set_max_log_file_size(1024 * 1024)
    native.set_max_manifest_file_size(4 * 1024 * 1024)
    native.set_stats_dump_period_sec(0)
    native.set_stats_persist_period_sec(0)
    return native
