"""The lease on a checkpoint: one query or command at a time, seen from the same host and from others.

Files `<checkpoint>/rewind/lease/<number>-<uuid>.json`, numbers rising by one with each taker (format 1)::

    {"format": 1, "what": "query 'clicks'", "host": "h", "boot": id, "pid": 7, "started": ticks, "place": real path,
     "since": time, "period_s": 5.0, "beat": 12, "released": false}

Whoever has the largest name holds the checkpoint, and only as long as its own file is there. Nobody writes another's
file, so there is no write to lose and no rename to win: also on object stores, where the last writer wins.

* A taker writes the next number, then looks again. Of two that took at once the smaller name finds the larger one, at
  the latest when it next publishes, and stops by name.
* A holder renews its file every `PERIOD_S`. It looks at the names before each publication, after each commit and with
  each renewal: once there is a larger one it publishes nothing more.
* Is a holder alive? On the same host (name, boot and process namespace are equal): its process is, since the same
  start; that is seen at once. From another host clocks are not compared: its file is watched for `PATIENCE` periods,
  and a holder that does not renew it in that time is dead.
* What was released stays, marked so: its number must not come again while an older holder may still wake up.
* A copy of a checkpoint has a copy of the lease; it says of which place it is.

What is left: a driver that stands still between its look and its publication, for longer than the patience, while a
driver on another host takes over. It can replace a micro-batch's output by the same rows; Spark's logs refuse its
commit, since the micro-batch is committed already.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backend.errors import UNDECODABLE, CheckpointInUse, CheckpointTaken, StorageFailed
from backend.places import is_same, real_place
from recovery.files import TEMPORARY, Files, open_files

log = logging.getLogger("rewind.lease")

FORMAT = 1
DIRECTORY = "rewind/lease"
PERIOD_S = 5.0
PATIENCE = 4
"""Periods without a renewal after which a holder on another host is dead."""
MAX_PERIOD_S = 60.0
_NAME = re.compile(r"\d{12}-[0-9a-f]{32}\.json")
_ours: set[str] = set()
"""Names of this process's leases."""


class Lease:
    """A checkpoint held by this process; made by `take`.

    Attributes:
        lost: Why it is not held any more, once that was noticed.
    """

    def __init__(self, checkpoint: str, files: Files, name: str, content: dict[str, Any]) -> None:
        self._checkpoint, self._files, self._name, self._content = checkpoint, files, name, content
        self._ended = threading.Event()
        self._seen_s = time.monotonic()
        self._renewing = threading.Lock()
        self._failed = False
        self._thread = threading.Thread(target=self._renew, name="rewind-lease", daemon=True)
        self.lost: CheckpointTaken | None = None

    @property
    def is_first(self) -> bool:
        """Whether nobody held the checkpoint before."""
        return self._name.startswith(f"{1:012d}-")

    def check(self) -> None:
        """Check that the checkpoint is still held; one listing. A filesystem that fails for a short time is waited for.

        Raises:
            CheckpointTaken: A newer start or command has it, or the lease was given back.
            StorageFailed: The checkpoint could not be looked at for longer than others wait for a renewal.
        """
        if self.lost is None:
            try:
                names = _names(self._files)
                if not names or names[-1] < self._name:
                    with self._renewing:  # HDFS deletes a file that is replaced first: the listing may be from between
                        names = _names(self._files)
            except Exception as error:  # filesystems raise kinds of their own
                if self._is_patient():
                    return
                raise StorageFailed(
                    "the checkpoint's lease cannot be looked at",
                    where=f"{self._checkpoint}/{DIRECTORY}",
                    why=str(error),
                    command="see that the checkpoint's filesystem answers; then start the query again",
                ) from error
            if self._ended.is_set():
                self.lost = self._taken("this query has ended")
            elif self._failed and (not names or names[-1] < self._name) and self._is_patient():
                return  # a renewal failed after the file was deleted; the next one writes it again
            elif self._name not in names or names[-1] != self._name:
                newer = _holder(_read(self._files, names[-1])[0]) if names and names[-1] > self._name else ""
                self.lost = self._taken(newer or "its lease was deleted")
            else:
                self._seen_s = time.monotonic()
        if self.lost is not None:
            raise self.lost

    def release(self, *, forget: bool = False) -> None:
        """Give the checkpoint back; nothing when it was given back. The file stays, marked; `forget` deletes it."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()
        try:
            if forget:
                self._files.delete([f"{DIRECTORY}/{self._name}"])
            elif self._name in _names(self._files):
                self._write({**self._content, "released": True}, durable=True)
        except Exception as error:
            log.warning("the lease of %s is not given back, it runs out by itself: %s", self._checkpoint, error)
        finally:
            _ours.discard(self._name)

    def _begin(self) -> None:
        self._write(self._content, durable=True)
        _ours.add(self._name)
        self._thread.start()

    def _is_patient(self) -> bool:
        return time.monotonic() - self._seen_s < float(self._content["period_s"]) * PATIENCE

    def _renew(self) -> None:
        while not self._ended.wait(self._content["period_s"]):
            try:
                self.check()
                self._content["beat"] += 1
                with self._renewing:
                    self._failed = True
                    self._write(self._content, durable=False)
                    self._failed = False
            except CheckpointTaken:
                return
            except Exception as error:
                log.warning("the lease of %s is not renewed now: %s", self._checkpoint, error)

    def _write(self, content: dict[str, Any], *, durable: bool) -> None:
        self._files.write(f"{DIRECTORY}/{self._name}", [json.dumps(content).encode()], durable=durable)

    def _taken(self, why: str) -> CheckpointTaken:
        return CheckpointTaken(
            "the checkpoint has been taken over",
            where=self._checkpoint,
            why=why,
            command="see that the query runs once; what this driver had not committed, the newer one runs again",
        )


def take(checkpoint: str, what: str) -> Lease:
    """Take a checkpoint's lease, or take over that of a holder that is dead.

    Args:
        checkpoint: Spark's checkpoint location.
        what: Who takes it, for others: `query 'clicks'`, `rewind reset`.

    Raises:
        CheckpointInUse: Another holder lives; nothing was written.
    """
    before = check_free(checkpoint)
    files = open_files(checkpoint)
    drafts = files.list(DIRECTORY, temporary=True)
    numbers = [int(name.partition("-")[0]) for name in (*before, *drafts) if _NAME.match(name.partition(TEMPORARY)[0])]
    number = max(numbers, default=0) + 1
    content = {
        "format": FORMAT,
        "what": what,
        **_here(),
        "place": real_place(checkpoint),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
        "period_s": PERIOD_S,
        "beat": 0,
        "released": False,
    }
    lease = Lease(checkpoint, files, f"{number:012d}-{uuid.uuid4().hex}.json", content)
    lease._begin()
    try:
        lease.check()
    except CheckpointTaken as lost:
        lease.release(forget=True)
        raise CheckpointInUse(
            "another start took the checkpoint at the same moment",
            where=checkpoint,
            why=lost.why,
            command="see that the query runs once",
        ) from lost
    except BaseException:
        lease.release()
        raise
    try:
        files.delete(f"{DIRECTORY}/{name}" for name in (*before, *drafts))
    except Exception as error:  # the newest counts, whatever lies beside it; filesystems raise kinds of their own
        log.warning("older leases of %s are not deleted now: %s", checkpoint, error)
    return lease


@contextmanager
def leased(checkpoint: str, what: str) -> Iterator[Lease]:
    """Hold a checkpoint for a command; raises as `take`."""
    lease = take(checkpoint, what)
    try:
        yield lease
    finally:
        lease.release()


def check_free(checkpoint: str) -> list[str]:
    """Check that nobody holds a checkpoint; waits where the holder is on another host and may be dead.

    Returns:
        The names of the leases that were found, all without a holder.

    Raises:
        CheckpointInUse: Says who, where and since when.
    """
    files = open_files(checkpoint)
    for _ in range(3):  # a file that goes while it is watched was taken over or given back: look again
        names = _names(files) or _replaced(files)
        if not names:
            return []
        content, data = _read(files, names[-1])
        lives = _lives(files, names[-1], content, data, checkpoint)
        if lives is False:
            return names
        if lives:
            break
    raise CheckpointInUse(
        "the checkpoint is in use",
        where=f"{checkpoint}/{DIRECTORY}/{names[-1]}",
        why=f"held by {_holder(content)}",
        command=f"stop it ({_how_to_stop(content)}), then try again",
    )


def _lives(files: Files, name: str, content: dict[str, Any], data: bytes, checkpoint: str) -> bool | None:
    """Tell whether a lease's holder is alive; None when the file has gone meanwhile."""
    if content.get("released") is True:
        return False
    here = _here()
    same = here["boot"] is not None and all(content.get(part) == here[part] for part in ("host", "boot"))
    if same or name in _ours:
        if not _is_there(content.get("place"), checkpoint):
            return False  # a copy of a checkpoint that is held where it was copied from
        started = _started(content.get("pid"))
        alive = started is not None and started == content.get("started")
        return name in _ours or (alive and content.get("pid") != here["pid"])
    return _renews(files, name, content, data)


def _is_there(place: object, checkpoint: str) -> bool:
    """Tell whether a checkpoint is at a place, also by another mount."""
    try:
        return isinstance(place, str) and is_same(place, checkpoint)
    except (OSError, ValueError):
        return False


def _renews(files: Files, name: str, content: dict[str, Any], data: bytes) -> bool | None:
    """Watch a lease for as long as its holder may take to renew it."""
    period = content.get("period_s")
    period_s = min(max(float(period), 0.0), MAX_PERIOD_S) if isinstance(period, int | float) else PERIOD_S
    log.warning("waiting up to %.0f s to see whether %s still runs", period_s * PATIENCE, _holder(content))
    deadline = time.monotonic() + period_s * PATIENCE
    while time.monotonic() < deadline:
        time.sleep(period_s / 10)
        now, found = _read(files, name)
        if not found:
            return None
        if found != data:
            return now.get("released") is not True
    return False


def _names(files: Files) -> list[str]:
    return sorted(name for name in files.list(DIRECTORY) if _NAME.fullmatch(name))


def _replaced(files: Files) -> list[str]:
    """List again where no lease is there: HDFS deletes a file that is replaced first, its draft lies beside it then."""
    deadline = time.monotonic() + PERIOD_S * PATIENCE  # for as long as a holder may take to write it again
    while True:
        drafts = files.list(DIRECTORY, temporary=True)
        names = _names(files)
        if names or not drafts or time.monotonic() >= deadline:
            return names
        time.sleep(PERIOD_S / 50)


def _read(files: Files, name: str) -> tuple[dict[str, Any], bytes]:
    """Read a lease; no content where it is gone, or of another format: then only renewals can be seen."""
    try:
        data = files.read(f"{DIRECTORY}/{name}")
    except FileNotFoundError:
        return {}, b""
    try:
        content = json.loads(data)
        return (dict(content) if content["format"] == FORMAT else {}), data
    except UNDECODABLE:
        return {}, data or b"?"


def _here() -> dict[str, Any]:
    """Name this process so that another one on the same host can tell whether it lives."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host: str | None = f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # not Linux: other processes are watched
        host = None
    return {"host": socket.gethostname(), "boot": host, "pid": os.getpid(), "started": _started(os.getpid())}


def _started(pid: object) -> int | None:
    """Give when a process started, in ticks since the host did; None when it does not run."""
    try:
        # after the name, which may hold anything: state, then fields 4 to 22
        fields = Path(f"/proc/{int(str(pid))}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _holder(content: dict[str, Any]) -> str:
    if not content:
        return "a holder that this release cannot read"
    return f"{content.get('what')}, process {content.get('pid')} on {content.get('host')}, since {content.get('since')}"


def _how_to_stop(content: dict[str, Any]) -> str:
    if content.get("pid") == os.getpid() and content.get("host") == socket.gethostname():
        return "query.stop() in this process"
    return f"query.stop() there, or kill {content.get('pid', 'its process')} on {content.get('host', 'its host')}"
