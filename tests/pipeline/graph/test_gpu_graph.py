"""The graph that runs on a GPU, defined and serialised on a machine that has none."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode
from PIL import Image

from resolute.pipeline.graph.cpu_nodes import gpu_rows
from resolute.pipeline.graph.graph import _graph
from resolute.pipeline.graph.kernels.resize import resize
from tests.support.batch_spec import batch_spec
from tests.support.dali_graph import graph_faults, without_compiled_nodes

PLAIN: dict[str, Any] = {
    "batch_size": 4, "num_threads": 1, "device_id": None, "prefetch_queue_depth": 2, "exec_dynamic": True,
    "mixing": False, "on_cpu": False,
}  # fmt: skip


def operators(decode_device: str) -> dict[str, str]:
    """The specification of each operator as text, by name; defining and serialising detects wrong arguments."""
    with without_compiled_nodes():
        pipe = _graph(decode_device=decode_device, **PLAIN)
    assert pipe.serialize()
    return {operator.name.strip("_").partition("_")[0]: str(operator.spec) for operator in pipe._ops}


@pytest.mark.parametrize(("decode_device", "name"), [("cpu", "ImageSlice"), ("mixed", "Image")])
def test_jpegs_are_decoded_with_the_same_chroma_interpolation_on_both_devices(decode_device: str, name: str) -> None:
    decoder = operators(decode_device)[name]
    assert f"device: {decode_device}" in decoder
    assert "jpeg_fancy_upsampling: True" in decoder


def test_a_gpu_decoder_decodes_whole_images() -> None:
    """Decoding a region fails or crashes there (nvImageCodec 0.9, issue 55)."""
    got = operators("mixed")
    assert "ImageSlice" not in got
    assert "device: gpu" in got["Slice"]  # the last one: that of the crop


def test_the_graph_ends_after_the_resize() -> None:
    """Whatever a run uses: Triton's kernels do the rest."""
    got = operators("mixed")
    tags = {"Reinterpret", "Cat"}
    assert got.keys() == {"jpeg", "rows", "Slice", "Image", "TensorSubscript", "Cast", "Resize", *tags}
    assert "device: gpu" in got["Resize"]


def faults(decode_device: str) -> list[str]:
    return graph_faults(lambda: _graph(decode_device=decode_device, **PLAIN))


@pytest.mark.parametrize("decode_device", ["cpu", "mixed"])
def test_the_graph_is_valid_for_a_gpu(decode_device: str) -> None:
    assert faults(decode_device) == []


def on_gpu(name: str) -> Callable[..., Any]:
    return lambda real, *inputs, **named: real(*inputs, **{**named, name: named[name].gpu()})


def with_keys(**keys: Any) -> Callable[..., Any]:
    return lambda real, *inputs, **named: real(*inputs, **{**named, **keys})


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    # module, operator, its replacement, the check that detects it
    "an argument on the GPU": (fn, "resize", on_gpu("size"), "argument device"),
    "a CPU input to a GPU operator": (
        fn, "resize", lambda real, images, **named: real(images.cpu(), **named, device="gpu"),
        "input device",
    ),
    "an operator without a GPU kernel": (
        fn.decoders, "decoder",
        lambda real, jpegs, **named: real(jpegs.gpu(), **{**named, "device": "gpu"}), "kernel",
    ),
    "a misspelt argument": (fn, "resize", with_keys(antialiasing=True), "argument name"),
    "a misspelt argument of the decoder": (fn.decoders, "decoder", with_keys(jpeg_upsampling=True), "argument name"),
    "a copy through the host": (
        fn, "resize", lambda real, images, **named: fn.flip(real(images, **named).cpu()).gpu(), "host copy",
    ),
    "an output on the CPU": (
        fn, "resize", lambda real, images, **named: real(images, **named).cpu(), "output device",
    ),
    "a Python function": (
        fn, "resize",
        lambda real, images, **named: fn.dl_tensor_python_function(real(images, **named), function=list, device="gpu"),
        "host code",
    ),
    "a wrong enumeration": (fn, "resize", with_keys(interp_type="linear"), "definition"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("decode_device", ["cpu", "mixed"])
def test_mistakes_in_a_gpu_graph_are_detected(
    monkeypatch: pytest.MonkeyPatch, decode_device: str, mistake: str
) -> None:
    module, name, replacement, check = MISTAKES[mistake]
    name = name.replace("decoder", "image" if decode_device == "mixed" else "image_slice")
    real = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *inputs, **named: replacement(real, *inputs, **named))
    detected = faults(decode_device)
    assert {line.partition(":")[0] for line in detected} == {check}, detected


def test_the_gpu_graph_run_on_a_cpu_equals_the_cpu_resize(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same graph, with `DataNode.gpu` replaced by the identity: crops, sizes, both flips and their order."""
    rng, n, res = np.random.default_rng(0), 4, 24
    photos = [Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((60, 50)) for _ in range(n)]
    files = [io.BytesIO() for _ in photos]
    for photo, file in zip(photos, files, strict=True):
        photo.save(file, "jpeg", quality=95)
    windows = np.array([[0, 0, 60, 50], [5, 3, 30, 40], [10, 10, 24, 24], [2, 1, 50, 45]], np.int32)  # x, y, w, h
    mirrored = [(False, False), (True, False), (False, True), (True, True)]
    monkeypatch.setattr(DataNode, "gpu", lambda node: node)
    pipe = _graph(decode_device="cpu", **PLAIN)
    pipe.build()
    flips, vflips = np.array(mirrored).T
    batch = batch_spec(n, res=res, crops=windows, flips=flips, augment_params={"vflips": vflips})
    jpegs = [np.frombuffer(file.getvalue(), np.uint8) for file in files]
    inputs = {"jpeg": jpegs, "rows": gpu_rows(batch, np.array([len(jpeg) for jpeg in jpegs]))}
    for name, value in inputs.items():
        pipe.feed_input(name, value)
    out, _ = pipe.run()
    images = np.array(out.as_tensor())
    assert (images.shape, images.dtype) == ((n, res, res, 3), np.uint8)
    for file, (x, y, w, h), (flip, vflip), got in zip(files, windows, mirrored, images, strict=True):
        window = np.asarray(Image.open(file).convert("RGB"))[y : y + h, x : x + w]
        expected = np.empty((res, res, 3), np.uint8)
        resize(np.ascontiguousarray(window), flip, vflip, expected, np.ones(3, np.float32), np.zeros(3, np.float32))
        error = np.abs(got.astype(int) - expected)  # decoders differ by a few levels beside a window's border
        assert (error.mean() < 0.5, error.max() <= 6) == (True, True)


def test_a_gpu_decoder_gets_exactly_the_bytes_of_each_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are padded with what was in the buffer before; no document says that nvJPEG ignores it."""
    rng, nbytes = np.random.default_rng(1), np.array([700, 1, 31, 256])
    rows = rng.integers(0, 256, (4, 700), dtype=np.uint8)
    cut = fn.slice
    monkeypatch.setattr(fn.decoders, "image", lambda jpegs, **_: jpegs)
    monkeypatch.setattr(fn, "slice", lambda data, **keys: cut(data, **keys) if len(keys["axes"]) == 1 else data)
    monkeypatch.setattr(fn, "resize", lambda images, **_: images)
    monkeypatch.setattr(DataNode, "gpu", lambda node: node)
    pipe = _graph(decode_device="mixed", **PLAIN)
    pipe.build()
    pipe.feed_input("jpeg", rows)
    pipe.feed_input("rows", gpu_rows(batch_spec(4, res=32), nbytes))
    out, _ = pipe.run()
    assert [np.array(out.at(i)).tobytes() for i in range(4)] == [
        row[:n].tobytes() for row, n in zip(rows, nbytes, strict=True)
    ]
