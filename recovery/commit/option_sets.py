"""Option sets: a micro-batch that Spark has planned runs under the options that it was planned with, however often.

Spark plans a micro-batch by writing `<checkpoint>/offsets/<version>`, and runs it again, after a restart too, until it
is committed. Its first run may have been published already, so the next one has to make the same rows. Therefore
options that change between two starts take effect at the first version that was *not planned* when they were changed:
the manifest keeps each set of options with the first version that it holds from, and a task looks its own up by
version.

A set holds what changes a micro-batch's output and may be changed (`OPTIONS`). What it does not hold:

* what cannot change: shards, route, keys, windows, aggregates, parser, time zone (the manifest refuses it);
* what changes no row: `arrow_rows` (rows are put in the order of the source again), `snapshots`, `retain`, `local_dir`,
  `trigger`, `name`, the limits of a micro-batch (they are in what was planned, as is a drain of `until`);
* what is no value: the job's own functions, and the release. A planned micro-batch runs under those of today; where
  that makes other rows than were published, the sink stops the query by name (`backend.sinks.record`).

A checkpoint that is taken back has fewer planned versions. Sets of versions that are planned no more are dropped; a
version whose entry in `offsets/` was removed is planned anew, under the options of that start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from backend.batch import FREE_OPTIONS
from recovery.files import open_files

OPTIONS = (
    *(f"operator.{name}" for name in FREE_OPTIONS),
    "max_ahead_ms",  # as the pack stage judges it
    "partitions",  # source partitions known at the start: they hold windows open before they bring anything
)
"""Paths of the manifest's entries that may change between starts and change what a micro-batch makes: an option set."""

FREE = (
    *OPTIONS,
    "first_offsets",  # those of the query that has begun stay
    "topics",  # compared by their ids at the start
    "changelog",
    "place",  # where the checkpoint was at its last start
    "places",  # where it was before, and may still be
    "release",
)
"""Paths of the manifest's entries that may change between starts; a change of any other one is refused.

A longer retention never reopens what is below the stored bound.
"""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True, slots=True)
class OptionSet:
    """The options of some versions.

    Attributes:
        since: The first version that they hold for; they hold until the next set's.
        options: Path in the manifest -> value, for the paths of `OPTIONS` that the job has.
    """

    since: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ByVersion(Generic[T]):
    """Something that depends on the version of a micro-batch.

    Attributes:
        steps: (first version, value), rising; the first one holds for all versions before it, too.

    >>> limit = ByVersion(((0, "old"), (7, "new")))
    >>> limit.at(6), limit.at(7), limit.map(len).at(6)
    ('old', 'new', 3)
    """

    steps: tuple[tuple[int, T], ...]

    @classmethod
    def always(cls, value: T) -> ByVersion[T]:
        """Return one value for all versions."""
        return cls(((0, value),))

    def at(self, version: int) -> T:
        """Return the value that holds for a version."""
        _, found = self.steps[0]
        for since, value in self.steps:
            if since <= version:
                found = value
        return found

    def map(self, function: Callable[[T], U]) -> ByVersion[U]:
        """Return what a function makes of each value."""
        return ByVersion(tuple((since, function(value)) for since, value in self.steps))

    def changed(self, after: int, version: int) -> bool:
        """Return whether another value holds from some version on that lies after one version, up to another one.

        >>> limit = ByVersion(((0, "old"), (7, "new")))
        >>> limit.changed(6, 7), limit.changed(7, 8), limit.changed(3, 6)
        (True, False, False)
        """
        return any(after < since <= version for since, _ in self.steps)

    @property
    def only(self) -> bool:
        """Whether there is one value for all versions."""
        return len(self.steps) == 1


def is_free(path: str) -> bool:
    """Return whether an entry of the manifest, or a part of it, may change between starts.

    >>> is_free("operator.policies.late_ms"), is_free("operator.window.size"), is_free("topics")
    (True, False, True)
    """
    return any(path == entry or path.startswith(f"{entry}.") for entry in FREE)


def options_of(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the option set that is in a manifest's entries.

    >>> options_of({"route": "key", "operator": {"window": {"size": 3}, "retention_ms": 5}})
    {'operator.retention_ms': 5}
    """
    found = {}
    for path in OPTIONS:
        here: Any = entries
        for name in path.split("."):
            here = here.get(name, _ABSENT) if isinstance(here, Mapping) else _ABSENT
        if here is not _ABSENT:
            found[path] = here
    return found


_ABSENT = object()


def following(stored: Sequence[OptionSet], options: Mapping[str, Any], planned: Sequence[int]) -> tuple[OptionSet, ...]:
    """Return the sets that hold from a start on.

    Args:
        stored: Those of the start before, rising; empty at the first start.
        options: The job as it is now.
        planned: Versions that Spark has planned and retains, rising: a set that none of them needs is dropped.
    """
    newest, oldest = (planned[-1], planned[0]) if planned else (-1, 0)
    remaining = [one for one in stored if one.since <= newest]
    if not remaining or remaining[-1].options != options:
        remaining.append(OptionSet(newest + 1 if remaining else 0, options))
    return sets_from(remaining, oldest)


def sets_from(sets: Sequence[OptionSet], version: int) -> tuple[OptionSet, ...]:
    """Return the sets that hold for a version or for later ones."""
    ends = [after.since for after in sets[1:]]
    return tuple(one for one, end in zip(sets, [*ends, None], strict=True) if end is None or end > version)


def versions_in(checkpoint: str, log: str) -> list[int]:
    """Return the versions in one of Spark's logs, rising: `offsets` are planned, `commits` committed."""
    return sorted(int(name) for name in open_files(checkpoint).list(log) if name.isdecimal())


def newest_in(checkpoint: str, log: str) -> int:
    """Return the newest version in one of Spark's logs, -1 where there is none."""
    return max(versions_in(checkpoint, log), default=-1)
