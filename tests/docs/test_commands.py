"""Every command of README, CONTRIBUTING and the site runs once, on tiny data; exceptions have a reason."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from resolute.train.recipe.schema import Recipe
from tests import ROOT
from tests.docs.commands import BLOCK, blocks, commands, pages, reason
from tests.docs.sandbox import Sandbox

# pages whose commands run in one folder, in order, and what the folder holds before
GROUPS = {
    ("docs/start.md",): (Sandbox.add_demo, Sandbox.add_photos),
    ("README.md", "docs/sources.md"): (Sandbox.add_photos, Sandbox.add_tables),
    ("docs/adding_photos.md",): (Sandbox.add_growing_photos,),
}
NAMES = [str(page.relative_to(ROOT)) for page in pages()]
GROUPS[tuple(name for name in NAMES if all(name not in group for group in GROUPS))] = (
    Sandbox.add_demo,
    Sandbox.add_photos,
    Sandbox.add_set,
)


def to_run() -> dict[tuple[str, ...], list[tuple[str, str]]]:
    """{group: (page, command) of its pages}, without commands that an earlier page has too, and without `LEFT_OUT`."""
    rows: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    earlier: set[str] = set()
    for group in GROUPS:
        rows[group] = []
        for name in group:
            shown = commands(ROOT / name)
            rows[group] += [
                (name, command) for command in shown if command not in earlier and not reason(ROOT / name, command)
            ]
            earlier |= {*shown}
    return rows


RUN = to_run()


@pytest.mark.slow
@pytest.mark.parametrize("group", RUN, ids=lambda group: Path(group[0]).stem)
def test_the_commands_of_the_pages_run_in_order(group: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    sandbox = Sandbox(tmp_path / "sandbox", tmp_path / "outputs")
    for prepare in GROUPS[group]:
        prepare(sandbox)
    for name, command in RUN[group]:
        print(f"{name}: {command}", flush=True)
        sandbox.run(command)


def test_every_block_names_its_language() -> None:
    """Commands in a block without a language would not be found."""
    for page in pages():
        languages = {name for name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        assert languages <= {"bash", "text", "toml", "python", "yaml"}, page


def test_the_recipes_of_the_pages_are_valid() -> None:
    texts = [block for page in pages() for block in blocks(page, "toml")]
    assert len(texts) >= 8
    for text in texts:
        table = tomllib.loads(text)
        table.setdefault(
            "stages", [{"res": 128, "epochs": 8, "batch_size": 256}, {"res": 160, "epochs": 8, "batch_size": 128}]
        )
        assert Recipe.parse(table, name="page").stages, text


def test_the_loop_of_the_site_is_that_of_readme() -> None:
    """tests/pipeline/examples/test_examples.py runs README's."""
    assert blocks(ROOT / "docs" / "loop.md", "python") == blocks(ROOT / "README.md", "python")
