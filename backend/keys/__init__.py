"""Keys: values as bytes that sort as the values do. `codes` has the format, `columns` the same by columns."""

from backend.keys.codes import code_end, decode, encode, prefix_end
from backend.keys.columns import decode_columns, encode_columns, gather, joined, key_column
from backend.keys.fixed import Bytes2D, beside, fixed_bytes, pack_fixed, to_binary, to_keys, to_rows, unpack_fixed

__all__ = [
    "encode",
    "decode",
    "code_end",
    "prefix_end",
    "encode_columns",
    "decode_columns",
    "gather",
    "joined",
    "key_column",
    "Bytes2D",
    "beside",
    "pack_fixed",
    "unpack_fixed",
    "fixed_bytes",
    "to_keys",
    "to_rows",
    "to_binary",
]
