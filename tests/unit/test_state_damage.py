"""Which failures of a read of Spark's state are damage of its files: not what passes, and not what has a name."""

from __future__ import annotations

import pytest

from backend.errors import PointerDamaged
from recovery.failures import Kind, Link, QueryFailed, damaged_state, read
from recovery.supervise.patience import Patience

OUTER = Link("org.apache.spark.SparkException", "Job aborted due to stage failure: Task 0 in stage 1.0")
LOADING = Link("org.apache.spark.SparkException", "[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred", io=True)
UNREAD = Link(
    "org.apache.spark.SparkException", "[CANNOT_LOAD_STATE_STORE.CANNOT_READ_STREAMING_STATE_FILE] An", io=True
)
CHECKSUM = "org.apache.hadoop.fs.ChecksumException"
GONE = "java.io.FileNotFoundException"


@pytest.mark.parametrize(
    ("outer", "bottom", "damage"),
    [  # what Spark 4.2 says of files that were changed, cut, emptied or deleted
        (LOADING, Link(CHECKSUM, "Checksum error: file:/c/state/0/0/7.changelog at 0", io=True), True),
        (OUTER, Link(CHECKSUM, "Checksum error: file:/c/state/0/_stateSchema/default/0_x at 0", io=True), True),
        (LOADING, Link("java.io.EOFException", "", io=True), True),
        (UNREAD, Link(GONE, "File file:/c/state/0/0/7.changelog does not exist", io=True), True),
        (UNREAD, Link(GONE, "/c/state/0/0/7.changelog (Is a directory)", io=True), True),
        (LOADING, Link("java.lang.AssertionError", "assertion failed: readLineage should only be invoked with"), True),
        (LOADING, Link("java.lang.IllegalStateException", "Cannot replay changelogs from snapshot 0 to 7"), True),
        (LOADING, Link("java.lang.NullPointerException", ""), True),
        (LOADING, Link("java.io.IOException", "Stream is corrupted", io=True), True),
        (LOADING, Link("net.jpountz.lz4.LZ4Exception", "Error decoding offset 136 of input buffer"), True),
        (OUTER, Link("org.apache.spark.SparkException", "[CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED] Check"), True),
        (OUTER, Link("org.apache.spark.SparkRuntimeException", "[STDS_FAILED_TO_READ_OPERATOR_METADATA] Failed"), True),
        # the same words elsewhere, and what passes
        (OUTER, Link("java.lang.AssertionError", "assertion failed"), False),
        (OUTER, Link("java.lang.IllegalStateException", "Cannot call methods on a stopped SparkContext"), False),
        (OUTER, Link("java.lang.NullPointerException", ""), False),
        (LOADING, LOADING, False),
        (LOADING, Link("java.io.IOException", "Connection reset by peer", io=True), False),
        (LOADING, Link("java.io.EOFException", "End of File Exception between local host is: a; b", io=True), False),
        (UNREAD, Link(GONE, "/c/state/0/0/7.changelog (Too many open files)", io=True), False),
        (UNREAD, Link(GONE, "/c/state/0/0/7.changelog (Permission denied)", io=True), False),
        (
            OUTER,
            Link("java.io.IOException", 'Cannot run program "chmod": error=12, Cannot allocate memory', io=True),
            False,
        ),
        (OUTER, Link("java.io.IOException", "No space left on device", io=True), False),
        (OUTER, Link(GONE, "/c: No space left on device", io=True), False),
        (LOADING, Link("java.lang.OutOfMemoryError", "Java heap space"), False),
    ],
)
def test_what_lies_at_the_bottom_tells(outer: Link, bottom: Link, damage: bool) -> None:
    said = damaged_state(QueryFailed("a call failed", (outer, bottom)), "/c")
    assert (said is not None) == damage
    if said is not None:
        assert said.where == "/c/state"
        assert bottom.kind in said.why


@pytest.mark.parametrize("text", ["", "Checksum error: file:/c/state/0/0/7.changelog at 0"])
def test_a_running_query_tries_again_and_names_the_damage_when_it_gives_up(text: str) -> None:
    """A host's disk can give wrong bytes once. Another file with a wrong checksum is no such case."""
    failed = QueryFailed("a query failed", (LOADING, Link(CHECKSUM, text, io=True)))
    failure = read(failed)
    assert failure.kind is Kind.PASSES
    now = iter(range(0, 1000, 5))
    patience = Patience(20.0, "/c", clock=lambda: float(next(now)))
    with pytest.raises(PointerDamaged, match="tried 5 times in 20 s") as caught:
        for _ in range(6):
            patience.after(failure, 3)
    assert caught.value.where == "/c"
    assert CHECKSUM in caught.value.why
    assert "copy" in caught.value.command
    elsewhere = read(QueryFailed("a query failed", (OUTER, Link(CHECKSUM, text, io=True))))
    assert elsewhere.kind is Kind.PASSES
    assert not isinstance(elsewhere.error, PointerDamaged)
