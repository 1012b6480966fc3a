"""A cluster that wants passwords and encrypts: every way in works, and nothing that is left behind holds a secret."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from typer.testing import CliRunner

from backend import kafka_sink
from backend.errors import AccessRefused
from backend.kafka_client.settings import MECHANISMS
from backend.sinks.kafka.delivery import Publication
from backend.sinks.kafka.sink import produce_frames
from backend.sources.kafka import kafka
from backend.sources.kafka_fetch import fetch
from backend.sources.kafka_watch import check_end
from recovery.changelog.kafka.log import KafkaChangelog
from recovery.cli import app
from recovery.demo.session import WORKERS
from recovery.drill.process import environment
from recovery.killpoints import order
from recovery.testing.broker import LocalBroker, answers
from recovery.testing.events import Topics
from tests.contracts.changelog import as_dict, changes, commit, record
from tests.kafka.test_kafka_sink import frame, read, results
from tests.kafka.test_kafka_stream import MINUTE, events, windows_of
from tests.support.packed import pack
from tests.support.parsed import replayed
from tests.support.waiting import until
from tests.unit.test_kafka_delivery import FRAMES

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

SECRET = "word-7"
"""Of the password `pa"ss\\word-7`, what no way of quoting changes."""
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("mechanism", "tls"), list(zip(MECHANISMS, [False, True, True], strict=True)))
def test_every_mechanism_serves_source_and_changelog(spark, secured_kafka_broker, mechanism, tls, capfd):
    settings = secured_kafka_broker.settings_with(mechanism=mechanism, tls=tls)
    assert settings.protocol == ("SASL_SSL" if tls else "SASL_PLAINTEXT")
    topics = Topics(settings)
    topic = topics.create()
    topics.produce(topic, [{"n": 1}])
    source = kafka(topic, servers=settings, value="n int")
    spark.sparkContext.setLogLevel("INFO")
    try:
        frame = replayed(spark, replace(source, reader="connector"), {(topic, 0): (0, 1)})
        assert [row.fields.n for row in frame.collect()] == [1]
        plan = frame._jdf.queryExecution().toString()
        frame = replayed(spark, source, {(topic, 0): (0, 1)})  # read in a Python worker, without our files
        assert [row.fields.n for row in frame.collect()] == [1]
        plan += frame._jdf.queryExecution().toString()
    finally:
        spark.sparkContext.setLogLevel("ERROR")
    log = KafkaChangelog(settings, f"{topic}-changelog")
    topics.adopt(f"{topic}-changelog")
    log.prepare(1)
    log.append(record(0), changes({b"\x03a": b"1"}))
    assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"1"}
    told = capfd.readouterr()
    said = told.out + told.err + plan + repr(source) + repr(log) + json.dumps(source.describe())
    assert "kafka" in said.lower()
    assert SECRET not in said
    log.rest()
    topics.close()


def test_without_the_authority_or_with_a_wrong_password_nobody_is_let_in_and_nothing_is_told(secured_kafka_broker):
    """The bounds of the requests are minutes: what is refused is told before."""
    encrypted = secured_kafka_broker.settings_with(tls=True)
    assert not answers(replace(encrypted, ca_file=None, tls=True), timeout_s=1)
    wrong = replace(encrypted, password="wr0ng-one")
    log = KafkaChangelog(wrong, "log")
    sink = kafka_sink("t", "u", servers=wrong)
    to = Publication(wrong, {"results": "t", "errors": "u"}, (), "q", {"t": 5000, "u": 5000}, MINUTE)
    row = {"shard": 0, "version": 3, "results": pack(pa.table({"n": [1, 2]})), "errors": None, "metrics": None}
    rows = pa.RecordBatch.from_pylist([row], schema=FRAMES)
    asked: dict[str, Callable[[], object]] = {
        "a source's topics": lambda: kafka("t", servers=wrong, value="n int").offsets(),
        "messages in a task": lambda: list(fetch(wrong.for_client(), "t", {0: (0, 5)})),
        "whether an end was cut off": lambda: check_end(wrong, ("t", 0), 5, 0),
        "a sink's topics": lambda: sink.open("q"),
        "a sink's producer": lambda: sink._writer.check(1),
        "a changelog's topic": lambda: log.check(1, new=True),
        "a changelog's ends": lambda: log.lost(0, commit(0), "0"),
        "rows of a task": lambda: list(produce_frames(iter([rows]), to=to, version=3)),
    }
    with ThreadPoolExecutor(len(asked)) as pool:
        waited = {what: pool.submit(ask) for what, ask in asked.items()}
        told = {what: one.exception(300) for what, one in waited.items()}
    for what, error in told.items():
        assert isinstance(error, AccessRefused), what
        assert "Authentication failed" in error.why, what
        assert "wr0ng-one" not in str(error), what
        assert encrypted.servers in error.where or error.where == "t-0", what
    log.rest()


class BrokerWithRights(LocalBroker):
    def _properties(self, folder: Path) -> str:
        authorizer = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        return super()._properties(folder) + (
            f"authorizer.class.name={authorizer}\nsuper.users=User:rewind;User:ANONYMOUS\n"  # the controller is nobody
        )


def test_the_rights_that_the_docs_name_are_enough() -> None:
    """None to a group: the client looks for its coordinator all the same, and is refused."""
    topic, transaction = ResourceType.TOPIC, ResourceType.TRANSACTIONAL_ID
    reads = ["READ", "DESCRIBE", "DESCRIBE_CONFIGS"]
    rights = [
        (topic, "in", reads),
        (topic, "log", [*reads, "WRITE", "DELETE", "CREATE"]),
        (transaction, "log", ["WRITE", "DESCRIBE"]),
        (topic, "out", [*reads, "WRITE"]),
        (topic, "bad", [*reads, "WRITE"]),
        (topic, "out-commits", [*reads, "WRITE", "CREATE"]),
        (transaction, "rewind-sink-out", ["WRITE", "DESCRIBE"]),
    ]
    with BrokerWithRights(users={"rewind": "r", "job": "j"}) as broker:
        topics = Topics(broker.settings)
        for name in ("in", "out", "bad"):
            topics.create(name=name)
            topics.produce(name, [{"n": 1}, {"n": 2}])
        bindings = [
            AclBinding(
                kind,
                name,
                ResourcePatternType.PREFIXED if kind is transaction else ResourcePatternType.LITERAL,
                "User:job",
                "*",
                AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for kind, name, operations in rights
            for operation in operations
        ]
        admin = AdminClient(broker.settings.for_client())
        for asked in admin.create_acls(bindings).values():
            asked.result(30)
        job = replace(broker.settings, username="job", password="j")
        asking = AdminClient(job.for_client())
        until(lambda: asking.list_topics("in", timeout=30).topics["in"].error is None, what="rights that count")
        assert kafka("in", servers=job, value="n int").offsets() == {("in", 0): (0, 2)}
        check_end(job, ("in", 0), 2, 0)
        assert sum(part.num_rows for part in fetch(job.for_client(), "in", {0: (0, 2)})) == 2
        log = KafkaChangelog(job, "log")
        log.prepare(1, new=True)
        log.append(record(0), changes({b"\x03a": b"1"}))
        assert as_dict(log.read(0, commit(0))) == {b"\x03a": b"1"}
        log._delete_below(0, 1)
        log.rest()
        sink = kafka_sink("out", "bad", servers=job)
        for _ in range(2):  # the second reads what the first committed
            sink.open("q")
            sink.finish([frame(0, 0, results(3))], 0)
        assert len(read(broker.settings, "out")) == 3
        topics.close()


@pytest.mark.long
def test_a_job_over_sasl_and_tls_killed_after_publishing_restores_and_tells_no_secret(
    secured_kafka_broker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = secured_kafka_broker.settings_with(tls=True)
    topics = Topics(settings)
    topic = topics.create()
    for name in ("windows", "errors"):
        topics.create(name=f"{topic}-{name}")
    topics.adopt(f"{topic}-changelog", f"{topic}-windows-commits")
    rows = events(400, seed=11)
    topics.produce(topic, [b"not json", *rows])
    secrets = {
        "REWIND_KAFKA_MECHANISM": settings.mechanism,
        "REWIND_KAFKA_USERNAME": settings.username,
        "REWIND_KAFKA_PASSWORD": settings.password,
        "REWIND_KAFKA_CA_FILE": settings.ca_file,
    }
    kill = {"REWIND_KILL": str(tmp_path / "order")}
    order(tmp_path / "order", "after_publish", 1)
    command = [sys.executable, "-m", "tests.support.secured_job", settings.servers, topic, str(tmp_path)]

    def run(name: str, more: dict[str, str]) -> tuple[int, str]:
        log = tmp_path / f"{name}.log"
        with log.open("wb") as out:
            done = subprocess.run(
                command,
                stdout=out,
                stderr=out,
                env=environment(WORKERS) | secrets | more,
                cwd=ROOT,
                timeout=280,
                check=False,
            )
        return done.returncode, log.read_text()

    code, text = run("first", kill | {"READER": "client"})
    assert code == -signal.SIGKILL, text[-3000:]
    assert (tmp_path / "checkpoint" / "offsets" / "1").exists()
    assert not (tmp_path / "checkpoint" / "commits" / "1").exists()
    before = read(settings, f"{topic}-windows")
    assert {row["version"] for row in before} == {0, 1}, "what was published before the kill is out"
    shutil.rmtree(tmp_path / "local")
    code, text = run("second", {"READER": "connector"})
    assert code == 0, text[-3000:]
    assert "restores: 1" in text
    out = read(settings, f"{topic}-windows")
    assert len({row["id"] for row in out}) == len(out)
    assert out[: len(before)] == before
    newest: dict[tuple[int, str], tuple[int, int, float]] = {}
    for row in out:  # one partition: revisions are in order
        newest[row["window_start"] // MINUTE * MINUTE, row["who"]] = (row["count"], row["total"], row["middle"])
    assert newest == windows_of(rows)
    (bad,) = read(settings, f"{topic}-errors")
    assert (bad["reason"], bad["value"]) == ("malformed", "bm90IGpzb24=")

    for name, value in secrets.items():
        monkeypatch.setenv(name, str(value))
    for words in (["inspect"], ["verify"], ["inspect", "--json"]):
        place = [str(tmp_path / "checkpoint"), "--local-dir", str(tmp_path / "local")]
        told = CliRunner().invoke(app, [words[0], *place, *words[1:]])
        assert told.exit_code == 0, told.output
        (tmp_path / f"{'-'.join(words)}.txt").write_text(told.output)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"first.log", "metadata", "manifest.json", "inspect.txt"} <= {path.name for path in files}
    assert any(path.parent.name == "offsets" for path in files)
    assert any("events" in path.parts for path in files)
    assert "sasl.jaas.config = [hidden]" in text, "Kafka's clients tell all their settings but the secret ones"
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    topics.close()
    assert os.environ["REWIND_KAFKA_PASSWORD"] == settings.password
