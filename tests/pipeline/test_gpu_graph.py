"""The graph that runs on a GPU, defined and serialised on a machine that has none."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.draws import Features
from pipeline.graph import _graph

PLAIN: dict[str, Any] = {
    "batch_size": 4, "num_threads": 1, "device_id": None, "prefetch_queue_depth": 2, "exec_dynamic": True,
    "features": Features(mixing=True), "on_cpu": False, "mean": (0.5,) * 3, "std": (0.2,) * 3, "half": False,
    "largest_res": 64,
}  # fmt: skip


def operators(decode_device: str) -> dict[str, str]:
    """The text of each operator's specification, by its name; defining and serialising finds wrong arguments."""
    pipe = _graph(decode_device=decode_device, **PLAIN)
    assert pipe.serialize()
    return {operator.name.strip("_").partition("_")[0]: str(operator.spec) for operator in pipe._ops}


@pytest.mark.parametrize("decode_device", ["cpu", "mixed"])
def test_jpegs_are_decoded_with_the_same_chroma_interpolation_on_both_devices(decode_device: str) -> None:
    decoder = operators(decode_device)["ImageSlice"]
    assert f"device: {decode_device}" in decoder
    assert "jpeg_fancy_upsampling: True" in decoder
