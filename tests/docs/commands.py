"""The commands that README, CONTRIBUTING and `docs/` show in their bash blocks, and which of them the tests run."""

from __future__ import annotations

import re
from pathlib import Path

from tests import ROOT

__all__ = ["BLOCK", "blocks", "commands", "pages", "reason"]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

# (page or "", regular expression of a whole command): why it does not run on tiny data
LEFT_OUT = {
    ("docs/distributed_prep.md", ".*"): "needs a cluster; tests/prep/test_distributed_docs.py has stand-ins",
    ("docs/object_stores.md", ".*"): "needs a store; tests/train/test_object_store.py has one on loopback",
    ("docs/datasets.md", ".*"): "tests/docs/test_datasets.py runs them, each on a copy of its layout",
    ("docs/several_gpus.md", ".*"): "needs eight GPUs; CPU: tests/train/devices/test_distributed.py",
    ("", "make env|pip install .*"): "installs the environment that the tests run in; tests/test_package.py: the wheel",
    ("", "make (test|check)"): "would run this test again",
    ("", "make test-gpu"): "needs a GPU",
    ("", "resolute bench .*"): "takes 90 s by design; tests/benchmarks/test_programs.py runs it on tiny data",
    ("docs/gpu.md", r"python -m resolute.benchmarks\.gpu .*"): "needs a GPU; CPU: tests/benchmarks/test_gpu.py",
    ("", r"python -m resolute.benchmarks\.\w+"): "writes into the checkout; tests/docs/test_figures.py compares",
    ("", "resolute recipe .*"): "here my.toml is tiny; tests/train/recipe/test_starter.py",
    ("docs/planning.md", "resolute train shards --recipe mine.toml"): "trains for the whole budget of eleven minutes",
    ("docs/planning.md", "resolute plan shards --recipe base.toml --budget 11m"): "as the next, which writes a recipe",
    ("docs/training.md", "resolute plan .*"): "as in docs/planning.md",
}


def pages() -> list[Path]:
    """All pages with commands or snippets."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return [text for name, text in BLOCK.findall(page.read_text(encoding="utf-8")) if name == language]


def commands(page: Path) -> list[str]:
    """The commands of a page's bash blocks, in order, without comments."""
    if reason(page, ""):
        return ["\n".join(blocks(page, "bash"))]
    lines = [line.split("  #")[0].strip() for block in blocks(page, "bash") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def reason(page: Path, command: str) -> str | None:
    """Why a command of a page is left out; None if it runs."""
    name = str(page.relative_to(ROOT))
    for (where, pattern), why in LEFT_OUT.items():
        if where in ("", name) and re.fullmatch(pattern, command, re.DOTALL):
            return why
    return None
