"""What a micro-batch published: number and digest of the rows per shard, to tell when it says something else again.

Spark runs a micro-batch again when it died between the publication and Spark's commit. Its output is a function of the
state before it and of what was logged before it ran, so it makes the same rows, and what readers have seen is what the
state will hold. Where it makes others (a function of the job that is not a pure one, or that was changed meanwhile, a
source that gives other messages), one of both would be wrong without anybody knowing. So a sink keeps the contents of
what it published, compares, and stops the query by name before Spark commits anything.

Rows are digested as the operator made them, in their order (`sequence`), with the names and types of their columns.
Floats count with the precision of 32 bits, seven digits: sums depend on the order of frames in their last digit. A
micro-batch without rows in an output leaves nothing there that readers could have seen, and nothing to compare with.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import pyarrow as pa
import xxhash

from backend.chunks import retyped
from backend.errors import OutputDiffers, SinkConflict
from backend.rows import RowCodec
from backend.sinks.tables import KINDS

log = logging.getLogger("rewind.sink")

Content = tuple[int, str]
"""Number and digest of the rows of a shard in one output."""
Contents = dict[str, dict[int, Content]]
"""`RESULTS` or `ERRORS` -> shard -> content, for the shards that have rows there."""

SHOWN = 3
"""So many differences stand in the error."""
CAUSES = (
    "a micro-batch runs again under the options and on the offsets that it was planned with, so a function of the job"
    " is not deterministic, its code or the release was changed, or the source gives other messages"
)


class Digest:
    """Counts and digests the rows of a shard in one output, table by table.

    >>> digest = Digest()
    >>> digest.add(pa.table({"x": [1.0, 2.0 + 1e-12]})).content == Digest().add(pa.table({"x": [1.0, 2.0]})).content
    True
    >>> digest.content[0], digest.content == Digest().add(pa.table({"x": [2.0, 1.0]})).content
    (2, False)
    """

    def __init__(self) -> None:
        self.rows = 0
        self._hash = xxhash.xxh3_64()

    def add(self, table: pa.Table) -> Digest:
        """Take the next rows; give this object."""
        coarse = pa.schema([pa.field(field.name, _coarse(field.type)) for field in table.schema])
        self._hash.update("\n".join(f"{field.name}: {field.type}" for field in table.schema).encode())
        try:
            RowCodec(coarse).feed(table.cast(coarse, safe=False), self._hash.update)
        except (ValueError, pa.ArrowNotImplementedError):  # a type that no row of the state can have: a user's own
            self._hash.update(repr(table.to_pylist()).encode())
        self.rows += table.num_rows
        return self

    @property
    def content(self) -> Content:
        """Number and digest of the rows so far."""
        return self.rows, self._hash.hexdigest()


def gathered(shards: Mapping[int, Mapping[str, Content]]) -> Contents:
    """Return the contents of a micro-batch, given each shard's by output; what has no rows is left out."""
    return {
        kind: {shard: content[kind] for shard, content in sorted(shards.items()) if content[kind][0]} for kind in KINDS
    }


def check_ahead(out: int, version: int, *, where: str, command: str) -> None:
    """Refuse to publish to what is ahead of a micro-batch.

    Args:
        out: The newest micro-batch that is out.
        version: Spark's batch id, or what the checkpoint has planned.
        where: The output.
        command: How to go on.

    Raises:
        SinkConflict: It is.
    """
    if out > version:
        raise SinkConflict(
            "the output is ahead of the checkpoint",
            where=where,
            why=f"micro-batch {out} is out, this is {version}: the checkpoint went back or is a copy",
            command=command,
        )


def check_same(
    known: Contents, made: Contents, *, version: int, where: str, command: str, accept: int | None = None
) -> None:
    """Refuse a micro-batch that ran again and made other rows than it published before.

    Args:
        known: What it published; outputs that are not in it are not compared.
        made: What it made now.
        version: Spark's batch id.
        where: The output.
        command: How to go on with what is out, or with what was made now.
        accept: Micro-batch of which what is out counts, whatever was made now.

    Raises:
        OutputDiffers: They differ; says where.
    """
    found = list(_differences(known, made))
    if not found:
        return
    more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    error = OutputDiffers(
        f"micro-batch {version} was published, ran again, and made other rows",
        where=where,
        why=f"{', '.join(found[:SHOWN])}{more}: {CAUSES}",
        command=command,
    )
    if version != accept:
        raise error
    log.warning("what readers have seen stays, the state holds the other: %s", error)


def check_whole(kind: str, known: Content, made: Content, *, version: int, where: str, accept: int | None) -> bool:
    """Refuse an output of a micro-batch that ran again and made other rows, known as a whole.

    Args:
        kind: `RESULTS` or `ERRORS`.
        known: What it published.
        made: What it made now.
        version: Spark's batch id.
        where: The output.
        accept: Micro-batch of which what is out counts, whatever was made now.

    Returns:
        Whether they are the same; False where that is accepted.

    Raises:
        OutputDiffers: They differ.
    """
    if tuple(known) == tuple(made):
        return True
    if version == accept:
        log.warning("%s: micro-batch %d ran again and made other %s; those before stay", where, version, kind)
        return False
    raise OutputDiffers(
        f"micro-batch {version} was published, ran again, and made other rows",
        where=where,
        why=f"published {known[0]} {kind}, now {made[0] if made[0] != known[0] else 'others'}: {CAUSES}",
        command=f"to let those that were published count, give the sink accept_published={version}; or start with"
        " another output",
    )


def check_accepted(accept_published: int | None) -> None:
    """Check the option of that name.

    Raises:
        ValueError: It is no micro-batch's number.
    """
    if accept_published is not None and (type(accept_published) is not int or accept_published < 0):
        raise ValueError(f"accept_published={accept_published!r}: must be the number of a micro-batch, or None")


def _differences(known: Contents, made: Contents) -> Iterable[str]:
    for kind in KINDS:
        if kind not in known:
            continue
        before, now = known[kind], made.get(kind, {})
        for shard in sorted({*before, *now}):
            old, new = tuple(before.get(shard, (0, ""))), tuple(now.get(shard, (0, "")))
            if old != new:
                text = f"{old[0]} {kind}, now {new[0]}" if old[0] != new[0] else f"{old[0]} {kind}, now others"
                yield f"shard {shard} published {text}"


def _coarse(kind: pa.DataType) -> pa.DataType:
    """Give a type in which floats of 64 bits have 32."""
    if pa.types.is_float64(kind):
        return pa.float32()
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, _coarse(kind.item_type))  # keys are what they are
    if pa.types.is_fixed_size_list(kind):  # what Arrow can cast such lists to differs: their kind stays
        return pa.list_(kind.value_field.with_type(_coarse(kind.value_type)), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_coarse(kind.value_type)))
    return retyped(kind, _coarse)
