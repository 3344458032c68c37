"""How much of a store is kept on this machine, where, and how is it asked for?"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.errors import ResoluteError

__all__ = ["HEADER", "CacheSettings"]

HEADER = struct.Struct("<8s20sQ32s")  # of a chunk's file: what it is, its key, its bytes, their SHA-256


def _folder() -> Path:
    given = os.environ.get("RESOLUTE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(given or f"{base}/resolute").expanduser()


def _limit_bytes() -> int:
    given = os.environ.get("RESOLUTE_CACHE_GIB", "64")
    try:
        return int(float(given) * 2**30)
    except (ValueError, OverflowError):
        raise ResoluteError(f"RESOLUTE_CACHE_GIB: got '{given}', expected GiB such as 64 or 0.5; correct it") from None


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Where and how much to keep of what comes from a URL, and how to ask for it. Changes no result.

    folder         a folder on a local disk; default $RESOLUTE_CACHE, or `resolute` in the user's cache folder
    limit_bytes    bound of its size; default $RESOLUTE_CACHE_GIB, or 64 GiB
    chunk_bytes    a tar is fetched in ranges of this size. why 4 MiB: long against a request's first byte, and
                   fine enough for batches that jump between blocks
    requests       chunks that `want` fetches at once; state: requests * chunk_bytes
    ahead_bytes    hints of `want` beyond so many bytes under way are not taken
    tries          of a request that fails, with `first_wait_s` before the second and doubling from there
    stall_s        a request that brings nothing for so long has failed
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
        for name, least in (("chunk_bytes", 1), ("requests", 1), ("ahead_bytes", 0), ("tries", 1)):
            if getattr(self, name) < least:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected at least {least}; raise it")
        for name in ("first_wait_s", "stall_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ResoluteError(f"cache: {name} got {getattr(self, name)}, expected above 0, below 3600; change it")
        if self.limit_bytes < 2 * (self.chunk_bytes + HEADER.size):
            raise ResoluteError(
                f"cache: limit_bytes got {self.limit_bytes}, expected room for two chunks of {self.chunk_bytes} bytes "
                "at least, and for the set's index; raise RESOLUTE_CACHE_GIB"
            )
