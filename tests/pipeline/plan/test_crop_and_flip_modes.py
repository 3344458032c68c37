"""Simple crops and shifts equal torchvision's, alternating flips are those of airbench."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torchvision.transforms import RandomCrop
from torchvision.transforms.v2 import functional

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.graph.kernels import augment as pixels
from resolute.pipeline.plan.crops import simple_crop
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from tests.support.batch_spec import drawn_rows

IDS = np.arange(40_000) * 977


def test_simple_crops_are_torchvisions_after_a_resize_of_the_short_side(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    sizes = rng.integers(30, 60, (200, 2))
    sizes[:10, 0] = sizes[:10, 1]
    u = rng.random((200, 2))
    for (width, height), (at_x, at_y) in zip(sizes.tolist(), u, strict=True):
        side, draws = min(width, height), iter((at_y, at_x))

        def randint(low: int, high: int, size: tuple[int], draws: Any = draws) -> torch.Tensor:
            return torch.tensor([low + int(next(draws) * (high - low))])

        monkeypatch.setattr(torch, "randint", randint)
        top, left, h, w = RandomCrop.get_params(torch.empty(3, height, width), (side, side))
        assert simple_crop(np.array([at_x, at_y]), width, height) == (left, top, w, h)


def _photo(side: int) -> NDArray[np.uint8]:
    return np.random.default_rng(1).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_a_shift_equals_padding_and_cropping() -> None:
    reach, side = 4, 32
    drawn = drawn_rows(Augment(shift_px=reach), IDS[:300], seed=1, epoch=2, res=side)
    photo, seen = _photo(side), set()
    for kind, values in zip(drawn["kinds"], drawn["values"], strict=True):
        dx, dy = (-int(values[0, k]) for k in (2, 5))
        seen.add((dx, dy))
        ours = photo.copy()
        pixels.apply_ops(ours, kind, values)
        padded = functional.pad_image(torch.from_numpy(photo).permute(2, 0, 1), [reach] * 4)
        expected = functional.crop_image(padded, reach - dy, reach - dx, side, side)
        np.testing.assert_array_equal(ours, expected.permute(1, 2, 0).numpy())
    assert {max(map(abs, place)) for place in seen} == set(range(reach + 1))
    many = drawn_rows(Augment(shift_px=2), IDS, seed=1, epoch=2, res=32)["values"][:, 0, (2, 5)]
    places, counts = np.unique(many, axis=0, return_counts=True)
    assert len(places) == 25
    assert np.abs(counts - 1600).max() < 4.5 * math.sqrt(1600)  # each is as likely


def _flips(plan: Plan) -> list[dict[int, bool]]:
    """The flip of each sample, epoch by epoch."""
    epochs: list[dict[int, bool]] = [{} for _ in range(5)]
    for index in range(plan.total_batches):
        spec = plan.batch(index)
        if spec.split == "train":
            epochs[spec.epoch] |= dict(zip(spec.ids.tolist(), spec.flips.tolist(), strict=True))
    return epochs


def _stages(**keys: Any) -> list[Stage]:
    augment = Augment(flip_mode="alternate")
    return [
        Stage(res=32, epochs=3, batch_size=16, augment=augment, **keys),
        Stage(res=48, epochs=2, batch_size=8, augment=augment, **keys),
    ]


def test_flips_alternate_from_epoch_to_epoch_across_stages(shard_set: ShardSet) -> None:
    """As in airbench: flipped at random once, then the whole epoch is mirrored in every odd one (arXiv 2404.00498)."""
    first, *later = _flips(Plan(shard_set, _stages(), seed=3))
    assert len(first) == 75
    assert 15 < sum(first.values()) < 60
    for epoch, flips in enumerate(later, 1):
        assert flips == {sample: flip ^ (epoch % 2 == 1) for sample, flip in first.items()}


def test_flips_do_not_alternate_where_epochs_use_other_samples(shard_set: ShardSet) -> None:
    with pytest.raises(ResoluteError, match=r"augment\.flip_mode: got alternate with fraction 0\.5 in stage 0"):
        Plan(shard_set, _stages(fraction=0.5))
    with pytest.raises(ResoluteError, match=r"augment\.flip_mode: got alternate with data\.sampling by class"):
        Plan(shard_set, _stages(), sampling="balanced")
    assert _flips(Plan(shard_set, _stages(fraction=0.5), fraction_mode="fixed"))


def test_settings_that_are_off_do_not_change_the_identity_of_a_plan(shard_set: ShardSet) -> None:
    young: dict[str, Any] = {"crop_mode": "simple", "shift_px": 4, "flip_mode": "alternate", "magnitude_std": 1.5}
    stage = Stage(res=32, epochs=1, batch_size=8)
    plain = Plan(shard_set, [stage])
    assert not young.keys() & plain.config["stages"][0]["augment"].keys()
    for name, value in young.items():
        changed = Stage(res=32, epochs=1, batch_size=8, augment=Augment(policy="randaugment", **{name: value}))
        assert Plan(shard_set, [changed]).config["stages"][0]["augment"][name] == value
