"""The whole protocol in one process: a seeded Spark driver that fails in every way it can, and the real recovery code.

`python -m tests.crash.simulation <seed>` runs one seed again and tells what happened. Everything random comes from
the seed; time is virtual. Real: the pack stage and its inverse, the operator, the attempt, the changelog, snapshots,
restore. Simulated: Spark (offset log, state, commits, tasks, executors on two hosts), the source, and death (`Death` is
raised at kill points, and nothing that runs in the dying process after it counts).

Options that may change between starts change now and then: a micro-batch runs, and runs again, under those that it was
planned with.

What must hold after all of it: every micro-batch's results and errors equal the oracle's, and the state of every shard
equals, byte for byte, that of an uninterrupted control run over the same micro-batches.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import traceback
import uuid
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pyarrow as pa

from backend.batch import ERROR_SCHEMA, MAX_EVENT_TIME, OFFSET, PARTITION, STREAM, TIME, Positions
from backend.errors import RewindError, StateAhead, StateCorrupted, StateUnavailable, StorageFailed
from backend.sinks.record import Contents, Digest, check_same, gathered
from backend.spark.pack import assembling, frames, packing
from backend.store.protocol import Region
from backend.windows.aligned.combining import Combining, combines
from backend.windows.operator import WindowOperator
from recovery import attempt, killpoints, operate
from recovery.attempt import run_attempt
from recovery.changelog.file import FileChangelog
from recovery.changelog.rejected import with_rows
from recovery.commit.pointer import Pointer, decode, encode, read_commit_row
from recovery.commit.shard_directory import ShardDirectory
from recovery.jobs import ShardJob, snapshots
from recovery.killpoints import POINTS
from recovery.operate import Done
from recovery.restore import all_shards as rebuild
from recovery.restore import build as restore
from recovery.restore import carry_out, open_shard, probe, replay
from recovery.restore.tries import moves
from recovery.share import ShardInput
from recovery.snapshots import publisher, uploads
from tests.crash.sim_faults import PUBLISHING, QUERY, RESTORING, Death, Faults
from tests.crash.sim_job import START_MS, Planned, changed_spec, operator_of, pieces_of, source_of, spec_of, written_ms
from tests.crash.sim_store import SimStore
from tests.model.window_driver import SCHEMA, Driver, shard_of
from tests.oracle.windows import Message, WindowOracle
from tests.support.bases import based

RARE = (
    "staged file of the parent ingested",
    "attempt discarded",
    "died in an attempt",
    "two attempts of one task",
    "result of a task lost",
    "attempt running while another commits",
    "attempt stopped by a full disk",
    "late file of a zombie",
    "zombie stopped by a newer state",
    "driver died after the sink published",
    "options changed",
    "committed micro-batch ran again",
    "published micro-batch ran again",
    "shard moved to another host",
    "disk lost",
    "staged file lost",
    "staged file damaged",
    "restored",
    "restored with messages replayed",
    "restored with offsets left out that stand in rows",
    "caught up from an older copy",
    "died in a restore",
    "base written",
    "base damaged",
    "changelog pruned",
    "snapshots pruned",
    "source trimmed to what is needed",
    "moved to a snapshot",
    "rolled back to nothing",
    "shared with the other host",
    "died again in the restore after a death",
    "snapshot uploaded beside a commit",
    *(f"died at {point}" for point in POINTS),
)
"""What must have happened in the runs of a suite, each at least once: every kill point is one that killed."""

MAX_TRIES = 40
MAX_RESTORES = 4
"""As of the supervisor: so many failures of the query without progress."""


@dataclass
class World(Faults):
    """One run."""

    seed: int
    root: Path
    rocks: bool = False
    seen: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.partitions = self.random.choice((1, 1, 2))
        self.shards = self.random.choice((1, 2))
        self.spec = spec_of(self.random)
        if (self.spec.kind, self.spec.unit) == ("session", "messages"):
            self.shards = 1  # it ends by messages of other keys: the whole stream in one shard
        self.operator = operator_of(self.spec)
        self.options = random.Random(f"options {self.seed}")
        self.fields = tuple(SCHEMA.field(name) for name in self.operator.input_fields)
        self.source = source_of(self.random, self.partitions)
        self.batches: list[Planned] = []
        self.states: list[dict[int, bytes]] = []
        self.outputs: dict[int, tuple[list[Any], list[Any]]] = {}
        self.published: dict[int, Contents] = {}
        self.home: dict[int, int] = {}
        self.stale: list[tuple[int, int, bytes | None, int]] = []
        self.checkpoint = str(self.root / "checkpoint")
        self.hook: Callable[[str], None] | None = None
        self.failures = 0
        self.pruned: set[int] = set()
        self.unsound: set[int] = set()
        self.max_deltas = self.random.choice((2, 3, 5))
        self.snapshot_every = self.random.choice((None, None, 2))

    def note(self, what: str, detail: object = "") -> None:
        """Remember that something happened."""
        self.seen[what] += 1
        self.trace.append(f"{what} {detail}".strip())

    def at(self, point: str, version: int | None = None) -> None:
        """Pass a kill point."""
        assert point in POINTS
        if self.hook is not None:
            self.hook(point)

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    # -- what a process finds ---------------------------------------------------------------------------------------

    def job(self, shard: int, host: int, version: int | None = None) -> ShardJob:
        """Make the job of a shard as a fresh Python worker on a host does; its options are those of a micro-batch."""
        operator = self.operator if version is None else self.batches[version].operator
        log = based(FileChangelog(f"{self.checkpoint}/rewind/changelog"), self.max_deltas)
        return ShardJob(
            query_id=QUERY,
            shard=shard,
            local_dir=self.root / f"host{host}",
            operator=operator,
            message_fields=self.fields,
            changelog=log,
            snapshots=snapshots(self.checkpoint),
            snapshot_every=self.snapshot_every,
            retain=2,
            lock_wait_s=0.0,
        )

    def pointer(self, version: int, shard: int) -> Pointer | None:
        data = self.states[version].get(shard) if version >= 0 else None
        return decode(data) if data is not None else None

    # -- Spark's driver ---------------------------------------------------------------------------------------------

    def run(self, batches: int) -> None:
        """Run micro-batches to the end of the source, whatever happens on the way."""
        while len(self.states) < batches:
            version = len(self.states)
            if version == len(self.batches):
                self._plan(version, last=version == batches - 1)
            self.failures = 0 if self._micro_batch(version) else self.failures
            if len(self.states) > version:
                self._after_commit(version, batches)

    def _plan(self, version: int, *, last: bool) -> None:
        """Write Spark's offset log."""
        before = self.batches[-1] if self.batches else Planned({}, START_MS, False, self.spec, self.operator)
        changed = changed_spec(self.options, self.spec) if self.batches else self.spec
        if changed != self.spec:
            self.note("options changed", f"batch {version}")
            self.spec, self.operator = changed, operator_of(changed)
        ends = {}
        for partition, messages in enumerate(self.source.messages):
            start = before.ends.get(partition, 0)
            left = [m for m in messages if m.offset >= start]
            take = len(left) if last else min(len(left), self.random.randint(0, 8))
            ends[partition] = left[take - 1].offset + 1 if take else start
        pause = self.random.choice((0, 500, 4_000, 10_000, 61_000))
        drain = last or self.chance(0.05)
        self.batches.append(Planned(ends, before.time_ms + pause, drain, self.spec, self.operator))

    def _micro_batch(self, version: int) -> bool:
        """Run one micro-batch; False when the query failed and was restored, or the driver died."""
        made: dict[int, tuple[bytes, Done]] = {}
        shards = list(range(self.shards))
        self.random.shuffle(shards)
        try:
            for shard in shards:
                made[shard] = self._task(version, shard)
                if self.chance(0.02):
                    self.note("attempt discarded", f"driver died, batch {version}")
                    return False
        except (StateUnavailable, StateCorrupted, StateAhead) as error:
            self.trace.append(f"query failed: {error}")
            self.failures += 1
            # a host that loses its disk again and again is none of the restore's failures
            assert self.failures <= MAX_RESTORES, f"micro-batch {version} does not end: {error}"
            self._supervise(version - 1)
            return False
        try:
            with self._driver_may_die(PUBLISHING):
                self._publish(version, made)
        except Death as death:
            if str(death) == "after_publish":
                self.note("driver died after the sink published", version)
            return False
        self.states.append({shard: data for shard, (data, _) in made.items()})
        return True

    def _publish(self, version: int, made: dict[int, tuple[bytes, Done]]) -> None:
        """Be the sink: a micro-batch's results, then its errors, each replaced as a whole, by the same rows."""
        contents = gathered(
            {
                shard: {
                    "results": _content([one.outcome.results for one in done.ran]),
                    "errors": _content(_sent_errors(done)),
                }
                for shard, (_, done) in made.items()
            }
        )
        if version in self.published:
            self.note("published micro-batch ran again", version)
            check_same(self.published[version], contents, version=version, where="the sink", command="")
        rows: list[Any] = []
        errors: list[Any] = []
        for shard in sorted(made):
            for one in made[shard][1].ran:
                rows += self._rows(one.outcome.results)
            refused = [error for table in _sent_errors(made[shard][1]) for error in table.to_pylist()]
            errors += [(self._place(error), error["reason"]) for error in refused]
            wrong = [error for error in refused if error["timestamp"] != self._written(error)]
            assert not wrong, f"own timestamps in errors of micro-batch {version}: {wrong}"
        self.at("before_publish")
        self.outputs[version] = (rows, self.outputs.get(version, ([], []))[1])
        self.published[version] = contents
        self.at("during_publish")
        self.outputs[version] = (rows, errors)
        self.at("after_publish")

    def _task(self, version: int, shard: int) -> tuple[bytes, Done]:
        """Run attempts of one task until one succeeds, as Spark does."""
        for _ in range(MAX_TRIES):
            host = self._host(shard)
            fault = self.random.random()
            if fault < 0.08:
                self._damage(version - 1, shard, host)
            try:
                with self._fault(version, shard, host):
                    done = self._attempt(version, shard, host)
            except Death:
                self.note("died in an attempt", f"batch {version} shard {shard} host {host}")
                self.note("attempt discarded")
                continue
            except StorageFailed as error:  # the query ends by this name, and is started again when there is room
                self.note("attempt stopped by a full disk", f"batch {version} shard {shard} host {host}: {error.where}")
                continue
            if self.chance(0.06):
                self.note("result of a task lost", f"batch {version} shard {shard}")
                continue
            if self.chance(0.06):
                self.note("two attempts of one task", f"batch {version} shard {shard}")
                other = self._attempt(version, shard, self._host(shard))
                done = self.random.choice((done, other))
            self.home[shard] = host
            return encode(done.pointer), done
        raise AssertionError("no attempt of the task succeeds")

    def _host(self, shard: int) -> int:
        home = self.home.get(shard, 0)
        if self.chance(0.06):
            self.note("shard moved to another host", f"shard {shard}")
            return 1 - home
        return home

    def _attempt(self, version: int, shard: int, host: int, pointer: Pointer | str | None = "committed") -> Done:
        at = self.pointer(version - 1, shard) if isinstance(pointer, str) else pointer
        if isinstance(pointer, str) and self.chance(0.1):
            self.stale.append((version, shard, encode(at) if at is not None else None, host))
        before = at.parent if at is not None else None
        row = self._database(shard, host)
        log = self.job(shard, host, version)
        bases = {entry.location for entry in log.changelog.entries(shard) if entry.location.endswith(".base")}
        # told by the processor: options are new since the commit that the attempt begins with
        since = self.batches[at.commit.version : version + 1] if at is not None else []
        changed = any(old.spec != new.spec for old, new in pairwise(since))

        def read(positions: Positions) -> ShardInput:
            given = self._input(version, shard, positions)
            return replace(given, came=True) if changed else given

        done = run_attempt(log, at, version, read)
        self.at("before_pointer")
        self.at("after_pointer")
        if row is not None and row == before and at is not None:
            self.note("staged file of the parent ingested")
        if any(not one.failed for one in moves(done.metrics)):
            self.note("moved to a snapshot", f"shard {shard} host {host}")
        after = {entry.location for entry in log.changelog.entries(shard) if entry.location.endswith(".base")}
        if after - bases:
            self.note("base written", f"shard {shard}")
        self.trace.append(f"attempt of batch {version} shard {shard} host {host} -> {done.pointer.commit.name[18:27]}")
        return done

    def _database(self, shard: int, host: int) -> Any:
        generation = ShardDirectory(self.root / f"host{host}", QUERY, shard).current()
        if generation is None:
            return None
        try:
            store = carry_out.RocksStore.open(generation.database, create=False)
        except RewindError:
            return None
        try:
            found = read_commit_row(store)
        finally:
            store.close()
        return found.commit if found is not None else None

    # -- the way of a message ---------------------------------------------------------------------------------------

    def _input(self, version: int, shard: int, positions: Positions) -> ShardInput:
        """Pack a micro-batch as Spark's tasks do, cut anywhere and in any order, and assemble the shard's share."""
        planned = self.batches[version]
        starts = self.batches[version - 1].ends if version else {}
        messages = self.source.read(starts, planned.ends)
        rng = random.Random(f"{self.seed} {version} {shard} {self.random.random()}")
        packed = []
        # combined where the windows allow it; how much, by chance in each attempt: nothing may depend on it
        operator = planned.operator
        able = isinstance(operator, WindowOperator) and combines(operator.spec) and (self.seed + version) % 2
        combining = Combining(operator.spec, fewer=rng.choice((0, 2))) if able else None
        plan = packing.PackPlan(
            tuple(range(self.shards)),
            self.fields,
            False,
            planned.spec.max_ahead_ms,
            {0: "topic"},
            combining=combining,
        )
        for part in pieces_of(rng, messages):
            packed += packing.pack(self._arrow(part), plan, planned.time_ms).to_pylist()
        control = pa.record_batch({"drain": [planned.drain], "adopt": ["{}"]})
        packed += packing.pack_control(control, plan.grouping, planned.time_ms).to_pylist()
        rng.shuffle(packed)
        mine = [assembling.Packed(r["header"], r["frame"], r["errors"]) for r in packed if r["shard"] == shard]
        return assembling.assemble(
            mine, positions, sources=[(0, p) for p in range(self.partitions)], combining=combining
        )

    def _arrow(self, messages: list[Message]) -> pa.RecordBatch:
        """Lay out source rows as the pack stage reads them."""
        count = len(messages)
        key = self.spec.keys
        bad = [(m.partition, m.offset) in self.source.bad for m in messages]
        columns: dict[str, pa.Array] = {
            STREAM: pa.array([m.stream for m in messages], pa.int32()),
            PARTITION: pa.array([m.partition for m in messages], pa.int32()),
            OFFSET: pa.array([m.offset for m in messages], pa.int64()),
            TIME: pa.array([m.time for m in messages], pa.int64()),
            frames.SHARD_IN: pa.array(
                [shard_of(tuple(m.fields[name] for name in key), self.shards) for m in messages], pa.int32()
            ),
            frames.TIMESTAMP_IN: pa.array([written_ms(m) for m in messages], pa.int64()),
            frames.KEY_IN: pa.nulls(count, pa.binary()),
            frames.RAW_IN: pa.nulls(count, pa.binary()),
            frames.MALFORMED_IN: pa.array(["not JSON" if b else None for b in bad], pa.string()),
        }
        for entry in self.fields:
            columns[entry.name] = pa.array([m.fields[entry.name] for m in messages], entry.type)
        return pa.RecordBatch.from_pydict(columns)

    def _place(self, error: dict[str, Any]) -> Any:
        """Return what names the message of an error."""
        return error["stream"], error["partition"], error["offset"]

    def _written(self, error: dict[str, Any]) -> int | None:
        """Return the own timestamp of an error's message, whenever the message came."""
        part = self.source.messages[error["partition"]]
        return written_ms(part[bisect_left(part, error["offset"], key=lambda message: message.offset)])

    def _refused(self, message: Message, planned: Planned) -> str | None:
        """Tell why the pack stage refuses a message, None when it does not."""
        if (message.partition, message.offset) in self.source.bad:
            return "malformed"
        if message.time > MAX_EVENT_TIME:
            return "out_of_range"
        if planned.spec.max_ahead_ms is None:
            return None
        written = written_ms(message)
        clock = planned.time_ms if written is None or written < 0 else min(written, planned.time_ms)
        return "in_future" if message.time > clock + planned.spec.max_ahead_ms else None

    def _rows(self, results: pa.Table) -> list[Any]:
        driver = Driver(self.operator, self.spec.keys, [], by_number=self.spec.unit == "messages")
        return driver.rows_of(results)

    # -- the supervisor ---------------------------------------------------------------------------------------------

    def _supervise(self, version: int) -> None:
        """Restore what cannot be opened at its pointer, with no task running; begin again when death interrupts."""
        for number in range(MAX_TRIES):
            try:
                with self._driver_may_die(RESTORING, 0.6):
                    found = [self._restore(version, shard) for shard in range(self.shards)]
                    if not any(found):
                        self._share(version)
                return
            except Death:
                self.note("died in a restore")
                if number:
                    self.note("died again in the restore after a death")
        raise AssertionError("the restore does not end")

    def _share(self, version: int) -> None:
        """Nothing is wrong where it was looked at: put snapshots where the other host finds them."""
        for shard in range(self.shards):
            pointer = self.pointer(version, shard)
            if pointer is not None and probe.share(self.job(shard, self.home.get(shard, 0)), pointer):
                self.note("shared with the other host", f"shard {shard}")

    def _restore(self, version: int, shard: int) -> bool:
        """Probe a shard and restore it; False when nothing is wrong where it was looked at."""
        pointer = self.pointer(version, shard)
        host = self._host(shard)
        self.home[shard] = host
        job = self.job(shard, host)
        why = probe.unusable(job, pointer)
        if why is None:
            return False
        if pointer is None:
            self.note("rolled back to nothing", why)
            return True
        history = job.changelog.read(shard, pointer.commit)
        record = with_rows(history)
        if len(record.rejected) > len(history.record.rejected):
            self.note("restored with offsets left out that stand in rows", len(record.rejected))
        if not self._catch_up(job, pointer, why):
            names = self._chunks(shard, record)
            replay.build_snapshot(job, pointer.commit, self.checkpoint, names)
        self.note("restored", f"shard {shard} at batch {version}: {why}")
        if record.message_count:
            self.note("restored with messages replayed", record.message_count)
        return True

    def _catch_up(self, job: ShardJob, pointer: Pointer, why: str) -> bool:
        """Restore from an older copy that lies here, if the planner says so and it works."""
        shard = job.shard
        source = self._held()
        found = {shard: probe.Unusable(why, probe.commit_here(job))}
        chosen = rebuild.plan_restores({shard: pointer}, found, job.changelog, source, why)[shard]
        if chosen.start is None:
            return False
        names = self._chunks(shard, rebuild.wanted(chosen))
        try:
            replay.build_snapshot(job, pointer.commit, self.checkpoint, names, chosen.start)
        except RewindError as error:
            self.note("an older copy did not make it whole", error)
            return False
        self.note("caught up from an older copy", f"shard {shard} from {chosen.start.version}")
        return True

    def _held(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return what the source holds, per source partition."""
        ends = self.batches[len(self.states) - 1].ends
        return {(0, p): (self.source.earliest[p], ends.get(p, 0)) for p in range(self.partitions)}

    def _chunks(self, shard: int, record: Any) -> list[str]:
        """Replay the source as `restore_shards` does on Spark, Arrow batches in any order."""
        self.at("restore_replay")
        ranges = replay.replay_ranges(record)
        starts = {p: low for (_, p), (low, _) in ranges.items()}
        ends = {p: high for (_, p), (_, high) in ranges.items()}
        messages = self.source.read(starts, ends)
        write = replay.chunk_writer(self.operator, self.fields, {shard: record}, self.checkpoint, "rewind/replay/run")
        pieces = pieces_of(self.random, messages)
        self.random.shuffle(pieces)
        reports = write(self._arrow(part) for part in pieces)
        return [report["name"] for batch in reports for report in batch.to_pylist()]

    # -- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare results and errors with the oracle, the state with an uninterrupted control run."""
        first = self.batches[0].spec
        oracle = WindowOracle(first, self.partitions, batched=True)
        control = Driver(
            self.batches[0].operator,
            self.spec.keys,
            [(0, p) for p in range(self.partitions)],
            shards=self.shards,
            max_ahead_ms=first.max_ahead_ms,
        )
        starts: dict[int, int] = {}
        for version, planned in enumerate(self.batches[: len(self.states)]):
            whole = [m for part in self.source.messages for m in part]
            mine = [m for m in whole if starts.get(m.partition, 0) <= m.offset < planned.ends[m.partition]]
            good = [m for m in mine if self._refused(m, planned) is None]
            skipped = [m for m in mine if self._refused(m, planned) is not None]
            if planned.spec != oracle.spec:
                oracle.change(planned.spec)
                control.operator, control.max_ahead_ms = planned.operator, planned.spec.max_ahead_ms
            sent, known = len(oracle.rows), len(oracle.errors)
            for message in skipped:
                oracle.skip(message, planned.time_ms)
            for message in sorted(good, key=lambda m: m.place):
                oracle.next_offset[message.source] = message.offset
                oracle.add_message(message, planned.time_ms)
            oracle.end_of_batch(planned.time_ms, planned.drain)
            control.batch(good, planned.time_ms, drain=planned.drain, skipped=skipped)
            results, errors = self.outputs[version]
            assert _comparable(results) == _comparable(oracle.rows[sent:]), f"results of micro-batch {version}"
            expected = [(e.place, e.reason) for e in oracle.errors[known:]]
            expected += [(m.place, self._refused(m, planned)) for m in skipped]
            assert sorted(errors) == sorted(expected), f"errors of micro-batch {version}"
            starts = planned.ends
        control.check_restore()
        for shard in range(self.shards):
            found = self._final(shard)
            hidden = control.shards[shard].bounds
            rows = control.shards[shard].store.scan(bytes([Region.MESSAGES]), None)
            wanted = {key: value for key, value in rows if key >= hidden.get(key[0], b"")}
            assert found == wanted, f"state of shard {shard}"

    def _final(self, shard: int) -> dict[bytes, bytes]:
        """Give a shard's state at the last pointer, restoring it if need be."""
        version = len(self.states) - 1
        pointer = self.pointer(version, shard)
        assert pointer is not None
        for _ in range(MAX_TRIES):
            job = self.job(shard, self.home[shard])
            directory = ShardDirectory(job.local_dir, QUERY, shard)
            try:
                with directory.lock(0.0):
                    opened = open_shard.OpenShard(directory, job.where, job.snapshots).at(pointer)
                    store, row = opened.store, opened.row
                    assert row is not None
                    assert row.commit == pointer.commit
                    rows = (one for one in store.scan(bytes([Region.MESSAGES]), None) if one[0][0] != Region.REJECTED)
                    found = {key: value for key, value in rows if key >= row.bounds.get(key[0], b"")}
                    store.close()
                    return found
            except (StateUnavailable, StateCorrupted, StateAhead):
                self._supervise(version)
        raise AssertionError("the last state cannot be opened")


def _sent_errors(done: Done) -> list[pa.Table]:
    """Return the errors of an attempt as its task sends them: those of the pack stage, then the operator's."""
    found = []
    for one in done.ran:
        own = assembling.located(one.outcome.errors.cast(ERROR_SCHEMA), {0: "topic"}, one.read())
        found += [one.read().errors, own]
    return found


def _content(tables: list[pa.Table]) -> tuple[int, str]:
    return Digest().add(pa.concat_tables(tables)).content if tables else (0, "")


def _comparable(rows: list[Any]) -> list[Any]:
    def plain(value: Any) -> Any:
        return round(value, 9) if isinstance(value, float) else value

    return sorted(
        ((r.window, r.key, r.revision, r.reason, tuple(plain(v) for v in r.values)) for r in rows),
        key=lambda r: repr(r[:4]),
    )


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Put the hook behind the kill points, and the twin in the place of RocksDB."""

    class AtOnce:
        """A thread of an upload that runs where it is started, so that a seed is one run, and a death ends it all."""

        def __init__(self, target: Callable[..., None], name: str, args: tuple[Any, ...] = (), **_: Any) -> None:
            self.run, self.name = partial(target, *args), name

        def start(self) -> None:
            self.run()
            if self.name == "rewind-upload":
                world.note("snapshot uploaded beside a commit")

        def join(self, timeout_s: float) -> None:
            pass

        def is_alive(self) -> bool:
            return False

    names = random.Random(f"names of {world.seed}")

    def uuid4() -> uuid.UUID:
        return uuid.UUID(int=names.getrandbits(128), version=4)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(uuid, "uuid4", uuid4))
        stack.enter_context(mock.patch.object(uploads, "threading", SimpleNamespace(Thread=AtOnce)))
        for module in (attempt, carry_out, killpoints, operate, publisher, replay, restore):
            stack.enter_context(mock.patch.object(module, "kill_point", world.at))
        if not world.rocks:
            for module in (carry_out, probe, replay, restore):
                stack.enter_context(mock.patch.object(module, "RocksStore", SimStore))
        yield
    SimStore.forget()


def simulate(seed: int, *, rocks: bool = False, batches: int | None = None) -> World:
    """Run one seed and check it; gives the world with what happened.

    Raises:
        AssertionError: Something that must hold does not; the seed and the events are in the message.
    """
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix=f"rewind-sim-{seed}-", dir=base))
    world = World(seed, root, rocks)
    try:
        with simulated(world):
            world.run(batches or world.random.randint(4, 8))
            world.check()
    except BaseException as error:
        events = "\n  ".join(world.trace[-60:])
        raise AssertionError(
            f"seed {seed} fails: {error!r}\n  {events}\n"
            f"{''.join(traceback.format_exception(error)[-3:])}\n"
            f"again: python -m tests.crash.simulation {seed}"
        ) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return world


def main(arguments: list[str]) -> int:
    """Run seeds from the command line: `<seed>`, `<first>-<last>`; `--rocks` for the real RocksDB."""
    rocks = "--rocks" in arguments
    seen: Counter[str] = Counter()
    failed = 0
    for argument in (a for a in arguments if not a.startswith("--")):
        first, _, last = argument.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            try:
                world = simulate(seed, rocks=rocks)
            except AssertionError as error:
                failed += 1
                print(error)
                continue
            seen.update(world.seen)
            if not last:
                print("\n".join(world.trace))
    for name in RARE:
        print(f"{seen[name]:8d}  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
