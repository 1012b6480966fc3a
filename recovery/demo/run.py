"""The story: an archive of real flights, a job, a disaster midway, a restore, and the proof."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recovery.demo.disaster import kill, lose_disk, strike
from recovery.demo.flights import make_archive
from recovery.demo.job import ARCHIVE, CHECKPOINT, ERRORS, LOCAL, RESULTS
from recovery.demo.proof import Comparison, Proof, prove
from recovery.demo.session import environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000
RETENTION_MS = 6 * HOUR_MS
DEFAULT_OFFSETS = 10_000


@dataclass
class Told:
    """What the job's processes told."""

    micro_batches: int = 0
    restores: int = 0
    replayed: int = 0
    restore_s: float = 0.0
    failed: str = ""
    restoring: list[dict[str, Any]] = field(default_factory=list)


class Failed(Exception):
    """The demo cannot go on; the message says why."""


class Story:
    """Runs the demo in a directory, chapter by chapter: `prepare`, `disaster`, `restart`, `prove`.

    Args:
        out: Emptied first.
        console: Where it is told.
        days: Of 2013; None for the whole year.
        offsets: Bound on the offsets per airport in a micro-batch.
    """

    def __init__(self, out: Path, console: Console, *, days: int | None = None, offsets: int = DEFAULT_OFFSETS) -> None:
        self.out, self.console, self.days, self.offsets = out, console, days, offsets
        self.told = Told()
        self.expected = 0

    def prepare(self) -> None:
        """Write the archive of the flights."""
        self._empty()
        began = time.monotonic()
        rows = make_archive(self.out / ARCHIVE, days=self.days)
        self.say(f"archive: {rows.num_rows:,} flights of 3 airports in {time.monotonic() - began:.1f} s")
        largest = max(one["counts"] for one in rows["partition"].combine_chunks().value_counts().to_pylist())
        self.expected = -(-largest // self.offsets)
        self.say(
            f"job: departures per airport and hour, {self.expected} micro-batches of {self.offsets:,} offsets each"
        )

    def disaster(self) -> None:
        """Run the job, kill it midway inside a micro-batch, and delete its local state.

        Raises:
            Failed: The job ended before.
        """
        with self._process("first") as process:
            version = strike(process.pid, self.out / LOCAL, self.out / CHECKPOINT, self.expected // 2)
            for event in self._events(process):
                self._take(event)
        if version is None:
            raise Failed(self.told.failed or "the job ended before the disaster")
        lost = lose_disk(self.out / LOCAL)
        self.say(
            f"disaster: killed (SIGKILL) inside micro-batch {version}, state staged but not committed;"
            f" local state deleted, {lost / 1e6:.1f} MB"
        )

    def restart(self, *, break_restore: bool = False) -> None:
        """Start the job again; it restores its state and goes on to the end.

        Args:
            break_restore: Leave out one replayed message: it must fail.

        Raises:
            Failed: The job failed.
        """
        self.told.failed = ""
        with self._process("second", "--break-restore" if break_restore else None) as process:
            self._follow(process)
        if self.told.failed or process.returncode != 0:
            raise Failed(self.told.failed or f"the job ended with exit code {process.returncode}")

    def prove(self, spark: SparkSession | None = None) -> Proof:
        """Recompute everything; in a process of its own unless a session is given.

        Raises:
            Failed: The recomputation itself failed.
        """
        self.say("proof: recomputing every window with Spark's batch SQL")
        if spark is not None:
            paths = [self.out / name for name in (ARCHIVE, RESULTS, ERRORS)]
            return prove(spark, *paths, size_ms=HOUR_MS, retention_ms=RETENTION_MS)
        command = [sys.executable, "-m", "recovery.demo.proof", str(self.out), str(HOUR_MS), str(RETENTION_MS)]
        with (self.out / "proof.log").open("w") as log:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(), check=False
            )
        if done.returncode != 0:
            raise Failed("the recomputation failed")
        [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return Proof.of_json(json.loads(line))

    def _empty(self) -> None:
        """Empty the output directory, if it is one.

        Raises:
            ValueError: It holds something that no demo wrote.
        """
        mark = self.out / ".rewind-demo"
        if self.out.exists() and any(self.out.iterdir()) and not mark.exists():
            raise ValueError(f"out={str(self.out)!r}: is not empty and not of an earlier demo")
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        mark.touch()

    def say(self, text: str) -> None:
        """Tell the next part of the story."""
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextmanager
    def _process(self, name: str, option: str | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run the job; whatever happens here, none of its processes stays behind."""
        command = [sys.executable, "-m", "recovery.demo.job", "--out", str(self.out), "--offsets", str(self.offsets)]
        command += [*self._arguments(name), *([option] if option is not None else [])]
        with (self.out / f"job-{name}.log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment())
        with process:
            try:
                yield process
            except BaseException:
                kill(process.pid)
                raise

    def _arguments(self, name: str) -> list[str]:
        """Give more arguments for the job's first or second run."""
        return []

    @staticmethod
    def _events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "micro_batch":
                self.told.micro_batches = max(self.told.micro_batches, event["version"] + 1)
            case "restoring":
                self.told.restoring.append(event)
            case "restored":
                self.told.restores += 1
                self.told.restore_s = max(self.told.restore_s, event["seconds"])
                if event["how"] == "replay":
                    self.told.replayed += event["records"]
            case "failed":
                self.told.failed = event["error"]

    def _follow(self, process: subprocess.Popen[str]) -> None:
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}")]
        plain = not self.console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=self.console, disable=plain, transient=True) as progress:
            bar = progress.add_task("micro-batches", total=self.expected + 1)
            for event in self._events(process):
                self._take(event)
                match event["event"]:
                    case "micro_batch":
                        progress.update(bar, completed=event["version"] + 1)
                        if plain:
                            self.say(f"  micro-batch {event['version']}: {event['rows']:,} messages since the restart")
                    case "restoring":
                        self.say(f"restore: shard {event['shard']} by {event['how']}: {event['why'].strip()}")
                    case "restored":
                        self.say(
                            f"restored: shard {event['shard']}: {event['records']:,} messages, count and digest proven,"
                            f" {event['seconds']:.1f} s after the restore began"
                        )


def show(console: Console, proof: Proof, told: Told, seconds: float) -> None:
    """Print the table and what is not equal."""
    rate = f"{told.replayed / told.restore_s:,.0f}" if told.restore_s > 0 else "-"
    rows = [
        ("messages", f"{proof.messages:,}"),
        ("windows (airport and hour)", f"{proof.windows.total:,}"),
        ("late, counted in a later revision", f"{proof.late:,}"),
        ("errors: out of retention", f"{proof.too_late:,}"),
        ("errors: malformed (cancelled flights)", f"{proof.malformed:,}"),
        ("micro-batches", f"{told.micro_batches}"),
        ("shards restored", f"{told.restores}"),
        ("restore time", f"{told.restore_s:.2f} s"),
        ("messages replayed", f"{told.replayed:,}"),
        ("messages replayed per second", rate),
        ("rows emitted twice", f"{proof.duplicates:,}"),
        ("last revision", _verdict(proof.windows, "windows")),
        ("first emission", _verdict(proof.full, "windows")),
        ("errors output", _verdict(proof.errors, "rows")),
        ("whole demo", f"{seconds:.0f} s"),
    ]
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows:
        table.add_row(name, value)
    if console.is_terminal:
        console.print(table)
    else:
        for name, value in rows:
            console.print(f"{name:40} {value}", highlight=False, soft_wrap=True)
    for part in (proof.windows, proof.full, proof.errors):
        for sample in part.samples:
            console.print(f"not equal: {sample}", highlight=False, soft_wrap=True)


def _verdict(part: Comparison, noun: str) -> str:
    return f"{part.equal:,} of {part.total:,} {noun} equal"


def main() -> int:
    """Run the demo; the exit code is 0 only if everything is equal."""
    parser = argparse.ArgumentParser(prog="python -m recovery.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="output directory, emptied first")
    parser.add_argument("--days", type=int, default=None, help="only the first days of 2013")
    parser.add_argument("--offsets", type=int, default=DEFAULT_OFFSETS, help="offsets per airport and micro-batch")
    parser.add_argument("--break-restore", action="store_true", help="leave out one replayed message: it must fail")
    parser.add_argument("--kafka", action="store_true", help="through a Kafka broker: topic and changelog")
    options = parser.parse_args()
    console = Console()
    with ExitStack() as stack:
        return _run(_story(options, console, stack), console, break_restore=options.break_restore)


def _story(options: argparse.Namespace, console: Console, stack: ExitStack) -> Story:
    """Make the story; a broker that it needs ends with the stack."""
    out = options.out.absolute()
    if not options.kafka:
        return Story(out, console, days=options.days, offsets=options.offsets)
    from recovery.broker import open_broker
    from recovery.demo.kafka import KafkaStory

    began = time.monotonic()
    broker, close = open_broker()
    stack.callback(close)
    console.print(f"broker: {broker.settings.servers} in {time.monotonic() - began:.1f} s", highlight=False)
    return KafkaStory(out, console, days=options.days, offsets=options.offsets, settings=broker.settings)


def _run(story: Story, console: Console, *, break_restore: bool) -> int:
    began = time.monotonic()
    try:
        story.prepare()
        story.disaster()
        story.restart(break_restore=break_restore)
        proof = story.prove()
    except Failed as failure:
        console.print(f"FAILED: {failure}", highlight=False, soft_wrap=True)
        console.print(f"logs: {story.out}/*.log", highlight=False, soft_wrap=True)
        return 1
    show(console, proof, story.told, time.monotonic() - began)
    if not proof.holds:
        console.print("FAILED: the output differs from the recomputation", highlight=False)
        return 1
    if story.told.replayed == 0:
        console.print("FAILED: nothing was replayed, so nothing was shown", highlight=False)
        return 1
    return 0
