"""Builds the recipe's timm model, loads its initial weights, and sets up TF32 and torch.compile."""

from __future__ import annotations

import dataclasses
import difflib
import os
import shutil
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from safetensors import safe_open
from timm.layers import BlurPool2d
from timm.models import load_state_dict
from torch import nn

from resolute.errors import ResoluteError, StorageError
from resolute.train import checkpoint
from resolute.train.recipe.schema import Model

from .norms import set_norms

__all__ = ["build_model", "compile_network", "head_parameters", "set_tf32", "share_graph", "size_options"]


def build_model(
    model: Model,
    *,
    classes: int,
    channels_last: bool,
    device: torch.device,
    ranks: int = 1,
    for_training: bool = True,
    same_head: bool = False,
    resolutions: Collection[int] = (),
) -> nn.Module:
    """A timm model with `classes` outputs on `device`; parameter names are always timm's.

    `for_training`: False if the caller loads the weights. `same_head`: require initial weights for `classes` classes.
    `resolutions` (px): input sizes that the network must accept (see `size_options`); empty: timm's default.
    Raises `ResoluteError` if timm cannot build the model, the weights are unavailable, or a setting has no effect on
    this model.
    """
    pretrained = for_training and model.weights == "pretrained"
    sized = dataclasses.replace(model, kwargs={**model.kwargs, **size_options(model, resolutions)})
    network = _create(sized, classes=classes, pretrained=pretrained)
    if for_training or model.norm != "sync":  # why: sync norms differ only in training
        network = set_norms(network, model, ranks=ranks, device=device)
    cfg: Any = getattr(network, "pretrained_cfg", {})
    average = ""
    if pretrained:
        weight_classes = cfg["num_classes"]
    elif for_training and model.weights:
        weight_classes, average = _load_weights(network, model)
    if for_training and model.weights:
        if weight_classes != classes and same_head:
            raise ResoluteError(
                f"weights: {model.weights} of {model.name} are for {weight_classes or 'no'} classes, expected "
                f"{classes}, as in the data; use others"
            )
        head = "head included"
        if weight_classes != classes:
            head = f"with {weight_classes or 'no'} classes, so a new head is made for {classes}"
        trained = f"; trained with mean = {list(cfg['mean'])}, std = {list(cfg['std'])}" if pretrained else ""
        source = f"{average} weights of {model.weights}" if average else f"{model.weights} weights"
        print(f"{model.name}: starts from {source}, {head}{trained}", flush=True)
    if model.grad_checkpointing:
        try:
            network.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AssertionError, AttributeError):
            raise ResoluteError(
                f"model.grad_checkpointing: got true, but {model.name} does not support it, expected false; remove it"
            ) from None
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return network.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]


def size_options(model: Model, resolutions: Collection[int]) -> dict[str, Any]:
    """timm keyword arguments with which a model of a fixed size (ViT, Swin) accepts other `resolutions` (px).

    `dynamic_img_size`, which interpolates position embeddings and builds attention masks per size without changing the
    weights' shapes; empty for a model that does not need it or does not have it. Whether the model accepts the
    resolutions, the warm-up finds out.
    """
    if not resolutions or not timm.is_model(model.name) or "dynamic_img_size" in model.kwargs:
        return {}
    try:
        cfg: Any = timm.get_pretrained_cfg(model.name)
    except RuntimeError:  # an unknown tag; `_create` reports it
        return {}
    own = model.kwargs.get("img_size", cfg.input_size[-1])
    if not getattr(cfg, "fixed_input_size", False) or {*resolutions} == {own}:
        return {}
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            timm.create_model(model.name, **model.kwargs, dynamic_img_size=True)
    # why: TypeError: the model has no such argument. The others: its constructor reads values of tensors, which the
    # meta device lacks; it is then built without the argument, where any real mistake is reported
    except (NotImplementedError, RuntimeError, TypeError):
        return {}
    return {"dynamic_img_size": True}


def _create(model: Model, *, classes: int, pretrained: bool) -> nn.Module:
    ours: dict[str, Any] = {key: getattr(model, key) for key in ("drop_rate", "drop_path_rate") if getattr(model, key)}
    if model.blurpool:
        ours["aa_layer"] = BlurPool2d
    for key in ours.keys() & model.kwargs.keys():
        raise ResoluteError(f"model.kwargs: got {key}, expected it only as a key of [model]; remove it from kwargs")
    try:
        network: nn.Module = timm.create_model(
            model.name, num_classes=classes, pretrained=pretrained, **model.kwargs, **ours
        )
    except OSError as error:
        raise ResoluteError(
            f"model.weights: timm's pretrained weights of {model.name} are not cached and the hub cannot be reached "
            f"({str(error).splitlines()[0][:160]}), expected either; go online once, or name a local file"
        ) from None
    except (RuntimeError, TypeError, ValueError) as error:
        for key, name in (("drop_rate", "drop_rate"), ("drop_path_rate", "drop_path_rate"), ("aa_layer", "blurpool")):
            if key in str(error) and key in ours:
                raise ResoluteError(f"model.{name}: timm's {model.name} does not support it; remove it") from None
        names = timm.list_models(pretrained=pretrained)
        known = difflib.get_close_matches(model.name, {name.partition(".")[0] for name in names}, n=1)
        raise ResoluteError(
            f"model: timm cannot build {model.name!r} with {model.kwargs}{' pretrained' * pretrained}: {error}; "
            f"expected a timm model; {f'did you mean {known[0]}?' if known else 'see timm.list_models()'}"
        ) from None
    if model.blurpool and not any(isinstance(module, BlurPool2d) for module in network.modules()):
        raise ResoluteError(f"model.blurpool: without effect, {model.name} has no strided layers to blur; remove it")
    return network


def _load_weights(network: nn.Module, model: Model) -> tuple[int | None, str]:
    """Load the file `model.weights` into `network`, except a head of another size.

    Returns the number of classes of the file's head (None without a head) and which weights were loaded, "raw" or
    "EMA" ("" if the file holds only one kind). Raises `ResoluteError` if the file does not fit the model.
    """
    path = Path(model.weights)
    try:
        state, average = _read_weights(path, model.weights_kind)
    except FileNotFoundError:
        raise ResoluteError(f'model.weights: {path} not found, expected a file or "pretrained"; name another') from None
    except OSError as error:
        raise StorageError(
            f"model.weights: {path} cannot be read, got '{error.strerror or error}', expected a readable file; "
            "name another, or run again when the disk answers"
        ) from None
    except ResoluteError:
        raise
    except Exception as error:  # why so broad: a damaged file can raise almost anything
        reason = str(error).splitlines()[0].split(". ")[0][:100] if str(error) else type(error).__name__
        raise ResoluteError(
            f"model.weights: {path} is damaged or holds no weights ({reason}), expected a .safetensors or .pth file; "
            "name another"
        ) from None
    foreign = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    state = foreign(state, network) if foreign else state
    own = network.state_dict()
    head = head_parameters(network)
    file_classes = len(state[head[-1]]) if head[-1] in state else None
    skipped = [name for name in head if name not in state or state[name].shape != own[name].shape]
    if model.norm == "group":
        state = {name: v for name, v in state.items() if name in own or not name.endswith(_STATISTICS)}
    missing, unexpected = own.keys() - state.keys() - set(skipped), state.keys() - own.keys()
    misshapen = [name for name in own.keys() & state.keys() - set(skipped) if state[name].shape != own[name].shape]
    if missing or unexpected or misshapen:
        names = sorted(missing) + sorted(unexpected) + sorted(misshapen)
        raise ResoluteError(
            f"model.weights: {path} is of another model than {model.name}: got {len(missing)} weights missing, "
            f"{len(unexpected)} unknown, {len(misshapen)} of another shape ({', '.join(names[:3])} …), expected none; "
            "name another"
        )
    network.load_state_dict({name: v for name, v in state.items() if name not in skipped}, strict=False)
    return file_classes, average


def _read_weights(path: Path, kind: Literal["best", "raw", "ema"]) -> tuple[dict[str, Any], str]:
    """The state dict at `path`, and "raw" or "EMA" if the format can hold both, else "".

    Raises `OSError`, what the format's reader raises for damaged files, and `ResoluteError` if the requested average
    is not in the file.
    """
    path.open("rb").close()  # why: timm and torch do not distinguish I/O errors from damaged files
    if path.suffix == ".safetensors":
        if kind == "ema":
            with safe_open(path, "pt") as file:
                exported = (file.metadata() or {}).get("weights")
            if exported != "ema":
                raise _no_average(path)
        return load_state_dict(str(path)), ""
    if checkpoint.peek(path, "format") == checkpoint.FORMAT:
        saved = checkpoint.load(path, expect={})
        is_average = saved["progress"]["best_weights"] == "ema" if kind == "best" else kind == "ema"
        if is_average and saved["ema"] is None:
            raise _no_average(path)
        return saved["ema" if is_average else "model"], "EMA" if is_average else "raw"
    content = torch.load(path, map_location="cpu", weights_only=True)
    has_average = any(content.get(key) is not None for key in ("state_dict_ema", "model_ema"))  # as timm writes them
    if kind == "ema" and not has_average:
        raise _no_average(path)
    is_average = has_average and kind != "raw"
    return load_state_dict(str(path), use_ema=is_average), ("EMA" if is_average else "raw") if has_average else ""


def _no_average(path: Path) -> ResoluteError:
    return ResoluteError(f"model.weights_kind: got ema, but {path} holds no averaged weights; remove the key")


def head_parameters(network: nn.Module) -> list[str]:
    """Parameter names of a timm model's classifier(s); empty if `network` is not a timm model."""
    heads: Any = network.get_classifier() if hasattr(network, "get_classifier") else ()  # type: ignore[operator]
    inside = {id(p) for head in (heads if isinstance(heads, tuple) else (heads,)) for p in head.parameters()}
    return [name for name, p in network.named_parameters() if id(p) in inside]


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def set_tf32(tf32: Literal["convolutions", "all", "off"], device: torch.device) -> None:
    """Set process-wide what runs in TF32. Raises `ResoluteError` on a device where it has no effect."""
    if tf32 == "convolutions":  # torch's default
        return
    if device.type != "cuda":
        raise ResoluteError(f"precision.tf32: without effect, got {tf32} on {device.type}; remove it")
    # why not the newer per-backend settings: once they are set, reading the older ones raises, and inductor's
    # autotuning reads them
    torch.set_float32_matmul_precision("highest" if tf32 == "off" else "high")
    torch.backends.cudnn.allow_tf32 = tf32 != "off"


def compile_network(network: nn.Module, device: torch.device, *, backend: Any = "inductor") -> None:
    """Compile `network` in place (parameter names stay): one graph per resolution, mode and trainable set, for batches
    of all sizes that `share_graph` was called with.

    Raises `ResoluteError` if no C or C++ compiler is installed.
    """
    import torch._dynamo  # why here: the import is slow

    variable, names = ("CXX", ("g++",)) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    compilers = (os.environ[variable],) if variable in os.environ else names
    if not any(shutil.which(name.split()[0]) for name in compilers):
        raise ResoluteError(
            f"precision.compile: no compiler found (got {' and '.join(compilers)} missing), expected one for "
            f"torch.compile; install it, set {variable}, or remove the key"
        )
    # why: beyond this limit (8 by default) resolutions run uncompiled; a plan has far fewer than 256
    torch._dynamo.config.recompile_limit = 256
    network.compile(dynamic=False, backend=backend)


def share_graph(images: torch.Tensor) -> None:
    """Let a compiled network take a batch of any size in the graph of the first one, such as an epoch's last batch."""
    torch._dynamo.maybe_mark_dynamic(images, 0)
