"""The command `rewind`: look at a checkpoint, check it, restore it, break it on purpose.

Every command takes `--json`. The exit code is 0 only if all is well: 1 for a finding or an error by name, 2 for a wrong
call. Commands that delete have `--dry-run` and name every path and offset first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from backend.errors import RewindError
from recovery import report
from recovery.survey import Checkpoint

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode="rich")

TABLES_TOLD = "windows, aggregates, messages, rows; of a join left, right; or a store"
Location = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Spark's checkpoint location: path or URI")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="module:function, given a SparkSession, returns the pipeline")]
LocalDir = Annotated[
    Path | None, typer.Option("--local-dir", help="local state of this host; the default of start() unless given")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only say what would be touched")]
Ask = Annotated[bool, typer.Option("--spark", help="start Spark and read the committed pointers out of its state")]
Master = Annotated[str, typer.Option("--master", help="Spark's master for what needs Spark")]


def main() -> None:
    """Run the command line."""
    app()


def named_errors(function: Callable[..., None]) -> Callable[..., None]:
    """Print errors by name with their four parts and exit with 1; wrong values exit with 2."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except RewindError as error:
            data = report.error_json(error)
            if kwargs.get("as_json"):
                report.print_json({"error": data})
            else:
                Console(stderr=True).print(report.error_text(data or {}), style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error
        except ValueError as error:
            Console(stderr=True).print(str(error), style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from error

    return run


@app.command()
@named_errors
def inspect(
    checkpoint: Location,
    local_dir: LocalDir = None,
    job: Annotated[str | None, typer.Option("--job", help="module:function; then the lag is known too")] = None,
    spark: Ask = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Show shards, versions, positions, windows open and closing next, sizes, and the lag where the job is given."""
    lag = None
    with _opened(checkpoint, local_dir, spark or job is not None, master) as (opened, session):
        shards = [opened.survey(shard) for shard in opened.shards]
        if job is not None:
            from recovery.user_job import job_of, lag_of, load_pipeline

            lag = lag_of(job_of(load_pipeline(job, session), session, opened.manifest), session, shards)
        data = report.survey_json(opened, shards, lag)
    if as_json:
        report.print_json(data)
    else:
        report.show_survey(Console(), data)
    if any(shard.problem or (shard.local and shard.local.problem) for shard in shards):
        raise typer.Exit(1)


@app.command()
@named_errors
def verify(
    checkpoint: Location,
    local_dir: LocalDir = None,
    against_source: Annotated[
        str | None,
        typer.Option("--against-source", metavar="JOB", help="module:function: rebuild all from changelog and source"),
    ] = None,
    spark: Ask = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Check checksums, lineage, indexes, counts and digests; with the job, also against the source."""
    from recovery.verify import PROBLEM, verify_checkpoint

    with _opened(checkpoint, local_dir, spark or against_source is not None, master) as (opened, session):
        findings = list(verify_checkpoint(opened))
        if against_source is not None:
            from recovery.user_job import load_pipeline, verify_against_source

            findings += verify_against_source(opened, load_pipeline(against_source, session), session)
    if as_json:
        report.print_json(report.findings_json(findings))
    else:
        report.show_findings(Console(), findings)
    if any(finding.level == PROBLEM for finding in findings):
        raise typer.Exit(1)


@app.command()
@named_errors
def show(
    checkpoint: Location,
    table: Annotated[str, typer.Argument(help=TABLES_TOLD)] = "windows",
    shard: Annotated[list[int] | None, typer.Option("--shard", help="only these; may be given again")] = None,
    start: Annotated[datetime | None, typer.Option("--from", help="event time, inclusive, UTC; or expiration")] = None,
    end: Annotated[datetime | None, typer.Option("--to", help="event time, exclusive, UTC")] = None,
    key: Annotated[str | None, typer.Option("--key", help="text that the key contains")] = None,
    version: Annotated[int | None, typer.Option("--version", help="as of this micro-batch")] = None,
    limit: Annotated[int, typer.Option("--limit", help="rows at most", min=1)] = 100,
    local_dir: LocalDir = None,
    as_json: Json = False,
) -> None:
    """Show state by event time and key, without stopping the job."""
    from recovery.state_tables import Wanted, all_shards

    wanted = Wanted(table, report.milliseconds(start), report.milliseconds(end), key, version)
    rows: list[dict[str, Any]] = []
    for found in all_shards(Checkpoint(checkpoint, local_dir), wanted, shard):
        rows += found.slice(0, limit + 1 - len(rows)).to_pylist()
        if len(rows) > limit:
            break
    shown = report.readable_rows(rows[:limit])
    if as_json:
        report.print_json({"rows": shown, "more": len(rows) > limit})
    else:
        report.show_rows(Console(), shown, more=len(rows) > limit)


@app.command()
@named_errors
def export(
    checkpoint: Location,
    out: Annotated[Path, typer.Argument(help="new directory for Parquet files, one per shard")],
    table: Annotated[str, typer.Option("--table", help=TABLES_TOLD)] = "rows",
    version: Annotated[int | None, typer.Option("--version", help="as of this micro-batch")] = None,
    local_dir: LocalDir = None,
    as_json: Json = False,
) -> None:
    """Write state to Parquet, one file per shard, without stopping the job."""
    import pyarrow.parquet as pq

    from recovery.state_tables import Wanted, all_shards

    if out.exists():
        raise ValueError(f"out={str(out)!r}: exists already; give a new directory")
    opened = Checkpoint(checkpoint, local_dir)
    written: list[dict[str, Any]] = []
    for shard, found in zip(opened.shards, all_shards(opened, Wanted(table, version=version)), strict=True):
        out.mkdir(parents=True, exist_ok=True)
        path = out / f"shard={shard:05d}.parquet"
        pq.write_table(found, path)
        written.append({"path": str(path), "rows": found.num_rows})
    if as_json:
        report.print_json(written)
    else:
        report.show_rows(Console(), written, more=False)


@app.command()
@named_errors
def restore(
    checkpoint: Location,
    job: Job,
    local_dir: LocalDir = None,
    dry_run: DryRun = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Restore what needs it ahead of a start, with no query running; the next start takes it from there."""
    from recovery.displays import ProgressListener
    from recovery.listener import LoggingListener
    from recovery.moved import settle_in
    from recovery.user_job import load_pipeline, restore_ahead

    if not dry_run:
        settle_in(checkpoint)
    with _opened(checkpoint, local_dir, True, master) as (opened, session):
        plans = report.restore_plans(opened)
        if not dry_run:
            listener = LoggingListener() if as_json else ProgressListener()
            count = restore_ahead(opened, load_pipeline(job, session), session, [listener])
    if as_json:
        report.print_json({"dry_run": dry_run, "shards": plans, "restored": None if dry_run else count})
    else:
        report.show_rows(Console(), plans, more=False)
        print("nothing was touched" if dry_run else f"{count} shards restored")


@app.command()
@named_errors
def reset(
    checkpoint: Location,
    local_dir: LocalDir = None,
    local_only: Annotated[bool, typer.Option("--local-only", help="only this host's local state")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Begin anew: delete the checkpoint and local state, or local state alone. Accepts the loss of what is gone."""
    from recovery.reset import carry_out, plan_reset

    opened = Checkpoint(checkpoint, local_dir)
    plan = plan_reset(opened, local_only=local_only)
    data = report.reset_json(plan, dry_run=dry_run)
    if not as_json:
        report.show_reset(Console(), data)
    if not dry_run:
        if not yes and (as_json or not typer.confirm("delete this?")):
            raise ValueError("nothing was touched: give --yes, or --dry-run")
        carry_out(opened, local_only=local_only)
    if as_json:
        report.print_json(data)


@app.command()
@named_errors
def drill(
    scenarios: Annotated[list[str] | None, typer.Argument(help="names; all of them for none")] = None,
    job: Annotated[str | None, typer.Option("--job", help="module:function; the drill's own job unless given")] = None,
    seed: Annotated[int, typer.Option("--seed", help="chooses where and what is broken")] = 0,
    days: Annotated[int | None, typer.Option("--days", help="days of flights for the drill's own job")] = None,
    out: Annotated[Path, typer.Option("--out", help="directory of the drill's own; emptied first")] = Path("drill-out"),
    list_only: Annotated[bool, typer.Option("--list", help="only list the scenarios")] = False,
    as_json: Json = False,
) -> None:
    """Break a job on purpose, restore it, and prove that it came back exactly; exit 0 only if every scenario passes."""
    from recovery.drill import DEFAULT_DAYS, Drill
    from recovery.drill_report import drill_json, show_drill, write_html
    from recovery.drill_scenarios import choose, in_order

    chosen = choose(scenarios or [])
    console = Console(stderr=as_json)
    if list_only:
        listed = [{"name": one.name, "text": one.text, "must_end_in": one.error or None} for one in chosen]
        if as_json:
            report.print_json(listed)
        else:
            for one in listed:
                console.print(f"[bold]{one['name']}[/bold]: {one['text']}", soft_wrap=True)
        return

    def tell(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with Drill(out, job=job, seed=seed, days=days or DEFAULT_DAYS, tell=tell) as drills:
        tell("control: the job undisturbed")
        drills.control()
        verdicts = []
        for scenario in in_order(chosen):
            tell(f"{scenario.name}: {scenario.text}")
            verdicts.append(drills.run(scenario))
    data = drill_json(drills, verdicts)
    write_html(out / "report.html", data)
    (out / "report.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    if as_json:
        report.print_json(data)
    else:
        show_drill(console, data)
        tell(f"report: {out / 'report.html'}")
    if not data["passed"]:
        raise typer.Exit(1)


@contextmanager
def _opened(location: str, local_dir: Path | None, ask: bool, master: str) -> Iterator[tuple[Checkpoint, Any]]:
    """Open a checkpoint, and Spark beside it when it is asked for; stops that Spark at the end."""
    if not ask:
        yield Checkpoint(location, local_dir), None
        return
    from recovery.replay import read_pointers
    from recovery.user_job import session

    with session(master) as spark:
        opened = Checkpoint(location, local_dir)
        pointers = read_pointers(spark, opened.location, opened.manifest.shards)
        commits = {shard: pointer.commit for shard, pointer in pointers.items()}
        yield Checkpoint(location, local_dir, commits), spark


if __name__ == "__main__":
    main()
