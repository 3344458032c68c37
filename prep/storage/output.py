"""Where shards go: a folder or an object store, by one interface. Files are whole or not there, and have one writer.

Nothing half written outlives a killed run for long: in a folder it has a temporary name and a lock that ended with its
writer, and the next run deletes it; an upload is collected in a local file that never has a name, and the parts of one
that was cut short, which no reader sees, are aborted by the next run where the store can list them (S3).
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import fsspec

from pipeline.errors import ResoluteError, strip_credentials
from pipeline.storage.atomic_file import atomic_file, delete_partial, sync_folder
from pipeline.storage.lock import exclusive_lock

from .hashed_file import AtomicFile, FileInfo, write_errors
from .lease import Lease

__all__ = ["LOCK", "RUN_FOLDER", "LocalStore", "ObjectStore", "Store", "open_store"]

RUN_FOLDER = ".prep"  # in OUT while a run is unfinished: its plan, its finished parts, its lock
LOCK = f"{RUN_FOLDER}/lock"  # a file, or in an object store a folder of them


class Store(Protocol):
    """Files by name, POSIX paths relative to OUT. Picklable. Everything raises `ResoluteError` when refused."""

    @property
    def where(self) -> str: ...  # folder or URL without credentials, for messages
    def size(self, name: str) -> int | None: ...  # in bytes; None: not there
    def read(self, name: str) -> bytes: ...  # raises FileNotFoundError
    def open(self, name: str) -> BinaryIO: ...  # seekable, for reading; raises FileNotFoundError
    def local(self, name: str, scratch: Path) -> Path: ...  # the file, or a copy of it in `scratch`
    def names(self, folder: str = "") -> list[str]: ...  # of files in one folder, sorted; [] if there is none
    def sizes(self, folder: str = "") -> dict[str, int]: ...  # bytes of the files in one folder, by name
    def folders(self) -> list[str]: ...  # names of folders at the top, sorted
    def create(self, name: str) -> AtomicFile: ...  # a context manager: the file appears when it ends well
    def remove(self, name: str) -> None: ...
    def remove_folder(self, name: str) -> None: ...  # if it is empty
    def sync(self, folder: str) -> None: ...  # what was removed from it stays removed after this
    def delete_partial(self, pattern: re.Pattern[str]) -> None: ...  # what killed runs left half written of such names
    def exclusive_lock(self) -> Any: ...  # context manager: refuses if another prep is in its block

    def write(self, name: str, data: bytes) -> FileInfo:
        """A small file at once."""
        with self.create(name) as file:
            file.write(data)
        return file.info()


def open_store(out: str) -> Store:
    """The store for a folder or an fsspec URL such as `s3://bucket/shards`."""
    if "://" in out and not out.startswith(("file://", "local://")):
        return ObjectStore(out.rstrip("/"))
    return LocalStore(Path(out.partition("://")[2] if "://" in out else out))


@dataclass(frozen=True)
class LocalStore(Store):
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
        path = self.root / name
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return AtomicFile(atomic_file(path), partial(write_errors, path))

    def remove(self, name: str) -> None:
        with write_errors(self.root / name):
            (self.root / name).unlink(missing_ok=True)

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

    def delete_partial(self, pattern: re.Pattern[str]) -> None:
        with write_errors(self.root):
            for folder in ("", *self.folders()):  # why not by name: a temporary name is ours, whatever it was to become
                delete_partial(self.root / folder)

    @contextmanager
    def exclusive_lock(self) -> Iterator[None]:
        """Hold a lock of the system's: it ends with the process, however that ends."""
        created = not self.root.exists()
        with write_errors(self.root / RUN_FOLDER):
            (self.root / RUN_FOLDER).mkdir(parents=True, exist_ok=True)
        try:
            with exclusive_lock(self.root / LOCK, folder=self.root, writer="prep", remedy="choose another OUT"):
                yield
        finally:
            self.remove_folder(RUN_FOLDER)
            if created:  # why: a run that came to nothing leaves nothing
                self.remove_folder("")


@dataclass(frozen=True)
class ObjectStore(Store):
    """A prefix in an object store, through fsspec. An upload appears whole or not at all."""

    url: str
    _lease: Lease = field(default_factory=lambda: Lease(LOCK), compare=False, repr=False)

    @property
    def where(self) -> str:
        return strip_credentials(self.url)

    @property
    def _fs(self) -> Any:
        # why: cached by fsspec for each process; listings must not be, others write there
        return fsspec.core.url_to_fs(self.url, use_listings_cache=False)[0]

    def _path(self, name: str) -> str:
        base = str(self._fs._strip_protocol(self.url))
        return f"{base}/{name}" if name else base

    @contextmanager
    def _store_errors(self, name: str) -> Iterator[None]:
        """Tell whatever the store's own library raises as one `ResoluteError`; `FileNotFoundError` passes."""
        try:
            yield
        except (FileNotFoundError, ResoluteError):
            raise
        except Exception as error:  # why: each library has exceptions of its own, some of them bare
            message = " ".join(str(error).split()) or type(error).__name__
            raise ResoluteError(
                f"{self.where}/{name}: the store refuses, got '{message}', expected an answer; check its address, "
                "credentials and permissions, then run the same command again"
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
            file: BinaryIO = self._fs.open(self._path(name), "rb", cache_type="readahead", block_size=8 << 20)
        return file

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
        """A local file without a name, so that it ends with this process; uploaded when the block has ended well."""
        with tempfile.TemporaryFile() as file:
            yield cast(BinaryIO, file)
            file.flush()
            self._lease.check(self)
            with self._upload_errors(name):
                self._fs.put_file(f"/proc/self/fd/{file.fileno()}", self._path(name))
            self._lease.check(self)  # why again: a large upload takes a while

    @contextmanager
    def _upload_errors(self, name: str) -> Iterator[None]:
        with self._store_errors(name):
            try:
                yield
            except FileNotFoundError as error:  # no such bucket
                raise OSError(str(error)) from None

    def put(self, name: str, data: bytes) -> None:
        """A small object at once, without a look at the lock."""
        with self._upload_errors(name):
            self._fs.pipe_file(self._path(name), data)

    def put_new(self, name: str, data: bytes) -> bool:
        """The same, only if nothing is there: whether `data` is what is there now."""
        with self._upload_errors(name), suppress(FileExistsError):
            self._fs.pipe_file(self._path(name), data, mode="create")
        # why read in any case: an answer may get lost and the driver ask twice; some stores know no conditions
        try:
            return self.read(name) == data
        except FileNotFoundError:
            return False

    def remove(self, name: str) -> None:
        self._lease.check(self, recent_s=1.0)
        self.delete(name)

    def delete(self, name: str) -> None:
        """Remove an object, without a look at the lock."""
        with self._store_errors(name), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        pass  # why: a prefix ends with its last object

    def sync(self, folder: str) -> None:
        pass  # why: an object is durable when its upload is answered

    def delete_partial(self, pattern: re.Pattern[str]) -> None:
        """Abort uploads of several parts that nobody will finish. Other stores than S3 forget them after a while."""
        fs = self._fs
        if not hasattr(fs, "abort_mpu"):
            return
        bucket, prefix, _ = fs.split_path(self._path("x"))
        prefix = prefix[:-1]
        # why suppressed: it needs a permission of its own, and is only about the bill
        with suppress(ResoluteError), self._store_errors(""):
            paging: dict[str, str] = {}
            while True:
                answer = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **paging)
                for upload in answer.get("Uploads") or []:
                    if pattern.fullmatch(upload["Key"][len(prefix) :]):
                        fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
                if not answer.get("IsTruncated"):
                    break
                paging = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}

    def exclusive_lock(self) -> AbstractContextManager[None]:
        """Hold a lock that is renewed, and checked before every object that appears or goes: see `lease`."""
        return self._lease.held(self)
