"""A Kafka broker on this machine, started from its jars: no Docker, no Maven, no installation.

One process is broker and controller (KRaft). It lives in a temporary directory of its own, listens on free ports of
127.0.0.1, and goes with the process that started it, even when that one is killed: a guard process sees the end of its
standard input and cleans up.
"""

from __future__ import annotations

import logging
import os
import random
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from backend.errors import BrokerUnavailable
from backend.kafka_client.settings import KafkaSettings
from backend.spark.session import jars
from backend.texts import one_line
from recovery.testing.security import CA_FILE, add_scram_users, protocol, run_tool, sasl_properties, tls_properties

log = logging.getLogger("rewind.testing")

START_TIMEOUT_S = 60
START_TRIES = 3
BACKSLASH = "\\"
_LOG_LINES = 15
_PORTS = (15_000, 32_000)
_CHANCE = random.SystemRandom()
"""Processes of one test run may have seeded theirs alike."""

_GUARD = 'read -r line; [ "$line" = done ] || { kill -9 "$1" 2>/dev/null; sleep 0.2; rm -rf "$2"; }'


class Broker(Protocol):
    """A Kafka broker that tests talk to."""

    @property
    def settings(self) -> KafkaSettings:
        """How to connect."""

    @property
    def can_restart(self) -> bool:
        """Whether `kill` and `restart` work: not with somebody else's broker."""

    def kill(self) -> None:
        """End the broker at once, as a crash does."""

    def restart(self) -> None:
        """Kill the broker if it runs, and start it on the same ports with the same data."""


@dataclass(frozen=True, slots=True)
class ExternalBroker:
    """Somebody else's broker, named by `KAFKA_BOOTSTRAP_SERVERS` or started by testcontainers."""

    settings: KafkaSettings
    can_restart: bool = False

    def kill(self) -> None:
        """Refuse.

        Raises:
            BrokerUnavailable: Always.
        """
        raise BrokerUnavailable(
            "this broker is not ours to kill", where=self.settings.servers, command="use the fixture local_kafka_broker"
        )

    def restart(self) -> None:
        """Refuse, as `kill` does."""
        self.kill()


class LocalBroker:
    """A broker in a process of our own. Use as a context manager, or call `start` and `close`.

    Args:
        users: Name -> password; when given, clients must log in with SASL (PLAIN or SCRAM), and `settings` does so with
            PLAIN as the first.
        tls: Whether there is an encrypted listener too; see `settings_with`.
        heap: The JVM's `-Xmx`.
    """

    can_restart = True

    def __init__(self, *, users: dict[str, str] | None = None, tls: bool = False, heap: str = "256m") -> None:
        self._users = dict(users or {})
        self._tls = tls
        self._heap = heap
        self._folder: Path | None = None
        self._ports: tuple[int, int, int] = (0, 0, 0)
        self._cluster = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LocalBroker:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def settings(self) -> KafkaSettings:
        """How to connect; the ports are known once the broker started."""
        return self.settings_with()

    def settings_with(self, *, mechanism: str = "PLAIN", tls: bool = False) -> KafkaSettings:
        """Give how to connect by a SASL mechanism (where there are users), in the clear or encrypted.

        Raises:
            ValueError: `tls` of a broker without, or before it started.
        """
        if tls and (not self._tls or self._folder is None):
            raise ValueError("tls=True: the broker must be made with tls=True, and be started")
        servers = f"127.0.0.1:{self._ports[2 if tls else 0]}"
        authority = str(self._folder / CA_FILE) if tls and self._folder is not None else None
        if not self._users:
            return KafkaSettings(servers, ca_file=authority)
        name, password = next(iter(self._users.items()))
        return KafkaSettings(servers, mechanism=mechanism, username=name, password=password, ca_file=authority)

    @property
    def pid(self) -> int | None:
        """Process id of the running broker."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Format the storage on first use and start; returns when the broker answers.

        Raises:
            BrokerUnavailable: It did not come up; the end of its log is in the message. The data of a broker that ran
                before stays: `start` may be called again.
        """
        fresh = self._folder is None
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="rewind-kafka-"))
        try:
            for _ in range(START_TRIES):
                if fresh:  # ports stay once clients know them; a fresh broker may find them taken and picks others
                    self._ports = (_free_port(), _free_port(), _free_port())
                    self._format()
                if self._start_process():
                    if fresh and self._users:
                        add_scram_users(self.settings, self._users)
                    return
                self.kill()
            raise BrokerUnavailable(
                f"the local Kafka broker did not start in {START_TRIES} tries of {START_TIMEOUT_S} s",
                where="" if fresh else str(self._folder),
                why=self._log_end(),
                command="set KAFKA_BOOTSTRAP_SERVERS to a broker that runs, or install Docker",
            )
        except BaseException:
            self.kill()
            if fresh:  # data that clients may have written stays
                self.close()
            raise

    def kill(self) -> None:
        """End the broker with SIGKILL; its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._guard is not None:
            assert self._guard.stdin is not None
            with suppress(BrokenPipeError):  # the guard itself was killed
                self._guard.stdin.write(b"done\n")
                self._guard.stdin.close()
            self._guard.wait()
            self._guard = None

    def restart(self) -> None:
        """Kill the broker if it runs, and start it on the same ports with the same data."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the broker and remove its data; closing twice does nothing."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _format(self) -> None:
        """Write the configuration and format the storage directory."""
        assert self._folder is not None
        shutil.rmtree(self._folder / "data", ignore_errors=True)
        (self._folder / "server.properties").write_text(self._properties(self._folder))
        self._cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if self._cluster.startswith("-"):  # the tool would take it for an option
            self._cluster = "A" + self._cluster[1:]
        tool, properties = self._java("kafka.tools.StorageTool"), str(self._folder / "server.properties")
        run_tool(
            [*tool, "format", "-t", self._cluster, "-c", properties],
            "the local broker's storage could not be formatted",
            str(self._folder),
        )

    def _start_process(self) -> bool:
        """Start the process and its guard; True when the broker answers, False when it ended or is too slow."""
        assert self._folder is not None
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*self._java("kafka.Kafka"), str(self._folder / "server.properties")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # an interrupt at the terminal is for the tests, which then close the broker
            )
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "guard", str(self._process.pid), str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if answers(self.settings, timeout_s=2, cluster=self._cluster):  # another one may have the port
                return True
            time.sleep(0.1)
        return False

    def _java(self, main: str) -> list[str]:
        """Give the command line of one of Kafka's main classes; `KAFKA_OPTS` are for its JVM, as with its scripts."""
        class_path = jars.class_path(jars.resolve(jars.BROKER))
        return [
            jars.java(), f"-Xmx{self._heap}", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            *shlex.split(os.environ.get("KAFKA_OPTS", "")), "-Dorg.apache.logging.log4j.level=WARN",
            "-cp", class_path, main,
        ]  # fmt: skip

    def _properties(self, folder: Path) -> str:
        """Give the server's configuration: one node for everything, internal topics of one replica."""
        port, controller, encrypted = self._ports
        listeners = {"CLIENT": port} | ({"TLS": encrypted} if self._tls else {})
        addresses = ",".join(f"{name}://127.0.0.1:{number}" for name, number in listeners.items())
        kinds = "".join(f"{name}:{protocol(self._users, tls=name == 'TLS')}," for name in listeners)
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"{addresses},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": addresses,
            "listener.security.protocol.map": f"{kinds}CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "CLIENT",
            "log.dirs": folder / "data",
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 4,
            "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
            "group.initial.rebalance.delay.ms": 0,
            "broker.session.timeout.ms": 3000,  # a killed broker may come back under its name after this long
            "broker.heartbeat.interval.ms": 500,
            "log.initial.task.delay.ms": 1000,
            "log.cleaner.dedupe.buffer.size": 2 * 1024 * 1024,
            "num.network.threads": 2,
            "num.io.threads": 2,
        }
        settings |= sasl_properties(self._users, tuple(listeners))
        if self._tls:
            settings |= tls_properties(folder)
        return "".join(f"{name}={str(value).replace(BACKSLASH, BACKSLASH * 2)}\n" for name, value in settings.items())

    def _log_end(self) -> str:
        """Give the last lines of the broker's log, without secrets."""
        if self._folder is None or not (self._folder / "broker.log").exists():
            return "it logged nothing"
        lines = (self._folder / "broker.log").read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return self.settings.redact(" | ".join(lines)) or "it logged nothing"


def answers(settings: KafkaSettings, *, timeout_s: float, cluster: str | None = None) -> bool:
    """Tell whether a broker answers a metadata request: one of the cluster of this id, or any for None."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    try:
        client = AdminClient(settings.for_client() | {"log_level": 0})
        found = client.list_topics(timeout=timeout_s)
        return bool(found.brokers) and cluster in (None, found.cluster_id)
    except KafkaException:
        return False


def docker_answers() -> bool:
    """Tell whether a Docker engine answers here."""
    try:
        import docker
        import testcontainers.community.kafka  # noqa: F401
    except ImportError:
        return False
    try:
        client = docker.from_env(timeout=3)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


_OF_ONE_BROKER = {
    "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
    "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
    "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
}
"""Of a container: by default Kafka's log of transactions wants three brokers, so that no transaction ever begins."""


def open_broker() -> tuple[Broker, Callable[[], None]]:
    """Give a broker and how to end it: `KAFKA_BOOTSTRAP_SERVERS`, else testcontainers, else one from jars.

    Credentials for a broker of one's own come from `REWIND_KAFKA_*`.

    Raises:
        BrokerUnavailable: It does not answer or did not start.
        JarsUnavailable: Java or the jars are missing.
        ImportError: confluent-kafka is not installed.
    """
    if servers := os.environ.get("KAFKA_BOOTSTRAP_SERVERS"):
        settings = KafkaSettings.from_environment(servers)
        if not answers(settings, timeout_s=15):
            raise BrokerUnavailable("KAFKA_BOOTSTRAP_SERVERS names a broker that does not answer", where=servers)
        return ExternalBroker(settings), lambda: None
    if docker_answers():
        from testcontainers.community.kafka import KafkaContainer

        container = KafkaContainer().with_kraft()
        for name, value in _OF_ONE_BROKER.items():
            container.with_env(name, value)
        try:
            container.start(timeout=120)
            return ExternalBroker(KafkaSettings(container.get_bootstrap_server())), container.stop
        except Exception as error:  # no registry, no network, no room: docker and testcontainers have many kinds
            log.warning("Docker gives no broker, one from jars is started: %s", one_line(str(error)))
            with suppress(Exception):
                container.stop()
    broker = LocalBroker()
    broker.start()
    return broker, broker.close


def _free_port() -> int:
    """Find a free port below those that systems give to outgoing connections: it must be free again at a restart."""
    for _ in range(100):
        with socket.socket() as probe:
            number = _CHANCE.randrange(*_PORTS)
            try:
                probe.bind(("127.0.0.1", number))
            except OSError:
                continue
            return number
    raise BrokerUnavailable("no free port for a local broker", why=f"a hundred of {_PORTS} are taken")
