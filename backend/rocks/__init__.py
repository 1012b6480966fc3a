"""The RocksDB store: the only package that imports rocksdict."""

from backend.rocks.files import write_staged
from backend.rocks.options import RocksOptions
from backend.rocks.store import RocksStore

__all__ = ["RocksOptions", "RocksStore", "write_staged"]
