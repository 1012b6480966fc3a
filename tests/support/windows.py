"""A job of one shard with one confirmed and one staged micro-batch: three windows, the first one closed."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from backend import aggregates as agg
from backend.batch import MESSAGE_FIELDS, NO_TIME, Operator, Position
from backend.windows.definitions import tumbling
from backend.windows.operator import WindowOperator
from backend.windows.spec import window_spec
from recovery.attempt import run_attempt
from recovery.changelog import open_changelog
from recovery.commit.manifest import Manifest, write_manifest
from recovery.commit.pointer import Pointer
from recovery.jobs import ShardJob
from recovery.share import ShardInput

QUERY = "11111111-0000-4000-8000-000000000000"
FIELDS = (pa.field("k", pa.string()), pa.field("x", pa.float64()))
# event time in s, group key, value: windows of 10 s, the first one closed
ROWS = [(1, "anna", 1.0), (2, "bert", 2.0), (11, "anna", 3.0), (25, "anna", 4.0), (26, "bert", 5.0)]


def windows_operator() -> tuple[WindowOperator, tuple[pa.Field, ...]]:
    """Make the job's operator, and the fields that it reads."""
    spec = window_spec(
        tumbling("10 s"),
        pa.schema(FIELDS),
        {"n": agg.count(), "mid": agg.median("x")},
        keys=["k"],
        retention="1 hour",
        max_ahead=None,
    )
    operator = WindowOperator(spec)
    return operator, tuple(pa.field(name, pa.schema(FIELDS).field(name).type) for name in operator.input_fields)


def make_windows(home: Path) -> Pointer:
    """Make the job's checkpoint and local state below a directory; give the committed pointer."""
    operator, fields = windows_operator()
    return make_checkpoint(home, operator, fields)


def make_checkpoint(home: Path, operator: Operator, fields: tuple[pa.Field, ...]) -> Pointer:
    """Run `ROWS` in two micro-batches through an operator, the second one staged and not confirmed."""
    location = home / "checkpoint"
    streams = [["input", "orders", 0]]
    entries = {"operator": operator.describe(), "changelog": "rewind/changelog", "streams": streams}
    write_manifest(str(location), Manifest(1, (0,), entries))
    (location / "metadata").write_text(json.dumps({"id": QUERY}))
    for folder in ("offsets", "commits", "state/0/_metadata", "state/0/0"):
        (location / folder).mkdir(parents=True)
    changelog = open_changelog(str(location / "rewind" / "changelog"))
    job = ShardJob(QUERY, 0, home / "local", operator, fields, changelog)
    pointer: Pointer | None = None
    for version, part in enumerate((ROWS[:3], ROWS[3:])):
        first = 3 * version
        rows = []
        for at, (time, key, x) in enumerate(part):
            before = max((one[0] * 1000 for one in ROWS[: first + at]), default=NO_TIME)
            place = {"_stream": 0, "_partition": 0, "_offset": first + at, "_time": time * 1000, "_before": before}
            values = {"k": key, "x": x}
            rows.append({**place, **{field.name: values[field.name] for field in fields}})
        table = pa.Table.from_pylist(rows, pa.schema([*MESSAGE_FIELDS, *fields]))
        after = {(0, 0): Position(first + len(part), part[-1][0] * 1000, 9_000)}
        done = run_attempt(job, pointer, version, lambda before, t=table, a=after: ShardInput(9_000, t, a))  # type: ignore[misc]
        pointer = done.pointer
        for log in ("offsets", "commits"):
            (location / log / str(version)).write_text("v1")
    assert pointer is not None
    return pointer
