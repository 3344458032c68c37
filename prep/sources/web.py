"""Byte ranges of files on web servers; never more bytes than were asked for are read, whatever a server sends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

__all__ = ["STALL_S", "RangesIgnored", "read_ranges"]

STALL_S = 30.0  # a server that sends nothing for this long has failed
_AT_ONCE = 64
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


class RangesIgnored(Exception):
    """A server that sends the entire file, of `nbytes` (None: unknown), instead of the range."""

    def __init__(self, nbytes: int | None) -> None:
        super().__init__(nbytes)
        self.nbytes = nbytes


def read_ranges(
    fs: Any, urls: Sequence[str], starts: Sequence[int], ends: Sequence[int], limits_s: Sequence[float]
) -> list[Any]:
    """The bytes [start, end) of each file, or fewer at its end, with what the server says about the file: (data,
    headers as in fsspec's `info`); or the exception, such as `RangesIgnored`.

    `fs` is fsspec's HTTP file system; `limits_s` are the seconds for each answer.
    """
    from fsspec.asyn import _run_coros_in_chunks, sync

    async def read_all() -> list[Any]:
        requests = [_read(fs, *asked) for asked in zip(urls, starts, ends, limits_s, strict=True)]
        answers: list[Any] = await _run_coros_in_chunks(
            requests, batch_size=_AT_ONCE, nofiles=True, return_exceptions=True
        )
        return answers

    found: list[Any] = sync(fs.loop, read_all)
    return found


async def _read(fs: Any, url: str, start: int, end: int, limit_s: float) -> tuple[bytes, dict[str, Any]]:
    import aiohttp

    options = dict(fs.kwargs)
    # why no encoding: a range would be one of the compressed bytes
    headers = {**options.pop("headers", {}), "Accept-Encoding": "identity", "Range": f"bytes={start}-{end - 1}"}
    options["timeout"] = aiohttp.ClientTimeout(total=limit_s, sock_connect=STALL_S, sock_read=STALL_S)
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), headers=headers, **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        about: dict[str, Any] = {key: answer.headers.get(key) for key in ("ETag", "Last-Modified")}
        if answer.status == 206:
            sent = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
            if sent and int(sent[1]) != start:
                raise OSError(f"bytes from {sent[1]} on instead of {start}")
            about["size"] = int(sent[2]) if sent and sent[2] != "*" else None
        else:
            about["size"] = None if answer.headers.get("Content-Encoding") else answer.content_length
            if start:
                answer.close()
                raise RangesIgnored(about["size"])
        data = bytearray()
        while len(data) < end - start and (piece := await answer.content.read(end - start - len(data))):
            data += piece
        if not answer.content.at_eof():
            answer.close()  # why: the rest would be received before the connection is used again
        return bytes(data), about
