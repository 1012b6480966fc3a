"""What only RocksDB can get wrong: options, the LOCK, damaged files, formats."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from backend.errors import (
    KeyInvalid,
    StateCorrupted,
    StateUnavailable,
    StorageFailed,
    StoreClosed,
    StoreLocked,
    UnknownFormat,
    ValueInvalid,
)
from backend.rocks import RocksOptions, RocksStore, write_staged
from backend.rocks.files import write_columns
from backend.rocks.lock import Links
from backend.store.bounds import FORMAT_KEY, stored_bounds
from backend.store.protocol import Changes
from backend.store.rows import StoreRows
from backend.store.staging import seal
from backend.stores.key_value_store import KeyValueStore

ROWS = 20_000
KEYS = [b"\x01" + number.to_bytes(8, "big") for number in range(ROWS)]
VALUES = [f"value {number} ".encode() * 5 for number in range(ROWS)]


def filled(path: Path, options: RocksOptions | None = None) -> RocksStore:
    store = RocksStore.open(path / "db", options=options)
    store.confirm(store.stage(Changes(KEYS, VALUES), path / "rows.sst"))
    return store


def test_bloom_filter_cache_and_compression_survive_a_reopen(tmp_path: Path) -> None:
    options = RocksOptions(block_cache_bytes=3 * 2**20, compression="zstd", bloom_bits=12, block_bytes=8192)
    filled(tmp_path, options).close()
    for _ in range(2):
        store = RocksStore.open(tmp_path / "db", options=options)
        # files that this open makes: a flush of a new row, and a compaction of all
        store.write(Changes([b"\x02"], [b"x"]))
        table = newest_options(tmp_path / "db")
        assert "compression=kZSTD" in table
        assert "filter_policy=bloomfilter" in table
        assert "block_size=8192" in table
        assert "cache_index_and_filter_blocks=true" in table
        assert store.property("rocksdb.block-cache-capacity") == str(3 * 2**20)
        assert "filter block size=0" not in store.property("rocksdb.aggregated-table-properties")
        store.close()
    # and without them RocksDB would not remember
    plain = RocksStore.open(tmp_path / "db", options=RocksOptions(compression="none", bloom_bits=0))
    assert "compression=kNoCompression" in newest_options(tmp_path / "db")
    assert "filter_policy=nullptr" in newest_options(tmp_path / "db")
    assert "level0_slowdown_writes_trigger=1073741824" in newest_options(tmp_path / "db"), "or else closing may wait"
    assert "level0_stop_writes_trigger=1073741824" in newest_options(tmp_path / "db")
    assert "soft_pending_compaction_bytes_limit=0" in newest_options(tmp_path / "db")
    assert "hard_pending_compaction_bytes_limit=0" in newest_options(tmp_path / "db")
    assert plain.get(KEYS[7]) == VALUES[7]
    plain.close()


def newest_options(path: Path) -> str:
    return max(path.glob("OPTIONS-*"), key=lambda file: file.name).read_text().replace(" ", "")


def test_stores_of_a_process_share_one_cache(tmp_path: Path) -> None:
    options = RocksOptions(block_cache_bytes=5 * 2**20)
    one, two = filled(tmp_path, options), RocksStore.open(tmp_path / "two", options=options)
    one.get_many(KEYS)
    assert two.property("rocksdb.block-cache-usage") == one.property("rocksdb.block-cache-usage") != "0"
    one.close()
    two.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_cache_bytes", 0),
        ("write_buffer_bytes", -1),
        ("compression", "gzip"),
        ("bloom_bits", 33),
        ("block_bytes", 1.5),
        ("open_files", True),
        ("background_jobs", 0),
        ("merged_files", 1),
    ],
)
def test_a_bad_option_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value!r}.*allowed"):
        RocksOptions(**{name: value})  # type: ignore[arg-type]


# ---- the LOCK

HOLD = """
import sys, time
from pathlib import Path
from backend.rocks import RocksStore
store = RocksStore.open(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
store.close()
print("closed", flush=True)
sys.stdin.readline()
"""


def test_two_writers_wait_and_then_name_the_holder(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None
    try:
        assert other.stdout.readline() == "held\n"
        started = time.monotonic()
        with pytest.raises(StoreLocked, match=rf"held by process {other.pid}\b") as raised:
            RocksStore.open(tmp_path / "db", wait_s=0.2)
        assert time.monotonic() - started >= 0.2
        assert str(tmp_path / "db") in str(raised.value)
        reader = RocksStore.open(tmp_path / "db", read_only=True)
        assert reader.get(FORMAT_KEY) == b"1"
        reader.close()
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "closed\n"
        RocksStore.open(tmp_path / "db", wait_s=5).close()
    finally:
        other.kill()
        other.wait()


def test_a_store_of_this_process_holds_the_lock_too(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    with pytest.raises(StoreLocked, match="held by this process"):
        RocksStore.open(tmp_path / "db", wait_s=0.01)
    assert store.get(FORMAT_KEY) == b"1"
    store.close()


def test_close_releases_the_lock_whatever_is_still_held(tmp_path: Path) -> None:
    store = filled(tmp_path)
    scans = [store.scan(b"\x01", None), store.scan(b"\x01", None, reverse=True), store.scan(b"\x05", None)]
    next(scans[0])
    next(scans[1])
    keys, _ = store.scan_arrays(b"\x01", KEYS[100])
    store.close()
    again = RocksStore.open(tmp_path / "db", wait_s=0)
    again.close()
    assert len(keys) == 100
    for scan in scans:
        with pytest.raises(StoreClosed):
            next(scan)


def test_a_failed_open_releases_the_lock(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    store.write(Changes([FORMAT_KEY], [b"99"]))
    store.close()
    for _ in range(2):
        with pytest.raises(UnknownFormat, match="format 99, this release reads 1"):
            RocksStore.open(tmp_path / "db", wait_s=0)


def test_a_store_that_others_wrote_is_refused(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    store.write(Changes([FORMAT_KEY, b"\x01a"], [None, b"1"]))
    store.close()
    with pytest.raises(UnknownFormat, match="no format row"):
        RocksStore.open(tmp_path / "db")


def test_no_store_is_made_where_none_is_wanted(tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises(StateUnavailable):
            RocksStore.open(tmp_path / "db", **options)  # type: ignore[arg-type]
        assert list(tmp_path.iterdir()) == []


def test_a_read_only_store_refuses_writes(tmp_path: Path) -> None:
    filled(tmp_path).close()
    store = RocksStore.open(tmp_path / "db", read_only=True)
    assert store.get(KEYS[3]) == VALUES[3]
    with pytest.raises(OSError, match="read only"):
        store.write(Changes([b"\x01a"], [b"1"]))
    store.close()


@pytest.fixture
def may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database where this process may only read; gives the directory for temporary files, which is empty."""
    monkeypatch.setattr("backend.rocks.store.os.access", lambda *_: False)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


def test_a_reader_that_may_not_write_leaves_nothing_there(tmp_path: Path, may_not_write: Path) -> None:
    """RocksDB and rocksdict write beside what they only read, which a read-only disk refuses."""
    filled(tmp_path).close()
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in (tmp_path / "db").iterdir()}
    with RocksStore.open(tmp_path / "db", read_only=True) as store:
        assert store.scan_arrays(b"\x01", None) == (KEYS, VALUES)
        store.check_files()
        assert len(list(may_not_write.iterdir())) == 1
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in (tmp_path / "db").iterdir()} == before
    assert list(may_not_write.iterdir()) == []
    (tmp_path / "db" / "CURRENT").write_text("MANIFEST-999999\n")
    with pytest.raises(StateCorrupted) as caught:
        RocksStore.open(tmp_path / "db", read_only=True)
    assert caught.value.where == str(tmp_path / "db")
    assert list(may_not_write.iterdir()) == []


def test_a_reader_that_may_not_write_makes_its_links_anew_where_the_writer_went_on(
    tmp_path: Path, may_not_write: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).close()
    make, made = Links.make, list[str]()

    def outdated(self: Links) -> str:
        made.append(make(self))
        if len(made) == 1:  # a new MANIFEST, and the one that is linked is gone
            RocksStore.open(tmp_path / "db").close()
            for link in Path(made[0]).glob("MANIFEST-*"):
                link.unlink()
        return made[-1]

    monkeypatch.setattr(Links, "make", outdated)
    with RocksStore.open(tmp_path / "db", read_only=True) as store:
        assert store.scan_arrays(b"\x01", None) == (KEYS, VALUES)
    assert len(made) == 2
    assert list(may_not_write.iterdir()) == []


def test_a_reader_that_may_write_nowhere_says_so(tmp_path: Path, may_not_write: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "db" / "rocksdict-config.json").unlink()  # which rocksdict can do without
    with RocksStore.open(tmp_path / "db", read_only=True) as store:
        assert store.get(KEYS[3]) == VALUES[3]
    may_not_write.rmdir()
    with pytest.raises(StorageFailed, match=r"links.* cannot be made.*set TMPDIR") as caught:
        RocksStore.open(tmp_path / "db", read_only=True)
    assert isinstance(caught.value.__cause__, OSError)


def test_a_disk_that_rocksdict_may_not_write_has_a_name(tmp_path: Path) -> None:
    filled(tmp_path).close()
    config = tmp_path / "db" / "rocksdict-config.json"
    config.unlink()
    config.mkdir()
    with pytest.raises(StorageFailed, match="a file lies where a directory must be"):
        RocksStore.open(tmp_path / "db", read_only=True)


def test_a_reader_looks_again_when_a_compaction_took_a_file_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).close()
    (file,) = (path for path in (tmp_path / "db").glob("*.sst") if path.stat().st_size > 10_000)
    file.rename(tmp_path / "away")

    def found_again(_: float) -> None:
        if (tmp_path / "away").exists():
            (tmp_path / "away").rename(file)

    monkeypatch.setattr("backend.rocks.lock.time.sleep", found_again)
    with RocksStore.open(tmp_path / "db", read_only=True) as store:
        assert store.scan_arrays(b"\x01", None) == (KEYS, VALUES)
    file.unlink()
    with pytest.raises(StateCorrupted):  # and not for ever
        RocksStore.open(tmp_path / "db", read_only=True)


# ---- reads


def test_many_bounds_are_all_read_back(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    bounds = {region: bytes([region]) + b"x" for region in range(1, 0xFF)}
    store.write(Changes([], [], bounds))
    assert stored_bounds(store) == bounds
    store.close()


# ---- damage


@pytest.fixture
def damaged(tmp_path: Path) -> RocksStore:
    """A store one of whose blocks, in the middle, has a flipped byte."""
    filled(tmp_path, RocksOptions(compression="none")).close()
    (file,) = (path for path in (tmp_path / "db").glob("*.sst") if path.stat().st_size > 100_000)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()  # the staged file shares its bytes
    file.write_bytes(data)
    return RocksStore.open(tmp_path / "db", options=RocksOptions(compression="none"))


def test_a_damaged_block_is_found_on_every_read_path(damaged: RocksStore) -> None:
    for read in (
        lambda: damaged.get_many(KEYS),
        lambda: [damaged.get(key) for key in KEYS],
        lambda: list(damaged.scan(b"\x01", None)),
        lambda: list(damaged.scan(b"\x01", b"\x02")),
        lambda: list(damaged.scan(b"\x01", b"\x02", reverse=True)),
        lambda: damaged.scan_arrays(b"\x01", b"\x02"),
        lambda: damaged.scan_arrays(KEYS[10], None),
    ):
        with pytest.raises(StateCorrupted, match="checksum mismatch"):
            read()
    # what lies elsewhere can be read
    assert damaged.get(KEYS[0]) == VALUES[0]
    assert damaged.scan_arrays(KEYS[-5], None) == (KEYS[-5:], VALUES[-5:])
    damaged.close()


def test_a_scan_that_begins_in_a_damaged_block_is_not_empty(damaged: RocksStore) -> None:
    good = list(zip(KEYS, VALUES, strict=True))
    broken = []
    for at in range(ROWS):
        try:
            assert damaged.get(KEYS[at]) == good[at][1]
        except StateCorrupted:
            broken.append(at)
    assert 10 < len(broken) < 400
    for at in (broken[0], broken[-1]):
        with pytest.raises(StateCorrupted):
            damaged.scan_arrays(KEYS[at], KEYS[at + 1])
        with pytest.raises(StateCorrupted):
            list(damaged.scan(KEYS[at], KEYS[at + 1]))
    damaged.close()


@pytest.mark.parametrize("name", ["CURRENT", "MANIFEST"])
def test_damaged_files_of_the_database_itself(tmp_path: Path, name: str) -> None:
    filled(tmp_path).close()
    (file,) = (tmp_path / "db").glob(name + "*")
    file.write_bytes(b"garbage\n")
    with pytest.raises(StateCorrupted):
        RocksStore.open(tmp_path / "db")


def test_a_lost_file(tmp_path: Path) -> None:
    filled(tmp_path).close()
    for file in (tmp_path / "db").glob("*.sst"):
        file.unlink()
    with pytest.raises(StateCorrupted):
        RocksStore.open(tmp_path / "db")


def test_a_store_without_its_current_file_is_not_made_anew(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "db" / "CURRENT").unlink()
    for how in ({}, {"create": False}, {"read_only": True}):
        with pytest.raises(StateCorrupted, match="CURRENT"):
            RocksStore.open(tmp_path / "db", **how)
    assert len(list((tmp_path / "db").glob("*.sst"))) >= 1


def killed_after_three_writes(path: Path) -> Path:
    """Give the log of a database as a killed process leaves it, with three writes in it."""
    store = RocksStore.open(path / "db")
    for number in range(3):
        store.write(Changes([b"\x01" + bytes([number])], [bytes(500)]))
    shutil.copytree(path / "db", path / "killed", ignore=shutil.ignore_patterns("LOCK"))
    store.close()
    (log,) = (path / "killed").glob("*.log")
    return log


def test_a_record_of_the_log_that_was_cut_short_was_never_written(tmp_path: Path) -> None:
    log = killed_after_three_writes(tmp_path)
    log.write_bytes(log.read_bytes()[:-100])
    with RocksStore.open(tmp_path / "killed") as store:
        assert store.scan_arrays(b"\x01", None)[0] == [b"\x01\x00", b"\x01\x01"]


def test_damage_in_the_midst_of_the_log_is_not_skipped(tmp_path: Path) -> None:
    log = killed_after_three_writes(tmp_path)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    with pytest.raises(StateCorrupted):
        RocksStore.open(tmp_path / "killed")


# ---- files


def test_a_file_is_written_without_a_store_and_its_digest_is_its_content(tmp_path: Path) -> None:
    one = write_staged(tmp_path / "one.sst", KEYS, VALUES)
    two = write_staged(tmp_path / "two.sst", KEYS, VALUES[::-1])
    assert one.rows == ROWS
    assert one.digest != two.digest
    store = RocksStore.open(tmp_path / "db")
    store.confirm(one)
    assert store.scan_arrays(b"\x01", None) == (KEYS, VALUES)
    store.close()


@pytest.mark.parametrize("keys", [[b"\x01b", b"\x01a"], [b"\x01a", b"\x01a"], ["a", "b"], []])
def test_keys_out_of_order_leave_no_file(tmp_path: Path, keys: list[bytes]) -> None:
    with pytest.raises((KeyInvalid, OSError)):
        write_staged(tmp_path / "x.sst", keys, [b""] * len(keys))
    assert list(tmp_path.iterdir()) == []
    if all(isinstance(key, bytes) for key in keys):
        with pytest.raises((KeyInvalid, OSError)):
            write_columns(tmp_path / "x.sst", StoreRows.of(keys, [b""] * len(keys)))
        assert list(tmp_path.iterdir()) == []


def test_columns_become_the_file_that_lists_do(tmp_path: Path) -> None:
    keys = [b"\x01" + number.to_bytes(4, "big") for number in range(10_001)]  # several blocks
    values = [b"%d" % number for number in range(len(keys))]
    seen: list[tuple[bytes, bytes]] = []
    one = write_staged(tmp_path / "1", keys, values)
    two = write_columns(
        tmp_path / "2",
        StoreRows.of(keys, values),
        seen=lambda keys, values: seen.extend(zip(keys, values, strict=True)),
    )
    assert (one.rows, one.length) == (two.rows, two.length)
    assert seen == list(zip(keys, values, strict=True)), "each that was written, in order"
    with RocksStore.open(tmp_path / "db") as store:
        store.confirm(two)
        assert store.scan_arrays(b"\x01", None) == (keys, values)
    with pytest.raises(FileExistsError):
        write_columns(tmp_path / "2", StoreRows.of(keys, values))


def test_a_value_that_is_not_bytes_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueInvalid):
        write_staged(tmp_path / "x.sst", [b"\x01a"], ["text"])  # type: ignore[list-item]
    assert list(tmp_path.iterdir()) == []


def test_the_file_of_another_format_is_not_ingested_as_rows(tmp_path: Path) -> None:
    store = RocksStore.open(tmp_path / "db")
    (tmp_path / "x.sst").write_bytes(b"not an SST file" * 100)
    with pytest.raises(StateCorrupted):
        store.confirm(seal(tmp_path / "x.sst", 1))
    assert [path.name for path in tmp_path.iterdir() if path.name != "db"] == ["x.sst"]
    store.close()


def test_confirming_waits_for_compactions_that_short_openings_put_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RocksStore.open(tmp_path / "db", options=RocksOptions(level0_files=8)) as store:

        def confirm(number: int) -> int:
            store.confirm(store.stage(Changes([b"\x01a"], [bytes([number])]), tmp_path / f"{number}.sst"))
            return int(store.property("rocksdb.num-files-at-level0") or 99)

        native = store._native
        assert native is not None
        native.set_options({"disable_auto_compactions": "true"})
        # a compaction that never comes slows down, and does not stop
        monkeypatch.setattr("backend.rocks.store._ROOM_WAIT_S", 0.01)
        assert max(map(confirm, range(12))) > 8
        # one that comes is waited for
        monkeypatch.setattr("backend.rocks.store._ROOM_WAIT_S", 20)
        pause = time.sleep

        def awaited(seconds: float) -> None:
            native.set_options({"disable_auto_compactions": "false"})
            pause(seconds)

        monkeypatch.setattr("backend.rocks.store.time.sleep", awaited)
        assert confirm(12) <= 8
        assert store.get(b"\x01a") == b"\x0c"


def test_what_is_merged_at_once_stays_small(tmp_path: Path) -> None:
    random = Random(11)
    with RocksStore.open(tmp_path / "db", options=RocksOptions(compression="none")) as store:
        for number in range(6):  # 24 megabytes that all overlap
            keys = sorted(random.randbytes(9) for _ in range(1_000))
            rows = Changes([b"\x01" + key for key in keys], [random.randbytes(4096) for _ in keys])
            store.confirm(store.stage(rows, tmp_path / f"{number}.sst"))
        assert store._native is not None
        store._native.compact_range(None, None)
        lengths = [path.stat().st_size for path in (tmp_path / "db").glob("*.sst")]
    assert sum(lengths) > 24_000_000
    assert max(lengths) < 9_000_000, "a compaction of the first level would take longer than a store is open"


@pytest.mark.parametrize("below", ["", "/in/it"])
def test_a_file_where_the_directory_would_be_is_named(tmp_path: Path, below: str) -> None:
    place = tmp_path / "a_file"
    place.touch()
    for opens in (RocksStore.open, KeyValueStore.open):
        with pytest.raises((StorageFailed, FileExistsError), match="a file lies where a directory must be"):
            opens(Path(f"{place}{below}"))
