"""A job's micro-batches for a sink, and a Spark that dies: what plays the driver around `begin`, `open` and `finish`.

The rows of every micro-batch are drawn before anything runs, and with them what readers must see in the end: of the
log every row, of the newest the last row of each (shard, window, group key), none where that one is a retraction.
Expected values are computed from the drawn rows alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from backend.aggregates import count, sum_
from backend.batch import EDGES, ERROR_SCHEMA
from backend.errors import OutputDiffers
from backend.sinks import foreach, parquet, table_sink
from backend.sinks.kafka import sink as kafka_sink
from backend.sinks.kafka import writer as kafka_writer
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from tests.support.packed import pack

MINUTE_MS, START_MS = 60_000, 1_700_000_040_000
KEYS = ("JFK", "", None, "a'; DROP TABLE windows; --", 'q"`\\', "nul\x00byte", "LGA")
FIELDS = pa.schema([("origin", pa.string()), ("cents", pa.float64())])
PLACES = ("task", "before_publish", "before_commit", "after_commit", "during_publish", "after_publish")
"""Where the driver dies; `*_commit` are around each commit of the sink's own."""
TURN = (*PLACES, "before_commit", "after_commit")
TRIES = 20


class Death(BaseException):
    """The driver died."""


def operator() -> WindowOperator:
    spec = window_spec(
        tumbling("1 minute"), FIELDS, {"n": count(), 'odd "total".x': sum_("cents")}, keys=["origin"], retention=0
    )
    return WindowOperator(spec)


Frames = list[dict[str, Any]]


@dataclass
class Story:
    """Rows of micro-batches.

    Attributes:
        frames: Per micro-batch what the operator gave, a frame per shard.
        rows: Per micro-batch the results' rows, as (id, reason, shard, start in ms, key, n, total).
        errors: Per micro-batch the ids and offsets of its errors.
    """

    seed: int
    batches: int = 40
    shards: int = 3
    frames: list[Frames] = field(default_factory=list)
    rows: list[list[tuple[Any, ...]]] = field(default_factory=list)
    errors: list[list[tuple[str, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        live: dict[tuple[int, int, Any], int] = {}
        for version in range(self.batches):
            frames, rows, errors = [], [], []
            for shard in range(self.shards):
                made = [self._row(draw, live, shard) for _ in range(draw.choice((0, 0, 3, 8)))]
                rows += [(f"{version}-{shard}-{at}", *row) for at, row in enumerate(made)]
                bad = [version * 100 + n for n in range(draw.choice((0, 0, 2)))]
                errors += [(f"{version}-{shard}-e{at}", offset) for at, offset in enumerate(bad)]
                frames.append(frame(shard, version, made, bad))
            self.frames.append(frames)
            self.rows.append(rows)
            self.errors.append(errors)

    def _row(self, draw: random.Random, live: dict[tuple[int, int, Any], int], shard: int) -> tuple[Any, ...]:
        start = START_MS + draw.randrange(2) * MINUTE_MS
        key = draw.choice(KEYS)
        revision = live.get((shard, start, key), -1)
        if revision >= 0 and draw.random() < 0.3:
            live[shard, start, key] = -1
            return "retracted", shard, start, key, draw.randrange(9), draw.random()
        live[shard, start, key] = revision + 1
        return draw.choice(("full", "late", "early")), shard, start, key, draw.randrange(9), draw.random()

    def other(self, draw: random.Random, version: int) -> Frames | None:
        """Return frames that say something else; None where there is nothing that could."""
        if not self.rows[version]:
            return None
        shard = draw.choice(self.rows[version])[2]
        mine = [list(row[1:]) for row in self.rows[version] if row[2] == shard]
        change = draw.choice(("value", "fewer", "more", "reason"))
        if change == "value":
            mine[-1][4] += 1
        elif change == "fewer":
            mine.pop()
        elif change == "more":
            mine.append(["full", shard, START_MS, "JFK", 1, 1.0])
        else:
            mine[0][0] = "drain"
        bad = [offset for name, offset in self.errors[version] if name.split("-")[1] == str(shard)]
        made = frame(shard, version, [tuple(row) for row in mine], bad)
        return [made if one["shard"] == shard else one for one in self.frames[version]]

    @property
    def log(self) -> list[tuple[Any, ...]]:
        """What a log holds: (id, reason, shard, start, key, n, total), sorted."""
        return sorted((row for rows in self.rows for row in rows), key=lambda row: row[0])

    @property
    def newest(self) -> list[tuple[Any, ...]]:
        """What a table of the newest rows holds, sorted as `log`."""
        held = {row[2:5]: row for rows in self.rows for row in rows}
        assert {"retracted", "full"} <= {row[1] for row in held.values()}, "this story shows nothing"
        return sorted((row for row in held.values() if row[1] != "retracted"), key=lambda row: row[0])


def frame(shard: int, version: int, rows: list[tuple[Any, ...]], bad: list[int]) -> dict[str, Any]:
    columns = {
        "reason": [row[0] for row in rows],
        "revision": [0] * len(rows),
        "window_start": [row[2] for row in rows],
        "window_end": [row[2] + MINUTE_MS for row in rows],
        **{name: [None] * len(rows) for name in EDGES},
        "origin": [row[3] for row in rows],
        "n": [row[4] for row in rows],
        'odd "total".x': [row[5] for row in rows],
    }
    fixed = {"topic": "t", "stream": 0, "partition": shard, "event_time": 2**60, "reason": "malformed", "value": b"\0?"}
    errors = [{**fixed, "offset": offset, "detail": "nul\x00"} for offset in bad]
    return {
        "shard": shard,
        "version": version,
        "results": pack(pa.table(columns, schema=operator().result_schema)),
        "errors": pack(pa.Table.from_pylist(errors, schema=ERROR_SCHEMA)),
        "metrics": "{}",
    }


def batch_of(frames: Frames) -> pa.RecordBatch:
    kinds = [("shard", pa.int32()), ("version", pa.int64()), ("results", pa.binary()), ("errors", pa.binary())]
    return pa.RecordBatch.from_pylist(frames, schema=pa.schema([*kinds, ("metrics", pa.string())]))


Tasks = Callable[[Any, int, Frames], tuple[Any, ...]]
"""(sink, version, frames) -> what the sink's `finish` takes: tasks have run, one of them twice."""


def to_outbox(sink: Any, version: int, frames: Frames) -> tuple[Any, ...]:
    """Write as tasks of most sinks do."""
    write, folder = sink.writing().write, sink.folder(version)
    return sink.written(folder, reported(write, version, frames)), version


def to_attempts(sink: Any, version: int, frames: Frames) -> tuple[Any, ...]:
    """Write as tasks of the Parquet sink do."""
    write, attempts = sink.writing().write, sink.attempts(version)
    return reported(write, version, frames), version, attempts


def reported(write: Any, version: int, frames: Frames) -> list[dict[str, Any]]:
    """Write every frame, the first one twice; give what the tasks that count report."""
    write(batch_of(frames[:1]), version)
    return [row for one in frames for row in write(batch_of([one]), version).to_pylist()]


def collected(sink: Any, version: int, frames: Frames) -> tuple[Any, ...]:
    """Bring all frames to the driver, as Kafka's exactly-once sink does."""
    return frames, version


@dataclass
class Player:
    """Spark's driver, which dies.

    Attributes:
        make: Makes the sink as a new process does.
        outbox: Where its tasks write.
        story: What happens.
        deaths: How often it dies.
        run_tasks: How its tasks write.
        commits: Methods that commit...
        tables: ... of these.
        is_out: Tells whether a micro-batch is published.
        look: Reads what readers see.
        seen: How often what happened.
    """

    make: Callable[[], Any]
    outbox: str
    story: Story
    deaths: int
    run_tasks: Tasks = to_outbox
    commits: tuple[str, ...] = ("append", "replace")
    tables: Callable[[Any], list[Any]] = lambda sink: list(sink._tables.values())
    is_out: Callable[[Any, int], bool] = lambda sink, version: sink._tables["results"].last().version == version
    look: Callable[[], Any] | None = None
    seen: Counter[str] = field(default_factory=Counter)

    def run(self) -> None:
        draw = random.Random(f"deaths {self.story.seed}")
        sink = self.start(-1)
        places: list[str] = []  # each in turn, so that few deaths have been everywhere
        for version, frames in enumerate(self.story.frames):
            due = self.deaths * (version + 1) // len(self.story.frames)
            for _ in range(TRIES):
                if self.seen["deaths"] == due:
                    break
                # a commit is passed once per micro-batch, the other places at each try
                places = [*places, *draw.sample(TURN, len(TURN))] if len(places) < 2 else places
                place = places.pop()
                try:
                    with self.dying(sink, place, draw.choice((1, 1, 2))):
                        self.publish(sink, version, frames)
                except Death:
                    self.seen[place] += 1
                    self.seen["deaths"] += 1
                else:
                    places.insert(0, place)
                sink = self.start(version)
                if draw.random() < 0.3:
                    self.differ(sink, version, draw)
            assert self.publish(sink, version, frames)
            if draw.random() < 0.3:  # it fails behind the sink, and runs again in this process
                self.publish(sink, version, frames)
                self.seen["again"] += 1

    def start(self, planned: int) -> Any:
        sink = self.make()
        if hasattr(sink, "begin"):
            sink.begin(self.outbox, operator())
        sink.resume_from(planned)
        sink.open("q")
        return sink

    def publish(self, sink: Any, version: int, frames: Frames) -> list[dict[str, Any]]:
        """Run the tasks, one of them twice, and bring out what the one that counts wrote."""
        given = self.run_tasks(sink, version, frames)
        table_sink.kill_point("task", version)
        done: list[dict[str, Any]] = sink.finish(*given)
        return done

    def differ(self, sink: Any, version: int, draw: random.Random) -> None:
        """Run the micro-batch again with another result: refused by name where it is out, and nothing changes."""
        other = self.story.other(draw, version)
        if other is None or not self.is_out(sink, version):
            return
        before = self.look() if self.look is not None else None
        try:
            self.publish(sink, version, other)
        except OutputDiffers:
            self.seen["differs"] += 1
            assert self.look is None or self.look() == before
            return
        raise AssertionError(f"micro-batch {version} was published with other rows")

    @contextmanager
    def dying(self, sink: Any, place: str, nth: int) -> Iterator[None]:
        """Die at a place: at a kill point, or right before or behind the n-th commit of a table."""
        left = [nth]

        def point(name: str, version: int | None = None) -> None:
            if name == place:
                raise Death(name)

        def around(real: Callable[..., None]) -> Callable[..., None]:
            def commit(*given: Any) -> None:
                left[0] -= 1
                if left[0] == 0 and place == "before_commit":
                    raise Death(place)
                real(*given)
                if left[0] == 0 and place == "after_commit":
                    raise Death(place)

            return commit

        with ExitStack() as patched:
            for module in (table_sink, foreach, parquet, kafka_sink, kafka_writer):
                patched.enter_context(mock.patch.object(module, "kill_point", point))
            for table in self.tables(sink):
                for name in self.commits:
                    patched.enter_context(mock.patch.object(table, name, around(getattr(table, name))))
            yield


def check_seen(seen: Counter[str], deaths: int) -> None:
    """Check that the run shows something: enough deaths, at every place, and other results that were refused."""
    assert seen["deaths"] >= deaths
    assert [place for place in PLACES if not seen[place]] == []
    assert seen["differs"] and seen["again"]


def scratch(path: Path) -> str:
    """Return the outbox of a test."""
    return str(path / "checkpoint" / "rewind" / "outbox")
