"""Damages that a drill does to a dead job's directory: chosen by the seed, and told."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from backend.errors import RewindError
from recovery.commit.pointer import Commit
from recovery.drill.job import CHECKPOINT, LOCAL
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.restore.probe import check_database


class Done(NamedTuple):
    """What was done.

    Attributes:
        what: For the report.
        shards: Whose local state it was done to.
        file: The file that was damaged.
    """

    what: str
    shards: tuple[int, ...]
    file: str = ""


Damage = Callable[[Path, random.Random], Done]
"""Does something to a dead job's directory."""

OLD = "local-before"
"""Beside a job's local state: a copy of it from some micro-batches before."""


def lose_all(out: Path, chance: random.Random) -> Done:
    """Delete all local state."""
    shards = tuple(int(home.name) for home in _shards(out / LOCAL))
    return Done(f"all local state deleted: {lose_disk(out / LOCAL):,} bytes", shards)


def lose_disk(local: Path) -> int:
    """Delete a directory of local state; gives the bytes that are gone."""
    length = sum(path.stat().st_size for path in local.rglob("*") if path.is_file())
    shutil.rmtree(local)
    return length


def lose_shard(out: Path, chance: random.Random) -> Done:
    """Delete one shard's local state."""
    home = chance.choice(_shards(out / LOCAL))
    shutil.rmtree(home)
    return Done(f"local state of shard {home.name} deleted", (int(home.name),))


def corrupt_database(out: Path, chance: random.Random) -> Done:
    """Flip a bit in the data of the largest SST file that one shard's database names.

    Raises:
        ValueError: A check of the database finds nothing: a damage that nobody can notice proves nothing.
    """
    home = chance.choice(_shards(out / LOCAL))
    # a killed job leaves files that its database no longer names: a check passes them over
    files = sorted(home.glob("*/db/*.sst"), key=lambda file: (-file.stat().st_size, file.name))
    for path in files:
        sound = path.read_bytes()
        # data blocks come first; index, properties and footer are at the end
        said = _flip(path, chance, 0, len(sound) // 2)
        try:  # as the probe before a restore does it
            check_database(path.parent)
        except RewindError as error:
            return Done(f"{said}; a check names it: {error.code}", (int(home.name),), str(path))
        path.write_bytes(sound)
    raise ValueError(f"{home}: a bit flipped in any of {len(files)} files, and a check of them does not find it")


def old_database(out: Path, chance: random.Random) -> Done:
    """Put the older copy of a shard's database in the place of the newer one; its staged files stay.

    Raises:
        ValueError: No shard has changed since the copy was made.
    """
    checkpoint, before = _checkpoint(out), Checkpoint(str(out / CHECKPOINT), out / OLD)
    found = []
    for shard in checkpoint.shards:
        old, new, commit = before.local(shard), checkpoint.local(shard), checkpoint.committed(shard)
        if old is None or new is None or old.commit is None or new.commit is None or commit is None:
            continue
        if old.path.name == new.path.name and old.commit < new.commit and commit in new.staged:
            found.append((shard, old, new))
    if not found:
        raise ValueError("no shard's database has changed since it was copied: give the job more input")
    shard, old, new = chance.choice(found)
    assert old.commit is not None and new.commit is not None
    shutil.rmtree(new.path / "db")
    shutil.copytree(old.path / "db", new.path / "db")
    text = f"database of shard {shard} put back from micro-batch {new.commit.version} to {old.commit.version}"
    return Done(text, (shard,))


def corrupt_staged(out: Path, chance: random.Random) -> Done:
    """Flip a bit in the staged file of a committed commit that its database does not have yet.

    Raises:
        ValueError: No shard waits for its staged file.
    """
    checkpoint = _checkpoint(out)
    here = {shard: local for shard in checkpoint.shards if (local := checkpoint.local(shard)) is not None}
    waiting = [shard for shard, local in here.items() if local.commit != _committed(checkpoint, shard)]
    if not waiting:
        raise ValueError("every shard has ingested its staged file already: try another seed")
    shard = chance.choice(waiting)
    commit = _committed(checkpoint, shard)
    (path,) = (out / LOCAL).glob(f"*/{shard}/*/staged/{commit.name}.sst")
    return Done(_flip(path, chance, 0, path.stat().st_size), (shard,), str(path))


def corrupt_changelog(out: Path, chance: random.Random) -> Done:
    """Flip a byte in a changelog record that the committed state needs.

    Raises:
        ValueError: The changelog is not in files.
    """
    path = _record(out, chance, newest=False)
    return Done(_flip(path, chance, 0, path.stat().st_size), (int(path.parent.name),), str(path))


def cut_changelog(out: Path, chance: random.Random) -> Done:
    """Delete the changelog's record of a shard's committed commit.

    Raises:
        ValueError: The changelog is not in files.
    """
    path = _record(out, chance, newest=True)
    path.unlink()
    return Done(f"{path} deleted", (int(path.parent.name),), str(path))


def _record(out: Path, chance: random.Random, *, newest: bool) -> Path:
    checkpoint = _checkpoint(out)
    shard = chance.choice(list(checkpoint.shards))
    commit = _committed(checkpoint, shard)
    folder = out / CHECKPOINT / "rewind" / "changelog" / str(shard)
    if not folder.is_dir():
        raise ValueError(
            f"the changelog is at {checkpoint.changelog_uri}: this drill damages one beside the checkpoint"
        )
    if newest:
        return folder / f"{commit.name}.delta"
    needed = []
    for one in [commit, *checkpoint.changelog.read(shard, commit).record.ancestors]:
        if (folder / f"{one.name}.base").exists():  # nothing before is needed, and it is in the deltas, too
            break
        needed.append(folder / f"{one.name}.delta")
    if not needed:
        raise ValueError(f"every row of shard {shard} is in a base as of its last commit: try another seed")
    return chance.choice(needed)


def _committed(checkpoint: Checkpoint, shard: int) -> Commit:
    commit = checkpoint.committed(shard)
    if commit is None:
        raise ValueError(f"shard {shard} has committed nothing: give the job more input")
    return commit


def _checkpoint(out: Path) -> Checkpoint:
    return Checkpoint(str(out / CHECKPOINT), out / LOCAL)


def _shards(local: Path) -> list[Path]:
    return sorted(path for path in local.glob("*/*") if path.is_dir() and path.name.isdecimal())


def _flip(path: Path, chance: random.Random, low: int, high: int) -> str:
    at = chance.randrange(low, high)
    # a hard link may share the bytes with a copy: the damaged file gets bytes of its own
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << chance.randrange(8)
    path.unlink()
    path.write_bytes(data)
    return f"one bit of byte {at} of {path} flipped"
