"""Every command of README, CONTRIBUTING and the site runs on tiny data, in order; exceptions have a reason."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from resolute.train.recipe.schema import Recipe
from tests import ROOT
from tests.docs.commands import BLOCK, LEFT_OUT, blocks, commands, pages, reason
from tests.docs.sandbox import OTHERS, STARTS, Sandbox

RUN = {str(page.relative_to(ROOT)): [command for command in commands(page) if not reason(page, command)]
       for page in pages()}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, words in RUN.items() if words])
def test_the_commands_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    sandbox = Sandbox(tmp_path / "sandbox", tmp_path / "outputs")
    for prepare in STARTS.get(page, OTHERS):
        prepare(sandbox)
    for command in RUN[page]:
        print(f"{page}: {command}", flush=True)
        sandbox.run(command)


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    sandbox = Sandbox(tmp_path / "sandbox", tmp_path / "outputs")
    with pytest.raises(AssertionError, match=r"gone/manifest\.json: not found"):
        sandbox.run("make verify SHARDS=gone")
    with pytest.raises(AssertionError, match="add it to LEFT_OUT"):
        sandbox.run("pip install x")


def test_every_reason_on_the_list_is_needed() -> None:
    shown = [(str(page.relative_to(ROOT)), command) for page in pages() for command in commands(page)]
    for where, pattern in LEFT_OUT:
        matching = [command for page, command in shown if where in ("", page) and re.fullmatch(pattern, command, re.S)]
        assert matching, pattern
    assert sum(map(len, RUN.values())) > 30


def test_every_block_names_its_language() -> None:
    """Commands in a block without a language would not be found."""
    for page in pages():
        languages = {name for name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        assert languages <= {"bash", "text", "toml", "python", "yaml"}, page


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, "toml")], ids=lambda page: page.name)
def test_the_recipes_of_a_page_are_valid(page: Path) -> None:
    for block in blocks(page, "toml"):
        table = tomllib.loads(block)
        table.setdefault("stages", [{"res": 128, "epochs": 8, "batch_size": 256},
                                    {"res": 160, "epochs": 8, "batch_size": 128}])  # fmt: skip
        assert Recipe.parse(table, name="page").stages, block


def test_the_loop_of_the_site_is_that_of_readme() -> None:
    """tests/pipeline/examples/test_examples.py runs README's."""
    assert blocks(ROOT / "docs" / "loop.md", "python") == blocks(ROOT / "README.md", "python")
