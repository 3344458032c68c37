"""Import rules between the packages, and a docstring for every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for part in ("pipeline", "prep", "train", "benchmarks") for p in (ROOT / part).rglob("*.py"))
CONTRACT = {
    "pipeline", "pipeline.ahead", "pipeline.augment", "pipeline.cache", "pipeline.cli",
    "pipeline.compiled", "pipeline.cpu_count", "pipeline.crops", "pipeline.draws", "pipeline.errors", "pipeline.fetch",
    "pipeline.files", "pipeline.foreign", "pipeline.foreign_index", "pipeline.foreign_look", "pipeline.index",
    "pipeline.memory", "pipeline.order", "pipeline.part", "pipeline.pictures", "pipeline.pixels",
    "pipeline.plan", "pipeline.policies", "pipeline.probe", "pipeline.reader", "pipeline.recipe",
    "pipeline.remote", "pipeline.resize", "pipeline.retry", "pipeline.rng", "pipeline.room",
    "pipeline.shards", "pipeline.source_record", "pipeline.store", "pipeline.tars",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Absolute names of all modules a file imports, anywhere in it."""
    package, found = path.relative_to(ROOT).parts[0], set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, [package if node.level else "", node.module or ""]))
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)} if node.level else {base}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_design(path: Path) -> None:
    package, name, found = path.relative_to(ROOT).parts[0], path.stem, imports(path)
    tops = {module.split(".")[0] for module in found}
    assert package == "benchmarks" or "benchmarks" not in tops
    if "nvidia" in tops:
        assert package == "benchmarks" or (package == "pipeline" and name in {"cpu", "graph", "loader", "ops"})
    if "triton" in tops:
        assert path.parent == ROOT / "pipeline" / "kernels"
    if package == "prep":
        ours = {module for module in found if module.startswith("pipeline")}
        ours -= {module for module in ours if module.startswith("pipeline.storage")}
        assert ours <= CONTRACT - {"pipeline.plan", "pipeline.recipe"}
        assert "torch" not in tops
        assert "train" not in tops
    if package == "pipeline":
        assert not tops & {"prep", "train"}
        assert "timm" not in tops or "examples" in path.parts
        if f"pipeline.{name}" in CONTRACT or "storage" in path.parts:
            assert not tops & {"torch", "nvidia"}
    if package == "train":
        assert not tops & {"tarfile", "webdataset"}
        # how image files are found and decoded is prep's to say, for predictions too
        assert all(module.startswith(("prep.adapters", "prep.decode")) for module in found if module.startswith("prep"))


def test_the_contract_loads_without_torch_and_dali() -> None:
    import subprocess
    import sys

    code = "import sys, pipeline, pipeline.plan, pipeline.recipe; print({'torch', 'nvidia.dali'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_have_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE)[0].split())
    described = set(re.findall(r"^([a-z]+):.*##", text, re.MULTILINE))
    assert targets == described
