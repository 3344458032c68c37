"""Extensions (EXTEND=1): new photos become a generation of their own, and no older byte changes."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.storage import output
from tests.conftest import make_photos
from tests.support.cli import prep as main
from tests.support.cli import verify
from tests.support.damage import flip
from tests.support.manifests import read_joined
from tests.support.refusals import refused
from tests.support.source_formats import pack_table
from tests.support.trees import tree

Prep = Callable[..., Any]
Scene = Callable[..., NDArray[np.uint8]]
SLOW = pytest.mark.slow
DESCRIPTIONS = ("manifest.json", "_info.json", "README.md")
MORE = ("--res", "32,48", "--shard-samples", 20)


@dataclass
class Growing:
    """The photos and the set at `out` that was made of them."""

    photos: Path
    out: Path
    prep: Prep
    scene: Scene
    written: list[str] = field(default_factory=list)

    def run(self, *more: object, out: object = None) -> Any:
        return self.prep("--src", self.photos, "--out", out or self.out, *MORE, *more)

    def extend(self, *more: object, out: object = None) -> str:
        """What a successful extension prints."""
        ran = self.run(*more, "--extend", out=out)
        assert ran.status == 0, ran.err
        return str(ran.out)

    def add(self, label: str, count: int) -> list[str]:
        """Write so many new photos of a class; returns their names."""
        (self.photos / label).mkdir(exist_ok=True)
        first = len(self.written) + 1
        new = [f"{label}/new{number:03d}.jpg" for number in range(first, first + count)]
        for number, name in enumerate(new, first):
            Image.fromarray(self.scene(5000 + number, 70 + number % 9, 64)).save(self.photos / name, quality=95)
        self.written += new
        return new

    def change(self, name: str) -> None:
        Image.fromarray(self.scene(9001, 61, 83)).save(self.photos / name, quality=97)

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.out, self.out.with_name(name)))


@pytest.fixture
def growing(photos: Path, prepared: Path, prep: Prep, scene: Scene) -> Growing:
    return Growing(photos, prepared, prep, scene)


def is_sound(root: Path) -> bool:
    return verify([root, "--workers", "1"]) == 0


def own_files(before: dict[str, str]) -> dict[str, str]:
    """The files of a set that no extension may change: all but the manifest and the files that describe the set."""
    return {name: digest for name, digest in before.items() if Path(name).name not in DESCRIPTIONS}


def names(root: Path, split: str) -> list[str]:
    """The names of the input images of a split's samples, in order; checks that each JPEG is that of its record."""
    opened = ShardSet.open(root)
    by_key: dict[int, str] = {}
    for number in range(opened.generations):
        mark = f".g{number:03d}" if number else ""
        if (root / "index" / f"{split}{mark}.npy").exists():
            keys = np.load(root / "index" / f"{split}{mark}.npy")["key"].tolist()
            lines = (root / "index" / f"{split}{mark}.sources.jsonl").read_text().splitlines()
            by_key |= dict(zip(keys, map(json.loads, lines), strict=True))
    own = opened.splits[split]
    for res in own.stored:
        for stored in own.stored[res]:
            tar = (root / str(res) / f"{own.shards[stored['shard']]}.tar").read_bytes()
            assert zlib.crc32(tar[stored["offset"] :][: stored["nbytes"]]) == stored["crc32"]
    return [by_key[key] for key in own.samples["key"].tolist()]


def test_an_extension_adds_the_new_photos_and_changes_no_older_byte(growing: Growing) -> None:
    out = growing.out
    before = tree(out)
    old = {split: names(out, split) for split in ("train", "val")}
    new = [*growing.add("bee", 12), *growing.add("aardvark", 10), *growing.add("cat", 5)]
    assert "generation 1 added train 25, val 2, 1 new class" in growing.extend()
    after = tree(out)
    assert own_files(before).items() <= after.items()
    opened = ShardSet.open(out)
    assert opened.classes == ("apple", "bee", "cat", "aardvark")
    for split in ("train", "val"):
        listed = names(out, split)
        assert listed[: len(old[split])] == old[split]
        labels = opened.splits[split].samples["label"].tolist()
        assert [opened.classes[label] for label in labels] == [name.split("/")[0] for name in listed]
        keys = opened.splits[split].samples["key"].tolist()
        assert keys == sorted(set(keys))
    added = names(out, "train")[54:] + names(out, "val")[6:]
    assert sorted(added) == sorted(new)
    assert sorted(added[:25]) != added[:25], "in a shuffled order"
    assert "Photos were added to this set 1 time" in (out / "report.html").read_text()
    assert "EXTEND" not in json.loads((out / "source.json").read_text())["make"], "the command that makes the set"
    assert is_sound(out)
    for more in ((), ("--extend",)):  # nothing else to do
        again = growing.run(*more)
        assert "already there" in again.out, again.err
        assert tree(out) == after
    assert "no new photos in the source" in again.out


@pytest.mark.slow
@SLOW
def test_a_set_extended_twice_with_any_workers_or_jobs_has_the_same_bytes(growing: Growing) -> None:
    jobs = growing.copy("jobs")
    for step in range(2):
        growing.add("bee", 25)
        growing.add(f"new{step}", 3)
        (growing.photos / "bee" / f"junk{step}.jpg").write_bytes(b"junk")
        growing.extend("--max-bad", 0.1, "--workers", 1 + step)
        place = ("--out", jobs)
        assert main(["plan", "--src", growing.photos, *place, *MORE, "--extend", "--max-bad", 0.1]) == 0
        assert main(["range", *place, "--range", "1:", "--workers", "1"]) == 0
        assert main(["finish", *place]) == 2
        assert main(["range", *place, "--range", "0:1", "--workers", "1"]) == 0
        assert main(["finish", *place]) == 0
        assert tree(jobs) == tree(growing.out)
    manifest = read_joined(growing.out)
    assert [added["shards"]["train"] for added in manifest["generations"]] == [3, 2, 2]
    rejected = [json.loads(line)["path"] for line in (growing.out / "rejects.g002.jsonl").read_text().splitlines()]
    assert rejected == ["bee/junk0.jpg", "bee/junk1.jpg"]


@SLOW
def test_the_share_of_validation_photos_is_kept_when_few_photos_come_at_a_time(growing: Growing) -> None:
    for _ in range(4):
        growing.add("bee", 5)
        growing.extend()
    labels = ShardSet.open(growing.out).splits["val"].samples["label"]
    assert np.bincount(labels).tolist() == [2, 4, 2]  # 10 % of 20, 40 and 20


class Killed(BaseException):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(-5,), pytest.param((0, 14, -1), marks=SLOW)])
def test_a_killed_extension_leaves_the_old_set_or_is_resumed(
    growing: Growing, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, contents = tree(growing.out), ShardSet.open(growing.out).contents()
    del before["README.md"]  # it may name the number of photos that there will be
    growing.add("bee", 22)
    whole = output.LocalStore.create
    written: list[str] = []

    def recorded(store: output.LocalStore, name: str) -> Any:
        written.append(name)
        return whole(store, name)

    with monkeypatch.context() as patch:
        patch.setattr(output.LocalStore, "create", recorded)
        growing.extend(out=growing.copy("fresh"))
    expected = tree(growing.out.with_name("fresh"))
    files = [name for name in written if name not in ("report.html", "source.json", "changes.jsonl")]

    for step in steps:
        out = growing.copy(f"killed{step}")

        def create(store: output.LocalStore, name: str, fatal: str = files[step]) -> Any:
            if name == fatal:
                raise Killed
            return whole(store, name)

        with monkeypatch.context() as patch:
            patch.setattr(output.LocalStore, "create", create)
            with pytest.raises(Killed):
                growing.run("--extend", out=out)
        state = tree(out)
        is_extended = state["manifest.json"] != before["manifest.json"]
        assert (own_files(before) if is_extended else before).items() <= state.items(), step
        opened = ShardSet.open(out, generation=0)
        assert opened.contents() == contents
        assert opened.generations == 1 + is_extended
        growing.extend(out=out)
        assert tree(out) == expected, step


@SLOW
def test_removed_and_changed_photos_are_listed_and_kept(growing: Growing) -> None:
    out = growing.out
    before, kept = tree(out), names(out, "train")
    gone, other = kept[3], kept[7]
    data = (growing.photos / gone).read_bytes()
    (growing.photos / gone).unlink()
    growing.change(other)
    said = growing.extend()
    assert "no new photos in the source" in said
    assert "1 gone and 1 changed, kept as they are; REBUILD=1 (--rebuild) makes the set anew" in said
    rows = [json.loads(line) for line in (out / "changes.jsonl").read_text().splitlines()]
    assert [(row["path"], row["change"]) for row in rows] == [(gone, "removed"), (other, "changed")]
    assert {**tree(out), "changes.jsonl": ""} == {**before, "changes.jsonl": ""}
    growing.add("bee", 4)
    assert "1 gone and 1 changed, kept as they are" in growing.extend()
    assert names(out, "train")[: len(kept)] == kept
    assert names(out, "train").count(other) == 1
    (added,) = read_joined(out)["generations"][1:]
    assert (added["removed"], added["changed"]) == (1, 1)
    assert is_sound(out)
    (growing.photos / gone).write_bytes(data)
    assert "no new photos in the source" in growing.extend(), "one that comes back is none"


@SLOW
def test_photos_that_could_not_be_read_are_added_once_they_can(photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--src", photos, "--out", tmp_path / "s", *MORE)
    good = (photos / "bee" / "03.jpg").read_bytes()
    (photos / "bee" / "03.jpg").write_bytes(good[: len(good) // 2])
    assert prep(*argv, "--max-bad", 0.1).status == 0
    assert "no new photos" in prep(*argv, "--extend").out
    (photos / "bee" / "03.jpg").write_bytes(good)
    assert prep(*argv, "--extend").status == 0
    listed = names(tmp_path / "s", "train") + names(tmp_path / "s", "val")
    assert listed.count("bee/03.jpg") == 1
    assert len(listed) == 60


@pytest.mark.slow
@SLOW
def test_resolutions_are_added_before_with_and_after_an_extension(growing: Growing) -> None:
    more = ("--res", "32,48,64")
    before, together, after = (growing.copy(name) for name in ("before", "together", "after"))
    assert growing.run(*more, out=before).status == 0
    growing.add("bee", 24)
    growing.add("dog", 4)
    of_the_set = growing.prep("--src", growing.photos, "--out", before, "--shard-samples", 20, "--extend")
    assert of_the_set.status == 0, "without RES, the sizes are those of the set"
    growing.extend(*more, out=together)
    growing.extend(out=after)
    assert growing.run(*more, out=after).status == 0
    assert tree(before) == tree(together) == tree(after)


@SLOW
def test_damage_in_any_generation_is_repaired(photos: Path, tmp_path: Path, prep: Prep, scene: Scene) -> None:
    growing = Growing(photos, tmp_path / "s", prep, scene)
    (photos / "bee" / "02.jpg").write_bytes(b"junk")
    assert growing.run("--max-bad", 0.1).status == 0
    growing.add("bee", 10)
    (photos / "bee" / "new_junk.jpg").write_bytes(b"junk")
    growing.extend("--max-bad", 0.1)
    before = tree(growing.out)
    files = [
        "48/train-000001.tar",
        "48/train-000003.tar",
        "index/train.g001.npy",
        "index/val.g001.sources.jsonl",
        "rejects.g001.jsonl",
    ]
    for damaged in (files, ["records/plan.json", "records/plan-001.json"]):
        for name in damaged:
            flip(growing.out / name)
        assert not is_sound(growing.out)
        refused(growing.run("--extend"), f"damaged, got {len(damaged)} damaged files", "repair it first")
        assert growing.run("--max-bad", 0.1).status == 0
        assert tree(growing.out) == before


@SLOW
def test_new_photos_join_the_split_of_their_source_or_list(growing: Growing, tmp_path: Path, scene: Scene) -> None:
    own, val_list = tmp_path / "val", tmp_path / "val.txt"
    (own / "bee").mkdir(parents=True)
    separate, by_list = tmp_path / "separate", tmp_path / "list"

    def run_list(*names: str, more: tuple[str, ...] = ("--extend",)) -> Any:
        val_list.write_text("\n".join(names))
        return growing.run("--val-list", val_list, *more, out=by_list)

    Image.fromarray(scene(1, 61, 83)).save(own / "bee" / "1.jpg")
    assert growing.run("--val", own, out=separate).status == 0
    assert run_list("bee/01.jpg", more=()).status == 0
    Image.fromarray(scene(2, 61, 83)).save(own / "bee" / "2.jpg")
    first, second = growing.add("dog", 2)
    growing.extend("--val", own, out=separate)
    assert names(separate, "val") == ["bee/1.jpg", "bee/2.jpg"]
    assert sorted(names(separate, "train")[-2:]) == [first, second]
    assert run_list("bee/01.jpg", second).status == 0
    assert names(by_list, "val") == ["bee/01.jpg", second]
    assert names(by_list, "train")[-1] == first
    moved = run_list("bee/01.jpg", second, first)
    refused(moved, f"{val_list}: names photos that are in train, got 1 such as {first}")


def pack_photos(path: Path, scene: Scene, first: int) -> None:
    """A zip of six photos of two classes, of other content and size for each `first` but with the same names."""
    with zipfile.ZipFile(path, "w") as archive:
        for i in range(6):
            out = io.BytesIO()
            Image.fromarray(scene(7000 + first + i, 60, 40 + first)).save(out, "JPEG")
            archive.writestr(f"{('cat', 'dog')[i % 2]}/{i // 2}.jpg", out.getvalue())


def test_an_archive_with_the_names_of_another_is_added_and_no_photo_twice(
    tmp_path: Path, prep: Prep, scene: Scene
) -> None:
    (tmp_path / "z").mkdir()
    command = ["--src", tmp_path / "z" / "*.zip", "--out", tmp_path / "set", "--res", 32]
    pack_photos(tmp_path / "z" / "b.zip", scene, 0)
    assert prep(*command).status == 0
    pack_photos(tmp_path / "z" / "c.zip", scene, 6)
    ran = prep(*command, "--extend")
    assert (ran.status, ran.out.count("gone")) == (0, 0), ran.err
    stored = names(tmp_path / "set", "train") + names(tmp_path / "set", "val")
    own = [f"{label}/{i}.jpg" for label in ("cat", "dog") for i in range(3)]
    assert sorted(stored) == sorted([*own, *(f"c.zip/{name}" for name in own)])
    before = tree(tmp_path / "set")
    pack_photos(tmp_path / "z" / "a.zip", scene, 12)
    refused(prep(*command, "--extend"), "the set holds cat/0.jpg of b.zip", "rename the further archive", "REBUILD=1")
    assert tree(tmp_path / "set") == before


def test_classes_are_added_to_the_end_of_their_file(growing: Growing, tmp_path: Path) -> None:
    classes, out = tmp_path / "classes.txt", tmp_path / "ordered"

    def run(text: str, *more: str) -> Any:
        classes.write_text(text)
        return growing.run("--classes", classes, *more, out=out)

    assert run("cat\nbee\napple\n").status == 0
    growing.add("aardvark", 3)
    lacks = run("cat\nbee\napple\n", "--extend")
    refused(lacks, "classes that", "aardvark", "add them to the end of the file")
    moved = run("cat\naardvark\nbee\napple\n", "--extend")
    refused(moved, f"{classes}: class 1 is another, got 'aardvark', expected 'bee'")
    assert run("cat\nbee\napple\naardvark\nzebra\n", "--extend").status == 0
    assert ShardSet.open(out).classes == ("cat", "bee", "apple", "aardvark", "zebra")
    assert ShardSet.open(out, generation=0).classes == ("cat", "bee", "apple")


@SLOW
def test_what_cannot_be_extended_is_refused_in_one_line_and_left_as_it_is(
    photos: Path, tmp_path: Path, prep: Prep, scene: Scene
) -> None:
    growing = Growing(photos, tmp_path / "s", prep, scene)
    refused(growing.run("--extend"), f"{growing.out}: no set to extend", "without EXTEND=1")
    assert not growing.out.exists()
    (photos / "bee" / "junk.jpg").write_bytes(b"junk")
    assert growing.run("--max-bad", 0).status == 2
    refused(growing.run("--extend"), "not finished, got a set without a valid manifest.json", "without EXTEND=1")
    assert growing.run("--max-bad", 0.1).status == 0
    before = tree(growing.out)
    growing.add("bee", 3)
    other_settings = growing.run("--quality", 80, "--extend")
    refused(other_settings, "EXTEND=1 cannot change settings", "quality: got 90, expected 80", "undo the change")
    refused(growing.run(), "the source has changed in train bee (21 -> 24 images)", "EXTEND=1")
    assert tree(growing.out) == before
    other = prep("--src", make_photos(tmp_path / "other"), "--out", growing.out, *MORE, "--extend")
    refused(other, f"a set of other photos, made from {photos}, got SRC={tmp_path / 'other'}", "lacks 60 of its photos")


def test_a_set_with_several_labels_per_photo_grows_beyond_a_byte_of_them(
    photos: Path, tmp_path: Path, prep: Prep
) -> None:
    files = sorted(str(path.relative_to(photos)) for path in photos.rglob("[0-9]*.*"))
    rows = [(name, f"t{i % 8} t{(3 * i + 1) % 8}") for i, name in enumerate(files)]
    argv = (
        "--src",
        photos,
        "--labels",
        tmp_path / "l.csv",
        "--target",
        "labels:space",
        "--out",
        tmp_path / "s",
        "--res",
        "32",
    )
    pack_table(tmp_path / "l.csv", rows[:40])
    assert prep(*argv).status == 0
    before = ShardSet.open(tmp_path / "s")
    old = {name: before.target.decode(split.samples[:]) for name, split in before.splits.items()}
    pack_table(tmp_path / "l.csv", [*rows[:40], *((name, "t1 zz") for name, _ in rows[40:])])
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    opened = ShardSet.open(tmp_path / "s")
    assert opened.classes == (*before.classes, "zz"), "a new class follows the old ones"
    for name, split in opened.splits.items():
        targets = opened.target.decode(split.samples[:])
        assert np.array_equal(targets[: len(old[name]), :8], old[name])
        assert not targets[: len(old[name]), 8].any()
        assert targets[len(old[name]) :, 8].all()
    assert ShardSet.open(tmp_path / "s", generation=0).contents() == before.contents()
    assert is_sound(tmp_path / "s")
