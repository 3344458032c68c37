"""Each operation's pixels on a CPU against Pillow and torchvision.

The compiled function uses Pillow's arithmetic but rounds where Pillow truncates (affine, hue): within one level.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def, types
from PIL import Image

from resolute.pipeline.graph import cpu_nodes as cpu
from resolute.pipeline.graph.kernels import augment as pixels
from resolute.pipeline.graph.kernels.jpeg.memory import Decoders
from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan.augment_params import AugmentOps, erase_noise, used_ops
from resolute.pipeline.plan.plan import BatchSpec
from resolute.pipeline.plan.rows import words_of
from resolute.pipeline.plan.stage import Augment
from tests.support import reference_ops
from tests.support.batch_spec import batch_spec, drawn_rows

RES = 96
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
EVERY = frozenset(range(1, 11))


def photos() -> NDArray[np.uint8]:
    """Noise, a smooth image, flat colours with hard edges, and a low-contrast image."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (RES, RES, 3), dtype=np.uint8)
    smooth = Image.fromarray(rng.integers(60, 190, (6, 6, 3), dtype=np.uint8))
    blocks = np.kron(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8), np.ones((12, 12, 1), np.uint8))
    blocks[:12, :12] = 128  # grey: no hue
    faint = rng.integers(90, 99, (RES, RES, 3), dtype=np.uint8)
    faint[..., 2] = 7  # an even channel
    return np.stack([noise, np.asarray(smooth.resize((RES, RES), Image.Resampling.BICUBIC)), blocks, faint])


PHOTOS = photos()


def run(images: NDArray[np.uint8], spec_: BatchSpec, wanted: AugmentOps) -> Any:
    """The graph's part that changes pixels, on `images` and to (N, res, res, 3) uint8; the resize changes none."""

    @pipeline_def(batch_size=len(images), num_threads=2, device_id=None, exec_dynamic=True, prefetch_queue_depth=1)
    def graph() -> Any:
        rows = fn.external_source(name="rows", dtype=types.INT32, ndim=1)
        jpegs = fn.external_source(name="jpegs", dtype=types.UINT8, ndim=1)
        tags = cpu.augment_decoded(fn.external_source(name="images", layout="HWC", dtype=types.UINT8), rows, jpegs)
        return cpu.mix(tags, rows) if wanted.mixing else tags

    out, raw = np.empty(images.shape, np.float32), np.empty(images.shape, np.uint8)
    built = graph()
    built.build()
    # why kept: it owns the noise
    constants = cpu.RunConstants(mean=MEAN, std=STD, noise=erase_noise(MEAN, STD), decoders=Decoders(1))
    rows = words_of(spec_.rows).copy()
    constants.complete(rows, np.zeros(len(images), np.int64), out, raw)
    built.feed_input("images", images)
    built.feed_input("rows", rows)
    built.feed_input("jpegs", np.full((len(images), 1), spec_.index, np.int32).view(np.uint8))
    (tags,) = built.run()
    assert (np.array(tags.as_tensor()) == spec_.index).all()
    levels = 255 * (out * np.array(STD) + np.array(MEAN))
    assert np.abs(levels - np.rint(levels)).max() < 1e-2
    return np.rint(levels).astype(np.uint8)


def value(first: float) -> list[float]:
    return [first, 0, 0, 0, 0, 0]


FACTORS = [value(f) for f in (0.0, 0.1, 0.55, 1.0, 1.27, 1.99)]
CASES: dict[int, list[list[float]]] = {
    p.AFFINE: [
        list(table[op, k, s])
        for _, table in (p.operations("trivialaugment", RES),)
        for op in range(1, 6)
        for k in (0, 3, 9, 22, 30)
        for s in (0, 1)
    ],
    p.BRIGHTNESS: FACTORS,
    p.SATURATION: FACTORS,
    p.CONTRAST: FACTORS,
    p.SHARPNESS: FACTORS,
    p.POINT: [
        [256, 0xF0, 0, 0, 0, 0],
        [256, 0xFE, 0, 0, 0, 0],
        [0, 255, 0, 0, 0, 0],
        [178.5, 255, 0, 0, 0, 0],
        [255, 255, 0, 0, 0, 0],
        [256, 255, 0, 0, 0, 0],
    ],
    p.AUTOCONTRAST: [value(0)],
    p.EQUALIZE: [value(0)],
    p.BLUR: [value(s) for s in (0.1, 0.5, 1.0, 2.0, 8.0)],
    p.HUE: [value(s) for s in (-3, -1.2, -0.3, 0.0, 0.3, 0.6, 2.4, 3)],
}


@pytest.mark.slow
def test_every_operation_is_within_one_level_of_pillow_and_torchvision() -> None:
    """Every photo under every operation; affine: bilinear and black outside."""
    listed = [(kind, v) for kind, all_ in CASES.items() for v in all_]
    images = np.tile(PHOTOS, (len(listed), 1, 1, 1))
    kinds = np.repeat(np.array([kind for kind, _ in listed], np.int32), len(PHOTOS))[:, None]
    values = np.repeat(np.array([v for _, v in listed], np.float32), len(PHOTOS), axis=0)[:, None]
    batch = batch_spec(len(images), res=RES, kinds=kinds, values=values)
    got = run(images, batch, AugmentOps(slots=("policy",))).reshape(-1, *PHOTOS.shape)
    errors: dict[int, list[Any]] = {}
    for (kind, v), ours in zip(listed, got, strict=True):
        expected = np.stack([reference_ops.operation(photo, kind, np.array(v, np.float32)) for photo in PHOTOS])
        errors.setdefault(kind, []).append(np.abs(ours.astype(int) - expected))
    assert errors.keys() == EVERY
    for kind, each in errors.items():
        assert np.max(each) <= (0 if kind in (p.SHARPNESS, p.EQUALIZE) else 1), kind
        assert kind == p.AFFINE or np.mean(each) < 0.12, kind


def test_operations_are_applied_in_sequence_and_per_sample() -> None:
    augment = Augment(policy="randaugment", jitter=(0.4, 0.4, 0.4, 0.1), grey_prob=0.3, blur_prob=0.5, num_ops=3)
    n = 4 * len(PHOTOS)
    images = np.tile(PHOTOS, (4, 1, 1, 1))
    drawn = drawn_rows(augment, np.arange(n), res=RES)
    batch = batch_spec(n, res=RES, rows=drawn, hflip=0)
    got = run(images, batch, used_ops([augment]))
    for i in range(n):
        ours = images[i].copy()
        pixels.apply_ops(ours, drawn["kinds"][i], drawn["values"][i])
        np.testing.assert_array_equal(got[i], ours)  # independent of the other samples of the batch
        if p.EQUALIZE in drawn["kinds"][i] or p.AUTOCONTRAST in drawn["kinds"][i]:
            continue  # these amplify a difference of one level
        error = np.abs(got[i].astype(int) - reference_ops.sample(images[i], batch, i, MEAN))
        assert np.quantile(error, 0.99) <= 6, i


@pytest.mark.parametrize("fill", ["mean", "noise"])
def test_erasing_fills_its_box_and_changes_nothing_else(fill: Any) -> None:
    augment = Augment(random_erasing_prob=0.8, random_erasing_fill=fill)
    n = 8 * len(PHOTOS)
    images = np.tile(PHOTOS, (8, 1, 1, 1))
    drawn = drawn_rows(augment, np.arange(n), res=RES)
    if fill == "noise":
        drawn["origin"][:2] = [(200, 3), (210, 5)]
        drawn["erase"][:2] = [(10, 20, 50, 60), (0, 0, 48, 50)]
    got = run(images, batch_spec(n, res=RES, rows=drawn, hflip=0), used_ops([augment]))
    inside = []
    for i, (x, y, w, h) in enumerate(drawn["erase"]):
        box = np.zeros((RES, RES), bool)
        box[y : y + h, x : x + w] = True
        np.testing.assert_array_equal(got[i][~box], images[i][~box])
        inside.append(got[i][box])
    filled = np.concatenate(inside).astype(float)
    np.testing.assert_allclose(filled.mean(axis=0) / 255, MEAN, atol=0.004)
    if fill == "mean":
        assert (filled == np.rint(255 * np.array(MEAN))).all()
    else:  # normal, clipped to 0..255 at 2 standard deviations
        np.testing.assert_allclose(filled.std(axis=0) / 255, STD, rtol=0.06)
        # the noise is one periodic field: the origins of two samples determine how they overlap
        np.testing.assert_array_equal(got[0][20 + 10 : 80, 10 + 2 : 60], got[1][:50, :48])
