"""How does one split become shards, with an index entry for every sample?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.shards import SAMPLE, STORED, shard_name

from .chunk import Chunk, Job, Task
from .order import shuffled
from .pool import Pool
from .settings import Settings
from .sources import Photo, Photos
from .tar import dali_index, end
from .writer import FileInfo, Part, write_file, writing

__all__ = ["Progress", "WrittenSplit", "write_split"]

CHUNK_SAMPLES = 16
Progress = Callable[[int, int], None]  # images finished and, of these, rejected since the last call


@dataclass(frozen=True, kw_only=True)
class WrittenSplit:
    """`samples` (N,) SAMPLE, `stored[r]` (N,) STORED and `paths` (N) in shard order; names and lengths of
    the `shards`; sorted `rejects` (path, reason); `files`, by path relative to OUT."""

    samples: NDArray[Any]
    stored: tuple[NDArray[Any], ...]
    paths: tuple[str, ...]
    shards: dict[str, int]
    rejects: tuple[tuple[str, str], ...]
    files: dict[str, FileInfo]


def write_split(
    settings: Settings, name: str, photos: Photos, job: Job, pool: Pool, progress: Progress
) -> WrittenSplit:
    """Shuffle, convert and write one split at every resolution, shard after shard, in key order.

    Keys count the candidates; rejected ones leave gaps. A shard without any sample is not kept, so `shard`
    in STORED is a position in `shards`. Raises `ResoluteError` when the disk refuses.
    """
    out, resolutions, per_shard = settings.out, settings.resolutions, settings.shard_samples
    order = [photos.photos[i] for i in shuffled(settings.seed, name, len(photos.photos))]
    chunks = pool.run(job, _tasks(str(photos.root), order, per_shard))
    samples = [np.empty(0, SAMPLE)]
    stored = [[np.empty(0, STORED)] for _ in resolutions]
    shards: dict[str, int] = {}
    rejects: list[tuple[str, str]] = []
    files: dict[str, FileInfo] = {}
    for first in range(0, len(order), per_shard):
        shard = shard_name(name, first // per_shard)
        count = -(-min(per_shard, len(order) - first) // CHUNK_SAMPLES)
        done: list[tuple[NDArray[Any], tuple[NDArray[Any], ...]]] = []
        with ExitStack() as stack:
            tars = [stack.enter_context(Part(out / str(res) / f"{shard}.tar")) for res in resolutions]
            for chunk in islice(chunks, count):
                _append(chunk, tars, len(shards))
                done.append((chunk.samples, chunk.stored))
                rejects += [(order[key].path, reason) for key, reason in chunk.rejects]
                progress(len(chunk.samples) + len(chunk.rejects), len(chunk.rejects))
            for tar in tars:
                tar.write(end(tar.nbytes))
        in_shard = np.concatenate([part for part, _ in done])
        if not len(in_shard):  # why: every input was rejected, and readers trip over a tar without samples
            with writing(out):
                for tar in tars:
                    tar.path.unlink()
            continue
        for r, (res, tar) in enumerate(zip(resolutions, tars, strict=True)):
            stored[r].append(np.concatenate([parts[r] for _, parts in done]))
            index = dali_index(in_shard, stored[r][-1], job.label_digits)
            files[f"{res}/{shard}.tar"] = tar.info()
            files[f"{res}/{shard}.idx"] = write_file(out / str(res) / f"{shard}.idx", index)
        samples.append(in_shard)
        shards[shard] = len(in_shard)
    all_samples = np.concatenate(samples)
    return WrittenSplit(
        samples=all_samples,
        stored=tuple(np.concatenate(parts) for parts in stored),
        paths=tuple(order[key].path for key in all_samples["key"].tolist()),
        shards=shards,
        rejects=tuple(sorted(rejects)),
        files=files,
    )


def _append(chunk: Chunk, tars: Sequence[Part], shard: int) -> None:
    """Write a chunk's pieces and make its offsets count from the start of the tars."""
    for tar, piece, stored in zip(tars, chunk.tars, chunk.stored, strict=True):
        stored["offset"] += tar.nbytes
        stored["shard"] = shard
        tar.write(piece)


def _tasks(root: str, order: Sequence[Photo], per_shard: int) -> Iterator[Task]:
    """Chunks of consecutive samples; none reaches over the end of a shard."""
    for shard in range(0, len(order), per_shard):
        shard_end = min(shard + per_shard, len(order))
        for first in range(shard, shard_end, CHUNK_SAMPLES):
            photos = order[first : min(first + CHUNK_SAMPLES, shard_end)]
            yield Task(
                first_key=first,
                paths=tuple(f"{root}/{photo.path}" for photo in photos),
                labels=tuple(photo.label for photo in photos),
            )
