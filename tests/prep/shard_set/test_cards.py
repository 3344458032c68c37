"""The dataset card and `croissant.json` of a set: never replaced if they are the user's, and read by others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.pipeline.dataset.format import manifest_bytes
from tests.support.cli import verify
from tests.support.source_formats import pack_table

Prep = Callable[..., Any]
Argv = tuple[object, ...]


@pytest.mark.slow
def test_descriptions_of_the_user_are_never_replaced(argv: Argv, copied: Path, prep: Prep) -> None:
    manifest = json.loads((copied / "manifest.json").read_bytes())
    del manifest["files"]["croissant.json"]  # as in a set of a prep that wrote none
    (copied / "manifest.json").write_bytes(manifest_bytes(manifest))
    own = {"croissant.json": "{}", "README.md": "mine: 32px, 48px"}
    for name, text in own.items():
        (copied / name).write_text(text)
    for words in (("--res", "32,48,64"), ("--quality", "80", "--rebuild")):
        ran = prep(*argv, *words)
        assert ran.status == 0, ran.err
        assert "croissant.json: kept, got a file that prep has not written" in ran.err
        assert {name: (copied / name).read_text() for name in own} == own
        assert "croissant.json" not in json.loads((copied / "manifest.json").read_bytes())["files"]
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
