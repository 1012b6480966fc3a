"""The report of a drill: JSON, terminal, and one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from backend.texts import visible
from recovery.drill.drill import Drill, Verdict
from recovery.drill.run import times
from recovery.inspect.screen import plain

_WIDTH, _HEIGHT, _MARGIN = 640, 170, 34
_MARKED = ("killed", "damaged", "restoring", "restored", "failed")
_PROOF = ("windows", "errors", "state_equal", "equal", "samples", "digests")
"""What the report has of a `Difference`."""
_STYLE = """
:root{color-scheme:light dark;--text:#1d232b;--page:#fff;--soft:#f2f4f6;--line:#ccd3da;--dim:#5a6673;
--bad:#b3261e;--good:#1b7f3b;--run:#1f6fb2;--warn:#b35c00;--odd:#7a3fa0}
@media(prefers-color-scheme:dark){:root{--text:#e4e8ec;--page:#14181d;--soft:#1f252c;--line:#3a444f;--dim:#9aa7b4;
--bad:#ff8a80;--good:#6fd08c;--run:#6db7f2;--warn:#ffb265;--odd:#cf9df0}}
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:1.5rem auto;padding:0 1rem;color:var(--text);
background:var(--page);overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;overflow-wrap:normal}
td,th{text-align:left;vertical-align:top;padding:.3rem .6rem;border-bottom:1px solid var(--line)}
thead th{color:var(--dim);font-weight:600}.ok .said,small.ok{color:var(--good);font-weight:600}
.bad .said,small.bad{color:var(--bad);font-weight:600}
section{border-top:1px solid var(--line);margin-top:2rem}code{background:var(--soft);padding:0 .2em;font-size:.9em}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}dt{color:var(--dim)}dd{margin:0}
figure{margin:1rem 0}svg{background:var(--soft);width:100%;display:block}text{font-size:12px;fill:var(--dim)}
figcaption{color:var(--dim);font-size:.9rem}polyline,line{fill:none;stroke-width:2;stroke:currentColor}
@media(max-width:30rem){text{font-size:22px}td,th{padding:.3rem}dl{grid-template-columns:1fr}dd{margin-bottom:.4rem}}
.key{display:flex;flex-wrap:wrap;gap:.2rem 1rem;list-style:none;padding:0;margin:0}.key li::before{content:"\\25A0 "}
.run{color:var(--run)}.control{color:var(--dim);stroke-dasharray:5 4}.killed,.damaged{color:var(--bad)}
.restoring{color:var(--warn)}.restored{color:var(--good)}.failed{color:var(--odd)}
"""


def drill_json(drill: Drill, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Give the report as JSON; times in seconds, what did not happen is null."""
    return {
        "job": drill.job,
        "seed": drill.seed,
        "passed": all(verdict.passed for verdict in verdicts),
        "spark_start_s": None if drill.spark_start_s is None else round(drill.spark_start_s, 3),
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
        **times(verdict.run),
        "rpo": None
        if difference is None
        else {"lost": difference.lost, "doubled": difference.doubled + difference.extra, "changed": difference.changed},
        "proof": None if difference is None else {name: getattr(difference, name) for name in _PROOF},
        "events": verdict.run.events,
    }


def show_drill(console: Console, data: dict[str, Any]) -> None:
    """Draw the table and say what failed and why."""
    table = Table(
        Column("scenario", no_wrap=True), "passed", "detect", "restore", "RTO", "RPO", "proof", box=SIMPLE_HEAD
    )
    for one in data["scenarios"]:
        table.add_row(
            plain(one["name"]),
            plain("yes", "green") if one["passed"] else plain("NO", "bold red"),
            _seconds(one["detect_s"]),
            _seconds(one["restore_s"]),
            _seconds(one["rto_s"]),
            _rpo(one["rpo"]),
            _proof(one),
        )
    console.print(table)
    for one in data["scenarios"]:
        if not one["passed"]:
            console.print(plain(f"{one['name']}: {one['why']}", "red"), soft_wrap=True)


def write_html(path: Path, data: dict[str, Any]) -> None:
    """Write the page: the verdict in plain words, how long each scenario took, and per scenario what happened."""
    scenarios = data["scenarios"]
    failed = [one["name"] for one in scenarios if not one["passed"]]
    verdict = f"{len(failed)} of {len(scenarios)} scenarios FAILED" if failed else f"all {len(scenarios)} passed"
    rows = "".join(
        f'<tr class="{"ok" if one["passed"] else "bad"}"><th scope="row">{_text(one["name"])}</th>'
        f"<td class=said>{'passed' if one['passed'] else 'FAILED'}</td><td>{_seconds(one['first_s'])}</td>"
        f"<td>{_seconds(one['rto_s'])}</td><td>{_text(_rpo(one['rpo']))}</td><td>{_text(_proof(one))}</td></tr>"
        for one in scenarios
    )
    sections = "".join(_section(one, data["control"]["events"]) for one in scenarios)
    path.write_text(
        f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Rewind drill</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{_STYLE}</style></head><body>
<h1>Rewind drill: {verdict}</h1>
<p>A job was broken on purpose, in {len(scenarios)} ways, and each time it had to come back to exactly what the same job
gives undisturbed, or, where that cannot be, to end in the error that says so. Job <code>{_text(data["job"])}</code>,
seed {data["seed"]}.</p>
<div class="wide"><table><thead><tr><th>scenario</th><th>verdict</th><th>to the first result</th><th>to whole</th>
<th>lost</th><th>proof</th></tr></thead><tbody>{rows}</tbody></table></div>
<p>Times count from the new start of the query (or from the failure, where it went on by itself): to the first result
that came out, and to whole, which is when the broken micro-batch was published. A new driver's start of Spark
({_seconds(data["spark_start_s"]) or "not measured"} here) comes on top. Lost: windows and errors that are missing,
doubled or changed.</p>{sections}</body></html>
""",
        encoding="utf-8",
    )


def _text(value: object) -> str:
    """Give a value as text of the page: never markup, and without characters that act."""
    return escape(visible(str(value)))


def _section(one: dict[str, Any], control: list[dict[str, Any]]) -> str:
    broken = [event["what"] for event in one["events"] if event["event"] in ("killed", "damaged", "moving")]
    said = [
        ("broken", "; ".join(map(str, broken)) or one["text"]),
        ("lost", _rpo(one["rpo"])),
        ("first result after", _seconds(one["first_s"])),
        ("whole after", _seconds(one["rto_s"])),
        ("of that, restoring", _seconds(one["restore_s"])),
        ("ended in", one["error"] or ""),
        ("failed because", one["why"]),
    ]
    items = "".join(f"<dt>{name}</dt><dd>{_text(value)}</dd>" for name, value in said if value)
    events = "".join(
        f"<li>{at:.1f} s: {_text(_said(event))}</li>"
        for at, event in _timed(one["events"])
        if event["event"] != "progress"
    )
    return (
        f'<section><h2>{_text(one["name"])} <small class="{"ok" if one["passed"] else "bad"}">'
        f"{'passed' if one['passed'] else 'FAILED'}</small></h2><p>{_text(one['text'])}</p><dl>{items}</dl>"
        f"{_plot(one['events'], control)}{_digests(one['proof'])}"
        f"<details><summary>what happened</summary><ul>{events}</ul></details></section>"
    )


def _digests(proof: dict[str, Any] | None) -> str:
    if proof is None or not proof["digests"]:
        return ""
    rows = "".join(
        f'<tr class="{"ok" if before == after else "bad"}"><th scope="row">{shard}</th><td><code>{_text(before)}</code>'
        f"</td><td><code>{_text(after)}</code></td>"
        f"<td class=said>{'equal' if before == after else 'DIFFERENT'}</td></tr>"
        for shard, before, after in proof["digests"]
    )
    return (
        '<div class="wide"><table><thead><tr><th>shard</th><th>digest undisturbed</th><th>digest after</th><th></th>'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _plot(events: list[dict[str, Any]], control: list[dict[str, Any]]) -> str:
    """Draw micro-batches over time, the control dashed, and what happened as marks."""
    lines = [(_timed(control), "control"), (_timed(events), "run")]
    length = max((at for line, _ in lines for at, _ in line), default=1.0) or 1.0
    top = max((event.get("version", 0) for line, _ in lines for _, event in line), default=1) or 1

    def x(at: float) -> float:
        return _MARGIN + at / length * (_WIDTH - 2 * _MARGIN)

    def y(version: int) -> float:
        return _HEIGHT - 25 - version / top * (_HEIGHT - 45)

    parts = []
    for line, name in lines:
        points = " ".join(f"{x(at):.1f},{y(e['version']):.1f}" for at, e in line if e["event"] == "progress")
        parts.append(f'<polyline points="{points}" class="{name}"/>')
    for at, event in lines[1][0]:
        if event["event"] in _MARKED:
            parts.append(
                f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="10" y2="{_HEIGHT - 25}" class="{event["event"]}">'
                f"<title>{_text(_said(event))}</title></line>"
            )
    parts.append(f'<text x="{_MARGIN}" y="{_HEIGHT - 6}">0 s</text>')
    parts.append(f'<text x="{_WIDTH - _MARGIN}" y="{_HEIGHT - 6}" text-anchor="end">{length:.0f} s</text>')
    parts.append(f'<text x="{_MARGIN - 6}" y="20" text-anchor="end">{top}</text>')
    keys = "".join(f'<li class="{name}">{name}</li>' for name in ("run", "control", *_MARKED))
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="micro-batches over time">'
        f'{"".join(parts)}</svg><figcaption>micro-batches published, over time<ul class="key">{keys}</ul></figcaption>'
        "</figure>"
    )


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
