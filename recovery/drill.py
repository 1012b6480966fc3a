"""Drills: break a job on purpose, repeatably, and prove that it came back exactly.

A *control* run goes through undisturbed. For each scenario a second run of the same job, in a directory of its own, is
broken at a place that the seed chooses, and started again. It passes if its last revisions, errors and state digest
equal the control's; a scenario that must end in a clear error passes only if it ends in that one.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backend.errors import RewindError, code_in
from recovery.compare import Difference, Output, compare, read_output
from recovery.drill_job import CHECKPOINT, DATA, DEFAULT_JOB, ERRORS, LOCAL, RESULTS
from recovery.drill_process import end, events_of, snapshot, strike
from recovery.drill_scenarios import Scenario
from recovery.pointer import Commit
from recovery.survey import Checkpoint

DEFAULT_DAYS = 8


@dataclass(slots=True)
class Run:
    """One run of a scenario, or the control.

    Attributes:
        events: What its processes told, and what the drill did, in order; `at` is seconds since the epoch.
        error: The named error's text that ended it; empty when it ended well.
        seconds: From the first start to the end.
    """

    events: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    seconds: float = 0.0

    def first(self, event: str, after: float = 0.0) -> float | None:
        """Give when an event first happened after a time."""
        return next((one["at"] for one in self.events if one["event"] == event and one["at"] > after), None)

    def last(self, event: str) -> float | None:
        """Give when an event last happened."""
        return next((one["at"] for one in reversed(self.events) if one["event"] == event), None)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a scenario came to.

    Attributes:
        scenario: The scenario.
        passed: Whether it ended as it must.
        why: Why not; empty when it passed.
        run: What happened.
        difference: Against the control; None when the scenario ends in an error.
        detect_s: From the new start to the first restore; None when nothing was restored.
        restore_s: From the first restore's start to the last one's end.
        catch_up_s: RTO: from the damage until the job had published beyond the micro-batch it was broken in.
    """

    scenario: Scenario
    passed: bool
    why: str
    run: Run
    difference: Difference | None
    detect_s: float | None
    restore_s: float | None
    catch_up_s: float | None


class Drill:
    """Runs scenarios on a job.

    Args:
        out: A directory of the drill's own; emptied first.
        job: `module:function`; the drill's own job on real flights unless told.
        seed: Chooses where and what is broken.
        days: Days of flights for the drill's own job.
        tell: Called with what happens, for people.
    """

    def __init__(
        self,
        out: Path,
        *,
        job: str | None = None,
        seed: int = 0,
        days: int = DEFAULT_DAYS,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        mark = out / ".rewind-drill"
        if out.exists() and any(out.iterdir()) and not mark.exists():
            raise ValueError(f"out={str(out)!r}: is not empty and not of an earlier drill")
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        mark.touch()
        self.out, self.job, self.seed, self.tell = out.absolute(), job or DEFAULT_JOB, seed, tell
        self._env: dict[str, str] = {}
        if job is None:
            from recovery.demo.flights import make_archive

            rows = make_archive(self.out / "departures", days=days)
            self._env[DATA] = str(self.out / "departures")
            tell(f"archive: {rows.num_rows:,} departures")
        self.control_run = Run()
        self._control: Output | None = None

    def control(self) -> Output:
        """Run the job undisturbed, once.

        Raises:
            RuntimeError: It does not even run undisturbed.
        """
        if self._control is None:
            out = self._directory("control")
            self._follow(out, self.control_run)
            if self.control_run.error:
                raise RuntimeError(f"the job fails without being broken: {self.control_run.error}; see {out}/job.log")
            self._control = self._output(out, self.control_run)
        return self._control

    def run(self, scenario: Scenario) -> Verdict:
        """Run one scenario and judge it."""
        control = self.control()
        out = self._directory(scenario.name)
        chance = random.Random(f"{self.seed} {scenario.name}")
        versions = 1 + max((one["version"] for one in self.control_run.events if one["event"] == "progress"), default=0)
        at = chance.randint(max(1, versions // 3), max(1, versions * 2 // 3))
        run = Run()
        started = time.time()
        broken_at: float | None = None
        if scenario.kill_point and not scenario.on_restart:
            self._follow(out, run, scenario, arm=(scenario.kill_point, at))
            broken_at = self._armed_time(out)
        elif not scenario.zombie:
            broken_at = self._break(out, run, at, between=scenario.between)
            if broken_at is not None and scenario.damage is not None:
                what = scenario.damage(out, chance)
                self._note(run, "damaged", what=what)
            if scenario.on_restart:
                self._follow(out, run, scenario, arm=(scenario.kill_point, None))
                run.error = ""  # killed, as it must be; the next start has to cope
        if scenario.zombie or not (scenario.kill_point and not scenario.on_restart):
            self._follow(out, run, scenario)
        run.seconds = time.time() - started
        return self._judge(scenario, out, run, control, at, broken_at)

    def _judge(
        self, scenario: Scenario, out: Path, run: Run, control: Output, at: int, broken_at: float | None
    ) -> Verdict:
        difference, why = None, ""
        if scenario.error is not None:
            code = code_in(run.error)
            why = (
                "" if code == scenario.error else f"ended with {code or run.error or 'no error'}, not {scenario.error}"
            )
        elif run.error:
            why = f"failed: {run.error}"
        elif scenario.zombie:
            why = self._zombies(out, run)
        elif broken_at is None:
            why = "the job ended before it could be broken: give it more input"
        if not why and scenario.error is None:
            try:
                difference = compare(control, self._output(out, run))
                why = "" if difference.equal else "differs from the control: " + "; ".join(difference.samples)
            except RewindError as error:
                why = str(error)
        restoring = run.first("restoring", broken_at or 0.0)
        restart = run.first("launched", broken_at or 0.0)
        restored = run.last("restored")
        beyond = next(
            (e["at"] for e in run.events if broken_at and e["at"] > broken_at and e.get("version", -1) >= at), None
        )
        return Verdict(
            scenario,
            not why,
            why,
            run,
            difference,
            restoring - restart if restoring is not None and restart is not None else None,
            restored - restoring if restored is not None and restoring is not None else None,
            beyond - broken_at if beyond is not None and broken_at is not None else None,
        )

    # ---------------------------------------------------------------------------------------------------- processes

    def _directory(self, name: str) -> Path:
        out = self.out / name
        out.mkdir()
        return out

    def _start(
        self, out: Path, scenario: Scenario | None, arm: tuple[str, int | None] | None, *extra: str
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "recovery.drill_job", "--out", str(out), "--job", self.job, *extra]
        if scenario is not None:
            command += ["--master", scenario.master, "--aged", str(scenario.aged)]
        root = str(Path(__file__).resolve().parent.parent)
        paths = [root, str(Path.cwd()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env = {**os.environ, **self._env, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
        if arm is not None:
            env["REWIND_KILL"] = f"{arm[0]}@{out / 'killed'}"
            if arm[1] is not None:
                env["REWIND_KILL_VERSION"] = str(arm[1])
        with (out / "job.log").open("a") as log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=env)

    def _follow(
        self, out: Path, run: Run, scenario: Scenario | None = None, arm: tuple[str, int | None] | None = None
    ) -> None:
        """Run the job to its end, or until it dies."""
        process = self._start(out, scenario, arm)
        try:
            self._listen(process, run)
        finally:
            end(process)

    def _listen(self, process: subprocess.Popen[str], run: Run) -> None:
        run.error = "the process died"
        for event in events_of(process):
            run.events.append(event)
            if event["event"] in ("ended", "zombies"):
                run.error = ""
            elif event["event"] == "failed":
                run.error = event["error"]
            elif event["event"] in ("restoring", "restored"):
                self.tell(f"  {event['event']} shard {event['shard']} by {event['how']}")

    def _break(self, out: Path, run: Run, at: int, *, between: bool) -> float | None:
        """Kill the job in micro-batch `at` or later, see `strike`; None when it ended first."""
        process = self._start(out, None, None)
        try:
            version = strike(process, out, at, between=between)
            if version is None:
                run.error = "the process died"
                run.events += list(events_of(process))
                return None
            self._note(run, "killed", version=version)
            run.events += [event for event in events_of(process) if event["event"] != "failed"]
            run.events.sort(key=lambda event: event["at"])
            self.tell(f"  killed {'after' if between else 'inside'} micro-batch {version}")
            return run.first("killed")
        finally:
            end(process)

    def _zombies(self, out: Path, run: Run) -> str:
        """Let zombies run on the ended job's state and say what is wrong with what they did."""
        before = snapshot(out / CHECKPOINT / "rewind" / "changelog")
        process = self._start(out, None, None, "--zombie")
        try:
            self._listen(process, run)
        finally:
            end(process)
        outcomes: Mapping[str, str] = next((e["outcomes"] for e in run.events if e["event"] == "zombies"), {})
        if run.error or not outcomes:
            return run.error or "no shard had a commit old enough for a zombie"
        bad = {shard: outcome for shard, outcome in outcomes.items() if outcome != "StateAhead"}
        if bad:
            return f"zombies were not refused: {bad}"
        return (
            "" if snapshot(out / CHECKPOINT / "rewind" / "changelog") == before else "a zombie wrote to the changelog"
        )

    def _armed_time(self, out: Path) -> float | None:
        killed = out / "killed"
        return killed.stat().st_mtime if killed.exists() else None

    def _note(self, run: Run, event: str, **details: Any) -> None:
        run.events.append({"event": event, "at": time.time(), **details})
        if "what" in details:
            self.tell(f"  {details['what']}")

    def _output(self, out: Path, run: Run) -> Output:
        ended = [event for event in run.events if event["event"] == "ended"]
        commits = ended[-1]["commits"] if ended else {}
        pointers = {int(shard): Commit.of_name(name) for shard, name in commits.items()} or None
        return read_output(Checkpoint(str(out / CHECKPOINT), out / LOCAL, pointers), out / RESULTS, out / ERRORS)
