"""What is known of initial weights besides their tensors: the normalisation of their images, and their classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resolute.train import checkpoint

from .sections import Model

__all__ = ["AboutWeights", "about_weights", "expected_normalisation"]

Channels = tuple[float, float, float]
Normalisation = tuple[Channels, Channels]  # mean and std of RGB in 0 to 1


@dataclass(frozen=True, kw_only=True)
class AboutWeights:
    """`normalisation`: of the images that the weights were trained on; `names`: of their outputs. None: not known."""

    normalisation: Normalisation | None = None
    names: tuple[str, ...] | None = None


def about_weights(model: Model) -> AboutWeights:
    """What `model.weights` says of itself, in timm's configuration, a run's checkpoint, or a config.json beside it.

    Such a config.json is written by `resolute export`, and by timm for the Hugging Face hub. A file that cannot be read
    says nothing; loading the weights reports it.
    """
    if model.weights == "pretrained":
        return AboutWeights(normalisation=expected_normalisation(model.name))
    path = Path(model.weights)
    try:
        if path.suffix == ".safetensors":
            config = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))
            images, names = config.get("pretrained_cfg", config), config.get("label_names")
        elif checkpoint.peek(path, "format") == checkpoint.FORMAT:
            data, names = checkpoint.peek(path, "recipe")["data"], checkpoint.peek(path, "head")["names"]
            images = data.get("normalize", data)  # in earlier versions, they were keys of [data]
        else:
            return AboutWeights()
        mean, std = images.get("mean"), images.get("std")
        known = (_channels(mean), _channels(std)) if mean and std else None
        return AboutWeights(normalisation=known, names=tuple(names) if names else None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return AboutWeights()


def expected_normalisation(name: str) -> Normalisation | None:
    """That of timm's own weights of the model; None if it has none for RGB images."""
    import timm  # why here: slow, and rarely needed

    try:
        cfg: Any = timm.get_pretrained_cfg(name)
    except RuntimeError:  # an unknown tag
        return None
    return (_channels(cfg.mean), _channels(cfg.std)) if cfg is not None and len(cfg.mean) == 3 else None


def _channels(values: Sequence[float]) -> Channels:
    red, green, blue = map(float, values)
    return red, green, blue
