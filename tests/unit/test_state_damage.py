"""Which failures of a read of Spark's state are damage of its files: not what passes, and not what has a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.errors import ManifestMismatch, PointerDamaged, StorageFailed
from backend.spark import start
from recovery.commit.spark_files import read_spark_file
from recovery.failures import Kind, Link, QueryFailed, damaged_state, read
from recovery.supervise.patience import Patience

OUTER = Link("org.apache.spark.SparkException", "Job aborted due to stage failure: Task 0 in stage 1.0")
LOADING = Link("org.apache.spark.SparkException", "[CANNOT_LOAD_STATE_STORE.UNCATEGORIZED] An error occurred", io=True)
UNREAD = Link(
    "org.apache.spark.SparkException", "[CANNOT_LOAD_STATE_STORE.CANNOT_READ_STREAMING_STATE_FILE] An", io=True
)
CHECKSUM = "org.apache.hadoop.fs.ChecksumException"
GONE = "java.io.FileNotFoundException"


SHUT = "SSL peer shut down incorrectly"
SCHEMA = "File does not exist: /c/state/0/_stateSchema/default/0_x"
EOF = "java.io.EOFException"
NO_BASE = "[CANNOT_LOAD_STATE_STORE.CANNOT_FIND_BASE_SNAPSHOT_CHECKPOINT]"
RUNTIME = "org.apache.spark.SparkRuntimeException"
JSON = Link("com.fasterxml.jackson.core.JsonParseException", "Unexpected character ('x' (code 120))", io=True)
NO_ENVIRONMENT = 'Cannot invoke "SparkEnv.conf()" because the return value of "SparkEnv$.get()" is null'


@pytest.mark.parametrize(
    "links",
    [  # what Spark 4.2 says of files that were changed, cut, emptied or deleted
        (LOADING, Link(CHECKSUM, "Checksum error: file:/c/state/0/0/7.changelog at 0", io=True)),
        (OUTER, Link(CHECKSUM, "Checksum error: file:/c/state/0/_stateSchema/default/0_x at 0", io=True)),
        (OUTER, Link(CHECKSUM, "Checksum error: file:/c/state/0/_metadata/metadata at 0", io=True)),
        (OUTER, Link(CHECKSUM, "Checksum error: file:/commits/1/state/0/0/7.changelog at 0", io=True)),
        (LOADING, Link(EOF, "", io=True)),
        (Link(EOF, "", io=True),),
        (UNREAD, Link(GONE, "File file:/c/state/0/0/7.changelog does not exist", io=True)),
        (UNREAD, Link(GONE, "/c/state/0/0/7.changelog (Is a directory)", io=True)),
        (Link(GONE, SCHEMA, io=True), Link("org.apache.hadoop.ipc.RemoteException", SCHEMA, io=True)),
        (LOADING, Link("java.lang.AssertionError", "assertion failed: readLineage should only be invoked with")),
        (LOADING, Link("java.lang.IllegalStateException", "Cannot replay changelogs from snapshot 0 to 7")),
        (LOADING, Link("java.lang.NullPointerException", "")),
        (LOADING, Link("java.io.IOException", "Stream is corrupted", io=True)),
        (LOADING, Link("net.jpountz.lz4.LZ4Exception", "Error decoding offset 136 of input buffer")),
        (LOADING, Link(EOF, "Unexpected end of ZLIB input stream", io=True)),
        (LOADING, Link(EOF, "Stream ended prematurely", io=True)),
        (LOADING, Link("org.xerial.snappy.SnappyIOException", "[EMPTY_INPUT] Cannot decompress empty stream", io=True)),
        (LOADING, Link("java.io.IOException", "FAILED_TO_UNCOMPRESS(5)", io=True)),
        (UNREAD, Link(GONE, "No such file or directory: s3a://b/c/state/0/0/7.changelog", io=True)),
        (LOADING, Link("org.apache.spark.SparkException", f"{NO_BASE} Cannot find")),
        (OUTER, Link("org.apache.spark.SparkException", "[CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED] Check")),
        (OUTER, Link("org.apache.spark.SparkRuntimeException", "[STDS_FAILED_TO_READ_OPERATOR_METADATA] Failed")),
    ],
)
def test_what_lies_at_the_bottom_tells(links: tuple[Link, ...]) -> None:
    said = damaged_state(QueryFailed("a call failed", links), "/c")
    assert said is not None
    assert said.where == "/c/state"
    assert links[-1].kind in said.why


@pytest.mark.parametrize(
    "links",
    [
        (OUTER, Link("java.lang.AssertionError", "assertion failed")),
        (OUTER, Link("java.lang.NullPointerException", "")),
        (LOADING, Link("java.lang.IllegalStateException", "Cannot call methods on a stopped SparkContext")),
        (LOADING,),
        (LOADING, Link("java.io.IOException", "Connection reset by peer", io=True)),
        # as Hadoop and the JDK say that a connection broke
        (LOADING, Link(EOF, "End of File Exception between local host is: a; b", io=True), Link(EOF, "", io=True)),
        (LOADING, Link("javax.net.ssl.SSLHandshakeException", "Remote host", io=True), Link(EOF, SHUT, io=True)),
        (LOADING, Link("java.io.IOException", "Unable to read", io=True), Link(EOF, "", io=True)),
        (LOADING, Link(EOF, "Unexpected EOF while trying to read response from server", io=True)),
        (UNREAD, Link(GONE, "/c/state/0/0/7.changelog (Too many open files)", io=True)),
        (UNREAD, Link(GONE, "/c/state/0/0/7.changelog (Permission denied)", io=True)),
        # an executor's own disk
        (LOADING, Link(GONE, "/tmp/spark-1/StateStoreId(7)/000008.sst (No such file or directory)", io=True)),
        (LOADING, Link(GONE, "/mnt/state/spark-1/000008.sst (No such file or directory)", io=True)),
        (LOADING, Link(GONE, "/mnt/state/1/spark-1/000008.sst (No such file or directory)", io=True)),
        (LOADING, Link("org.rocksdb.RocksDBException", "Corruption: while writing 7: No space left on device")),
        (LOADING, Link("java.lang.NullPointerException", NO_ENVIRONMENT)),  # Spark shuts down
        (OUTER, Link("java.io.IOException", 'Cannot run program "chmod": error=12, Cannot allocate memory', io=True)),
        (OUTER, Link("java.io.IOException", "No space left on device", io=True)),
        (OUTER, Link(GONE, "/c/state: No space left on device", io=True)),
        (LOADING, Link("java.lang.OutOfMemoryError", "Java heap space")),
        # the answer of an object store, on its way to a file
        (OUTER, Link("software.amazon.awssdk.core.exception.SdkClientException", "Unable to unmarshall"), JSON),
    ],
)
def test_what_passes_or_is_not_of_the_checkpoint_is_no_damage(links: tuple[Link, ...]) -> None:
    assert damaged_state(QueryFailed("a call failed", links), "/c") is None


@pytest.mark.parametrize(
    ("last", "where"),
    [
        (Link(CHECKSUM, "Checksum error: file:/c/commits/4 at 0", io=True), "/c/commits/4"),
        (Link(CHECKSUM, "Checksum error: file:/c/offsets/12 at 0", io=True), "/c/offsets/12"),
        (Link(CHECKSUM, "Checksum error: /elsewhere/state/1/c/commits/4 at 0", io=True), "/c/commits/4"),
        (JSON, "/c"),
        (Link(RUNTIME, "[MALFORMED_LOG_FILE] Log file was malformed"), "/c"),
        (Link(RUNTIME, "[STDS_OFFSET_LOG_UNAVAILABLE] The offset log for 4 does not exist"), "/c"),
        (Link("java.lang.IllegalStateException", "Incomplete log file"), "/c"),
    ],
)
def test_where_sparks_log_is_damaged_its_state_is_left_as_it_is(last: Link, where: str) -> None:
    """Older state beside newer commits would be a worse damage than the one that was found."""
    said = damaged_state(QueryFailed("a call failed", (OUTER, last)), "/c")
    assert said is not None
    assert said.where == where
    assert "leave the rest" in said.command
    assert "folder state aside" not in said.command


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


def test_damage_that_may_be_of_a_hosts_cache_is_looked_at_again_on_the_driver() -> None:
    links = (OUTER, Link(CHECKSUM, "Checksum error: file:/c/offsets/4 at 0", io=True))

    def damaged() -> None:
        raise PointerDamaged("a file that Spark wrote into the checkpoint is damaged")

    assert read(QueryFailed("a call failed", links)).kind is Kind.PASSES
    found = read(QueryFailed("a call failed", links), damaged)
    assert (found.kind, type(found.error)) == (Kind.FINAL, PointerDamaged)
    timeout = Link("java.net.SocketTimeoutException", "Read timed out", io=True)
    assert read(QueryFailed("a call failed", (OUTER, timeout)), damaged).kind is Kind.PASSES


def test_a_file_of_sparks_is_read_with_the_checksum_that_lies_beside_it(tmp_path: Path) -> None:
    """The check value of CRC-32, 0xcbf43926, is that of the nine digits."""
    (tmp_path / "offsets").mkdir()
    file, sums = tmp_path / "offsets" / "3", tmp_path / "offsets" / ".3.crc"
    file.write_bytes(b"123456789")
    sums.write_bytes(b"crc\0" + (512).to_bytes(4) + 0xCBF43926.to_bytes(4))
    assert read_spark_file(str(tmp_path), "offsets/3") == b"123456789"
    assert read_spark_file(f"file://{tmp_path}", "offsets/3") == b"123456789"
    # two blocks: the same nine digits behind one another
    file.write_bytes(b"123456789" * 2)
    sums.write_bytes(b"crc\0" + (9).to_bytes(4) + 0xCBF43926.to_bytes(4) * 2)
    assert read_spark_file(str(tmp_path), "offsets/3") == b"123456789" * 2

    for damaged in (b"123456789" + b"123456788", b"12345678", b"123456789", b"", b"123456789" * 3):
        file.write_bytes(damaged)
        with pytest.raises(PointerDamaged, match="damaged") as caught:
            read_spark_file(str(tmp_path), "offsets/3")
        assert caught.value.where == f"{tmp_path}/offsets/3"
        assert "not committed, remove both" in caught.value.command
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "3").touch()
    with pytest.raises(PointerDamaged, match="older copy of the whole checkpoint"):
        read_spark_file(str(tmp_path), "offsets/3")
    file.write_bytes(b"12345678x")
    right = sums.read_bytes()
    sums.write_bytes(b"crc\0" + bytes(4) + right[8:])  # blocks of no bytes: Hadoop divides by them
    with pytest.raises(PointerDamaged):
        read_spark_file(str(tmp_path), "offsets/3")
    for other in (b"", b"crc\0", b"crc\0\0\0\0", b"crc\1" + right[4:]):  # Hadoop leaves these out
        sums.write_bytes(other)
        assert read_spark_file(str(tmp_path), "offsets/3") == b"12345678x"
    file.write_bytes(b"123456789" * 2)
    sums.unlink()
    assert read_spark_file(str(tmp_path), "offsets/3") == b"123456789" * 2


@pytest.mark.parametrize(
    "link",
    [
        Link("org.apache.hadoop.security.AccessControlException", "Permission denied: user=job, access=WRITE", io=True),
        Link("java.nio.file.AccessDeniedException", "/c/commits", io=True),
        Link(GONE, "/c/commits/.7.tmp (Permission denied)", io=True),
        Link(GONE, "/c/commits/.7.tmp (Read-only file system)", io=True),
    ],
)
def test_a_right_that_spark_lacks_is_waited_for_and_told_as_that(link: Link) -> None:
    """Not as processes of Spark that die."""
    failure = read(QueryFailed("a query failed", (OUTER, link)))
    assert failure.kind is Kind.PASSES
    assert isinstance(failure.error, StorageFailed)
    assert "does not let Spark read or write" in failure.error.what
    assert link.text in failure.error.why


def test_a_micro_batch_that_a_driver_planned_which_stood_still_is_gone_on_with() -> None:
    """Who holds the lease runs it; the other one finds that out when it starts again."""
    text = "[CONCURRENT_STREAM_LOG_UPDATE] Concurrent update to the log. Multiple streaming jobs detected for 5."
    assert read(QueryFailed("the query failed", (Link("org.apache.spark.SparkException", text),))).kind is Kind.PASSES


@pytest.mark.parametrize("content", [b"", b"\0" * 20, b"v2\n\xff", b"v2\n{", b"v2\n[]", b'{"stateUniqueIds": {}}'])
def test_a_torn_newest_commit_of_sparks_is_named_and_no_other_checkpoint_is_advised(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "3").write_bytes(content)
    with pytest.raises(PointerDamaged) as caught:
        start._spark_has_committed(str(tmp_path))
    assert caught.value.where == f"{tmp_path}/commits/3"
    assert "put this file back" in caught.value.command
    (tmp_path / "commits" / "3").write_text('v1\n{"nextBatchWatermarkMs":0}')
    with pytest.raises(ManifestMismatch, match="checkpoint format 1"):
        start._spark_has_committed(str(tmp_path))
    (tmp_path / "commits" / "3").write_text('v2\n{"nextBatchWatermarkMs":0,"stateUniqueIds":{}}')
    assert start._spark_has_committed(str(tmp_path))
