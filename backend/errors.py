"""Every error that Rewind raises by name.

An operational error says what happened, where, why, and which command to run next; the four parts are attributes, so
reports can show them apart, and they are joined into one message for logs; its first word, in brackets, is
`RewindError.code`. That word is for readers: from a task to the driver an error is known by a mark
(`backend.boundary`).
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from backend.texts import visible

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


_KINDS: dict[str, type[RewindError]] = {}
"""All of them by their codes."""


class RewindError(Exception):
    """Base of all named errors.

    Args:
        what: What happened, one sentence.
        where: The shard, file, topic or partition concerned; empty when it does not apply.
        why: What was found against what was expected; empty when `what` says it already.
        command: What to run next; by default `usual_command`, and where that is empty the message names the docs' page.

    The message is one line without control characters, whatever data stands in its parts.
    """

    usual_command: ClassVar[str] = ""
    """What to run next after most errors of the class."""

    def __init__(self, what: str, *, where: str = "", why: str = "", command: str = "") -> None:
        self.what, self.where, self.why, self.command = what, where, why, command or self.usual_command
        super().__init__(message_of(self.code, what, where, why, self.command))

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    @property
    def code(self) -> str:
        """The name of the error."""
        return type(self).__name__

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the four parts when a worker sends the error to the driver."""
        return _rebuild, (type(self), self.what, self.where, self.why, self.command)


def message_of(code: str, what: str, where: str, why: str, command: str) -> str:
    """Put the parts of an error together, on one line.

    >>> message_of("TopicMissing", "the topic does not exist", "h:1/t", "", "")
    '[rewind:TopicMissing] the topic does not exist; where: h:1/t; next: see docs/errors.md#topicmissing'
    """
    parts = [f"[rewind:{code}] {what}"]
    if where:
        parts.append(f"where: {where}")
    if why:
        parts.append(f"why: {why}")
    parts.append(f"next: {command or f'see docs/errors.md#{code.lower()}'}")
    return visible("; ".join(parts))


def _rebuild(kind: type[RewindError], what: str, where: str, why: str, command: str) -> RewindError:
    return kind(what, where=where, why=why, command=command)


class StateUnavailable(RewindError):
    """The state that the pointer names is not here; the supervisor restores it and starts again."""


class StateAhead(RewindError):
    """The local database is a descendant of the pointer: a zombie attempt, or Spark was rolled back."""


class StateCorrupted(RewindError):
    """Bytes on disk do not match their checksum, or cannot be decoded."""

    usual_command = "rewind verify <checkpoint>"


class UnknownFormat(RewindError):
    """A file, topic or manifest was written by a format version that this release does not know."""

    usual_command = "install the release that wrote it"


def unknown_format(what: str, found: str, read: object, where: str = "") -> UnknownFormat:
    """Make the error of what only another release reads.

    Args:
        what: What has an unknown format.
        found: Which one it has.
        read: Which ones this release reads.
        where: As in `RewindError`.
    """
    return UnknownFormat(what, where=where, why=f"{found}, this release reads {read}")


class StoreLocked(RewindError):
    """Another process holds the store's LOCK longer than the bound."""


class StoreClosed(RewindError):
    """A store was used after `close`."""


class KeyInvalid(RewindError, ValueError):
    """A key is None where it may not be, of a type without an order, or over the size bound."""


class ValueInvalid(RewindError, ValueError):
    """A value is of the wrong type or over the size bound."""


class BoundViolated(RewindError):
    """A write or a bound would go below what is already expired."""


class SourceWentBack(RewindError):
    """The source delivered an offset below the committed position: made again, or the wrong checkpoint."""


class OffsetsScattered(RewindError):
    """Offsets came in an order that leaves more gaps than a context remembers (`offsets="unordered"`)."""


class SourceGap(RewindError):
    """Offsets are missing, or step back, in a source that does not declare it."""


class SourceDamaged(RewindError):
    """A file of the source cannot be read: torn, or not what was written."""


class SourceInvalid(RewindError, ValueError):
    """A file of the source has other columns or types than its format allows, or belongs to another topic."""


class SourceUnavailable(RewindError):
    """The source does not answer, or an archive's directory does not exist."""


class TopicMissing(RewindError):
    """A topic that is read or written does not exist."""


class AccessRefused(RewindError):
    """A Kafka cluster refuses the credentials, or their rights."""


class HistoryLost(RewindError):
    """The source or the changelog no longer has what a restore needs."""


class RestoreMismatch(RewindError):
    """Count or digest of the replayed messages differ from the committed ones."""


class ChangelogDamaged(RewindError):
    """A changelog file or record is missing, truncated, or does not match its checksum."""

    usual_command = "rewind verify <checkpoint>"


class ChangelogUnavailable(RewindError):
    """The changelog cannot be reached or written now; what is in it is not in doubt."""


class SinkUnavailable(RewindError):
    """The output cannot be reached or written now; nothing of the micro-batch is visible, or all of it again later."""


class SinkConflict(RewindError):
    """Another writer has taken the output over, or more was published to it than the checkpoint knows of."""


class OutputDiffers(RewindError):
    """A micro-batch that ran again made other rows than those that it published before; Spark has not committed it."""


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

    unreadable = False
    """The disk does not give what lies on it: known where it was raised, not on the driver."""
    lasting = False
    """Somebody has to change a right or move a file: known where it was raised, too."""


class UserCodeFailed(RewindError):
    """A function of the user's raised; it is not tried again: the same messages would raise the same."""


class SparkUnavailable(RewindError):
    """Spark's processes died, or did not come up, for longer than the query's patience."""


class SelectorDisabled(RewindError):
    """`add_message` was called while a downstream refuses output (SAMZA-552)."""


class JarsUnavailable(RewindError):
    """Java, or jars that Kafka needs, are neither here nor can they be had."""


class BrokerUnavailable(RewindError):
    """No Kafka broker answers, or the one for tests cannot be started."""


class CheckpointInUse(RewindError):
    """A running query, or a command that changes state, holds the checkpoint's lease; nothing was made or changed."""


class CheckpointTaken(RewindError):
    """A newer start or command has taken the checkpoint over: this driver stops and publishes nothing more."""


class ResetInterrupted(RewindError):
    """A reset of the checkpoint was interrupted: what is left is no checkpoint any more."""


class QueryStopped(RewindError):
    """A bounded query was stopped before its end, or something was asked of a query that has ended."""


class RestoreFailed(RewindError):
    """The supervisor gave up restoring after its bounded tries."""


def code_of(line: str) -> str | None:
    """Return the code that a line begins with, as the message of a named error does; None for another line.

    For lines of our own processes, not for what Spark says: what a user's function raised stands in that.

    >>> code_of("[rewind:StateUnavailable] no local state; where: shard 3")
    'StateUnavailable'
    >>> code_of("ValueError: [rewind:StateUnavailable]") is None
    True
    """
    found = _CODE.match(line)
    return found.group(1) if found else None


def kind_of(code: str) -> type[RewindError]:
    """Give the class of a code; `RewindError` itself when the code is not known."""
    return _KINDS.get(code, RewindError)
