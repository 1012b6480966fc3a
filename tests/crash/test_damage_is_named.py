"""Whatever is damaged, or of an unknown version, is a named error that says what to run next; and nothing is written.

Each case damages one thing of a sound job and then does what would use it. What lies there afterwards is byte for byte
what lay there before (a task's own lock file and RocksDB's log apart).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import xxhash

from backend.errors import (
    ChangelogDamaged,
    PointerDamaged,
    RewindError,
    StateAhead,
    StateCorrupted,
    StateUnavailable,
    UnknownFormat,
)
from backend.rocks import RocksStore
from backend.store.protocol import Changes, Region
from recovery.attempt import run_attempt
from recovery.commit.manifest import Manifest, read_manifest, settle
from recovery.commit.pointer import COMMIT_KEY, Commit, Pointer, decode, encode, encode_record
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.jobs import ShardJob, shard_job, snapshots
from recovery.restore import probe
from recovery.restore.replay import build_snapshot
from recovery.share import ShardInput
from tests.support.windows import QUERY, make_windows, windows_operator


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    home = tmp_path_factory.mktemp("sound")
    return home, encode(make_windows(home))


@pytest.fixture
def home(template: tuple[Path, bytes], tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(template[0], tmp_path / "job")
    return tmp_path / "job"


@pytest.fixture
def pointer(template: tuple[Path, bytes]) -> Pointer:
    return decode(template[1])


def job(home: Path) -> ShardJob:
    operator, fields = windows_operator()
    checkpoint = str(home / "checkpoint")
    return shard_job(home / "local", checkpoint, f"{checkpoint}/rewind/changelog", operator, fields, 2, None, QUERY, 0)


def digests(home: Path) -> dict[str, str]:
    """Everything but what a task writes before it looks at anything."""
    return {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.name != "LOCK" and not (path.parent.name == "db" and _is_own(path))
    }


def _is_own(path: Path) -> bool:
    """RocksDB makes these anew at each open; what they say of the rows stays."""
    return path.suffix == ".log" or path.name.startswith(("LOG", "OPTIONS", "MANIFEST", "CURRENT", "IDENTITY"))


@contextmanager
def refused(home: Path, kind: type[RewindError], where: str = "", *, aside: bool = False) -> Iterator[None]:
    """What is done in here ends in an error by name, with a command, and changes no file; `aside`: but for CURRENT."""
    before = digests(home)
    with pytest.raises(kind) as caught:
        yield
    assert type(caught.value) is kind
    assert caught.value.command, "it says what to run next"
    assert where in caught.value.where
    after = digests(home)
    if aside:
        current = next(name for name in before if name.endswith("/0/CURRENT"))
        before.pop(current)
        after.pop(current, None)
    assert after.items() >= before.items(), "nothing is overwritten"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x01
    path.unlink()
    path.write_bytes(bytes(data))


def attempt(home: Path, pointer: Pointer) -> None:
    run_attempt(job(home), pointer, 2, lambda before: ShardInput(9_000, None, before))


def generation(home: Path) -> Path:
    (path,) = (home / "local" / QUERY / "0").glob("*/db")
    return path.parent


def delta(home: Path, commit: Commit) -> Path:
    return home / "checkpoint" / "rewind" / "changelog" / "0" / f"{commit.name}.delta"


def test_a_sound_job_goes_on(home: Path, pointer: Pointer) -> None:
    attempt(home, pointer)


# -- the pointer ----------------------------------------------------------------------------------------------------


def test_a_damaged_pointer(home: Path, pointer: Pointer) -> None:
    data = encode(pointer)
    for broken in (b"", data[:-1], b"\x00" + data[1:], b"\xc1" * 40, data[:20] + b"\xff" * 8 + data[28:]):
        with refused(home, PointerDamaged):
            decode(broken)


def test_a_pointer_of_an_unknown_version(home: Path, pointer: Pointer) -> None:
    newer = {**msgspec.to_builtins(pointer, builtin_types=(bytes,)), "format": 2}
    with refused(home, UnknownFormat):
        decode(msgspec.msgpack.encode(newer))


def test_a_pointer_of_another_lineage(home: Path, pointer: Pointer) -> None:
    foreign = msgspec.structs.replace(pointer, commit=Commit(1, "f" * 32), parent=Commit(0, "e" * 32))
    with refused(home, StateUnavailable):
        attempt(home, foreign)
    behind = msgspec.structs.replace(pointer, commit=Commit(-1, "f" * 32), parent=None)
    with refused(home, StateAhead):
        attempt(home, behind)


# -- the changelog --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", [True, False])
@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "newer"])
def test_the_changelog(home: Path, pointer: Pointer, newest: bool, damage: str) -> None:
    assert pointer.parent is not None
    path = delta(home, pointer.commit if newest else pointer.parent)
    kind: type[RewindError] = ChangelogDamaged
    if damage == "flipped":
        flip(path, path.stat().st_size // 2)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:4] + struct.pack(">H", 2) + data[6:])
        kind = UnknownFormat
    elsewhere = replace(job(home), local_dir=home.parent / "elsewhere")
    (home.parent / "elsewhere" / QUERY).mkdir(parents=True)
    with refused(home, kind, path.name):
        build_snapshot(elsewhere, pointer.commit, str(home / "checkpoint"), [])


# -- the database and its files -------------------------------------------------------------------------------------


def test_a_damaged_sst(home: Path, pointer: Pointer) -> None:
    path = max(generation(home).glob("db/*.sst"), key=lambda file: file.stat().st_size)
    for at in range(0, path.stat().st_size // 2, 16):
        flip(path, at)
    with refused(home, StateUnavailable):  # the commit row cannot be read: nothing of this is used
        attempt(home, pointer)
    why = probe.unusable(job(home), pointer)
    assert why is not None
    assert "rewind" in why


def test_a_damaged_sst_that_this_process_has_in_its_cache(home: Path, pointer: Pointer) -> None:
    path = max(generation(home).glob("db/*.sst"), key=lambda file: file.stat().st_size)
    with RocksStore.open(path.parent) as store:
        assert list(store.scan(b"", None))
    flip(path, 20)
    assert path.name in (probe.unusable(job(home), pointer) or "")
    assert not (home / "local" / QUERY / "0" / "CURRENT").exists(), "it is put aside"


def test_a_damaged_block_of_rows_that_no_read_shows(home: Path, pointer: Pointer) -> None:
    """Under a range delete: every compaction that comes to it would fail."""
    path = max(generation(home).glob("db/*.sst"), key=lambda file: file.stat().st_size)
    with RocksStore.open(path.parent) as store:
        store.delete_range(bytes([Region.COMMIT + 1]), b"\xff")
    with RocksStore.open(path.parent, read_only=True) as store:
        store.check_files()
    flip(path, path.stat().st_size // 3)
    with RocksStore.open(path.parent) as store:
        assert list(store.scan(b"", None)), "reading finds nothing"
    assert path.name in (probe.unusable(job(home), pointer) or "")
    assert not (home / "local" / QUERY / "0" / "CURRENT").exists(), "it is put aside"


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_staged_file(home: Path, pointer: Pointer, damage: str) -> None:
    path = generation(home) / "staged" / f"{pointer.commit.name}.sst"
    if damage == "flipped":
        flip(path, 100)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with refused(home, StateUnavailable):
        attempt(home, pointer)


def test_a_database_of_an_unknown_version(home: Path, pointer: Pointer) -> None:
    with RocksStore.open(generation(home) / "db") as store:
        store.write(Changes([b"\x00format"], [b"2"]))
    with refused(home, UnknownFormat):
        attempt(home, pointer)


def test_a_commit_row_of_an_unknown_version(home: Path, pointer: Pointer) -> None:
    record = job(home).changelog.read(0, pointer.commit).record
    with RocksStore.open(generation(home) / "db") as store:
        store.write(Changes([COMMIT_KEY], [encode_record(msgspec.structs.replace(record, format=2))]))
    with refused(home, UnknownFormat):
        attempt(home, pointer)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", StateCorrupted),
        (b'{"format": 1', StateCorrupted),
        (b'{"format": 1, "generation": "../../etc"}', StateCorrupted),
        (b'{"format": 2, "generation": "a"}', UnknownFormat),
    ],
)
def test_the_file_that_names_the_generation(
    home: Path, pointer: Pointer, content: bytes, kind: type[RewindError]
) -> None:
    current = home / "local" / QUERY / "0" / "CURRENT"
    for look in (lambda: attempt(home, pointer), lambda: pytest.fail(probe.unusable(job(home), pointer) or "")):
        current.write_bytes(content)
        with pytest.raises((kind, pytest.fail.Exception), match=f"{kind.__name__}.*CURRENT"):
            look()
        # what is damaged is put aside, so that a restored shard has a place; a newer release's stays
        assert current.exists() == (kind is UnknownFormat)


# -- manifests ------------------------------------------------------------------------------------------------------


def wanted(home: Path) -> Manifest:
    found = read_manifest(str(home / "checkpoint"))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda text: text[:-5], StateCorrupted),
        (lambda text: "", StateCorrupted),
        (lambda text: "[1, 2]", StateCorrupted),
        (lambda text: json.dumps({**json.loads(text), "format": 3}), UnknownFormat),
    ],
)
def test_the_manifest(home: Path, damage: Callable[[str], str], kind: type[RewindError]) -> None:
    checkpoint, sound = str(home / "checkpoint"), wanted(home)
    path = home / "checkpoint" / "rewind" / "manifest.json"
    path.write_text(damage(path.read_text()))
    for look in (
        lambda: read_manifest(checkpoint),
        lambda: Checkpoint(checkpoint),
        lambda: settle(checkpoint, sound, used=True),
    ):
        with refused(home, kind, "manifest.json"):
            look()


NEWER = b'{"format":2}'


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"checksum":"%s","body":%s}' % (xxhash.xxh3_128_hexdigest(NEWER).encode(), NEWER)],
    ids=["empty", "cut", "newer"],
)
def test_a_packages_manifest(home: Path, pointer: Pointer, content: bytes) -> None:
    copies = snapshots(str(home / "checkpoint"))
    record = job(home).changelog.read(0, pointer.commit).record
    with RocksStore.open(generation(home) / "db") as store:
        store.checkpoint(home.parent / "copy")
    copies.publish(record, home.parent / "copy")
    (manifest,) = (home / "checkpoint" / "rewind" / "snapshots" / "0").glob("*.full.json")
    manifest.write_bytes(content)
    kind = UnknownFormat if NEWER in content else StateCorrupted
    with refused(home, kind, manifest.name):
        copies.manifests(0)
    assert copies.offers(0) == (), "it is never used"
    attempt(home, pointer)
    assert manifest.read_bytes() == content
