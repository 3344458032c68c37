"""The dataset card and `croissant.json` of a set: when they are written, and when they are the user's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.pipeline.dataset.format import manifest_bytes
from resolute.prep.shard_set.cards import card, croissant, is_unedited
from tests.support.cli import verify
from tests.support.source_formats import pack_table
from tests.support.trees import tree

Prep = Callable[..., Any]


@pytest.fixture
def argv(photos: Path, tmp_path: Path) -> tuple[object, ...]:
    return "--src", photos, "--out", tmp_path / "s", "--shard-samples", 20


def make_older(root: Path) -> None:
    """Turn a set into one of a version of prep that wrote no descriptions."""
    manifest = json.loads((root / "manifest.json").read_bytes())
    del manifest["files"]["croissant.json"]
    (root / "manifest.json").write_bytes(manifest_bytes(manifest))
    (root / "README.md").unlink()
    (root / "croissant.json").unlink()


def test_both_describe_the_set_and_follow_an_added_resolution(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep
) -> None:
    assert prep(*argv, "--res", "32").status == 0
    assert prep(*argv, "--res", "32,48").status == 0
    assert prep("--src", argv[1], "--out", tmp_path / "once", *argv[4:], "--res", "32,48").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "once")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_bytes())
    readme = (tmp_path / "s" / "README.md").read_bytes()
    assert readme == card(manifest)
    assert is_unedited(readme)
    assert (tmp_path / "s" / "croissant.json").read_bytes() == croissant(manifest)
    described = json.loads(croissant(manifest))["distribution"]
    hashes = {entry["contentUrl"]: entry["sha256"] for entry in described if entry["@type"] == "cr:FileObject"}
    assert hashes == {name: info["sha256"] for name, info in manifest["files"].items() if name.endswith(".tar")}


def test_a_set_of_an_older_prep_stays_as_it_is_until_it_changes(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prep(*argv, "--res", "32").status == 0
    make_older(tmp_path / "s")
    before = tree(tmp_path / "s")
    assert "nothing to do" in prep(*argv, "--res", "32").out
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0
    assert "ignored" not in capfd.readouterr().err
    assert tree(tmp_path / "s") == before
    assert prep(*argv, "--res", "32,48").status == 0
    assert {"README.md", "croissant.json"} <= tree(tmp_path / "s").keys() - before.keys()


def test_an_edited_card_is_sound_stays_and_lacks_a_config_only_with_notice(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, capfd: pytest.CaptureFixture[str]
) -> None:
    assert prep(*argv, "--res", "32").status == 0
    readme = tmp_path / "s" / "README.md"
    edited = readme.read_bytes().replace(b"---\n", b"---\nlicense: cc0-1.0\n", 1)
    readme.write_bytes(edited)
    assert not is_unedited(edited)
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0
    assert "ignored" not in capfd.readouterr().err
    ran = prep(*argv, "--res", "32,48")
    assert (ran.status, readme.read_bytes()) == (0, edited)
    assert ran.err.count("README.md: kept, got one that was written or edited by someone else") == 1
    assert "a config for 48px," in ran.err
    readme.unlink()
    assert "nothing to do" in prep(*argv, "--res", "32,48").out
    assert b"config_name: 48px" in readme.read_bytes()
    assert "kept" not in prep(*argv, "--res", "32,48,64").err


def test_descriptions_of_the_user_are_never_replaced(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> None:
    assert prep(*argv, "--res", "32").status == 0
    make_older(tmp_path / "s")
    (tmp_path / "s" / "croissant.json").write_text("{}")
    (tmp_path / "s" / "README.md").write_text("mine: 32px, 48px")
    for words in (("--res", "32,48"), ("--res", "32,48", "--quality", "80", "--rebuild")):
        ran = prep(*argv, *words)
        assert ran.status == 0, ran.err
        assert "croissant.json: kept, got a file that prep has not written" in ran.err
        assert (tmp_path / "s" / "croissant.json").read_text() == "{}"
        assert (tmp_path / "s" / "README.md").read_text() == "mine: 32px, 48px"
        assert "croissant.json" not in json.loads((tmp_path / "s" / "manifest.json").read_bytes())["files"]
        assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_hugging_face_datasets_reads_labels_and_values(
    photos: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.j*g") if path.name[0] != ".")
    names += sorted(str(path.relative_to(photos)) for path in photos.rglob("*.JPEG"))
    cells = ["", "", "", "", "", "", "", "", "né b", "b"] if kind == "labels" else ["0.5", "-3"]
    rows = [(name, cells[i % len(cells)]) for i, name in enumerate(names)]
    table = pack_table(tmp_path / "t.csv", rows, ("id", "label"))
    ran = prep("--src", photos, "--labels", table, "--target", kind + ":space" * (kind == "labels"), "--res", "32",
               "--out", tmp_path / "s")  # fmt: skip
    assert ran.status == 0, ran.err
    loaded = datasets.load_dataset(str(tmp_path / "s"), split="train", cache_dir=str(tmp_path / "cache"))
    if kind == "labels":
        assert loaded.features["json"]["labels"].feature.names == ["b", "né"]
        assert {tuple(row["labels"]) for row in loaded["json"]} == {(), (0,), (0, 1)}
    else:
        assert {tuple(row["target"]) for row in loaded["json"]} == {(0.5,), (-3.0,)}
