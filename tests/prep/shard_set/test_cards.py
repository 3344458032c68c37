"""The dataset card of a set: never replaced if it is the user's, and read by others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import verify
from tests.support.source_formats import pack_table

Prep = Callable[..., Any]
Argv = tuple[object, ...]


@pytest.mark.slow
def test_the_card_of_the_user_is_never_replaced(argv: Argv, copied: Path, prep: Prep) -> None:
    (copied / "README.md").write_text("mine: 32px, 48px")
    for words in (("--res", "32,48,64"), ("--quality", "80", "--rebuild")):
        ran = prep(*argv, *words)
        assert ran.status == 0, ran.err
        assert (copied / "README.md").read_text() == "mine: 32px, 48px"
        assert verify([str(copied), "--workers", "1"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["labels:space", "values"])
def test_hugging_face_datasets_reads_labels_and_values(
    made: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    cells = [*[""] * 8, "né b", "b"] if target == "labels:space" else ["0.5", "-3"]
    names = [str(path.relative_to(made / "photos")) for path in sorted(made.glob("photos/*/*"))]
    rows = [(name, cells[i % len(cells)]) for i, name in enumerate(names)]
    table = pack_table(tmp_path / "t.csv", rows, ("id", "label"))
    ran = prep("--src", made / "photos", "--labels", table, "--target", target, "--res", "32", "--out", tmp_path / "s")
    assert ran.status == 0, ran.err
    loaded = datasets.load_dataset(str(tmp_path / "s"), split="train", cache_dir=str(tmp_path / "cache"))
    if target == "values":
        assert {tuple(row["target"]) for row in loaded["json"]} == {(0.5,), (-3.0,)}
    else:
        assert loaded.features["json"]["labels"].feature.names == ["b", "né"]
        assert {tuple(row["labels"]) for row in loaded["json"]} == {(), (0,), (0, 1)}
