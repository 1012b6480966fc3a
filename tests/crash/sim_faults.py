"""How a simulated run fails: deaths, rivals, full and damaged disks, zombies, lost commits, a trimmed source."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from backend.errors import RewindError, StateAhead
from backend.store.storage import storage_failed
from recovery.commit.pointer import decode
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import snapshots
from recovery.killpoints import POINTS

QUERY = "sim"
PUBLISHING = ("before_publish", "during_publish", "after_publish")
PRUNING = ("prune_changelog", "prune_packages")
REPLAYING = tuple(point for point in POINTS if point.startswith("restore") or point == "during_replay")
FETCHING = ("fetch", "during_fetch", "after_fetch")
RESTORING = (*REPLAYING, *REPLAYING, *FETCHING, "before_ingest", "after_ingest", "during_upload")
WRITING = ("during_fetch", "before_ingest", "before_stage", "during_stage", "before_changelog", "before_base", "upload",
           "during_upload")  # fmt: skip
IN_ATTEMPTS = (*(p for p in POINTS if p not in (*PUBLISHING, *PRUNING, *REPLAYING)), *FETCHING * 3)


class Death(BaseException):
    """The process dies here; not an error that code may handle."""


class Faults:
    """The part of a `tests.crash.simulation.World` that breaks things; it uses the world's state and its attempts."""

    @contextmanager
    def _fault(self, version: int, shard: int, host: int) -> Iterator[None]:
        """Arm a death, or another attempt of the same task on the other host, at some kill point."""
        kind = self.random.random()
        if kind > 0.25:
            yield
            return
        if kind > 0.08:
            with self._may_die(IN_ATTEMPTS):
                yield
            return
        if kind > 0.04:
            with self._no_room():
                yield
            return
        left = self.random.randint(1, 12)

        def hook(point: str) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.hook = None
                self._rival(version, shard, 1 - host)

        self.hook = hook
        try:
            yield
        finally:
            self.hook = None

    @contextmanager
    def _may_die(self, points: Sequence[str]) -> Iterator[None]:
        """Arm a death at one of these points, where it is passed for the first, second or third time."""
        wanted, left = self.random.choice(points), self.random.choice((1, 1, 2, 3))

        def hook(point: str) -> None:
            nonlocal left
            left -= point == wanted
            if left == 0:
                self.hook = None
                self.note(f"died at {point}")
                raise Death(point)

        self.hook = hook
        try:
            yield
        finally:
            self.hook = None

    @contextmanager
    def _no_room(self) -> Iterator[None]:
        """Let the disk be full from some write on, to the end of the attempt; then there is room again."""
        left = self.random.randint(0, 4)

        def hook(point: str) -> None:
            nonlocal left
            if point in WRITING:
                left -= 1
                if left < 0:
                    self.note("disk full", point)
                    raise storage_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), point)

        self.hook = hook
        try:
            yield
        finally:
            self.hook = None

    @contextmanager
    def _driver_may_die(self, points: Sequence[str], share: float = 0.1) -> Iterator[None]:
        """Arm a death, or not."""
        if self.chance(share):
            with self._may_die(points):
                yield
        else:
            yield

    def _rival(self, version: int, shard: int, host: int) -> None:
        """Run another attempt of a task while one is under way elsewhere."""
        try:
            self._attempt(version, shard, host)
            self.note("attempt running while another commits", f"batch {version} shard {shard}")
        except RewindError as error:
            self.trace.append(f"rival failed: {error}")

    def _damage(self, version: int, shard: int, host: int) -> None:
        """Take away or damage something on a host's disk, or something that can be done without."""
        generation = ShardDirectory(self.root / f"host{host}", QUERY, shard).current()
        pointer = self.pointer(version, shard)
        kind = self.random.choice(("disk", "staged lost", "staged damaged", "base damaged"))
        staged = generation.staged(pointer.commit) if generation is not None and pointer is not None else None
        if kind == "disk":
            shutil.rmtree(self.root / f"host{host}", ignore_errors=True)
            self.note("disk lost", f"host {host}")
        elif kind == "base damaged":
            self._damage_base(shard)
        elif staged is not None and staged.exists():
            if kind == "staged lost":
                staged.unlink()
                self.note("staged file lost", f"shard {shard} host {host}")
            else:
                self._flip(staged)
                self.note("staged file damaged", f"shard {shard} host {host}")

    def _damage_base(self, shard: int) -> None:
        """Damage a base whose deltas are all still there: a reader can do without it."""
        folder = Path(self.checkpoint) / "rewind" / "changelog" / str(shard)
        bases = sorted(folder.glob("*.base")) if folder.is_dir() else []
        if bases and shard not in self.pruned:
            self._flip(self.random.choice(bases))
            self.unsound.add(shard)
            self.note("base damaged", f"shard {shard}")

    def _flip(self, path: Path) -> None:
        """Flip one bit; a new file, so that hard links of it stay sound."""
        data = bytearray(path.read_bytes())
        at = self.random.randrange(len(data))
        data[at] ^= 1 << self.random.randrange(8)
        path.unlink()
        path.write_bytes(bytes(data))

    def _after_commit(self, version: int, batches: int) -> None:
        """What may come between two micro-batches: pruning, zombies, lost commits, a trimmed source."""
        retained = self.states[-3:]
        for shard in range(self.shards):
            keep = [decode(state[shard]).commit for state in retained]
            # pruning trusts a base that is there; one that was damaged takes the place of nothing any more
            sound = shard not in self.unsound
            with suppress(Death), self._driver_may_die(PRUNING, 0.3):
                if sound and self.chance(0.15):
                    self.pruned.add(shard)
                    if self.job(shard, 0).changelog.prune(shard, keep):
                        self.note("changelog pruned", f"shard {shard}")
                if self.chance(0.15) and snapshots(self.checkpoint).prune(shard, keep):
                    self.note("snapshots pruned", f"shard {shard}")
        if self.stale and self.chance(0.2):
            self._zombie(*self.stale.pop(self.random.randrange(len(self.stale))))
        if self.chance(0.1):
            self._trim(retained)
        if self.chance(0.06) and version < batches - 1:
            self._lose_commit(version)

    def _zombie(self, version: int, shard: int, data: bytes | None, host: int) -> None:
        """Let an attempt go on that was given up long ago: its pointer is old, and what it writes is late."""
        if version >= len(self.states):
            return
        try:
            self._attempt(version, shard, host, decode(data) if data is not None else None)
            self.note("late file of a zombie", f"batch {version} shard {shard} host {host}")
        except StateAhead:
            self.note("zombie stopped by a newer state")
        except RewindError as error:
            self.trace.append(f"zombie failed: {error}")

    def _trim(self, retained: list[dict[int, bytes]]) -> None:
        """Drop from the source what no retained commit needs."""
        # a retained commit may run again, and reads what came after the one before it
        starts = self.batches[max(0, len(self.states) - len(retained))].ends
        needed = [starts.get(p, 0) for p in range(self.partitions)]
        for state in retained:
            for shard, data in state.items():
                record = self.job(shard, 0).changelog.read(shard, decode(data).commit).record
                for _, partition, offset in record.replay_from:
                    needed[partition] = min(needed[partition], offset)
        if len(self.states) <= len(retained):
            return
        for partition, offset in enumerate(needed):
            if offset > self.source.earliest[partition]:
                self.source.earliest[partition] = offset
                self.note("source trimmed to what is needed", f"partition {partition} to {offset}")

    def _lose_commit(self, version: int) -> None:
        """Remove Spark's last commit; perhaps after a task of the next micro-batch has run."""
        if self.chance(0.5) and len(self.states) < len(self.batches) + 1:
            if len(self.batches) == len(self.states):
                self._plan(version + 1, last=False)
            shard = self.random.randrange(self.shards)
            try:
                self._attempt(version + 1, shard, self.home.get(shard, 0))
            except RewindError as error:
                self.trace.append(f"before the loss: {error}")
            del self.batches[version + 1 :]
        self.states.pop()
        self.note("committed micro-batch ran again", version)
