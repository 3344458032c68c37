"""The part of prep that runs on Ray's nodes: the checks before a node's first shard, and the conversion of shards."""

from __future__ import annotations

import atexit
import functools
import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from resolute.errors import ResoluteError
from resolute.prep.convert.batch import EncodeOptions
from resolute.prep.convert.reject import Reject
from resolute.prep.shards.writer import ShardSpec
from resolute.prep.sources.archives.containers import check_containers
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.storage.output import RUN_FOLDER, Store

from .local import convert_shards
from .process_pool import Pool
from .stats import RunStats

__all__ = ["Probe", "check_node", "convert_shard", "version_query", "write_probe"]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Files that every node must see exactly as this machine does: a file of OUT, and photos with their SHA-256."""

    name: str
    content: bytes
    photos: tuple[tuple[ByteRange, bytes], ...]


def write_probe(store: Store, photos: Sequence[ByteRange]) -> Probe:
    """Write a file for the nodes to find, which lasts as long as the run. Photos that cannot be read are left out."""
    name, content = f"{RUN_FOLDER}/reachable", uuid.uuid4().hex.encode()
    store.write(name, content)
    readable = []
    for byte_range in photos:
        with suppress(Reject):
            readable.append((byte_range, hashlib.sha256(fetch(byte_range)).digest()))
    return Probe(name=name, content=content, photos=tuple(readable))


def version_query() -> Callable[[], dict[str, str] | str]:
    """A function that returns the `versions` of the process it runs in, or why Resolute cannot be imported there.

    It is a closure, so that Ray sends its code instead of its name: it also runs on a node with other code.
    """

    def query() -> dict[str, str] | str:
        try:
            from resolute.prep.execute.versions import versions

            return versions()
        except Exception as error:  # why: code of any age may be on the node, or none
            return f"cannot import Resolute, got '{error}', expected this machine's version; install it on it"

    return query


def check_node(store: Store, probe: Probe) -> str | None:
    """The reason why this node cannot convert shards, as (got, expected and remedy) in words; None if it can."""
    try:
        content: bytes | None = store.read(probe.name)
    except FileNotFoundError:
        content = None
    except (ResoluteError, OSError) as error:
        return f"cannot read OUT, got '{error}', expected access as on this machine; give it the same access"
    if content != probe.content:
        return (
            f"does not see OUT as this machine does, got {'nothing' if content is None else 'another file'} at "
            f"{store.where}/{probe.name}, expected the file just written there; give every node the same OUT, on a "
            "shared disk or in an object store"
        )
    own_file = f"{probe.name}-{uuid.uuid4().hex[:12]}"
    try:
        store.write(own_file, probe.content)
        store.remove(own_file)
    except ResoluteError as error:
        return f"cannot write to OUT, got '{error}', expected write access; give every node the same access"
    for byte_range, digest in probe.photos:
        try:
            problem = "" if hashlib.sha256(fetch(byte_range)).digest() == digest else "other bytes"
        except (Reject, ResoluteError, OSError) as error:
            problem = str(error)
        if problem:
            return (
                f"does not see the photos as this machine does, got '{problem}' for {byte_range.path}, expected the "
                "file that is here under that name; give every node the same photos, on a shared disk or at a URL"
            )
    return None


def convert_shard(
    options: EncodeOptions, spec: ShardSpec, store: Store, archives: Mapping[str, int]
) -> tuple[list[bytes], RunStats]:
    """Convert one shard, whose files and records are durable when this returns.

    Raises `StorageError` if one of its `archives`, {path: bytes}, is missing on this node or has another size.
    """
    check_containers(archives)
    records: list[bytes] = []
    stats = convert_shards(_pool(), options, [spec], store, done=records.append, progress=lambda _: None)
    return records, stats


@functools.cache
def _pool() -> Pool:
    """One decoding process, kept from shard to shard, so that a crashing decoder does not end Ray's worker."""
    pool = Pool(1)
    atexit.register(pool.end)
    return pool
