"""What does not pass by itself, by name and soon: refused credentials or rights, and topics that are not there.

A client whose credentials are refused goes on trying, and its requests end when their time is over, as if no broker had
answered. That it was refused, it says beside them (librdkafka's `error_cb`), and only while it is polled. So clients
are made with an ear (`hearing`), and who waits for an answer polls, and gives up when no answer came for `REFUSED_S`
after a refusal: where one of several brokers refuses, another may answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from backend.errors import AccessRefused, RewindError, TopicMissing
from backend.kafka_client.settings import RIGHTS
from backend.texts import one_line

if TYPE_CHECKING:
    from concurrent.futures import Future

REFUSALS = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
"""Codes of refused credentials and rights."""
MISSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
"""Codes of a topic that is not there."""
REFUSED_S = 2.0
_BROKE = "Local: Broker transport failure"
"""What librdkafka calls a refusal as well: the connection broke while it introduced itself."""
LOOK_S = 0.5
LONGEST_LOOK_S = 16.0

T = TypeVar("T")


class ClientErrors:
    """What a client said beside its answers since a request began; called by the client.

    Attributes:
        last: The newest error of all, "" for none: why there is no answer, perhaps.
    """

    def __init__(self) -> None:
        self.last = ""
        self._refusal: tuple[float, Any] | None = None

    def __call__(self, error: Any) -> None:
        """Take note of an error."""
        if error.code() == KafkaError._ALL_BROKERS_DOWN and self.last:
            return  # said behind what says why
        self.last = str(error.str())
        if error.code() == KafkaError._AUTHENTICATION and self._refusal is None and _BROKE not in self.last:
            self._refusal = time.monotonic(), error

    def begin(self, client: Any = None) -> None:
        """Forget what was said: an answer came, or a request of a client begins.

        A client that was kept has not been polled since its last request, and tells only then what it heard meanwhile:
        that is heard first, and forgotten. A consumer must have nothing assigned.
        """
        if client is not None:
            client.poll(0)
        self.last, self._refusal = "", None

    def refusal(self) -> Any:
        """Return the error of a client that was refused, and had no answer for a while since; None without one."""
        if self._refusal is None or time.monotonic() - self._refusal[0] < REFUSED_S:
            return None
        return self._refusal[1]

    def check(self) -> None:
        """Check that there is no `refusal`.

        Raises:
            KafkaException: There is.
        """
        refusal = self.refusal()
        if refusal is not None:
            raise KafkaException(refusal)


def hearing(kind: type, configuration: Mapping[str, Any]) -> Any:
    """Make a client of confluent-kafka that has a `ClientErrors` as `errors`.

    Args:
        kind: `Consumer`, `Producer` or `AdminClient`.
        configuration: librdkafka's.

    Raises:
        ValueError: It takes none of it: a file that is no certificate, a wrong password of a key.
    """
    try:
        return _with_an_ear(kind)(configuration)
    except KafkaException as error:
        if error.args[0].code() != KafkaError._INVALID_ARG:
            raise
        why = hidden(str(error.args[0].str()), configuration)
        raise ValueError(
            f"servers={configuration.get('bootstrap.servers')!r}: no client takes the settings: {one_line(why)}"
        ) from None


def hidden(text: str, configuration: Mapping[str, Any]) -> str:
    """Return a client's text without the passwords of its configuration."""
    for name, secret in configuration.items():
        text = text.replace(str(secret), "***") if "password" in name and secret else text
    return text


@cache
def _with_an_ear(kind: type) -> type:
    class Hearing(kind):  # type: ignore[misc]
        def __init__(self, configuration: Mapping[str, Any]) -> None:
            self.errors = ClientErrors()
            super().__init__({**configuration, "error_cb": self.errors})

        def __bool__(self) -> bool:
            return True  # confluent-kafka's are false while nothing waits in them: `self._client or made()` makes anew

    return Hearing


def answer(admin: Any, asked: Future[T], timeout_s: float) -> T:
    """Wait for the answer to a question.

    Args:
        admin: The `AdminClient` that was asked, with an ear.
        asked: What it gave.
        timeout_s: How long to wait.

    Raises:
        KafkaException: The answer; or the client is refused.
        TimeoutError: None in time.
    """
    deadline = time.monotonic() + timeout_s
    admin.errors.begin(admin)
    while True:
        left_s = deadline - time.monotonic()
        try:
            return asked.result(max(0.0, min(LOOK_S, left_s)))
        except TimeoutError:
            admin.poll(0)
            admin.errors.check()
            if left_s <= LOOK_S:
                raise TimeoutError(_silence(admin.errors)) from None


def in_pieces(client: Any, ask: Callable[[float], T], timeout_s: float) -> T:
    """Call what blocks a client's thread in pieces of its time, each longer than the one before.

    Args:
        client: With an ear.
        ask: Takes seconds; asked again, or resumed, when they are over.
        timeout_s: In all.

    Raises:
        KafkaException: The answer; or the client is refused.
    """
    deadline = time.monotonic() + timeout_s
    piece_s = LOOK_S
    client.errors.begin()
    while True:
        left_s = deadline - time.monotonic()
        began = time.monotonic()
        try:
            return ask(max(0.001, min(piece_s, left_s)))
        except KafkaException as error:
            silent = (KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
            over = error.args[0].retriable() or error.args[0].code() in silent
            client.poll(0)
            client.errors.check()
            if not over or left_s <= piece_s or time.monotonic() - began < min(piece_s, left_s) / 2:
                raise _explained(error, client.errors) from None  # what came at once is for the caller to judge
        piece_s = min(piece_s * 2, LONGEST_LOOK_S)


def named(
    otherwise: type[RewindError],
    what: str,
    *,
    where: str,
    why: str,
    error: Exception,
    command: str,
    may_come: bool = False,
) -> RewindError:
    """Return a client's error by name.

    Args:
        otherwise: What it is where it may pass.
        what: What happened then.
        where: Servers and topics, or topic and partition.
        why: The error's text, without secrets.
        error: A `KafkaException` or a `TimeoutError`.
        command: What helps then.
        may_come: Whether a topic that is not there may be there later: the next start makes it, or it was only now
            that a broker did not know it.
    """
    why = why or "no answer in time"
    code = error.args[0].code() if isinstance(error, KafkaException) else None
    if code in REFUSALS:
        return AccessRefused(
            "the Kafka cluster refuses this client, or does not let it do what it must",
            where=where,
            why=why,
            command=RIGHTS,
        )
    if not may_come and code in MISSING:
        return TopicMissing(
            "a topic is not there",
            where=where,
            why=why,
            command="check the topic's name and the servers; what follows when a topic is deleted: docs/kafka.md",
        )
    return otherwise(what, where=where, why=why, command=command)


def _explained(error: Any, errors: ClientErrors) -> Any:
    """Return a client's error with what it said beside it."""
    about = error.args[0]
    if not errors.last:
        return KafkaException(about)
    text = f"{about.str()}; the client says: {errors.last}"
    return KafkaException(KafkaError(about.code(), text, about.fatal(), about.retriable()))


def _silence(errors: ClientErrors) -> str:
    return f"no answer in time; the client says: {errors.last}" if errors.last else "no answer in time"
