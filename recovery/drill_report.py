"""The report of a drill: JSON, terminal, and one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from recovery.drill import Drill, Verdict

_WIDTH, _HEIGHT, _MARGIN = 860, 150, 40
_COLORS = {
    "killed": "#c0392b",
    "damaged": "#c0392b",
    "restoring": "#e67e22",
    "restored": "#27ae60",
    "failed": "#8e44ad",
}


def drill_json(drill: Drill, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Give the report as JSON; times in seconds, what did not happen is null."""
    return {
        "job": drill.job,
        "seed": drill.seed,
        "passed": all(verdict.passed for verdict in verdicts),
        "spark_start_s": _round(drill.spark_start_s),
        "control": {"events": drill.control_run.events},
        "scenarios": [_verdict_json(verdict) for verdict in verdicts],
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    difference = verdict.difference
    return {
        "name": verdict.scenario.name,
        "text": verdict.scenario.text,
        "must_end_in": verdict.scenario.error or None,
        "passed": verdict.passed,
        "why": verdict.why,
        "error": verdict.run.error or None,
        "detect_s": _round(verdict.detect_s),
        "restore_s": _round(verdict.restore_s),
        "rto_s": _round(verdict.catch_up_s),
        "rpo": None
        if difference is None
        else {"lost": difference.lost, "doubled": difference.doubled + difference.extra, "changed": difference.changed},
        "proof": None
        if difference is None
        else {
            "windows": difference.windows,
            "errors": difference.errors,
            "state_equal": difference.state_equal,
            "equal": difference.equal,
            "samples": list(difference.samples),
        },
        "events": verdict.run.events,
    }


def show_drill(console: Console, data: dict[str, Any]) -> None:
    """Draw the table and say what failed and why."""
    table = Table("scenario", "passed", "detect", "restore", "RTO", "RPO", "proof")
    for one in data["scenarios"]:
        table.add_row(
            one["name"],
            "[green]yes[/green]" if one["passed"] else "[bold red]NO[/bold red]",
            _seconds(one["detect_s"]),
            _seconds(one["restore_s"]),
            _seconds(one["rto_s"]),
            _rpo(one["rpo"]),
            _proof(one),
        )
    console.print(table)
    for one in data["scenarios"]:
        if not one["passed"]:
            console.print(f"{one['name']}: {one['why']}", style="red", markup=False, soft_wrap=True)


def write_html(path: Path, data: dict[str, Any]) -> None:
    """Write the page: summary, and per scenario its timeline beside the control's."""
    sections = "".join(_section(one, data["control"]["events"]) for one in data["scenarios"])
    rows = "".join(
        f"<tr class={'ok' if one['passed'] else 'bad'}><td>{escape(one['name'])}</td>"
        f"<td>{'passed' if one['passed'] else 'FAILED'}</td><td>{_seconds(one['detect_s'])}</td>"
        f"<td>{_seconds(one['restore_s'])}</td><td>{_seconds(one['rto_s'])}</td><td>{escape(_rpo(one['rpo']))}</td>"
        f"<td>{escape(_proof(one))}</td></tr>"
        for one in data["scenarios"]
    )
    verdict = "all scenarios passed" if data["passed"] else "SOME SCENARIOS FAILED"
    path.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Rewind drill</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2em auto;padding:0 1em;color:#222}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.3em .6em;border-bottom:1px solid #ddd}}
tr.bad td:nth-child(2){{color:#c0392b;font-weight:bold}}tr.ok td:nth-child(2){{color:#27ae60}}
code{{background:#f4f4f4;padding:0 .2em}}.why{{color:#c0392b}}svg{{background:#fafafa;width:100%}}
</style></head><body><h1>Rewind drill: {verdict}</h1>
<p>Job <code>{escape(data["job"])}</code>, seed {data["seed"]}. RTO: from the new start of the query until the broken
micro-batch was published; a new driver's start of Spark ({_seconds(data["spark_start_s"])} here) comes on top. RPO:
windows and errors lost, and rows doubled, against an undisturbed run.</p>
<table><tr><th>scenario</th><th></th><th>detect</th><th>restore</th><th>RTO</th><th>RPO</th><th>proof</th></tr>{rows}
</table>{sections}</body></html>
""",
        encoding="utf-8",
    )


def _section(one: dict[str, Any], control: list[dict[str, Any]]) -> str:
    why = f'<p class="why">{escape(one["why"])}</p>' if one["why"] else ""
    error = f"<p>Ended in: <code>{escape(one['error'])}</code></p>" if one["error"] else ""
    told = "".join(
        f"<li>{at:.1f} s: {escape(_said(event))}</li>"
        for at, event in _timed(one["events"])
        if event["event"] not in ("progress", "begun")
    )
    plot = _plot(one["events"], control)
    return f"<h2>{escape(one['name'])}</h2><p>{escape(one['text'])}</p>{why}{error}{plot}<ul>{told}</ul>"


def _plot(events: list[dict[str, Any]], control: list[dict[str, Any]]) -> str:
    """Draw micro-batches over time, the control in grey, and what happened as marks."""
    lines = [(_timed(control), "#bbb"), (_timed(events), "#2980b9")]
    length = max((at for line, _ in lines for at, _ in line), default=1.0) or 1.0
    top = max((event.get("version", 0) for line, _ in lines for _, event in line), default=1) or 1

    def x(at: float) -> float:
        return _MARGIN + at / length * (_WIDTH - 2 * _MARGIN)

    def y(version: int) -> float:
        return _HEIGHT - 25 - version / top * (_HEIGHT - 45)

    parts = []
    for line, color in lines:
        points = " ".join(f"{x(at):.1f},{y(e['version']):.1f}" for at, e in line if e["event"] == "progress")
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
    for at, event in lines[1][0]:
        color = _COLORS.get(event["event"], "")
        if color:
            parts.append(
                f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="10" y2="{_HEIGHT - 25}" stroke="{color}">'
                f"<title>{escape(_said(event))}</title></line>"
            )
    parts.append(f'<text x="{_MARGIN}" y="{_HEIGHT - 6}" font-size="11">0 s</text>')
    parts.append(f'<text x="{_WIDTH - 2 * _MARGIN}" y="{_HEIGHT - 6}" font-size="11">{length:.0f} s</text>')
    parts.append(f'<text x="2" y="20" font-size="11">{top}</text>')
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}">{"".join(parts)}</svg>'


def _timed(events: list[dict[str, Any]]) -> list[tuple[float, dict[str, Any]]]:
    ordered = sorted(events, key=lambda event: event["at"])
    return [(event["at"] - ordered[0]["at"], event) for event in ordered]


def _said(event: dict[str, Any]) -> str:
    rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("event", "at"))
    return f"{event['event']}{': ' + rest if rest else ''}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _rpo(rpo: dict[str, int] | None) -> str:
    if rpo is None:
        return ""
    wrong = {name: count for name, count in rpo.items() if count}
    return ", ".join(f"{count} {name}" for name, count in wrong.items()) or "0"


def _proof(one: dict[str, Any]) -> str:
    if one["must_end_in"] is not None:
        return f"ended in {one['must_end_in']}" if one["passed"] else f"must end in {one['must_end_in']}"
    proof = one["proof"]
    if proof is None:
        return ""
    state = "state equal" if proof["state_equal"] else "STATE DIFFERS"
    return f"{proof['windows']:,} windows, {proof['errors']:,} errors, {state}"


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
