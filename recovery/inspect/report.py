"""What the command says, twice: as JSON for programs, with rich for people. No logic: it gets values and shows them."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backend.batch import NO_TIME
from backend.errors import RewindError, message_of
from backend.python_rows import python_rows
from backend.texts import visible
from recovery.commit.pointer import CommitRecord
from recovery.inspect.checkpoint_view import Checkpoint, ShardView, region_name
from recovery.inspect.reset import Reset
from recovery.inspect.screen import plain
from recovery.inspect.stores import number
from recovery.inspect.verify import NOTE, PROBLEM, SOUND, Finding
from recovery.restore.planner import replay_ranges

_TIMES = ("start", "end", "_time", "expires")
_WIDEST = 100_000
_MOST_PLACES = 8
_MORE = "there are more rows: narrow it with --from, --to, --key, --shard, or raise --limit"
_STYLES = {SOUND: "green", NOTE: "yellow", PROBLEM: "bold red"}
"""By level, in the order in which findings are drawn."""


def checkpoint_json(
    checkpoint: Checkpoint, shards: Sequence[ShardView], lag: Mapping[str, int] | None
) -> dict[str, Any]:
    """Give `rewind inspect` as JSON. What is not known is null."""
    versions = checkpoint.versions()
    return {
        "checkpoint": checkpoint.location,
        "query_id": checkpoint.query_id,
        "committed_micro_batches": {"first": versions[0], "last": versions[-1]} if versions else None,
        "changelog": str(checkpoint.manifest.entries.get("changelog", "")),
        "operator": checkpoint.manifest.entries.get("operator"),
        "lag": dict(lag) if lag is not None else None,
        "shards": [_shard_json(shard, checkpoint.manifest.topics) for shard in shards],
    }


def _shard_json(shard: ShardView, topics: Mapping[int, str]) -> dict[str, Any]:
    record, local = shard.record, shard.local
    segments = record.segments if record is not None else []
    stream_time = low_clock(shard)
    return {
        "shard": shard.shard,
        "commit": record.commit.name if record is not None else None,
        "version": record.commit.version if record is not None else None,
        "batch_time": moment(record.time_ms) if record is not None else None,
        "positions": [
            {
                "stream": stream,
                "topic": topics.get(stream),
                "partition": partition,
                "next_offset": position.next_offset,
                "stream_time": moment(position.stream_time),
            }
            for stream, partition, position in shard.positions
        ],
        "messages": record.message_count if record is not None else None,
        "rows": {region_name(region): rows for region, rows in shard.regions.items()},
        "windows": _windows_json(shard.windows, stream_time) if shard.windows is not None else None,
        "changelog": {"records": len(shard.log), "bases": shard.bases, "bytes": shard.log_bytes},
        "message_log": {"segments": len(segments), "bytes": sum(segment.length for segment in segments)},
        "queue": {"micro_batches": len(shard.queue), "bytes": sum(shard.queue.values())},
        "snapshots": {"count": shard.snapshots[0], "bytes": shard.snapshots[1]},
        "local": None
        if local is None
        else {
            "path": str(local.path),
            "commit": local.commit.name if local.commit is not None else None,
            "bytes": local.length,
            "staged": [commit.name for commit in local.staged],
            "problem": error_json(local.problem),
        },
        "problem": error_json(shard.problem),
    }


def _windows_json(windows: Sequence[tuple[int, int]], stream_time: int | None) -> dict[str, Any]:
    ahead = [edges for edges in windows if stream_time is None or edges[1] > stream_time]
    return {
        "retained": len(windows),
        "open": len(ahead),
        "closing_next": moment(min(end for _, end in ahead)) if ahead else None,
        "oldest": moment(windows[0][0]) if windows else None,
    }


def low_clock(shard: ShardView) -> int | None:
    """Give the smallest stream time over a shard's source partitions, None before the first message."""
    times = (position.stream_time for _, _, position in shard.positions if position.stream_time != NO_TIME)
    return min(times, default=None)


def moment(time_ms: int) -> str | None:
    """Give a time in ISO 8601, UTC; None for "no event yet", the bare number where no calendar reaches."""
    if time_ms == NO_TIME:
        return None
    try:
        at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return str(time_ms)


def error_json(error: RewindError | None) -> dict[str, str] | None:
    """Give an error's parts."""
    if error is None:
        return None
    return {"code": error.code, "what": error.what, "where": error.where, "why": error.why, "next": error.command}


def findings_json(findings: Iterable[Finding]) -> list[dict[str, str]]:
    """Give findings as JSON."""
    return [{"level": f.level, "check": f.check, "where": f.where, "what": f.what, "next": f.command} for f in findings]


def print_json(value: Any) -> None:
    """Write JSON to standard output."""
    print(json.dumps(value, indent=2, default=str, allow_nan=False))


def show_checkpoint(console: Console, data: Mapping[str, Any]) -> None:
    """Draw `checkpoint_json`."""
    spans = data["committed_micro_batches"]
    console.print(plain(f"{data['checkpoint']}, query {data['query_id']}"), soft_wrap=True)
    known = f"{spans['first']} to {spans['last']}" if spans else "none"
    line = f"committed micro-batches that Spark still knows: {known}; changelog: {data['changelog']}"
    console.print(plain(line), soft_wrap=True)
    state = Table("shard", "version", "batch time", "open windows", "closing next")
    places = Table("shard", "messages", "changelog", "snapshots", "local copy")
    for shard in data["shards"]:
        cells = _cells(shard)
        state.add_row(*map(plain, cells[:5]))
        places.add_row(*map(plain, [cells[0], *cells[5:]]))
    console.print(state)
    console.print(places)
    positions = Table("shard", "topic", "partition", "next offset", "stream time", "lag")
    for shard in data["shards"]:
        for at in shard["positions"]:
            lag = (data["lag"] or {}).get(f"{at['stream']}/{at['partition']}")
            topic = at["topic"] or f"stream {at['stream']}"
            place = (shard["shard"], topic, at["partition"], at["next_offset"], _short(at["stream_time"]), lag)
            positions.add_row(*(plain("" if cell is None else cell) for cell in place))
    console.print(positions)
    for shard in data["shards"]:
        queue = shard["queue"]
        if queue["micro_batches"]:
            line = f"shard {shard['shard']} queues its input: {queue['micro_batches']} micro-batches behind version"
            console.print(plain(f"{line} {shard['version']}, {size(queue['bytes'])}", "yellow"), soft_wrap=True)
        for problem in (shard["problem"], (shard["local"] or {}).get("problem")):
            if problem is not None:
                console.print(plain(f"shard {shard['shard']}: {error_text(problem)}", "red"))


def _cells(shard: Mapping[str, Any]) -> list[str]:
    windows, log, snapshots, local = shard["windows"], shard["changelog"], shard["snapshots"], shard["local"]
    here = "none"
    if local is not None:
        found = local["commit"]
        same = "no commit" if found is None else f"at version {int(found[:20])}"
        same = "at the commit" if found == shard["commit"] else same
        here = f"{size(local['bytes'])}, {same}"
    return [
        str(shard["shard"]),
        "" if shard["version"] is None else str(shard["version"]),
        (_short(shard["batch_time"]) or "").split(".")[0],
        f"{windows['open']} of {windows['retained']}" if windows else str(shard["rows"].get("windows", 0)),
        _short((windows or {}).get("closing_next")) or "",
        "" if shard["messages"] is None else f"{shard['messages']:,}",
        f"{log['records']} records, {log['bases']} bases, {size(log['bytes'])}",
        f"{snapshots['count']}, {size(snapshots['bytes'])}",
        here,
    ]


def _short(at: str | None) -> str | None:
    """Give a time without what a table has no room for."""
    return at.replace("T", " ").removesuffix(".000Z").removesuffix("Z") if at is not None else None


def show_findings(console: Console, findings: Sequence[Mapping[str, str]]) -> None:
    """Draw `findings_json`: problems last, where they are seen."""
    for finding in sorted(findings, key=lambda found: list(_STYLES).index(found["level"])):
        line = plain(f"{finding['level']:8} ", _STYLES[finding["level"]])
        line.append_text(plain(f"{finding['check']}: {finding['where']}: {finding['what']}", "default"))
        if finding["next"]:
            line.append_text(plain(f"; next: {finding['next']}", "cyan"))
        console.print(line, soft_wrap=True)
    counts = Counter(finding["level"] for finding in findings)
    console.print(f"{counts[SOUND]} sound, {counts[NOTE]} notes, {counts[PROBLEM]} problems", highlight=False)


def readable_rows(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Give rows of state as JSON can hold them: bytes as hex, times of windows in ISO 8601, numbers that it has not."""
    return [{name: _readable(name, value) for name, value in row.items()} for row in rows]


def _readable(name: str, value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return number(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, list | tuple):
        return [_readable("", item) for item in value]
    if isinstance(value, dict):
        return {part: _readable("", item) for part, item in value.items()}
    return moment(value) if name in _TIMES and isinstance(value, int) else value


def milliseconds(at: datetime | None) -> int | None:
    """Give a time of the command line, meant as UTC, in milliseconds."""
    return None if at is None else round(at.replace(tzinfo=at.tzinfo or UTC).timestamp() * 1000)


def as_of_json(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Give, as JSON, what the state that was read of each shard goes up to."""
    topics = checkpoint.manifest.topics
    return [
        {
            "shard": shard,
            "version": record.commit.version,
            "positions": [
                {"topic": topics.get(stream) or f"stream {stream}", "partition": number, "next_offset": at.next_offset}
                for stream, number, at in record.positions
            ],
            "newest": newest,
            "queued": len(checkpoint.queued(shard, newest)) if newest == record.commit.version else 0,
        }
        for shard, record in sorted(checkpoint.shown.items())
        for newest in [_newest(checkpoint, shard, record)]
    ]


def _newest(checkpoint: Checkpoint, shard: int, record: CommitRecord) -> int:
    """Give the version of a shard's newest commit with a state."""
    try:
        commit = checkpoint.committed(shard)
    except RewindError:  # only Spark can tell; what is shown is of this host's database
        return record.commit.version
    return record.commit.version if commit is None else commit.version


def _as_of(shard: Mapping[str, Any]) -> str:
    places = [f"{at['topic']}/{at['partition']} before offset {at['next_offset']}" for at in shard["positions"]]
    shown = [*places[:_MOST_PLACES], *([f"{len(places)} source partitions"] if len(places) > _MOST_PLACES else [])]
    queued = f"; {shard['queued']} micro-batches are queued behind it" if shard["queued"] else ""
    queued += f"; the newest is {shard['newest']}" if shard["newest"] != shard["version"] else ""
    return f"shard {shard['shard']} as of micro-batch {shard['version']}: {', '.join(shown)}{queued}"


def write_rows(parts: Sequence[pa.Table], limit: int, form: str, as_of: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of state to standard output, at most `limit` of them.

    Args:
        parts: Tables of the same columns.
        limit: Of rows; that there are more is said on standard error, in JSON beside the rows.
        form: `table`, `json`, `csv` or `parquet`; the first three as `readable_rows` has them.
        as_of: As `as_of_json` has it: on standard error a line each, in JSON beside the rows.
    """
    whole = pa.concat_tables(parts, promote_options="default")
    table = whole.slice(0, limit)
    more = whole.num_rows > limit
    if form == "json":
        print_json({"rows": readable_rows(python_rows(table)), "more": more, "as_of": as_of})
        return
    for shard in as_of:
        Console(stderr=True).print(plain(_as_of(shard)), soft_wrap=True)
    if form == "table":
        show_rows(Console(), readable_rows(python_rows(table)))
    elif form == "parquet":
        pq.write_table(table, pa.PythonFile(sys.stdout.buffer, mode="w"))
    else:
        text = visible if sys.stdout.isatty() else str
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(text(name) for name in table.column_names)
        for row in readable_rows(python_rows(table)):
            out.writerow("" if cell is None else text(_flat(cell)) for cell in row.values())
    if more:
        Console(stderr=True).print(_MORE)


def _flat(cell: Any) -> str:
    return json.dumps(cell, default=str, allow_nan=False) if isinstance(cell, list | dict) else str(cell)


def show_rows(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw rows of equal columns: as a table where that fits, one column below the other where it does not."""
    table = Table()
    for name in rows[0] if rows else ():
        table.add_column(plain(name))
    lines = [[plain(_shown(name, value)) for name, value in row.items()] for row in rows]
    for line in lines:
        table.add_row(*line)
    if not rows:
        console.print("nothing")
    elif console.measure(table, options=console.options.update(width=_WIDEST)).maximum <= console.width:
        console.print(table)
    else:
        for number, (row, line) in enumerate(zip(rows, lines, strict=True), 1):
            console.print(f"row {number}", style="bold", highlight=False)
            for name, value in zip(row, line, strict=True):
                console.print(Text.assemble("  ", plain(name, "cyan"), ": ", value), soft_wrap=True)


def _shown(name: str, value: Any) -> str:
    return "" if value is None else str(_short(value) if name in _TIMES else value)


def restore_plans(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Tell per shard what a restore would find and read, without carrying it out."""
    plans = []
    for shard in map(checkpoint.view, checkpoint.shards):
        record, local = shard.record, shard.local
        here, staged = (local.commit, local.staged) if local is not None else (None, ())
        ready = record is None or here == record.commit or (here == record.parent and record.commit in staged)
        ranges = replay_ranges(record) if record is not None and not ready else {}
        plans.append(
            {
                "shard": shard.shard,
                "commit": record.commit.name if record is not None else None,
                "here": _found_here(shard, ready=ready),
                "changelog_bytes": 0 if ready else shard.log_bytes,
                "replay": ", ".join(f"{s}/{p}: {low} to {high - 1}" for (s, p), (low, high) in sorted(ranges.items())),
                "problem": str(shard.problem) if shard.problem is not None else None,
            }
        )
    return plans


def _found_here(shard: ShardView, *, ready: bool) -> str:
    if shard.record is None and shard.problem is not None:
        return "unknown"
    return "usable" if ready else "not usable" if shard.local is not None else "nothing"


def show_restore(console: Console, data: Mapping[str, Any]) -> None:
    """Draw what `rewind restore` found and did."""
    show_rows(console, data["shards"])
    print("nothing was touched" if data["dry_run"] else restored(data["restored"], data["shards"]))


def restored(count: int, plans: Sequence[Mapping[str, Any]]) -> str:
    """Say what `rewind restore` did: what it restores lies in the checkpoint's snapshots until a start takes it."""
    problems = sum(plan["problem"] is not None for plan in plans)
    if not problems and not any(plan["commit"] for plan in plans):
        return "nothing is committed: the next start begins anew"
    if count:
        lie = "shards are in the checkpoint's snapshots now: the next start takes them from there"
        said = f"{count} of {len(plans)} {lie}"
    else:
        said = "nothing had to be restored"
        if not problems:
            said += ": the next start finds every shard, here or in the checkpoint's snapshots"
    return f"{said}; what is wrong with {problems} of them, named above, is as it was" if problems else said


def reset_json(plan: Reset, *, dry_run: bool) -> dict[str, Any]:
    """Give what a reset deletes."""
    paths = [{"path": path, "bytes": length} for path, length in plan.paths]
    return {"dry_run": dry_run, "deleted": paths, "kept": list(plan.stays), "offsets": list(plan.offsets)}


def show_reset(console: Console, data: Mapping[str, Any]) -> None:
    """Say every path and offset."""
    verb = "would delete" if data["dry_run"] else "deletes"
    lines = [f"{verb} {one['path']}" + (f" ({size(one['bytes'])})" if one["bytes"] is not None else "")
             for one in data["deleted"]]  # fmt: skip
    lines += [f"keeps {stays}" for stays in data["kept"]]
    for line in [*lines, *data["offsets"]]:
        console.print(plain(line), soft_wrap=True)


def error_text(problem: Mapping[str, str]) -> str:
    """Put the parts that `error_json` gave on one line, as the error's own message has them."""
    return message_of(*(problem[part] for part in ("code", "what", "where", "why", "next")))


def size(length: int) -> str:
    """Give bytes for people.

    >>> size(999), size(1_500), size(2_000_000)
    ('999 B', '1.5 kB', '2.0 MB')
    """
    amount = float(length)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"
