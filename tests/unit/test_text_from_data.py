"""Text that comes from data decides nothing, names nothing, and marks nothing up."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from pyspark.serializers import CloudPickleSerializer
from rich.console import Console

from backend.boundary import OPTION, CrossedError, crossing, crossing_reader, named_in, token, user_code
from backend.errors import HistoryLost, RewindError, StateUnavailable, StorageFailed, UserCodeFailed
from backend.kafka_client.settings import KafkaSettings
from backend.sources.kafka_reader import KafkaStreamReader
from backend.spark.reading import with_read
from recovery.drill.report import show_drill
from recovery.failures import Kind, read
from recovery.inspect import report
from recovery.inspect.displays import ProgressListener
from recovery.inspect.verify import PROBLEM, Finding
from recovery.listener import LoggingListener, Restoring
from recovery.operate import by_reason
from recovery.supervise.metrics import ProgressCollector
from recovery.supervise.supervisor import Progress

HOSTILE = "a[/x] [link=http://h]b[/link] [bold]c \x1b]8;;http://h\x07d\x1b[2J \u202eefg\u2028 \x9b1m :boom:"
SHOWN = r"a[/x] [link=http://h]b[/link] [bold]c \x1b]8;;http://h\x07d\x1b[2J \u202eefg\u2028 \x9b1m :boom:"


def drawn(draw: Callable[[Console], object]) -> str:
    """Draw on a wide terminal of one colour, so that every escape in the output is data's."""
    out = io.StringIO()
    draw(Console(file=out, force_terminal=True, no_color=True, width=4000, color_system=None))
    return out.getvalue()


SHARD: dict[str, Any] = {
    "shard": 0,
    "version": 1,
    "commit": None,
    "batch_time": None,
    "windows": None,
    "rows": {},
    "messages": 0,
    "changelog": {"records": 0, "bases": 0, "bytes": 0},
    "queue": {"micro_batches": 2, "bytes": 7},
    "snapshots": {"count": 0, "bytes": 0},
    "local": None,
    "positions": [{"stream": 0, "topic": HOSTILE, "partition": 0, "next_offset": 1, "stream_time": HOSTILE}],
    "problem": {"code": "X", "what": HOSTILE, "where": "", "why": "", "next": ""},
}
CHECKPOINT = {
    "checkpoint": HOSTILE,
    "query_id": HOSTILE,
    "committed_micro_batches": None,
    "changelog": HOSTILE,
    "lag": None,
}
SCENARIO = {
    "name": HOSTILE,
    "passed": False,
    "why": HOSTILE,
    "detect_s": None,
    "restore_s": None,
    "rto_s": None,
    "rpo": None,
    "proof": None,
    "must_end_in": None,
    "error": None,
}


@pytest.mark.parametrize(
    "draw",
    [
        lambda console: report.show_rows(console, [{"key": HOSTILE, "start": HOSTILE}]),
        lambda console: report.show_rows(console, [{HOSTILE: 1}]),
        lambda console: report.show_findings(console, report.findings_json([Finding(PROBLEM, *[HOSTILE] * 4)])),
        lambda console: report.show_checkpoint(console, {**CHECKPOINT, "shards": [SHARD]}),
        lambda console: report.show_reset(
            console,
            {"dry_run": True, "deleted": [{"path": HOSTILE, "bytes": 1}], "kept": [HOSTILE], "offsets": [HOSTILE]},
        ),
        lambda console: show_drill(console, {"scenarios": [SCENARIO]}),
    ],
)
def test_what_is_drawn_shows_data_as_it_is(draw: Callable[[Console], object]) -> None:
    text = drawn(draw)
    assert SHOWN in text
    assert not [character for character in text if character in "\x1b\x07\x9b\u202e\u2028"]


def test_a_progress_bar_shows_data_as_it_is() -> None:
    out = io.StringIO()
    listener = ProgressListener(Console(file=out, width=4000, color_system=None))
    restoring = Restoring(0, "c", HOSTILE, "replay", records=1)
    listener.start(restoring)
    listener.suspended(restoring, HOSTILE)
    assert SHOWN in out.getvalue()
    assert "\x07" not in out.getvalue()


def test_a_log_line_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LoggingListener().start(Restoring(0, "c", "why\nrewind.restore: restored all\x1b[2J", "replay"))
        LoggingListener().suspended(Restoring(0, "c", "", "replay"), "why\nrestored")
    assert [record.getMessage() for record in caplog.records] == [
        r"restoring shard 0 by replay to c: why\nrewind.restore: restored all\x1b[2J",
        r"restore of shard 0 by replay suspended: why\nrestored",
    ]
    told = str(HistoryLost("gone", why="a\nb\x1b[2J"))
    assert told == r"[rewind:HistoryLost] gone; why: a\nb\x1b[2J; next: see docs/errors.md#historylost"


def test_reasons_of_a_function_make_a_bounded_number_of_metrics() -> None:
    reasons = pa.table({"reason": ["late", *(f"no. {n}" for n in range(1000)), None, "late"]})
    assert by_reason("results", reasons) == {"results_late": 2, "results_other": 1001}
    assert by_reason("results", pa.table({"reason": [1, 2]})) == {"results_other": 2}
    assert by_reason("errors", pa.table({"x": [1]})) == {}


def test_names_of_stores_make_names_that_prometheus_takes() -> None:
    metrics = {"a.b\n{x}": 1, "a_b__x_": 2, "commit": "text", "drained": 3}
    registry = CollectorRegistry()
    registry.register(ProgressCollector(lambda: Progress(last=[{"shard": 0, "metrics": metrics}])))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    assert [line for line in lines if line.startswith("rewind_shard")] == ['rewind_shard_a_b__x_{shard="0"} 3.0']


def raised(function: Callable[[], object]) -> str:
    """Return what Spark brings to the driver: the traceback as text, which its worker sends as UTF-8."""
    try:
        crossing(function)()
    except Exception:
        return traceback.format_exc().encode("utf-8").decode("utf-8")
    raise AssertionError


def lost() -> None:
    raise HistoryLost("offsets are gone", where='t-0 "x"', why="a\nb", command="put them back")


def test_a_named_error_crosses_with_all_its_parts() -> None:
    named = named_in(raised(lost))
    assert isinstance(named, HistoryLost)
    assert (named.what, named.where, named.why, named.command) == (
        "offsets are gone",
        't-0 "x"',
        "a\nb",
        "put them back",
    )

    def rows() -> Any:
        yield 1
        lost()

    def full() -> None:
        raise OSError(28, "No space left on device", "/disk/file")

    with pytest.raises(CrossedError) as caught:
        list(crossing(rows)())
    assert isinstance(named_in(str(caught.value)), HistoryLost)
    named = named_in(raised(full))
    assert isinstance(named, StorageFailed)
    assert named.where == "/disk/file"


def test_only_this_process_s_mark_counts_and_only_whole() -> None:
    text = raised(lost)
    code = f"import sys; from backend.boundary import named_in; sys.exit(named_in({text!r}) is not None)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert named_in(text.replace(token(), "0" * 32)) is None
    assert named_in(text.rstrip()[:-5]) is None
    assert named_in(f"x [rewind-mark-1 {token()}] " + json.dumps({"code": "HistoryLost"})) is None
    parts = {"code": "HistoryLost", "what": "", "where": "", "why": "", "command": ""}
    assert named_in(f"[rewind-mark-1 {token()}] {json.dumps(parts)}") is not None, "but for the token it were one"


def test_a_mark_inside_what_a_user_s_function_says_is_its_text() -> None:
    def function() -> None:
        with user_code("the function"):
            raise ValueError(raised(missing))

    def missing() -> None:
        raise StateUnavailable("no local state")

    named = named_in(raised(function))
    assert isinstance(named, UserCodeFailed)
    assert read(RuntimeError(raised(function))).kind is Kind.FINAL


class Mute(Exception):
    def __str__(self) -> str:
        raise LookupError("nothing")


@pytest.mark.parametrize(
    ("error", "why"),
    [(Mute(), "it cannot say: LookupError"), (SystemExit(3), "3"), (ValueError("\ud800\n"), r"\ud800\n")],
)
def test_whatever_a_user_s_function_raises_has_a_name(error: BaseException, why: str) -> None:
    """A worker that exits would be taken for one that died, and started again until patience ends."""

    def function() -> None:
        with user_code("the function"):
            raise error

    named = named_in(raised(function))
    assert isinstance(named, UserCodeFailed) and named.why == why
    assert read(RuntimeError(raised(function))).kind is Kind.FINAL


def test_an_error_without_a_name_can_be_sent_too() -> None:
    """PySpark's worker would die while it tells of it, and the query start again until patience ends."""

    def function() -> None:
        raise ValueError("half of a pair: \ud800")

    text = raised(function)
    assert named_in(text) is None
    assert r"half of a pair: \ud800" in text
    assert f'File "{__file__}"' in text, "the traceback says still where it was"


def test_a_user_s_function_keeps_the_errors_of_the_stores_that_it_was_given() -> None:
    def function() -> None:
        with user_code("the function"):
            lost()

    with pytest.raises(HistoryLost):
        function()


class Reader:
    def latestOffset(self, start: dict[str, Any], limit: object) -> dict[str, Any]:
        lost()
        return start


def test_a_reader_s_errors_cross_where_its_options_carry_the_token() -> None:
    import inspect

    reader = crossing_reader(Reader(), {OPTION: token()})
    assert list(inspect.signature(reader.latestOffset).parameters) == ["start", "limit"], "Spark looks at it"
    with pytest.raises(CrossedError) as caught:
        reader.latestOffset({}, None)
    assert isinstance(named_in(str(caught.value)), RewindError)
    with pytest.raises(HistoryLost):
        crossing_reader(Reader(), {}).latestOffset({}, None)


def test_a_task_gets_of_a_topic_s_reader_only_what_reads() -> None:
    """Each task unpickles it: methods that plan are wrapped on the driver alone, and errors of `read` cross as ever."""
    plain = KafkaStreamReader(KafkaSettings("h:1"), ("t",), "read_committed", None, 1000)
    there = crossing_reader(with_read(plain, lambda _: lost(), 1000), {OPTION: token()})
    assert {"latestOffset", "partitions"} <= vars(there).keys()
    here = CloudPickleSerializer().loads(CloudPickleSerializer().dumps(there))
    assert vars(here).keys() == {"read", *vars(plain)} - {"_admin"}
    with pytest.raises(CrossedError) as caught:
        here.read(None)
    assert isinstance(named_in(str(caught.value)), RewindError)
