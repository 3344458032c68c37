"""Builds the recipe's timm model, loads its initial weights, and sets up TF32 and torch.compile."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import pickle
import re
import shutil
import sys
from collections.abc import Collection, Sequence
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
from resolute.train.recipe.weights import about_weights

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
    names: Sequence[str] = (),
    same_head: bool = False,
    resolutions: Collection[int] = (),
) -> nn.Module:
    """A timm model with `classes` outputs on `device`; parameter names are always timm's.

    `for_training`: False if the caller loads the weights. `names`: of the outputs, by which those of initial weights
    are found if these say theirs; () for unknown. `same_head`: require initial weights for these outputs.
    `resolutions` (px): input sizes that the network must accept (see `size_options`); empty: timm's default.
    Raises `ResoluteError` if timm cannot build the model, the weights are unavailable, or a setting has no effect on
    this model.
    """
    pretrained = for_training and model.weights == "pretrained"
    sized = dataclasses.replace(model, kwargs={**model.kwargs, **size_options(model, resolutions)})
    network = _create(sized, classes=classes, pretrained=pretrained)
    if for_training or model.norm != "sync":  # why: sync norms differ only in training
        network = set_norms(network, model, ranks=ranks, device=device)
    if for_training and model.weights:
        _initialise(network, model, classes=classes, names=names, same_head=same_head)
    if model.grad_checkpointing:
        try:
            network.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AssertionError, AttributeError):
            raise ResoluteError(
                f"model.grad_checkpointing: got true, but {model.name} does not support it, expected false; remove it"
            ) from None
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return network.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]


def _initialise(network: nn.Module, model: Model, *, classes: int, names: Sequence[str], same_head: bool) -> None:
    """Load the initial weights, unless timm has done so, and print how they are used.

    Outputs are matched by their names if the weights say theirs. Raises `ResoluteError` if the weights do not fit.
    """
    average, known = "", about_weights(model).names
    if model.weights == "pretrained":
        cfg: Any = network.pretrained_cfg
        weight_classes = cfg["num_classes"]
    else:
        rows = _rows(known, names)
        weight_classes, average = _load_weights(
            network, model, rows=rows, keep_head=rows is not None or not (known and names)
        )
    is_whole = weight_classes == classes
    if known and names:
        is_whole = {*names} <= {*known}
    if same_head and not is_whole:
        others = _list([name for name in names if known and name not in known]) if known else ""
        got = f"without {others}" if others else f"for {weight_classes or 'no'} classes"
        raise ResoluteError(
            f"weights: {model.weights} of {model.name} are {got}, expected the {classes} classes of the data; "
            "use others"
        )
    if not is_whole:
        of = f"of other classes ({_list(known)})" if known and names else f"with {weight_classes or 'no'} classes"
        head = f"{of}, so a new head is made for {classes}"
    elif known and names and [*names] != [*known]:
        head = f"its head's {len(known)} classes matched by name"
    else:
        head = "head included"
    source = f"{average} weights of {model.weights}" if average else f"{model.weights} weights"
    print(f"{model.name}: starts from {source}, {head}", flush=True)


def _rows(known: Sequence[str] | None, names: Sequence[str]) -> list[int] | None:
    """For each of `names`, its position in `known`; None if a name is missing or nothing is known."""
    if not known or not names or not {*names} <= {*known}:
        return None
    return [known.index(name) for name in names]


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


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
    # why so broad: the model has no such argument, or its constructor reads values of tensors, which the meta device
    # lacks, and more; it is then built without the argument, where any real mistake is reported
    except Exception:
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


def _load_weights(
    network: nn.Module, model: Model, *, rows: Sequence[int] | None, keep_head: bool
) -> tuple[int | None, str]:
    """Load the file `model.weights` into `network`, except a head of another size.

    rows: which outputs of the file's head to take; None: all. keep_head: False to leave the file's head out.

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
    except pickle.UnpicklingError as error:
        if (foreign := re.search(r"GLOBAL ([\w.]+)", str(error))) is None:
            raise _damaged(path, str(error)) from None
        raise ResoluteError(
            f"model.weights: {path} holds a {foreign[1]} beside its weights, which could run code when it is read, "
            "expected weights alone; if you trust it, save its state dict again with torch.save"
        ) from None
    except Exception as error:  # why so broad: a damaged file can raise almost anything
        raise _damaged(path, str(error) or type(error).__name__) from None
    foreign = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    state = foreign(state, network) if foreign else state
    own = network.state_dict()
    head = head_parameters(network)
    file_classes = len(state[head[-1]]) if head[-1] in state else None
    if rows is not None:
        state |= {name: state[name][rows] for name in head if name in state and len(state[name]) == file_classes}
    skipped = [name for name in head if not keep_head or name not in state or state[name].shape != own[name].shape]
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
    with torch.serialization.safe_globals([argparse.Namespace]):  # the arguments of timm's train.py, which are data
        content = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(content, dict):
            raise ValueError(f"a {type(content).__name__}")
        return _average_of(path, kind, content)


def _average_of(path: Path, kind: Literal["best", "raw", "ema"], content: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """As `_read_weights`, for a file of torch with `content`."""
    has_average = any(content.get(key) is not None for key in ("state_dict_ema", "model_ema"))  # as timm writes them
    if kind == "ema" and not has_average:
        raise _no_average(path)
    is_average = has_average and kind != "raw"
    return load_state_dict(str(path), use_ema=is_average), ("EMA" if is_average else "raw") if has_average else ""


def _damaged(path: Path, reason: str) -> ResoluteError:
    reason = reason.splitlines()[0].split(". ")[0][:100]
    return ResoluteError(
        f"model.weights: {path} is damaged or holds no weights ({reason}), expected a .safetensors or .pth file; "
        "name another"
    )


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
