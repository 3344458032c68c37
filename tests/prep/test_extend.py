"""Extensions (EXTEND=1): new photos become a generation of their own, and no older byte changes."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.pipeline.dataset.format import manifest_bytes
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.storage import output
from tests.conftest import make_photos
from tests.support.cli import prep as main
from tests.support.cli import verify
from tests.support.s3 import s3_server  # noqa: F401  # a fixture
from tests.support.source_formats import jpeg, make_tree, pack, pack_parquet, pack_samples, pack_table
from tests.support.trees import tree

Prep = Callable[..., Any]
Scene = Callable[..., NDArray[np.uint8]]


@pytest.fixture
def argv(photos: Path, tmp_path: Path) -> tuple[object, ...]:
    return ("--src", photos, "--out", tmp_path / "s", "--res", "32,48", "--shard-samples", 20)


@pytest.fixture
def add(photos: Path, scene: Scene) -> Callable[..., list[str]]:
    """add("bee", 3): write so many new photos of a class; returns their names."""
    written = 0

    def add(label: str, count: int) -> list[str]:
        nonlocal written
        (photos / label).mkdir(exist_ok=True)
        names = []
        for _ in range(count):
            written += 1
            names.append(f"{label}/new{written:03d}.jpg")
            Image.fromarray(scene(5000 + written, 70 + written % 9, 64)).save(photos / names[-1], quality=95)
        return names

    return add


def refused(ran: Any, *words: str) -> None:
    """Exactly one line, *where: got X, expected Y; do Z*, that contains `words`."""
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), (ran.out, ran.err)
    assert re.match(r"resolute (shards|jobs \w+): .+: .*got .+expected .+; .+", ran.err), ran.err
    for word in words:
        assert word in ran.err


DESCRIPTIONS = ("manifest.json", "_info.json", "README.md", "croissant.json")


def own_files(before: dict[str, str]) -> dict[str, str]:
    """The files of a set that no extension may change: all but the manifest and the files that describe the set."""
    return {name: digest for name, digest in before.items() if Path(name).name not in DESCRIPTIONS}


def names(root: Path, split: str, generation: int | None = None) -> list[str]:
    """The names of the input images of a split's samples, in order; checks that each JPEG is that of its record."""
    opened = ShardSet.open(root, generation=generation)
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
            jpeg = tar[stored["offset"] :][: stored["nbytes"]]
            assert zlib.crc32(jpeg) == stored["crc32"]
    return [by_key[key] for key in own.samples["key"].tolist()]


def test_an_extension_adds_the_new_photos_and_changes_no_older_byte(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    before = tree(tmp_path / "s")
    old = {split: names(tmp_path / "s", split) for split in ("train", "val")}
    new = [*add("bee", 12), *add("aardvark", 10), *add("cat", 5)]
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert "generation 1 added train 25, val 2, 1 new class" in ran.out
    after = tree(tmp_path / "s")
    assert own_files(before).items() <= after.items()
    opened = ShardSet.open(tmp_path / "s")
    assert opened.classes == ("apple", "bee", "cat", "aardvark")
    for split in ("train", "val"):
        listed = names(tmp_path / "s", split)
        assert listed[: len(old[split])] == old[split]
        added = listed[len(old[split]) :]
        assert sorted(added) != added or len(added) < 4  # in a shuffled order
        labels = opened.splits[split].samples["label"].tolist()
        assert [opened.classes[label] for label in labels] == [name.split("/")[0] for name in listed]
        keys = opened.splits[split].samples["key"].tolist()
        assert keys == sorted(set(keys))
    assert sorted(names(tmp_path / "s", "train")[54:] + names(tmp_path / "s", "val")[6:]) == sorted(new)
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0
    for more in ((), ("--extend",)):  # nothing else to do
        again = prep(*argv, *more)
        assert "already there" in again.out, again.err
        assert tree(tmp_path / "s") == after
    assert "no new photos in the source" in again.out


def test_an_older_generation_is_opened_as_it_was(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    first = ShardSet.open(tmp_path / "s")
    ids = np.arange(54)
    expected = {res: first.splits["train"].stored[res][ids] for res in (32, 48)}
    add("zebra", 30)
    assert prep(*argv, "--extend").status == 0
    first.check_unchanged()  # an extension is not a change for readers
    again, newest = ShardSet.open(tmp_path / "s", generation=0), ShardSet.open(tmp_path / "s")
    assert again.contents() == first.contents()
    assert (again.classes, again.generation, again.generations) == (first.classes, 0, 2)
    assert again.splits["train"].shards == first.splits["train"].shards
    for res, records in expected.items():
        assert np.array_equal(again.splits["train"].stored[res][ids], records)
        assert np.array_equal(newest.splits["train"].stored[res][ids], records)
    assert again.contents().items() - newest.contents().items() == {("classes", again.contents()["classes"])}
    assert newest.contents() != first.contents()
    newest.check_unchanged()
    with pytest.raises(Exception, match="got a set without generation 2"):
        ShardSet.open(tmp_path / "s", generation=2)


def test_a_set_extended_twice_with_any_workers_or_jobs_has_the_same_bytes(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    for out in ("s", "jobs"):
        assert prep(*argv[:2], "--out", tmp_path / out, *argv[4:]).status == 0
    for step in range(2):
        add("bee", 25)
        add(f"new{step}", 3)
        (photos / "bee" / f"junk{step}.jpg").write_bytes(b"junk")
        assert prep(*argv, "--extend", "--max-bad", 0.1, "--workers", 1 + step).status == 0
        words = [*argv[:2], "--out", tmp_path / "jobs", *argv[4:], "--extend", "--max-bad", 0.1]
        assert main(["plan", *map(str, words)]) == 0
        assert main(["range", "--out", str(tmp_path / "jobs"), "--range", "1:", "--workers", "1"]) == 0
        assert main(["finish", "--out", str(tmp_path / "jobs")]) == 2
        assert main(["range", "--out", str(tmp_path / "jobs"), "--range", "0:1", "--workers", "1"]) == 0
        assert main(["finish", "--out", str(tmp_path / "jobs")]) == 0
        assert tree(tmp_path / "jobs") == tree(tmp_path / "s")
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    assert [added["shards"]["train"] for added in manifest["generations"]] == [3, 2, 2]
    rejected = [json.loads(line)["path"] for line in (tmp_path / "s" / "rejects.g002.jsonl").read_text().splitlines()]
    assert rejected == ["bee/junk0.jpg", "bee/junk1.jpg"]


def test_a_new_photo_never_changes_its_split_and_the_share_of_validation_photos_is_kept(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    val = names(tmp_path / "s", "val")
    for _ in range(4):  # one photo at a time
        add("bee", 5)
        assert prep(*argv, "--extend").status == 0
    assert names(tmp_path / "s", "val")[: len(val)] == val
    labels = ShardSet.open(tmp_path / "s").splits["val"].samples["label"]
    assert np.bincount(labels).tolist() == [2, 4, 2]  # 10 % of 20, 40 and 20


class Killed(BaseException):
    pass


SLOW = pytest.mark.slow


@pytest.mark.parametrize("step", [
    -5, *(pytest.param(n, marks=SLOW) for n in (0, 1, 2, 3, 6, 14, -7, -6, -4, -3, -2, -1)),
])  # fmt: skip
def test_a_killed_extension_leaves_the_old_set_or_is_resumed(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]], step: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert prep(*argv).status == 0
    shutil.copytree(tmp_path / "s", tmp_path / "fresh")
    before, contents = tree(tmp_path / "s"), ShardSet.open(tmp_path / "s").contents()
    add("bee", 22)
    whole = output.LocalStore.create
    written: list[str] = []
    monkeypatch.setattr(output.LocalStore, "create", lambda store, name: written.append(name) or whole(store, name))
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:], "--extend").status == 0
    steps = [n for n in written if n not in ("report.html", "source.json", "changes.jsonl")]
    fatal = steps[step]

    def create(store: output.LocalStore, name: str) -> Any:
        if name == fatal:
            raise Killed
        return whole(store, name)

    monkeypatch.setattr(output.LocalStore, "create", create)
    with pytest.raises(Killed):
        prep(*argv, "--extend")
    monkeypatch.undo()
    state = tree(tmp_path / "s")
    del before["README.md"]  # it may name the number of photos that there will be
    is_extended = state["manifest.json"] != before["manifest.json"]
    assert (before if not is_extended else own_files(before)).items() <= state.items()
    opened = ShardSet.open(tmp_path / "s", generation=0)
    assert opened.contents() == contents
    assert opened.generations == 1 + is_extended
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_an_unfinished_extension_is_planned_again_if_more_photos_come(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    shutil.copytree(tmp_path / "s", tmp_path / "fresh")
    new = add("bee", 45)
    (photos / "bee" / "junk.jpg").write_bytes(b"junk")
    refused(prep(*argv, "--extend"), "too many unusable images", "rejects.g001.jsonl")
    for name in ["bee/junk.jpg", *new[5:]]:
        (photos / name).unlink()
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert prep(*argv[:2], "--out", tmp_path / "fresh", *argv[4:], "--extend").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def change(path: Path, scene: Scene, seed: int) -> None:
    Image.fromarray(scene(seed, 61, 83)).save(path, quality=97)


def manifest_of(root: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((root / "manifest.json").read_text())
    return loaded


def test_removed_and_changed_photos_are_listed_and_kept(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]], scene: Scene
) -> None:
    assert prep(*argv).status == 0
    before, kept = tree(tmp_path / "s"), names(tmp_path / "s", "train")
    gone, other = kept[3], kept[7]
    (photos / gone).unlink()
    change(photos / other, scene, 9001)
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert "no new photos in the source" in ran.out
    assert "1 gone and 1 changed, kept as they are; REBUILD=1 (--rebuild) makes the set anew" in ran.out
    rows = [json.loads(line) for line in (tmp_path / "s" / "changes.jsonl").read_text().splitlines()]
    assert [(row["path"], row["change"]) for row in rows] == [(gone, "removed"), (other, "changed")]
    assert {**tree(tmp_path / "s"), "changes.jsonl": ""} == {**before, "changes.jsonl": ""}
    add("bee", 4)
    ran = prep(*argv, "--extend")
    assert "1 gone and 1 changed, kept as they are" in ran.out
    assert names(tmp_path / "s", "train")[: len(kept)] == kept
    assert names(tmp_path / "s", "train").count(other) == 1
    (added,) = manifest_of(tmp_path / "s")["generations"][1:]
    assert (added["removed"], added["changed"]) == (1, 1)
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0


def test_a_photo_that_comes_back_is_no_new_photo(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    first = photos / names(tmp_path / "s", "train")[3]
    data = first.read_bytes()
    first.unlink()
    add("cat", 3)
    assert prep(*argv, "--extend").status == 0
    first.write_bytes(data)
    before = tree(tmp_path / "s")
    assert "no new photos in the source" in prep(*argv, "--extend").out
    del before["changes.jsonl"]  # it told of the photo
    assert tree(tmp_path / "s") == before


def test_photos_that_could_not_be_read_are_added_once_they_can(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, scene: Scene
) -> None:
    good = (photos / "bee" / "03.jpg").read_bytes()
    (photos / "bee" / "03.jpg").write_bytes(good[: len(good) // 2])
    assert prep(*argv, "--max-bad", 0.1).status == 0
    assert "no new photos" in prep(*argv, "--extend").out
    (photos / "bee" / "03.jpg").write_bytes(good)
    assert prep(*argv, "--extend").status == 0
    listed = names(tmp_path / "s", "train") + names(tmp_path / "s", "val")
    assert listed.count("bee/03.jpg") == 1
    assert len(listed) == 60
    # the old version, which is gone, is not needed
    ran = prep(*argv, "--res", "64", "--max-bad", 0.1)
    assert ran.status == 0, ran.err
    assert len(ShardSet.open(tmp_path / "s").splits["train"].stored[64]) == len(names(tmp_path / "s", "train"))


@SLOW
def test_resolutions_are_added_before_with_and_after_an_extension(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    for out in ("s", "after"):
        assert prep(*argv[:2], "--out", tmp_path / out, *argv[4:]).status == 0
    assert prep(*argv[:2], "--out", tmp_path / "before", "--res", "32,48,64", *argv[6:]).status == 0
    add("bee", 24)
    add("dog", 4)
    more = ("--res", "32,48,64", *argv[6:])
    assert prep(*argv[:2], "--out", tmp_path / "s", *more, "--extend").status == 0
    assert prep(*argv[:2], "--out", tmp_path / "before", *argv[6:], "--extend").status == 0  # RES is that of the set
    assert prep(*argv[:2], "--out", tmp_path / "after", *argv[4:], "--extend").status == 0
    assert prep(*argv[:2], "--out", tmp_path / "after", *more).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "before") == tree(tmp_path / "after")


@pytest.mark.parametrize(
    "damaged",
    ["48/train-000003.tar", *(pytest.param(name, marks=SLOW) for name in (
        "48/train-000001.tar", "32/val-000001.idx", "index/train.g001.npy", "index/train-48.npy",
        "index/val.g001.sources.jsonl", "records/plan.json", "records/plan-001.json", "rejects.g001.jsonl",
        "_info.json",
    ))],
)  # fmt: skip
def test_damage_in_any_generation_is_repaired(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]], damaged: str,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (photos / "bee" / "02.jpg").write_bytes(b"junk")
    assert prep(*argv, "--max-bad", 0.1).status == 0
    add("bee", 10)
    (photos / "bee" / "new_junk.jpg").write_bytes(b"junk")
    assert prep(*argv, "--extend", "--max-bad", 0.1).status == 0
    before = tree(tmp_path / "s")
    path = tmp_path / "s" / damaged
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 1
    refused(prep(*argv, "--extend"), "damaged, got 1 damaged files", "repair it first")
    ran = prep(*argv, "--max-bad", 0.1)
    assert ran.status == 0, ran.err
    assert tree(tmp_path / "s") == before
    capfd.readouterr()


@pytest.mark.parametrize("lost", ["photos-001.parquet", "photos.parquet"])
def test_a_lost_list_of_photos_is_named_and_nothing_else_is_changed(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]], lost: str
) -> None:
    assert prep(*argv).status == 0
    add("bee", 10)
    assert prep(*argv, "--extend").status == 0
    path = tmp_path / "s" / "records" / lost
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = tree(tmp_path / "s")
    refused(prep(*argv, "--extend"), f"{lost}: got none or a damaged one", "REBUILD=1")
    assert tree(tmp_path / "s") == before
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 1
    refused(prep(*argv), f"{lost}: got none or a damaged one", "REBUILD=1")


def test_a_lost_list_of_the_photos_of_a_set_that_was_never_extended_is_made_again(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep
) -> None:
    assert prep(*argv).status == 0
    before = tree(tmp_path / "s")
    (tmp_path / "s" / "records" / "photos.parquet").unlink()
    assert prep(*argv).status == 0
    assert tree(tmp_path / "s") == before


def test_a_shard_whose_photos_are_gone_is_not_repaired(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    first = names(tmp_path / "s", "train")[0]
    (photos / first).unlink()
    add("bee", 5)
    assert prep(*argv, "--extend").status == 0
    before = tree(tmp_path / "s")
    gone = f"got 1 of their photos gone from {photos} or changed, such as {first}"
    refused(prep(*argv, "--res", "64"), "1 shard cannot be made", gone, "put them back")
    assert tree(tmp_path / "s") == before


def write_source(how: str, folder: Path, files: dict[str, bytes], *, later: bool) -> tuple[object, ...]:
    """The arguments for a source with `files` of class folders; `later`: after more have been added."""
    rows = [(name, name.split("/")[0]) for name in files]
    if how in ("zip", "tar.gz"):
        return "--src", pack(folder, how, files, "top/")
    if how == "table":
        return "--src", folder / "photos", "--labels", pack_table(folder / "labels.csv", rows)
    if how == "list":
        return "--src", pack_table(folder / "photos" / "list.csv", rows, ("path", "label"))
    number, own = int(later), {name: files[name] for name in files if later == name.endswith("later.jpg")}
    if how == "webdataset":
        samples = [(name, data, {"cls": str(len(name.split("/")[0])).encode()}) for name, data in own.items()]
        pack_samples(folder / f"wds-{number}.tar", samples)
        return "--src", folder / "wds-*.tar"
    if how == "parquet":
        table = [(data, name, len(name.split("/")[0]) % 4) for name, data in own.items()]
        pack_parquet(folder / f"rows-{number}.parquet", table, ["a", "b", "c", "d"])
        return "--src", folder / "rows-*.parquet"
    return "--src", folder / "photos"


@pytest.mark.parametrize("how", ["table", "webdataset", *(
    pytest.param(how, marks=SLOW) for how in ("folder", "zip", "tar.gz", "list", "parquet")
)])  # fmt: skip
def test_a_source_of_any_format_is_extended(tmp_path: Path, prep: Prep, how: str) -> None:
    files = make_tree(tmp_path / "photos")
    argv = ("--out", tmp_path / "s", "--res", "8", "--shard-samples", 4)
    assert prep(*write_source(how, tmp_path, files, later=False), *argv).status == 0
    before, old = tree(tmp_path / "s"), names(tmp_path / "s", "train")
    more = {f"{label}/{n}later.jpg": jpeg(40 + n) for n, label in enumerate(["cat", "dog", "dog", "ant"])}
    for name, data in more.items():
        (tmp_path / "photos" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(data)
    source = write_source(how, tmp_path, {**files, **more}, later=True)
    ran = prep(*source, *argv, "--extend")
    assert ran.status == 0, ran.err
    assert own_files(before).items() <= tree(tmp_path / "s").items()
    assert names(tmp_path / "s", "train")[: len(old)] == old
    splits = ShardSet.open(tmp_path / "s").splits
    assert sum(map(len, splits.values())) == len(files) + 4
    assert "already there" in prep(*source, *argv).out
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0


def test_the_same_photos_packed_in_another_way_are_the_same_photos(tmp_path: Path, prep: Prep) -> None:
    files = make_tree(tmp_path / "photos")
    argv = ("--res", "8", "--shard-samples", 4)
    for out in ("s", "fresh"):
        assert prep("--src", tmp_path / "photos", *argv, "--out", tmp_path / out).status == 0
    files["dog/new.jpg"] = jpeg(77)
    (tmp_path / "photos" / "dog" / "new.jpg").write_bytes(jpeg(77))
    assert prep("--src", tmp_path / "photos", *argv, "--out", tmp_path / "fresh", "--extend").status == 0
    ran = prep("--src", pack(tmp_path, "zip", files, "top/"), *argv, "--out", tmp_path / "s", "--extend")
    assert ran.status == 0, ran.err
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_a_separate_validation_source_and_a_list_say_which_new_photos_join_which_split(
    photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]], scene: Scene
) -> None:
    (tmp_path / "val" / "bee").mkdir(parents=True)
    change(tmp_path / "val" / "bee" / "1.jpg", scene, 1)
    argv = ("--src", photos, "--res", "32", "--val", tmp_path / "val", "--out", tmp_path / "s")
    assert prep(*argv).status == 0
    change(tmp_path / "val" / "bee" / "2.jpg", scene, 2)
    new = add("cat", 2)
    assert prep(*argv, "--extend").status == 0
    assert names(tmp_path / "s", "val") == ["bee/1.jpg", "bee/2.jpg"]
    assert sorted(names(tmp_path / "s", "train")[-2:]) == new

    listed = ["bee/01.jpg", "cat/02.JPEG" if (photos / "cat" / "02.JPEG").exists() else "cat/03.jpg"]
    val_list = tmp_path / "val.txt"
    val_list.write_text("\n".join(listed))
    argv = ("--src", photos, "--res", "32", "--val-list", val_list, "--out", tmp_path / "l")
    assert prep(*argv).status == 0
    first, second = add("dog", 2)
    val_list.write_text("\n".join([*listed, second]))
    assert prep(*argv, "--extend").status == 0
    assert names(tmp_path / "l", "val")[-1] == second
    assert names(tmp_path / "l", "train")[-1] == first
    val_list.write_text("\n".join([*listed, second, first]))
    refused(prep(*argv, "--extend"), f"{val_list}: names photos that are in train, got 1 such as {first}")
    val_list.write_text("\n".join(listed))
    refused(prep(*argv, "--extend"), f"{val_list}: lacks photos that are in val, got 1 such as {second}")
    val_list.write_text("\n".join([*listed, second, "dog/unknown.jpg"]))
    refused(prep(*argv, "--extend"), "1 of 4 paths are not images", "dog/unknown.jpg")
    (photos / second).unlink()  # a photo that is gone may still be listed
    val_list.write_text("\n".join([*listed, second]))
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    assert "1 gone" in ran.out


def test_classes_are_added_to_the_end_of_their_file(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    classes = tmp_path / "classes.txt"
    classes.write_text("cat\nbee\napple\n")
    argv = (*argv, "--classes", classes)
    assert prep(*argv).status == 0
    add("aardvark", 3)
    refused(prep(*argv, "--extend"), "classes that", "aardvark", "add them to the end of the file")
    classes.write_text("cat\naardvark\nbee\napple\n")
    refused(prep(*argv, "--extend"), f"{classes}: class 1 is another, got 'aardvark', expected 'bee'")
    classes.write_text("cat\nbee\n")
    assert prep(*argv, "--extend").status == 2
    classes.write_text("cat\nbee\napple\naardvark\nzebra\n")
    assert prep(*argv, "--extend").status == 0
    assert ShardSet.open(tmp_path / "s").classes == ("cat", "bee", "apple", "aardvark", "zebra")
    assert ShardSet.open(tmp_path / "s", generation=0).classes == ("cat", "bee", "apple")


@pytest.mark.slow
def test_a_set_on_s3_is_extended_with_the_bytes_of_a_local_one(
    s3_server: str, argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep,  # noqa: F811
    add: Callable[..., list[str]],
) -> None:  # fmt: skip
    out = f"{s3_server}/set"
    for target in (tmp_path / "s", out):
        assert prep(*argv[:2], "--out", target, *argv[4:]).status == 0
    (photos / names(tmp_path / "s", "train")[5]).unlink()
    add("bee", 24)
    for target in (tmp_path / "s", out):
        ran = prep(*argv[:2], "--out", target, *argv[4:], "--extend")
        assert ran.status == 0, ran.err
    copy = tmp_path / "copy"
    fsspec.filesystem("s3").get(f"{out}/", str(copy), recursive=True)
    assert tree(copy) == tree(tmp_path / "s")
    opened = ShardSet.open(out)
    assert opened.contents() == ShardSet.open(tmp_path / "s").contents()
    opened.close()


def test_a_dry_run_says_what_an_extension_would_do_and_writes_nothing(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]], scene: Scene
) -> None:
    assert prep(*argv).status == 0
    (photos / names(tmp_path / "s", "train")[0]).unlink()
    before = tree(tmp_path / "s")
    ran = prep(*argv, "--extend", "--dry")
    assert ran.status == 0, ran.err
    assert f"{photos}: 0 new photos for {tmp_path / 's'} (train 0, val 0), 0 new classes" in ran.out
    add("bee", 12)
    add("dog", 2)
    change(photos / names(tmp_path / "s", "val")[0], scene, 5)
    ran = prep(*argv, "--extend", "--dry")
    assert f"{photos}: 14 new photos for {tmp_path / 's'} (train 12, val 2), 1 new class (dog)" in ran.out
    assert "1 gone and 1 changed, kept as they are" in ran.out
    assert "estimated from 12 random images" in ran.out
    assert tree(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("--quality", 80), "quality: got 90, expected 80"),
        pytest.param(("--seed", 3), "seed: got 0, expected 3", marks=SLOW),
        pytest.param(("--margin", 1.5), "margin: got 1.14", marks=SLOW),
        pytest.param(("--shard-samples", 10), "shard_samples: got 20, expected 10", marks=SLOW),
        pytest.param(("--val-frac", 0.2), '"frac": 0.1', marks=SLOW),
    ],
)
def test_an_extension_with_other_settings_is_refused(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]], change: Any, words: str
) -> None:
    assert prep(*argv).status == 0
    add("bee", 3)
    before = tree(tmp_path / "s")
    refused(prep(*argv, *change, "--extend"), "EXTEND=1 cannot change settings", words, "undo the change")
    assert tree(tmp_path / "s") == before


def test_what_cannot_be_extended_is_refused_in_one_line_and_left_as_it_is(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    refused(prep(*argv, "--extend", "--rebuild"), "EXTEND: got it with REBUILD")
    refused(prep(*argv, "--extend"), f"{tmp_path / 's'}: no set to extend", "without EXTEND=1")
    assert not (tmp_path / "s").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    refused(prep(*argv[:2], "--out", tmp_path / "mine", *argv[4:], "--extend"), "not empty and not a shard set")
    (photos / "bee" / "junk.jpg").write_bytes(b"junk")
    assert prep(*argv, "--max-bad", 0).status == 2  # unfinished
    refused(prep(*argv, "--extend"), "not finished, got a set without a valid manifest.json", "without EXTEND=1")
    assert prep(*argv, "--max-bad", 0.1).status == 0
    no_source = prep(*argv[2:], "--extend")
    assert (no_source.status, no_source.err.count("\n")) == (2, 1)
    assert f"was made from {photos}; run `resolute shards --src=" in no_source.err
    assert "--extend=1`" in no_source.err
    add("bee", 3)
    refused(prep(*argv), "the source has changed in train bee (21 -> 24 images)", "EXTEND=1")
    make_photos(tmp_path / "other")
    other = prep("--src", tmp_path / "other", *argv[2:], "--extend")
    refused(other, f"a set of other photos, made from {photos}, got SRC={tmp_path / 'other'}", "lacks 60 of its photos")
    manifest = manifest_of(tmp_path / "s")
    (tmp_path / "s" / "manifest.json").write_bytes(manifest_bytes({**manifest, "version": 4}))
    refused(prep(*argv, "--extend"), "a set of another version, got version 4", "REBUILD=1")


def test_the_recorded_command_is_that_of_the_extended_source(tmp_path: Path, prep: Prep) -> None:
    files = make_tree(tmp_path / "photos")
    argv = ("--src", tmp_path / "photos", "--out", tmp_path / "s", "--res", "8")
    rows = [(name, name.split("/")[0]) for name in files]
    assert prep(*argv, "--labels", pack_table(tmp_path / "a.csv", rows[:-1])).status == 0
    assert prep(*argv, "--labels", pack_table(tmp_path / "b.csv", rows), "--extend").status == 0
    record = json.loads((tmp_path / "s" / "source.json").read_text())["make"]
    assert record["LABELS"] == str(tmp_path / "b.csv")
    assert "EXTEND" not in record


def test_the_report_lists_the_generations(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    assert "Generations" not in (tmp_path / "s" / "report.html").read_text()
    add("dog", 30)
    ran = prep(*argv, "--extend")
    page = (tmp_path / "s" / "report.html").read_text()
    assert "<h2>Generations</h2>" in page
    assert "Photos were added to this set 1 time" in page
    assert ran.status == 0


def test_rebuild_leaves_nothing_of_the_generations(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, prep: Prep, add: Callable[..., list[str]]
) -> None:
    assert prep(*argv).status == 0
    (photos / names(tmp_path / "s", "train")[0]).unlink()
    add("bee", 5)
    assert prep(*argv, "--extend").status == 0
    moved = photos.rename(tmp_path / "moved")  # the same photos at another path
    (tmp_path / "s" / "records" / "plan-001.json").write_bytes(b"{")
    ran = prep("--src", moved, *argv[2:], "--rebuild")
    assert ran.status == 0, ran.err
    assert prep("--src", moved, "--out", tmp_path / "fresh", *argv[4:]).status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")
    assert ShardSet.open(tmp_path / "s").generations == 1


def test_jobs_refuse_a_set_that_is_no_longer_the_one_to_extend(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, add: Callable[..., list[str]], capfd: Any
) -> None:
    assert prep(*argv).status == 0
    add("bee", 4)
    assert main(["plan", *map(str, argv), "--extend"]) == 0
    assert main(["range", "--out", str(tmp_path / "s"), "--range", ":", "--workers", "1"]) == 0
    (tmp_path / "s" / "manifest.json").write_bytes(b"{}")
    capfd.readouterr()
    assert main(["finish", "--out", str(tmp_path / "s")]) == 2
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "not the set that the plan extends" in err or "damaged" in err, err


def test_a_set_with_several_labels_per_photo_grows_beyond_a_byte_of_them(
    photos: Path, tmp_path: Path, prep: Prep
) -> None:
    files = sorted(str(path.relative_to(photos)) for path in photos.rglob("[0-9]*.*"))
    rows = [(name, f"t{i % 8} t{(3 * i + 1) % 8}") for i, name in enumerate(files)]
    source = ("--src", photos, "--labels", tmp_path / "l.csv", "--target", "labels:space")
    argv = (*source, "--out", tmp_path / "s", "--res", "32")
    pack_table(tmp_path / "l.csv", rows[:40])
    assert prep(*argv).status == 0
    before = ShardSet.open(tmp_path / "s")
    old = {name: before.target.decode(split.samples[:]) for name, split in before.splits.items()}
    pack_table(tmp_path / "l.csv", [*rows[:40], *((name, "t1 zz") for name, _ in rows[40:])])
    ran = prep(*argv, "--extend")
    assert ran.status == 0, ran.err
    opened = ShardSet.open(tmp_path / "s")
    assert opened.classes == (*before.classes, "zz")
    for name, split in opened.splits.items():
        targets = opened.target.decode(split.samples[:])
        assert np.array_equal(targets[: len(old[name]), :8], old[name])
        assert not targets[: len(old[name]), 8].any()
        assert targets[len(old[name]) :, 8].all()
    assert ShardSet.open(tmp_path / "s", generation=0).contents() == before.contents()
    assert verify([str(tmp_path / "s"), "--workers", "1"]) == 0
    assert "already there" in prep(*argv).out
