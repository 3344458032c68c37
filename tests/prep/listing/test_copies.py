"""The same file in SRC and VAL, and exact copies: found before the conversion, and kept out of one of the splits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.prep.listing.copies import find_copies, leaders
from tests.support.cli import prep as run_prep
from tests.support.refusals import refused
from tests.support.source_formats import jpeg, list_source, make_tree, pack

Prep = Callable[..., Any]


def test_a_file_in_src_and_val_is_refused_before_the_conversion(
    tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = {f"{i:02d}.jpg": jpeg(i) for i in range(12)}
    (tmp_path / "p").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "p")
    for name, data in photos.items():
        (tmp_path / "p" / name).write_bytes(data)
    lines = [f"{name} {i % 2}\n" for i, name in enumerate(photos)]
    (tmp_path / "train.txt").write_text("".join(f"p/{line}" for line in lines))
    (tmp_path / "val.txt").write_text("".join(f"link/{line}" for line in lines[2::3]))
    monkeypatch.chdir(tmp_path)
    for dry in ([], ["--dry"]):
        ran = prep("--src", "train.txt", "--val", "val.txt", "--out", tmp_path / "s", "--res", "32", *dry)
        refused(ran, "val.txt: holds photos of SRC, got 4 files that are also in train.txt, such as ", "05.jpg")
        assert not (tmp_path / "s" / "32").exists()


def splits_of(out: Path) -> dict[str, set[str]]:
    """{split: names of its photos}, of all generations."""
    found: dict[str, set[str]] = {"train": set(), "val": set()}
    for path in (out / "index").glob("*.sources.jsonl"):
        names = [json.loads(line) for line in path.read_text().splitlines()]
        assert found[path.name.split(".")[0]].isdisjoint(names)
        found[path.name.split(".")[0]].update(names)
    return found


def copy_half(photos: Path) -> dict[str, str]:
    """Copies half of the photos of each class under other names, some into another class; returns {copy: photo}."""
    copies = {}
    for path in sorted(photos.rglob("0?.*")):
        label = "cat" if path.stem == "07" else path.relative_to(photos).parts[0]
        copy = photos / label / f"copy of {'-'.join(path.relative_to(photos).parts)}"
        shutil.copy(path, copy)
        copies[str(copy.relative_to(photos))] = str(path.relative_to(photos))
    return copies


@pytest.fixture(scope="module")
def set_before(photo_template: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set of `photos` without copies; never changed."""
    out = tmp_path_factory.mktemp("before") / "set"
    assert run_prep(["--src", photo_template, "--out", out, "--res", "32", "--val-frac", 0.3, "--workers", 2]) == 0
    return out


@pytest.mark.slow
def test_copies_are_held_out_together_by_default(photos: Path, tmp_path: Path, prep: Prep, set_before: Path) -> None:
    words = ("--src", photos, "--res", "32", "--val-frac", 0.3)
    copies = copy_half(photos)
    assert len(copies) == 30
    dry = prep(*words, "--out", tmp_path / "s", "--dry")
    assert "duplicates: 30 exact copies of other images; kept in one split" in dry.out
    ran = prep(*words, "--out", tmp_path / "s")
    assert ran.status == 0, ran.err
    assert "both train and val" not in ran.out
    found, before = splits_of(tmp_path / "s"), splits_of(set_before)
    assert {name for name in found["val"] if name not in copies} == before["val"], "copies change nothing else"
    assert any(name in copies for name in found["val"])
    assert all((copy in found["val"]) == (photo in found["val"]) for copy, photo in copies.items())
    assert prep(*words, "--out", tmp_path / "k", "--duplicates", "keep").status == 0
    kept = splits_of(tmp_path / "k")
    assert any((copy in kept["val"]) != (photo in kept["val"]) for copy, photo in copies.items())


@pytest.mark.slow
def test_of_copies_one_is_stored_if_told_so(photos: Path, tmp_path: Path, prep: Prep, set_before: Path) -> None:
    copies = copy_half(photos)
    words = ("--src", photos, "--res", "32", "--val-frac", 0.3, "--out", tmp_path / "s", "--duplicates", "drop")
    assert "duplicates: 30 exact copies of other images; left out" in prep(*words, "--dry").out
    ran = prep(*words)
    assert ran.status == 0, ran.err
    assert "60 images" in ran.out
    found, before = splits_of(tmp_path / "s"), splits_of(set_before)
    assert {copies.get(name, name) for name in found["val"]} == before["val"]
    assert {copies.get(name, name) for name in found["train"]} == before["train"]
    assert "already there" in prep(*words).out
    assert "no new photos in the source" in prep(*words, "--extend").out
    assert "--duplicates=drop" in prep("--out", tmp_path / "s").err


@pytest.mark.slow
def test_copies_in_given_splits_end_prep_before_the_conversion_unless_allowed(
    photos: Path, tmp_path: Path, prep: Prep
) -> None:
    val, out = tmp_path / "val", tmp_path / "s"
    chosen = sorted(str(path.relative_to(photos)) for path in photos.rglob("1?.jpg"))[::2]
    copies = {name: f"{name.partition('/')[0]}/copy{i}.jpg" for i, name in enumerate(chosen[:4])}
    for name, copy in copies.items():
        shutil.copy(photos / name, photos / copy)
    for name in chosen:
        (val / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).rename(val / name)
    words = ("--src", photos, "--res", "32", "--val", val, "--out", out)
    for dry in ([], ["--dry"]):
        refused(
            prep(*words, *dry),
            str(val),
            f"got 4 with exact copies there, such as {', '.join(chosen[:3])}, …",
            "DUPLICATES=drop (--duplicates drop)",
            "DUPLICATES=keep",
        )
    assert not (out / "32").exists()
    refused(prep(*words, "--duplicates", "together"), "has no effect")
    assert prep(*words, "--duplicates", "drop").status == 0
    found = splits_of(out)
    assert found["val"] == set(chosen)
    assert len(found["train"]) == 60 - len(chosen)
    assert found["train"].isdisjoint(copies.values())
    assert prep(*words, "--duplicates", "keep", "--rebuild").status == 0
    assert splits_of(out)["train"] == found["train"] | set(copies.values())


def test_a_new_copy_of_a_photo_joins_its_split(photos: Path, tmp_path: Path, prep: Prep, set_before: Path) -> None:
    # why not its record: it names the folder of the template
    shutil.copytree(set_before, tmp_path / "s", ignore=shutil.ignore_patterns("source.json"))
    words = ("--src", photos, "--res", "32", "--val-frac", 0.3, "--out", tmp_path / "s")
    copies = copy_half(photos)
    assert prep(*words, "--extend").status == 0
    found = splits_of(tmp_path / "s")
    assert len(found["train"]) + len(found["val"]) == 90
    assert all((copy in found["val"]) == (photo in found["val"]) for copy, photo in copies.items())


@pytest.mark.parametrize("how", ["zip", "tar.gz"])
def test_copies_are_found_in_archives(tmp_path: Path, work: Path, how: str) -> None:
    files = make_tree(tmp_path / "p")
    files["dog/copy.jpg"] = files["cat/1.jpg"]
    files["dog/same size.jpg"] = files["dog/1.jpg"][:-1] + b"x"
    got = list_source(work, pack(tmp_path, how, dict(sorted(files.items())), "top/"))
    copies = find_copies({"train": got})
    assert copies is not None
    assert copies.extra == 1
    numbers = copies.groups["train"].tolist()
    assert [got.name(i) for i, number in enumerate(numbers) if number >= 0] == ["cat/1.jpg", "dog/copy.jpg"]
    assert leaders(copies.groups["train"]).tolist() == [
        got.find(["cat/1.jpg"])[0] if got.name(i) == "dog/copy.jpg" else i for i in range(len(got))
    ]


def test_photos_behind_urls_are_compared_only_if_told_so(tmp_path: Path, work: Path) -> None:
    store = fsspec.filesystem("memory")
    for name, data in (("a/1.jpg", jpeg(1)), ("a/2.jpg", jpeg(2)), ("b/3.jpg", jpeg(1))):
        store.pipe(f"/copies/{name}", data)
    got = list_source(work, "memory://copies")
    assert find_copies({"train": got}) is None
    found = find_copies({"train": got}, remote=True)
    assert found is not None
    assert found.groups["train"].tolist() == [0, -1, 0]
