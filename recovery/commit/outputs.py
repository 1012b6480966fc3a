"""The outputs of a checkpoint's query: a restart that would write elsewhere is refused before anything is made.

File `<checkpoint>/rewind/outputs.json` (format 1): `{"format": 1, "number": 1, "outputs": {...}, "before": []}`, what
the sink says of itself (`Sink.describe`); null once the user wants others, which get the next number and with it
another name for the query (`output_id`): the outputs before them, listed in `before`, are then refused like another
query's.

Directories and tables may move: those that hold this query's output, by their own marks, are the same under any path,
catalog or URL, as long as the mode and the key stay. Topics are known by their names. A function (`foreach_sink`) is
the user's matter; so is a sink of the user's own. A checkpoint of release 0.1 has no such file: its next start writes
it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from backend.errors import UNDECODABLE, ManifestMismatch, StateCorrupted, unknown_format
from backend.texts import one_line
from recovery.files import open_files

if TYPE_CHECKING:
    from backend.sinks import Sink

log = logging.getLogger("rewind.start")

FORMAT = 1
NAME = "rewind/outputs.json"
_NOTHING_YET = '{"format": 1, "number": 1, "outputs": null}'
"""What the next start takes as leave to write to what it is given."""
_PLACES = {
    "parquet": ("results", "errors"),
    "kafka": ("results", "errors", "commits"),
    "delta": ("results", "errors"),
    "iceberg": ("catalog", "uri", "warehouse", "results", "errors"),
    "sql": ("url", "schema", "results", "errors"),
}
"""What names an output, per kind of sink."""
_OWN = ("results", "commits")
"""What makes outputs the ones before, though the query has another name in them."""
_FIXED = ("mode", "key")
"""What the rows that are out mean: it stays, wherever they have moved."""


def check_outputs(checkpoint: str, query: str, sink: Sink) -> None:
    """Check that a sink is the one that the checkpoint's query has written to; touches nothing.

    Args:
        checkpoint: Spark's checkpoint location.
        query: What `output_id` gives.
        sink: As given.

    Raises:
        ManifestMismatch: It is another one, and Spark has planned micro-batches.
        StateCorrupted: The file that says it is damaged.
        UnknownFormat: Another release wrote that file.
    """
    before = read_outputs(checkpoint)
    if before is None or not any(name.isdigit() for name in open_files(checkpoint).list("offsets")):
        return
    now = _json(sink.describe())
    if _named(before) == _named(now):
        return
    holds = getattr(sink, "holds", None)
    same = all(before.get(name) == now.get(name) for name in ("kind", *_FIXED))
    if same and holds is not None and holds(query):
        log.warning("the output has moved: it was %s, is %s", text_of(before), text_of(now))
        return
    raise ManifestMismatch(
        "the output is another one than this query has written to",
        where=checkpoint,
        why=f"it was {text_of(before)}; it is {text_of(now)}"
        + (", which does not hold this query's output" if same else ""),
        command=f"give the output as it was (what moved with all that is in it), or, to go on in new ones:"
        f" rewind outputs {quote(checkpoint)} --new",
    )


def output_id(checkpoint: str, query: str) -> str:
    """Return the query's name for its outputs: its id, numbered from the second outputs on."""
    return _id(query, _read(checkpoint)[0])


def all_outputs(checkpoint: str, query: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the query's name for its outputs, and the outputs, of all that it ever wrote to; the newest first."""
    number, now, before = _read(checkpoint)
    known = [*enumerate(before, number - len(before)), *([] if now is None else [(number, now)])]
    return [(_id(query, at), outputs) for at, outputs in reversed(known)]


def are_new(checkpoint: str, sink: Sink) -> bool:
    """Return whether nothing is out in a sink, whatever was planned: it is none of those before `forget_outputs`, and
    no start has opened one since. A file put back by hand does not say so.
    """
    _, now, before = _read(checkpoint)
    given = _json(sink.describe())
    return now is None and bool(before) and not any(_may_hold(one, given) for one in before)


def _id(query: str, number: int) -> str:
    return query if number == 1 else f"{query}-{number}"


def write_outputs(checkpoint: str, sink: Sink) -> None:
    """Write down which outputs the query writes to; durable on return."""
    number, known, before = _read(checkpoint)
    now = _json(sink.describe())
    if known != now:
        _write(checkpoint, number, now, before)


def read_outputs(checkpoint: str) -> dict[str, Any] | None:
    """Read which outputs the query wrote to; None where nothing is written. Raises as `check_outputs` for the file."""
    return _read(checkpoint)[1]


def forget_outputs(checkpoint: str) -> None:
    """Let the next start write to whatever outputs it is given, the ones before excepted; durable on return."""
    number, now, before = _read(checkpoint)
    if now is not None:
        _write(checkpoint, number + 1, None, [*before, now])


def _read(checkpoint: str) -> tuple[int, dict[str, Any] | None, list[dict[str, Any]]]:
    """Read the outputs' number, the outputs, and those before them.

    Raises:
        StateCorrupted: The file is damaged.
        UnknownFormat: Another release wrote it.
    """
    where = f"{checkpoint}/{NAME}"
    try:
        found = json.loads(open_files(checkpoint).read(NAME))
        if found["format"] != FORMAT:
            what = "what the query writes to is written in an unknown format"
            raise unknown_format(what, repr(found["format"]), FORMAT, where)
        number, now, before = found["number"], found["outputs"], found.get("before", [])
        if (
            type(number) is not int
            or type(before) is not list
            or number <= len(before)
            or not all(_is_whole(one) for one in [*([] if now is None else [now]), *before])
        ):
            raise ValueError(f"number {number!r}, outputs {now!r}, before {before!r}")
        return number, now, before
    except FileNotFoundError:
        return 1, None, []
    except UNDECODABLE as error:
        raise StateCorrupted(
            "what the query writes to cannot be read",
            where=where,
            why=one_line(str(error)),
            command="put the file back from a copy of the checkpoint; without one, see for yourself that the job writes"
            f" to where it did, and write {_NOTHING_YET} into the file, with another number where rewind outputs --new"
            " was used: the one in which the query's name in the outputs ends (of directories in _rewind/owner.json, of"
            " topics in the newest record of the commit topic). rewind reset knows of no outputs before these then",
        ) from error


def _is_whole(outputs: object) -> bool:
    """Tell whether it is what a sink says of itself; `rewind reset` reads the places of directories and topics."""
    if type(outputs) is not dict:
        return False
    return outputs.get("kind") not in ("parquet", "kafka") or all(
        type(outputs.get(name)) is str for name in ("results", "errors")
    )


def _write(checkpoint: str, number: int, outputs: dict[str, Any] | None, before: list[dict[str, Any]]) -> None:
    content = {"format": FORMAT, "number": number, "outputs": outputs, "before": before}
    open_files(checkpoint).write(NAME, [json.dumps(content).encode()])


def _may_hold(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether what was published to outputs may be in others; errors may go where those of other queries go."""
    if before.get("kind") != now.get("kind"):
        return False
    return before == now or any(name in now and before.get(name) == now[name] for name in _OWN)


def _named(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what makes an output the one that it is; of a kind of the user's own, the kind alone."""
    places = _PLACES.get(str(outputs.get("kind")), ())
    return {name: outputs.get(name) for name in ("kind", *places, *(_FIXED if places else ()))}


def text_of(outputs: Mapping[str, Any]) -> str:
    """Name outputs for people: their kind, and what makes them the ones that they are."""
    named = _named(outputs)
    kind = named.pop("kind")
    if named.get("url"):  # one that an older release wrote may have a password in its query
        named["url"] = str(named["url"]).partition("?")[0]
    places = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    return f"{kind}" + (f" ({places})" if places else "")


def _json(value: Mapping[str, object]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(value, default=str)))
