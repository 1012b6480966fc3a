"""The page of a drill: what a manager reads, and data in it as text. How it looks: `make look`."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from backend.errors import UserCodeFailed
from recovery.drill.drill import Drill, Verdict
from recovery.drill.report import drill_json, show_drill, write_html
from recovery.drill.run import Run, misnamed
from recovery.drill.scenarios import choose
from recovery.inspect.compare import Output, compare
from tests.unit.test_text_from_data import HOSTILE

SCRIPT = "<script>throw 1</script><img src=x onerror=alert(1)>"


def page(tmp_path: Path) -> tuple[dict[str, Any], str]:
    """Write the page of two scenarios: one whose state comes back, one that loses a window with a hostile key."""
    events = [
        *({"event": "progress", "at": 100.0 + n, "version": n} for n in range(4)),
        {"event": "killed", "at": 104.0, "what": f"killed by {SCRIPT}{HOSTILE}"},
        {"event": "begun", "at": 105.0},
        {"event": "restoring", "at": 105.5, "shard": 0, "how": "replay", "why": SCRIPT},
        {"event": "restored", "at": 106.0, "shard": 0, "how": "replay"},
        {"event": "progress", "at": 107.5, "version": 3},
        {"event": "progress", "at": 109.0, "version": 4},
    ]
    run = Run(events=events, version=4, broken_at=104.0, damaged=(0,))
    control = Output({(0, SCRIPT): (1,), (1, "b"): (2,)}, {}, {0: (255, 2, 16)}, 0)
    less = Output({(1, "b"): (2,)}, {}, {0: (254, 1, 16)}, 0)
    good, bad = compare(control, control), compare(control, less)
    first, second = choose(["kill-driver", "lose-all"])
    drill = Drill(tmp_path / "out", job=f"{SCRIPT}:job")
    drill.control_run = Run(events=events[:4])
    verdicts = [
        Verdict(first, True, "", run, good),
        Verdict(second, False, "; ".join(bad.samples), run, bad),
    ]
    data = drill_json(drill, verdicts)
    write_html(tmp_path / "report.html", data)
    return data, (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("[rewind:HistoryLost] gone; why: departures partition 1: the earliest is 629, /log/0/a.delta", ""),
        ("[rewind:HistoryLost] gone; where: shard 0; why: departures partition 1: the earliest is 629, /log/0/b.delta",
         "does not name /log/0/a.delta"),
        ("[rewind:HistoryLost] gone; where: shard 0; why: departures partition 1: the earliest is 20, /log/0/a.delta",
         "names no partition that aged"),
        ("[rewind:StateCorrupted] /log/0/a.delta", "ended with StateCorrupted, not HistoryLost"),
        ("", "ended with no error, not HistoryLost"),
    ],
)  # fmt: skip
def test_an_error_must_name_what_was_damaged(error: str, why: str) -> None:
    (scenario,) = choose(["source-aged"])
    left = {"departures partition 0": 500, "departures partition 1": 629}
    run = Run(events=[{"event": "aged", "at": 1.0, "left": left}], error=error, file="/log/0/a.delta")
    found = misnamed(scenario, run)
    assert why in found
    assert bool(why) == bool(found)


def test_a_job_that_was_never_broken_is_not_said_to_have_hidden_it(tmp_path: Path) -> None:
    (scenario,) = choose(["lose-tail"])
    drill = Drill(tmp_path / "out", job="a:job")
    verdict = drill._judge(scenario, drill.out / "lose-tail", Run(), Output({}, {}, {}, 0), "")
    assert not verdict.passed
    assert "ended before it could be broken" in verdict.why


@pytest.mark.parametrize(("messages", "why"), [(0, ""), (7, "ended with no error, not HistoryLost")])
def test_a_job_that_keeps_no_messages_is_restored_without_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int, why: str
) -> None:
    (scenario,) = choose(["source-aged"])
    drill = Drill(tmp_path / "out", job="a:job")
    output = Output({("w",): (1,)}, {}, {0: (5, messages, 9)}, 0)
    monkeypatch.setattr(drill, "_output", lambda *_: output)
    monkeypatch.setattr(drill, "_local_differences", lambda *_: [])
    events = [{"event": "aged", "at": 2.0, "left": {"t partition 0": 5}}, {"event": "restored", "at": 3.0, "shard": 0}]
    run = Run(events=events, broken_at=1.0, version=3, damaged=(0,))
    assert drill._judge(scenario, drill.out / "source-aged", run, output, "").why == why
    lost = replace(output, windows={})
    assert "differs from the control" in drill._judge(scenario, drill.out, run, lost, "").why or messages


def test_a_place_that_is_never_come_to_is_told_once_for_all_that_begin_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def strike(*_: object) -> None:
        asked.append("struck")
        raise TimeoutError("what the drill waits for did not happen")

    monkeypatch.setattr("recovery.drill.drill.strike", strike)
    drill = Drill(tmp_path / "out", job="a:job")
    monkeypatch.setattr(drill, "_ready", lambda: SimpleNamespace(ask=lambda **_: None))
    for name in ("kill-driver", "lose-all"):
        (scenario,) = choose([name])
        run = Run()
        out = drill._carry_out(scenario, run)
        assert "did not happen" in drill._judge(scenario, out, run, Output({}, {}, {}, 0), "").why
    assert len(asked) == len({one.killed for one in choose(["kill-driver", "lose-all"])})


def test_a_damage_that_nothing_read_is_not_said_to_have_been_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the database looked into: it is damaged still."""
    (scenario,) = choose(["corrupt-sst"])
    drill, left_out = Drill(tmp_path / "out", job="a:job"), []
    monkeypatch.setattr(drill, "_checkpoint", lambda *_: None)
    monkeypatch.setattr("recovery.drill.drill.local_differences", lambda _, unread: left_out.append(unread) or [])
    for event, unread in (("progress", {1}), ("restored", set())):
        run = Run(events=[{"event": event, "at": 2.0, "shard": 1}], broken_at=1.0, damaged=(1,))
        assert drill._local_differences(scenario, tmp_path, run) == []
        assert left_out.pop() == unread
        said = [one["what"] for one in run.events if one["event"] == "unread"]
        assert said == ["nothing came to read the damage in shard 1: it was not restored"] * len(unread)


def test_what_a_drill_had_written_goes_wherever_its_directory_really_lies(tmp_path: Path) -> None:
    """A link, or the root of a filesystem, cannot be removed."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        drill = Drill(tmp_path / "out", job="a:job")
        assert [path.name for path in (tmp_path / "disk").iterdir()] == [".rewind-drill"]
        (drill.out / "control").mkdir()
        (drill.out / "control" / "rows").touch()
        (drill.out / "elsewhere").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(ValueError, match="is not empty and not of an earlier drill"):
        Drill(tmp_path / "other", job="a:job")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for place in (tmp_path / "other" / "mine", tmp_path / "dangling"):
        with pytest.raises(ValueError, match="is no directory"):
            Drill(place, job="a:job")
    assert (tmp_path / "other" / "mine").exists()


@pytest.mark.parametrize("place", ["checkpoint/rewind/changelog/0", "results", "errors"])
def test_what_a_zombie_writes_or_touches_fails_the_drill(tmp_path: Path, place: str) -> None:
    drill, out = Drill(tmp_path / "out", job=f"{SCRIPT}:job"), tmp_path / "out" / "zombies"
    mine = drill.out / "control" / place / "batch=1"
    mine.mkdir(parents=True)
    (mine / "rows").write_bytes(b"1")
    shutil.copytree(drill.out / "control", out)
    run = Run(events=[{"event": "zombies", "at": 1.0, "outcomes": {"0": "StateAhead"}}])
    assert drill._zombies(out, run) == ""
    what = Path(place).name if place != "checkpoint/rewind/changelog/0" else "changelog"
    (out / place / "batch=1" / "rows").touch()  # the same bytes again
    assert drill._zombies(out, run) == f"a zombie wrote to {what}"
    shutil.rmtree(out)
    shutil.copytree(drill.out / "control", out)
    (out / place / "batch=2").mkdir()
    (out / place / "batch=2" / "rows").write_bytes(b"")
    assert drill._zombies(out, run) == f"a zombie wrote to {what}"
    run.events[0]["outcomes"] = {"0": "StateAhead", "1": "no error"}
    assert "not refused: {'1': 'no error'}" in drill._zombies(out, run)


def test_times_losses_and_digests_are_told(tmp_path: Path) -> None:
    data, text = page(tmp_path)
    times = [tuple(one[name] for name in ("detect_s", "restore_s", "first_s", "rto_s")) for one in data["scenarios"]]
    assert times == [(0.5, 0.5, 2.5, 4.0)] * 2  # from 105 to 105.5, 107.5 and 109, by hand
    assert "1 of 2 scenarios FAILED" in text
    assert "2.5 s" in text
    assert "4.0 s" in text
    assert "1 lost" in text
    same, other = "00000000000000ff 0000000000000010", "00000000000000fe 0000000000000010"
    assert (text.count(same), text.count(other)) == (3, 1)
    assert text.count("DIFFERENT") == 1


def test_hostile_keys_are_text_and_the_page_is_whole(tmp_path: Path) -> None:
    _, text = page(tmp_path)
    tags: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append(tag)
            assert not any(name.startswith("on") or name in ("src", "href") for name, _ in attrs), (
                "and needs no other file"
            )

    Tags().feed(text)
    assert "url(" not in text and "@import" not in text
    assert not {"script", "img"} & set(tags)
    assert text.count("&lt;script&gt;") >= 5
    assert not [character for character in text if character in "\x1b\x07\x9b\u202e\u2028"]


def test_at_80_columns_every_scenario_has_its_whole_name(tmp_path: Path) -> None:
    data, _ = page(tmp_path)
    longest = {**data["scenarios"][0], "name": "lose-executor-with-snapshots", "restore_s": 12.3, "detect_s": 12.3}
    out = io.StringIO()
    show_drill(Console(file=out, width=80), {"scenarios": [longest]})
    assert "lose-executor-with-snapshots " in out.getvalue()
    assert "12.3 s" in out.getvalue()
    assert max(map(len, out.getvalue().splitlines())) <= 80


def test_a_job_that_fails_by_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drill = Drill(tmp_path / "out", job="my.jobs:late")
    monkeypatch.setattr(drill, "_ready", lambda: None)
    monkeypatch.setattr(drill, "_follow", lambda runner, run, out: setattr(run, "error", "KeyError: 'origin'"))
    with pytest.raises(UserCodeFailed, match=r"fails without being broken.*KeyError: 'origin'.*run the job by itself"):
        drill.control()


def test_the_broken_builds_break_what_is_there(tmp_path: Path) -> None:
    """Python goes on without a `sitecustomize` that raises: the drill would pass, and its test fail an hour later."""
    root = Path(__file__).resolve().parents[2]
    where = root / "tests" / "spark" / "broken_builds"
    env = {**os.environ, "PYTHONPATH": f"{where}:{root}", "REWIND_TEST_DEFECT": str(tmp_path / "defect")}
    command = [
        sys.executable,
        "-c",
        "import sitecustomize as s; assert s.__file__ == r'%s'" % (where / "sitecustomize.py"),
    ]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
