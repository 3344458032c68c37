"""Import rules between packages, checked by path."""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import ROOT

PARTS = ("pipeline", "prep", "train", "benchmarks")
FILES = sorted(
    Path(folder, name)
    for folder, _, names in os.walk(ROOT / "resolute", followlinks=True)
    for name in names
    if name.endswith(".py")
)
NAMES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}
# parts of a package, each importing only those before it or beside it, in its own tuple
PIPELINE = [("storage",), ("dataset",), ("plan",), ("graph",), ("loader",), ("examples",)]
PREP = [
    (part,)
    for part in (
        "storage",
        "sources",
        "settings",
        "listing",
        "near_copies",
        "convert",
        "shard_set",
        "run",
        "unchanged",
        "extend",
        "grey_range",
        "finish",
        "plan",
        "build",
        "jobs",
        "estimate",
        "verify",
        "report",
        "commands",
    )
]
# recipe, then model, optimizer and loss, then the step, then the run with its log; all other parts after these
TRAIN = [
    ("recipe", "checkpoint", "options"),
    ("devices", "score"),
    ("model", "optim", "loss"),
    ("validation", "step_graphs"),
    ("learner",),
    ("synthetic", "out_of_memory"),
    ("planner", "warmup", "early_stopping", "logs"),
    ("loop",),
]
# how a run is planned and forecast, which are commands of their own
COMMANDS_OF_PLANNER = tuple(f"resolute.train.planner.{name}" for name in ("plan", "new_recipe"))
# modules of the pipeline that prep may import
SHARED = (
    "resolute.pipeline.jit",
    "resolute.pipeline.storage",
    "resolute.pipeline.dataset",
    "resolute.pipeline.plan.permutation",
)

# how image files are listed and decoded is prep's to say, for predictions too
LISTED_AND_DECODED = ("resolute.prep.sources", "resolute.prep.convert.decode", "resolute.prep.convert.pixels")


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Absolute names of the modules that a file imports, anywhere in it."""
    package = NAMES[path].split(".") if path.name == "__init__.py" else NAMES[path].split(".")[:-1]
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *filter(None, [node.module])])
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(NAMES.values())
            names |= submodules | ({base} if len(submodules) < len(node.names) else set())
    return frozenset(names)


def broken(allowed: Callable[[str, str], bool]) -> list[str]:
    """The imports that break a rule: `allowed(importing module, imported module)` is false."""
    return [
        f"{NAMES[path]} imports {name}"
        for path in FILES
        for name in sorted(imports(path))
        if not allowed(NAMES[path], name)
    ]


def level(module: str, package: str, order: Sequence[Sequence[str]]) -> int | None:
    """The place of a module's part in the order of a package's parts; None for other modules."""
    return next(
        (
            number
            for number, parts in enumerate(order)
            for part in parts
            if is_within(module, f"resolute.{package}.{part}")
        ),
        None,
    )


def upwards(package: str, order: Sequence[Sequence[str]]) -> list[str]:
    """The imports of a part of a package by a part before it."""

    def allowed(importing: str, imported: str) -> bool:
        high, low = level(importing, package, order), level(imported, package, order)
        return high is None or low is None or low <= high

    return broken(allowed)


def test_the_parts_of_pipeline_and_prep_import_downwards_only() -> None:
    assert upwards("pipeline", PIPELINE) == []
    assert upwards("prep", PREP) == []
    assert [
        name for name in NAMES.values() if name.startswith("resolute.prep.") and level(name, "prep", PREP) is None
    ] == []


def test_the_parts_of_training_import_downwards_only() -> None:
    def allowed(importing: str, imported: str) -> bool:
        # why also this: options lists the names of loggers
        is_free = is_within(importing, *COMMANDS_OF_PLANNER)
        is_free |= importing in ("resolute.train", "resolute.train.options")
        high = level(importing, "train", TRAIN)
        if is_free or high is None or imported == "resolute.train" or not is_within(imported, "resolute.train"):
            return True
        low = level(imported, "train", TRAIN)
        return low is not None and low <= high

    assert broken(allowed) == []


def test_a_part_imports_only_the_parts_that_it_may() -> None:
    parts = tuple(f"resolute.{part}" for part in PARTS)

    def allowed(importing: str, imported: str) -> bool:
        package, top = (*importing.split("."), "")[1], imported.removeprefix("resolute.").split(".")[0]
        if top == "benchmarks":
            return package == "benchmarks"
        if package == "pipeline":
            is_light = is_within(importing, *(f"resolute.pipeline.{part}" for part in ("storage", "dataset", "plan")))
            return top not in ("prep", "train", *(("torch", "nvidia", "triton") if is_light else ()))
        if package == "prep":
            return top not in ("torch", "train") and (top != "pipeline" or is_within(imported, *SHARED))
        if package == "train":
            is_allowed = top != "prep" or is_within(imported, *LISTED_AND_DECODED)
            return top not in ("tarfile", "webdataset") and is_allowed
        is_shared = not is_within(importing, "resolute.benchmarks", "resolute.cli") and importing != "resolute"
        return not (is_shared and is_within(imported, *parts))

    assert broken(allowed) == []


def test_dali_and_triton_are_imported_by_the_graph_only() -> None:
    assert (
        broken(
            lambda importing, imported: (
                imported.split(".")[0] not in ("nvidia", "triton")
                or is_within(importing, "resolute.benchmarks", "resolute.pipeline.graph")
            )
        )
        == []
    )


def test_no_file_imports_a_part_by_its_bare_name() -> None:
    bare = re.compile(rf"^\s*(from|import) ({'|'.join(PARTS)})\b", re.MULTILINE)
    paths = [*FILES, *(ROOT / "tests").rglob("*.py")]
    assert [str(path) for path in paths if bare.search(path.read_text(encoding="utf-8"))] == []


def test_no_import_cycles() -> None:
    """Imports inside functions and for types alone count too."""
    graph = {name: imports(path) & set(NAMES.values()) for path, name in NAMES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for imported in sorted(graph[module]):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())
