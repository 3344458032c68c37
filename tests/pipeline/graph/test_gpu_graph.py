"""The graph that runs on a GPU, defined and serialised on a machine that has none."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from nvidia.dali.data_node import DataNode
from PIL import Image

from pipeline.graph.graph import _graph
from pipeline.graph.kernels.resize import resize
from pipeline.plan.sampling import Features, features
from pipeline.plan.stage import Augment

PLAIN: dict[str, Any] = {
    "batch_size": 4, "num_threads": 1, "device_id": None, "prefetch_queue_depth": 2, "exec_dynamic": True,
    "features": Features(mixing=True), "on_cpu": False, "mean": (0.5,) * 3, "std": (0.2,) * 3, "half": False,
    "largest_res": 64,
}  # fmt: skip


def operators(decode_device: str, **changed: Any) -> dict[str, str]:
    """The text of each operator's specification, by its name; defining and serialising finds wrong arguments."""
    pipe = _graph(decode_device=decode_device, **{**PLAIN, **changed})
    assert pipe.serialize()
    return {operator.name.strip("_").partition("_")[0]: str(operator.spec) for operator in pipe._ops}


@pytest.mark.parametrize("decode_device", ["cpu", "mixed"])
def test_jpegs_are_decoded_with_the_same_chroma_interpolation_on_both_devices(decode_device: str) -> None:
    decoder = operators(decode_device)["ImageSlice"]
    assert f"device: {decode_device}" in decoder
    assert "jpeg_fancy_upsampling: True" in decoder


AUGMENTS: list[dict[str, Any]] = [
    {"policy": "randaugment", "num_ops": 3}, {"policy": "trivialaugment"}, {"policy": "autoaugment"},
    {"policy": "3-augment"}, {"jitter": (0.4, 0.4, 0.4, 0.1)}, {"grey_prob": 0.5}, {"blur_prob": 1.0},
    {"random_erasing_prob": 0.7}, {"random_erasing_prob": 0.7, "random_erasing_fill": "noise"},
    {"policy": "randaugment", "random_erasing_prob": 0.1, "mixup_alpha": 0.8, "cutmix_alpha": 1.0,
     "mixup_mode": "elem"},
]  # fmt: skip


@pytest.mark.parametrize("keys", AUGMENTS, ids=lambda keys: "-".join(keys))
def test_a_policy_adds_nothing_to_the_graph_which_ends_with_the_resized_images(keys: dict[str, Any]) -> None:
    got = operators("mixed", features=features([Augment(**keys)]))
    assert got.keys() == {"jpeg", "start", "shape", "ImageSlice", "size", "roi", "TensorSubscript", "Resize"}
    assert "device: gpu" in got["Resize"]


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("mixing", [False, True])
def test_recipes_without_a_policy_end_in_dalis_own_normalisation(half: bool, mixing: bool) -> None:
    got = operators("mixed", features=Features(mixing=mixing), half=half)
    assert ("MultiPaste" in got) == mixing
    assert "device: gpu" in got["CropMirrorNormalize"]


def test_the_gpus_graph_on_a_cpu_resizes_as_the_cpus_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The very graph, with what goes to the device kept here: windows, sizes, both mirrorings and the order."""
    rng, n, res = np.random.default_rng(0), 4, 24
    photos = [Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((60, 50)) for _ in range(n)]
    files = [io.BytesIO() for _ in photos]
    for photo, file in zip(photos, files, strict=True):
        photo.save(file, "jpeg", quality=95)
    windows = np.array([[0, 0, 60, 50], [5, 3, 30, 40], [10, 10, 24, 24], [2, 1, 50, 45]], np.int32)  # x, y, w, h
    mirrored = [(False, False), (True, False), (False, True), (True, True)]
    monkeypatch.setattr(DataNode, "gpu", lambda node: node)
    pipe = _graph(decode_device="cpu", **{**PLAIN, "features": features([Augment(policy="randaugment")])})
    pipe.build()
    roi = np.array([(v, h, 1 - v, 1 - h) for h, v in mirrored], np.float32)
    inputs = {
        "jpeg": [np.frombuffer(file.getvalue(), np.uint8) for file in files], "roi": roi,
        "start": np.ascontiguousarray(windows[:, 1::-1]), "shape": np.ascontiguousarray(windows[:, :1:-1]),
        "size": np.full((n, 2), res, np.float32),
    }  # fmt: skip
    for name, value in inputs.items():
        pipe.feed_input(name, value)
    (out,) = pipe.run()
    images = np.array(out.as_tensor())
    assert (images.shape, images.dtype) == ((n, res, res, 3), np.uint8)
    for file, (x, y, w, h), (flip, vflip), got in zip(files, windows, mirrored, images, strict=True):
        window = np.asarray(Image.open(file).convert("RGB"))[y : y + h, x : x + w]
        expected = np.empty((res, res, 3), np.uint8)
        resize(np.ascontiguousarray(window), flip, vflip, expected, np.ones(3, np.float32), np.zeros(3, np.float32))
        error = np.abs(got.astype(int) - expected)  # decoders differ by a few levels beside a window's border
        assert (error.mean() < 0.5, error.max() <= 6) == (True, True)
