"""Every error that Rewind raises by name.

An operational error says what happened, where, why, and which command to run next; the four parts are attributes, so
reports can show them apart, and they are joined into one message for logs. Spark carries only the text of a Python
exception from a task to the driver: `RewindError.code` is the first word of the message, in brackets, and
`code_in(text)` finds it again on the driver's side.
"""

from __future__ import annotations

import re

import msgspec

UNDECODABLE = (
    msgspec.MsgspecError,
    ValueError,  # UnicodeDecodeError, json's, and Arrow's ArrowInvalid among them
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,  # a length that lies: Arrow asks for all of it at once
)
"""What decoders raise for bytes that are not theirs: caught around a decoder, and named."""

_CODE = re.compile(r"\[rewind:([A-Za-z]+)\]")


class RewindError(Exception):
    """Base of all named errors.

    Args:
        what: What happened, one sentence.
        where: The shard, file, topic or partition concerned; empty when it does not apply.
        why: What was found against what was expected; empty when `what` says it already.
        command: What to run next; empty when nothing helps but a change in code.
    """

    def __init__(self, what: str, *, where: str = "", why: str = "", command: str = "") -> None:
        self.what, self.where, self.why, self.command = what, where, why, command
        parts = [f"[rewind:{self.code}] {what}"]
        if where:
            parts.append(f"where: {where}")
        if why:
            parts.append(f"why: {why}")
        if command:
            parts.append(f"next: {command}")
        super().__init__("; ".join(parts))

    @property
    def code(self) -> str:
        """The name of the error, as `code_in` finds it in a text."""
        return type(self).__name__

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the four parts when a worker sends the error to the driver."""
        return _rebuild, (type(self), self.what, self.where, self.why, self.command)


def _rebuild(kind: type[RewindError], what: str, where: str, why: str, command: str) -> RewindError:
    return kind(what, where=where, why=why, command=command)


class StateUnavailable(RewindError):
    """The state that the pointer names is not here; the supervisor restores it and starts again."""


class StateAhead(RewindError):
    """The local database is a descendant of the pointer: a zombie attempt, or Spark was rolled back."""


class StateCorrupted(RewindError):
    """Bytes on disk do not match their checksum, or cannot be decoded."""


class UnknownFormat(RewindError):
    """A file, topic or manifest was written by a format version that this release does not know."""


class StoreLocked(RewindError):
    """Another process holds the store's LOCK longer than the bound."""


class StoreClosed(RewindError):
    """A store was used after `close`."""


class KeyInvalid(RewindError):
    """A key is None where it may not be, of a type without an order, or over the size bound."""


class ValueInvalid(RewindError):
    """A value is of the wrong type or over the size bound."""


class BoundViolated(RewindError):
    """A write or a bound would go below what is already expired."""


class SourceWentBack(RewindError):
    """The source delivered an offset below the committed position: made again, or the wrong checkpoint."""


class SourceGap(RewindError):
    """Offsets are missing, or step back, in a source that does not declare it."""


class SourceDamaged(RewindError):
    """A file of the source cannot be read: torn, or not what was written."""


class SourceUnavailable(RewindError):
    """The source does not answer, or one of its topics does not exist."""


class HistoryLost(RewindError):
    """The source or the changelog no longer has what a restore needs."""


class RestoreMismatch(RewindError):
    """Count or digest of the replayed messages differ from the committed ones."""


class ChangelogDamaged(RewindError):
    """A changelog file or record is missing, truncated, or does not match its checksum."""


class ChangelogUnavailable(RewindError):
    """The changelog cannot be reached or written now; what is in it is not in doubt."""


class SinkUnavailable(RewindError):
    """The output cannot be reached or written now; nothing of the micro-batch is visible, or all of it again later."""


class SinkConflict(RewindError):
    """Another writer has taken the output over, or more was published to it than the checkpoint knows of."""


class PointerDamaged(RewindError):
    """The pointer in Spark's state cannot be decoded."""


class ManifestMismatch(RewindError):
    """The job differs from the one that wrote the checkpoint in a way that cannot go on."""


class FrameDamaged(RewindError):
    """Messages on their way to a shard, or replayed for it, are not what was packed."""


class ControlDamaged(RewindError):
    """A request to a running query, such as to drain, cannot be read."""


class StorageFailed(RewindError):
    """A disk or filesystem refused: full, broken, not ours. What is committed is not touched; the job can go on."""


class SelectorDisabled(RewindError):
    """`add_message` was called while a downstream refuses output (SAMZA-552)."""


class JarsUnavailable(RewindError):
    """Java, or jars that Kafka needs, are neither here nor can they be had."""


class BrokerUnavailable(RewindError):
    """No Kafka broker answers, or the one for tests cannot be started."""


class RestoreFailed(RewindError):
    """The supervisor gave up restoring after its bounded tries."""


_KINDS: dict[str, type[RewindError]] = {}


def _register(kind: type[RewindError]) -> None:
    _KINDS[kind.__name__] = kind
    for child in kind.__subclasses__():
        _register(child)


def code_in(text: str) -> str | None:
    """Find the code of the first named error in a text, such as the message of Spark's exception.

    >>> code_in("org.apache.spark...: [rewind:StateUnavailable] no local state; where: shard 3")
    'StateUnavailable'
    >>> code_in("some other failure") is None
    True
    """
    found = _CODE.search(text)
    return found.group(1) if found else None


def kind_of(code: str) -> type[RewindError]:
    """Give the class of a code; `RewindError` itself when the code is not known."""
    if not _KINDS:
        _register(RewindError)
    return _KINDS.get(code, RewindError)
