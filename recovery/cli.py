"""The command `rewind`: look at a checkpoint, check it, restore it, break it on purpose.

Every command takes `--json`. The exit code is 0 only if all is well: 1 for a finding, an error by name, or a question
that was not answered with yes; 2 for a wrong call; 130 for Ctrl-C. Commands that delete have `--dry-run` and name every
path and offset first.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from backend.errors import RewindError
from backend.places import is_within, real_place
from backend.store.storage import storage_failed
from recovery.drill.scenarios import CATALOGUE, DAYS
from recovery.failures import read
from recovery.inspect import report
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.screen import plain, tracked

_HELP = "\n\n".join(" ".join(part.split()) for part in (__doc__ or "").split("\n\n"))
app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

TABLES_HELP = "windows, aggregates, messages, rows; of a join left, right; or a store"
Location = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Spark's checkpoint location: path or URI")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="module:function, given a SparkSession, returns the pipeline")]
LocalDir = Annotated[
    Path | None, typer.Option("--local-dir", help="local state of this host; the default of start() unless given")
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="only say what would be touched")]
Ask = Annotated[bool, typer.Option("--spark", help="start Spark and read the committed pointers out of its state")]


def _on_this_host(master: str) -> str:
    """Return Spark's master: the session of a command has its driver at localhost, where no other host finds it."""
    if not re.fullmatch(r"local(\[[0-9*, ]+\]|-cluster\[[0-9, ]+\])?", master):
        allowed = "local[<cores>] and local-cluster[<executors>,<cores>,<MB>]"
        raise typer.BadParameter(f"{master!r}: allowed are {allowed}")
    return master


Master = Annotated[
    str, typer.Option("--master", help="Spark's master for what needs Spark, on this host", callback=_on_this_host)
]


class Format(StrEnum):
    """How `show` writes rows."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"
    PARQUET = "parquet"


def _tables(context: typer.Context, incomplete: str) -> list[str]:
    """Give the tables of the checkpoint that is on the line so far, for the shell to complete."""
    from recovery.inspect.tables import TABLES, tables_of

    location = context.params.get("checkpoint")  # of an option's value click knows no arguments
    try:
        names = tables_of(Checkpoint(location)) if location else list(TABLES)
    except (RewindError, ValueError):  # a line that is not finished yet: nothing to offer
        return []
    return [name for name in names if name.startswith(incomplete)]


def _scenarios(context: typer.Context, incomplete: str) -> list[str]:
    given = context.params.get("scenarios") or ()
    return [one.name for one in CATALOGUE if one.name.startswith(incomplete) and one.name not in given]


def _print_release(asked: bool) -> None:
    if asked:
        from backend.spark.start import release

        print(release())
        raise typer.Exit


@app.callback(help=_HELP)
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="print the release", callback=_print_release, is_eager=True)
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main() -> None:
    """Run the command line."""
    app()


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command that prints errors by name with their four parts and exits with 1; wrong values exit with 2."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except (typer.Exit, typer.Abort):
            raise
        except ValueError as error:
            Console(stderr=True).print(plain(error, "red"), soft_wrap=True)
            raise typer.Exit(2) from error
        except Exception as error:
            named = read(error).error  # a task's named error comes inside Spark's
            if not isinstance(named, RewindError):
                raise
            data = report.error_json(named)
            if kwargs.get("as_json") or kwargs.get("form") is Format.JSON:
                report.print_json({"error": data})
            else:
                Console(stderr=True).print(plain(report.error_text(data or {}), "red"), soft_wrap=True)
            raise typer.Exit(1) from error

    return app.command()(run)


@command
def inspect(
    checkpoint: Location,
    local_dir: LocalDir = None,
    job: Annotated[str | None, typer.Option("--job", help="module:function; then the lag is known too")] = None,
    spark: Ask = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Show shards, versions, positions, windows open and closing next, sizes, and the lag where the job is given."""
    from recovery.inspect.user_job import job_of, lag_of, load_pipeline

    lag = None
    with _opened(checkpoint, local_dir, spark, master, job) as (opened, session):
        shards = [opened.view(shard) for shard in tracked(opened.shards, "shards")]
        if job is not None:
            known = job_of(load_pipeline(job, session), session, opened.location, opened.manifest)
            lag = lag_of(known, session, shards)
        data = report.checkpoint_json(opened, shards, lag)
    found = any(shard.problem or (shard.local and shard.local.problem) for shard in shards)
    _answer(as_json, data, report.show_checkpoint, well=not found)


@command
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
    from recovery.inspect.user_job import load_pipeline, verify_against_source
    from recovery.inspect.verify import PROBLEM, verify_checkpoint

    with _opened(checkpoint, local_dir, spark, master, against_source) as (opened, session):
        findings = list(tracked(verify_checkpoint(opened), "checks"))
        if against_source is not None:
            pipeline = load_pipeline(against_source, session)
            findings += tracked(verify_against_source(opened, pipeline, session), "checks against the source")
    well = all(finding.level != PROBLEM for finding in findings)
    _answer(as_json, report.findings_json(findings), report.show_findings, well=well)


@command
def show(
    checkpoint: Location,
    table: Annotated[str | None, typer.Argument(help=TABLES_HELP, autocompletion=_tables)] = None,
    shard: Annotated[list[int] | None, typer.Option("--shard", help="only these; may be given again")] = None,
    start: Annotated[datetime | None, typer.Option("--from", help="event time, inclusive, UTC; or expiration")] = None,
    end: Annotated[datetime | None, typer.Option("--to", help="event time, exclusive, UTC")] = None,
    key: Annotated[str | None, typer.Option("--key", help="text that the key contains")] = None,
    version: Annotated[int | None, typer.Option("--version", help="as of this micro-batch", min=0)] = None,
    limit: Annotated[int, typer.Option("--limit", help="rows at most", min=1, max=2**31)] = 100,
    columns: Annotated[str | None, typer.Option("--columns", help="names, with commas; all unless given")] = None,
    form: Annotated[Format, typer.Option("--format", help="csv and parquet go to standard output")] = Format.TABLE,
    local_dir: LocalDir = None,
    spark: Ask = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Show state by event time and key, without stopping the job."""
    from recovery.inspect.tables import Wanted, all_shards, chosen_columns, tables_of

    if form is Format.PARQUET and sys.stdout.isatty():
        raise ValueError("--format=parquet: not on a terminal; redirect it to a file, or use --format table, json, csv")
    if as_json and form not in (Format.TABLE, Format.JSON):
        raise ValueError(f"--format={form.value}: not with --json")
    opened = Checkpoint(checkpoint, local_dir)
    named = table if table is not None else tables_of(opened)[0]
    wanted = Wanted(named, report.milliseconds(start), report.milliseconds(end), key, version)
    if unknown := sorted(set(shard or ()) - set(opened.shards)):
        raise ValueError(f"--shard={unknown[0]}: allowed are 0 to {len(opened.shards) - 1}")
    parts: list[Any] = []
    left = limit + 1
    with _opened(checkpoint, local_dir, spark, master) as (opened, _):
        for found in all_shards(opened, wanted, tracked(sorted(set(shard or opened.shards)), "shards")):
            parts.append(chosen_columns(found, columns).slice(0, left))
            left -= parts[-1].num_rows
            if not left:
                break
    report.write_rows(parts, limit, Format.JSON if as_json else form, report.as_of_json(opened))


@command
def export(
    checkpoint: Location,
    out: Annotated[Path, typer.Argument(help="new directory for Parquet files, one per shard")],
    table: Annotated[str, typer.Option("--table", help=TABLES_HELP, autocompletion=_tables)] = "rows",
    version: Annotated[int | None, typer.Option("--version", help="as of this micro-batch", min=0)] = None,
    local_dir: LocalDir = None,
    spark: Ask = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Write state to Parquet, one file per shard, without stopping the job."""
    import pyarrow.parquet as pq

    from recovery.inspect.tables import Wanted, all_shards

    if out.exists():
        raise ValueError(f"out={str(out)!r}: exists already; give a new directory")
    if is_within(real_place(out), real_place(Checkpoint(checkpoint, local_dir).location)):
        raise ValueError(f"out={str(out)!r}: lies in the checkpoint; give a directory outside of it")
    written: list[dict[str, Any]] = []
    with _opened(checkpoint, local_dir, spark, master) as (opened, _):
        tables = all_shards(opened, Wanted(table, version=version), tracked(opened.shards, "shards"))
        for shard, found in enumerate(tables):
            path = out / f"shard={shard:05d}.parquet"
            try:
                out.mkdir(parents=True, exist_ok=True)
                pq.write_table(found, path)
            except OSError as error:
                raise storage_failed(error, str(out), "then export again, to a new directory") from error
            shown = opened.shown.get(shard)
            at = shown.commit.version if shown is not None else None
            written.append({"path": str(path), "rows": found.num_rows, "version": at})
    _answer(as_json, written, report.show_rows)


@command
def restore(
    checkpoint: Location,
    job: Job,
    local_dir: LocalDir = None,
    dry_run: DryRun = False,
    master: Master = "local[2]",
    as_json: Json = False,
) -> None:
    """Restore what needs it ahead of a start, with no query running; the next start takes it from there."""
    from backend.spark.resume import check_resumable
    from recovery.commit.lease import leased
    from recovery.commit.relocation import settle_in
    from recovery.inspect.displays import ProgressListener
    from recovery.inspect.user_job import find_job, load_pipeline, restore_ahead
    from recovery.listener import LoggingListener

    find_job(job)  # before Spark is started for it
    Checkpoint(checkpoint, local_dir)  # and before anything is made beside what is none
    with nullcontext() if dry_run else leased(checkpoint, "rewind restore"):
        check_resumable(checkpoint, [])
        if not dry_run:
            settle_in(checkpoint)
        with _opened(checkpoint, local_dir, True, master) as (opened, session):
            plans, count = report.restore_plans(opened), None
            if not dry_run:
                listener = ProgressListener() if sys.stderr.isatty() else LoggingListener()
                count = restore_ahead(opened, load_pipeline(job, session), session, [listener])
    data = {"dry_run": dry_run, "shards": plans, "restored": count}
    _answer(as_json, data, report.show_restore, well=not any(plan["problem"] for plan in plans))


@command
def reset(
    checkpoint: Location,
    local_dir: LocalDir = None,
    local_only: Annotated[bool, typer.Option("--local-only", help="only this host's local state")] = False,
    outputs: Annotated[bool, typer.Option("--outputs", help="results and errors too, if they are directories")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Begin anew: delete the checkpoint and local state, or local state alone. Accepts the loss of what is gone."""
    from recovery.commit.lease import check_free
    from recovery.inspect.reset import carry_out, plan_reset

    if local_only and outputs:
        raise ValueError("--outputs: not with --local-only, the checkpoint goes on writing to them")
    if not dry_run:
        check_free(checkpoint)
    plan = plan_reset(checkpoint, local_dir, local_only=local_only, outputs=outputs)
    data = report.reset_json(plan, dry_run=dry_run)
    if not as_json:
        report.show_reset(Console(), data)
    if not dry_run:
        if not yes and as_json:
            raise ValueError("--json: nobody is asked; nothing was touched: give --yes, or --dry-run")
        if not yes and not typer.confirm("delete this?"):
            print("nothing was touched")
            raise typer.Exit(1)
        carry_out(plan)
    if as_json:
        report.print_json(data)


@command
def outputs(
    checkpoint: Location,
    new: Annotated[bool, typer.Option("--new", help="let the next start write to other outputs than before")] = False,
    as_json: Json = False,
) -> None:
    """Show where the query writes to; with --new, let its next start write to whatever it is then given."""
    from recovery.commit.lease import leased
    from recovery.commit.option_sets import newest_in
    from recovery.commit.outputs import forget_outputs, read_outputs

    location = Checkpoint(checkpoint).location
    found = read_outputs(location)
    if new:
        with leased(location, "rewind outputs"):
            forget_outputs(location)
    planned, committed = (newest_in(location, log) for log in ("offsets", "commits"))
    again = planned if new and found and planned > committed else None
    if as_json:
        report.print_json({"outputs": found, "new": new, "planned": again})
    else:
        report.show_rows(Console(), [found] if found else [])
        if again is not None:
            print(
                f"micro-batch {again} is not committed: rows of it that are in these outputs come to the new ones, too"
            )
        if new or not found:
            print("the next start decides what it writes to")


@command
def drill(
    scenarios: Annotated[
        list[str] | None, typer.Argument(help="names; all of them for none", autocompletion=_scenarios)
    ] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            help="module:function, given a SparkSession, returns the pipeline; the drill's own job unless given",
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="chooses where and what is broken")] = 0,
    days: Annotated[
        int | None,
        typer.Option("--days", help="days of departures for the drill's own job", min=1, show_default=str(DAYS)),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="directory of the drill's own; emptied first")] = Path("drill-out"),
    list_only: Annotated[bool, typer.Option("--list", help="only list the scenarios")] = False,
    as_json: Json = False,
) -> None:
    """Break a job on purpose, restore it, and prove that it came back exactly; exit 0 only if every scenario passes."""
    from recovery.drill.drill import Drill
    from recovery.drill.report import drill_json, show_drill, write_html
    from recovery.drill.scenarios import choose, in_order
    from recovery.inspect.user_job import find_job

    chosen = choose(scenarios or [])
    if job is not None:
        if days is not None:
            raise ValueError(f"days={days}: allowed is none with --job, which has data of its own")
        find_job(job)  # before Spark is started for it
    console = Console(stderr=as_json)
    if list_only:
        listed = [{"name": one.name, "text": one.text, "must_end_in": one.error or None} for one in chosen]
        if as_json:
            report.print_json(listed)
        else:
            for one in listed:
                console.print(Text.assemble(plain(one["name"], "bold"), ": ", plain(one["text"])), soft_wrap=True)
        return

    def tell(text: str) -> None:
        console.print(plain(text), soft_wrap=True)

    with Drill(out, job=job, seed=seed, days=days or DAYS, tell=tell) as drills:
        tell("control: the job undisturbed")
        drills.control()
        verdicts = []
        for scenario in tracked(in_order(chosen), "scenarios"):
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


def _answer(as_json: bool, data: Any, show: Callable[[Console, Any], None], *, well: bool = True) -> None:
    """Print what a command found; the exit code says whether all is well."""
    if as_json:
        report.print_json(data)
    else:
        show(Console(), data)
    if not well:
        raise typer.Exit(1)


@contextmanager
def _opened(
    location: str, local_dir: Path | None, ask: bool, master: str, job: str | None = None
) -> Iterator[tuple[Checkpoint, Any]]:
    """Open a checkpoint, and Spark beside it when it is asked for; stops that Spark at the end.

    Args:
        location: Of the checkpoint.
        local_dir: Local state of this host.
        ask: Ask Spark for the pointers.
        master: Spark's master.
        job: A function that is to be run under Spark; it is found, and Spark started for it.
    """
    if job is not None:
        from recovery.inspect.user_job import find_job

        find_job(job)
    opened = Checkpoint(location, local_dir)  # what is none is refused before Spark is started for it
    if not ask and job is None:
        yield opened, None
        return
    from recovery.commit.pointer import RestoringPointer, state_of
    from recovery.inspect.user_job import session
    from recovery.restore.replay import read_pointers

    with session(master) as spark:
        pointers = read_pointers(spark, opened.location, opened.manifest.shards)
        commits = {shard: state_of(pointer).commit for shard, pointer in pointers.items()}
        queues = {shard: pointer for shard, pointer in pointers.items() if isinstance(pointer, RestoringPointer)}
        yield Checkpoint(location, local_dir, commits, queues), spark


if __name__ == "__main__":
    main()
