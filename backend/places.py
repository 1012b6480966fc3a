"""Places: which directory a path or URI really is, and whether two of them meet.

A directory has many names (a link, `x/../w`, a trailing slash, `file:` or not, relative or absolute, a mount). Outputs,
sources and state that meet in one directory replace or read each other, so places are compared, never names.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Collection, Iterator, Sequence
from itertools import permutations
from pathlib import Path

_SAME = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfss": "abfs"}
"""Schemes that name the same store."""


def real_place(location: str | os.PathLike[str]) -> str:
    """Return the one name of a directory: links followed, absolute; of a URI the scheme and the plain path.

    >>> real_place("s3a://bucket/x/../w/"), real_place("file:///nowhere//w/.")
    ('s3://bucket/w', '/nowhere/w')
    """
    text = plain_path(location)
    scheme, found, rest = text.partition("://")
    if not found:
        return os.path.realpath(text)
    host, _, path = rest.partition("/")
    plain = posixpath.normpath(f"/{path}").lstrip("/")
    return f"{_SAME.get(scheme, scheme)}://{host}" + (f"/{plain}" if plain else "")


def plain_path(location: str | os.PathLike[str]) -> str:
    """Return a location as text, one with `file:` as the path that it is; nothing in that is escaped.

    >>> plain_path("file:///data/run#1"), plain_path("file:/data"), plain_path("file://data/out"), plain_path("s3://b")
    ('/data/run#1', '/data', '/data/out', 's3://b')
    """
    text = os.fspath(location)
    return "/" + text[len("file:") :].lstrip("/") if text.startswith("file:") else text


def is_same(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Check whether two locations are one directory, also by another mount."""
    real, other_real = real_place(one), real_place(other)
    return real == other_real or _one_directory(real, other_real)


def is_within(inner: str, outer: str) -> bool:
    """Check whether a real place is another one, or lies somewhere below it."""
    return any(place == outer or _one_directory(place, outer) for place in _upwards(inner))


def check_apart(places: Sequence[tuple[str, str]], *, inside: Collection[tuple[str, str]] = ()) -> None:
    """Refuse options that name the same directory, or one inside another's.

    Args:
        places: (option, location as given); those of one option may be what they like to each other.
        inside: (option, option): the first may lie below the second, though not be it.

    Raises:
        ValueError: Names both options.
    """
    real = [(option, given, real_place(given)) for option, given in places]
    for (one, given, place), (other, other_given, other_place) in permutations(real, 2):
        if one == other:
            continue
        same = place == other_place or _one_directory(place, other_place)
        if same or ((one, other) not in inside and is_within(place, other_place)):
            kind = "topic" if place.startswith("kafka://") else "directory"
            how = f"is the {kind} of" if same else "lies inside"
            raise ValueError(
                f"{one}={given!r}: {how} {other}={other_given!r} ({other_place}):"
                f" allowed is another {kind}, apart from it"
            )


def check_usable(places: Sequence[tuple[str, str]], own: str) -> None:
    """Refuse options whose directory cannot be made, or is another query's checkpoint or in one.

    Args:
        places: (option, location as given); only local ones are looked at.
        own: The query's own checkpoint: what may lie in it is not decided here.

    Raises:
        ValueError: Names the option, and the checkpoint, or the file that stands where a directory would be.
    """
    mine = real_place(own)
    for option, given in places:
        place = real_place(given)
        for at in _upwards(place) if "://" not in place else ():
            if Path(at).exists() and not Path(at).is_dir():
                raise ValueError(f"{option}={given!r}: {at} is a file: allowed is a directory")
            if at != mine and _is_checkpoint(Path(at)):
                how = "is" if at == place else "lies in"
                raise ValueError(
                    f"{option}={given!r}: {how} the checkpoint of another query ({at}): allowed is a directory outside"
                    " of checkpoints"
                )


def _is_checkpoint(place: Path) -> bool:
    """Check for our manifest, or for what Spark writes at the first start of any streaming query."""
    return (place / "rewind" / "manifest.json").is_file() or (
        (place / "metadata").is_file() and (place / "offsets").is_dir() and (place / "commits").is_dir()
    )


def _upwards(place: str) -> Iterator[str]:
    while True:
        yield place
        parent = posixpath.dirname(place)
        if parent == place or parent.endswith(":/"):
            return
        place = parent


def _one_directory(one: str, other: str) -> bool:
    """Check whether two local paths are one directory under two names, such as a mount's."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):  # one of them is not there, or no local path
        return False
