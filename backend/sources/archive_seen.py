"""What a query has read of an archive, and whether the archive still is what was read.

A topic only grows at its end. An archive is a directory: files may come with offsets that were passed already (a copy
that was not complete when the query started), fill a gap that was declared, or replace others. Such messages would
never be read, without an error. So the driver remembers which files and declared gaps lie below the positions, and
every look at the archive is compared with it, at the start and before each micro-batch.

File `<checkpoint>/rewind/archive/<number of the source>.json` (format 1), written before Spark logs the offset to which
it belongs; it may be ahead of that, so it is always judged by the positions that Spark logged::

    {"format": 1, "first": [["t", 0, 0]], "files": [...], "gaps": [...], "checksum": "..."}

`first` is the first offset that was ever read, per topic and partition; `files` and `gaps` are as in the archive's own
index (of results the newest file of each shard by planned micro-batch, whose digests vouch for those before them);
`checksum` is the xxh3-128 of the same with an empty one. Files that were taken away are forgotten: a replay that needs
them says so. A replaced file is told by its footer: one with other messages and the very same footer is found by a
replay's count and digest only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import xxhash

from backend.errors import SourceInvalid, SourceWentBack
from backend.sources import TopicPartition
from backend.sources.archive_footer import FileEntry
from backend.sources.archive_index import Archive, Gap, covered
from recovery.files import open_files, read_struct

FORMAT = 1
DIRECTORY = "rewind/archive"
_ANEW = "or begin anew with the archive as it is now: rewind reset <checkpoint>"


class Seen(msgspec.Struct, frozen=True):
    """What was read of an archive; see the module."""

    format: int = FORMAT
    first: list[tuple[str, int, int]] = []
    files: list[FileEntry] = []
    gaps: list[Gap] = []
    checksum: str = ""

    def sealed(self) -> Seen:
        """Return it with its checksum."""
        plain = msgspec.structs.replace(self, checksum="")
        return msgspec.structs.replace(self, checksum=xxhash.xxh3_128_hexdigest(msgspec.json.encode(plain)))

    @property
    def firsts(self) -> dict[TopicPartition, int]:
        """The first offset that was read, by source partition."""
        return {(topic, partition): first for topic, partition, first in self.first}


@dataclass(slots=True)
class Memory:
    """Remembers what one source of a query read.

    Args:
        checkpoint: Spark's checkpoint location; "" remembers in this process only.
        number: Of the source, in the order of the plan.
    """

    checkpoint: str
    number: int
    _seen: Seen | None = field(default=None)

    @property
    def seen(self) -> Seen:
        """What was read so far.

        Raises:
            UnknownFormat: The file cannot be read.
        """
        if self._seen is None and self.checkpoint:
            self._seen = read_struct(
                open_files(self.checkpoint),
                self._name,
                Seen,
                FORMAT,
                what="what was read of the archive cannot be read",
                command="install the release that wrote it; or delete the file: then what changed since is not noticed",
                sound=lambda seen: seen == seen.sealed(),
            )
        self._seen = self._seen or Seen()  # nothing is read yet, or by a release that did not remember
        return self._seen

    def remember(
        self,
        archive: Archive,
        firsts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
    ) -> None:
        """Remember that everything below some offsets is read; durable on return.

        Args:
            archive: What is read, as of its last look.
            firsts: The first offset that was read, by source partition.
            ends: The next offset to read.
        """
        gaps = [
            Gap(topic, partition, *gap)
            for (topic, partition), index in sorted(archive.found.items())
            for gap in index.gaps
            if gap[0] < ends.get((topic, partition), gap[0])
        ]
        begun = archive.begun(self.seen.files, ends)
        now = Seen(FORMAT, sorted((*key, first) for key, first in firsts.items()), begun, gaps).sealed()
        if now == self.seen:
            return
        if self.checkpoint:
            open_files(self.checkpoint).write(self._name, [msgspec.json.encode(now)])
        self._seen = now

    @property
    def _name(self) -> str:
        return f"{DIRECTORY}/{self.number}.json"


def check_topics(archive: Archive, known: tuple[str, ...]) -> None:
    """Refuse files of topics that the query does not know, as of the last look.

    Raises:
        SourceInvalid: Names the file and the topic.
    """
    strays = sorted({topic for topic, _ in archive.found} - set(known))
    if not strays:
        return
    path = next(path for path, entry in sorted(archive.files.items()) if strays[0] in {s.topic for s in entry.spans})
    raise SourceInvalid(
        f"the archive has a file of another topic, {strays[0]!r}",
        where=f"{archive.uri}/{path}",
        why=f"the query reads {', '.join(known)}: what the archive held when it first started",
        command=f"remove the file, or leave the topic out: archive(..., topics={sorted(known)})",
    )


def check_seen(
    archive: Archive, seen: Seen, firsts: Mapping[TopicPartition, int], positions: Mapping[TopicPartition, int]
) -> None:
    """Check that nothing below the positions is there that was not there when they were passed.

    Args:
        archive: As of its last look.
        seen: What was remembered.
        firsts: The first offset that was read, by source partition; those that are not there are not judged by it.
        positions: The next offset to read.

    Raises:
        SourceWentBack: Names the file.
    """
    uri, files = archive.uri, archive.files
    passed: dict[TopicPartition, list[Gap]] = {}
    for gap in seen.gaps:
        passed.setdefault((gap.topic, gap.partition), []).append(gap)
    for key, position in sorted(positions.items()):
        index = archive.found.get(key)
        if index is None:
            continue
        where, lowest = f"{key[0]}-{key[1]}", index.slices[0]
        first = firsts.get(key, lowest.first)
        if lowest.first < first:
            raise SourceWentBack(
                "the archive has offsets below those that the query began with: they would never be read",
                where=f"{uri}/{lowest.path}, {where}",
                why=f"the file begins with offset {lowest.first}; the query began with {first} and reads {position}"
                " next",
                command=f"move the file out of the archive, {_ANEW}",
            )
        declared = set(index.gaps)
        for gap in passed.get(key, []):
            low, high = max(gap.start, lowest.first, first), min(gap.end, position)
            if (gap.start, gap.end) in declared or low >= high or covered(index.gaps, low, high) == high - low:
                continue
            path = next((one.path for one in index.slices if one.first < high and one.last >= low), lowest.path)
            raise SourceWentBack(
                "the archive has offsets that were a declared gap when the query passed them",
                where=f"{uri}/{path}, {where}",
                why=f"the gap was {gap.start} to {gap.end - 1}; the query reads {position} next",
                command=f"declare the gap again and take its messages out, {_ANEW}",
            )
    for old in seen.files:
        now = files.get(old.path)
        # a digest of results that was remembered before they vouched for those before them is the beginning of one
        same = now is None or (now.bytes == old.bytes and (now.digest.startswith(old.digest) or not now.digest))
        begun = [span for span in old.spans if span.first < positions.get((span.topic, span.partition), span.first)]
        if now is None and begun and archive.all_stay:
            raise SourceWentBack(
                "results were taken away after they were read: the offsets of those behind them are by their number",
                where=f"{uri}/{old.path}",
                why=f"it held {_words(old)}",
                command=f"put the files back, {_ANEW}",
            )
        if now is None or same or not begun:
            continue
        before, holds = _words(old), _words(now)
        raise SourceWentBack(
            "a file of the archive was replaced after it was read",
            where=f"{uri}/{old.path}",
            # results have no lengths of their own here
            why=f"it held {before}, now {holds}, or one before it of its shard holds other rows"
            if archive.all_stay
            else f"it held {before} in {old.bytes} bytes, now {holds} in {now.bytes}",
            command=f"put the file back as it was, and new messages into new files, {_ANEW}",
        )


def _words(entry: FileEntry) -> str:
    return ", ".join(f"{one.topic}-{one.partition} {one.first} to {one.last}" for one in entry.spans) or "nothing"
