"""The story: an archive of real flights, a job, a disk lost under it, its death midway, a restore, and the proof."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from pyarrow.dataset import dataset
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from recovery.demo.disaster import take_disk
from recovery.demo.job import FORGETFUL, JOB, SERVERS
from recovery.demo.proof import ARCHIVE, ERRORS, RESULTS, Proof
from recovery.demo.session import SPARK, WORKERS
from recovery.drill.damage import lose_disk
from recovery.drill.flights import make_archive
from recovery.drill.job import DATA, LOCAL, OFFSETS
from recovery.drill.process import Event, Runner, environment, strike
from recovery.files import empty_own
from recovery.inspect.screen import plain

if TYPE_CHECKING:
    import pyarrow as pa

DEFAULT_OFFSETS = 3_000
MASTER = "local[2]"
PACE = "1 second"
"""Between micro-batches of a run in which disks are lost: the whole year would be over before one is restored."""
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
        ended: Whether it came to its end.
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
    ended: bool = False


class Failed(Exception):
    """The demo cannot go on; the message says why."""


class Demo:
    """Runs the demo in a directory, chapter by chapter: `prepare`, `disaster`, `restart`, `prove`.

    Args:
        out: Emptied first.
        console: Where it is told.
        days: Of 2013; None for the whole year.
        offsets: Bound on the offsets per airport in a micro-batch.
        servers: Of the broker that has the topic, which is filled while the job first runs, and the changelog; empty:
            both are files.
    """

    def __init__(
        self,
        out: Path,
        console: Console,
        *,
        days: int | None = None,
        offsets: int = DEFAULT_OFFSETS,
        servers: str = "",
    ) -> None:
        self.out, self.console, self.days, self.offsets, self.servers = out, console, days, offsets, servers
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
        options = {"trigger": PACE, "until": None if self.servers else "end"}
        with self._job("first", options) as job:
            behind = self._lose_a_disk(job)
            version = strike(job, self.out, max(behind + 1, self.expected // 2), "inside")
            for event in job.events():
                self._take(event)
        if version is None:
            raise Failed(self.observed.failed or "the job ended before the disaster")
        lost = lose_disk(self.out / LOCAL)
        self.say(
            f"disaster: killed (SIGKILL) inside micro-batch {version}, state staged but not committed;"
            f" local state deleted, {lost / 1e6:.1f} MB"
        )

    def _lose_a_disk(self, job: Runner) -> int:
        """Take a shard's disk a quarter of the way, and wait until it has caught up; give the micro-batch of that."""
        run, lost_in = "", -1
        for event in job.events():
            match event["event"]:
                case "started":
                    run = event["run"]
                case "progress" if lost_in < 0 and event["version"] >= self.expected // 4:
                    [shard] = (self.out / LOCAL).glob(f"*/{LOST}")
                    bytes_lost = take_disk(job, shard)
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
        self.observed.failed, self.observed.ended = "", False
        with self._job("second", {}, {FORGETFUL: "yes"} if break_restore else {}) as job:
            self._follow(job)
        if not self.observed.ended:
            raise Failed(self.observed.failed or f"the job ended with exit code {job.process.returncode}")

    def prove(self) -> Proof:
        """Recompute everything, in a process of its own.

        Raises:
            Failed: The recomputation itself failed.
        """
        self.say("proof: recomputing every window with Spark's batch SQL")
        command = [sys.executable, "-m", "recovery.demo.proof", str(self.out)]
        with (self.out / "proof.log").open("w") as log:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment(WORKERS), check=False
            )
        if done.returncode != 0:
            raise Failed("the recomputation failed")
        [line] = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return msgspec.json.decode(line, type=Proof)

    def say(self, text: str) -> None:
        """Tell the next part of the story."""
        self.console.print(plain(text), soft_wrap=True)

    @contextmanager
    def _job(self, name: str, options: Mapping[str, object], env: Mapping[str, str] | None = None) -> Iterator[Runner]:
        """Run the job; whatever happens here, none of its processes stays behind."""
        given = {**WORKERS, DATA: str(self.out / ARCHIVE), OFFSETS: str(self.offsets), SERVERS: self.servers}
        log, order = self.out / f"job-{name}.log", self.out / "order"
        job = Runner(JOB, MASTER, {**given, **(env or {})}, log, order, SPARK)
        try:
            places = {"results": str(self.out / RESULTS), "errors": str(self.out / ERRORS)}
            job.ask(out=str(self.out), as_it_is=True, options={**places, **options})
            yield job
        except BaseException:
            job.kill()
            raise
        finally:
            job.close()

    def _take(self, event: Event) -> None:
        match event["event"]:
            case "progress":
                self.observed.micro_batches = max(self.observed.micro_batches, event["version"] + 1)
            case "restored":
                self.observed.restores += 1
                self.observed.restore_s = max(self.observed.restore_s, event["seconds"])
                if event["how"] == "replay":
                    self.observed.replayed += event["records"]
            case "failed":
                self.observed.failed = event["error"]
            case "ended":
                self.observed.ended = True

    def _follow(self, job: Runner) -> None:
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total}")]
        plain = not self.console.is_terminal
        with Progress(*columns, TimeElapsedColumn(), console=self.console, disable=plain, transient=True) as progress:
            bar = progress.add_task("micro-batches", total=self.expected + 1)
            for event in job.events():
                self._take(event)
                match event["event"]:
                    case "progress":
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
