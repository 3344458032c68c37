"""A recipe's training step on a GPU that is not there: dtypes and memory formats of its operations.

    python -m tests.support.whole_step GUARD RECIPE[,KEY=VALUE…] …

GUARD: the library that `build_guard` makes. Prints the distinct operations of each recipe as a line of JSON, see
`Recorder`. A process of its own, because it changes torch for good, which forks for each recipe. All tensors are fakes
(shapes, dtypes and strides without memory) on "cuda:0", and the learner, its optimizer and the EMA are the product's.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

if __name__ == "__main__":
    GUARD = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)  # why before torch: its `device_count` has to be found first

import dataclasses
import json
import os
import subprocess
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from resolute.pipeline.dataset.target import Target
from resolute.pipeline.loader.batch import Batch
from resolute.train import learner as learners
from resolute.train.learner import Learner, image_dtype
from resolute.train.model.outputs import CLASSES, Outputs
from resolute.train.recipe import RECIPES
from resolute.train.recipe.schema import Recipe
from tests.support.batch_spec import batch_spec
from tests.support.fake_cuda import FakeCuda

__all__ = ["build_guard"]

DEVICE = torch.device("cuda:0")
CLASS_COUNT, N = 10, 26  # why 26: no layer has 26 or 13 (a micro-batch) channels

# The autograd engine asks CUDA for streams, and whether the device is in use: these answers need no driver.
_SOURCE = r"""
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::cuda {
DeviceIndex device_count() noexcept { return 1; }
}
namespace {
using namespace c10;
const Device device(DeviceType::CUDA, 0);
struct Guard final : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return device; }
  Device getDevice() const override { return device; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
};
}
extern "C" int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = *active = 0;
  return 0;
}
extern "C" void install() { impl::registerDeviceGuard(DeviceType::CUDA, new Guard()); }
"""


def build_guard(folder: Path) -> Path:
    """Compile the stand-in for CUDA's driver into `folder` (a few seconds)."""
    (folder / "guard.cpp").write_text(_SOURCE)
    parts = Path(torch.__file__).parent
    library = folder / "guard.so"
    line = [
        "g++",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{parts / 'include'}",
        str(folder / "guard.cpp"),
        "-o",
        str(library),
        f"-L{parts / 'lib'}",
        "-lc10",
        f"-Wl,-rpath,{parts / 'lib'}",
        "-Wl,-soname,libcuda.so.1",
    ]
    subprocess.run(line, check=True)
    return library


def _properties(capability: tuple[int, int]) -> SimpleNamespace:
    """Those of an A100 (8.0) or H100 (9.0), as far as inductor asks. Source: torch.cuda.get_device_properties there."""
    return SimpleNamespace(
        name="stand-in",
        major=capability[0],
        minor=capability[1],
        total_memory=80 * 2**30,
        warp_size=32,
        multi_processor_count=132 if capability[0] == 9 else 108,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=232448 if capability[0] == 9 else 166912,
        L2_cache_size=40 * 2**20,
    )


def stand_in(capability: tuple[int, int]) -> None:
    """Let torch believe that there is a GPU, in this process from now on."""
    GUARD.install()
    patch = pytest.MonkeyPatch()
    FakeCuda(capability=capability).install(patch)
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_properties": _properties(capability),
        "is_bf16_supported": True,
        "synchronize": None,
        "set_device": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "_lazy_init": None,
        "is_current_stream_capturing": False,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    tensor = torch.tensor  # why: with a device it asks the driver
    patch.setattr(torch, "tensor", lambda data, *, device=None, **keys: tensor(data, **keys).to(device or "cpu"))
    patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    # why: both choices ask the driver; on a GPU they are cuDNN and a fused kernel
    native: Any = torch._C  # why: its stubs lack `_ConvBackend`
    patch.setattr(native, "_select_conv_backend", lambda *_, **__: native._ConvBackend.Cudnn)
    patch.setattr(nn.functional, "scaled_dot_product_attention", _attention)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    tensors = [query, key, value]
    if torch.is_autocast_enabled("cuda"):  # as autocast does for the real function
        tensors = [tensor.to(torch.get_autocast_dtype("cuda")) for tensor in tensors]
    train = query.requires_grad
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        *tensors, attn_mask, train, dropout_p, is_causal, scale=scale
    )[0]
    return output


def to_fakes(network: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the tensors of `network` by fakes on the GPU with the same strides."""
    with mode:
        for module in network.modules():
            named: list[dict[str, Any]] = [module._parameters, module._buffers]
            for tensors in named:
                for name, value in tensors.items():
                    if value is not None:
                        fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
                        fake.requires_grad_(value.requires_grad)
                        tensors[name] = (
                            nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
                        )


_PRODUCTS = (
    "convolution",
    "conv2d",
    "convolution_backward",
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "matmul",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
)
_BATCH_NORMS = ("batch_norm", "native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update")
_OTHER_NORMS = {"layer_norm": 2, "native_layer_norm": 2, "group_norm": 2, "native_group_norm": 1}  # weight's place


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _tensors(values: Any) -> list[torch.Tensor]:
    found = [value for value in values if isinstance(value, torch.Tensor)]
    return found + [tensor for value in values if isinstance(value, list) for tensor in _tensors(value)]


class Recorder(TorchDispatchMode):
    """Counts the distinct operations: (kind, when, name, dtypes, channels_last).

    kind       product: dtypes of its inputs; norm: input; statistics: weight, bias, running and batch statistics;
               narrowed: batches of images or features converted from float32; update: tensors of the optimizer or EMA;
               sync: the host reads a value from the device; gradients: the parameters' gradients
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[tuple[Any, ...]] = Counter()
        self.when = ""

    def add(self, kind: str, name: str, dtypes: list[str], channels_last: bool | None = None) -> None:
        self.rows[kind, self.when, name, tuple(dtypes), channels_last] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in ("_local_scalar_dense", "item"):  # the second in inference mode
            if args[0].is_cuda:
                self.add("sync", name, [_dtype(args[0])])
            return 1.0  # why: fakes have no values; on the CPU it is the number of a step
        if name.startswith(("_fused_", "_foreach_lerp_")):
            self.add("update", name, sorted({_dtype(tensor) for tensor in _tensors(args)}))
            if name.startswith("_fused_"):
                return None  # why: it has no version for fakes
        output = func(*args, **(kwargs or {}))
        tensors = _tensors(args)
        if name in _PRODUCTS:
            layout = (
                all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors if tensor.dim() == 4)
                if "conv" in name
                else None
            )
            self.add("product", name, [_dtype(tensor) for tensor in tensors], layout)
        elif name in _BATCH_NORMS or name in _OTHER_NORMS:
            self.add("norm", name, [_dtype(args[0])])
            kept = args[1:5] if name in _BATCH_NORMS else args[_OTHER_NORMS[name] : _OTHER_NORMS[name] + 2]
            batch = output[1:3] if isinstance(output, tuple | list) else ()
            self.add(
                "statistics",
                name,
                sorted(
                    {
                        _dtype(tensor)
                        for tensor in (*kept, *batch)
                        if isinstance(tensor, torch.Tensor) and tensor.numel()
                    }
                ),
            )
        elif name == "linalg_vector_norm" and tensors[0].dim() == 4:
            self.add("statistics", name, [_dtype(output)])
        elif (
            name == "_to_copy"
            and _dtype(args[0]) == "float32"
            and _dtype(output) in ("bfloat16", "float16")
            and args[0].dim() > 2
            and len(args[0]) in (N, N // 2)
        ):
            self.add("narrowed", name, [_dtype(args[0])])
        return output


def _batch(recipe: Recipe, head: Outputs, stage: int, res: int, split: Any) -> Batch:
    numbers = np.arange(N)
    spec = batch_spec(N, res=res, split=split, stage=stage, partner=numbers)
    images = torch.empty(N, 3, res, res, device=DEVICE, dtype=image_dtype(recipe.precision, DEVICE))
    targets = torch.zeros(N, dtype=torch.int64, device=DEVICE)
    if head.target.kind != "class":
        targets = torch.zeros(N, CLASS_COUNT, device=DEVICE)
    return Batch(
        images=images.to(memory_format=torch.channels_last),
        targets=targets,
        partner_labels=targets,
        lam=torch.ones(N, device=DEVICE),
        keys=numbers,
        spec=spec,
    )


# the same kinds of layers as the network of the recipe, fewer of each
_SHALLOW: dict[str, dict[str, Any]] = {
    "resnet18": {"kwargs": {"layers": [1, 1, 1, 1]}},
    "resnet50": {"kwargs": {"layers": [1, 1, 1, 1]}},
    "deit3_base_patch16_224": {"kwargs": {"depth": 2}},
    "deit3_small_patch16_224": {"kwargs": {"depth": 2}},
    "vit_small_patch16_224": {"kwargs": {"depth": 2}},
    "vit_small_patch16_224.augreg_in21k_ft_in1k": {"kwargs": {"depth": 2}},
    "convnext_tiny.fb_in22k_ft_in1k": {"kwargs": {"depths": [1, 1, 1, 1]}},
    "convnextv2_atto.fcmae": {"kwargs": {"depths": [1, 1, 1, 1]}},
    "efficientnet_b4": {"name": "test_efficientnet"},
}


def load(name: str, *, amp: str = "") -> Recipe:
    """An included recipe, without its initial weights, with a shallow network; `amp`: instead of its precision.amp."""
    recipe = Recipe.load(RECIPES / f"{name}.toml")
    model, precision = recipe.model, recipe.precision
    changes = dict(_SHALLOW.get(model.name, {}))
    changes["kwargs"] = {**model.kwargs, **changes.get("kwargs", {})}
    model = dataclasses.replace(model, weights="", **changes)
    mixed: dict[str, Any] = {"amp": amp} if amp else {}
    precision = dataclasses.replace(precision, **mixed)
    return dataclasses.replace(recipe, model=model, precision=precision)


def _head(recipe: Recipe) -> Outputs:
    names = tuple(map(str, range(CLASS_COUNT)))
    if recipe.loss.kind in ("mse", "l1", "huber"):
        return Outputs(
            target=Target(kind="values", names=names),
            loss=recipe.loss.kind,
            mean=(0.0,) * CLASS_COUNT,
            std=(1.0,) * CLASS_COUNT,
        )
    if recipe.name.startswith("labels"):
        return Outputs(target=Target(kind="labels", names=names), loss="bce")
    return CLASSES


def step(name: str, *, amp: str = "", capability: str = "80", mistakes: str = "") -> list[dict[str, Any]]:
    """Run a training step and a validation batch in the first and the last stage, and with each set of frozen layers.

    `mistakes`: if not empty, make one mistake of each kind.
    """
    recipe = load(name, amp=amp)
    stand_in((int(capability[0]), int(capability[1:])))
    patch = pytest.MonkeyPatch()
    patch.setattr(FakeTensorMode, "__deepcopy__", lambda self, memo: self, raising=False)  # for the EMA's copy
    mode = FakeTensorMode(allow_non_fake_inputs=False)
    build, to = learners.build_model, nn.Module.to

    def on_gpu(network: nn.Module, *, device: torch.device, memory_format: torch.memory_format) -> nn.Module:
        assert device == DEVICE
        to(network, memory_format=memory_format)
        to_fakes(network, mode)
        return network

    def build_real(*args: Any, **options: Any) -> nn.Module:
        with unset_fake_temporarily(), patch.context() as inner:  # why: timm's constructors read values of tensors
            inner.setattr(nn.Module, "to", on_gpu)
            return build(*args, **options)

    patch.setattr(learners, "build_model", build_real)
    head, epochs = _head(recipe), recipe.total_epochs
    with mode:
        learner = Learner(
            recipe,
            classes=CLASS_COUNT,
            total_steps=epochs,
            epoch_steps=[1] * epochs,
            epoch_samples=[N] * epochs,
            device=DEVICE,
            head=head,
        )
        recorder = Recorder()
        if mistakes:
            _make_mistakes(learner, patch)
        update = learner.optimizer.step

        def checked_update(*args: Any, **options: Any) -> Any:
            for parameter in learner.network.parameters():
                if parameter.grad is not None:
                    recorder.add("gradients", "grad", [_dtype(parameter), _dtype(parameter.grad)])
            return update(*args, **options)

        patch.setattr(learner.optimizer, "step", checked_update)
        seen = set()
        for number, stage in enumerate(recipe.stages):
            if learner.freezer.sets[number] in seen and stage is not recipe.stages[-1]:
                continue
            seen.add(learner.freezer.sets[number])
            recorder.when = f"train {stage.resolutions[-1]}"
            with recorder:
                loss, _ = learner.train_step(_batch(recipe, head, number, stage.resolutions[-1], "train"))
            recorder.add("loss", "loss", [_dtype(loss)])
            recorder.when = f"eval {stage.validation_res}"
            with recorder:
                scores = learner.eval_step(_batch(recipe, head, number, stage.validation_res, "val"))
            recorder.add("scores", "sums", sorted({_dtype(sums) for sums in scores.sums.values()}))
    names = ("kind", "when", "name", "dtypes", "channels_last")
    return [{**dict(zip(names, row, strict=True)), "count": count} for row, count in recorder.rows.items()]


def _make_mistakes(learner: Learner, patch: pytest.MonkeyPatch) -> None:
    """Each in another layer of a ResNet."""
    layers: dict[str, Any] = dict(learner.network.named_children())
    float32, wide, contiguous = (layers[f"layer{number}"] for number in (1, 2, 3))
    patch.setattr(
        float32, "forward", torch.autocast("cuda", enabled=False)(lambda x, forward=float32.forward: forward(x.float()))
    )
    wide.register_forward_pre_hook(lambda module, inputs: (inputs[0].float(),))
    contiguous.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
    half = next(module for module in layers["layer4"].modules() if isinstance(module, nn.BatchNorm2d))
    named: list[dict[str, Any]] = [half._parameters, half._buffers]
    for values in named:
        values |= {
            name: nn.Parameter(value.detach().half()) if isinstance(value, nn.Parameter) else value.half()
            for name, value in values.items()
            if value.is_floating_point()
        }
    enter = learner.enter
    patch.setattr(learner, "enter", lambda *args, **keys: (enter(*args, **keys), torch.ones((), device=DEVICE).item()))


def main(jobs: list[str]) -> None:
    for job in jobs:
        recipe, *keys = job.split(",")
        child = os.fork()
        if child == 0:
            rows = step(recipe, **dict(key.split("=", 1) for key in keys))
            print(json.dumps(rows), flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert status == 0, job


if __name__ == "__main__":
    main(sys.argv[2:])
