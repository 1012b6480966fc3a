"""What a failure is: to be restored, one that passes, or final. Told by what raised it, never by words in its text.

A failure reaches the driver as an exception of Python, of Spark around a chain of exceptions of the JVM, or both. What
counts in it:

* our own errors: as they are, or by the mark that crossed with them (`backend.boundary`);
* the classes of the JVM's chain. A `java.io.IOException` (a pipe to a dead worker or daemon, a worker that did not
  connect back, a full disk) is the host's doing, and passes; so is what Spark itself gives an SQLSTATE of a class of
  system errors (a shuffle file that vanished while it was renamed), and what Kafka's Java client calls retriable. That
  it was refused is final. What Spark finds in a new checkpoint came from a stopped query: a start has looked. Below an
  exception of Python code in a worker nothing counts: its text, and what its end did to pipes, may be anything;
* Spark's own sentence about an aborted stage, read by its grammar from its beginning, up to where a task's text begins.

Everything else is final: it is raised, and not tried again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

from backend.boundary import as_storage, named_in
from backend.errors import (
    AccessRefused,
    BrokerUnavailable,
    ChangelogUnavailable,
    PointerDamaged,
    RewindError,
    SinkUnavailable,
    SourceDamaged,
    SourceUnavailable,
    StateAhead,
    StateCorrupted,
    StateUnavailable,
    StorageFailed,
    StoreLocked,
    UserCodeFailed,
)
from backend.kafka_client.loss import named_loss
from backend.kafka_client.settings import RIGHTS
from backend.spark.session.jvm import gateway
from backend.texts import one_line

RESTORABLE = (StateUnavailable, StateCorrupted, StateAhead)
PASSING = (ChangelogUnavailable, SinkUnavailable, SourceUnavailable, StorageFailed, StoreLocked, BrokerUnavailable)
"""Named errors about what is not there now: a disk without room, a cluster that does not answer, a held lock."""
MAX_CHAIN = 32
_IO = "java.io.IOException"
_WAITED = "java.util.concurrent.TimeoutException"
"""What Spark's Kafka connector throws in a task when no record came, and Spark when a process did not answer."""
_UPLOADED = "org.apache.spark.sql.execution.streaming.state.StateStoreCheckpointLocationNotEmpty"
"""What ends a first micro-batch when a stopped query's snapshot came late; it is deleted before the next try."""
_KAFKA = "org.apache.kafka.common.errors."
_RETRIABLE = f"{_KAFKA}RetriableException"
_REFUSED = re.compile(r"org\.apache\.kafka\.common\.errors\.\w*(?:Authentication|Authorization)Exception")
_SYSTEM_ERRORS = ("08", "53", "58")
"""Classes of SQLSTATE: connections, insufficient resources, system errors (58030: input and output)."""
_PYTHON = "org.apache.spark.api.python.PythonException"
_SPARK = "org.apache.spark."
_UNREADABLE = "[FAILED_READ_FILE."
_LOADING = "[CANNOT_LOAD_STATE_STORE."
_STATE_CHECKSUM = "[CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED]"
_STATE_METADATA = "[STDS_FAILED_TO_READ_OPERATOR_METADATA]"
_NO_SNAPSHOT = "[CANNOT_LOAD_STATE_STORE.CANNOT_FIND_BASE_SNAPSHOT_CHECKPOINT]"
_LOG_FILE = re.compile(r".*/((?:offsets|commits)/\d+)(?![\w/.])", re.DOTALL)
_LOG = ("[MALFORMED_LOG_FILE]", "[STDS_OFFSET_LOG_UNAVAILABLE]", "Incomplete log file")
"""How Spark speaks of files of its log of micro-batches: it does not say which."""
_JSON = "com.fasterxml.jackson."
"""What such a file is read with."""
_STATE_FILE = r"/state/\d+(?:/(?:\d+|_metadata|_stateSchema)\b|(?![\w/]))"
_DAMAGED_FILES = {
    _IO: re.compile("Stream is corrupted|FAILED_TO_UNCOMPRESS|PARSING_ERROR"),
    "net.jpountz.lz4.LZ4Exception": re.compile(""),
    "com.github.luben.zstd.ZstdIOException": re.compile(""),
    "org.apache.hadoop.fs.ChecksumException": re.compile(""),
    "org.xerial.snappy.SnappyIOException": re.compile(""),
    "java.io.EOFException": re.compile("$|Unexpected end of ZLIB|Stream ended prematurely|[Rr]eached (the )?end of st"),
    "java.io.FileNotFoundException": re.compile(
        f".*{_STATE_FILE}.*(does not exist|No such file or directory|Is a directory)"
        f"|(File does not exist|No such file or directory): .*{_STATE_FILE}",
        re.DOTALL,
    ),
    "java.util.zip.ZipException": re.compile(""),
    "org.rocksdb.RocksDBException": re.compile("Corruption"),
}
"""What says that a file is damaged or gone, with the messages that do: not a right, too many open files, a disk."""
_IN_LOADING = {
    "java.lang.AssertionError": re.compile(""),
    "java.lang.IllegalStateException": re.compile("Cannot replay changelogs"),
    "java.lang.NullPointerException": re.compile("(?!.*SparkEnv)"),
    "org.apache.spark.SparkIllegalStateException": re.compile(""),
}
"""What Spark stumbles over in such files: a changelog without its head, versions that are missing, a file not there."""
_REMOTE = "org.apache.hadoop.ipc.RemoteException"
"""Below what HDFS says, once more as its server said it."""
_NETWORK = ("java.net.", "javax.net.")
_NO_FILESYSTEM = "org.apache.hadoop.fs.UnsupportedFileSystemException"
_HDFS_BROKE = "End of File Exception between"
_NO_ROOM = ("No space left on device", "Disk quota exceeded")
_NO_RIGHT = ("(Permission denied)", "(Read-only file system)")
_FORBIDDEN = frozenset({"org.apache.hadoop.security.AccessControlException", "java.nio.file.AccessDeniedException"})
_INTERRUPTED = (
    "java.lang.InterruptedException",
    "java.io.InterruptedIOException",
    "java.nio.channels.ClosedByInterruptException",
)
_CANCELLED = "[SPARK_JOB_CANCELLED]"
_ABORTED = re.compile(
    r"Job aborted due to stage failure: Task \d+ in stage [\d.]+ failed \d+ times, most recent failure:"
    r" Lost task [\d.]+ in stage [\d.]+ \(TID \d+\) \([^()]*\): (?P<kind>[\w.$]+)(?P<text>.*)",
    re.DOTALL,
)
_STAGE_LOST = re.compile(
    r"Job aborted due to stage failure: (?:"
    r"(?:ShuffleMapStage|ResultStage) \d+ \([^\n]*\) has (?:failed the maximum allowable number of times"
    r"|been resubmitted for the maximum allowable number of times|exceeded the maximum allowable total stage attempts)"
    r": \d+[.,]"
    r"|A shuffle map stage with indeterminate output was failed and retried\. However, Spark cannot rollback the "
    r"|Task with indeterminate results from old attempt succeeded, aborting the stage ResultStage \d+ to ensure"
    r"|cannot rollback (?:a running result stage|completed result stages [^\n]*), please re-run the query to ensure"
    r")"
)
"""Of stages run again, too often or with another output than other tasks have read: the whole micro-batch can be."""
_BOTH_PLANNED = "[CONCURRENT_STREAM_LOG_UPDATE]"
"""A driver that stood still has planned a micro-batch: the one that holds the lease goes on with it, the other ends."""
_WRAPPERS = ("[STREAM_FAILED]", "Job aborted due to stage failure: Task")
"""Messages of Spark that only say that something below failed."""
_LAST_LINE = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$", re.MULTILINE)


class Kind(Enum):
    """What is done about a failure."""

    RESTORE = "restore the state, then start again"
    PASSES = "start again, with patience"
    FINAL = "raise it"


@dataclass(frozen=True, slots=True)
class Link:
    """One exception of the JVM's chain.

    Attributes:
        kind: Its class.
        text: Its message.
        io: Whether it is a `java.io.IOException`, has an SQLSTATE of a system error, or is retriable to Kafka's client.
    """

    kind: str
    text: str
    io: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure that was read.

    Attributes:
        kind: What is done about it.
        error: What is raised if it is final: the named error where there is one, Spark's own otherwise.
        text: One line about it.
    """

    kind: Kind
    error: BaseException
    text: str


class QueryFailed(Exception):
    """What ended Spark's query, with the JVM's chain, the outermost first; `links` is read by `read`."""

    def __init__(self, text: str, links: tuple[Link, ...]) -> None:
        super().__init__(text)
        self.links = links


def read(error: BaseException, look_again: Callable[[], object] = lambda: None) -> Failure:
    """Read a failure.

    Args:
        error: What was raised, or what Spark says ended its query.
        look_again: Raises a named error when a source no longer has what was to be read (Spark cannot always bring the
            connector's own error to the driver), or a file that Spark reads first is damaged. Called only where nothing
            else is known.
    """
    links = chain(error)
    named = _named(error, links)
    if named is None and (not _passes(links) or _says(_DAMAGED_FILES, links[-1])):
        try:
            look_again()
        except RewindError as found:
            named = found
        named = named or (None if _passes(links) else _unreadable(links))
    if named is not None:
        if named is not error:
            named.__cause__ = error
        kind = Kind.RESTORE if isinstance(named, RESTORABLE) else Kind.PASSES if isinstance(named, PASSING) else None
        return Failure(kind or Kind.FINAL, named, text_of(named))
    own = error.__cause__ if isinstance(error, QueryFailed) and error.__cause__ is not None else error
    if not _passes(links):
        return Failure(Kind.FINAL, own, summary(error, links))
    damaged = damaged_state(error, loading=True)  # a host's cache can lie: it is tried again, and named at the end
    if damaged is not None:
        damaged.__cause__ = own
    return Failure(Kind.PASSES, damaged or own, summary(error, links))


def is_lasting(failure: Failure) -> bool:
    """Return whether a start need not wait: a right does not come by itself, nor a library that knows a filesystem."""
    if isinstance(failure.error, StorageFailed):
        return failure.error.lasting
    return any(head.kind == _NO_FILESYSTEM for head in chain(failure.error))


def is_interruption(error: BaseException) -> bool:
    """Return whether an error may be what a stop of Spark's query makes of an action, as Spark judges its own."""
    if isinstance(error, UserCodeFailed) and error.__cause__ is not None:
        error = error.__cause__  # an action of a sink's function
    links = chain(error)
    if not links or _named(error, links) is not None:
        return False
    return links[-1].kind in _INTERRUPTED or links[-1].text.startswith(_CANCELLED)


def text_of(error: RewindError) -> str:
    """Return the line of a named error without its code, as listeners and logs show it."""
    return one_line(str(error).partition("] ")[2])


def chain(error: BaseException) -> tuple[Link, ...]:
    """Return the JVM's chain of exceptions behind one of Python; empty when there is none."""
    if isinstance(error, QueryFailed):
        return error.links
    for name in ("java_exception", "_origin"):
        origin = getattr(error, name, None)
        if origin is not None:
            return java_chain(origin)
    return ()


def java_chain(thrown: Any) -> tuple[Link, ...]:
    """Read an exception of the JVM and its causes, the outermost first; at most `MAX_CHAIN`."""
    from py4j.java_gateway import is_instance_of

    at = gateway()
    links: list[Link] = []
    while thrown is not None and len(links) < MAX_CHAIN:
        io = is_instance_of(at, thrown, _IO)
        if is_instance_of(at, thrown, "org.apache.spark.SparkThrowable"):
            io = io or str(thrown.getSqlState() or "").startswith(_SYSTEM_ERRORS)
        io = io or _extends(thrown, _RETRIABLE)
        links.append(Link(str(thrown.getClass().getName()), str(thrown.getMessage() or ""), io))
        thrown = thrown.getCause()
    return tuple(links)


def _extends(thrown: Any, wanted: str) -> bool:
    """Return whether an exception of Kafka's is of a class, by name: who loads the connector's jars is open."""
    kind = thrown.getClass()
    while kind is not None and str(kind.getName()).startswith(_KAFKA):
        if str(kind.getName()) == wanted:
            return True
        kind = kind.getSuperclass()
    return False


def _heads(links: tuple[Link, ...]) -> Iterator[Link]:
    """Yield what counts: each link, and the task's exception that Spark's sentence about a stage names.

    Ends at an exception of Python code, which is not yielded.
    """
    for link in links:
        if link.kind == _PYTHON:
            return
        yield link
        aborted = _ABORTED.match(link.text)
        if aborted is not None:
            if aborted["kind"] == _PYTHON:
                return
            yield Link(aborted["kind"], aborted["text"].removeprefix(": "))


def _passes(links: tuple[Link, ...]) -> bool:
    return any(
        head.io
        or head.kind in ("ExecutorLostFailure", _WAITED, _UPLOADED, f"{_KAFKA}TimeoutException")
        or _STAGE_LOST.match(head.text) is not None
        or head.text.startswith(_BOTH_PLANNED)
        for head in _heads(links)
    )


def _named(error: BaseException, links: tuple[Link, ...]) -> RewindError | None:
    """Return our own error in a failure, or the name of what the connector or a disk said; None for neither."""
    if isinstance(error, RewindError):
        return error
    if isinstance(error, OSError):
        return as_storage(error)
    for text in (*(link.text for link in links), str(error)):
        marked = named_in(text)
        if marked is not None:
            return marked
    for head in _heads(links):
        lost = named_loss(head.text)
        if lost is not None:
            return lost
        if _REFUSED.fullmatch(head.kind):
            return AccessRefused(
                "the Kafka cluster refuses Spark's connector, or does not let it do what it must",
                why=one_line(f"{head.kind.removeprefix(_KAFKA)}: {head.text}"),
                command=RIGHTS,
            )
        if head.io and any(head.text.endswith(words) for words in _NO_ROOM):
            return StorageFailed(
                "there is no room to write",
                why=one_line(f"{head.kind}: {head.text}"),
                command="make room on the checkpoint's filesystem and where Spark spills (spark.local.dir):"
                " df -h, df -i, quota -s",
            )
        if head.io and (head.kind in _FORBIDDEN or head.text.endswith(_NO_RIGHT)):
            forbidden = StorageFailed(
                "a filesystem does not let Spark read or write",
                why=one_line(f"{head.kind}: {head.text}"),
                command="see who owns what is there, and how it is mounted (ls -ld, mount); then start the query again",
            )
            forbidden.lasting = True
            return forbidden
    return None


def _unreadable(links: tuple[Link, ...]) -> RewindError | None:
    """Name a file that Spark cannot read; Spark's own condition stands first in the text, before anything of data."""
    for head in _heads(links):
        if head.kind.startswith(_SPARK) and head.text.startswith(_UNREADABLE):
            return SourceDamaged(
                "a file that a DataFrame reads cannot be read, or has other types than were declared",
                why=_useful(head.text),
                command="put the file right under its name, or take it out: a planned"
                " micro-batch goes on without files that are gone",
            )
    return None


def damaged_state(error: BaseException, checkpoint: str = "", *, loading: bool = False) -> PointerDamaged | None:
    """Name a failure over files of Spark's state that it cannot read; None for any other failure.

    What lies at the bottom tells: a checksum that differs, a file that ends too early, is gone, or is no such file. A
    plain `IOException` does not (a connection that broke, no memory for a process), nor what has a name (a full disk).

    Args:
        error: The failure.
        checkpoint: Spark's checkpoint location, if it is known.
        loading: Only where Spark says that it was loading state: a query reads other files, too.
    """
    links = chain(error)
    if not links or _named(error, links) is not None or any(map(_may_pass, links)):
        return None
    below = [link for link in links if link.kind != _REMOTE] or [*links]
    last, above, loaded = below[-1], below[-2:-1], any(link.text.startswith(_LOADING) for link in links)
    by_spark = not above or above[0].kind.startswith(_SPARK)
    logged = None if loading else _damaged_log(last, checkpoint, links, by_spark=by_spark)
    if logged is not None:
        return logged
    damaged = _says(_DAMAGED_FILES, last) or last.text.startswith((_STATE_CHECKSUM, _STATE_METADATA, _NO_SNAPSHOT))
    if last.kind == "java.io.EOFException" and not by_spark:
        return None  # the end of something else than a file that Spark reads
    damaged = (damaged and not loading) or (loaded and (damaged or _says(_IN_LOADING, last)))
    if not damaged:
        return None
    return PointerDamaged(
        "Spark cannot read its state, which has the pointers",
        where=f"{checkpoint}/state" if checkpoint else "",
        why=summary(error, links),
        command=("see with rewind verify whether it is the disk, which Spark may not say; else, " if loading else "")
        + "with no query running, keep the checkpoint's folder state aside and put it back from a copy of the"
        " checkpoint, made at its newest micro-batch; or go back to an older copy of the whole checkpoint",
    )


def _may_pass(link: Link) -> bool:
    """Return whether a link tells of a connection or a full disk: whatever stands below it."""
    network = link.kind.startswith(_NETWORK) or link.text.startswith(_HDFS_BROKE)
    return network or any(words in link.text for words in _NO_ROOM)


def _damaged_log(last: Link, checkpoint: str, links: tuple[Link, ...], *, by_spark: bool) -> PointerDamaged | None:
    """Name a failure over a file of Spark's log of micro-batches: of the state beside it nothing is put back."""
    named = _LOG_FILE.match(last.text) if _says(_DAMAGED_FILES, last) else None
    if named is None and not last.text.startswith(_LOG) and not (last.kind.startswith(_JSON) and by_spark):
        return None
    this = "this file, and its checksum," if named else "the damaged file of offsets, commits or state/*/_metadata"
    return PointerDamaged(
        "Spark cannot read its log of micro-batches",
        where=f"{checkpoint}/{named[1]}" if named else checkpoint,
        why=summary(QueryFailed(last.text, links), links),
        command=f"with no query running, put {this} back from a copy of the checkpoint that has it; leave the rest as"
        " it is: state and log belong together; or go back to an older copy of the whole checkpoint",
    )


def _says(known: Mapping[str, re.Pattern[str]], link: Link) -> bool:
    return link.kind in known and known[link.kind].match(link.text) is not None


def summary(error: BaseException, links: tuple[Link, ...] = ()) -> str:
    """Return one line about an exception that has no name of ours: its class and, of a traceback, the last line.

    >>> summary(RuntimeError("Traceback (most recent call last):\\n  File x\\nValueError: 7 is no colour\\n"))
    'RuntimeError: ValueError: 7 is no colour'
    """
    if links:
        said = [(link.kind, _useful(link.text)) for link in links if not link.text.startswith(_WRAPPERS)][-2:]
        return one_line("; cause: ".join(f"{kind}: {text}" if text else kind for kind, text in said or [("Spark", "")]))
    text = _useful(str(error))
    return one_line(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _useful(text: str) -> str:
    """Return the line of a text that says most: the exception's of a Python traceback, else the first."""
    _, traceback, rest = text.partition("Traceback (most recent call last):")
    if traceback:
        lines = _LAST_LINE.findall(rest)
        if lines:
            return str(lines[-1])
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


@contextmanager
def losses_named(look_again: Callable[[], object]) -> Iterator[None]:
    """Let named errors of tasks, and what the connector finds gone, come out of a block by their name.

    Args:
        look_again: See `read`.

    Raises:
        RewindError: By its mark, by the connector's error, or because the source was asked again.
    """
    try:
        yield
    except RewindError:
        raise
    except Exception as error:
        named = read(error, look_again).error
        if isinstance(named, RewindError):
            raise named from error
        raise
