"""What does a user want to know when prep is done?"""

from __future__ import annotations

import numpy as np

from .build import Built, told_by_kind
from .order import WINDOW_SAMPLES, mixing
from .settings import Settings

__all__ = ["summary"]


def summary(settings: Settings, built: Built) -> str:
    """The closing lines, without a final newline."""
    manifest, splits = built.manifest, built.splits
    counts = ", ".join(f"{name} {info['samples']}" for name, info in manifest["splits"].items())
    if splits is None:
        return f"{settings.out}: already there ({counts}; {len(manifest['classes'])} classes); nothing to do"
    images, rejected = manifest["source"]["images"], manifest["source"]["rejected"]
    rate = images / built.elapsed_s
    lines = [
        f"{settings.out}: {images} images, {len(manifest['classes'])} classes, {counts}, "
        f"{built.sources.ignored} other files ignored",
        f"  {built.elapsed_s:.1f} s, {rate:.0f} images/s with {settings.worker_count} workers",
    ]
    for r, (res, info) in enumerate(manifest["resolutions"].items()):
        tars = [file["bytes"] for name, file in manifest["files"].items() if _is_tar(name, res)]
        nbytes = np.concatenate([split.stored[r]["nbytes"] for split in splits.values()])
        lines.append(
            f"  {res:>4} px: short side {info['short_side']} px, {len(tars)} shards, "
            f"{sum(tars) / 1e6:.1f} MB, {nbytes.mean() / 1e3:.1f} kB a JPEG"
        )
    mixed = mixing(splits["train"].samples["label"])
    lines.append(
        f"  shuffle: windows of {WINDOW_SAMPLES} samples are {mixed.measured:.3f} from the overall class mix "
        f"(perfect shuffle {mixed.expected:.3f}, sorted by class near 1)"
    )
    told = told_by_kind(reason for split in splits.values() for _, reason in split.rejects)
    lines.append(f"  rejected: {rejected}" + (f" ({told}); see {settings.out}/rejects.jsonl" if told else ""))
    return "\n".join(lines)


def _is_tar(name: str, res: str) -> bool:
    return name.startswith(f"{res}/") and name.endswith(".tar")
