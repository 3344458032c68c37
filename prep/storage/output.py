"""Stores that shards are written to: a local folder or an object store, behind one interface.

A file appears complete or not at all. A store has one writer that holds its lock; jobs hold none, and write through a
pinned copy. Partial files of a killed run do not last: in a folder they have a temporary name and a lock that ended
with the process, and the next run deletes them. An upload is first collected in an unnamed local file; the parts of a
killed multipart upload, which no reader sees, are left to the store's own rule for them.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from resolute.errors import ResoluteError, StorageError, strip_credentials
from resolute.files import atomic_file, delete_partial, sync_folder, write_errors
from resolute.lock import exclusive_lock
from resolute.pipeline.storage.drivers import file_system
from resolute.pipeline.storage.request_errors import GONE, http_status
from resolute.urls import local_path

from .hashed_file import AtomicFile, FileInfo
from .lease import Lease
from .retry import retry

__all__ = ["LOCK", "RUN_FOLDER", "LocalStore", "OutputBucket", "Store", "open_output", "read_present"]

RUN_FOLDER = ".prep"  # in OUT until the set is finished: lists, lock, and the plan for jobs
LOCK = f"{RUN_FOLDER}/lock"  # a file; in an object store a folder of lock objects
_RECENT_S = 1.0  # a check of the lock that is this old still counts for small files and deletions


class Store(Protocol):
    """Files by name: POSIX paths relative to OUT. Picklable. Methods raise `ResoluteError` if the store refuses."""

    @property
    def where(self) -> str: ...  # folder or URL without credentials, for messages
    @property
    def is_private(self) -> bool: ...  # in this process's memory: no other process sees it
    def size(self, name: str) -> int | None: ...  # bytes; None if there is no such file
    def read(self, name: str) -> bytes: ...  # raises FileNotFoundError
    def open(self, name: str) -> BinaryIO: ...  # seekable, for reading; raises FileNotFoundError
    def local(self, name: str, scratch: Path) -> Path: ...  # path of the file, or of a copy in `scratch`
    def names(self, folder: str = "") -> list[str]: ...  # of files in a folder, sorted; [] if there is no folder
    def sizes(self, folder: str = "") -> dict[str, int]: ...  # name -> bytes of the files in a folder
    def folders(self) -> list[str]: ...  # names of the top-level folders, sorted
    def create(self, name: str) -> AtomicFile: ...  # the file appears when its block ends normally
    def remove(self, name: str) -> None: ...
    def remove_all(self, names: Sequence[str]) -> None: ...  # at most 1000
    def remove_folder(self, name: str) -> None: ...  # only if it is empty
    def sync(self, folder: str) -> None: ...  # make deletions in the folder durable
    # delete what killed writers left of files with names that satisfy `of`
    def delete_partial(self, of: Callable[[str], object]) -> None: ...
    # raises if another run holds it; yields a check that raises if the folder is no longer the locked one
    def exclusive_lock(self) -> AbstractContextManager[Callable[[], None]]: ...
    # a copy, for other processes and machines, that makes no file appear once the file `name` has other bytes than now
    def pinned(self, name: str) -> Store: ...
    def check_pin(self) -> None: ...  # raises `StorageError` if it does so already

    def write(self, name: str, data: bytes) -> FileInfo:
        """Write a small file in one call."""
        with self.create(name) as file:
            file.write(data)
        return file.info()

    def write_small(self, name: str, data: bytes) -> None:
        """As `write`; a store may rely on a check of the lock that is a second old."""
        self.write(name, data)


def open_output(out: str) -> Store:
    """The store for a local folder or for an fsspec URL such as `s3://bucket/shards`."""
    folder = local_path(out)
    return OutputBucket(out.rstrip("/")) if folder is None else LocalStore(Path(folder))


@dataclass(frozen=True)
class LocalStore(Store):
    """A folder on a local or shared file system."""

    root: Path
    _pin: tuple[str, bytes] | None = field(default=None, compare=False, repr=False)  # name and bytes, in a pinned copy

    @property
    def where(self) -> str:
        return str(self.root)

    @property
    def is_private(self) -> bool:
        return False

    def size(self, name: str) -> int | None:
        try:
            return (self.root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        return (self.root / name).open("rb")

    def local(self, name: str, scratch: Path) -> Path:
        return self.root / name

    def names(self, folder: str = "") -> list[str]:
        path = self.root / folder
        return sorted(path.name for path in path.iterdir() if path.is_file()) if path.is_dir() else []

    def sizes(self, folder: str = "") -> dict[str, int]:
        try:
            with os.scandir(self.root / folder) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []

    def create(self, name: str) -> AtomicFile:
        self.check_pin()  # why also here: without the shared disk, its folders must not be made on the local one
        path = self.root / name
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        file = atomic_file(path) if self._pin is None else self._pinned_file(path)
        return AtomicFile(file, partial(write_errors, path))

    @contextmanager
    def _pinned_file(self, path: Path) -> Iterator[BinaryIO]:
        """As `atomic_file`, but the file only appears if the pinned file is still the same."""
        with atomic_file(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # why here: it may take long, and nothing that does may follow the check
            self.check_pin()

    def pinned(self, name: str) -> LocalStore:
        return LocalStore(self.root, (name, read_present(self, name)))

    def check_pin(self) -> None:
        if self._pin is not None:
            _check_pin(self, *self._pin)

    def remove(self, name: str) -> None:
        with write_errors(self.root / name):
            (self.root / name).unlink(missing_ok=True)

    def remove_all(self, names: Sequence[str]) -> None:
        for name in names:
            self.remove(name)

    def remove_folder(self, name: str) -> None:
        with write_errors(self.root / name):
            try:
                (self.root / name).rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise

    def sync(self, folder: str) -> None:
        with write_errors(self.root / folder):
            sync_folder(self.root / folder)

    def delete_partial(self, of: Callable[[str], object]) -> None:
        with write_errors(self.root):
            delete_partial(self.root, of=of)
            for folder in self.folders():
                delete_partial(self.root / folder, of=partial(_is_in, of, folder))

    @contextmanager
    def exclusive_lock(self) -> Iterator[Callable[[], None]]:
        """Hold a file lock, which the operating system releases however the process ends.

        Yields a check that raises `StorageError` if the folder has been replaced since, as by a lost mount.
        """
        created = not self.root.exists()
        with write_errors(self.root / RUN_FOLDER):
            (self.root / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            with exclusive_lock(
                self.root / LOCK, folder=self.root, writer="prep", remedy="choose another OUT"
            ) as is_held:
                yield partial(_check_lock, self.root, is_held)
        finally:
            self.remove_folder(RUN_FOLDER)
            if created:  # why: a failed run leaves no empty folder
                self.remove_folder("")


def read_present(store: Store, name: str) -> bytes:
    """The content of a file, b"" if it is missing. Raises `StorageError` if storage stays unavailable."""

    def read() -> bytes:
        try:
            return store.read(name)
        except (FileNotFoundError, NotADirectoryError):
            return b""

    return retry(f"{store.where}/{name}", read)


def _check_pin(store: Store, name: str, data: bytes) -> None:
    """Raise `StorageError` unless the file `name` still holds `data`."""
    now = read_present(store, name)
    if now != data:
        raise StorageError(
            f"{store.where}: no longer the set that this job works on, got {'another' if now else 'no'} plan at "
            f"{name}, expected the one that it began with; nothing more is written: plan again, unless the set is "
            "finished"
        )


def _is_in(of: Callable[[str], object], folder: str, name: str) -> object:
    return of(f"{folder}/{name}")


def _check_lock(root: Path, is_held: Callable[[], bool]) -> None:
    if not is_held():
        raise StorageError(
            f"{root}: replaced while prep was writing, got a folder without this run's lock, expected the one that it "
            "began in; mount its volume again, then run the same command: it continues"
        )


class _CheckedReads(io.RawIOBase):
    """A driver's file that reads within `errors()`, as it was opened."""

    def __init__(self, file: Any, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self._file, self._errors = file, errors

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        with self._errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True)
class OutputBucket(Store):
    """A prefix in an object store, or in another store that fsspec knows. An upload appears complete or not at all."""

    url: str
    _lease: Lease = field(default_factory=lambda: Lease(LOCK), compare=False, repr=False)
    _pin: tuple[str, bytes] | None = field(default=None, compare=False, repr=False)  # name and bytes, in a pinned copy

    @property
    def where(self) -> str:
        return strip_credentials(self.url)

    @property
    def is_private(self) -> bool:
        from fsspec.implementations.memory import MemoryFileSystem

        return isinstance(self._fs, MemoryFileSystem)

    @property
    def _fs(self) -> Any:
        fs = file_system(self.url)[0]
        fs.invalidate_cache()  # why: huggingface_hub keeps listings all the same
        return fs

    def _path(self, name: str) -> str:
        base = file_system(self.url)[1]
        return f"{base}/{name}" if name else base

    @contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        """Turn any exception of the store's driver into a `ResoluteError`; `FileNotFoundError` passes through."""
        try:
            yield
        except ResoluteError:
            raise
        except Exception as error:  # why: every driver raises its own exception types
            status = http_status(error)
            if status in GONE or (status is None and isinstance(error, FileNotFoundError)):
                raise FileNotFoundError(name) from error  # huggingface_hub has types of its own
            words = getattr(error, "strerror", None) or str(error)
            message = " ".join(words.split()) or type(error).__name__
            raise ResoluteError(
                f"{self.where}/{name}: the store refused the request, got '{message}', expected success; check its "
                "address, credentials and permissions, then run the same command again"
            ) from None

    def size(self, name: str) -> int | None:
        with self._store_errors(name):
            try:
                return int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        with self._store_errors(name):
            data: bytes = self._fs.cat_file(self._path(name))
        return data

    def open(self, name: str) -> BinaryIO:
        with self._store_errors(name):
            file = self._fs.open(self._path(name), "rb", cache_type="readahead", block_size=8 << 20)
        return io.BufferedReader(_CheckedReads(file, partial(self._store_errors, name)))

    def local(self, name: str, scratch: Path) -> Path:
        path = scratch / name.replace("/", "-")
        with self._store_errors(name):
            self._fs.get_file(self._path(name), str(path))
        return path

    def _list(self, folder: str, kind: str) -> dict[str, int]:
        with self._store_errors(folder):
            try:
                rows = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return {}
        rows = [(row["name"].rstrip("/").rpartition("/")[2], row) for row in rows if row["type"] == kind]
        return {name: int(row.get("size") or 0) for name, row in rows if name}

    def names(self, folder: str = "") -> list[str]:
        return sorted(self._list(folder, "file"))

    def sizes(self, folder: str = "") -> dict[str, int]:
        return self._list(folder, "file")

    def folders(self) -> list[str]:
        return sorted(self._list("", "directory"))

    def create(self, name: str) -> AtomicFile:
        return AtomicFile(self._upload(name), partial(write_errors, tempfile.gettempdir()))

    @contextmanager
    def _upload(self, name: str) -> Iterator[BinaryIO]:
        """An unnamed local file, which ends with this process; uploaded when the block ends without an exception."""
        with tempfile.TemporaryFile() as file:
            yield cast(BinaryIO, file)
            file.flush()
            self._check()
            with self._upload_errors(name):
                self._fs.put_file(f"/proc/self/fd/{file.fileno()}", self._path(name))
            self._check()  # why again: the lock may have been lost during a long upload

    def _check(self) -> None:
        """Raise `StorageError` if this process may not write any more."""
        self._lease.check(self)
        self.check_pin()

    @contextmanager
    def _upload_errors(self, name: str) -> Iterator[None]:
        """As `_store_errors`, but a `FileNotFoundError` (no such bucket) also becomes a `ResoluteError`."""
        with self._store_errors(name):
            try:
                yield
            except FileNotFoundError as error:  # no such bucket
                raise OSError(str(error)) from None

    def put(self, name: str, data: bytes) -> None:
        """Write a small object in one call, without checking the lock."""
        with self._upload_errors(name):
            self._fs.pipe_file(self._path(name), data)

    def put_new(self, name: str, data: bytes) -> bool:
        """Write a small object unless one exists; returns whether the object now holds `data`."""
        with self._upload_errors(name), suppress(FileExistsError):
            self._fs.pipe_file(self._path(name), data, mode="create")
        # why always read back: a lost answer makes the driver repeat the request, and some stores ignore conditions
        try:
            return self.read(name) == data
        except FileNotFoundError:
            return False

    def write_small(self, name: str, data: bytes) -> None:
        self._lease.check(self, recent_s=_RECENT_S)
        self.put(name, data)

    def remove(self, name: str) -> None:
        self._lease.check(self, recent_s=_RECENT_S)
        self.delete(name)

    def remove_all(self, names: Sequence[str]) -> None:
        self._lease.check(self, recent_s=_RECENT_S)
        with suppress(FileNotFoundError), self._store_errors(names[0]):
            if not self.url.startswith("hf://"):  # its driver takes one name
                self._fs.rm([self._path(name) for name in names])
                return
        for name in names:  # why: such a store, unlike S3, deletes none after the first that is missing
            self.delete(name)

    def delete(self, name: str) -> None:
        """Delete an object, without checking the lock."""
        with suppress(FileNotFoundError), self._store_errors(name):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        pass  # why: a prefix disappears with its last object

    def sync(self, folder: str) -> None:
        pass  # why: an object is durable once its upload is acknowledged

    def delete_partial(self, of: Callable[[str], object]) -> None:
        pass  # why: no reader sees the parts of an upload that was killed, and stores can expire them

    @contextmanager
    def exclusive_lock(self) -> Iterator[Callable[[], None]]:
        """Hold a lock that is renewed, and checked before every object is written or deleted: see `lease`."""
        with self._lease.held(self):
            yield lambda: None

    def pinned(self, name: str) -> OutputBucket:
        return OutputBucket(self.url, self._lease, (name, read_present(self, name)))

    def check_pin(self) -> None:
        if self._pin is not None:
            _check_pin(self, *self._pin)
