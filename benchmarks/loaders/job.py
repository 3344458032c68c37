"""The job description that is sent as JSON to a loader's process.

Imports only the standard library, because FFCV's interpreter, without Resolute's dependencies, reads it too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["MEAN", "STD", "Job"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # Source: timm IMAGENET_DEFAULT_MEAN and _STD


@dataclass(frozen=True, kw_only=True)
class Job:
    """A measurement: training batches of the shards at each of `resolutions`, one after another."""

    task: Literal["prepare", "rate", "clock", "crops"] = "rate"
    module: str = ""  # of benchmarks.loaders
    variant: str = ""
    shards: str
    scratch: str = ""  # folder for files of this run
    resolutions: tuple[int, ...]  # px: what the model sees; each is read from its own shards
    batches: int = 1  # at each resolution
    batch_size: int = 64
    workers: int = 2  # processes or threads that decode
    device: str = "cpu"  # of the batches; on a GPU: ours and the loaders of `GPU_LOADERS`
    dtype: Literal["float32", "float16"] = "float32"  # of the batches of `GPU_LOADERS`
    warm_up: int = 1  # rate: batches delivered before the clock starts
    seconds: float = 1.0  # rate: length of the measurement
    steps_s: tuple[float, ...] = ()  # clock: the consumer's step time at each resolution; () takes batches at once
    scale: tuple[float, float] = (0.25, 1.0)  # these three: the defaults of our Augment
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_prob: float = 0.5
    crop_fracs: tuple[float, ...] = ()  # crops: sides of the centre squares, in short sides
    crop_frac: float = 1.0  # the current one
    images: int = 1  # crops: how many, the first of the validation split

    def centre_square(self, width: int, height: int) -> tuple[int, int, int, int]:
        """x, y, w, h of the centre square of `crop_frac` short sides, in px."""
        side = int(self.crop_frac * min(width, height))
        return (width - side) // 2, (height - side) // 2, side, side

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()
        }
        return cls(**values)
