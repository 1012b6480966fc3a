"""Where the shards of an executor that is gone run next: Spark is told, so that it does not hold their tasks back.

Spark prefers the executor that has a shard's state, also when that one is gone: the task is held back for
`spark.locality.wait`, and runs on the executor that replaces the dead one when that is there before, whose JVM and
Python start cold. An executor that is left does at once: on the same host; on another one where there are copies of all
shards (`standby=1`), or where the disk went with the executor, so that who replaces it finds nothing either. Tasks that
are being held back already are not moved by it.

Executors that come later get such shards back, one by one, once they are warm and have a copy: a task of a round of
copies was on their disk, and left it lacking nothing of that shard.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

log = logging.getLogger("rewind.standby")
LOOK_S = 0.1
WARM_S = 60.0
"""What a new executor is given to be copied to, before a shard is given back to it: many rounds of copies."""


@dataclass(frozen=True, slots=True)
class Place:
    """An executor and its host, as Spark names them."""

    executor: str
    host: str


class Cluster(Protocol):
    """What Spark knows of executors and of where shards are; `query` is Spark's query."""

    def executors(self) -> frozenset[str]:
        """Return the ids of the executors that are there; asked ten times a second."""

    def active(self, executors: Collection[str]) -> list[Place]:
        """Return those that tasks are given to: not what is about to go."""

    def place(self, query: Any, shard: int) -> Place | None:
        """Return where Spark prefers to run a shard, None where it prefers nothing."""

    def prefer(self, query: Any, shard: int, old: Place, new: Place) -> None:
        """Have Spark prefer another executor, for tasks that it has not yet planned, if it still prefers the old."""


class Placement:
    """Sends shards to executors that are left, and gives them back; asked by one thread.

    Args:
        cluster: Spark.
        shards: Their number.
        clock: Seconds.
        own_disks: Each executor has a disk for itself, which goes with it.
    """

    def __init__(
        self, cluster: Cluster, shards: int, clock: Callable[[], float] = time.monotonic, *, own_disks: bool = False
    ) -> None:
        self._cluster, self._shards, self._clock, self._own_disks = cluster, shards, clock, own_disks
        self._looked_s = float("-inf")
        self._since: dict[str, float] = {}
        self._lost = False
        self._away: set[int] = set()
        self._new: set[str] = set()
        self._copied: dict[str, set[int]] = {}  # by disk: the shards that it has copies of

    @property
    def returning(self) -> frozenset[int]:
        """Shards that were sent elsewhere, when there are new executors that may get them back."""
        return frozenset(self._away if self._new else ())

    def look(self, query: Any) -> bool:
        """Send shards elsewhere whose executor is gone; each to where the fewest are, on its own host if there is one.

        Only to where its state is, or a copy, unless every executor has a disk for itself.

        Args:
            query: Spark's, which runs.

        Returns:
            Whether Spark was asked; it is not each time.
        """
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        there, known = self._cluster.executors(), self._since
        self._since = {one: known.get(one, now_s) for one in there}
        self._lost = self._lost or not known.keys() <= there
        self._new = (self._new & there) | (there - known.keys()) if known else set()
        if self._own_disks:
            self._copied = {disk: shards for disk, shards in self._copied.items() if disk in there}
        # those that are here for long first: one that has just come is as cold as the next
        left = known.keys() & there
        pool = {one for one in left if self._is_warm(one)} or left
        targets = self._cluster.active(sorted(pool)) if self._lost and pool else []
        if not targets:
            return True
        places, again = self._places(query), False
        counts = Counter(place.executor for place in places.values())
        for shard, place in places.items():
            if place.executor not in there:
                able = [one for one in targets if self._has_state(one, shard, place)]
                if not (able := able or (targets if self._own_disks else [])):
                    again = True  # what replaces it finds its state: Spark may do better
                    continue
                target = _emptiest(able, counts, query, shard, place.host)
                self._cluster.prefer(query, shard, place, target)
                log.warning("executor %s is gone: shard %d is to run on %s", place.executor, shard, target.executor)
                counts[target.executor] += 1
                self._away.add(shard)
        self._lost = again
        return True

    def copied(self, query: Any, copies: Iterable[tuple[Place, Collection[int]]]) -> None:
        """Note where a round of copies has left which shards lacking nothing, and give a shard back."""
        for place, shards in copies:
            self._copied.setdefault(self._disk(place), set()).update(shards)
        if self._new and self._away:
            self._give_back(query)

    def _give_back(self, query: Any) -> None:
        """Give one of the shards that were sent elsewhere to an executor that came since and has fewer."""
        places = self._places(query)
        counts = Counter(place.executor for place in places.values())
        crowded = {shard: places[shard] for shard in sorted(self._away & places.keys())}
        if not crowded:
            return
        if all(counts[place.executor] - counts[new] < 2 for place in crowded.values() for new in self._new):
            # their copies are not kept up from now on, unless those of all shards are
            self._copied = {disk: shards - self._away for disk, shards in self._copied.items()}
            self._away, self._new = set(), set()
            return
        warm = [one for one in sorted(self._new) if self._is_warm(one)]
        targets = self._cluster.active(warm) if warm else []
        for shard, place in sorted(crowded.items(), key=lambda one: -counts[one[1].executor]):
            able = [one for one in targets if self._has_copy(one, shard)]
            target = _emptiest(able, counts, query, shard) if able else place
            if counts[place.executor] - counts[target.executor] >= 2:
                self._cluster.prefer(query, shard, place, target)
                log.warning("shard %d is to run on executor %s, which has fewer", shard, target.executor)
                return

    def _has_state(self, target: Place, shard: int, old: Place) -> bool:
        return self._has_copy(target, shard) or (target.host == old.host and not self._own_disks)

    def _has_copy(self, target: Place, shard: int) -> bool:
        return shard in self._copied.get(self._disk(target), ())

    def _disk(self, place: Place) -> str:
        return place.executor if self._own_disks else place.host

    def _is_warm(self, executor: str) -> bool:
        return self._looked_s - self._since[executor] >= WARM_S

    def _places(self, query: Any) -> dict[int, Place]:
        found = ((shard, self._cluster.place(query, shard)) for shard in range(self._shards))
        return {shard: place for shard, place in found if place is not None}


def _emptiest(targets: Collection[Place], counts: Mapping[str, int], query: Any, shard: int, host: str = "") -> Place:
    """Choose one; among equals by what differs between queries, which do not know of one another."""

    def order(one: Place) -> tuple[bool, int, int]:
        return bool(host) and one.host != host, counts[one.executor], zlib.crc32(f"{query.id} {shard} {one}".encode())

    return min(targets, key=order)
