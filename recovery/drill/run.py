"""One run of a drill, and what must be true of which shards were restored or moved in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from backend.errors import code_of
from recovery.drill.scenarios import ALL, Scenario


@dataclass(slots=True)
class Run:
    """One run of a scenario, or the control.

    Attributes:
        events: What its processes told, and what the drill did, in order; `at` is seconds since the epoch.
        error: The named error's text that ended it; empty when it ended well.
        seconds: From the first start to the end.
        version: The micro-batch in which it was broken, -1 when it was not.
        broken_at: When it was broken, None when it was not.
        damaged: Shards whose local state was damaged.
        file: The file that was damaged, as an error must name it; empty when none was, or it was not one alone.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0
    version: int = -1
    broken_at: float | None = None
    damaged: tuple[int, ...] = ()
    file: str = ""

    def first(self, event: str, after: float = 0.0) -> float | None:
        """Give when an event first happened after a time."""
        return next((one["at"] for one in self.events if one["event"] == event and one["at"] > after), None)

    def last(self, event: str) -> float | None:
        """Give when an event last happened."""
        return next((one["at"] for one in reversed(self.events) if one["event"] == event), None)


def times(run: Run) -> dict[str, float | None]:
    """Give seconds from the new start of the query, or from the death where it went on by itself; None: not known.

    A new driver's start of Spark comes on top. `detect_s` is to the first restore, `restore_s` from there to the last
    one's end, `first_s` to the first result, and `rto_s` until the micro-batch was out that the job was broken in.
    """
    broken_at = run.broken_at or 0.0
    again = run.first("begun", broken_at) or broken_at
    restoring, restored = run.first("restoring", broken_at), run.last("restored")
    known = run.broken_at is not None
    first = run.first("progress", again) if known else None
    out = (one["at"] for one in run.events if one["at"] > broken_at and one.get("version", -1) >= run.version)
    return {
        "detect_s": _seconds(again, restoring),
        "restore_s": _seconds(restoring, restored),
        "first_s": _seconds(again, first),
        "rto_s": _seconds(again, next(out, None) if known else None),
    }


def _seconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, 3)


def misnamed(scenario: Scenario, run: Run) -> str:
    """Say what is wrong with the error that a run ended in; empty when it is the one that it must end in."""
    code = code_of(run.error)
    if code != scenario.error:
        return f"ended with {code or run.error or 'no error'}, not {scenario.error}"
    left: dict[str, int] = next((event["left"] for event in run.events if event["event"] == "aged"), {})
    if run.file and run.file not in run.error:
        return f"ended with an error that does not name {run.file}: {run.error}"
    if scenario.aged and not any(name in run.error and str(first) in run.error for name, first in left.items()):
        return f"ended with an error that names no partition that aged: {run.error}"
    return ""


def wrongly_restored(scenario: Scenario, run: Run) -> str:
    """Say which shards were restored and need not be, or were not and must be; empty when all is right."""
    found = restored(run)
    found |= {-1} if not found and any(event.get("restores") for event in run.events) else set()
    if not found <= set(run.damaged):
        return f"restored without need: {', '.join(str(shard) for shard in sorted(found - set(run.damaged)))}"
    missed = set(run.damaged) - found if scenario.restores == ALL else set()
    return f"damaged and not restored: {', '.join(str(shard) for shard in sorted(missed))}" if missed else ""


def restored(run: Run) -> set[int]:
    """Give the shards that were restored after the job was broken."""
    since = run.broken_at or 0.0
    return {event["shard"] for event in run.events if event["event"] == "restored" and event["at"] > since}


def unmoved(scenario: Scenario, run: Run) -> str:
    """Say when no shard moved and some should have; with turns, each does, and one at nearly every micro-batch."""
    if not scenario.hosts:
        return ""
    since = run.broken_at or 0.0
    shards = [event["shard"] for event in run.events if event["event"] == "fetched" and event["at"] > since]
    moved = len(shards)
    versions = max((event["version"] for event in run.events if event["event"] == "progress"), default=0)
    least = versions - 1 if scenario.alternate else 1
    if moved < least:
        return f"shards moved {moved} times, at least {least} expected"
    commits: dict[str, str] = next(
        (event["commits"] for event in reversed(run.events) if event["event"] == "ended"), {}
    )
    stayed = {int(shard) for shard in commits} - set(shards) if scenario.alternate else set()
    return f"never moved: {', '.join(str(shard) for shard in sorted(stayed))}" if stayed else ""
