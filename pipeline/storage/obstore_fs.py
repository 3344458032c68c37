"""The files of an object store as a file system of fsspec, read and written through obstore."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import obstore
from fsspec.asyn import AsyncFileSystem, _run_coros_in_chunks, sync

from resolute.errors import Interrupted

from .obstore_client import open_store, request
from .request_errors import GONE, failure, http_status

__all__ = ["ObstoreFS"]

Answer = TypeVar("Answer")

_TRIES, _STALL_S = 10, 15.0
_UPLOAD_STALL_S = 60.0  # why longer: nothing is received while a part is being sent
_FIRST_BLOCK_BYTES, _BLOCK_BYTES = 256 << 10, 8 << 20  # of an open object, read at a time: at first, at most
_SKIPPED_BYTES = 2 << 20  # that are skipped at most while an object is read on
_EMPTY_RANGE = 416  # HTTP status: range not satisfiable; for a range from 0 it means an empty object
_PART_BYTES, _PARTS = 8 << 20, 4  # of an upload; sent at once
_AT_ONCE = 64  # requests of one call


class ObstoreFS(AsyncFileSystem):
    """The files of one bucket, whose paths are `bucket/key`.

    Failed requests raise `FileNotFoundError`, `FileExistsError` and `PermissionError`, any other an `OSError`, with the
    HTTP status as `code`. An upload appears complete or not at all.
    """

    cachable = False

    def __init__(self, root: str, *, patience_s: float) -> None:
        """`root` is as `s3://bucket`. No attempt of a request begins later than `patience_s` after the first."""
        super().__init__()
        self.protocol, _, self._bucket = root.partition("://")
        self._store = open_store(root, tries=_TRIES, stall_s=_STALL_S, patience_s=patience_s)
        self._uploads = open_store(root, tries=_TRIES, stall_s=_UPLOAD_STALL_S, patience_s=patience_s)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return path.partition("://")[2].rstrip("/") if "://" in path else path.rstrip("/")

    def _key(self, path: str) -> str:
        return str(self._strip_protocol(path)).partition("/")[2]

    async def _ask(self, path: str, work: Callable[[], Awaitable[Answer]]) -> Answer:
        """The answer to a request, its errors as those of this class."""
        try:
            return await request(work)
        except asyncio.CancelledError:  # why: fsspec would take it for an answer
            raise Interrupted(f"{self.protocol}://{path}: the request was interrupted, expected its end") from None
        except Exception as error:  # why any: obstore raises many types
            raise _as_os_error(error) from None

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        key = self._key(path)
        if key:
            with suppress(FileNotFoundError):
                return self._row(await self._ask(path, lambda: obstore.head_async(self._store, key)))

        async def is_folder() -> bool:
            async for _ in obstore.list(self._store, key or None, chunk_size=1):
                return True
            return not key

        if not await self._ask(path, is_folder):
            raise FileNotFoundError("no such object")
        return {"name": path, "type": "directory", "size": 0}

    def _row(self, meta: Any) -> dict[str, Any]:
        """An object's name, size and version, under the keys that s3fs uses."""
        return {
            "name": f"{self._bucket}/{meta['path']}",
            "type": "file",
            "size": meta["size"],
            "ETag": meta["e_tag"],
            "LastModified": meta["last_modified"],
        }

    async def _ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        key = self._key(path)
        listed = await self._ask(path, lambda: obstore.list_with_delimiter_async(self._store, key or None))
        if key and not listed["objects"] and not listed["common_prefixes"]:
            raise FileNotFoundError("no such folder")
        rows = [
            {"name": f"{self._bucket}/{each}", "type": "directory", "size": 0} for each in listed["common_prefixes"]
        ]
        # why: stores may hold an empty object for the folder itself
        rows += [self._row(meta) for meta in listed["objects"] if meta["path"] != key]
        return rows if detail else sorted(row["name"] for row in rows)

    async def _find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **_: Any
    ) -> Any:
        """As fsspec's, which also `glob` uses; but folders of a level are listed at once, and errors are raised."""
        found: dict[str, Any] = {}
        folders, depth = [self._strip_protocol(path)], 0
        while folders and (maxdepth is None or depth < maxdepth):
            answers = await _run_coros_in_chunks(
                [self._ls(folder) for folder in folders], batch_size=_AT_ONCE, return_exceptions=True
            )
            folders, depth = [], depth + 1
            for answer in answers:
                if isinstance(answer, FileNotFoundError):
                    continue
                if isinstance(answer, Exception):
                    raise answer
                for row in answer:
                    is_folder = row["type"] == "directory"
                    folders += [row["name"]] * is_folder
                    if withdirs or not is_folder:
                        found[row["name"]] = row
        return dict(sorted(found.items())) if detail else sorted(found)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        return (await self._cat_with_info(path, start, end))[0]

    async def _cat_with_info(self, path: str, start: int | None, end: int | None) -> tuple[bytes, dict[str, Any]]:
        """The bytes, and what the answer says about the whole object, as `info` does."""
        key = self._key(path)
        options: Any = {}
        if end is not None:
            options["range"] = (start or 0, end)
        elif start:
            options["range"] = {"offset": start}

        async def get() -> tuple[bytes, dict[str, Any]]:
            got = await obstore.get_async(self._store, key, options=options)
            return await _whole_body(got), self._row(got.meta)

        return await self._ask(path, get)

    def read_ranges(self, paths: Sequence[str], starts: Sequence[int | None], ends: Sequence[int | None]) -> list[Any]:
        """The bytes [start, end) of each object with its `info` from the same answer, or the exception."""

        async def read_all() -> list[Any]:
            requests = [self._cat_with_info(*asked) for asked in zip(paths, starts, ends, strict=True)]
            return list(await _run_coros_in_chunks(requests, batch_size=_AT_ONCE, nofiles=True, return_exceptions=True))

        answers: list[Any] = sync(self.loop, read_all)
        return answers

    async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        key = self._key(rpath)

        async def get() -> None:
            got = await obstore.get_async(self._store, key)
            with Path(lpath).open("wb") as file:
                async for piece in got.stream(min_chunk_size=_BLOCK_BYTES):
                    file.write(piece)
                if file.tell() != got.meta["size"]:
                    raise EOFError(f"its body broke off after {file.tell()} of {got.meta['size']} bytes")

        await self._ask(rpath, get)

    async def _put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        key = self._key(rpath)

        async def put() -> None:
            # why not `put_async`: this also aborts an upload that is cancelled, but for some with parts on their way
            # (obstore 0.12)
            async with obstore.open_writer_async(
                self._uploads, key, buffer_size=_PART_BYTES, max_concurrency=_PARTS
            ) as writer:
                with Path(lpath).open("rb") as file:
                    while piece := file.read(_PART_BYTES):
                        await writer.write(piece)

        await self._ask(rpath, put)

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        key = self._key(path)
        how: Any = "create" if mode == "create" else "overwrite"
        await self._ask(path, lambda: obstore.put_async(self._uploads, key, value, mode=how))

    async def _rm_file(self, path: str, **_: Any) -> None:
        key = self._key(path)
        await self._ask(path, lambda: obstore.delete_async(self._store, key))

    async def _rm(self, path: str | Sequence[str], **_: Any) -> None:
        """Delete files, those that are missing included."""
        paths = [path] if isinstance(path, str) else list(path)
        keys = [self._key(each) for each in paths]
        try:
            await self._ask(paths[0], lambda: obstore.delete_async(self._store, keys))
        except FileNotFoundError:  # why again: stores other than S3 delete none after the first that is missing
            for answer in await _run_coros_in_chunks(
                [self._rm_file(each) for each in paths], batch_size=_AT_ONCE, return_exceptions=True
            ):
                if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
                    raise answer from None

    async def _block(self, path: str, start: int, end: int) -> tuple[bytes, int]:
        """The bytes from `start` to `end` or the end of the object, and the object's size."""
        key = self._key(path)

        async def get() -> tuple[bytes, int]:
            got = await obstore.get_async(self._store, key, options={"range": (start, end)})
            return await _whole_body(got), got.meta["size"]

        return await self._ask(path, get)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> io.BufferedReader:
        assert mode == "rb"
        return io.BufferedReader(_OpenObject(self, path))


class _OpenObject(io.RawIOBase):
    """An object that is read ahead in blocks, which grow while it is read on: the first request also finds its size."""

    def __init__(self, files: ObstoreFS, path: str) -> None:
        self._files, self._path, self._at = files, path, 0
        self._block, self._start, self._ahead = b"", 0, _FIRST_BLOCK_BYTES
        try:
            self._block, self._size = self._read(0, self._ahead)
        except OSError as error:
            if http_status(error) != _EMPTY_RANGE:
                raise
            self._size = 0

    def _read(self, start: int, end: int) -> tuple[bytes, int]:
        answer: tuple[bytes, int] = sync(self._files.loop, self._files._block, self._path, start, end)
        return answer

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._size:
            return 0
        end = self._start + len(self._block)
        if not self._start <= self._at < end:
            goes_on = 0 <= self._at - end <= _SKIPPED_BYTES
            self._ahead = min(2 * self._ahead, _BLOCK_BYTES) if goes_on else _FIRST_BLOCK_BYTES
            stop = min(self._at + max(self._ahead, len(buffer)), self._size)
            self._block, _ = self._read(self._at, stop)
            self._start = self._at
        data = memoryview(self._block)[self._at - self._start :][: len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


async def _whole_body(got: Any) -> bytes:
    """The body of an answer. Raises `EOFError` if it ends early."""
    data: bytes = (await got.bytes_async()).to_bytes()
    first, stop = got.range
    if len(data) != stop - first:
        raise EOFError(f"its body broke off after {len(data)} of {stop - first} bytes")
    return data


def _as_os_error(error: Exception) -> Exception:
    code, words = http_status(error), failure(error)
    made: OSError
    if isinstance(error, FileNotFoundError) or code in GONE:
        made = FileNotFoundError(words)
    elif isinstance(error, obstore.exceptions.AlreadyExistsError):
        made = FileExistsError(words)
    elif code in (401, 403):
        made = PermissionError(words)
    else:
        made = OSError(words) if code is not None else OSError(errno.EIO, words)
    made.code = code  # type: ignore[attr-defined]
    return made
