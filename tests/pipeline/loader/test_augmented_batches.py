"""Augmentation from recipe to batch: checked settings, and pixels that depend on the sample only."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from resolute.errors import ResoluteError
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.graph.kernels import augment as kernels
from resolute.pipeline.loader.loader import Loader
from resolute.pipeline.plan.plan import Plan
from resolute.pipeline.plan.stage import Augment, Stage
from resolute.train.recipe.schema import Recipe
from tests.support import reference

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALL = Augment(
    scale=(0.3, 1.0),
    policy="randaugment",
    jitter=(0.4, 0.4, 0.4, 0.1),
    jitter_prob=0.8,
    grey_prob=0.2,
    blur_prob=0.3,
    random_erasing_prob=0.5,
    random_erasing_fill="noise",
    vflip_prob=0.3,
)
PLAIN = Augment(scale=(0.3, 1.0))
Images = dict[tuple[int, int], NDArray[np.float32]]


def seen(plan: Plan, **options: Any) -> Images:
    """Training images of a run by epoch and sample, normalised (3, res, res)."""
    out: Images = {}
    with Loader(plan, **options) as loader:
        for batch in loader:
            if batch.spec.split == "train":
                for sample, image in zip(batch.spec.ids, batch.images.numpy(), strict=True):
                    out[batch.spec.epoch, int(sample)] = image.copy()
    return out


def levels(image: NDArray[np.float32]) -> NDArray[np.uint8]:
    exact = (image.transpose(1, 2, 0) * STD + MEAN) * 255
    assert np.abs(exact - np.rint(exact)).max() < 1e-2
    return np.rint(exact).astype(np.uint8)


def stage(augment: Augment, batch_size: int = 16, res: int = 32) -> Stage:
    return Stage(res=res, epochs=1, batch_size=batch_size, augment=augment)


@pytest.fixture(scope="module")
def expected(shard_set: ShardSet) -> Images:
    return seen(Plan(shard_set, [stage(ALL)] * 2, eval_batch_size=7))


def test_augmented_pixels_do_not_depend_on_the_position_in_the_batch(shard_set: ShardSet, expected: Images) -> None:
    other = seen(Plan(shard_set, [stage(ALL, 13)] * 2, eval_batch_size=None))
    assert other.keys() == expected.keys()
    for key, image in other.items():
        np.testing.assert_array_equal(image, expected[key])
    assert any(not np.array_equal(expected[0, i], expected[1, i]) for i in range(75))


def test_the_order_is_crop_operations_erasing_mixing(shard_set: ShardSet) -> None:
    """The oracle applies the operations to the pixels of the plain stream, sample by sample."""
    augment = dataclasses.replace(
        ALL, mixup_alpha=0.8, cutmix_alpha=1.0, mixup_prob=0.7, mixup_mode="elem", random_erasing_fill="mean"
    )
    plan = Plan(shard_set, [stage(augment)], eval_batch_size=None)
    plain = {key: levels(image) for key, image in seen(Plan(shard_set, [stage(PLAIN)], eval_batch_size=None)).items()}
    with Loader(plan) as loader:
        for batch in loader:
            spec, images = batch.spec, []
            vflips = spec.rows["vflip"]
            for row, sample in zip(spec.rows, spec.ids, strict=True):
                image = plain[0, int(sample)]
                image = np.ascontiguousarray(image[::-1]) if row["vflip"] else image.copy()
                kernels.apply_ops(image, row["kinds"], row["values"])
                x, y, w, h = row["erase"]
                image[y : y + h, x : x + w] = np.rint(255 * np.array(MEAN))
                images.append(image)
            mixed = reference.mix(np.stack(images), spec)
            for i in range(len(spec)):
                error = np.abs(levels(batch.images[i].numpy()).astype(int) - mixed[i])
                # why: where the window is turned, resizing rounds otherwise, and the operations spread that
                upright = not (vflips[i] or vflips[spec.partners[i]])
                assert error.max() <= 1 if upright else np.median(error) <= 4


STAGE = {"res": 32, "epochs": 1, "batch_size": 8}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"jitter": [0.4, 0.4, 0.4, 0.6]}, "augment.jitter: got [0.4, 0.4, 0.4, 0.6], expected [brightness"),
        ({"crop_mode": "simple", "scale": [0.3, 1.0]}, "augment.scale: without effect, crop_mode is simple; remove it"),
        ({"flip_mode": "alternate", "flip_prob": 0.3}, "augment.flip_prob: without effect, flip_mode is alternate"),
    ],
)
def test_settings_that_are_wrong_or_without_effect_are_refused(table: dict[str, Any], message: str) -> None:
    for recipe in ({"augment": table, "stages": [STAGE]}, {"stages": [{**STAGE, "augment": table}]}):
        with pytest.raises(ResoluteError) as caught:
            Recipe.parse(recipe, name="x")
        assert message in str(caught.value)
