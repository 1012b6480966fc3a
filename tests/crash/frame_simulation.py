"""The simulation with a DataFrame as the source: rows without offsets, in another order at each attempt, given once.

`python -m tests.crash.frame_simulation <seed>` runs one seed again. What differs from `tests.crash.simulation`: a
micro-batch's rows come in any order and pieces each time that a task reads them; a restore has nobody to ask for them
again, only the message log; and the message log is pruned behind commits.

Results are judged by the oracle, which is given each micro-batch's messages in order of event time. Beside it stands
a second judge that knows one rule, of tumbling and hopping windows: a message is lost iff each of its windows ended a
retention or more before the newest event time of *earlier* micro-batches; else it is in all other windows of it.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from backend.batch import MAX_EVENT_TIME, MESSAGE_FIELDS, MicroBatch, Positions
from backend.spark.pack import assembling, packing
from backend.store.memory import MemoryStore
from backend.store.protocol import Region
from backend.store.workspace import Workspace
from recovery.changelog import message_log
from recovery.changelog.message_log import MessageLog
from recovery.commit.pointer import decode
from recovery.jobs import ShardJob
from recovery.share import ShardInput
from tests.crash.sim_job import Planned, Source
from tests.crash.simulation import World, _comparable, simulated
from tests.oracle.windows import Message, WindowOracle

RARE = (
    "restored with messages logged",
    "message log pruned",
    "segments merged",
    "caught up from an older copy",
    "late",
)


class FrameWorld(World):
    """One run over a DataFrame."""

    def __post_init__(self) -> None:
        World.__post_init__(self)
        self.partitions = 1
        if self.spec.unit == "messages":
            self.shards = 1  # windows are named by offsets, which each shard makes for itself
        whole = [message for part in self.source.messages for message in part]
        self.source = Source([_renumbered(whole, unique=self.spec.unit == "messages")], set(), [0])

    def job(self, shard: int, host: int, version: int | None = None) -> ShardJob:
        job = super().job(shard, host, version)
        log = MessageLog(f"{self.checkpoint}/{message_log.DIRECTORY}", frozenset({0}))
        return replace(job, message_log=log if job.operator.replays else None)

    def _input(self, version: int, shard: int, positions: Positions) -> ShardInput:
        return self._given(version, shard, positions, random.Random(f"{self.seed} {version} {self.random.random()}"))

    def _given(self, version: int, shard: int, positions: Positions, rng: random.Random) -> ShardInput:
        """Deliver a micro-batch's rows in any order and pieces, and assemble the shard's share."""
        planned = self.batches[version]
        rows = self._rows_of(version)
        rng.shuffle(rows)
        plan = packing.PackPlan(tuple(range(self.shards)), self.fields, False, planned.spec.max_ahead_ms, {0: "df"})
        control = pa.record_batch({"drain": [planned.drain], "adopt": ["{}"]})
        packed = packing.pack_control(control, plan.grouping, planned.time_ms).to_pylist()
        while rows:
            count = rng.randint(1, len(rows))
            part, rows = [replace(m, offset=0) for m in rows[:count]], rows[count:]
            packed += packing.pack(self._arrow(part), plan, planned.time_ms).to_pylist()
        rng.shuffle(packed)
        mine = [assembling.Packed(r["header"], r["frame"], r["errors"]) for r in packed if r["shard"] == shard]
        return assembling.assemble(mine, positions, sources=[(0, 0)], fields=self.fields, ranked={0}, version=version)

    def _rows_of(self, version: int) -> list[Message]:
        starts = self.batches[version - 1].ends if version else {}
        low, high = starts.get(0, 0), self.batches[version].ends[0]
        return [message for message in self.source.messages[0] if low <= message.offset < high]

    def _arrow(self, messages: list[Message]) -> pa.RecordBatch:
        found = super()._arrow(messages)
        at = found.schema.get_field_index("_timestamp")
        return found.set_column(at, found.schema.field(at), pa.nulls(found.num_rows, pa.int64()))

    def _refused(self, message: Message, planned: Planned) -> str | None:
        if message.time > MAX_EVENT_TIME:
            return "out_of_range"
        ahead = planned.spec.max_ahead_ms
        return "in_future" if ahead is not None and message.time > planned.time_ms + ahead else None

    def _written(self, error: dict[str, Any]) -> int | None:
        return None

    def _place(self, error: dict[str, Any]) -> Any:
        return error["event_time"]

    # -- the message log --------------------------------------------------------------------------------------------

    def _held(self) -> dict[tuple[int, int], tuple[int, int]]:
        return {(0, 0): (0, 2**63 - 1)}

    def _chunks(self, shard: int, record: Any) -> list[str]:
        self.at("restore_replay")
        if record.segments:
            self.note("restored with messages logged", len(record.segments))
        if any(segment.tier for segment in record.segments):
            self.note("segments merged")
        return []

    def _trim(self, retained: list[dict[int, bytes]]) -> None:
        for shard, data in retained[0].items():
            job = self.job(shard, 0)
            if job.message_log is not None:
                oldest = job.changelog.read(shard, decode(data).commit).record
                if job.message_log.prune(oldest):
                    self.note("message log pruned", f"shard {shard}")

    # -- what must hold ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Compare results and errors with the oracle, the state with a run in which nothing happened."""
        oracle = WindowOracle(self.batches[0].spec, 1, batched=True)
        judge = Judge()
        stores = [MemoryStore() for _ in range(self.shards)]
        bounds: list[dict[int, bytes]] = [{} for _ in range(self.shards)]
        positions: Positions = {}
        sent: list[Any] = []
        times: dict[tuple[int, int, int], int] = {}
        for version, planned in enumerate(self.batches[: len(self.states)]):
            if planned.spec != oracle.spec:
                oracle.change(planned.spec)
            rows, known = len(oracle.rows), len(oracle.errors)
            mine = self._rows_of(version)
            good = sorted((m for m in mine if self._refused(m, planned) is None), key=lambda m: m.time)
            for rank, message in enumerate(good):
                oracle.add_message(replace(message, offset=(version << 32) + rank), planned.time_ms)
            for message in mine:
                if self._refused(message, planned) is not None:
                    oracle.skip(replace(message, offset=0), planned.time_ms)
            oracle.end_of_batch(planned.time_ms, planned.drain)
            results, errors = self.outputs[version]
            assert _comparable(results) == _comparable(oracle.rows[rows:]), f"results of micro-batch {version}"
            times |= {(0, 0, (version << 32) + rank): m.time for rank, m in enumerate(good)}
            expected = [(times[error.place], error.reason) for error in oracle.errors[known:]]
            expected += [(m.time, reason) for m in mine if (reason := self._refused(m, planned)) is not None]
            assert Counter(errors) == Counter(expected), f"errors of {version}"
            judge.batch(self, version, good, Counter(errors))
            sent += results
            positions = self._control(version, positions, stores, bounds)
        if self.spec.kind in ("tumbling", "hopping") and self.spec.unit == "time" and not judge.changed:
            judge.check(self, sent)
        for shard in range(self.shards):
            rows = stores[shard].scan(bytes([Region.MESSAGES]), None)
            wanted = {key: value for key, value in rows if key >= bounds[shard].get(key[0], b"")}
            assert self._final(shard) == wanted, f"state of shard {shard}"

    def _control(
        self, version: int, positions: Positions, stores: list[MemoryStore], bounds: list[dict[int, bytes]]
    ) -> Positions:
        """Run a micro-batch in memory, once, its rows in yet another order; return the positions after it."""
        after = positions
        for shard, store in enumerate(stores):
            given = self._given(version, shard, positions, random.Random(version))
            messages = given.messages
            if messages is None:
                messages = pa.schema([*MESSAGE_FIELDS, *self.fields]).empty_table()
            work = Workspace(store, bounds[shard])
            batch = MicroBatch(version, given.time_ms, messages, positions, given.after, given.drain, given.timestamps)
            self.batches[version].operator.process(batch, work)
            changes = work.changes()
            store.write(changes)
            bounds[shard], after = dict(changes.bounds), given.after
        return after


class Judge:
    """The second judge: counts of tumbling and hopping windows, and who is out of retention."""

    def __init__(self) -> None:
        self.newest = -(2**63)
        self.counts: Counter[tuple[int, Any]] = Counter()
        self.changed = False

    def batch(self, world: FrameWorld, version: int, good: list[Message], errors: Counter[Any]) -> None:
        spec = world.batches[version].spec
        self.changed = self.changed or spec != world.batches[0].spec
        if spec.kind not in ("tumbling", "hopping") or spec.unit != "time" or self.changed:
            return
        late = Counter[Any]()
        for message in good:
            step = spec.step or spec.size
            starts = range(message.time // step * step, message.time - spec.size, -step)
            alive = [start for start in starts if start + spec.size + spec.retention_ms > self.newest]
            self.counts.update((start, message.fields["key"]) for start in alive)
            late.update([(message.time, "out_of_retention")] * (not alive))
        if late:
            world.note("late")
        assert late == Counter({error: n for error, n in errors.items() if error[1] == "out_of_retention"})
        self.newest = max([self.newest, *(message.time for message in good)])

    def check(self, world: FrameWorld, sent: list[Any]) -> None:
        if not world.spec.full or world.spec.late_ms is None:
            return
        newest: dict[tuple[int, Any], Any] = {}
        for row in sorted(sent, key=lambda row: row.revision):
            newest[row.window[0], row.key[0]] = row.values[0]
        assert newest == dict(self.counts), "counts of windows"


def _renumbered(messages: list[Message], *, unique: bool) -> list[Message]:
    """Put messages in one partition; by number of messages the order of equal event times would matter."""
    found, seen = list[Message](), set[int]()
    for offset, message in enumerate(messages):
        time = message.time
        while unique and time in seen and time <= MAX_EVENT_TIME:
            time += 1
        seen.add(time)
        found.append(replace(message, offset=offset, time=time, partition=0))
    return found


def simulate(seed: int, *, rocks: bool = False) -> FrameWorld:
    """Run one seed and check it.

    Raises:
        AssertionError: Something that must hold does not; the seed and the events are in the message.
    """
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    root = Path(tempfile.mkdtemp(prefix=f"rewind-frames-{seed}-", dir=base))
    world = FrameWorld(seed, root, rocks)
    try:
        with simulated(world), mock.patch.object(message_log, "FAN_IN", 3):
            world.run(world.random.randint(4, 9))
            world.check()
    except BaseException as error:
        events = "\n  ".join(world.trace[-60:])
        raise AssertionError(
            f"seed {seed} fails: {error!r}\n  {events}\n"
            f"{''.join(traceback.format_exception(error)[-4:])}\n"
            f"again: python -m tests.crash.frame_simulation {seed}"
        ) from error
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return world


def main(arguments: list[str]) -> int:
    """Run seeds from the command line: `<seed>` or `<first>-<last>`."""
    seen: Counter[str] = Counter()
    failed = 0
    for argument in arguments:
        first, _, last = argument.partition("-")
        for seed in range(int(first), int(last or first) + 1):
            try:
                seen.update(simulate(seed).seen)
            except AssertionError as error:
                failed += 1
                print(error)
    for name in RARE:
        print(f"{seen[name]:8d}  {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
