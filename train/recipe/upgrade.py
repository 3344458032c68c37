"""Recipes of earlier versions: read from checkpoints, and translated by `resolute recipe --upgrade OLD.toml`.

There, a stage had `lr_scale`, `freeze_to` or `unfreeze_to` and a table of strengths, `regularization`, beside
`[regularization]` and `[freeze]` of the run; `[schedule]` and `[loss]` held the keys of all kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from resolute.errors import ResoluteError
from resolute.settings import groups_by_kind

from . import sections

__all__ = ["old_key", "upgraded"]

_LR, _PCT_START, _DIV = 0.5, 0.25, 10.0  # defaults of those versions
_KINDS = {
    "onecycle": "onecycle",
    "onecycle_stage": "onecycle",
    "cosine_stage": "cosine",
    "warmup_cosine": "cosine",
    "warmup_linear": "linear",
    "flat_cosine": "flat_cosine",
    "step": "step",
}
_OLD_KINDS = {*_KINDS, "cosine_restarts"} - {*_KINDS.values()}
_OLD_SCHEDULE_KEYS = ("div_factor", "final_div_factor", "period_epochs", "period_mult")
_CONVERTED = ("div_factor", "final_div_factor")  # to `first_lr`, `last_lr`
_OLD_STAGE_KEYS = ("lr_scale", "freeze_to", "unfreeze_to", "regularization")
_ORDERS = {"full": "shuffled", "block": "windowed"}  # looked up as text: a table or list is refused elsewhere
_SECTIONS = {
    "drop_rate": "model",
    "drop_path_rate": "model",
    "label_smoothing": "loss",
    "weight_decay": "optim",
    **dict.fromkeys(("magnitude", "mixup_alpha", "cutmix_alpha", "random_erasing_prob"), "augment"),
}


def old_key(table: Mapping[str, Any]) -> str | None:
    """A key of a recipe, as parsed from TOML, that only earlier versions have; None: there is none."""
    for name in ("regularization", "freeze"):
        if name in table:
            return f"[{name}]"
    schedule, data = (own if isinstance(own := table.get(name), dict) else {} for name in ("schedule", "data"))
    if str(schedule.get("kind")) in _OLD_KINDS:
        return f"schedule.kind = {schedule['kind']}"
    if str(data.get("order")) in _ORDERS:
        return f"data.order = {data['order']}"
    keys = [f"schedule.{name}" for name in _OLD_SCHEDULE_KEYS if name in schedule]
    stages = table.get("stages")
    for stage in stages if isinstance(stages, list) else ():
        if isinstance(stage, dict):
            keys += [f"stages.{name}" for name in _OLD_STAGE_KEYS if name in stage]
            keys += [f"stages.order = {stage['order']}"] if str(stage.get("order")) in _ORDERS else []
    return keys[0] if keys else None


def upgraded(table: Mapping[str, Any], *, exact: bool = False) -> dict[str, Any]:
    """The recipe with the keys of this version; one of this version as it is.

    - `table`: as parsed from TOML, or the values of a checkpoint, without those that are None
    - `exact`: raise `ResoluteError` for what this version cannot do: a schedule with restarts by epoch, and strengths
      that change within a ramp; and for keys that had no effect, which the earlier version refused. Else the former
      become the nearest that it can, which is enough for inference, and the latter are left out
    """
    if "mean" in (data := _table(table, "data")):  # of a checkpoint
        others = {key: value for key, value in data.items() if key not in ("mean", "std", "mean_std")}
        table = {**table, "data": {**others, "normalize": {key: data[key] for key in ("mean", "std")}}}
    if old_key(table) is None:
        return dict(table)
    table = {**table, "stages": [dict(stage) for stage in table["stages"]]}
    if "data" in table:
        table["data"] = dict(table["data"])
    for own in (table.get("data", {}), *table["stages"]):
        if str(own.get("order")) in _ORDERS:
            own["order"] = _ORDERS[own["order"]]
    mode = _table(table, "freeze").get("mode", "none")
    strengths = _table(table, "regularization")
    sizes = [res for stage in table["stages"] for res in _resolutions(stage)]
    for number, stage in enumerate(table["stages"]):
        own = {**strengths, **stage.pop("regularization", {})}
        frozen, unfrozen = stage.pop("freeze_to", None), stage.pop("unfreeze_to", None)
        for name, value in (("freeze", frozen), ("unfreeze", unfrozen)):
            if exact and value is not None and mode != name:
                raise ResoluteError(f"stages[{number}].{name}_to: without effect, freeze.mode is {mode}; remove it")
        layer = {"none": None, "freeze": frozen, "unfreeze": unfrozen}[mode]
        head = {"freeze": "all", "unfreeze": "none"}.get(mode)
        if layer not in (None, {"freeze": "none", "unfreeze": "all"}.get(mode)):
            stage["train_from"] = "head" if layer == head else layer
        if (scale := stage.pop("lr_scale", 1.0)) != 1.0:
            stage["optim"] = {"lr_scale": scale}
        _table(stage, "augment").pop("sized_at", None)
        for name, strength in own.items():
            value = _strength(strength, _resolutions(stage), sizes, place=f"stages[{number}]", exact=exact)
            section = _SECTIONS[name]
            stage[section] = {**stage.get(section, {}), name: round(value) if name == "magnitude" else value}
    for name in ("freeze", "regularization"):
        table.pop(name, None)
    for section, kinds in _GROUPS.items():
        if old := _table(table, section):
            new = _schedule(old, _table(table, "optim").get("lr", _LR), exact=exact) if section == "schedule" else old
            known = kinds[new.get("kind", next(iter(kinds)))].__pydantic_fields__
            unused = [key for key in old if key not in new or not (key in known or key in _CONVERTED)]
            if exact and unused:
                kind = old.get("kind", next(iter(kinds)))
                raise ResoluteError(f"{section}.{unused[0]}: without effect, {section}.kind is {kind}; remove it")
            table[section] = {key: value for key, value in new.items() if key in known}
    return table


_GROUPS = {name: groups_by_kind(getattr(sections, name.capitalize())) for name in ("loss", "schedule")}


def _table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    inner = table.get(name, {})
    if not isinstance(inner, dict):
        raise ResoluteError(f"{name}: got {inner!r}, expected a table; correct it")
    return inner


def _resolutions(stage: Mapping[str, Any]) -> list[int]:
    """The largest resolution of a stage, px, and the smallest if it has several."""
    return sorted({min(stage["res"]), max(stage["res"])}) if isinstance(stage["res"], list) else [stage["res"]]


def _strength(value: Any, own: list[int], sizes: list[int], *, place: str, exact: bool) -> float:
    """The strength of a stage with the resolutions `own`; a pair holds at the smallest and largest of `sizes`, px."""
    if not isinstance(value, list):
        return float(value)
    done = [(res - min(sizes)) / ((max(sizes) - min(sizes)) or 1) for res in own]
    if exact and len(done) > 1:
        raise ResoluteError(
            f"{place}: a ramp with strengths that change within it, expected stages of one strength each; write one "
            "stage for each resolution"
        )
    return float(value[0] * (1 - done[-1]) + value[1] * done[-1])


def _schedule(old: Mapping[str, Any], lr: float, *, exact: bool) -> dict[str, Any]:
    """The schedule with `first_lr`, `last_lr` and the kinds of this version; keys of other kinds may remain."""
    kind = old.get("kind", "onecycle")
    if exact and kind == "cosine_restarts":
        raise ResoluteError(
            "schedule.kind: got cosine_restarts, which this version does not have; write one stage for each period, "
            'with kind = "cosine" and restart_each_stage = true'
        )
    new = {**old, "kind": _KINDS.get(kind, "cosine")}
    if kind in ("onecycle_stage", "cosine_stage", "cosine_restarts"):
        new["restart_each_stage"] = True
    if kind in ("cosine_stage", "cosine_restarts", "flat_cosine"):
        new.pop("pct_start", None)
    if kind in ("cosine_stage", "step") or (kind == "flat_cosine" and "warmup_epochs" not in old):
        new.pop("div_factor", None)
    if kind == "step":
        new.pop("final_div_factor", None)
    if kind in ("warmup_cosine", "warmup_linear") and "warmup_epochs" not in old:
        new.setdefault("pct_start", _PCT_START)
    elif "warmup_epochs" in old:
        new.pop("pct_start", None)
    rises = kind.startswith("onecycle") or "pct_start" in new or "warmup_epochs" in new
    first = lr / old.get("div_factor", _DIV) if rises else lr
    if rises and "div_factor" in old:
        new["first_lr"] = first
    if "final_div_factor" in old:
        new["last_lr"] = first / old["final_div_factor"]
    return new
