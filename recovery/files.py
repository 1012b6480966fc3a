"""A directory of files on the checkpoint's filesystem, whatever that is: published whole or not at all.

Everything that recovery stores beside Spark's checkpoint goes through here, so that there is one answer to "when is it
durable" and "what does a reader see of a file that is being written": on return, and nothing.

* Local paths: written under a temporary name, fsynced, moved into place, directory fsynced; files are made 0600 and
  directories 0700, since state holds messages.
* Object stores: an object appears when its upload is complete; written in place.
* Other filesystems (HDFS, SFTP, `memory://`, ...): written under a temporary name, then moved.

Listings never come from a client's cache: another process may have written since.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, TypeVar

import msgspec

from backend.errors import UNDECODABLE, UnknownFormat
from backend.places import plain_path
from backend.store.staging import sync
from backend.store.storage import reached, storage, storage_failed

TEMPORARY = ".tmp-"
"""Mark of a name that is not published yet: `<name>.tmp-<uuid>`; listings leave such names out."""

_PUBLISHED_AT_CLOSE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss"})
_COPIES_LATER = frozenset({"abfs", "abfss", "az", "adl", "oci"})
_COPY_BYTES = 4 * 1024 * 1024
_DELETE_TRIES = 10

Struct = TypeVar("Struct", bound=msgspec.Struct)


class Files(Protocol):
    """A directory; names are relative to it, with `/` between folders."""

    @property
    def uri(self) -> str:
        """Where the directory is, as users write it."""

    def write(self, name: str, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> int:
        """Publish a file atomically, replacing one of that name; durable on return if asked for. Give its bytes."""

    def read(self, name: str) -> bytes:
        """Return a whole file. Raises `FileNotFoundError`."""

    def head(self, name: str, length: int) -> bytes:
        """Return at most the first `length` bytes of a file. Raises `FileNotFoundError`."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Iterate over a file's bytes in chunks of a few megabytes. Raises `FileNotFoundError`."""

    def list(self, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
        """Give names (without the folder) and bytes of the files in a folder; nothing when there is no such folder."""

    def folders(self, folder: str = "") -> Sequence[str]:
        """Give the names of the folders in a folder, sorted."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those already gone are ignored."""

    def delete_folder(self, folder: str, *, follow: bool = True) -> None:
        """Delete a folder and everything in it; one already gone is ignored.

        Args:
            folder: Which.
            follow: Where it is a link to another one, delete what is in that, too.
        """

    def put(self, source: Path, name: str, *, link: bool) -> int:
        """Publish a copy of a local file; durable on return. Give its bytes.

        Args:
            source: A local file.
            name: Name of the copy.
            link: The file is never written again: a hard link will do where both share a filesystem.
        """

    def get(self, name: str, target: Path, *, link: bool) -> None:
        """Copy a file to a new local path and sync it; `link` as in `put`. Raises `FileNotFoundError`."""


def open_files(uri: str | os.PathLike[str]) -> Files:
    """Open a directory by path or fsspec URI; nothing is created before the first write.

    Args:
        uri: `/path`, `file:/path`, `file:///path`, `s3a://bucket/path`, `memory://path`, ...

    Raises:
        ValueError: It is empty, the URI's protocol is not known or its package is not installed, there is a password in
            it, or a file stands where the directory, or one above it, would be.
    """
    text = os.fspath(uri)
    if not text:  # a variable that is not set: never the current directory
        raise ValueError("location '': must be a path or URI")
    check_location(text)
    text = plain_path(text)
    if "://" not in text:
        path = Path(text)
        there = next((at for at in (path, *path.parents) if at.exists()), path)
        if there.exists() and not there.is_dir():
            raise ValueError(f"location {text}: {there} is a file: allowed is a directory")
        return LocalFiles(path)
    return RemoteFiles(text)


def check_location(uri: str, option: str = "") -> None:
    """Refuse a location that Spark would take for another place, or one with a password in it.

    `hdfs:/data` is a URI to Hadoop and a relative path to others. Locations are in the manifest, in logs and in errors.

    Raises:
        ValueError: Says where, without the password, and the option if one is given.
    """
    first = uri.partition("/")[0]
    if ":" in first and "://" not in uri and first != "file:":
        what = f"{option}={uri!r}" if option else f"location {uri!r}"
        uri_said = f"a URI with two slashes, {first}//..., and " if first.endswith(":") else ""
        raise ValueError(f"{what}: allowed are {uri_said}a path that begins with / or ./ (./{first}...)")
    scheme, found, rest = uri.partition("://")
    user, at, host = rest.split("/", 1)[0].rpartition("@")
    if found and at and ":" in user:
        raise ValueError(
            f"location {scheme}://{user.split(':', 1)[0]}:...@{host}: a password in it would be told in manifest and"
            " logs: allowed is to give it to the filesystem's client (its environment variables or configuration file)"
        )


def check_place(place: str | os.PathLike[str], option: str) -> str:
    """Check a path or URI that the driver, its executors and the next driver must all reach; nothing is made.

    Returns:
        The place as text, made `absolute`.

    Raises:
        ValueError: Not a path, of a protocol that is not known or whose package is missing, one that only this
            process sees, or with a password in it.
    """
    if not isinstance(place, str | os.PathLike) or not os.fspath(place):
        raise ValueError(f"{option}={place!r}: must be a path or URI")
    text = os.fspath(place)
    check_location(text, option)
    protocol, found, _ = text.partition("://")
    if found:
        if protocol in _OF_ONE_PROCESS:
            raise ValueError(f"{option}={text!r}: {protocol}:// is seen by one process only: allowed are shared places")
        import fsspec  # what has local paths only need not wait for it

        try:
            fsspec.get_filesystem_class(protocol)
        except (ValueError, ImportError) as error:
            raise ValueError(
                f"{option}={text!r}: {error}; allowed is what fsspec knows and has a package for"
            ) from None
    return absolute(text)


def absolute(location: str) -> str:
    """Make a relative path absolute, because Spark's JVM and its workers may stand elsewhere; URIs stay.

    >>> absolute("s3://bucket/c"), absolute("file:/c"), absolute("/c")
    ('s3://bucket/c', 'file:/c', '/c')
    """
    return location if "://" in location or location.startswith("file:") else str(Path(location).absolute())


_OF_ONE_PROCESS = ("memory", "data", "reference", "zip", "tar", "libarchive")


def is_object_store(filesystem: Any) -> bool:
    """Return whether a file of an fsspec filesystem appears only when it is complete, also when it is copied."""
    return _is_of(filesystem, _PUBLISHED_AT_CLOSE)


def copies_later(filesystem: Any) -> bool:
    """Return whether a store only begins a copy when it is asked for one: the source must stay until it has it all."""
    return _is_of(filesystem, _COPIES_LATER)


def _is_of(filesystem: Any, protocols: frozenset[str]) -> bool:
    protocol = filesystem.protocol
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    return bool(names & protocols)


def move_file(filesystem: Any, source: str, target: str) -> None:
    """Move a file of an fsspec filesystem; the `mv` of those without a move takes `[`, `*`, `?` for a pattern."""
    from fsspec.spec import AbstractFileSystem  # what has local paths only need not wait for it

    if type(filesystem).mv is AbstractFileSystem.mv:
        filesystem.cp_file(source, target)
        filesystem.rm_file(source)
    else:
        filesystem.mv(source, target)


def empty_own(out: Path, mark: str, what: str) -> None:
    """Make a directory, or empty it where it was made before; a link to one, or a filesystem's root, stays.

    Args:
        out: The directory.
        mark: Name of the file that says that it may be emptied; the last one to go, the first one to be made.
        what: Whose it is, for people.

    Raises:
        ValueError: It is a file, or holds something else.
    """
    if (out.exists() or out.is_symlink()) and not out.is_dir():
        raise ValueError(f"out={str(out)!r}: is no directory: allowed is one, or nothing")
    out.mkdir(parents=True, exist_ok=True)
    inside = sorted(one for one in out.iterdir() if one.name != "lost+found")  # of a filesystem's root
    if inside and not (out / mark).exists():
        raise ValueError(f"out={str(out)!r}: is not empty and not of an earlier {what}")
    (out / mark).touch()
    for one in inside:
        if one.name != mark:
            shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()


def make_directory(path: Path) -> None:
    """Create a local directory and those above it, durably; all that are made are this user's alone (0700)."""
    missing = []
    at = path
    while not at.exists():
        missing.append(at)
        at = at.parent
    for made in reversed(missing):
        made.mkdir(mode=0o700, exist_ok=True)
        sync(made.parent)


def copy_file(source: Path, target: Path, *, link: bool) -> None:
    """Copy a local file to a new path and sync its bytes; `link`: by a hard link where that reaches.

    Raises:
        FileNotFoundError: There is no such file, or no directory for the new one.
        StorageFailed: A disk refused; says which of both it was.
    """
    if link:
        try:
            os.link(source, target)
            target.chmod(0o600)
            return
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}:
                raise storage_failed(error, str(target)) from error
    _fill(target, _bytes_of(source))


def _fill(target: Path, chunks: Iterator[bytes]) -> None:
    """Write a new file and sync it; nothing is made where the first chunk does not come."""
    first = next(chunks, b"")
    with storage(str(target)), _new(target) as out:
        for chunk in chain([first], chunks):
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())


def decode_struct(
    data: bytes,
    kind: type[Struct],
    written: int,
    *,
    where: str,
    what: str,
    command: str,
    sound: Callable[[Struct], bool] | None = None,
) -> Struct:
    """Decode JSON of a struct with a field `format`, which is looked at before the others.

    Args:
        data: A JSON object.
        kind: What it holds.
        written: The format that this release reads.
        where: Its place, for the error.
        what: What cannot be read, for the error.
        command: What to do then.
        sound: Whether its checksum is right; None where it has none.

    Raises:
        UnknownFormat: Another release wrote it, or it is damaged.
    """
    try:
        found = msgspec.json.decode(data, type=dict[str, Any]).get("format")
        why = f"format {found!r}, this release reads {written}"
        if found == written:
            made = msgspec.json.decode(data, type=kind)
            if sound is None or sound(made):
                return made
            why = "it does not match its checksum"
    except UNDECODABLE as error:
        why = str(error)
    raise UnknownFormat(what, where=where, why=why, command=command)


def read_struct(files: Files, name: str, kind: type[Struct], written: int, **about: Any) -> Struct | None:
    """Read a file for `decode_struct`, None where there is none; see there."""
    try:
        data = files.read(name)
    except FileNotFoundError:
        return None
    return decode_struct(data, kind, written, where=f"{files.uri}/{name}", **about)


class LocalFiles:
    """`Files` on a local path.

    Args:
        root: The directory; created at the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.uri = str(self.root)

    def write(self, name: str, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> int:
        """Publish a file: temporary name, fsync, move, fsync of the directory; the fsyncs only if `durable`."""
        length = 0
        with self._draft(name, durable=durable) as draft, _new(draft) as handle:
            for chunk in chunks:
                length += handle.write(chunk)
            handle.flush()
            if durable:
                os.fsync(handle.fileno())
        return length

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        with storage(f"{self.root}/{name}"):
            return (self.root / name).read_bytes()

    def chunks(self, name: str) -> Iterator[bytes]:
        """Iterate over a file's bytes."""
        return _bytes_of(self.root / name)

    def head(self, name: str, length: int) -> bytes:
        """Return the first bytes of a file."""
        with storage(f"{self.root}/{name}"), (self.root / name).open("rb") as handle:
            return handle.read(length)

    def list(self, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
        """List a folder's files; files deleted meanwhile are left out."""
        found: dict[str, int] = {}
        try:
            with storage(f"{self.root}/{folder}"), os.scandir(self.root / folder) as entries:
                for entry in entries:
                    if entry.is_file() and (TEMPORARY in entry.name) == temporary:
                        try:
                            found[entry.name] = entry.stat().st_size
                        except FileNotFoundError:
                            continue
        except FileNotFoundError:
            return {}
        return found

    def folders(self, folder: str = "") -> Sequence[str]:
        """List a folder's folders."""
        path = self.root / folder
        with storage(str(path)):
            return sorted(entry.name for entry in path.iterdir() if entry.is_dir()) if path.is_dir() else []

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, then fsync their directories."""
        parents = set()
        for name in names:
            path = self.root / name
            with storage(str(path)):
                path.unlink(missing_ok=True)
            parents.add(path.parent)
        for parent in parents:
            if parent.is_dir():
                sync(parent)

    def delete_folder(self, folder: str, *, follow: bool = True) -> None:
        """Delete a folder, also when others write or delete in it meanwhile; at most `_DELETE_TRIES` times."""
        path = self.root / folder
        if path.is_symlink():
            self._delete_link(path, follow=follow)
        for left in reversed(range(_DELETE_TRIES)):
            if not path.is_dir():
                break
            try:
                shutil.rmtree(path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY) or not left:
                    raise storage_failed(error, str(path)) from error
        if path.parent.is_dir():
            sync(path.parent)

    def _delete_link(self, path: Path, *, follow: bool) -> None:
        """Delete a link to a directory, last, so that an interruption leaves something that leads to the rest."""
        with storage(str(path)):
            target = path.resolve()
            for one in target.iterdir() if follow and target.is_dir() else ():
                if one.is_dir() and not one.is_symlink():
                    LocalFiles(target).delete_folder(one.name)
                else:
                    one.unlink(missing_ok=True)
            path.unlink()
            if follow:
                with suppress(OSError):
                    target.rmdir()

    def put(self, source: Path, name: str, *, link: bool) -> int:
        """Link or copy a local file under a temporary name, then move it into place."""
        with self._draft(name, durable=True) as draft:
            copy_file(source, draft, link=link)
            return draft.stat().st_size

    def get(self, name: str, target: Path, *, link: bool) -> None:
        """Link or copy a file to a local path."""
        copy_file(self.root / name, target, link=link)

    @contextmanager
    def _draft(self, name: str, *, durable: bool) -> Iterator[Path]:
        """Give a temporary name for a file, and move what is there behind the block into place; see `write`."""
        target = self.root / name
        draft = target.with_name(f"{target.name}{TEMPORARY}{uuid.uuid4().hex}")
        with storage(str(target)):
            if not target.parent.is_dir():
                make_directory(target.parent)
            try:
                yield draft
                draft.replace(target)
            finally:
                # moving a link over another link of the same file leaves the draft: POSIX does nothing then
                draft.unlink(missing_ok=True)
            if durable:
                sync(target.parent)


class RemoteFiles:
    """`Files` on an fsspec filesystem.

    Args:
        uri: With its protocol.

    Raises:
        ValueError: The protocol is not known or its package is not installed.
    """

    def __init__(self, uri: str) -> None:
        import fsspec

        try:
            self._fs, root = fsspec.core.url_to_fs(uri)
        except (ValueError, ImportError) as error:
            raise ValueError(f"cannot open {uri!r}: {error}") from error
        self.uri = uri.rstrip("/")
        self._root = root.rstrip("/")
        self._in_place = is_object_store(self._fs)

    def write(self, name: str, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> int:
        """Publish a file: in place where an object appears only when complete, else by a move; always durable."""
        source = _apart(chunks)
        try:
            with reached(f"{self.uri}/{name}"):
                return self._write(self._path(name), source)
        except _OfChunks as error:
            own = error.own
            raise own from own.__cause__

    def _write(self, target: str, chunks: Iterable[bytes | memoryview]) -> int:
        self._fs.makedirs(str(PurePosixPath(target).parent), exist_ok=True)
        if self._in_place:
            return self._upload(target, chunks)
        draft = f"{target}{TEMPORARY}{uuid.uuid4().hex}"
        whole = False
        try:
            with self._fs.open(draft, "wb") as handle:
                length = _write_all(handle, chunks)
            whole = True
            move_file(self._fs, draft, target)
        except BaseException:
            # HDFS deletes what a move replaces first: a move that fails after that leaves the draft alone
            if self._fs.exists(draft) and (not whole or self._fs.exists(target)):
                self._fs.rm_file(draft)
            raise
        return length

    def _upload(self, target: str, chunks: Iterable[bytes | memoryview]) -> int:
        handle = self._fs.open(target, "wb")
        try:
            length = _write_all(handle, chunks)
        except BaseException:
            # closing the handle would publish what there is of it
            handle.discard()
            handle.closed = True
            raise
        handle.close()
        return length

    def read(self, name: str) -> bytes:
        """Return a whole file."""
        with reached(f"{self.uri}/{name}"):
            return bytes(self._fs.cat_file(self._path(name)))

    def chunks(self, name: str) -> Iterator[bytes]:
        """Iterate over a file's bytes."""
        with reached(f"{self.uri}/{name}"), self._fs.open(self._path(name), "rb") as handle:
            yield from iter(lambda: bytes(handle.read(_COPY_BYTES)), b"")

    def head(self, name: str, length: int) -> bytes:
        """Return the first bytes of a file."""
        with reached(f"{self.uri}/{name}"):
            return bytes(self._fs.cat_file(self._path(name), start=0, end=length))

    def list(self, folder: str = "", *, temporary: bool = False) -> dict[str, int]:
        """List a folder's files, past the client's cache."""
        return {
            _last(entry["name"]): int(entry["size"] or 0)
            for entry in self._entries(folder)
            if entry["type"] == "file" and (TEMPORARY in _last(entry["name"])) == temporary
        }

    def folders(self, folder: str = "") -> Sequence[str]:
        """List a folder's folders, past the client's cache."""
        return sorted(_last(entry["name"]) for entry in self._entries(folder) if entry["type"] == "directory")

    def delete(self, names: Iterable[str]) -> None:
        """Delete files."""
        for name in names:
            try:
                with reached(f"{self.uri}/{name}"):
                    self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                continue

    def delete_folder(self, folder: str, *, follow: bool = True) -> None:
        """Delete a folder, at once where the filesystem can and file by file what that leaves; there are no links here.

        `rm` takes a path with `[`, `*` or `?` for a pattern, and that of S3 passes over what the bucket refuses.
        """
        path = self._path(folder)
        with reached(f"{self.uri}/{folder}"), suppress(FileNotFoundError):
            if not set("[*?") & set(path):
                self._fs.rm(path, recursive=True)
        self._delete_objects(folder) if self._in_place else self._delete_tree(folder)

    def _delete_objects(self, folder: str) -> None:
        path = self._path(folder)
        self._fs.invalidate_cache(path)
        with reached(f"{self.uri}/{folder}"), suppress(FileNotFoundError):
            for name in self._fs.find(path):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(name)

    def _delete_tree(self, folder: str) -> None:
        for entry in self._entries(folder):
            name = f"{folder}/{_last(entry['name'])}"
            self._delete_tree(name) if entry["type"] == "directory" else self.delete([name])
        with reached(f"{self.uri}/{folder}"), suppress(FileNotFoundError):
            if self._fs.isdir(self._path(folder)):
                self._fs.rmdir(self._path(folder))

    def put(self, source: Path, name: str, *, link: bool) -> int:
        """Upload a local file."""
        return self.write(name, _bytes_of(source))

    def get(self, name: str, target: Path, *, link: bool) -> None:
        """Download a file and fsync it."""
        _fill(target, self.chunks(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _entries(self, folder: str) -> Sequence[dict[str, Any]]:
        path = self._path(folder)
        self._fs.invalidate_cache(path)
        try:
            with reached(f"{self.uri}/{folder}"):
                found: Sequence[dict[str, Any]] = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return found


class _OfChunks(BaseException):
    """Carries an exception of who gives the bytes past those of the filesystem that takes them."""

    def __init__(self, own: Exception) -> None:
        super().__init__(own)
        self.own = own


def _apart(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    try:
        yield from chunks
    except Exception as error:
        raise _OfChunks(error) from error


def _write_all(handle: Any, chunks: Iterable[bytes | memoryview]) -> int:
    """Write chunks to a file and count their bytes: what `write` returns is not everywhere their number."""
    length = 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        length += rest.nbytes
        while rest:
            done = handle.write(rest)
            if done == 0:
                raise OSError(errno.EIO, "a file takes no more bytes, and does not say why")
            rest = rest[rest.nbytes if done is None else done :]
    return length


def _bytes_of(source: Path) -> Iterator[bytes]:
    with storage(str(source)), source.open("rb") as handle:
        yield from iter(lambda: handle.read(_COPY_BYTES), b"")


def _new(path: Path) -> BinaryIO:
    """Open a new file for writing that only this user may read."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _last(name: str) -> str:
    return PurePosixPath(name).name
