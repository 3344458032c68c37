"""Where do the shards go, so that every file is either whole or not there? A folder, or an object store."""

from __future__ import annotations

import fcntl
import io
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec

from pipeline.errors import ResoluteError

from .writer import FileInfo, Part, sync_folder, writing

__all__ = ["LOCK", "WORK", "Folder", "Objects", "Store", "open_store"]

WORK = ".prep"  # in OUT while a run is unfinished: its plan, its finished parts, its lock
LOCK = f"{WORK}/lock"
_LEASE_S, _RENEW_S = 60.0, 10.0


class Store(Protocol):
    """Files by name, POSIX paths relative to OUT. Picklable. Everything raises `ResoluteError` when refused."""

    @property
    def where(self) -> str: ...  # folder or URL, for messages
    def size(self, name: str) -> int | None: ...  # in bytes; None: not there
    def read(self, name: str) -> bytes: ...  # raises FileNotFoundError
    def open(self, name: str) -> BinaryIO: ...  # seekable, for reading; raises FileNotFoundError
    def local(self, name: str, scratch: Path) -> Path: ...  # the file, or a copy of it in `scratch`
    def names(self, folder: str = "") -> list[str]: ...  # of files in one folder, sorted; [] if there is none
    def folders(self) -> list[str]: ...  # names of folders at the top, sorted
    def create(self, name: str) -> Part: ...  # a context manager: the file appears when it ends well
    def remove(self, name: str) -> None: ...
    def remove_folder(self, name: str) -> None: ...  # if it is empty
    def sync(self, folder: str) -> None: ...  # renames in it are durable after this
    def alone(self) -> Any: ...  # context manager: refuses if another prep is in its block

    def write(self, name: str, data: bytes) -> FileInfo:
        """A small file at once."""
        with self.create(name) as part:
            part.write(data)
        return part.info()


def open_store(out: str) -> Store:
    """The store for a folder or an fsspec URL such as `s3://bucket/shards`."""
    if "://" in out and not out.startswith(("file://", "local://")):
        return Objects(out.rstrip("/"))
    return Folder(Path(out.partition("://")[2] if "://" in out else out))


@dataclass(frozen=True)
class Folder(Store):
    """A folder on a disk, local or shared."""

    root: Path

    @property
    def where(self) -> str:
        return str(self.root)

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
        place = self.root / folder
        return sorted(path.name for path in place.iterdir() if path.is_file()) if place.is_dir() else []

    def folders(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir() if path.is_dir()) if self.root.is_dir() else []

    def create(self, name: str) -> Part:
        path = self.root / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return Part(path)

    def remove(self, name: str) -> None:
        with writing(self.root / name):
            (self.root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        with writing(self.root / name):
            if (self.root / name).is_dir() and not any((self.root / name).iterdir()):
                (self.root / name).rmdir()

    def sync(self, folder: str) -> None:
        sync_folder(self.root / folder)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lock of the system's: it ends with the process, however that ends."""
        path = self.root / LOCK
        new = not self.root.exists()
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _not_alone(self.where) from None
            except OSError:
                pass  # why: some network disks know no locks; they did without one so far
            # why: whoever opened it just before the last run ended holds the lock of a file that is gone
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                raise _not_alone(self.where)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
                self.remove_folder(WORK)
                if new:  # why: a run that came to nothing leaves nothing
                    self.remove_folder("")


@dataclass(frozen=True)
class Objects(Store):
    """A prefix in an object store, through fsspec. An upload appears whole or not at all."""

    url: str

    @property
    def where(self) -> str:
        return self.url

    @property
    def _fs(self) -> Any:
        # why: cached by fsspec for each process; listings must not be, others write there
        return fsspec.core.url_to_fs(self.url, use_listings_cache=False)[0]

    def _path(self, name: str) -> str:
        base = str(self._fs._strip_protocol(self.url))
        return f"{base}/{name}" if name else base

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """Tell whatever the store's own library raises as one `ResoluteError`; `FileNotFoundError` passes."""
        try:
            yield
        except (FileNotFoundError, ResoluteError):
            raise
        except Exception as error:  # why: each library has exceptions of its own, some of them bare
            told = " ".join(str(error).split()) or type(error).__name__
            raise ResoluteError(
                f"{self.url}/{name}: the store refuses, got '{told}', expected an answer; check its address, "
                "credentials and permissions, then run the same command again"
            ) from None

    def size(self, name: str) -> int | None:
        with self._asking(name):
            try:
                return int(self._fs.info(self._path(name))["size"])
            except FileNotFoundError:
                return None

    def read(self, name: str) -> bytes:
        with self._asking(name):
            data: bytes = self._fs.cat_file(self._path(name))
        return data

    def open(self, name: str) -> BinaryIO:
        with self._asking(name):
            file: BinaryIO = self._fs.open(self._path(name), "rb", cache_type="readahead", block_size=8 << 20)
        return file

    def local(self, name: str, scratch: Path) -> Path:
        path = scratch / name.replace("/", "-")
        with self._asking(name):
            self._fs.get_file(self._path(name), str(path))
        return path

    def _list(self, folder: str, kind: str) -> list[str]:
        with self._asking(folder):
            try:
                found = self._fs.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
        return sorted(row["name"].rstrip("/").rpartition("/")[2] for row in found if row["type"] == kind)

    def names(self, folder: str = "") -> list[str]:
        return [name for name in self._list(folder, "file") if name]

    def folders(self) -> list[str]:
        return self._list("", "directory")

    def create(self, name: str) -> Part:
        return _Upload(self, name)

    def upload(self, file: str, name: str) -> None:
        with self._asking(name):
            try:
                self._fs.put_file(file, self._path(name))
            except FileNotFoundError as error:  # no such bucket
                raise OSError(str(error)) from None

    def remove(self, name: str) -> None:
        with self._asking(name), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        pass  # why: a prefix ends with its last object

    def sync(self, folder: str) -> None:
        pass  # why: an object is durable when its upload is answered

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold a lease: an object renewed every 10 s, which counts as left behind after 60 s."""
        mine = uuid.uuid4().hex
        done = threading.Event()

        def renew() -> None:
            while not done.wait(_RENEW_S):
                self.write(LOCK, json.dumps([mine, time.time()]).encode())

        def holder() -> str | None:
            try:
                owner, renewed = json.loads(self.read(LOCK))
            except (FileNotFoundError, ValueError):
                return None
            return str(owner) if time.time() - renewed < _LEASE_S else None

        if holder() is not None:
            raise _not_alone(self.where)
        self.write(LOCK, json.dumps([mine, time.time()]).encode())
        if holder() != mine:
            raise _not_alone(self.where)
        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.remove(LOCK)


class _Upload(Part):
    """Collected in an anonymous local file, uploaded when it is whole."""

    def __init__(self, store: Objects, name: str) -> None:
        self._store, self._name = store, name
        super().__init__(Path(name))

    def _open(self) -> io.RawIOBase:
        handle, self._spool = tempfile.mkstemp(prefix="resolute-", suffix=".part")
        return io.FileIO(handle, "wb")

    def _publish(self) -> None:
        self._file.close()
        self._store.upload(self._spool, self._name)
        Path(self._spool).unlink()

    def discard(self) -> None:
        self._file.close()
        Path(self._spool).unlink(missing_ok=True)


def _not_alone(where: str) -> ResoluteError:
    return ResoluteError(
        f"{where}: another prep is writing there, expected to be alone; wait for it or choose another OUT"
    )
