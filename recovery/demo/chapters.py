"""The story: an archive of real flights, a job, a disk lost under it, its death midway, a restore, and the proof."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pyarrow.dataset import dataset
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from recovery.demo.disaster import strike, take_disk
from recovery.demo.job import ARCHIVE, CHECKPOINT, ERRORS, LOCAL, RESULTS
from recovery.demo.proof import Proof, prove
from recovery.demo.session import environment
from recovery.drill.damage import lose_disk
from recovery.drill.flights import make_archive
from recovery.drill.process import kill
from recovery.files import empty_own
from recovery.inspect.screen import plain

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

HOUR_MS = 3_600_000
RETENTION_MS = 120 * 24 * HOUR_MS
DEFAULT_OFFSETS = 3_000
LOST = 0
"""The shard that loses its disk while the query runs."""


@dataclass
class Observed:
    """What the job's processes told.

    Attributes:
        micro_batches: Micro-batches published.
        restores: Shards restored with the query stopped.
        replayed: Messages replayed for them.
        restore_s: Seconds until the last of them was whole.
        beside: Messages replayed beside the running query.
        beside_s: Seconds that took.
        queued: Micro-batches that the lost shard queued meanwhile.
        others: Rows that the other shards published in those.
        failed: What ended the job.
    """

    micro_batches: int = 0
    restores: int = 0
    replayed: int = 0
    restore_s: float = 0.0
    beside: int = 0
    beside_s: float = 0.0
    queued: int = 0
    others: int = 0
    failed: str = ""


class Failed(Exception):
    """The demo cannot go on; the message says why."""


class Demo:
    """Runs the demo in a directory, chapter by chapter: `prepare`, `disaster`, `restart`, `prove`.

    Args:
        out: Emptied first.
        console: Where it is told.
        days: Of 2013; None for the whole year.
        offsets: Bound on the offsets per airport in a micro-batch.
    """

    def __init__(self, out: Path, console: Console, *, days: int | None = None, offsets: int = DEFAULT_OFFSETS) -> None:
        self.out, self.console, self.days, self.offsets = out, console, days, offsets
        self.observed = Observed()
        self.expected = 0

    def prepare(self) -> pa.Table:
        """Write the archive of the flights; gives its messages."""
        empty_own(self.out, ".rewind-demo", "demo")
        began = time.monotonic()
        rows = make_archive(self.out / ARCHIVE, days=self.days)
        self.say(f"archive: {rows.num_rows:,} flights of 3 airports in {time.monotonic() - began:.1f} s")
        largest = max(one["counts"] for one in rows["partition"].combine_chunks().value_counts().to_pylist())
        self.expected = -(-largest // self.offsets)
        self.say(
            f"job: departures per airport and hour, {self.expected} micro-batches of {self.offsets:,} offsets each"
        )
        return rows

    def disaster(self) -> None:
        """Run the job, take a shard's disk under it, and kill it midway inside a micro-batch; no local state is left.

        Raises:
            Failed: The job ended before, or stopped for the shard.
        """
        with self._process("first") as process:
            events = self._events(process)
            behind = self._lose_a_disk(process.pid, events)
            version = strike(process.pid, self.out / LOCAL, self.out / CHECKPOINT, max(behind + 1, self.expected // 2))
            for event in events:
                self._take(event)
        if version is None:
            raise Failed(self.observed.failed or "the job ended before the disaster")
        lost = lose_disk(self.out / LOCAL)
        self.say(
            f"disaster: killed (SIGKILL) inside micro-batch {version}, state staged but not committed;"
            f" local state deleted, {lost / 1e6:.1f} MB"
        )

    def _lose_a_disk(self, pid: int, events: Iterator[dict[str, Any]]) -> int:
        """Take a shard's disk a quarter of the way, and wait until it has caught up; give the micro-batch of that."""
        run, lost_in = "", -1
        for event in events:
            match event["event"]:
                case "started":
                    run = event["run"]
                case "micro_batch" if lost_in < 0 and event["version"] >= self.expected // 4:
                    [shard] = (self.out / LOCAL).glob(f"*/{LOST}")
                    bytes_lost = take_disk(pid, shard)
                    lost_in = event["version"]
                    self.say(
                        f"loss: after micro-batch {lost_in} the disk of shard {LOST} is taken under the running query,"
                        f" {bytes_lost / 1e6:.1f} MB"
                    )
                case "restored" if lost_in >= 0:
                    self.observed.beside, self.observed.beside_s = event["records"], event["seconds"]
                    continue
                case "adopted":
                    if event["run"] != run or event["restores"]:
                        raise Failed("the query did not stay the same while its shard was restored")
                    self.observed.queued, self.observed.others, behind = self._published_beside(event["version"])
                    self.say(
                        f"  shard {LOST} queued {self.observed.queued} micro-batches, while"
                        f" {self.observed.beside:,} messages were replayed in {self.observed.beside_s:.1f} s beside the"
                        " same query, count and digest proven;"
                        f" caught up in micro-batch {behind}; the other shards published"
                        f" {self.observed.others:,} rows meanwhile"
                    )
                    return int(event["version"])
            self._take(event)
        raise Failed(self.observed.failed or "the job ended before the lost shard had caught up")

    def _published_beside(self, newest: int) -> tuple[int, int, int]:
        """Give how many micro-batches the lost shard queued, the rows of others in them, and which one adopted them.

        Read from the results: a row of the lost shard that was queued lies in the directory of a later micro-batch.

        Args:
            newest: The newest micro-batch published.
        """
        table = dataset(self.out / RESULTS, format="parquet", partitioning="hive").to_table(
            ["shard", "version", "batch"]
        )
        rows = [row for row in table.to_pylist() if row["batch"] <= newest]
        queued = {row["version"]: row["batch"] for row in rows if row["version"] < row["batch"]}
        others = sum(row["shard"] != LOST and row["batch"] in queued for row in rows)
        return len(queued), others, max(queued.values(), default=-1)

    def restart(self, *, break_restore: bool = False) -> None:
        """Start the job again; it restores its state and goes on to the end.

        Args:
            break_restore: Leave out one replayed message: it must fail.

        Raises:
            Failed: The job failed.
        """
        self.observed.failed = ""
        with self._process("second", "--break-restore" if break_restore else None) as process:
            self._follow(process)
        if self.observed.failed or process.returncode != 0:
            raise Failed(self.observed.failed or f"the job ended with exit code {process.returncode}")

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
        return msgspec.json.decode(line, type=Proof)

    def say(self, text: str) -> None:
        """Tell the next part of the story."""
        self.console.print(plain(text), soft_wrap=True)

    @contextmanager
    def _process(self, name: str, option: str | None = None) -> Iterator[subprocess.Popen[str]]:
        """Run the job; whatever happens here, none of its processes stays behind."""
        command = [sys.executable, "-m", "recovery.demo.job", "--out", str(self.out), "--offsets", str(self.offsets)]
        command += ["--paced"] if name == "first" else []
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
                self.observed.micro_batches = max(self.observed.micro_batches, event["version"] + 1)
            case "restored":
                self.observed.restores += 1
                self.observed.restore_s = max(self.observed.restore_s, event["seconds"])
                if event["how"] == "replay":
                    self.observed.replayed += event["records"]
            case "failed":
                self.observed.failed = event["error"]

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
