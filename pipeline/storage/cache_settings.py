"""Settings of the disk cache for remote shard sets: folder, size limit, request size and retries."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import ResoluteError

__all__ = ["HEADER", "CacheSettings"]

HEADER = struct.Struct("<8s20sQ32s")  # of a chunk file: magic, key, payload bytes, payload SHA-256


def _folder() -> Path:
    value = os.environ.get("RESOLUTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(value or f"{base}/resolute").expanduser()


def _limit_bytes() -> int:
    value = os.environ.get("RESOLUTE_CACHE_GIB", "64")
    try:
        return int(float(value) * 2**30)
    except (ValueError, OverflowError):
        raise ResoluteError(f"RESOLUTE_CACHE_GIB: got '{value}', expected GiB such as 64 or 0.5; correct it") from None


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Location, size and request limits of the cache of remote data. Changes no result.

    folder         cache folder on a local disk; default $RESOLUTE_CACHE, or `resolute` in the user's cache folder
    limit_bytes    upper bound of the folder's size; default $RESOLUTE_CACHE_GIB, or 64 GiB
    chunk_bytes    size of the ranges a tar is fetched in. why 4 MiB: a request's latency is small against it, and
                   batches that jump between blocks do not fetch much more than they read
    requests       chunks that `prefetch` fetches concurrently; memory: requests * chunk_bytes
    ahead_bytes    `prefetch` refuses hints while more than this many bytes are being fetched
    tries          attempts for each request; the wait before the second is `first_wait_s` and then doubles
    stall_s        a request that receives nothing for this long has failed
    """

    folder: Path = field(default_factory=_folder)
    limit_bytes: int = field(default_factory=_limit_bytes)
    chunk_bytes: int = 4 << 20
    requests: int = 16
    ahead_bytes: int = 512 << 20
    tries: int = 8
    first_wait_s: float = 0.25
    stall_s: float = 20.0

    def __post_init__(self) -> None:
        for name, minimum in (("chunk_bytes", 1), ("requests", 1), ("ahead_bytes", 0), ("tries", 1)):
            if getattr(self, name) < minimum:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected at least {minimum}; raise it")
        for name in ("first_wait_s", "stall_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected above 0, below 3600; change it")
        if self.limit_bytes < 2 * (self.chunk_bytes + HEADER.size):
            raise ResoluteError(
                f"cache: limit_bytes got {self.limit_bytes}, expected room for at least two chunks of "
                f"{self.chunk_bytes} bytes and the set's index; raise RESOLUTE_CACHE_GIB"
            )
