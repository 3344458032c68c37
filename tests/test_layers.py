"""Who may import whom, as the design says; and every module is small enough to read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(p for part in ("pipeline", "prep", "train", "benchmarks") for p in (ROOT / part).rglob("*.py"))
CONTRACT = {
    "pipeline", "pipeline.ahead", "pipeline.augment", "pipeline.cache", "pipeline.command",
    "pipeline.compiled", "pipeline.crops", "pipeline.draws", "pipeline.errors", "pipeline.fetch",
    "pipeline.files", "pipeline.foreign", "pipeline.foreign_index", "pipeline.foreign_look", "pipeline.index",
    "pipeline.memory", "pipeline.order", "pipeline.part", "pipeline.pictures", "pipeline.pixels",
    "pipeline.plan", "pipeline.policies", "pipeline.probe", "pipeline.reader", "pipeline.recipe",
    "pipeline.remote", "pipeline.resize", "pipeline.retry", "pipeline.rng", "pipeline.room",
    "pipeline.shards", "pipeline.store", "pipeline.tars",
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
    if package == "prep":
        ours = {module for module in found if module.startswith("pipeline")}
        assert ours <= CONTRACT - {"pipeline.plan", "pipeline.recipe"}
        assert "torch" not in tops
        assert "train" not in tops
    if package == "pipeline":
        assert not tops & {"prep", "train"}
        assert "timm" not in tops or "examples" in path.parts
        if f"pipeline.{name}" in CONTRACT:
            assert not tops & {"torch", "nvidia"}
    if package == "train":
        assert not tops & {"tarfile", "webdataset", "prep"}


def test_the_contract_loads_without_torch_and_dali() -> None:
    import subprocess
    import sys

    code = "import sys, pipeline, pipeline.plan, pipeline.recipe; print({'torch', 'nvidia.dali'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_say_what_they_answer(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert ast.get_docstring(ast.parse(text))


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY:(.*)$", text, re.MULTILINE)[0].split())
    described = set(re.findall(r"^([a-z]+):.*##", text, re.MULTILINE))
    assert targets == described
