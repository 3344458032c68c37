"""The Triton kernels in Triton's interpreter on a CPU; run by `test_triton_kernels` in a process of its own.

The oracles are the CPU's compiled functions, which equal Pillow (`test_augment_kernels`), and the slow reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from resolute.pipeline.graph.gpu_augment import GpuAugment
from resolute.pipeline.graph.kernels import augment as pixels
from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan.augment_params import (
    CUTMIX,
    MIXUP,
    UNMIXED,
    AugmentOps,
    erase_noise,
    used_ops,
)
from resolute.pipeline.plan.plan import BatchSpec
from resolute.pipeline.plan.stage import Augment
from tests.pipeline.graph.test_augment_kernels import CASES, MEAN, STD, run
from tests.support.batch_spec import batch_spec as spec
from tests.support.batch_spec import drawn_rows

# the interpreter of Triton 3.6, which torch 2.10 brings
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
CPU = torch.device("cpu")
EXACT = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255, 1 / 255, 1 / 255)}  # levels stay levels


Cases = dict[int, list[list[float]]]


def every_case(res: int) -> Cases:
    """All values of `CASES`, but no wide blurs, which take minutes; affine ones about the centre of the image."""
    table = p.operations("trivialaugment", res)[1]
    affine = [list(table[op, k, sign]) for op in range(1, 6) for k in (0, 30) for sign in (0, 1)]
    return {**CASES, p.AFFINE: affine, p.BLUR: CASES[p.BLUR][:2]}


def one_case(res: int) -> Cases:
    """One of each: factor 1.27, a rotation by 40 degrees."""
    cases = every_case(res)
    return {kind: values[4:5] or values[-1:] for kind, values in cases.items()} | {p.AFFINE: cases[p.AFFINE][-1:]}


def photos(res: int, count: int = 4) -> NDArray[np.uint8]:
    """Noise, faint noise, an even image, hard edges."""
    images = np.random.default_rng(res).integers(0, 256, (count, res, res, 3), dtype=np.uint8)
    if count > 3:
        images[1] //= 16
        images[2] = (7, 130, 255)
        images[3] = np.where(images[3] > 128, 255, 0)
    return images


def augmented(
    images: NDArray[np.uint8],
    spec_: BatchSpec,
    used: AugmentOps,
    *,
    dtype: torch.dtype = torch.float32,
    mean: Any = EXACT["mean"],
    std: Any = EXACT["std"],
) -> torch.Tensor:
    kernels = GpuAugment(used, mean=mean, std=std, noise=erase_noise(MEAN, STD), dtype=dtype, device=CPU)
    kernels._fill = torch.tensor([round(255 * m) for m in MEAN], dtype=torch.int32)
    return kernels(torch.from_numpy(images), *kernels.rows(spec_))


def levels(images: torch.Tensor) -> NDArray[np.int64]:
    rounded = images.numpy().round()
    np.testing.assert_allclose(images.numpy(), rounded, atol=1e-3)
    return rounded.astype(np.int64)


@pytest.mark.parametrize("res", [7, 67])
def test_every_operation_equals_that_of_the_cpu(res: int) -> None:
    """All values at 7 px; at 67 px a program writes two blocks, and the last program of an image only a part of one.

    Planted mistakes that it finds: a mean that is not rounded, a channel of its neighbour, the end of an image that
    is not written.
    """
    cases = every_case(res) if res == 7 else one_case(res)
    listed = [(kind, v) for kind, all_ in cases.items() for v in all_]
    images = photos(res)[::3] if res == 7 else photos(res, 1)
    kinds = np.repeat(np.array([kind for kind, _ in listed], np.int32), len(images))[:, None]
    values = np.repeat(np.array([v for _, v in listed], np.float32), len(images), axis=0)[:, None]
    images = np.tile(images, (len(listed), 1, 1, 1))
    batch_spec = spec(len(images), res=res, kinds=kinds, values=values)
    got = levels(augmented(images, batch_spec, AugmentOps(slots=("policy",))))
    for image, kind, value, ours in zip(images, kinds, values, got, strict=True):
        expected = image.copy()
        pixels.apply_ops(expected, kind, value)
        # why one level for blur: its weights are computed in float32 here, in float64 there
        assert np.abs(expected - ours).max() <= (kind[0] == p.BLUR), (kind, value)


def test_random_policies_equal_the_cpu_graph() -> None:
    """Slots in alternating buffers, then erasing: a whole batch against the CPU graph."""
    augment = Augment(
        policy="randaugment",
        jitter=(0.4, 0.4, 0.4, 0.1),
        grey_prob=0.3,
        random_erasing_prob=0.5,
        random_erasing_fill="noise",
    )
    n = 6
    images, used = photos(19, n), used_ops([augment])
    batch_spec = spec(n, res=19, rows=drawn_rows(augment, np.arange(n), res=19, seed=n), hflip=0)
    np.testing.assert_array_equal(levels(augmented(images, batch_spec, used)), run(images, batch_spec, used))


def test_boxes_may_be_empty_or_cover_the_image_and_a_partner_may_be_the_image_itself() -> None:
    res = 6
    edges = np.array([(0, 0, 0, 0), (0, 0, 6, 6), (5, 5, 1, 1), (0, 5, 6, 1), (5, 0, 1, 6), (0, 0, 1, 1)], np.int32)
    n = len(edges)
    modes = np.array([UNMIXED, MIXUP, MIXUP, CUTMIX, CUTMIX, CUTMIX], np.int32)
    batch_spec = spec(
        n,
        res=res,
        erase=edges,
        origin=np.array([(-1, -1), (255, 255)] * (n // 2), np.int32),
        mode=modes,
        box=np.where(modes[:, None] == CUTMIX, edges[::-1], 0),
        lam=np.array([1, 0, 1, 1, 1, 1], np.float32),
        partner=np.array([0, 1, 5, 3, 0, 2], np.int32),
    )
    used, images = AugmentOps(erasing=True, mixing=True), photos(res, n)
    np.testing.assert_array_equal(levels(augmented(images, batch_spec, used)), run(images, batch_spec, used))


def every_step(n: int) -> tuple[BatchSpec, AugmentOps]:
    """A batch of n images at 11 px under two operations, erasing and every kind of mixing."""
    augment = Augment(
        policy="randaugment",
        num_ops=2,
        random_erasing_prob=0.7,
        random_erasing_fill="noise",
        mixup_alpha=0.5,
        cutmix_alpha=1.0,
    )
    batch_spec = spec(
        n,
        res=11,
        rows=drawn_rows(augment, np.arange(n), res=11, seed=n),
        hflip=0,
        mode=np.arange(n) % 3,
        lam=np.linspace(0, 1, n, dtype=np.float32),
        partner=np.arange(n)[::-1],
        box=(2, 3, 5, 4),
    )
    return batch_spec, used_ops([augment])


def test_half_precision_is_the_rounded_float32() -> None:
    """bfloat16 on a device alone: the interpreter truncates it."""
    (batch_spec, used), images = every_step(5), photos(11, 5)
    exact, rounded = (
        augmented(images, batch_spec, used, dtype=kind, mean=MEAN, std=STD) for kind in (torch.float32, torch.float16)
    )
    assert rounded.dtype == torch.float16
    assert rounded.permute(0, 3, 1, 2).is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(rounded, exact.half())


def test_levels_that_are_not_normalised_are_those_of_the_mixed_images() -> None:
    """uint8 output, and `normalise` afterwards."""
    (batch_spec, used), images = every_step(6), photos(11, 6)
    normalised = augmented(images, batch_spec, used, mean=MEAN, std=STD)
    kernels = GpuAugment(
        used, mean=MEAN, std=STD, noise=erase_noise(MEAN, STD), dtype=torch.float32, device=CPU, as_bytes=True
    )
    kernels.warm_up()
    got = kernels(torch.from_numpy(images), *kernels.rows(batch_spec))
    assert got.dtype == torch.uint8
    np.testing.assert_array_equal(got.numpy(), levels(augmented(images, batch_spec, used)))
    assert torch.equal(kernels.normalise(got), normalised)
    exact = (got.double() / 255 - torch.tensor(MEAN).double()) / torch.tensor(STD).double()
    torch.testing.assert_close(normalised.double(), exact, rtol=1e-6, atol=1e-6)
