"""Builds the network of a recipe (a timm model), loads its first weights and makes their moving average."""

from __future__ import annotations

import dataclasses
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
from timm.utils import ModelEmaV3
from torch import nn

from pipeline.errors import ResoluteError, StorageError
from train.recipe.schema import Ema, Model

from . import checkpoint
from .norms import set_norms

__all__ = ["build_ema", "build_model", "compile_network", "ema_decay", "head_parameters", "set_tf32",
           "size_options"]  # fmt: skip


def build_model(
    model: Model, *, classes: int, channels_last: bool, device: torch.device, ranks: int = 1, for_training: bool = True,
    same_head: bool = False, resolutions: Collection[int] = (),
) -> nn.Module:  # fmt: skip
    """A timm model with `classes` outputs on `device`; names are timm's own, whatever the recipe makes of it.

    Not `trains`: its weights will be loaded by the caller. `same_head`: no weights but such of `classes`.
    `resolutions` (px): images that the network must take (see `size_options`); empty: whatever timm's default takes.
    Raises `ResoluteError` for what timm refuses, weights that can't be had, settings that this model has no use for,
    and resolutions that it cannot take.
    """
    pretrained = for_training and model.weights == "pretrained"
    sized = dataclasses.replace(model, options={**model.options, **size_options(model, resolutions)})
    network = _create(sized, classes=classes, pretrained=pretrained)
    if for_training or model.norm != "sync":  # why: that one differs in training alone
        network = set_norms(network, model, ranks=ranks, device=device)
    cfg: Any = getattr(network, "pretrained_cfg", {})
    average = ""
    if pretrained:
        found = cfg["num_classes"]
    elif for_training and model.weights:
        found, average = _load(network, model)
    if for_training and model.weights:
        if found != classes and same_head:
            raise ResoluteError(
                f"weights: {model.weights} of {model.name} are for {found or 'no'} classes, expected {classes}, the "
                "data's; use others"
            )
        head = f"of {found or 'no'} classes, so the head is new, for {classes}" if found != classes else "head included"
        made = f"; made with data.mean = {list(cfg['mean'])}, data.std = {list(cfg['std'])}" if pretrained else ""
        of = f"{average} weights of {model.weights}" if average else f"{model.weights} weights"
        print(f"{model.name}: starts from {of}, {head}{made}", flush=True)
    if model.checkpoint_blocks:
        try:
            network.set_grad_checkpointing(True)  # type: ignore[operator]
        except (AssertionError, AttributeError):
            raise ResoluteError(f"model.checkpoint_blocks: {model.name} can't, expected false; remove it") from None
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return network.to(device=device, memory_format=memory_format)  # type: ignore[call-overload]


def size_options(model: Model, resolutions: Collection[int]) -> dict[str, Any]:
    """What timm must be told so that a fixed-size model (ViT, Swin, MLP-Mixer) takes images of all `resolutions` (px).

    Nothing where the model takes them as it is; else `dynamic_img_size`, which interpolates position embeddings and
    makes attention masks for each size and leaves the weights' shapes alone; else, for one resolution, `img_size`.
    Raises `ResoluteError` if no option helps.
    """
    if not resolutions or not timm.is_model(model.name):
        return {}
    try:
        cfg: Any = timm.get_pretrained_cfg(model.name)
    except RuntimeError:  # an unknown tag; it is reported where the model is made
        return {}
    if not getattr(cfg, "fixed_input_size", False):
        return {}
    choices: list[dict[str, Any]] = [{}, {"dynamic_img_size": True}]
    choices += [{"img_size": res} for res in resolutions] if len(set(resolutions)) == 1 else []
    refused = ""
    for options in choices:
        if options and options.keys() <= model.options.keys():
            continue
        try:
            reason = _refusal(model, options, resolutions)
        except TypeError:
            if not options:  # why: what is wrong with `model.options` is reported where the model is made
                return {}
            continue  # this model has no such option
        if reason is None:
            return options
        refused = reason  # why the last: that of the option which takes the most
    sizes = ", ".join(str(res) for res in sorted(set(resolutions)))
    raise ResoluteError(
        f"model.name: {model.name} does not take images of all of the recipe's resolutions, {sizes} px ({refused}), "
        "expected a model that does; choose another model, other resolutions, or set model.options"
    )


def _refusal(model: Model, options: dict[str, Any], resolutions: Collection[int]) -> str | None:
    """Why the model, made with `options`, refuses images of one of `resolutions`; None if it takes all.

    Nothing is computed: tensors of the meta device have shapes only.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            with torch.device("meta"):
                network = timm.create_model(model.name, **{**model.options, **options}).eval()
        except (NotImplementedError, RuntimeError):  # why: some cannot be made without values; the warm-up will tell
            return None
        for res in sorted(set(resolutions)):
            try:
                network(torch.empty(2, 3, res, res, device="meta"))
            except NotImplementedError:  # as above
                continue
            except (AssertionError, RuntimeError, ValueError) as error:
                return f"{res} px: {(str(error) or type(error).__name__).splitlines()[0][:120]}"
    return None


def _create(model: Model, *, classes: int, pretrained: bool) -> nn.Module:
    ours: dict[str, Any] = {"drop_path_rate": model.drop_path_rate} if model.drop_path_rate else {}
    if model.antialias:
        ours["aa_layer"] = BlurPool2d
    for key in ours.keys() & model.options.keys():
        raise ResoluteError(f"model.options: {key} is given twice, expected a key of [model] alone; remove it there")
    try:
        network: nn.Module = timm.create_model(
            model.name, num_classes=classes, pretrained=pretrained, **model.options, **ours
        )
    except OSError as error:
        raise ResoluteError(
            f"model.weights: the hub of timm's weights can't be reached, nor are those of {model.name} in its cache "
            f"({str(error).splitlines()[0][:160]}); go online once, or name a file that you have"
        ) from None
    except (RuntimeError, TypeError, ValueError) as error:
        for key, name in (("drop_path_rate", "drop_path_rate"), ("aa_layer", "antialias")):
            if key in str(error) and key in ours:
                raise ResoluteError(f"model.{name}: timm's {model.name} can't, expected none; remove it") from None
        known = timm.list_models(f"*{model.name[:6]}*", pretrained=pretrained)[:5]
        raise ResoluteError(
            f"model: timm cannot build {model.name!r} with {model.options}{' pretrained' * pretrained}: {error}; "
            f"expected a timm model (near: {', '.join(known) or 'none'}); see timm.list_models()"
        ) from None
    if model.antialias and not any(isinstance(module, BlurPool2d) for module in network.modules()):
        raise ResoluteError(f"model.antialias: without effect, {model.name} has nothing strided to blur; remove it")
    return network


def _load(network: nn.Module, model: Model) -> tuple[int | None, str]:
    """Weights from a file, all but a head of another size.

    Returns its classes, None if the file has no head, and which of its weights were taken, "raw" or "EMA"; "" if the
    file holds but one kind.
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
    except Exception as error:  # why all: what a damaged file raises depends on where it is damaged
        reason = str(error).splitlines()[0].split(". ")[0][:100] if str(error) else type(error).__name__
        raise ResoluteError(
            f"model.weights: {path} is damaged or holds no weights ({reason}), expected a .safetensors or .pth file; "
            "name another"
        ) from None
    foreign = getattr(sys.modules[type(network).__module__], "checkpoint_filter_fn", None)
    state = foreign(state, network) if foreign else state
    own = network.state_dict()
    head = head_parameters(network)
    found = len(state[head[-1]]) if head[-1] in state else None
    wrong = [name for name in head if name not in state or state[name].shape != own[name].shape]
    if model.norm == "group":
        state = {name: v for name, v in state.items() if name in own or not name.endswith(_STATISTICS)}
    missing, unexpected = own.keys() - state.keys() - set(wrong), state.keys() - own.keys()
    other = [name for name in own.keys() & state.keys() - set(wrong) if state[name].shape != own[name].shape]
    if missing or unexpected or other:
        names = sorted(missing) + sorted(unexpected) + sorted(other)
        raise ResoluteError(
            f"model.weights: {path} is of another model than {model.name}: got {len(missing)} weights missing, "
            f"{len(unexpected)} unknown, {len(other)} of another shape ({', '.join(names[:3])} …), expected none; "
            "name another"
        )
    network.load_state_dict({name: v for name, v in state.items() if name not in wrong}, strict=False)
    return found, average


def _read_weights(path: Path, kind: Literal["best", "raw", "ema"]) -> tuple[dict[str, Any], str]:
    """The state dict at `path`, and which it is, "raw" or "EMA", if the file could hold both.

    Raises what the reader of the format raises, and `ResoluteError` for an average that is not there.
    """
    path.open("rb").close()  # why: timm and torch report the disk's errors as they report damage
    if path.suffix == ".safetensors":
        if kind == "ema":
            with safe_open(path, "pt") as file:
                exported = (file.metadata() or {}).get("weights")
            if exported != "ema":
                raise _no_average(path)
        return load_state_dict(str(path)), ""
    if checkpoint.peek(path, "format") == checkpoint.FORMAT:
        ours = checkpoint.load(path, expect={})
        is_average = ours["progress"]["best_weights"] == "ema" if kind == "best" else kind == "ema"
        if is_average and ours["ema"] is None:
            raise _no_average(path)
        return ours["ema" if is_average else "model"], "EMA" if is_average else "raw"
    content = torch.load(path, map_location="cpu", weights_only=True)
    has_average = any(content.get(key) is not None for key in ("state_dict_ema", "model_ema"))  # as timm writes them
    if kind == "ema" and not has_average:
        raise _no_average(path)
    is_average = has_average and kind != "raw"
    return load_state_dict(str(path), use_ema=is_average), ("EMA" if is_average else "raw") if has_average else ""


def _no_average(path: Path) -> ResoluteError:
    return ResoluteError(f"model.weights_kind: got ema, but {path} holds no averaged weights; remove the key")


def head_parameters(network: nn.Module) -> list[str]:
    """Names of the parameters of timm's classifier, or of its classifiers; none if `network` is not timm's."""
    heads: Any = network.get_classifier() if hasattr(network, "get_classifier") else ()  # type: ignore[operator]
    inside = {id(p) for head in (heads if isinstance(heads, tuple) else (heads,)) for p in head.parameters()}
    return [name for name, p in network.named_parameters() if id(p) in inside]


_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def build_ema(ema: Ema, network: nn.Module) -> ModelEmaV3 | None:
    """timm's moving average of weights and statistics, or None where the recipe has it off."""
    return ModelEmaV3(network, decay=ema.decay, use_warmup=ema.warmup) if ema.on else None


def ema_decay(ema: Ema, epoch_steps: float) -> float:
    """The weight of the old average at each step of an epoch of so many steps."""
    half_life = ema.half_life_steps or ema.half_life_epochs * epoch_steps
    return 0.5 ** (1 / half_life) if half_life else ema.decay


def set_tf32(tf32: Literal["convolutions", "all", "off"], device: torch.device) -> None:
    """For the whole process. Raises `ResoluteError` where nothing would come of it."""
    if tf32 == "convolutions":  # torch's own
        return
    if device.type != "cuda":
        raise ResoluteError(f"precision.tf32: without effect, got {tf32} on {device.type}; remove it")
    # why not by the newer per-backend settings: with these set, torch raises where it reads the older ones, and
    # inductor's autotuning does
    torch.set_float32_matmul_precision("highest" if tf32 == "off" else "high")
    torch.backends.cudnn.allow_tf32 = tf32 != "off"


def compile_network(network: nn.Module, device: torch.device, *, backend: Any = "inductor") -> None:
    """Let torch compile `network`, in place, so that names stay: one graph for each shape, mode and trainable set.

    Raises `ResoluteError` if there is no compiler.
    """
    import torch._dynamo  # why here: it takes its time

    variable, names = ("CXX", ("g++",)) if device.type == "cpu" else ("CC", ("gcc", "clang"))
    wanted = (os.environ[variable],) if variable in os.environ else names
    if not any(shutil.which(name.split()[0]) for name in wanted):
        raise ResoluteError(
            f"precision.compile: no compiler found (got {' and '.join(wanted)} missing), expected one for "
            f"torch.compile; install it, set {variable}, or remove the key"
        )
    # why: 8 by default, and what goes beyond runs uncompiled; a plan has no more than it has stages for
    torch._dynamo.config.recompile_limit = 256
    network.compile(dynamic=False, backend=backend)
