"""What a job will do, said before it starts: `Pipeline.explain`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import starmap
from typing import TYPE_CHECKING, Any

import pyarrow.compute as pc

from backend.joins.operator import JoinOperator
from backend.sources.dataframe import is_ranked
from backend.windows.operator import WindowOperator, combining_of

if TYPE_CHECKING:
    from backend.joins.spec import JoinSpec
    from backend.spark.job import Input, Job
    from backend.windows.spec import WindowSpec

_UNITS = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000))


def explained(job: Job, snapshots: str | int | None) -> str:
    """Return what a job will do, a line for each part.

    Args:
        job: The job.
        snapshots: The option of `start`.
    """
    lines = [(f"{side.name} {name}".strip(), text) for side in job.inputs for name, text in _input(side)]
    lines += [("route", _route(job)), ("combined", _combined(job))]
    if isinstance(job.operator, WindowOperator):
        lines += _windows(job.operator.spec)
    elif isinstance(job.operator, JoinOperator):
        lines += _join(job.operator.spec)
    else:
        stores: Any = job.operator.describe()["stores"]
        lines += [("process", "your function"), ("state", f"its stores: {_listed(stores) or 'none'}")]
    lines += [("logged", _logged(job)), ("snapshots", _snapshots(snapshots)), ("restore", _restore(job))]
    lines += [("memory", _memory(job))]
    wide = max(len(name) for name, _ in lines) + 2
    return "\n".join(f"{name:<{wide}}{text}" for name, text in lines)


def _input(side: Input) -> Iterator[tuple[str, str]]:
    where = "in the Python workers" if side.direct is not None else "by Spark"
    yield "source", f"{side.source.describe()['kind']} {_listed(side.source.topics)}, read {where}"
    yield "time", side.event_time or "the record's own timestamp"
    if side.steps:
        yield "steps", ", ".join(f"{step.kind}({_listed(starmap(_part, step.what.items()))})" for step in side.steps)


def _part(name: str, what: Any) -> str:
    """Return an expression as Arrow writes it, a function by its name."""
    if what is None:
        return name
    text = str(getattr(what, "__name__", "a function"))
    if isinstance(what, pc.Expression):  # Arrow puts parentheses around
        text = re.sub(r"^\((.*)\)$", r"\1", str(what))
    return f"{name}={text}" if name else text


def _route(job: Job) -> str:
    if job.route == "partition":
        return f"by source partition to {job.shards} shards"
    keys = {_listed(side.key) for side in job.inputs}
    return f"by {' and '.join(sorted(keys))} to {job.shards} shards" if any(keys) else "all to one shard"


def _combined(job: Job) -> str:
    if not job.ranked and combining_of(job.operator) is not None:
        return "messages that all windows treat alike become one row before they cross to the shard"
    return "nothing: the operator gets each message"


def _windows(spec: WindowSpec) -> Iterator[tuple[str, str]]:
    window, unit = spec.window, "messages" if not spec.window.by_time else ""
    size = f"{window.size} {window.calendar}" if window.calendar else _length(window.size, unit)
    step = f" every {_length(window.step, unit)}" if window.kind == "hopping" and window.step else ""
    limits = [_length(spec.retention_ms)] if spec.window.by_time or spec.retention_ms else []
    limits += [f"{spec.retention_messages} messages"] if spec.retention_messages is not None else []
    yield "windows", f"{window.kind} {size}{step}, retention {' or '.join(limits) or 'none'}"
    yield "results", ", ".join(f"{name} = {one.kind}({_listed(one.fields)})" for name, one in spec.aggregates.items())
    state = f"a partial aggregate per window and key of {_listed(spec.incremental)}" if spec.incremental else ""
    full = f"every message in retention, for {_listed(spec.full)}" if spec.full else ""
    yield "state", "; ".join(filter(None, (state, full))) or "which windows and keys there are"


def _join(spec: JoinSpec) -> Iterator[tuple[str, str]]:
    between = "" if spec.before is None else f", {_length(spec.before)} before to {_length(spec.after or 0)} after"
    on = _listed(spec.left.on) or "no fields"
    yield "join", f"{spec.how} on {on}{between}"
    limits = [_length(side.retention_ms) if side.retention_ms is not None else "for ever" for side in spec.sides]
    yield "state", f"the messages of both sides: left {limits[0]}, right {limits[1]}"


def _logged(job: Job) -> str:
    metadata = "windows, aggregates and stores, in the changelog"
    if not job.operator.replays:
        return metadata
    ranked = [side.name or "the stream" for side in job.inputs if is_ranked(side.source)]
    return f"{metadata}; the messages of {_listed(ranked)}: nobody can read them again" if ranked else metadata


def _restore(job: Job) -> str:
    if not job.operator.replays:
        return "the changelog; no message is read again"
    again = [side.name or "the source" for side in job.inputs if not is_ranked(side.source)]
    return f"the changelog, and the messages in retention from {_listed(again) or 'their log'}"


def _snapshots(option: str | int | None) -> str:
    if option == "off":
        return "none"
    if option is None:
        return "none on a local checkpoint; elsewhere each commit's file, and every 50 commits a shard's database"
    return f"each commit's file, and every {option} commits a shard's database"


def _memory(job: Job) -> str:
    """Say what docs/sizing.md has measured."""
    each = "0.7 kB for each window and key that closes at once"
    if job.operator.replays and isinstance(job.operator, WindowOperator):
        each = "0.35 kB for each message of the largest window"
    return f"a worker has 135 MB at rest, and a shard {each}; allow two and a half times that"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def _length(size: int, unit: str = "") -> str:
    """Return a duration in its largest whole unit, or a number of messages."""
    if unit:
        return f"{size} {unit}"
    for name, length in _UNITS:
        if size and size % length == 0:
            return f"{size // length} {name}{'s' * (abs(size) != length)}"
    return f"{size} ms"
