"""Every kind of file that is written, times every damage: the right end, or an error by name; never a wrong result.

The table is printed at the end of the run. `right`: nothing was noticed, or it was done without, and the end state is
the control's. `restored`: the shard was restored, and the end state is the control's. Anything else is the error that
ended it, and what is damaged is still there. `-`: there is no such thing.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from backend.errors import PointerDamaged, RewindError
from backend.kafka_client.settings import KafkaSettings
from backend.rocks.options import _budget
from backend.sinks.directory import VersionedDirectory
from backend.sources.archive_files import read_range, write_archive
from backend.sources.archive_footer import REQUIRED
from backend.sources.archive_index import INDEX_NAME, Archive
from backend.sources.archive_reader import Piece
from backend.spark.control import ControlReader, ask_to_drain
from recovery.changelog.chunks import ChunkKey, cut
from recovery.changelog.file import FileChangelog
from recovery.changelog.kafka.log import KafkaChangelog
from recovery.changelog.protocol import Growth
from recovery.changelog.records import Kind
from recovery.commit.manifest import NAME, Manifest, read_manifest, record, settle, write_manifest
from recovery.commit.pointer import Pointer, decode, encode
from tests.crash.damage import DAMAGES, LAST, PLACES, QUERY, Job, commit_of, replaced
from tests.crash.told import told

SWAP, OLD = "swap", "old"
SEED = os.environ.get("DAMAGE_SEED", "")
COLUMNS = (*DAMAGES, SWAP, OLD)


@dataclass(frozen=True)
class Template:
    """A sound job, as it was some micro-batches before, another job, and how the sound one ends."""

    home: Path
    before: Path
    other: Path
    pointers: list[bytes]
    end: Any


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="rewind-damage-", dir=base) as name:
        root = Path(name)
        job = Job(root / "home")
        for _ in range(3):
            job.batch()
        extras(job, 1)
        shutil.copytree(job.home, root / "before")
        while len(job.pointers) < LAST:
            job.batch()
        extras(job, 2)
        other = Job(root / "other", seed=1)
        for _ in range(4):
            other.batch()
        extras(other, 3)
        control = at(root / "control", job.home, job.pointers)
        yield Template(job.home, root / "before", other.home, job.pointers, control.finish())


def extras(job: Job, number: int) -> None:
    """Make what a job has besides, anew: a manifest, a request, an output's owner, an archive."""
    wanted = manifest(number)
    write_manifest(job.checkpoint, wanted)
    ask_to_drain(job.checkpoint)
    VersionedDirectory(job.home / "out").open("query" if number < 3 else "another query")
    rows = pa.table(
        {
            "topic": ["t"] * 4000,
            "partition": pa.array([0] * 4000, pa.int32()),
            "offset": pa.array([*range(2000), *range(2500, 4500)], pa.int64()),
            "timestamp": pa.array(range(4000), pa.timestamp("ms", "UTC")),
            "key": pa.array([b"k"] * 4000, pa.binary()),
            "value": pa.array([b"%d of %d" % (at * number % 977, number // 3) for at in range(4000)], pa.binary()),
        }
    )
    shutil.rmtree(job.home / "archive", ignore_errors=True)
    write_archive(job.home / "archive", rows, rows_per_file=1500, row_group_rows=500, gaps="declare")


def manifest(number: int) -> Manifest:
    """A job whose policies have changed between 1 and 2; 3 is another one."""
    operator = {"operator": "window", "window": {"size": 10 if number < 3 else 20}, "policies": {"early": number}}
    return Manifest(1, (7,), {"operator": operator, "query": "query", "changelog": "rewind/changelog"})


def at(home: Path, source: Path, pointers: list[bytes]) -> Job:
    """Copy a job and go on with it, with nothing of its files in this process's block cache."""
    _budget.cache_clear()
    shutil.copytree(source, home)
    return Job(home, pointers=list(pointers))


# -- what uses a file -------------------------------------------------------------------------------------------------

Use = Callable[[Job], Any]


def go_on(job: Job) -> Any:
    """Run to the end; a pointer of before gives the outputs from there on."""
    outputs, rows = job.finish()
    return {version: rows for version, rows in outputs.items() if version >= LAST}, rows


def expected(template: Template) -> Any:
    outputs, rows = template.end
    return {version: outputs[version] for version in outputs if version >= LAST}, rows


def alone(job: Job) -> Any:
    """Go on with the local state, without any copy of it."""
    shutil.rmtree(job.home / "checkpoint" / "rewind" / "snapshots")
    return go_on(job)


def without_disk(job: Job) -> Any:
    shutil.rmtree(job.home / "local")
    return go_on(job)


def without_copies(job: Job) -> Any:
    shutil.rmtree(job.home / "checkpoint" / "rewind" / "snapshots")
    return without_disk(job)


def settled(job: Job) -> Any:
    record(job.checkpoint, settle(job.checkpoint, manifest(2), used=True))
    found = read_manifest(job.checkpoint)
    assert found is not None
    return found.to_json()


def asked(job: Job) -> Any:
    reader = ControlReader(job.checkpoint)
    return reader.partitions(reader.initialOffset(), reader.latestOffset(reader.initialOffset(), None))[0].drain


def owned(job: Job) -> Any:
    output = VersionedDirectory(job.home / "out")
    output.open("query")
    return (job.home / "out" / "_rewind" / "owner.json").exists()


def archived(job: Job) -> Any:
    uri = str(job.home / "archive")
    index = Archive(uri).partitions()["t", 0]
    schema = pa.schema([(name, kind) for name, kind in zip(REQUIRED, ARCHIVE_TYPES, strict=True)])
    rows = read_range(uri, Piece("t", 0, 0, 4500, *index.cut(0, 4500)), schema)
    return pa.Table.from_batches(rows, schema).to_pylist()


ARCHIVE_TYPES = (pa.string(), pa.int32(), pa.int64(), pa.timestamp("ms", "UTC"), pa.binary(), pa.binary())


@dataclass(frozen=True)
class Thing:
    """A kind of file: where it lies (a glob below the home), and what uses it."""

    name: str
    glob: str
    use: Use
    again: bool = False
    """Made while it is used: damaged in a hook."""
    without: tuple[str, ...] = ()
    """Damages that there are not: an archive with other messages under the same offsets is another source, and found
    out where messages are replayed."""


SHARD = f"local/{QUERY}/0"
THINGS = (
    Thing("database: SST", f"{SHARD}/*/db/*.sst", alone),
    Thing("database: MANIFEST", f"{SHARD}/*/db/MANIFEST-*", alone),
    Thing("database: CURRENT", f"{SHARD}/*/db/CURRENT", alone),
    Thing("database: OPTIONS", f"{SHARD}/*/db/OPTIONS-*", alone),
    Thing("database: IDENTITY", f"{SHARD}/*/db/IDENTITY", alone),
    Thing("database: write-ahead log", f"{SHARD}/*/db/*.log", alone),
    Thing("database: rocksdict's settings", f"{SHARD}/*/db/rocksdict-config.json", alone),
    Thing("staged file", f"{SHARD}/*/staged/*.sst", alone),
    Thing("which generation (CURRENT)", f"{SHARD}/CURRENT", alone),
    Thing("changelog: delta", "checkpoint/rewind/changelog/0/*.delta", without_copies),
    Thing("changelog: base", "checkpoint/rewind/changelog/0/*.base", without_copies),
    Thing("snapshot: manifest", "checkpoint/rewind/snapshots/0/*.full.json", without_disk),
    Thing("snapshot: manifest of a step", "checkpoint/rewind/snapshots/0/*.step.json", without_disk),
    Thing("snapshot: step", "checkpoint/rewind/snapshots/0/*.step.sst", without_disk),
    Thing("snapshot: SST", "checkpoint/rewind/snapshots/0/shared/*.sst", without_disk),
    Thing("snapshot: small files", "checkpoint/rewind/snapshots/0/*_*/*/*", without_disk),
    Thing("replayed chunk", "checkpoint/rewind/replay/run/0/*.arrow", without_copies, again=True),
    Thing("manifest.json", f"checkpoint/{NAME}", settled),
    Thing("request to drain", "checkpoint/rewind/control/*.json", asked),
    Thing("output: owner.json", "out/_rewind/owner.json", owned),
    Thing("archive: data", "archive/*.parquet", archived, without=(SWAP, OLD)),
    Thing("archive: index", f"archive/{INDEX_NAME}", archived),
)


@pytest.fixture
def scratch(template: Template) -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(dir=template.home.parent))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def outcome(run: Callable[[], Any], control: Any, job: Job | None) -> str:
    """Give what came of it; a wrong result is an error of the test's, as is an error without a name or a command."""
    try:
        found = run()
    except RewindError as error:
        assert type(error) is not RewindError, "it has a name"
        assert error.command or "command" in str(error), f"it says what to run next: {error}"
        return error.code
    assert found == control, "a wrong result, in silence"
    return "restored" if job is not None and job.restores else "right"


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: thing.name)
def test_files(template: Template, scratch: Path, thing: Thing) -> None:
    sound = thing.use(at(scratch / "sound", template.home, template.pointers))
    control = expected(template) if thing.use in (alone, without_disk, without_copies) else sound
    assert sound == control
    for name in COLUMNS:
        for number in range(DAMAGES[name][1] if name in DAMAGES else PLACES):
            rng = random.Random(f"{SEED}{thing.name} {name} {number}")
            job = at(scratch / f"{name}{number}", template.home, template.pointers)
            hurt: dict[Path, bytes] = {}
            damage = partial(damaged, template, thing, job.home, name, rng, hurt)
            if thing.again:
                job.hook = damage
            else:
                damage()
            came = outcome(partial(thing.use, job), control, job)
            told.note(thing.name, name, came if hurt else "-")
            if thing.use in (alone, without_disk):
                assert came in ("right", "restored"), "changelog and source are sound: they bring everything back"
            elif came not in ("right", "restored"):
                changed = [str(path) for path, data in hurt.items() if path.exists() and path.read_bytes() != data]
                assert changed == [], "what is damaged is not written over"
            shutil.rmtree(job.home)


def damaged(
    template: Template, thing: Thing, home: Path, name: str, rng: random.Random, hurt: dict[Path, bytes], *_: object
) -> None:
    """Damage one file of a kind, or two; `hurt` gets their new bytes, nothing when there is no such damage."""
    paths = [path for path in sorted(home.glob(thing.glob)) if path.stat().st_size]
    if not paths or name in thing.without:
        return
    path = rng.choice(paths)
    data = path.read_bytes()
    if name in DAMAGES:
        hurt[path] = DAMAGES[name][0](data, rng)
    elif name == SWAP:
        rest = [other for other in paths if other != path and other.read_bytes() != data]
        foreign = [file for file in sorted(template.other.glob(thing.glob)) if file.read_bytes() != data]
        if rest:
            other = rng.choice(rest)
            hurt |= {path: other.read_bytes(), other: data}
        elif foreign:
            hurt[path] = rng.choice(foreign).read_bytes()
    else:
        old = template.before / path.relative_to(home)
        older = [file for file in sorted(template.before.glob(thing.glob)) if file.read_bytes() != data]
        if old.exists() and old.read_bytes() != data:
            hurt[path] = old.read_bytes()
        elif older:
            hurt[path] = older[-1].read_bytes()
    for file, content in hurt.items():
        replaced(file, content)


# -- what is no file --------------------------------------------------------------------------------------------------


def test_the_pointer(template: Template, scratch: Path) -> None:
    sound = template.pointers[-1]
    for name in COLUMNS:
        for number in range(4 * PLACES):
            rng = random.Random(f"{SEED}pointer {name} {number}")
            if name == OLD:  # Spark went back with it: it runs the micro-batches after it again
                job = at(scratch / f"{number}", template.home, template.pointers[: rng.randrange(3, LAST)])
                told.note("pointer", name, outcome(lambda job=job: go_on(job), expected(template), job))
                if number:
                    break
                continue
            if name == SWAP:  # another shard's
                pointer = decode(sound)
                data = encode(Pointer(**{f: getattr(pointer, f) for f in pointer.__struct_fields__} | {"shard": 1}))
            else:
                data = DAMAGES[name][0](sound, rng)
            job = at(scratch / f"{name}{number}", template.home, [*template.pointers[:-1], data])
            with pytest.raises(PointerDamaged):
                job.batch()
            told.note("pointer", name, "PointerDamaged")
            shutil.rmtree(job.home)


class Partition:
    """A partition of a changelog topic in memory, in the place of `PartitionReader`."""

    def __init__(self, log: list[tuple[bytes, bytes]]) -> None:
        self.log = log

    def watermarks(self, shard: int) -> tuple[int, int]:
        return 0, len(self.log)

    def read(self, shard: int, start: int, end: int, take: Any) -> None:
        for offset in range(start, end):
            take(*self.log[offset], offset)

    def close(self) -> None:
        pass


def partition_of(home: Path) -> list[tuple[bytes, bytes]]:
    """Give a shard's changelog as messages, in pieces."""
    files = FileChangelog(home / "checkpoint" / "rewind" / "changelog")
    log = []
    for number, entry in enumerate(files.entries(0)):
        data = files.files.read(entry.location)
        for index, (piece, last) in enumerate(cut([data], 3000)):
            key = ChunkKey(entry.kind, entry.commit, number.to_bytes(8, "big"), index, last, Growth())
            log.append((key.encode(), piece))
    return log


@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
def test_a_changelog_in_kafka(template: Template, part: int) -> None:
    row = f"changelog in Kafka: {('key', 'value')[part]}"
    commit = commit_of(template.pointers[-1])
    sound = partition_of(template.home)

    def read(log: list[tuple[bytes, bytes]]) -> Any:
        changelog = KafkaChangelog(KafkaSettings("nowhere:1"), "topic")
        changelog._reader = Partition(log)  # type: ignore[assignment]
        history = changelog.read(0, commit)
        return history.record, history.keys, history.values

    control = read(sound)
    for name in COLUMNS:
        for number in range(12 * PLACES):
            rng = random.Random(f"{SEED}kafka {part} {name} {number}")
            log = [list(message) for message in sound]
            one = rng.randrange(len(log))
            if name in DAMAGES:
                log[one][part] = DAMAGES[name][0](log[one][part], rng)
            elif name == SWAP:
                two = rng.randrange(len(log))
                log[one][part], log[two][part] = log[two][part], log[one][part]
            else:
                log[one][part] = log[rng.randrange(one + 1)][part]
            came = outcome(lambda log=log: read([(key, value) for key, value in log]), control, None)
            told.note(row, name, came)
    assert Kind.BASE.value in {key[6:7] for key, _ in sound}
