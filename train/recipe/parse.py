"""Builds frozen dataclasses from TOML tables. Every key and value is checked; unknown keys get a suggestion."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal

from resolute.errors import ResoluteError, check

__all__ = ["RENAMED", "build"]

# Earlier names of keys; a recipe or checkpoint that has one is refused with the current name.
RENAMED = {
    "model.options": "model.kwargs",
    "model.antialias": "model.blurpool",
    "model.checkpoint_blocks": "model.grad_checkpointing",
    "distill.options": "distill.kwargs",
    "optim.smoothing": "loss.label_smoothing",
    "optim.centralise": "optim.gradient_centralization",
    "optim.accumulate": "optim.grad_accum_steps",
    "schedule.warmup_frac": "schedule.pct_start",
    "schedule.start_div": "schedule.div_factor",
    "schedule.final_div": "schedule.final_div_factor",
    "schedule.momentum_low": "schedule.base_momentum",
    "eval.crop_frac": "eval.crop_pct",
    "augment.crop_area": "augment.scale",
    "augment.crop_ratio": "augment.ratio",
    "augment.policy_ops": "augment.num_ops",
    "augment.policy_magnitude": "augment.magnitude",
    "augment.erase_prob": "augment.random_erasing_prob",
    "augment.erase_area": "augment.random_erasing_scale",
    "augment.erase_ratio": "augment.random_erasing_ratio",
    "augment.erase_fill": "augment.random_erasing_fill",
    "augment.mix_prob": "augment.mixup_prob",
    "augment.cutmix_prob": "augment.mixup_switch_prob",
    "augment.mix_per": "augment.mixup_mode",
}


def build(cls: type, table: object, where: str) -> Any:
    """An instance of the dataclass `cls` from `table`; `where` is the table's dotted name, "" for the top level.

    Raises `ResoluteError` for an unknown key (with its current name or the closest known one), a missing key or a
    wrong type.
    """
    if not isinstance(table, dict):
        raise ResoluteError(f"{where}: got {table!r}, expected a table; write [{where}]")
    hints = typing.get_type_hints(cls)
    prefix = f"{where}." if where else ""
    for key in table:
        full = f"{prefix}{key}".removeprefix("stages." if where == "stages.augment" else "")
        if full in RENAMED:
            raise ResoluteError(f"unknown key {full}, expected {RENAMED[full]}, its current name; rename it")
        if key not in hints:
            close = difflib.get_close_matches(key, hints, n=1)
            advice = f"did you mean {prefix}{close[0]}?" if close else f"known: {', '.join(hints)}"
            raise ResoluteError(f"unknown key {prefix}{key}; {advice}")
    for spec in dataclasses.fields(cls):
        needed = spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING
        if needed and spec.name not in table:
            raise ResoluteError(f"{prefix}{spec.name}: missing; add it to the recipe")
    return cls(**{key: _convert(hints[key], value, prefix + key) for key, value in table.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` from TOML converted to the type `hint`. Raises `ResoluteError` if the type does not match."""
    or_table = ""
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, where)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        # X | None: TOML has no null, so only X occurs; X | list | text | table: the one of the value's type
        arms = [arg for arg in typing.get_args(hint) if arg is not types.NoneType]
        kinds: dict[Any, type] = {tuple: list, Literal: str, dict: dict}
        hint = next((arm for arm in arms if isinstance(value, kinds.get(typing.get_origin(arm), ()))), arms[0])
        or_table = " or a table" if any(typing.get_origin(arm) is dict for arm in arms[1:]) else ""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        check(value in args, where, repr(value), "one of " + ", ".join(map(repr, args)) + or_table)
        return value
    if origin is tuple:
        many = len(args) == 2 and args[1] is Ellipsis
        good = isinstance(value, list) and (many or len(value) == len(args))
        check(good, where, repr(value), "a list" if many else f"a list of {len(args)} numbers")
        return tuple(_convert(args[0], item, where) for item in value)
    if origin is dict and isinstance(value, dict) and args[1] is not Any:
        return {name: _convert(args[1], item, f"{where}.{name}") for name, item in value.items()}
    if isinstance(value, int) and not isinstance(value, bool):  # why: Python reads TOML integers of any size
        check(-(2**63) <= value < 2**63, where, f"an integer of {len(str(abs(value)))} digits", "a 64-bit integer")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, float):
        check(math.isfinite(value), where, value, "a finite number")
    kind = origin if isinstance(origin, type) else hint
    good = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false", dict: "a table"}
    check(good, where, repr(value), names.get(kind, str(kind)))
    return value
