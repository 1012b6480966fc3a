"""A bad option is a `ValueError` that names it, at once: no Spark is started and nothing is made on disk."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from backend import archive, count, join, kafka, kafka_sink, mean, session, stream, tumbling
from backend.errors import KeyInvalid, RewindError, ValueInvalid
from backend.joins.fields import read_on
from backend.sinks import parquet_sink
from backend.spark.stream import Known
from backend.windows.spec import window_spec
from recovery.files import check_place
from recovery.listener import LoggingListener

SOURCE = archive("data", value="user string, price double")
JOB = stream(SOURCE, key="user").window(tumbling("1 minute"), retention="1 hour").aggregate(n=count())


class Column:
    """As pyspark's: iterating over it is an error of its own."""

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("Column is not iterable")


class DataFrame:
    """As pyspark's, as far as a careless check would look."""

    isStreaming = True  # noqa: N815


def _start(**options: Any) -> Any:
    places = {"checkpoint": "cp", "results": "out", "errors": "bad"}
    return JOB.start(None, **(places | options))  # type: ignore[arg-type]


def _start_kafka(results: str = "r", changelog: str | None = None) -> Any:
    """Topics of one cluster, by one server of two."""
    source = kafka("t", servers="a:1,b:1", value="user string, price double")
    job = stream(source, key="user").window(tumbling("1 minute"), retention="1 hour").aggregate(n=count())
    return job.start(None, checkpoint="cp", sink=kafka_sink(results, "e", servers="b:1"), changelog=changelog)  # type: ignore[arg-type]


def _window(**options: Any) -> Any:
    return window_spec(tumbling("1 minute"), SCHEMA, {"n": count()}, **({"retention": "1 hour"} | options))


SCHEMA = pa.schema([("user", pa.string()), ("price", pa.float64())])

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a DataFrame": (lambda: stream(DataFrame()), "source="),  # type: ignore[arg-type]
    "a text for a source": (lambda: stream("clicks"), "source='clicks'"),  # type: ignore[arg-type]
    "a column for a key": (lambda: stream(SOURCE, key=Column()), "key="),  # type: ignore[arg-type]
    "a key twice": (lambda: stream(SOURCE, key=["user", "user"]), "key=['user', 'user']"),
    "a set of keys": (lambda: stream(SOURCE, key={"user", "price"}), "(a set has no order)"),  # type: ignore[arg-type]
    "a set of keys of windows": (lambda: _window(keys={"user", "price"}), "(a set has no order)"),
    "a dictionary of keys": (lambda: _window(keys={"user": 1}), "keys={'user': 1}"),
    "keys that are read once": (lambda: _window(keys=iter(["user"])), "keys="),
    "a number for keys": (lambda: _window(keys=0), "keys=0"),
    "an empty name of a key": (lambda: _window(keys=[""]), "keys=['']"),
    "a key of numbers": (lambda: stream(SOURCE, key=[1]), r"key=[1]"),  # type: ignore[list-item]
    "an event time of numbers": (lambda: stream(SOURCE, event_time=5), "event_time=5"),  # type: ignore[arg-type]
    "a text for an aggregate": (
        lambda: stream(SOURCE).window(tumbling("1 s"), retention=0).aggregate(x="count"),  # type: ignore[arg-type]
        "aggregates['x']: 'count'",
    ),
    "no aggregate": (lambda: stream(SOURCE).window(tumbling("1 s"), retention=0).aggregate(), "aggregate()"),
    "an unknown field": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"m": mean("pryce")}, retention=0),
        "aggregates['m']: mean of unknown field 'pryce'; allowed are price, user",
    ),
    "a number for a field": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"m": mean(1.5)}, retention=0),  # type: ignore[arg-type]
        "aggregates['m']: mean of unknown field 1.5; allowed are price, user",
    ),
    "a list for a field": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"m": mean([])}, retention=0),  # type: ignore[arg-type]
        "aggregates['m']: mean of unknown field []; allowed are price, user",
    ),
    "two results that differ in case": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"a": count(), "A": count()}, retention=0),
        "the result name 'a' is taken already (a and A",
    ),
    "a result that differs from the key in case": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"User": count()}, keys=["user"], retention=0),
        "the result name 'User' is taken already (a and A",
    ),
    "a key like a column of ours in another case": (
        lambda: window_spec(
            tumbling("1 s"), pa.schema([("Reason", pa.string())]), {"n": count()}, keys=["Reason"], retention=0
        ),
        "keys: 'Reason' is taken already",
    ),
    "keys that differ in case": (
        lambda: window_spec(
            tumbling("1 s"), pa.schema([(k, pa.string()) for k in "aA"]), {"n": count()}, keys=["a", "A"], retention=0
        ),
        "keys: 'a' is taken already",
    ),
    "a result like a column of sinks in another case": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"Version": count()}, retention=0),
        "the result name 'Version' is taken already",
    ),
    "a result like what a session stores": (
        lambda: window_spec(session("1 s"), SCHEMA, {"_last": mean("price")}, retention=0),
        "the result name '_last' is taken already",
    ),
    "an aggregate of a column of ours": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"m": mean("_before")}, retention=0),
        "aggregates['m']: the fields ['_before'] are reserved",
    ),
    "a duration of nothing": (lambda: _window(retention="-"), "retention='-'"),
    "no time to be idle": (lambda: _window(idle_after="0 s"), "idle_after='0 s'"),
    "an archive without its package": (lambda: archive("foo://x", value="a int"), "path='foo://x'"),
    "no retention": (lambda: _window(retention=None), "retention=None"),
    "a retention in words": (lambda: _window(retention="soon"), "retention='soon'"),
    "a retention by number for sessions by number": (
        lambda: window_spec(session(messages=3), SCHEMA, {"n": count()}, keys=["user"], retention_messages=5),
        "retention_messages=5",
    ),
    "policies as a dict": (lambda: _window(policies={"early": "1 s"}), "policies={'early': '1 s'}"),
    "an idle time below 0": (lambda: _window(idle_after=-1), "idle_after=-1"),
    "far future in words": (lambda: _window(max_ahead="far"), "max_ahead='far'"),
    "an archive nowhere": (lambda: archive(5, value="a int"), "path=5"),  # type: ignore[arg-type]
    "an archive of one topic as text": (lambda: archive("d", value="a int", topics="t"), "topics='t'"),
    "a value that is no text": (lambda: archive("d", value=None), "value=None"),  # type: ignore[arg-type]
    "a format nobody knows": (lambda: archive("d", value="a int", format="xml"), "format='xml'"),
    "no offsets per batch": (lambda: archive("d", value="a int", max_offsets_per_batch=0), "max_offsets_per_batch=0"),
    "topics of numbers": (lambda: kafka([1], servers="h:1", value="a int"), r"topics=[1]"),  # type: ignore[list-item]
    "results to the topic that is read": (
        lambda: _start_kafka(results="t"),
        "results='kafka://b:1/t': is the topic of topics='kafka://b:1/t'",
    ),
    "a changelog in the errors": (lambda: _start_kafka(changelog="kafka://c:1,b:1/e"), "changelog='kafka://b:1/e'"),
    "a changelog that is no topic": (lambda: _start_kafka(changelog="kafka://b:1/e e"), "changelog='kafka://b:1/e e'"),
    "a changelog without a port": (
        lambda: _start_kafka(changelog="kafka://b/e"),
        "changelog='kafka://b/e': servers='b'",
    ),
    "a value in bytes": (lambda: kafka("t", servers="h:1", value=b"a int"), "value=b'a int'"),  # type: ignore[arg-type]
    "a reader nobody has": (lambda: kafka("t", servers="h:1", value="a int", reader="x"), "reader='x'"),
    "a checkpoint of one process": (lambda: _start(checkpoint="memory://cp"), "checkpoint='memory://cp'"),
    "a checkpoint of an unknown protocol": (lambda: _start(checkpoint="foo://cp"), "checkpoint='foo://cp'"),
    "a checkpoint that is no path": (lambda: _start(checkpoint=5), "checkpoint=5"),
    "a checkpoint without a name": (lambda: _start(checkpoint=""), "checkpoint=''"),
    "a checkpoint with a password": (lambda: _start(checkpoint="ftp://me:secret@host/cp"), "ftp://me:...@host"),
    "a changelog of an unknown protocol": (lambda: _start(changelog="foo://x"), "changelog='foo://x'"),
    "a changelog of one process": (lambda: _start(changelog="memory://x"), "changelog='memory://x'"),
    "a changelog without a topic": (lambda: _start(changelog="kafka://host:1"), "changelog='kafka://host:1'"),
    "a changelog without servers": (lambda: _start(changelog="kafka:///topic"), "changelog='kafka:///topic'"),
    "results that are no path": (lambda: _start(results=5), "results=5"),
    "errors without a name": (lambda: _start(errors=""), "errors=''"),
    "results alone": (lambda: _start(errors=None), "results and errors"),
    "a sink that is none": (lambda: _start(results=None, errors=None, sink="topic"), "sink='topic'"),
    "a sink beside results": (lambda: _start(sink=object()), "sink"),
    "an option that is none": (
        lambda: JOB.options(shard=3).start(None, checkpoint="cp", results="out", errors="bad"),
        "shard=3",
    ),
    "a listener that is none": (lambda: _start(listeners=[print]), "listeners="),
    "a listener's class": (lambda: _start(listeners=[LoggingListener]), "listeners="),
    "no session": (lambda: _start(shards=2, listeners=[]), "spark=None: must be a SparkSession"),
    "a source in a join": (lambda: join(stream(SOURCE), SOURCE, on="user", within="1 s"), "right=ArchiveSource("),  # type: ignore[arg-type]
    "a result's name that is no text to others": (
        lambda: window_spec(tumbling("1 s"), SCHEMA, {"\udcff": count()}, retention=0),
        "the name '\\udcff' is not allowed",
    ),
    "results of a sink that are no path": (lambda: parquet_sink(None, "e"), "results=None"),  # type: ignore[arg-type]
    "a duration in other digits": (lambda: _window(retention="\u0663 s"), "retention='\u0663 s'"),
    "a name of spaces": (lambda: _start(name=" "), "name=' '"),
    "a local directory that is no path": (lambda: _start(local_dir=5), "local_dir=5"),
    "no shards": (lambda: _start(shards=0), "shards=0"),
    "a trigger in words": (lambda: _start(trigger="now"), "trigger='now'"),
    "an end that is none": (lambda: _start(until="now"), "until='now'"),
    "more rows to a batch than Spark takes": (lambda: _start(arrow_rows=2**31), "arrow_rows=2147483648: must be an"),
    "more shards than there can be": (lambda: _start(shards=4097), "shards=4097: must be an integer from 1 to 4096"),
    "more micro-batches than there can be": (lambda: _start(retain=10**30), f"retain={10**30}: must be an integer"),
    "more to queue than there can be": (lambda: _start(queue_bytes=2**63), f"queue_bytes={2**63}: allowed are 'off'"),
    "fields of process() as a number": (
        lambda: stream(SOURCE).process(print, result=SCHEMA, fields=0).make([SCHEMA], Known()),  # type: ignore[arg-type]
        "fields=0: must be the name of a field",
    ),
    "snapshots below 1": (lambda: _start(snapshots=0), "snapshots=0"),
    "a queue of nothing": (lambda: _start(queue_bytes=0), "queue_bytes=0: allowed are 'off' and"),
    "a queue in words": (lambda: _start(queue_bytes="1 GB"), "queue_bytes='1 GB'"),
    "more copies than one": (lambda: _start(standby=2), "standby=2: allowed are 0 and 1"),
    "a standby that is no number": (lambda: _start(standby=True), "standby=True: allowed are 0 and 1"),
    "copies of no snapshots": (lambda: _start(standby=1), "standby=1: copies are made of snapshots, which are off"),
    "a route nobody knows": (lambda: _start(route="hash"), "route='hash'"),
}


@pytest.mark.parametrize("call, named", REFUSED.values(), ids=REFUSED)
def test_a_bad_option_is_named_and_nothing_is_made(
    call: Callable[[], Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        call()
    assert named in str(caught.value)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_good_options_reach_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="spark=None"):  # the session that is not there: all else is fine
        _start(shards=2, listeners=[], name="n", local_dir="l", changelog="kafka://h:1/t", trigger="0 s")


@pytest.mark.parametrize("kind", [KeyInvalid, ValueInvalid])
def test_errors_about_values_are_value_errors(kind: type[RewindError]) -> None:
    error = kind("too long", where="a store")
    assert isinstance(error, ValueError) and isinstance(error, RewindError)
    name = kind.__name__
    assert str(error) == f"[rewind:{name}] too long; where: a store; next: see docs/errors.md#{name.lower()}"


def test_a_relative_path_means_what_it_meant_when_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert archive("data", value="a int").path == str(tmp_path / "data")
    assert check_place("cp", "checkpoint") == str(tmp_path / "cp")
    assert check_place("file:/cp", "checkpoint") == "file:/cp"
    assert check_place("file:///cp", "checkpoint") == "file:///cp"


def test_start_and_join_name_every_option_with_its_type_and_say_what_it_is():
    """Nothing hides behind `**options`: an editor completes them, a type checker checks them, `help` explains them."""
    from backend.joins.spec import join_spec
    from backend.spark.join import join
    from backend.spark.start import StartOptions
    from backend.spark.stream import Pipeline

    named = {
        Pipeline.start: set(StartOptions.__dataclass_fields__),
        join: set(inspect.signature(join_spec).parameters)
        - {"left_schema", "right_schema", "left_streams", "first_offsets", "stored_layout"},
    }
    for function, options in named.items():
        parameters = inspect.signature(function).parameters.values()
        assert all(one.kind is not inspect.Parameter.VAR_KEYWORD and one.annotation for one in parameters)
        assert options <= {one.name for one in parameters}
        assert all(f"            {name}: " in inspect.getdoc(function).replace("    ", " " * 12) for name in options)


class Field(str, Enum):  # noqa: UP042 - its text is another one than its value
    """Names as constants."""

    USER = "user"


def test_names_may_be_texts_of_a_class_of_their_own() -> None:
    names: dict[str, Any] = {"an enum": Field.USER, "a list of it": [Field.USER], "an array": np.array(["user"])}
    for what, given in names.items():
        assert stream(SOURCE, key=given).key == ("user",), what
        assert _window(keys=given).keys == ("user",), what
        assert read_on(given, SCHEMA, SCHEMA) == (("user", "user"),), what
        found = [*stream(SOURCE, key=given).key, *_window(keys=given).keys, *read_on(given, SCHEMA, SCHEMA)[0]]
        assert {type(name) for name in found} == {str}, what
