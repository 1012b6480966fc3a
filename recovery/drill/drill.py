"""Drills: break a job on purpose, repeatably, and prove that it came back exactly.

A *control* run goes through undisturbed. For each scenario the same job, in a directory of its own, is broken at a
place that the seed chooses, and started again. It passes if its last revisions, errors and state digest equal the
control's, the local databases hold what the changelog has, and nothing was restored that was not damaged; a scenario
that must end in a clear error passes only if it ends in that one. The run up to the kill is made once for all scenarios
that begin alike, and what need not be killed shares a Spark.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from backend.errors import RewindError, UserCodeFailed
from recovery.commit.pointer import Commit
from recovery.drill.job import CHECKPOINT, DATA, DEFAULT_JOB, ERRORS, HOSTS, LOCAL, OFFSETS, RESULTS
from recovery.drill.process import BEFORE, Runner, snapshot, strike, strike_host, strike_restore
from recovery.drill.run import Run, misnamed, restored, unmoved, wrongly_restored
from recovery.drill.scenarios import DAYS, SOME, Scenario
from recovery.files import empty_own
from recovery.inspect.checkpoint_view import Checkpoint
from recovery.inspect.compare import MAX_SAMPLES, Difference, Output, compare, local_differences, read_output
from recovery.killpoints import order, taken

MICRO_BATCHES = 6
"""How many the drill's own job is cut into."""
MASTER, HOSTS_MASTER = "local[2,4]", "local-cluster[2,1,1024]"
"""Four tries of a task, as on a cluster."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a scenario came to.

    Attributes:
        scenario: The scenario.
        passed: Whether it ended as it must.
        why: Why not; empty when it passed.
        run: What happened.
        difference: Against the control; None when the scenario ends in an error.
    """

    scenario: Scenario
    passed: bool
    why: str
    run: Run
    difference: Difference | None


class Drill:
    """Runs scenarios on a job; use it as a context manager.

    Args:
        out: A directory of the drill's own; emptied first.
        job: `module:function`; the drill's own job on departures that it makes unless told.
        seed: Chooses where and what is broken.
        days: Days of departures for the drill's own job.
        env: For the job's processes, beside this one's environment.
        tell: Called with what happens, for people.
    """

    def __init__(
        self,
        out: Path,
        *,
        job: str | None = None,
        seed: int = 0,
        days: int = DAYS,
        env: Mapping[str, str] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        empty_own(out, ".rewind-drill", "drill")
        self.out, self.job, self.seed, self.tell = out.absolute(), job or DEFAULT_JOB, seed, tell
        self.env = dict(env or {})
        if job is None:
            from recovery.drill.data import made_flights
            from recovery.drill.flights import AIRPORTS, archive_of

            rows = archive_of(made_flights(days), self.out / "departures")
            self.env[DATA] = str(self.out / "departures")
            self.env[OFFSETS] = str(max(1, rows.num_rows // len(AIRPORTS) // MICRO_BATCHES))
            tell(f"archive: {rows.num_rows:,} departures")
        self.control_run = Run()
        self.spark_start_s: float | None = None
        self._control: Output | None = None
        self._broken: dict[str, Run] = {}
        self._runners: dict[str, Runner] = {}

    def __enter__(self) -> Drill:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that still run."""
        while self._runners:
            self._runners.popitem()[1].close()

    def control(self) -> Output:
        """Run the job undisturbed, once.

        Raises:
            UserCodeFailed: It does not even run undisturbed.
        """
        if self._control is None:
            out = self._directory("control")
            self._follow(self._ready(), self.control_run, out)
            if self.control_run.error:
                raise UserCodeFailed(
                    "the job fails without being broken",
                    where=str(self._log),
                    why=self.control_run.error,
                    command="run the job by itself until it ends well",
                )
            self._control = self._output(out, self.control_run)
        return self._control

    def run(self, scenario: Scenario) -> Verdict:
        """Run one scenario and judge it."""
        control = self.control()
        started = time.time()
        run, why = Run(), ""
        try:
            out = self._carry_out(scenario, run)
        except (ValueError, OSError, RewindError) as error:
            out, why = self.out / scenario.name, str(error)
        run.seconds = time.time() - started
        return self._judge(scenario, out, run, control, why)

    # ----------------------------------------------------------------------------------------------------- scenarios

    def _carry_out(self, scenario: Scenario, run: Run) -> Path:
        if scenario.zombie:
            return self._late(scenario, run)
        if scenario.hosts:
            return self._host(scenario, run)
        if not scenario.killed:
            return self._worker(scenario, run)
        chance = random.Random(f"{self.seed} {scenario.name}")
        base = self._kill(scenario.killed)
        run.events, run.version, run.error = list(base.events), base.version, base.error
        if base.broken_at is None:
            return self.out / scenario.name
        out = self.out / scenario.name
        shutil.copytree(self.out / f"killed-{scenario.killed}", out)
        if scenario.damage is not None:
            what, run.damaged, run.file = scenario.damage(out, chance)
            self._note(run, "damaged", what=what)
        if scenario.kill_point:
            self._kill_restore(scenario, run, out)
        run.broken_at = time.time()
        self._follow(self._ready(), run, out, aged=scenario.aged)
        return out

    def _kill(self, how: str) -> Run:
        """Kill the whole job, once for all scenarios that begin like this; the directory is copied, never used."""
        if how not in self._broken:
            run = self._broken[how] = Run()
            out = self._directory(f"killed-{how}")
            runner = self._ready()
            runner.ask(out=str(out))
            try:
                version = strike(runner, out, self._at(how), how)
            except TimeoutError as error:  # the others that begin so would wait as long
                run.error = str(error)
                return run
            self._listen(runner, run, quiet=version is not None)
            if version is not None:
                run.version, run.error = version, ""
                self._note(run, "killed", what=f"killed {how} micro-batch {version}")
                run.broken_at = run.first("killed")
        return self._broken[how]

    def _kill_restore(self, scenario: Scenario, run: Run, out: Path) -> None:
        """Start the job and kill it inside its restore."""
        runner = self._ready()
        order(runner.order, scenario.kill_point)
        runner.ask(out=str(out))
        killed = strike_restore(runner)
        self._listen(runner, run, quiet=killed)
        if not killed:
            raise ValueError(f"nothing was restored: {run.error or 'the job ended'}")
        run.error = ""  # killed, as it must be; the next start has to cope
        self._note(run, "killed", what="killed inside the restore")

    def _worker(self, scenario: Scenario, run: Run) -> Path:
        out, runner = self._directory(scenario.name), self._ready()
        run.version = self._at("inside")
        order(runner.order, scenario.kill_point, run.version)
        self._follow(runner, run, out)
        if taken(runner.order).exists():
            run.broken_at = taken(runner.order).stat().st_ctime
            self._note(run, "killed", at=run.broken_at, what=f"a worker killed in micro-batch {run.version}")
        runner.order.unlink(missing_ok=True)
        return out

    def _host(self, scenario: Scenario, run: Run) -> Path:
        out, runner = self._directory(scenario.name), self._cluster_ready()
        runner.ask(out=str(out), hosts=True, alternate=scenario.alternate)
        if scenario.alternate:
            run.version, run.broken_at = 0, time.time()
            self._note(run, "moving", what="the other executor runs the tasks at every micro-batch")
            self._listen(runner, run)
            return out
        run.version = self._at("inside")
        lost = strike_host(runner, out, self.out / HOSTS, run.version)
        broken_at = time.time()
        self._listen(runner, run)
        if lost is not None:
            run.version, run.broken_at = lost, broken_at
            self._note(run, "killed", at=broken_at, what=f"executor killed in micro-batch {run.version}, its disk lost")
        return out

    def _late(self, scenario: Scenario, run: Run) -> Path:
        """Let zombies run on the ended control run's state."""
        out = self.out / scenario.name
        shutil.copytree(self.out / "control", out)
        run.events = [event for event in self.control_run.events if event["event"] == "ended"]
        self._follow(self._ready(), run, out, zombie=True)
        return out

    # --------------------------------------------------------------------------------------------------------- judge

    def _judge(self, scenario: Scenario, out: Path, run: Run, control: Output, why: str) -> Verdict:
        difference = None
        unbroken = (
            "the job ended before it could be broken: give it more input, or smaller micro-batches"
            " (archive(..., max_offsets_per_batch=...))"
        )
        replays = any(count for _, count, _ in control.state.values())
        fails = bool(scenario.error) and (replays or bool(run.error) or not scenario.aged)  # else none is read again
        if why:
            pass
        elif scenario.error and run.broken_at is None and not run.error:
            why = unbroken
        elif fails:
            why = misnamed(scenario, run)
        elif run.error:
            why = f"failed: {run.error}"
        elif scenario.zombie:
            why = self._zombies(out, run)
        elif run.broken_at is None:
            why = unbroken
        if not why and not fails:
            try:
                difference = compare(control, self._output(out, run))
                why = "" if difference.equal else "differs from the control: " + "; ".join(difference.samples)
                if wrong := self._local_differences(scenario, out, run):
                    difference = replace(difference, state_equal=False)
                    why = why or "differs from the changelog: " + "; ".join(wrong[:MAX_SAMPLES])
            except RewindError as error:
                why = str(error)
            why = why or wrongly_restored(scenario, run) or unmoved(scenario, run)
        return Verdict(scenario, not why, why, run, difference)

    def _zombies(self, out: Path, run: Run) -> str:
        """Say what is wrong with what the zombies did; empty when nothing is."""
        outcomes: Mapping[str, str] = next((e["outcomes"] for e in run.events if e["event"] == "zombies"), {})
        if not outcomes:
            return "no shard had a commit old enough for a zombie"
        bad = {shard: outcome for shard, outcome in outcomes.items() if outcome != "StateAhead"}
        if bad:
            return f"zombies were not refused: {bad}"
        places = {"changelog": f"{CHECKPOINT}/rewind/changelog", "results": RESULTS, "errors": ERRORS}
        wrote = [
            what for what, place in places.items() if snapshot(self.out / "control" / place) != snapshot(out / place)
        ]
        return f"a zombie wrote to {', '.join(wrote)}" if wrote else ""

    # ----------------------------------------------------------------------------------------------------- processes

    @property
    def _log(self) -> Path:
        return self.out / "job.log"

    def _directory(self, name: str) -> Path:
        out = self.out / name
        out.mkdir()
        return out

    def _at(self, how: str) -> int:
        """Choose the micro-batch in which the job is broken, in the middle third of the control's."""
        versions = 1 + max((one["version"] for one in self.control_run.events if one["event"] == "progress"), default=0)
        least = BEFORE + 1
        return random.Random(f"{self.seed} {how}").randint(max(least, versions // 3), max(least, versions * 2 // 3))

    def _ready(self, master: str = MASTER, conf: Mapping[str, str] | None = None) -> Runner:
        """Give a process that is alive: the one that runs already, if it is."""
        if master in self._runners and not self._runners[master].alive:
            self._runners.pop(master).close()
        if master not in self._runners:
            self._runners[master] = Runner(self.job, master, self.env, self._log, self.out / "order", conf)
        return self._runners[master]

    def _cluster_ready(self) -> Runner:
        """Give a process with two executors; one that was killed is replaced, so one process serves all scenarios."""
        conf = {
            "spark.local.dir": str(self.out / HOSTS),
            "spark.executor.memory": "512m",
            "spark.locality.wait": "0s",
            "spark.shuffle.io.maxRetries": "1",  # of an executor that is dead: not four times five seconds
            "spark.shuffle.io.retryWait": "200ms",
        }
        return self._ready(HOSTS_MASTER, conf)

    def _follow(self, runner: Runner, run: Run, out: Path, **how: Any) -> None:
        """Run the job to its end, or until it dies."""
        runner.ask(out=str(out), **how)
        self._listen(runner, run)

    def _listen(self, runner: Runner, run: Run, *, quiet: bool = False) -> None:
        run.error = "the process died"
        started_at, needless = None, ""
        for event in runner.events():
            if event["event"] == "launched":
                started_at = event["at"]
            elif event["event"] == "ready" and started_at is not None:
                self.spark_start_s = event["at"] - started_at
            elif not (quiet and event["event"] == "failed"):
                run.events.append(event)
            if event["event"] in ("ended", "zombies"):
                run.error = ""
            elif event["event"] == "failed":
                run.error = event["error"]
            elif event["event"] in ("restoring", "restored"):
                self.tell(f"  {event['event']} shard {event['shard']} by {event['how']}")
            if event["event"] == "restoring" and event["shard"] not in run.damaged:
                needless = f"shard {event['shard']} is restored without need: {event['why']}"
                runner.kill()  # it has failed: nothing that comes later makes it good
        run.error = needless or run.error

    def _note(self, run: Run, event: str, *, what: str, at: float | None = None) -> None:
        run.events.append({"event": event, "at": time.time() if at is None else at, "what": what})
        run.events.sort(key=lambda one: one["at"])
        self.tell(f"  {what}")

    def _output(self, out: Path, run: Run) -> Output:
        return read_output(self._checkpoint(out, run), out / RESULTS, out / ERRORS)

    def _local_differences(self, scenario: Scenario, out: Path, run: Run) -> list[str]:
        """Say what the databases that the run leaves have otherwise than the changelog; not what is damaged still."""
        unread = set(run.damaged) - restored(run) if scenario.restores == SOME else set()
        for shard in sorted(unread):
            self._note(run, "unread", what=f"nothing came to read the damage in shard {shard}: it was not restored")
        return local_differences(self._checkpoint(out, run), unread)

    def _checkpoint(self, out: Path, run: Run) -> Checkpoint:
        ended = [event for event in run.events if event["event"] == "ended"]
        commits = ended[-1]["commits"] if ended else {}
        pointers = {int(shard): Commit.of_name(name) for shard, name in commits.items()} or None
        return Checkpoint(str(out / CHECKPOINT), out / LOCAL, pointers)
