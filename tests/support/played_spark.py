"""Plays Spark around the real processor: offsets, state, timers, commits, hosts, and a driver that restores beside it.

A run is a list of planned micro-batches over a source in memory. `Undisturbed` runs them one after the other.
`Disturbed` takes disks, kills attempts and drivers, runs committed micro-batches again, sends rows of the control
stream that mean nothing, and restores lost shards beside the query. Both must give the same rows with the same ids, and
the same state.
"""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pandas as pd
import pyarrow as pa

from backend.batch import OFFSET, PARTITION, STREAM, TIME, Operator
from backend.boundary import CrossedError
from backend.errors import RewindError, StateAhead, StateCorrupted, StateUnavailable
from backend.sinks.tables import ERRORS, RESULTS, readable, unpack
from backend.spark import shard_task
from backend.spark.pack import frames, packing
from backend.spark.pack.assembling import Packed, packed_rows
from backend.spark.processor import ShardProcessor
from backend.spark.shard_task import ProcessorPlan
from backend.store.protocol import Region
from recovery import attempt
from recovery.changelog.file import FileChangelog
from recovery.commit.option_sets import ByVersion
from recovery.commit.pointer import Pointer, RestoringPointer, decode, state_of
from recovery.commit.shard_directory import ShardDirectory
from recovery.files import open_files
from recovery.jobs import ShardJob, snapshots
from recovery.killpoints import POINTS, QUEUE_POINTS
from recovery.queue import entries, seals
from recovery.queue.entries import Draft, Queue
from recovery.restore import open_shard, probe, replay
from recovery.restore.read_again import make_again
from recovery.supervise.housekeeping import APART_S, Housekeeping
from tests.crash.sim_faults import IN_ATTEMPTS, RESTORING, Death
from tests.crash.sim_job import pieces_of
from tests.crash.simulation import simulated
from tests.model.planned_options import KINDS, operator_of
from tests.model.window_driver import SCHEMA, shard_of
from tests.oracle.windows import Message
from tests.support.bases import based

QUERY = "played"
KEEP = 4
"""Versions that Spark retains."""
IDLE = 5
"""Micro-batches without input at the end."""
GROUPING = 100
Rows = list[tuple[str, str, dict[str, Any]]]
"""(kind, id, row)."""


@dataclass(frozen=True)
class Planned:
    """A micro-batch in Spark's offset log; `adopt` as the control stream's offset carries it."""

    starts: dict[tuple[int, int], int]
    ends: dict[tuple[int, int], int]
    time_ms: int
    drain: bool
    adopt: dict[int, str] = field(default_factory=dict)


class Timers:
    """Spark's state of one grouping key: a value and its timers."""

    def __init__(self, value: Any = None, timers: frozenset[int] = frozenset()) -> None:
        self.value, self.timers = value, set(timers)

    def getValueState(self, name: str, schema: str) -> Timers:
        return self

    def get(self) -> Any:
        return self.value

    def update(self, value: Any) -> None:
        self.value = value

    def registerTimer(self, at: int) -> None:
        self.timers.add(at)

    def deleteTimer(self, at: int) -> None:
        self.timers.discard(at)

    def listTimers(self) -> Iterator[int]:
        return iter(sorted(self.timers))


class Now:
    def __init__(self, ms: int) -> None:
        self.ms = ms

    def getCurrentProcessingTimeInMs(self) -> int:
        return self.ms


class Story:
    """What is read and what is planned: the same for both runs of a seed."""

    def __init__(self, seed: int, kind: str | None = None) -> None:
        rng = random.Random(f"story {seed}")
        self.seed, self.kind = seed, kind or rng.choice(sorted(KINDS))
        self.shards = 1 if self.kind == "session by number" else rng.choice((1, 2, 3))
        self.partitions = 1 if "number" in self.kind else rng.choice((1, 2))
        self.streams = 2 if self.kind == "join" else 1
        free = {name: values for name, values in KINDS[self.kind].items() if name != "partitions"}
        options = {name: rng.choice(values) for name, values in free.items()}
        changed = options | {name: rng.choice(free[name]) for name in rng.sample(sorted(free), 1)}
        self.batches: list[Planned] = []
        self.messages: dict[tuple[int, int], list[Message]] = {
            (s, p): [] for s in range(self.streams) for p in range(self.partitions)
        }
        self._messages(rng)
        self._plan(rng)
        at = rng.randint(1, len(self.batches) - 1)  # what queues at the end has a micro-batch more
        self.operators: ByVersion[Operator] = ByVersion(
            ((0, operator_of(self.kind, options)), (at, operator_of(self.kind, changed)))
        )
        self.max_ahead = ByVersion(((0, options["max_ahead"]), (at, changed["max_ahead"])))
        self.bad = {(m.place) for ms in self.messages.values() for m in ms if rng.random() < 0.05}

    def _messages(self, rng: random.Random) -> None:
        newest, offsets = 1_000, dict.fromkeys(self.messages, 0)
        for _ in range(rng.randint(20, 60)):
            place = rng.choice(sorted(self.messages))
            time = newest + rng.choice((0, 0, 1, 1, 2, 3, 5, 7, 10, 12, 25, -1, -3, -8, -15, -40))
            newest = max(newest, time)
            fields = {
                "key": rng.choice(("a", "b", "ab", "c", None)),
                "value": rng.choice((None, 1, 2, -3)),
                "weight": rng.choice((None, 0.5, -1.25, 3.0)),
            }
            self.messages[place].append(Message(offsets[place], time, fields, place[1], place[0]))
            offsets[place] += rng.choice((1, 1, 1, 3))

    def _plan(self, rng: random.Random) -> None:
        ends, time_ms = dict.fromkeys(self.messages, 0), 1_000
        while True:
            starts, ends = ends, dict(ends)
            left = {place: [m for m in ms if m.offset >= starts[place]] for place, ms in self.messages.items()}
            time_ms += rng.choice((1, 5, 12, 45))
            quiet = rng.random() < 0.2
            for place, mine in left.items():
                take = 0 if quiet else min(len(mine), rng.randint(0, 5))
                ends[place] = mine[take - 1].offset + 1 if take else starts[place]
            done = not any(left.values())
            self.batches.append(Planned(starts, ends, time_ms, drain=rng.random() < 0.08))
            if done:
                break
        for _ in range(IDLE):
            time_ms += rng.choice((1, 5, 12, 45))
            self.batches.append(Planned(ends, ends, time_ms, drain=False))

    def read(self, starts: dict[Any, int], ends: dict[Any, int]) -> list[Message]:
        return [
            m
            for place, ms in self.messages.items()
            for m in ms
            if starts.get(place, 0) <= m.offset < ends.get(place, 0)
        ]

    @property
    def held(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {place: (0, ms[-1].offset + 1 if ms else 0) for place, ms in self.messages.items()}

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        names = self.operators.at(0).input_fields
        return tuple(SCHEMA.field(name.rpartition(".")[2]).with_name(name) for name in names)

    def arrow(self, messages: list[Message]) -> pa.RecordBatch:
        """Lay out source rows as the pack stage reads them."""
        columns: dict[str, pa.Array] = {
            STREAM: pa.array([m.stream for m in messages], pa.int32()),
            PARTITION: pa.array([m.partition for m in messages], pa.int32()),
            OFFSET: pa.array([m.offset for m in messages], pa.int64()),
            TIME: pa.array([m.time for m in messages], pa.int64()),
            frames.SHARD_IN: pa.array([shard_of((m.fields["key"],), self.shards) for m in messages], pa.int32()),
            frames.TIMESTAMP_IN: pa.array([m.time - 3 if m.offset % 4 else None for m in messages], pa.int64()),
            frames.KEY_IN: pa.nulls(len(messages), pa.binary()),
            frames.RAW_IN: pa.nulls(len(messages), pa.binary()),
            frames.MALFORMED_IN: pa.array(["bad" if m.place in self.bad else None for m in messages], pa.string()),
        }
        for entry in self.fields:
            side, _, own = entry.name.rpartition(".")
            if side in ("", ("left", "right")[messages[0].stream]):
                values = [m.fields[own] for m in messages]
                columns[frames.column_name(entry.name)] = pa.array(values, entry.type)
        return pa.RecordBatch.from_pydict(columns)


class Undisturbed:
    """Runs a story's micro-batches one after the other."""

    def __init__(self, story: Story, root: Path) -> None:
        self.story, self.root, self.seed, self.rocks = story, root, story.seed, False
        self.random = random.Random(f"faults {story.seed}")
        self.checkpoint = str(root / "checkpoint")
        self.batches: list[Planned] = []
        self.states: list[dict[int, tuple[Any, frozenset[int]]]] = []
        self.out: dict[int, Rows] = {}
        self.seen: Counter[str] = Counter()
        self.trace: list[str] = []
        self.hook: Callable[[str], None] | None = None
        self.home: dict[int, int] = {}
        self.launch, self.planned, self.sealed = 1, -1, {}
        self.begins = False
        self.version = 0
        self.asked: dict[int, str] = {}

    # -- what `simulated` wants -------------------------------------------------------------------------------------

    def note(self, what: str, detail: object = "") -> None:
        self.seen[what] += 1
        self.trace.append(f"{what} {detail}".strip())

    def at(self, point: str, version: int | None = None) -> None:
        assert point in (*POINTS, *QUEUE_POINTS)
        if self.hook is not None:
            self.hook(point)

    # -- Spark ------------------------------------------------------------------------------------------------------

    def run(self) -> Undisturbed:
        with self.playing():
            while len(self.states) < len(self.story.batches):
                version = len(self.states)
                if version == len(self.batches):
                    self.plan(version)
                self.micro_batch(version)
            self.end()
        return self

    @contextmanager
    def playing(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(simulated(self))  # type: ignore[arg-type]
            stack.enter_context(mock.patch.object(shard_task, "kill_point", self.at))
            if self.seed % 2:  # a task that may queue fetches no snapshot
                stack.enter_context(mock.patch.object(attempt, "TAKEOVER_BYTES", 1))
            stack.enter_context(mock.patch.object(shard_task, "query_and_version", lambda: (QUERY, self.version)))
            yield

    def plan(self, version: int) -> None:
        self.batches.append(self.story.batches[version])

    def micro_batch(self, version: int) -> None:
        made = {shard: self.attempt(version, shard, 0) for shard in range(self.story.shards)}
        self.publish(version, made)
        self.commit(version, made)

    def commit(self, version: int, made: dict[int, Any]) -> None:
        self.states.append({shard: state for shard, (state, _) in made.items()})

    def publish(self, version: int, made: dict[int, Any]) -> None:
        self.out[version] = self.rows_of(made)

    def rows_of(self, made: dict[int, Any]) -> Rows:
        """Give rows their ids, as sinks do: `sequence` counts per shard and version of the row, and kind."""
        rows: Rows = []
        for shard in sorted(made):
            firsts: Counter[Any] = Counter()
            for output in made[shard][1]:
                for line in output.to_dict("records"):
                    version = line["version"] if pd.isna(line["queued_in"]) else int(line["queued_in"])
                    for kind in (RESULTS, ERRORS):
                        if line[kind] is not None:
                            table = readable(unpack(bytes(line[kind])), kind, version, shard, firsts[kind, version])
                            firsts[kind, version] += table.num_rows
                            rows += [(kind, row["id"], row) for row in table.to_pylist()]
        return rows

    def job(self, shard: int, host: int, version: int) -> ShardJob:
        files = open_files(f"{self.checkpoint}/{entries.DIRECTORY}")
        return ShardJob(
            query_id=QUERY,
            shard=shard,
            local_dir=self.root / f"host{host}",
            operator=self.story.operators.at(version),
            message_fields=self.story.fields,
            changelog=based(FileChangelog(f"{self.checkpoint}/rewind/changelog")),
            snapshots=snapshots(self.checkpoint),
            snapshot_every=3 if self.begins and self.seed % 4 == 1 else None,
            lock_wait_s=0.0,
            incarnation=self.launch,
            queue=Queue(files, self.story.operators, self.begins, self.planned, dict(self.sealed)),
        )

    def committed(self, version: int, shard: int) -> Pointer | None:
        value = self.states[version][shard][0] if version >= 0 else None
        return decode(value[0]) if value is not None else None

    def attempt(self, version: int, shard: int, host: int) -> tuple[tuple[Any, frozenset[int]], list[Any]]:
        """Run one attempt of a task: its state and its output count if Spark takes them."""
        planned, story = self.batches[version], self.story
        state = Timers(*self.states[version - 1][shard]) if version else Timers()
        places = tuple(sorted(story.messages))
        plan = ProcessorPlan(
            {GROUPING + shard: shard},
            lambda _, number, of: self.job(number, host, of),
            story.operators.map(lambda _: {shard: places}),
            {0: "left", 1: "right"},
            max_ahead_ms=story.max_ahead.at(version),
        )
        wrapper = ShardProcessor(plan)
        wrapper.init(state)  # type: ignore[arg-type]
        self.version = version
        out: list[Any] = []
        key, now = (GROUPING + shard,), Now(planned.time_ms)
        rows = self.packed(version, shard)
        try:
            if rows:
                out += wrapper.handleInputRows(key, iter(rows), now)  # type: ignore[arg-type]
            for at in sorted(at for at in state.timers if at <= planned.time_ms):
                out += wrapper.handleExpiredTimer(key, now, now)  # type: ignore[arg-type]
                state.timers.remove(at)  # Spark warns of one that is gone
        except CrossedError as error:
            assert isinstance(error.__cause__, RewindError)
            raise error.__cause__ from None
        due = decode(state.value[0]).next_due_ms if state.value is not None else None
        assert len(state.timers) == (due is not None), (state.timers, due)
        assert due is None or max(state.timers) <= max(due, planned.time_ms + 1), "it would be woken too late"
        return (state.value, frozenset(state.timers)), out

    def packed(self, version: int, shard: int) -> list[Any]:
        """Pack a micro-batch as Spark's tasks do, cut anywhere and in any order."""
        planned, story = self.batches[version], self.story
        messages = story.read(planned.starts, planned.ends)
        control = planned.drain or planned.adopt or version == 0 or story.operators.changed(version - 1, version)
        packed = self.rows(messages, version, planned.time_ms, planned if control else None)
        mine = [frame[frame["shard"] == GROUPING + shard] for frame in packed]
        return [frame for frame in mine if len(frame)]

    def rows(
        self, messages: list[Message], version: int, time_ms: int, control: Planned | None = None
    ) -> list[pd.DataFrame]:
        """Pack messages, and a row of the control stream."""
        story = self.story
        rng = random.Random(f"{story.seed} {version} {self.random.random()}")
        plan = packing.PackPlan(
            tuple(GROUPING + n for n in range(story.shards)),
            story.fields,
            False,
            story.max_ahead.at(version),
            {0: "left", 1: "right"},
        )
        pieces = [part for s in range(story.streams) for part in pieces_of(rng, [m for m in messages if m.stream == s])]
        batches = [packing.pack(story.arrow(part), plan, time_ms) for part in pieces]
        if control is not None:
            adopt = json.dumps({str(s): commit for s, commit in control.adopt.items()})
            row = pa.record_batch({"drain": [control.drain], "adopt": [adopt]})
            batches.append(packing.pack_control(row, plan.grouping, time_ms))
        rng.shuffle(batches)
        return [batch.to_pandas() for batch in batches]

    # -- what must hold ---------------------------------------------------------------------------------------------

    def end(self) -> None:
        self.final = {shard: self.final_state(shard) for shard in range(self.story.shards)}

    def final_state(self, shard: int) -> dict[bytes, bytes]:
        pointer = self.committed(len(self.states) - 1, shard)
        assert pointer is not None
        job = self.job(shard, self.home.get(shard, 0), len(self.states))
        directory = ShardDirectory(job.local_dir, QUERY, shard)
        with directory.lock(0.0):
            opened = open_shard.OpenShard(directory, job.where, job.snapshots).at(pointer)
            row, store = opened.row, opened.store
            assert row is not None
            rows = store.scan(bytes([Region.MESSAGES]), None)
            found = {key: value for key, value in rows if key >= row.bounds.get(key[0], b"")}
            store.close()
        found[b"record"] = repr(
            (row.positions, sorted(row.bounds.items()), row.replay_from, row.rejected, row.message_count)
        ).encode()
        found[b"due"] = repr((pointer.next_due_ms, pointer.positions)).encode()
        return found

    @property
    def all_rows(self) -> dict[str, Any]:
        """Every row that came out, by kind and id; the same twice is an error."""
        found: dict[str, Any] = {}
        for rows in self.out.values():
            for kind, name, row in rows:
                assert (kind, name) not in found, f"{kind} {name} came out twice"
                found[kind, name] = row  # type: ignore[index]
        return found


class Disturbed(Undisturbed):
    """Runs a story with everything going wrong, and a driver that restores beside it."""

    def __init__(self, story: Story, root: Path) -> None:
        super().__init__(story, root)
        self.begins = True
        self.stale: list[tuple[int, int, int]] = []
        self.keeping = self.housekeeping()

    def housekeeping(self) -> Housekeeping:
        changelog = lambda: based(FileChangelog(f"{self.checkpoint}/rewind/changelog"))  # noqa: E731
        return Housekeeping(
            changelog, snapshots(self.checkpoint), KEEP, 1, checkpoint=self.checkpoint, committed=len(self.states) - 1,
            clock=count(step=APART_S).__next__,
        )  # fmt: skip

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def plan(self, version: int) -> None:
        planned = self.story.batches[version]
        adopt, self.asked = dict(self.asked), {}
        if self.chance(0.1):  # a row that means nothing
            shard = self.random.randrange(self.story.shards)
            old = self.committed(self.random.randrange(version), shard) if version else None
            if old is not None and shard not in adopt:
                adopt[shard] = old.commit.name
                self.note("row of the control stream that means nothing")
        self.batches.append(Planned(planned.starts, planned.ends, planned.time_ms, planned.drain, adopt))

    def micro_batch(self, version: int) -> None:
        try:
            made = {}
            for shard in self.random.sample(range(self.story.shards), self.story.shards):
                made[shard] = self.task(version, shard)
        except (StateUnavailable, StateCorrupted, StateAhead) as error:
            self.note("the query stopped to restore", error)
            self.supervise(version - 1)
            self.restart()
            return
        if self.chance(0.04):
            self.note("driver died before it sealed")
            self.restart()
            return
        decided = seals.decisions_in(
            [{"shard": s, "metrics": line} for s, (_, out) in made.items() for o in out for line in o["metrics"]]
        )
        if decided or version == self.planned:
            seals.write_seal(self.checkpoint, version, self.launch, decided)
        rows = self.rows_of(made)
        if version in self.out:
            assert self.out[version] == rows, f"micro-batch {version} was published, ran again, and made other rows"
            self.note("published micro-batch ran again")
        elif self.chance(0.04):
            self.note("driver died between seal and publication")
            self.restart()
            return
        self.out[version] = rows
        if self.chance(0.05):
            self.note("driver died between publication and commit")
            self.restart()
            return
        self.commit(version, made)
        for shard, decision in decided.items():
            self.note(f"shard {decision.value}", f"{shard} in {version}")
        self.after_commit(version, made)

    def restart(self) -> None:
        """Start the query again: what Spark has planned and not committed is run again, under its seal."""
        self.launch += 1
        self.planned = len(self.batches) - 1 if len(self.batches) > len(self.states) else -1
        seals.prune_seals(self.checkpoint, len(self.states) - KEEP, len(self.batches) - 1)
        self.sealed = seals.read_seal(self.checkpoint, self.planned) if self.planned >= 0 else {}
        self.keeping = self.housekeeping()

    def task(self, version: int, shard: int) -> Any:
        for _ in range(40):
            host = self.home.get(shard, 0)
            if self.chance(0.08):
                host = 1 - host
                self.note("shard moved to another host")
            if self.chance(0.12):
                shutil.rmtree(self.root / f"host{host}", ignore_errors=True)
                self.note("disk lost")
            if self.chance(0.04):
                self.damage(version, shard, host)
            if self.chance(0.06):
                self.stale.append((version, shard, host))
            try:
                with self.may_die((*IN_ATTEMPTS, "before_queue", "after_queue", "before_adopt"), 0.15):
                    made = self.attempt(version, shard, host)
            except Death:
                self.note("died in an attempt")
                continue
            if self.chance(0.05):
                self.note("result of a task lost")
                continue
            if self.chance(0.06):
                self.note("two attempts of one task")
                with suppress(StateUnavailable):
                    made = self.random.choice((made, self.attempt(version, shard, 1 - host)))
            self.home[shard] = host
            return made
        raise AssertionError("no attempt of the task succeeds")

    @contextmanager
    def may_die(self, points: tuple[str, ...], share: float) -> Iterator[None]:
        if not self.chance(share):
            yield
            return
        wanted, left = self.random.choice(points), self.random.choice((1, 1, 2))

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

    def damage(self, version: int, shard: int, host: int) -> None:
        generation = ShardDirectory(self.root / f"host{host}", QUERY, shard).current()
        pointer = self.committed(version - 1, shard)
        staged = generation.staged(state_of(pointer).commit) if generation is not None and pointer is not None else None
        if staged is not None and staged.exists():
            data = bytearray(staged.read_bytes())
            data[self.random.randrange(len(data))] ^= 1
            staged.unlink()
            staged.write_bytes(bytes(data))
            self.note("staged file damaged")

    # -- the driver -------------------------------------------------------------------------------------------------

    def after_commit(self, version: int, made: dict[int, Any]) -> None:
        for shard, (_, out) in made.items():
            for output in out:
                metrics = json.loads(output["metrics"].iloc[-1])
                self.seen["shard queued rather than fetch"] += "a task fetches" in str(metrics.get("queued_why"))
                if "commit" in metrics:
                    self.keeping.made(shard, self.committed(version, shard).commit)  # type: ignore[union-attr]
        if self.keeping.maintain(version):
            self.note("pruned")
        for shard in range(self.story.shards):
            pointer = self.committed(version, shard)
            if isinstance(pointer, RestoringPointer) and self.chance(0.6):
                with suppress(Death), self.may_die(RESTORING, 0.3):
                    self.restore(state_of(pointer), shard)
                    self.note("restored beside the query", shard)
                    self.asked[shard] = pointer.since.commit.name
                    if self.chance(0.1):
                        shutil.rmtree(Path(self.checkpoint) / "rewind/snapshots" / str(shard), ignore_errors=True)
                        self.note("snapshot lost after the row was asked for")
            if isinstance(pointer, RestoringPointer) and self.chance(0.1):
                self.lose_entry(pointer)
        if self.stale and self.chance(0.3):
            self.zombie(*self.stale.pop(self.random.randrange(len(self.stale))))
        if self.chance(0.06) and version < len(self.story.batches) - 1:
            self.lose_commit(version)
        elif self.chance(0.05):
            self.note("query started again")
            self.restart()

    def lose_entry(self, pointer: RestoringPointer) -> None:
        """Take an entry of a shard's queue away, or damage it."""
        path = (
            Path(self.checkpoint)
            / entries.DIRECTORY
            / entries.entry_name(pointer.shard, self.random.choice(pointer.entries).commit)
        )
        if not path.exists():
            return
        data = bytearray(path.read_bytes())
        path.unlink()
        if self.chance(0.5):
            data[self.random.randrange(len(data))] ^= 1
            path.write_bytes(bytes(data))
        self.note("entry lost")

    def read_again(self, draft: Draft, ranges: Mapping[tuple[int, int], tuple[int, int]]) -> list[Packed]:
        """Read a queued micro-batch from the source again."""
        starts, ends = ({place: ends[at] for place, ends in ranges.items()} for at in (0, 1))
        version = draft.entry.commit.version
        rows = self.rows(self.story.read(starts, ends), version, draft.entry.time_ms)
        return list(packed_rows(frame[frame["shard"] == GROUPING + draft.entry.shard] for frame in rows))

    def zombie(self, version: int, shard: int, host: int) -> None:
        if version >= len(self.states):
            return
        try:
            self.attempt(version, shard, host)
            self.note("late attempt of a zombie")
        except RewindError as error:
            self.note(f"zombie stopped: {error.code}")

    def lose_commit(self, version: int) -> None:
        del self.batches[version + 1 :]
        self.states.pop()
        self.asked = {}
        self.note("committed micro-batch ran again", version)
        self.restart()

    def restore(self, pointer: Pointer, shard: int, job: ShardJob | None = None, start: Any = None) -> None:
        """Restore a shard as of a pointer with a state; nothing local is looked at unless a job is given."""
        job = job or self.job(shard, 2, len(self.states))
        record = job.changelog.read(shard, pointer.commit).record
        ranges = replay.replay_ranges(record)
        messages = self.story.read(
            {k: low for k, (low, _) in ranges.items()}, {k: high for k, (_, high) in ranges.items()}
        )
        write = replay.chunk_writer(
            job.operator, self.story.fields, {shard: record}, self.checkpoint, f"rewind/replay/{shard}"
        )
        self.at("restore_replay")
        pieces = [
            p for s in range(self.story.streams) for p in pieces_of(self.random, [m for m in messages if m.stream == s])
        ]
        reports = write(self.story.arrow(part) for part in pieces)
        names = [report["name"] for batch in reports for report in batch.to_pylist()]
        replay.build_snapshot(job, pointer.commit, self.checkpoint, names, start)

    def supervise(self, version: int) -> None:
        """Restore what cannot be opened where it is looked for, with no task running; then ask for adoptions."""
        for _ in range(40):
            try:
                with self.may_die(RESTORING, 0.3):
                    found = [self.mend(version, shard) for shard in range(self.story.shards)]
                    if not any(found):
                        for shard in range(self.story.shards):
                            pointer = self.committed(version, shard)
                            if pointer is not None:
                                probe.share(self.job(shard, self.home.get(shard, 0), version + 1), state_of(pointer))
                break
            except Death:
                self.note("died in a restore")
        for shard in range(self.story.shards):
            pointer = self.committed(version, shard)
            if isinstance(pointer, RestoringPointer):
                files, job = open_files(f"{self.checkpoint}/{entries.DIRECTORY}"), self.replayable()
                if make_again(files, pointer, job, self.story.held, self.read_again):
                    self.note("entries made again from the source")
                self.asked[shard] = pointer.since.commit.name

    def replayable(self) -> Any:
        return SimpleNamespace(
            ranked=frozenset(),
            topics={0: "left", 1: "right"},
            message_fields=self.story.fields,
            operator=self.story.operators.at(0),
        )

    def mend(self, version: int, shard: int) -> bool:
        pointer = self.committed(version, shard)
        job = self.job(shard, self.home.get(shard, 0), version + 1)
        why = probe.unusable(job, state_of(pointer) if pointer is not None else None)
        if why is None or pointer is None:
            return why is not None
        self.restore(state_of(pointer), shard, job)
        self.note("restored with no task running", why)
        return True

    def end(self) -> None:
        """Finish what still queues: the undisturbed run has as many micro-batches."""
        for _ in range(40):
            last = len(self.states) - 1
            queues = [s for s in range(self.story.shards) if isinstance(self.committed(last, s), RestoringPointer)]
            if not queues:
                break
            self.begins = False
            self.supervise(last)
            self.restart()
            planned = self.batches[-1]
            self.batches.append(Planned(planned.ends, planned.ends, planned.time_ms, False, dict(self.asked)))
            self.asked = {}
            made = {shard: self.attempt(last + 1, shard, self.home.get(shard, 0)) for shard in range(self.story.shards)}
            self.out[last + 1] = self.rows_of(made)
            self.commit(last + 1, made)
            self.note("adopted at the end")
        for shard in range(self.story.shards):
            for _ in range(40):
                try:
                    self.home.setdefault(shard, 0)
                    self.final_state(shard)
                    break
                except (StateUnavailable, StateCorrupted, StateAhead):
                    self.supervise(len(self.states) - 1)
        super().end()


def compare(seed: int, root: Path, kind: str | None = None) -> Counter[str]:
    """Run a story both ways; return what happened in the disturbed one.

    Raises:
        AssertionError: They differ; the seed and the events are in the message.
    """
    story = Story(seed, kind)
    wanted = Undisturbed(story, root / "undisturbed").run()
    run = Disturbed(story, root / "disturbed")
    try:
        run.run()
        assert run.all_rows == wanted.all_rows
        assert run.final == wanted.final
    except BaseException as error:
        events = "\n  ".join(run.trace[-60:])
        raise AssertionError(f"seed {seed}, {story.kind}, {story.shards} shards: {error!r}\n  {events}") from error
    run.seen["rows"] += len(wanted.all_rows)
    run.seen[story.kind] += 1
    return run.seen
