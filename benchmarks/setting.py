"""Shared by `make bench` and `make bench-all`: arguments, the opened set, and the head of the result."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resolute.errors import ResoluteError
from resolute.files import write_errors

from .loaders.job import Job
from .options import SetOptions
from .record import find_device, header, read_into_cache

if TYPE_CHECKING:
    import torch

    from resolute.pipeline.dataset.shard_set import ShardSet

__all__ = ["Setting", "default_file", "set_up"]

_BATCH_SIZE = 64


@dataclass(frozen=True, kw_only=True)
class Setting:
    device: torch.device
    shards: ShardSet  # with the resolutions to measure
    batch_size: int
    result: dict[str, Any]  # the fields of a result file before its measurements

    def job(self, args: SetOptions, **more: Any) -> Job:
        """The job of the loaders that are compared."""
        return Job(
            shards=args.shards,
            resolutions=self.shards.resolutions,
            batch_size=self.batch_size,
            workers=args.threads,
            device=str(self.device),
            **more,
        )


def set_up(args: SetOptions, *, rounds: int, changes: bool) -> Setting:
    """Open the set of the arguments. `changes`: whether stage changes are measured, which needs two resolutions.

    Raises `ResoluteError` for arguments that cannot be measured.
    """
    # why here: --help and command line errors should not wait for slow imports
    import timm

    from resolute.pipeline.dataset.shard_set import ShardSet

    from .loaders.ours import full_batches

    if not timm.is_model(args.model):
        raise ResoluteError(f"--model: got {args.model!r}, expected a timm model; see timm.list_models()")
    device = find_device(args.device)
    shards = ShardSet.open(args.shards)
    resolutions = tuple(sorted({*args.res})) or shards.resolutions
    if not {*resolutions} <= {*shards.resolutions}:
        got, stored = (",".join(map(str, sizes)) for sizes in (args.res, shards.resolutions))
        raise ResoluteError(f"--res: got {got}, expected some of {stored}; correct it")
    if changes and len(resolutions) < 2:
        raise ResoluteError(
            f"{shards.root}: got one resolution, expected two or more for a stage change; measure its loader with "
            "`resolute bench-all --only loader,training`"
        )
    shards = dataclasses.replace(shards, resolutions=resolutions)
    train = shards.splits["train"]
    batch_size = min(_BATCH_SIZE, len(train)) if args.batch_size is None else args.batch_size
    full_batches(shards, resolutions[0], batches=1, batch_size=batch_size)  # raises if the set is too small
    head = header(rounds=rounds, device=device)
    machine = head["machine"]
    result = {
        **head,
        "settings": {"device": device.type, "threads": args.threads, "batch_size": batch_size, "model": args.model},
        "shards": {
            "name": Path(shards.root).resolve().name,
            "hash": shards.hash,
            "resolutions": resolutions,
            "train_samples": len(train),
            "mean_bytes": {res: float(train.stored[res]["nbytes"].mean()) for res in resolutions},
            "page_cache": read_into_cache(shards),
        },
    }
    print(
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {args.threads} threads, batch {batch_size}, "
        f"{len(train)} training images of {result['shards']['name']}, load before: {machine['load_before']}",
        flush=True,
    )
    return Setting(device=device, shards=shards, batch_size=batch_size, result=result)


def default_file(name: str, device_name: str | None = None, *, suffix: str = ".json") -> Path:
    """The file `name`, with the device's name if there is one, in the folder bench, which is made; git ignores it."""
    folder = Path("bench")
    with write_errors(folder):
        folder.mkdir(exist_ok=True)
    slug = re.sub(r"[^a-z0-9]+", "-", (device_name or "").lower().replace("nvidia", "")).strip("-")
    return folder / f"{name}{'-' * bool(slug)}{slug}{suffix}"
