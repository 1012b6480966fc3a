"""The story: an archive of real flights, a job, a disaster midway, a restore, and the proof."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from recovery.demo.disaster import lose_disk, strike
from recovery.demo.flights import make_archive
from recovery.demo.job import ARCHIVE, CHECKPOINT, ERRORS, LOCAL, RESULTS
from recovery.demo.proof import Comparison, Proof, prove
from recovery.demo.session import environment, session

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


class Story:
    """Runs the demo in a directory.

    Args:
        out: Emptied first.
        console: Where it is told.
        days: Of 2013; None for the whole year.
        offsets: Bound on the offsets per airport in a micro-batch.
        break_restore: Leave out one replayed message: the demo must fail.
    """

    def __init__(
        self, out: Path, console: Console, *, days: int | None, offsets: int, break_restore: bool = False
    ) -> None:
        self.out, self.console = out, console
        self.days, self.offsets, self.break_restore = days, offsets, break_restore
        self.told = Told()

    def run(self) -> Proof | None:
        """Run everything; None when the job failed and there is nothing to prove."""
        self._empty()
        began = time.monotonic()
        rows = make_archive(self.out / ARCHIVE, days=self.days)
        self.say(f"archive: {rows.num_rows:,} flights of 3 airports in {time.monotonic() - began:.1f} s")
        largest = max(self._per_partition(rows))
        expected = -(-largest // self.offsets)
        self.say(
            f"job: departures per airport and hour, about {expected} micro-batches of {self.offsets:,} offsets each"
        )
        with self._process("first") as process:
            version = strike(process.pid, self.out / LOCAL, self.out / CHECKPOINT, expected // 2)
            list(self._events(process, expected))
        if version is None:
            self.told.failed = self.told.failed or "the job ended before the disaster"
            return None
        lost = lose_disk(self.out / LOCAL)
        self.say(
            f"disaster: killed (SIGKILL) inside micro-batch {version}, state staged but not committed;"
            f" local state deleted: {lost / 1e6:.1f} MB"
        )
        with self._process("second") as process:
            self._follow(process, expected)
        if self.told.failed or process.wait() != 0:
            self.told.failed = self.told.failed or f"the job ended with exit code {process.returncode}"
            return None
        self.say("proof: recomputing every window with Spark's batch SQL")
        return self._prove()

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

    @staticmethod
    def _per_partition(rows: Any) -> list[int]:
        return [count["counts"] for count in rows["partition"].combine_chunks().value_counts().to_pylist()]

    def _process(self, name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "recovery.demo.job", "--out", str(self.out), "--offsets", str(self.offsets)]
        if self.break_restore:
            command.append("--break-restore")
        log = (self.out / f"job-{name}.log").open("w")
        with log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment())

    def _events(self, process: subprocess.Popen[str], expected: int) -> Iterator[dict[str, Any]]:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            self._take(event)
            yield event

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

    def _follow(self, process: subprocess.Popen[str], expected: int) -> None:
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}")]
        plain = not self.console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=self.console, disable=plain, transient=True) as progress:
            bar = progress.add_task("micro-batches", total=expected + 1)
            for event in self._events(process, expected):
                if event["event"] == "micro_batch":
                    progress.update(bar, completed=event["version"] + 1)
                    if plain:
                        self.say(f"  micro-batch {event['version']}: {event['rows']:,} messages since the restart")
                elif event["event"] == "restoring":
                    self.say(f"restore: shard {event['shard']} by {event['how']}: {event['why']}")
                elif event["event"] == "restored":
                    rate = event["records"] / max(event["seconds"], 1e-9)
                    self.say(
                        f"restored: shard {event['shard']}: {event['records']:,} in {event['seconds']:.2f} s"
                        f" ({rate:,.0f} per second), count and digest proven"
                    )

    def _prove(self) -> Proof:
        os.environ.update(environment())
        spark = session("rewind-demo-proof", self.out / "scratch")
        try:
            paths = [self.out / name for name in (ARCHIVE, RESULTS, ERRORS)]
            return prove(spark, *paths, size_ms=HOUR_MS, retention_ms=RETENTION_MS)
        finally:
            spark.stop()


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
    options = parser.parse_args()
    console = Console()
    began = time.monotonic()
    story = Story(
        options.out.absolute(),
        console,
        days=options.days,
        offsets=options.offsets,
        break_restore=options.break_restore,
    )
    proof = story.run()
    if proof is None:
        console.print(f"FAILED: {story.told.failed}", highlight=False, soft_wrap=True)
        console.print(f"logs: {story.out}/job-*.log", highlight=False, soft_wrap=True)
        return 1
    show(console, proof, story.told, time.monotonic() - began)
    if not proof.holds:
        console.print("FAILED: the output differs from the recomputation", highlight=False)
        return 1
    if story.told.replayed == 0:
        console.print("FAILED: nothing was replayed, so nothing was shown", highlight=False)
        return 1
    return 0
