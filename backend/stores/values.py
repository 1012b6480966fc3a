"""The values that users put into named stores: MessagePack behind a format byte, checked when written.

Layout of a value (format 1)::

    +--------+------------------------+
    | format | MessagePack (msgspec)  |
    | 1 byte | >= 1 byte              |
    +--------+------------------------+

A store never holds what it could not give back: with a `value_type` every value is validated against it before it is
written, and must come back equal; without one only values whose type MessagePack keeps are taken (a tuple would come
back as a list). There is no pickle anywhere near state.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from backend.errors import UNDECODABLE, ManifestMismatch, StateCorrupted, ValueInvalid, unknown_format
from backend.store.protocol import MAX_VALUE_BYTES

FORMAT = 1
_FORMAT_BYTE = bytes([FORMAT])

_SCALARS = frozenset({bool, int, float, str, bytes})
_MAX_DEPTH = 64
_MODULES = re.compile(r"\b(?:\w+\.)+(?=[\w<])")


class ValueCodec:
    """Turns a store's values into bytes and back.

    Args:
        value_type: A type that msgspec can decode to (`int`, `list[str]`, `dict[str, float]`, a dataclass, a
            `msgspec.Struct`, `datetime`, ...). None: plain values, that is bool, int, float, str, bytes, and lists and
            dicts of plain values and None.

    Raises:
        TypeError: msgspec does not support `value_type`.

    >>> codec = ValueCodec()
    >>> codec.decode(codec.encode({"n": 1, "tags": ["a", None]}))
    {'n': 1, 'tags': ['a', None]}
    >>> typed = ValueCodec(tuple[int, str])
    >>> typed.decode(typed.encode((1, "x")))
    (1, 'x')
    """

    __slots__ = ("_decode", "_encode", "value_type")

    def __init__(self, value_type: Any = None) -> None:
        self.value_type = value_type
        self._encode = msgspec.msgpack.Encoder().encode
        decoder = msgspec.msgpack.Decoder() if value_type is None else msgspec.msgpack.Decoder(value_type)
        self._decode = decoder.decode

    def encode(self, value: object) -> bytes:
        """Encode a value; a numpy scalar is taken as the Python value it holds.

        Raises:
            ValueInvalid: None, a type that would not come back, or over `store.MAX_VALUE_BYTES`.
        """
        if isinstance(value, np.datetime64 | np.timedelta64) and isinstance(value.item(), int):
            raise ValueInvalid("a time of a value is one that Python has none for", why=f"{value} of {value.dtype}")
        if isinstance(value, np.generic):
            value = value.item()
        if value is None:
            raise ValueInvalid("None is no value", why="putting None deletes, where a store has a delete")
        if self.value_type is None:
            _require_plain(value, 0)
        try:
            data = _FORMAT_BYTE + self._encode(value)
            back = value if self.value_type is None else self._decode(memoryview(data)[1:])
        except (msgspec.MsgspecError, TypeError, OverflowError, UnicodeEncodeError) as error:
            raise ValueInvalid(
                f"a value of type {type(value).__name__} cannot be stored",
                why=f"{error} (value_type is {describe_type(self.value_type)})",
            ) from error
        if not _is_same(back, value):
            raise ValueInvalid(
                f"a value of type {type(value).__name__} cannot be stored",
                why=f"it would come back as another one (value_type is {describe_type(self.value_type)})",
            )
        if len(data) > MAX_VALUE_BYTES:
            raise ValueInvalid("a value is over the size bound", why=f"{len(data)} bytes, allowed {MAX_VALUE_BYTES}")
        return data

    def decode(self, data: bytes | None) -> Any:
        """Decode what `encode` gave; None is no value, and stays it.

        Raises:
            UnknownFormat: A newer release wrote it.
            ManifestMismatch: It is a value, and not one of `value_type`: another type wrote it.
            StateCorrupted: The bytes are not a value.
        """
        if data is None:
            return None
        if data[:1] != _FORMAT_BYTE:
            found = f"format {data[:1].hex() or 'missing'}"
            raise unknown_format("a value in a store has an unknown format", found, f"{FORMAT:02x}")
        try:
            return self._decode(memoryview(data)[1:])
        except UNDECODABLE as error:
            why = f"{error} (value_type is {describe_type(self.value_type)})"
            if isinstance(error, msgspec.ValidationError) and _is_sound(data[1:]):
                raise ManifestMismatch(
                    "a value in a store is not one of its value_type",
                    why=why,
                    command="give a field that is new a default, or declare the type that wrote it",
                ) from error
            raise StateCorrupted("a value in a store cannot be decoded", why=why) from error


def describe_type(value_type: Any) -> str:
    """Give a type as text for the manifest: a class by its name, whatever module it was imported as.

    >>> describe_type(None), describe_type(int), describe_type(list[int]), describe_type(list[datetime] | None)
    ('plain', 'int', 'list[int]', 'list[datetime] | None')
    """
    if value_type is None:
        return "plain"
    if isinstance(value_type, type) and not hasattr(value_type, "__args__"):
        return value_type.__qualname__
    return without_modules(str(value_type))


def without_modules(text: str) -> str:
    """Return the text of a type without the modules of its classes, which manifests of before may have.

    >>> without_modules("dict[str, __main__.Visit]")
    'dict[str, Visit]'
    """
    return _MODULES.sub("", text)


def _is_sound(data: bytes) -> bool:
    try:
        msgspec.msgpack.decode(data)
    except UNDECODABLE:
        return False
    return True


def _is_same(back: Any, value: Any) -> bool:
    """Tell whether what came back is what was given: equal, or of its kind where equality does not say it."""
    if back is value or back == value:
        return True
    if isinstance(back, datetime) and isinstance(value, datetime) and back.tzinfo is not None:
        return value.tzinfo is not None and back.timestamp() == value.timestamp()  # an hour that clocks have twice
    if type(back) is not type(value):
        return False
    if isinstance(back, dict):
        return len(back) == len(value) and _is_same([*back.items()], [*value.items()])
    if isinstance(back, list | tuple):
        return len(back) == len(value) and all(map(_is_same, back, value))
    if isinstance(back, float):
        return math.isnan(back) and math.isnan(value)
    names = _fields(back)
    if names:
        return all(_is_same(getattr(back, name), getattr(value, name)) for name in names)
    return not isinstance(back, str | bytes | int)  # a class of the user's, or a set with NaN in it


def _fields(value: Any) -> Sequence[str]:
    """Return the fields of a struct or a dataclass by which it is what it is; none of anything else."""
    if dataclasses.is_dataclass(value):
        return [field.name for field in dataclasses.fields(value) if field.compare and field.name[0] != "_"]
    return tuple(getattr(value, "__struct_fields__", ()))


def _require_plain(value: object, depth: int) -> None:
    kind = type(value)
    if kind in _SCALARS:
        return
    if depth < _MAX_DEPTH and isinstance(value, list) and kind is list:
        for item in value:
            if item is not None:
                _require_plain(item, depth + 1)
        return
    if depth < _MAX_DEPTH and isinstance(value, dict) and kind is dict:
        for key, item in value.items():
            if type(key) not in _SCALARS:
                raise ValueInvalid(
                    f"a dict key of type {type(key).__name__} cannot be stored", why="allowed are plain scalars"
                )
            if item is not None:
                _require_plain(item, depth + 1)
        return
    raise ValueInvalid(
        f"a value of type {kind.__name__} is not plain",
        why="without a value_type allowed are bool, int, float, str, bytes, and lists and dicts of them, "
        f"at most {_MAX_DEPTH} deep: another type would not come back the same",
    )
