"""Snapshots: what is fetched is what was published, uploads are only what is new, and every damage is named."""

from __future__ import annotations

import json
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import xxhash

from backend.errors import RewindError, StateCorrupted, StateUnavailable, UnknownFormat
from backend.rocks import RocksStore
from backend.store.protocol import Changes
from backend.store.staging import file_digest
from recovery.commit.pointer import COMMIT_KEY, At, Commit, CommitRecord, Pointer, encode_record
from recovery.commit.shard_directory import ShardDirectory
from recovery.files import LocalFiles
from recovery.restore.open_shard import OpenShard
from recovery.snapshots import publisher
from recovery.snapshots.manifest import Snapshot
from recovery.snapshots.publisher import Snapshots

SHARD = 3


class Shard:
    """A toy attempt: each `commit` stages, publishes the step, confirms; keeps what the state must be after it."""

    def __init__(self, home: Path, snapshots: Snapshots) -> None:
        self.home, self.snapshots = home, snapshots
        (home / "staged").mkdir(parents=True)
        self.store = RocksStore.open(home / "db")
        self.records: list[CommitRecord] = []
        self.pointers: list[Pointer] = []
        self.states: list[dict[bytes, bytes]] = []

    def commit(self, rows: dict[bytes, bytes | None], *, step: bool = True, full: bool = False) -> Pointer:
        parent = self.records[-1].commit if self.records else None
        record = CommitRecord(SHARD, Commit(len(self.records), uuid.uuid4().hex), parent, 0, [], {})
        rows = {COMMIT_KEY: encode_record(record), **rows}
        keys = sorted(rows)
        staged = self.store.stage(Changes(keys, [rows[key] for key in keys]), self.home / "staged" / record.commit.name)
        if step:
            self.snapshots.publish_step(record, staged)
        self.store.confirm(staged)
        state = {**(self.states[-1] if self.states else {}), **rows}
        self.records.append(record)
        self.states.append({key: value for key, value in state.items() if value is not None})
        self.pointers.append(Pointer(SHARD, record.commit, parent, staged.length, staged.digest, [], {}, ""))
        if full:
            self.publish()
        return self.pointers[-1]

    def publish(self) -> int:
        copy = self.home / uuid.uuid4().hex
        self.store.checkpoint(copy)
        uploaded = self.snapshots.publish(self.records[-1], copy)
        shutil.rmtree(copy)
        return uploaded


BOTH = pytest.mark.parametrize("snapshots", ["local", "memory"], indirect=True)


@pytest.fixture
def snapshots(request: pytest.FixtureRequest, tmp_path: Path) -> Snapshots:
    local = getattr(request, "param", "local") == "local"
    return Snapshots(tmp_path / "snapshots" if local else f"memory://{uuid.uuid4().hex}/snapshots", idle_s=0)


@pytest.fixture
def shard(tmp_path: Path, snapshots: Snapshots) -> Shard:
    return Shard(tmp_path / "origin", snapshots)


class Elsewhere:
    """Another executor: a directory without state."""

    def __init__(self, path: Path) -> None:
        self.directory = ShardDirectory(path / uuid.uuid4().hex, "query", SHARD)
        self.heard: list[str] = []

    @property
    def database(self) -> Path:
        generation = self.directory.current()
        assert generation is not None
        return generation.database

    def fetch(self, snapshots: Snapshots, pointer: Pointer) -> bool:
        shard = OpenShard(self.directory, "elsewhere", snapshots)
        try:
            shard.at(pointer).store.close()
        except StateUnavailable:
            return False
        finally:
            for one in shard.tries.recorder.tries:
                self.heard += [f"start {one.why}", f"suspended {one.failed}" if one.failed else "end"]
        return True

    def rows(self) -> dict[bytes, bytes]:
        with RocksStore.open(self.database, create=False) as store:
            return {key: value for key, value in store.scan(b"", None) if key != b"\x00format"}


@BOTH
def test_a_package_and_its_steps_are_the_state(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    shard.commit({b"\x03a": b"1", b"\x03b": b"1"}, full=True)
    shard.commit({b"\x03a": None, b"\x03c": b"2"})
    pointer = shard.commit({b"\x03c": b"3"})
    other = Elsewhere(tmp_path)
    assert other.fetch(snapshots, pointer)
    assert other.rows() == shard.states[2]
    assert other.heard == ["start no local state", "end"]
    older = Elsewhere(tmp_path)
    assert older.fetch(snapshots, shard.pointers[1]), "an older version that has its snapshots can be had"
    assert older.rows() == shard.states[1]


@BOTH
def test_a_damaged_database_is_not_published(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    """Its digests would call the damage sound, for whoever takes it."""
    shard.commit({b"\x03" + bytes([i]): bytes(100) for i in range(200)}, step=False)
    shard.store.checkpoint(tmp_path / "copy")
    damaged = max((tmp_path / "copy").glob("*.sst"), key=lambda file: file.stat().st_size)
    data = bytearray(damaged.read_bytes())
    data[40] ^= 1
    damaged.unlink()  # a hard link of the store's
    damaged.write_bytes(data)
    with pytest.raises(StateCorrupted, match=damaged.name):
        snapshots.publish(shard.records[-1], tmp_path / "copy")
    assert not any(offer.full for offer in snapshots.offers(SHARD))
    shard.publish()
    assert any(offer.full for offer in snapshots.offers(SHARD))


def test_what_was_fetched_can_be_written_to_without_touching_the_package(
    shard: Shard, snapshots: Snapshots, tmp_path: Path
) -> None:
    pointer = shard.commit({b"\x03" + bytes([i]): bytes(100) for i in range(200)}, full=True)
    first = Elsewhere(tmp_path)
    assert first.fetch(snapshots, pointer)
    with RocksStore.open(first.database) as store:
        store.write(Changes([b"\x03new"], [b"1"]))
        store.delete_range(b"\x03\x00", b"\x03\x80")
    assert snapshots.verify(SHARD) == []
    second = Elsewhere(tmp_path)
    assert second.fetch(snapshots, pointer)
    assert second.rows() == shard.states[0]


def test_only_new_files_are_uploaded(shard: Shard) -> None:
    shard.commit({b"\x01" + i.to_bytes(4, "big"): uuid.uuid4().bytes * 8 for i in range(3000)})
    first = shard.publish()
    assert first > 3000 * 16
    shard.commit({b"\x03a": b"1"})
    assert shard.publish() < first / 5


def test_only_new_files_are_read(shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def digest(path: Path) -> tuple[int, str]:
        read.append(path.suffix)
        return file_digest(path)

    monkeypatch.setattr(publisher, "file_digest", digest)
    for number in range(3):
        shard.commit({b"\x01%d" % number: b"v" * 1000}, full=True)
        assert number == 0 or read.count(".sst") == 1, "the others are the same files"
        read.clear()
    [*_, newest] = sorted((shard.home / "db").glob("*.sst"))
    rewritten = newest.read_bytes()
    newest.unlink()
    newest.write_bytes(rewritten)
    shard.publish()
    assert read.count(".sst") == 1, "another file under its name"


def test_no_way_to_the_pointer(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    other = Elsewhere(tmp_path)
    assert not other.fetch(snapshots, shard.commit({b"\x03a": b"1"}, step=False))
    shard.commit({b"\x03a": b"1"}, full=True)
    shard.commit({b"\x03a": b"2"}, step=False)
    assert not other.fetch(snapshots, shard.commit({b"\x03a": b"3"}))
    assert other.directory.current() is None
    assert other.heard == []


@BOTH
def test_the_fallback_order_is_followed_when_a_piece_is_damaged(
    shard: Shard, snapshots: Snapshots, tmp_path: Path
) -> None:
    shard.commit({b"\x03a": b"1"}, full=True)
    shard.commit({b"\x03b": b"2"}, full=True)
    pointer = shard.commit({b"\x03c": b"3"})
    newest = next(p for p in snapshots.manifests(SHARD) if p.full and p.commit.version == 1)
    manifest = next(file.name for file in newest.files if file.name.startswith("MANIFEST"))
    name = f"{SHARD}/{newest.folder}/{manifest}"
    data = bytearray(snapshots.files.read(name))
    data[len(data) // 2] ^= 1
    snapshots.files.write(name, [bytes(data)])
    other = Elsewhere(tmp_path)
    assert other.fetch(snapshots, pointer)
    assert other.rows() == shard.states[2]
    assert [line.split()[0] for line in other.heard] == ["start", "suspended", "start", "end"]
    assert manifest in other.heard[1]
    assert manifest in other.heard[2], "the next try says what happened to the one before"
    assert [manifest in error.where for error in snapshots.verify(SHARD)] == [True]


def test_a_step_that_is_not_the_pointers_is_not_applied(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    shard.commit({b"\x03a": b"1"}, full=True)
    pointer = shard.commit({b"\x03b": b"2"})
    foreign = Pointer(SHARD, pointer.commit, pointer.parent, pointer.staged_length, "0" * 32, [], {}, "")
    other = Elsewhere(tmp_path)
    assert not other.fetch(snapshots, foreign)
    assert "not the one that the pointer names" in other.heard[1]
    assert other.directory.current() is None


def test_a_package_under_the_wrong_commit_is_left_for_the_steps_from_the_first_commit(
    shard: Shard, snapshots: Snapshots, tmp_path: Path
) -> None:
    shard.commit({b"\x03a": b"1"})
    shard.commit({b"\x03b": b"1"})
    copy = tmp_path / "copy"
    shard.store.checkpoint(copy)
    snapshots.publish(shard.records[0], copy)  # the database is at commit 1
    other = Elsewhere(tmp_path)
    assert other.fetch(snapshots, shard.pointers[0])
    assert "does not lead to the commit" in other.heard[1]
    assert other.rows() == shard.states[0]


def test_fetched_steps_bring_a_stale_copy_up_to_date(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    shard.commit({b"\x03a": b"1"}, full=True)
    other = Elsewhere(tmp_path)
    assert other.fetch(snapshots, shard.pointers[0])
    shard.commit({b"\x03b": b"2"})
    pointer = shard.commit({b"\x03c": b"3"})
    before = other.database
    assert other.fetch(snapshots, pointer)
    assert other.database == before, "the copy that is here goes on"
    assert other.rows() == shard.states[2]


@BOTH
def test_prune_keeps_what_retained_commits_need(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    for version in range(8):
        shard.commit({b"\x03" + bytes([version]): bytes([version]) * 50}, full=version in (1, 4, 6))
    orphan = CommitRecord(SHARD, Commit(2, "f" * 32), shard.records[1].commit, 0, [], {})
    loose = tmp_path / "loose.sst"
    snapshots.publish_step(orphan, shard.store.stage(Changes([b"\x03x"], [b"y"]), loose))
    keep = [shard.records[5].commit, shard.records[7].commit]
    told = snapshots.prune(SHARD, keep, dry_run=True)
    assert snapshots.prune(SHARD, keep) == told
    left = {(p.commit.version, p.full) for p in snapshots.manifests(SHARD)}
    assert left == {(4, True), (5, False), (6, True), (6, False), (7, False)}
    for version in (5, 6, 7):
        other = Elsewhere(tmp_path)
        assert other.fetch(snapshots, shard.pointers[version])
        assert other.rows() == shard.states[version]
    assert snapshots.verify(SHARD) == []
    # files that only the snapshot of commit 1 named go when they were without a name twice in a row
    before = snapshots.files.list(f"{SHARD}/shared")
    named = {file.shared for p in snapshots.manifests(SHARD) if p.full for file in p.files if file.shared}
    snapshots.prune(SHARD, keep)
    after = snapshots.files.list(f"{SHARD}/shared")
    assert set(after) == named
    assert set(before) >= set(after)
    assert snapshots.prune(SHARD, []) == []


def test_a_snapshot_is_asked_about_once_however_many_commits_lead_back_to_it(tmp_path: Path) -> None:
    """On an object store each question is a request, and this runs in the thread that looks after the query."""

    class Counted(LocalFiles):
        asked = 0

        def read(self, name: str) -> bytes:
            self.asked += name.endswith(".full.json")
            return super().read(name)

        def list(self, folder: str = "", **how: Any) -> Any:
            self.asked += folder.count("/") == 1 and not folder.endswith("shared")
            return super().list(folder, **how)

    files = Counted(tmp_path / "snapshots")
    snapshots = Snapshots(files, idle_s=0)
    shard = Shard(tmp_path / "origin", snapshots)
    for version in range(40):
        shard.commit({b"\x03a": b"%d" % version}, full=version in (2, 20))
    keep = [record.commit for record in shard.records[10:]]
    files.asked = 0
    snapshots.prune(SHARD, keep)
    assert files.asked <= 8, "manifest and folder of two snapshots, and both manifests again for the files they share"
    left = {(p.commit.version, p.full) for p in snapshots.manifests(SHARD) if p.commit.version <= 20}
    assert left == {(2, True), (20, True), *((version, False) for version in range(3, 21))}
    for version in (10, 19, 20, 39):
        other = Elsewhere(tmp_path)
        assert other.fetch(snapshots, shard.pointers[version])
        assert other.rows() == shard.states[version]


def test_shared_files_wait_for_a_second_prune(shard: Shard, snapshots: Snapshots) -> None:
    shard.commit({b"\x03a": b"1"}, step=False, full=True)
    snapshots.files.write(f"{SHARD}/shared/upload_begun.sst", [b"its manifest comes later"])
    keep = [shard.records[0].commit]
    assert snapshots.prune(SHARD, keep) == []
    assert snapshots.prune(SHARD, keep, dry_run=True) == [f"{SHARD}/shared/upload_begun.sst"]
    patient = Snapshots(snapshots.files)
    assert patient.prune(SHARD, keep) == patient.prune(SHARD, keep) == [], "an hour, unless told"
    assert snapshots.prune(SHARD, keep) == [f"{SHARD}/shared/upload_begun.sst"]


def test_since_when_files_wait_is_written_where_it_changed(tmp_path: Path) -> None:
    written: list[str] = []

    class Noted(LocalFiles):
        def write(self, name: str, chunks: Any, *, durable: bool = True) -> int:
            written.append(name)
            return super().write(name, chunks, durable=durable)

    files, keep = Noted(tmp_path), [Commit(3, "a" * 32)]
    Snapshots(files).prune(SHARD, keep)
    assert written == [], "there are no snapshots"
    (shared := tmp_path / str(SHARD) / "shared").mkdir(parents=True)
    (shared / "begun.sst").touch()
    for _ in range(3):
        Snapshots(files).prune(SHARD, keep)
    assert written == [f"{SHARD}/idle.json"]
    (shared / "begun.sst").unlink()
    Snapshots(files).prune(SHARD, keep)
    (shared / "begun.sst").touch()
    assert Snapshots(files, idle_s=0).prune(SHARD, keep) == [], "it waits anew"


def test_drafts_of_dead_writers_go(shard: Shard, snapshots: Snapshots) -> None:
    for version in range(3):
        shard.commit({b"\x03a": b"1"}, full=version == 1)
    names = [f"{SHARD}/{record.commit.name}.step.sst.tmp-{uuid.uuid4().hex}" for record in shard.records]
    names.append(f"{SHARD}/shared/{'0' * 32}_7.sst.tmp-{uuid.uuid4().hex}")
    root = Path(snapshots.files.uri)
    for name in names:
        (root / name).write_bytes(b"half of it")
    keep = [shard.records[1].commit, shard.records[2].commit]
    snapshots.prune(SHARD, keep)
    snapshots.prune(SHARD, keep)
    assert [(root / name).exists() for name in names] == [False, False, True, False], "of version 2 one may be written"


def test_a_slow_upload_puts_back_what_pruning_took_meanwhile(shard: Shard, snapshots: Snapshots) -> None:
    class Slow(Snapshots):
        def _write_manifest(self, snapshot: Snapshot) -> int:
            for _ in range(2):
                snapshots.prune(SHARD, [Commit(9, "a" * 32)])  # what has no manifest is in nobody's way
            assert not self.files.list(f"{SHARD}/shared")
            assert not self.files.folders(f"{SHARD}/{snapshot.commit.name}")
            return super()._write_manifest(snapshot)

    pointer = shard.commit({b"\x03a": b"1"}, step=False)
    shard.snapshots = Slow(snapshots.files)
    shard.publish()
    assert snapshots.verify(SHARD) == []
    assert [offer.commit for offer in snapshots.offers(SHARD)] == [pointer.commit]


def test_a_package_that_lost_a_file_stands_in_for_no_older_one(
    shard: Shard, snapshots: Snapshots, tmp_path: Path
) -> None:
    for version in range(5):
        shard.commit({b"\x03" + bytes([version]): bytes([version]) * 50}, full=version in (1, 3))
    (newer,) = [p for p in snapshots.manifests(SHARD) if p.full and p.commit.version == 3]
    snapshots.files.delete([f"{SHARD}/{newer.folder}/CURRENT"])
    snapshots.prune(SHARD, [shard.records[4].commit])
    left = {(p.commit.version, p.full) for p in snapshots.manifests(SHARD)}
    assert left == {(1, True), (2, False), (3, False), (4, False)}
    other = Elsewhere(tmp_path)
    assert other.fetch(snapshots, shard.pointers[4])
    assert other.rows() == shard.states[4]


def test_as_many_manifests_are_read_as_there_are_steps_on_the_way(tmp_path: Path) -> None:
    class Counted(LocalFiles):
        manifests = 0

        def read(self, name: str) -> bytes:
            self.manifests += name.endswith((".full.json", ".step.json"))
            return super().read(name)

    files = Counted(tmp_path / "snapshots")
    shard = Shard(tmp_path / "origin", Snapshots(files))
    for version in range(23):
        shard.commit({b"\x03a": b"%d" % version}, full=version % 10 == 0)

    def reads(**how: Any) -> tuple[int, list[tuple[int, bool]]]:
        files.manifests = 0
        offers = Snapshots(files).offers(SHARD, toward=shard.pointers[22].commit, **how)
        return files.manifests, [(offer.commit.version, offer.full) for offer in offers]

    assert reads() == (3, [(22, False), (21, False), (20, True)])
    behind = At(shard.records[18].commit)
    assert reads(start=behind) == (4, [(version, False) for version in (22, 21, 20, 19)]), "what it lacks, no snapshot"
    foreign = At(Commit(21, "f" * 32))
    assert reads(start=foreign) == (3, [(22, False), (21, False), (20, True)])
    broken = {(shard.records[20].commit, True)}
    assert reads(broken=broken)[1][-1] == (10, True)
    files.manifests = 0
    other = Elsewhere(tmp_path)
    assert other.fetch(Snapshots(files), shard.pointers[22])
    assert files.manifests <= 4, "a snapshot's manifest is read again when its files are fetched"
    assert other.rows() == shard.states[22]


def manifest_of(snapshots: Snapshots, change: dict[str, object], *, seal: bool = True) -> None:
    """Write a manifest over the full snapshot's, its checksum made right again."""
    (name,) = [n for n in snapshots.files.list(str(SHARD)) if n.endswith(".full.json")]
    body = json.loads(snapshots.files.read(f"{SHARD}/{name}"))["body"]
    text = json.dumps({**body, **change}, separators=(",", ":"))
    checksum = xxhash.xxh3_128_hexdigest(text.encode()) if seal else "0" * 32
    snapshots.files.write(f"{SHARD}/{name}", [f'{{"checksum":"{checksum}","body":{text}}}'.encode()])


@pytest.mark.parametrize(
    ("change", "seal", "kind", "words"),
    [
        ({"files": [{"name": "../../../evil.sst", "length": 1, "digest": "ab"}]}, True, StateCorrupted, "plain file"),
        ({"files": [{"name": "/etc/passwd", "length": 1, "digest": "ab"}]}, True, StateCorrupted, "plain file"),
        ({"files": [{"name": "..", "length": 1, "digest": "ab"}]}, True, StateCorrupted, "plain file"),
        ({"files": [{"name": "a.sst", "length": 1, "digest": "../up"}]}, True, StateCorrupted, "plain file"),
        ({"files": []}, True, StateCorrupted, "names no files"),
        ({"folder": "../../other"}, True, StateCorrupted, "not a folder"),
        ({"shard": 4}, True, StateCorrupted, "of shard 4"),
        ({"shard": "x"}, True, StateCorrupted, "cannot be decoded"),
        ({"format": 2}, True, UnknownFormat, "format 2"),
        ({"folder": "a/b"}, False, StateCorrupted, "checksum"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    shard: Shard,
    snapshots: Snapshots,
    tmp_path: Path,
    change: dict[str, object],
    seal: bool,
    kind: type[RewindError],
    words: str,
) -> None:
    pointer = shard.commit({b"\x03a": b"1"}, step=False, full=True)
    manifest_of(snapshots, change, seal=seal)
    with pytest.raises(kind, match=words) as caught:
        snapshots.fetch(SHARD, pointer.commit, tmp_path / "target")
    assert caught.value.command
    assert not (tmp_path / "target").exists()
    assert snapshots.offers(SHARD) == ()
    assert [type(error) for error in snapshots.verify(SHARD)] == [kind]
    assert not Elsewhere(tmp_path).fetch(snapshots, pointer)


@BOTH
def test_a_missing_file_is_named(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    pointer = shard.commit({b"\x03a": b"1"}, full=True)
    shared, *_ = snapshots.files.list(f"{SHARD}/shared")
    snapshots.files.delete([f"{SHARD}/shared/{shared}"])
    with pytest.raises(StateCorrupted, match="missing") as caught:
        snapshots.fetch(SHARD, pointer.commit, tmp_path / "target")
    assert shared in caught.value.where
    assert not (tmp_path / "target").exists()
    with pytest.raises(StateCorrupted, match="manifest is missing"):
        snapshots.fetch(SHARD, Commit(99, "a" * 32), tmp_path / "target")


def test_an_existing_directory_is_never_built_over(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    pointer = shard.commit({b"\x03a": b"1"}, full=True)
    (tmp_path / "target").mkdir()
    with pytest.raises(FileExistsError):
        snapshots.fetch(SHARD, pointer.commit, tmp_path / "target")
    assert (tmp_path / "target").is_dir()


def test_a_flipped_byte_in_a_shared_file_is_named(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    pointer = shard.commit({b"\x03a": b"1"}, full=True)
    shared = min(snapshots.files.list(f"{SHARD}/shared"))
    data = bytearray(snapshots.files.read(f"{SHARD}/shared/{shared}"))
    data[10] ^= 1
    snapshots.files.write(f"{SHARD}/shared/{shared}", [bytes(data)])
    with pytest.raises(StateCorrupted, match="digest") as caught:
        snapshots.fetch(SHARD, pointer.commit, tmp_path / "target")
    assert shared in caught.value.where
    assert not (tmp_path / "target").exists()


def test_a_damaged_shared_file_is_put_anew_where_those_that_are_there_are_looked_at(
    shard: Shard, snapshots: Snapshots, tmp_path: Path
) -> None:
    """What a restore that caught up publishes may have files of the snapshots that could not be used."""
    pointer = shard.commit({b"\x03a": b"1"}, full=True)
    shared = min(snapshots.files.list(f"{SHARD}/shared"))
    data = snapshots.files.read(f"{SHARD}/shared/{shared}")
    snapshots.files.write(f"{SHARD}/shared/{shared}", [bytes([data[0] ^ 1]) + data[1:]])
    shard.store.checkpoint(tmp_path / "copy")
    for check in (False, True):
        snapshots.publish(shard.records[-1], tmp_path / "copy", check=check)
        assert bool(snapshots.verify(SHARD)) is not check
    assert snapshots.files.read(f"{SHARD}/shared/{shared}") == data
    assert Elsewhere(tmp_path).fetch(snapshots, pointer)


def test_a_damaged_staged_file_that_is_here_is_done_without(shard: Shard, snapshots: Snapshots, tmp_path: Path) -> None:
    shard.commit({b"\x03a": b"1"}, full=True)
    other = Elsewhere(tmp_path)
    assert other.fetch(snapshots, shard.pointers[0])
    pointer = shard.commit({b"\x03b": b"2"})
    generation = other.directory.current()
    assert generation is not None
    data = bytearray((shard.home / "staged" / pointer.commit.name).read_bytes())
    data[len(data) // 2] ^= 1
    generation.staged(pointer.commit).write_bytes(data)
    for file in generation.database.glob("MANIFEST-*"):
        file.write_bytes(b"damaged")
    assert other.fetch(snapshots, pointer), "the same file is among the snapshots"
    assert other.rows() == shard.states[1]
    assert [text.split()[0] for text in other.heard] == ["start", "end", "start", "suspended", "start", "end"]
