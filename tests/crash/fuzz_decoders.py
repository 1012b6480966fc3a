"""Hurt bytes for everything that decodes what is stored or sent: named errors only, and bounded memory.

`python -m tests.crash.fuzz_decoders <cases> [<seed>]` runs so many cases per decoder in this process, whose address
space is limited first: a length that lies must not be believed. It prints a line per decoder, and each case that ended
in anything but a value or a named error; the exit code is 1 then.

Formats with a checksum are hurt twice: as they are, and sealed again after the damage (`resealed`), as somebody with
the right to write there could do it: what lies behind the checksum must hold as well.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pyarrow as pa
import xxhash
from fsspec.implementations.local import LocalFileSystem

from backend import keys
from backend.batch import ERROR_SCHEMA, MESSAGE_FIELDS, Position
from backend.errors import RewindError
from backend.keys import decode_columns, encode_columns
from backend.rocks.parts import MAGIC, part_lengths
from backend.rows import RowCodec
from backend.sinks.directory import VersionedDirectory
from backend.sinks.kafka import commits as kafka_commits
from backend.sources.archive_index import INDEX_NAME, IndexFile, read_index_file
from backend.sources.archive_seen import Memory, Seen
from backend.spark.pack import frames
from backend.spark.pack.assembling import Packed, assemble
from backend.spark.pack.frames import Header, Slice, to_ipc
from backend.store.protocol import Changes, Staged
from backend.stores.values import ValueCodec
from backend.windows import ledger
from recovery.changelog import chunks
from recovery.changelog.kafka.index import ShardIndex
from recovery.changelog.records import Kind, encode_base, encode_delta
from recovery.changelog.records import decode as decode_log
from recovery.commit import manifest, pointer
from recovery.commit.pointer import Commit, CommitRecord, Pointer
from recovery.commit.shard_directory import ShardDirectory
from recovery.snapshots.manifest import PackedFile, Snapshot, decode_manifest, encode_manifest, manifest_name
from tests.support.twin import MemoryTwin

HEADROOM_BYTES = 768 * 1024 * 1024
COMMIT, PARENT = Commit(7, "a" * 32), Commit(6, "b" * 32)
RECORD = CommitRecord(
    0,
    COMMIT,
    PARENT,
    5_000,
    [(0, 0, Position(9, 8_000, 7))],
    {3: b"\x03abc"},
    [PARENT],
    [(0, 0, 3)],
    [(0, 0, 4)],
    3,
    99,
)
ROWS = [(bytes([3]) + b"k%03d" % at, b"v%d" % at) for at in range(40)]
SCHEMA = pa.schema(
    [
        ("n", pa.int32()),
        ("x", pa.float64()),
        ("s", pa.string()),
        ("l", pa.list_(pa.struct([("a", pa.int64()), ("t", pa.timestamp("us"))]))),
        ("m", pa.map_(pa.string(), pa.int64())),
        ("at", pa.timestamp("us", "UTC")),
        ("ok", pa.bool_()),
        ("d", pa.dictionary(pa.int32(), pa.string())),
        ("p", pa.struct([("y", pa.int16()), ("b", pa.binary())])),
    ]
)
TABLE = pa.table(
    [
        pa.array([1, None, -5], pa.int32()),
        pa.array([1.5, float("nan"), None]),
        pa.array(["é", None, "long " * 9]),
        pa.array([[{"a": 1, "t": 5}], None, []], SCHEMA.field("l").type),
        pa.array([[("k", 1)], None, []], SCHEMA.field("m").type),
        pa.array([1, None, 3], SCHEMA.field("at").type),
        pa.array([True, None, False]),
        pa.array(["u", None, "u"]).dictionary_encode(),
        pa.array([{"y": 1, "b": b"\x00"}, None, {"y": None, "b": None}], SCHEMA.field("p").type),
    ],
    schema=SCHEMA,
)
KEY_TYPES = [pa.int32(), pa.string(), pa.timestamp("us", "UTC"), pa.date32(), pa.float32(), pa.bool_(), pa.binary()]
KEYS = encode_columns(
    [
        pa.array([1, None, -3], pa.int32()),
        pa.array(["a\0b", "", None]),
        pa.array([1, 2**40, None], KEY_TYPES[2]),
        pa.array([1, 20_000, None], pa.int32()).cast(pa.date32()),
        pa.array([1.5, None, -0.0], pa.float32()),
        pa.array([True, False, None]),
        pa.array([b"\x00\x01", b"", None]),
    ]
).to_pylist()


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder: what it reads when all is well, how it is called; `seal` makes hurt bytes match their checksum."""

    name: str
    sound: list[bytes]
    read: Callable[[bytes], object]
    seal: Callable[[bytes], bytes] | None = None


def seal_record(data: bytes) -> bytes:
    return data[:-16] + xxhash.xxh3_128(data[:-16]).digest()


def sealed(data: bytes) -> bytes:
    return data + xxhash.xxh3_64_digest(data)


def seal_snapshot(data: bytes) -> bytes:
    """Take the bytes for the body."""
    return b'{"checksum":"%s","body":%s}' % (xxhash.xxh3_128_hexdigest(data).encode(), data)


def file_reader(scratch: Path, name: str, look: Callable[[], object]) -> Callable[[bytes], object]:
    path = scratch / name
    path.parent.mkdir(parents=True, exist_ok=True)

    def read(data: bytes) -> object:
        path.write_bytes(data)
        return look()

    return read


def read_frame(data: bytes) -> object:
    header = sealed(msgspec.msgpack.encode(Header(frames.FORMAT, 5, [Slice(0, 0, 0, 3, 9)])))
    found = assemble([Packed(header, data, None)], {}, fields=())
    return found.messages.to_pylist() if found.messages is not None else None


def read_errors(data: bytes) -> object:
    header = sealed(msgspec.msgpack.encode(Header(frames.FORMAT, 5, [Slice(0, 0, 0, 3, 9)])))
    return assemble([Packed(header, None, data)], {}).errors.to_pylist()


def read_chunk_key(data: bytes) -> object:
    index = ShardIndex("topic[0]")
    index.take(data, b"value", 3)
    return chunks.decode_key(data, "topic[0]@3")


def read_piece(data: bytes) -> object:
    index = ShardIndex("topic[0]")
    key = chunks.ChunkKey(Kind.DELTA, COMMIT, b"12345678", 0, True, chunks.Growth()).encode()
    index.take(key, data, 3)
    return list(index.stored())


def read_rows(values: list[bytes]) -> object:
    table = RowCodec(SCHEMA).decode(values)
    table.validate(full=True)
    return table


def read_keys(data: bytes) -> object:
    columns = decode_columns([KEYS[0], data], KEY_TYPES)
    for column in columns:
        column.validate(full=True)
    return columns


class Fixed:
    """A store of one row."""

    def __init__(self, key: bytes, value: bytes) -> None:
        self._row = key, value

    def get(self, key: bytes) -> bytes | None:
        return self._row[1] if key == self._row[0] else None


def read_memory(scratch: Path) -> Callable[[bytes], object]:
    from backend.store.staging import file_digest

    path = scratch / "staged.rows"

    def read(data: bytes) -> object:
        path.write_bytes(data)
        store = MemoryTwin()
        store.confirm(Staged(path, *file_digest(path), 0))
        return dict(store.scan(b"", None))

    return read


def decoders(scratch: Path) -> list[Decoder]:
    """Give every decoder with sound bytes."""
    sound_pointer = Pointer(0, COMMIT, PARENT, 100, "d" * 32, RECORD.positions, RECORD.bounds, "0/file.delta", 5, 2)
    delta = encode_delta(
        RECORD, Changes([k for k, _ in ROWS], [v if at % 3 else None for at, (_, v) in enumerate(ROWS)])
    )
    base = b"".join(encode_base(RECORD, ROWS))
    snapshot = Snapshot(0, COMMIT, PARENT, f"{COMMIT.name}/{'c' * 32}", [PackedFile("1.sst", 5, "e" * 32)])
    name = manifest_name(COMMIT, full=True)
    settled = manifest.Manifest(2, (5, 7), {"operator": {"a": [1, 2]}, "changelog": "x", "query": "q"})
    manifest.write_manifest(str(scratch), settled)
    codec = RowCodec(SCHEMA)
    messages = pa.table(
        [pa.array([0, 0, 0], f.type) for f in MESSAGE_FIELDS] + [pa.array(["a", "b", None])],
        schema=pa.schema([*MESSAGE_FIELDS, pa.field("s", pa.string())]),
    )
    errors = pa.Table.from_pylist([{"stream": 0, "partition": 0, "offset": 1, "reason": "malformed"}], ERROR_SCHEMA)
    shard = ShardDirectory(scratch / "local", "q", 0)
    output = VersionedDirectory(scratch / "out")
    store = MemoryTwin()
    staged = store.stage(Changes([b"\x03a"], [b"1"]), scratch / "sound.rows")
    archive = LocalFileSystem()

    def read_ledger(data: bytes) -> object:
        return ledger.read(Fixed(ledger.KEY, data))  # type: ignore[arg-type]

    values, typed = ValueCodec(), ValueCodec(dict[str, list[int]])
    slices = [Slice(0, 0, 0, 3, 9), Slice(0, 1, 0, 3, 9)]
    told = sealed(msgspec.msgpack.encode(Header(frames.FORMAT, 5, slices, True)))
    row = kafka_commits.encode(
        kafka_commits.Published("query", 3, 5, {"results": {0: (2, "ab")}}, "writer", {"t": "id"})
    )

    read_index = file_reader(
        scratch, f"archive/{INDEX_NAME}", lambda: read_index_file(archive, str(scratch / "archive"))
    )

    def look_snapshot(data: bytes) -> object:
        return decode_manifest(data, 0, name, "here")

    return [
        Decoder("pointer", [pointer.encode(sound_pointer)], pointer.decode),
        Decoder("commit record", [pointer.encode_record(RECORD)], pointer.decode_record),
        Decoder("changelog delta", [delta], lambda data: decode_log(data, "here").rows.to_pylist(), seal_record),
        Decoder("changelog base", [base], lambda data: decode_log(data, "here").rows.to_pylist(), seal_record),
        Decoder(
            "Kafka chunk key",
            [chunks.ChunkKey(Kind.BASE, COMMIT, b"12345678", 0, True, chunks.Growth(1, 2, 3)).encode()],
            read_chunk_key,
        ),
        Decoder("Kafka piece", [delta], read_piece),
        Decoder("Kafka sink commit", [row], lambda data: kafka_commits.decode(data, "here")),
        Decoder("snapshot manifest", [encode_manifest(snapshot)], look_snapshot),
        Decoder(
            "snapshot manifest body", [msgspec.json.encode(snapshot)], lambda data: look_snapshot(seal_snapshot(data))
        ),
        Decoder(
            "manifest.json",
            [(scratch / manifest.NAME).read_bytes()],
            file_reader(scratch, manifest.NAME, lambda: manifest.read_manifest(str(scratch))),
        ),
        Decoder(
            "CURRENT",
            [b'{"format": 1, "generation": "%s"}' % (b"a" * 32)],
            file_reader(scratch, "local/q/0/CURRENT", shard.current),
        ),
        Decoder(
            "owner.json",
            [b'{"format": 1, "query": "q"}'],
            file_reader(scratch, "out/_rewind/owner.json", lambda: output.open("q")),
        ),
        Decoder(
            "frame header",
            [told],
            lambda data: assemble([Packed(data, None, None)], {}),
            lambda data: sealed(data[:-8]),
        ),
        Decoder("frame", [to_ipc(messages)], read_frame),
        Decoder("frame's errors", [to_ipc(errors)], read_errors),
        Decoder("row", codec.encode(TABLE), lambda data: read_rows([data])),
        Decoder(
            "rows", codec.encode(TABLE), lambda data: codec.decode([codec.encode(TABLE)[0], data]).validate(full=True)
        ),
        Decoder("key", [keys.encode(("a", 1, None, 1.5, b"\0", (True, "x")))], keys.decode),
        Decoder(
            "key columns",
            KEYS,
            lambda data: [c.validate(full=True) for c in decode_columns([KEYS[0], data], KEY_TYPES)],
        ),
        Decoder("user value", [values.encode({"n": [1, {"a": "b"}]})], values.decode),
        Decoder("typed user value", [typed.encode({"n": [1, 2]})], typed.decode),
        Decoder("ledger", [msgspec.msgpack.encode(ledger.Ledger(kind_format=1))], read_ledger),
        Decoder(
            "what was read of an archive",
            [msgspec.json.encode(Seen(first=[("t", 0, 0)]).sealed())],
            file_reader(scratch, "rewind/archive/0.json", lambda: Memory(str(scratch), 0).seen),
        ),
        Decoder("archive index", [msgspec.json.encode(IndexFile(1, [], []))], read_index),
        Decoder(
            "parts of a staged file",
            [b"one" + b"three" + struct.pack(">QQHH", 3, 5, 2, 1) + MAGIC],
            file_reader(scratch, "parts.sst", lambda: part_lengths(scratch / "parts.sst")),
        ),
        Decoder("memory store's file", [staged.path.read_bytes()], read_memory(scratch)),
    ]


LIES = [struct.pack(form, n) for form in (">I", "<I", ">Q", "<Q") for n in (0, 2**31 - 1, 2**31, 2**32 - 1)] + [
    struct.pack(form, n) for form in (">Q", "<Q", ">q", "<q") for n in (2**40, 2**62)
]
BOMBS = [
    b"\xdd\x7f\xff\xff\xff",  # MessagePack: a list of 2**31 - 1
    b"\xdf\x7f\xff\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\x91" * 100_000,
    b"\x81\xa1a" * 100_000,
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"\x50" * 100_000,  # key codec: tuples in tuples
    b"9" * 10_000,
    b'{"format":1e999}',
    b'{"format":1,"shards":1e999,"grouping":[1]}',
    b'{"format":1,"shards":1000000000000,"grouping":[1]}',
    b'{"format":1,"shards":-1,"grouping":[]}',
    b'{"format":1,"generation":"../../../../../../../../../../../etc"}',
    b"\xff\xfe\x00",
    b'"\\ud800"',
    b"null",
    b"",
]


def hurt(sound: bytes, rng: random.Random) -> bytes:
    """Give the bytes with one to four damages."""
    data = bytearray(sound)
    for _ in range(rng.randint(1, 4)):
        way = rng.randrange(8)
        at = rng.randrange(len(data) + 1)
        if way == 0 and data:
            data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
        elif way == 1:
            del data[at:]
        elif way == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif way in (3, 4):
            lie = rng.choice(LIES)
            data[at : at + len(lie)] = lie
        elif way == 5:
            del data[at : at + rng.randint(1, 16)]
        elif way == 6:
            bomb = rng.choice(BOMBS)
            data[at : at + len(bomb)] = bomb
        elif data:
            data[min(at, len(data) - 1)] = rng.randrange(256)
    return bytes(data)


def cases(decoder: Decoder, count: int, rng: random.Random) -> Iterator[bytes]:
    """Give hurt bytes for a decoder, with every bomb alone first, then a length that lies at every place."""
    yield from BOMBS
    for at in range(len(decoder.sound[0]) if decoder.seal is not None else 0):
        for lie in (2**31, 2**62):
            data = decoder.sound[0][:at] + struct.pack("<Q", lie) + decoder.sound[0][at + 8 :]
            yield decoder.seal(data)
    for number in range(count):
        data = hurt(rng.choice(decoder.sound), rng)
        yield decoder.seal(data) if decoder.seal is not None and number % 2 else data


def run(count: int, seed: int) -> tuple[dict[str, tuple[int, int]], list[str]]:
    """Run the cases; gives (cases, refused by name) per decoder, and what went wrong."""
    wrong: list[str] = []
    told: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryDirectory(prefix="rewind-fuzz-") as home:
        for decoder in decoders(Path(home)):
            for sound in decoder.sound:
                decoder.read(sound)  # the cases begin with bytes that are right
            rng = random.Random(f"{seed} {decoder.name}")
            done = refused = 0
            for data in cases(decoder, count, rng):
                done += 1
                try:
                    decoder.read(data)
                except RewindError as error:
                    refused += 1
                    if not error.what:
                        wrong.append(f"{decoder.name}: an error that says nothing: {data[:60]!r}")
                except BaseException as error:
                    kind = f"{decoder.name}: {type(error).__name__}"
                    if not any(text.startswith(kind) for text in wrong):
                        wrong.append(f"{kind}: {str(error)[:160]} for {data[:60]!r}")
            told[decoder.name] = done, refused
    return told, wrong


def limit_memory() -> None:
    """Let this process grow by so much and no more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + HEADROOM_BYTES, used + HEADROOM_BYTES))


def main(arguments: list[str]) -> int:
    """Run from the command line."""
    count, seed = int(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 0
    pa.set_cpu_count(1)
    limit_memory()
    told, wrong = run(count, seed)
    for name, (done, refused) in told.items():
        print(f"{done:8d} cases, {refused:8d} refused by name  {name}")
    for text in sorted(set(wrong))[:60]:
        print(text)
    total = sum(done for done, _ in told.values())
    print(f"{total} cases, {len(wrong)} wrong; again: python -m tests.crash.fuzz_decoders {count} {seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
