"""Augmentation parameters: their distributions and their golden value."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torchvision.transforms import v2

from resolute.pipeline.plan.augment_params import CUTMIX, MIXUP, UNMIXED
from resolute.pipeline.plan.autoaugment import AFFINE, BLUR, NONE
from resolute.pipeline.plan.permutation import stream_key
from resolute.pipeline.plan.rng import uniforms
from resolute.pipeline.plan.stage import Augment
from tests.support import reference_ops
from tests.support.batch_spec import drawn_rows

N = 40_000
IDS = np.arange(N) * 977
ALL = Augment(
    policy="randaugment",
    jitter=(0.4, 0.3, 0.2, 0.1),
    jitter_prob=0.8,
    grey_prob=0.2,
    blur_prob=0.3,
    random_erasing_prob=0.25,
    random_erasing_fill="noise",
    vflip_prob=0.1,
)


def numbers(augment: Augment, *, ids: NDArray[np.int64] = IDS, res: int = 224, epoch: int = 3) -> NDArray[np.void]:
    return drawn_rows(augment, ids, seed=1, epoch=epoch, res=res)


def assert_frequencies(counts: Counter, expected: dict, n: int) -> None:
    """Chi-square within four standard deviations of its mean; no other value may occur."""
    assert set(counts) <= set(expected)
    total = sum((counts[key] - n * part) ** 2 / (n * part) for key, part in expected.items())
    assert sum(expected.values()) == pytest.approx(1)
    assert total < len(expected) + 4 * math.sqrt(2 * len(expected))


Rows = list[tuple[int, list[float]]]


def magnitudes(space: Any, name: str, bins: int, res: int) -> list[float]:
    """All signed magnitudes of torchvision's own table, each as likely as the others."""
    table, signed = space._AUGMENTATION_SPACE[name]
    values = table(bins, res, res)
    if values is None:
        return [0.0]
    return [sign * float(v) for v in values for sign in ((1, -1) if signed else (1,))]


def classify(kinds: NDArray[np.int32], values: NDArray[np.float32], rows: Rows) -> NDArray[np.int64]:
    """Index in `rows` (distinct) of each drawn operation (...,), within 2e-3 px or 1e-3."""
    flat = np.concatenate([kinds.reshape(-1, 1), values.reshape(-1, 6)], axis=1)
    table = np.array([[kind, *numbers] for kind, numbers in rows], np.float64)
    drawn, inverse = np.unique(flat + 0.0, axis=0, return_inverse=True)
    distance = np.abs(drawn[:, None] - table[None]).max(axis=2)
    assert distance.min(axis=1).max() < 2e-3
    return distance.argmin(axis=1)[inverse.reshape(-1)].reshape(kinds.shape)


def distinct(weighted: list[tuple[tuple[int, list[float]], float]]) -> tuple[Rows, list[float]]:
    rows: Rows = []
    parts: list[float] = []
    for (kind, numbers_), part in weighted:
        for k, (other, there) in enumerate(rows):
            if other == kind and np.abs(np.array(there) - numbers_).max() < 4e-3:
                parts[k] += part
                break
        else:
            rows.append((kind, numbers_))
            parts.append(part)
    return rows, parts


@pytest.mark.parametrize(("magnitude", "ops", "res"), [(0, 1, 32), (17, 4, 160)])
def test_randaugment_draws_torchvisions_operations_with_equal_probability(magnitude: int, ops: int, res: int) -> None:
    drawn = numbers(Augment(policy="randaugment", num_ops=ops, magnitude=magnitude), res=res)
    assert drawn["kinds"].shape == (N, ops)
    weighted = []
    for name in v2.RandAugment._AUGMENTATION_SPACE:
        table = magnitudes(v2.RandAugment, name, 31, res)
        chosen = (
            table
            if len(table) == 1
            else table[2 * magnitude : 2 * magnitude + 2]
            if len(table) == 62
            else [table[magnitude]]
        )
        weighted += [(reference_ops.row(name, m, res), 1 / 14 / len(chosen)) for m in chosen]
    rows, parts = distinct(weighted)
    which = classify(drawn["kinds"], drawn["values"], rows)
    for slot in range(ops):
        assert_frequencies(Counter(which[:, slot]), dict(enumerate(parts)), N)
    for first, second in itertools.pairwise(range(ops)):
        assert abs(np.corrcoef(which[:, first], which[:, second])[0, 1]) < 4 / math.sqrt(N)


def test_trivialaugment_draws_every_operation_and_magnitude_with_equal_probability() -> None:
    drawn = numbers(Augment(policy="trivialaugment"))
    weighted = []
    for name in v2.TrivialAugmentWide._AUGMENTATION_SPACE:
        table = magnitudes(v2.TrivialAugmentWide, name, 31, 224)
        weighted += [(reference_ops.row(name, m, 224), 1 / 14 / len(table)) for m in table]
    rows, parts = distinct(weighted)
    assert len(rows) > 400
    which = classify(drawn["kinds"], drawn["values"], rows)
    assert_frequencies(Counter(which[:, 0]), dict(enumerate(parts)), N)


def test_erased_boxes_follow_torchvision() -> None:
    plain = Augment(random_erasing_prob=0.4)
    for wide in (plain, replace(plain, random_erasing_scale=(0.3, 0.9), random_erasing_ratio=(0.1, 1.0))):
        scale, ratio = wide.random_erasing_scale, wide.random_erasing_ratio
        ids, key = IDS[:500], stream_key(1, 20, 3)
        got = numbers(wide, ids=ids, res=64)
        assert (got["origin"][got["erase"][:, 2] > 0] == -1).all()
        for box, u in zip(got["erase"], uniforms(key, ids, 25), strict=True):
            expected = reference_ops.erased_box(u, 64, scale, ratio) if u[0] < 0.4 else (0,) * 4
            assert tuple(box) == expected
    noisy = numbers(replace(plain, random_erasing_fill="noise"))
    origins = noisy["origin"][noisy["erase"][:, 2] > 0]
    assert (origins.min(), origins.max()) == (0, 255)


@pytest.mark.parametrize(("alpha", "other"), [(0.2, 1.0), (4.0, 0.1)])
def test_mixing_per_sample_draws_beta_weights_and_timms_boxes(alpha: float, other: float) -> None:
    augment = Augment(mixup_alpha=alpha, cutmix_alpha=other, mixup_prob=0.7, mixup_switch_prob=0.4, mixup_mode="elem")
    rows = numbers(augment, epoch=0, res=1000)
    modes, lam, boxes = rows["mode"], rows["lam"], rows["box"]
    rng = np.random.default_rng(0)
    small = (1000 * np.sqrt(1 - rng.beta(other, other, 400_000)) < 2).mean()  # a box of no pixel mixes nothing
    for mode, part in ((UNMIXED, 0.3 + 0.28 * small), (MIXUP, 0.42), (CUTMIX, 0.28 * (1 - small))):
        assert abs((modes == mode).mean() - part) < 4 * math.sqrt(0.25 / N)
    # why: below and above, weights of a small alpha crowd at the ends of float32
    beta = np.sort(rng.beta(alpha, alpha, 400_000))
    beta, weights = (np.sort(v[(v > 1e-6) & (v < 1 - 1e-6)]) for v in (beta, lam[modes == MIXUP].astype(float)))
    expected, n = np.searchsorted(beta, weights) / len(beta), len(weights)
    distance = max(np.abs(expected - np.arange(n) / n).max(), np.abs(expected - np.arange(1, n + 1) / n).max())
    assert distance < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov test at the 0.001 level
    assert abs(n / (modes == MIXUP).sum() - len(beta) / 400_000) < 4 * math.sqrt(0.25 / n)
    assert (lam[modes == UNMIXED] == 1).all()
    x, y, w, h = boxes[modes == CUTMIX].astype(np.int64).T
    np.testing.assert_allclose(lam[modes == CUTMIX], 1 - w * h / 1e6, atol=1e-6)
    inside = (x > 0) & (y > 0) & (x + w < 1000) & (y + h < 1000)
    assert (w[inside] == h[inside]).all()
    assert (boxes[modes != CUTMIX] == 0).all()


@pytest.mark.parametrize("magnitude_std", [0.0, 1.5])
def test_each_operation_of_randaugment_is_applied_with_its_probability(magnitude_std: float) -> None:
    """As timm's AugmentOp, whose default is 0.5; what is applied is what a probability of 1 applies."""
    always = Augment(policy="randaugment", num_ops=3, magnitude=9, magnitude_std=magnitude_std)
    every, some = numbers(always), numbers(replace(always, op_prob=0.25))
    applied = some["kinds"] == every["kinds"]
    assert (some["kinds"][~applied] == NONE).all()
    assert (some["values"][applied] == every["values"][applied]).all()
    identity = every["kinds"] == NONE
    dropped = Counter((~applied).sum(axis=1)[~identity.any(axis=1)].tolist())
    expected = {k: math.comb(3, k) * 0.75**k * 0.25 ** (3 - k) for k in range(4)}
    assert_frequencies(dropped, expected, sum(dropped.values()))


@pytest.mark.parametrize("res", [96, 128, 176, 320])
def test_translations_and_blurs_have_the_same_size_in_an_image_of_every_resolution(res: int) -> None:
    for augment in (
        Augment(blur_prob=1.0, blur_sigma=(0.5, 2.0)),
        Augment(policy="3-augment"),
        Augment(policy="trivialaugment"),
    ):
        at_224, here = numbers(augment), numbers(augment, res=res)
        assert (at_224["kinds"] == here["kinds"]).all()
        kinds = here["kinds"]
        for kind, values in ((BLUR, slice(0, 1)), (AFFINE, slice(2, 6, 3))):
            big, small = (each["values"][kinds == kind][:, values] for each in (at_224, here))
            if kind == AFFINE:  # translations alone, in whole px; shears and turns have no px
                moves = (at_224["values"][kinds == kind][:, [0, 1, 3, 4]] == [1, 0, 0, 1]).all(axis=1)
                big, small = big[moves], small[moves]
            assert np.abs(small - big * res / 224).max(initial=0) <= (1e-5 if kind == BLUR else max(1, res / 224))


def test_parameters_equal_the_golden_value() -> None:
    """Changing this value changes the batches of every run in progress."""
    digest, mixing = hashlib.sha256(), Augment(mixup_alpha=0.3, cutmix_alpha=1.0, mixup_prob=0.7)
    augments = [
        ALL,
        replace(ALL, policy="trivialaugment", shift_px=4),
        replace(ALL, policy="autoaugment"),
        Augment(policy="3-augment"),
        Augment(policy="randaugment", num_ops=4, magnitude_std=1.5),
    ]
    augments += [replace(mixing, mixup_mode=mode) for mode in ("batch", "elem")]
    for rows in (numbers(augment, ids=IDS[:2000]) for augment in augments):
        for name in ("crop", "hflip", "vflip", "kinds", "values", "erase", "origin", "mode", "partner", "lam", "box"):
            digest.update(np.rint(1000 * rows[name].astype(np.float64)).astype(np.int64).tobytes())
    assert digest.hexdigest()[:16] == "b73fc1498e290c12"
