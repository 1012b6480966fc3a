"""What snapshots there are, and the way over them to a commit: the reading half of `recovery.snapshots.publisher`.

As many manifests are read as there are steps on the way, however many snapshots there are: a listing gives their names,
and each step's manifest names the commit before it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from backend.errors import StateCorrupted, UnknownFormat
from backend.store.storage import done_without
from recovery.commit.pointer import At, Commit, CommitRecord
from recovery.files import Files
from recovery.snapshots.manifest import PackedFile, Snapshot, damaged, decode_manifest, manifest_name

_KNOWN_STEPS = 4096
"""So many manifests of steps are remembered: they are never written twice."""

Broken = tuple[Commit, bool]
"""A snapshot that turned out damaged: its commit, and whether it is a full one."""


class SnapshotReader:
    """The snapshots under one base directory, to look at.

    Args:
        files: The directory.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._steps: dict[tuple[int, str], Snapshot] = {}

    def manifests(self, shard: int) -> Sequence[Snapshot]:
        """Read the manifests of a shard, oldest commit first; steps before full snapshots of the same commit.

        Raises:
            StateCorrupted: A manifest cannot be read. `offers` leaves such snapshots out instead.
            UnknownFormat: A newer release wrote one.
        """
        return [self._manifest(shard, name) for name in self._manifests(shard)]

    def offers(
        self,
        shard: int,
        *,
        toward: Commit | None = None,
        start: At | None = None,
        broken: Collection[Broken] = (),
    ) -> tuple[Snapshot, ...]:
        """Give what the planner can choose from; a snapshot whose manifest is damaged, or not given, is not offered.

        Args:
            shard: The shard.
            toward: Only what leads to this commit, from the newest full snapshot before it: as many manifests are read
                as there are steps between them, however many snapshots there are. None: all snapshots.
            start: A database that is there already. When steps lead from it to `toward`, only they are offered.
            broken: Left out.
        """
        names = self._manifests(shard)
        if toward is None:
            found = [self._usable(shard, name) for name in names]
            return tuple(one for one in found if one is not None)
        if start is not None:
            steps = self._back(shard, toward, start, set(names), broken)
            if steps and steps[-1].parent == start.commit:
                return tuple(steps)
        return tuple(self._back(shard, toward, None, set(names), broken))

    def lack(self, row: CommitRecord, every: int) -> bool:
        """Tell whether the newest full snapshot before a commit is `every` versions back, or a step since is missing.

        Known by the names in one listing: a full snapshot counts by its version where the steps after it are more than
        the ancestors that a commit names.
        """
        names = set(self._manifests(row.shard))
        for at in (row.commit, *row.ancestors):
            if manifest_name(at, full=True) in names:
                return row.commit.version - at.version >= every
            if manifest_name(at, full=False) not in names:
                return True
        fulls = (int(name[:20]) for name in names if name.endswith(".full.json"))
        return not any(0 <= row.commit.version - version < every for version in fulls)

    def _back(
        self,
        shard: int,
        toward: Commit,
        start: At | None,
        names: Collection[str],
        broken: Collection[Broken],
        whole: Mapping[str, int] | None = None,
    ) -> list[Snapshot]:
        """Walk from a commit back over steps: to `start`, or to the newest full snapshot; less where a step is missing.

        Args:
            shard: The shard.
            toward: Where the walk begins.
            start: Where it ends; full snapshots are passed by then.
            names: Manifests that there are.
            broken: Left out.
            whole: Shared files that there are: a full snapshot counts only with all its files, and a manifest that its
                filesystem does not give ends the walk: nothing may be deleted then. None: neither is looked at.
        """
        read = self._usable if whole is None else self._sound
        found: list[Snapshot] = []
        at: Commit | None = toward
        while at is not None and (start is None or at != start.commit):
            name = manifest_name(at, full=True)
            if start is None and name in names and (at, True) not in broken:
                full = read(shard, name)
                if full is not None and (whole is None or len(self._present(full, whole)) == len(full.files)):
                    return [*found, full]
            name = manifest_name(at, full=False)
            step = read(shard, name) if name in names and (at, False) not in broken else None
            if step is None or (step.parent is not None and step.parent.version >= at.version):
                return found
            found.append(step)
            if start is not None and _is_before(step.parent, start.commit):
                return found
            at = step.parent
        return found

    def _manifests(self, shard: int) -> list[str]:
        return sorted(
            name
            for name in self.files.list(str(shard))
            if name.endswith((".full.json", ".step.json")) and name[:20].isdecimal()
        )

    def _present(self, snapshot: Snapshot, shared: Mapping[str, int]) -> list[PackedFile]:
        """Give the files of a full snapshot that are there, by name and length."""
        own = self.files.list(f"{snapshot.shard}/{snapshot.folder}")
        lengths = (
            shared.get(file.shared) if file.shared is not None else own.get(file.name) for file in snapshot.files
        )
        return [file for file, length in zip(snapshot.files, lengths, strict=True) if length == file.length]

    def _usable(self, shard: int, name: str) -> Snapshot | None:
        """Read a manifest as `_sound` does; None, too, for one that its filesystem does not give."""
        found = None
        with done_without():
            found = self._sound(shard, name)
        return found  # noqa: RET504 - a return inside would hide from mypy that it may end without one

    def _sound(self, shard: int, name: str) -> Snapshot | None:
        """Read a manifest, or remember a step's; None for one that cannot be used."""
        known = self._steps.get((shard, name))
        if known is not None:
            return known
        try:
            snapshot = self._manifest(shard, name)
        except (StateCorrupted, UnknownFormat):
            return None
        if not snapshot.full:
            if len(self._steps) >= _KNOWN_STEPS:
                self._steps.clear()
            self._steps[shard, name] = snapshot
        return snapshot

    def _manifest(self, shard: int, name: str) -> Snapshot:
        where = f"{self.files.uri}/{shard}/{name}"
        try:
            data = self.files.read(f"{shard}/{name}")
        except FileNotFoundError as error:
            raise damaged(where, "the manifest is missing") from error
        return decode_manifest(data, shard, name, where)


def _is_before(at: Commit | None, start: Commit | None) -> bool:
    """Tell whether a walk has passed the place where it should have ended."""
    return start is not None and (at is None or at.version < start.version)
