"""The graph that runs on a GPU, defined and serialised on a machine that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nvidia.dali import fn
from nvidia.dali.data_node import DataNode

from resolute.pipeline.graph.batch_pipeline import _graph
from resolute.pipeline.graph.cpu_nodes import RunConstants
from resolute.pipeline.plan.rows import words_of
from tests.support.batch_spec import batch_spec
from tests.support.dali_graph import graph_faults, without_compiled_nodes

PLAIN: dict[str, Any] = {
    "batch_size": 4,
    "num_threads": 1,
    "device_id": None,
    "prefetch_queue_depth": 2,
    "exec_dynamic": True,
    "mixing": False,
    "on_cpu": False,
}


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


def test_the_graph_for_a_gpu_ends_after_the_resize_and_decodes_whole_images() -> None:
    """Decoding a region fails or crashes there (nvImageCodec 0.9, issue 55); Triton's kernels do all that follows."""
    got = operators("mixed")
    tags = {"Reinterpret", "Cat"}
    assert got.keys() == {"jpeg", "rows", "Slice", "Image", "TensorSubscript", "Cast", "Resize", *tags}
    assert "device: gpu" in got["Slice"]  # the last one: that of the crop
    assert "device: gpu" in got["Resize"]


def faults(decode_device: str) -> list[str]:
    return graph_faults(lambda: _graph(decode_device=decode_device, **PLAIN))


@pytest.mark.parametrize("decode_device", ["cpu", "mixed"])
def test_the_graph_is_valid_for_a_gpu(decode_device: str) -> None:
    assert faults(decode_device) == []


MISTAKES: dict[str, Callable[..., Any]] = {  # the check that detects it: another `fn.resize`
    "argument device": lambda real, images, **named: real(images, **{**named, "size": named["size"].gpu()}),
    "argument name": lambda real, images, **named: real(images, **named, antialiasing=True),
    "host copy": lambda real, images, **named: fn.flip(real(images, **named).cpu()).gpu(),
    "output device": lambda real, images, **named: real(images, **named).cpu(),
}


@pytest.mark.parametrize("check", MISTAKES)
def test_mistakes_in_a_gpu_graph_are_detected(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    real = fn.resize
    monkeypatch.setattr(fn, "resize", lambda *inputs, **named: MISTAKES[check](real, *inputs, **named))
    detected = faults("mixed")
    assert {line.partition(":")[0] for line in detected} == {check}, detected


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
    words = words_of(batch_spec(4, res=32).rows)
    constants = RunConstants(mean=(0.5,) * 3, std=(0.2,) * 3, noise=np.zeros((256, 256, 3), np.uint8), decoders=None)
    constants.complete(words, nbytes)
    pipe.feed_input("rows", words)
    out, _ = pipe.run()
    assert [np.array(out.at(i)).tobytes() for i in range(4)] == [
        row[:n].tobytes() for row, n in zip(rows, nbytes, strict=True)
    ]
