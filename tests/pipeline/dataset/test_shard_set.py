"""Opening a shard set: an incomplete or damaged set is refused before training starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from resolute.errors import ResoluteError, differences
from resolute.pipeline.dataset.manifest import manifest_bytes
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.storage.local import Folder
from tests.conftest import make_photos
from tests.support.cli import prep
from tests.support.manifests import read_joined


@pytest.fixture
def copy(shard_root: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shard_root, tmp_path / "copy"))


def test_open_gives_classes_splits_and_records(shard_set: ShardSet) -> None:
    assert shard_set.classes == ("class0", "class1", "class2")
    assert shard_set.resolutions == (32, 48, 64)
    train = shard_set.splits["train"]
    assert (len(train), len(shard_set.splits["val"]), len(train.shards)) == (75, 15, 3)
    for res in shard_set.resolutions:
        assert (np.minimum(train.stored[res]["width"], train.stored[res]["height"]) <= shard_set.short_side(res)).all()
    assert np.bincount(train.samples["label"]).tolist() == [25, 25, 25]


def test_an_unfinished_set_is_refused(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResoluteError, match=r"manifest\.json: not found.*`resolute shards --src="):
        ShardSet.open(tmp_path / "empty")
    (copy / "manifest.json").unlink()  # not taken for tars of others
    with pytest.raises(ResoluteError, match=r"manifest\.json: not found, expected a finished shard set; "):
        ShardSet.open(copy)


@pytest.mark.parametrize("name", ["", "/32/train-000000.tar", "/32/train-{000000..000002}.tar"])
def test_tars_of_others_are_told_from_a_shard_set(shard_root: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(shard_root / "32", tmp_path / "wds" / "32")
    with pytest.raises(ResoluteError, match=r"wds.*: got WebDataset tars, expected .*`resolute shards --src .*wds"):
        ShardSet.open(f"{tmp_path}/wds{name}")


def test_a_mistyped_folder_is_not_searched_for_tars(
    shard_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be any, such as /usr: tars deeper than one level, or after many other names, are not looked for."""
    shutil.copytree(shard_root / "32", tmp_path / "any" / "deep" / "32")
    not_found = r"manifest\.json: not found, expected a finished shard set; "
    with pytest.raises(ResoluteError, match=not_found):
        ShardSet.open(tmp_path / "any")
    with pytest.raises(ResoluteError, match="got WebDataset tars"):
        ShardSet.open(tmp_path / "any" / "deep")
    monkeypatch.setattr("resolute.pipeline.dataset.manifest._LOOKED_AT", 0)
    with pytest.raises(ResoluteError, match=not_found):
        ShardSet.open(tmp_path / "any" / "deep")


def test_a_missing_resolution_is_named(shard_root: Path) -> None:
    with pytest.raises(ResoluteError, match=r"no shards at 96 px, got 32,48,64.*--res=32,48,64,96"):
        ShardSet.open(shard_root, resolutions=(32, 96))


def test_other_versions_and_damaged_manifests_are_refused(copy: Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    (copy / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(ResoluteError, match="version 99, expected resolute-shards version 8"):
        ShardSet.open(copy)
    flipped = json.dumps({**manifest, "classes": manifest["classes"][::-1]}, indent=1) + "\n"
    for data in (flipped.encode(), manifest_bytes(manifest) + b"\n", manifest_bytes(manifest)[:-1]):
        (copy / "manifest.json").write_bytes(data)
        with pytest.raises(ResoluteError, match="damaged, got bytes that do not match its own hash"):
            ShardSet.open(copy)
    (copy / "manifest.json").write_text("{")
    with pytest.raises(ResoluteError, match="unreadable"):
        ShardSet.open(copy)


@pytest.mark.parametrize("damage", ["flipped", "of another state", "missing"])
def test_a_damaged_manifest_of_a_generation_is_named(copy: Path, damage: str) -> None:
    (path,) = copy.glob("manifest.g000.*.json")
    own = json.loads(path.read_text())
    data = {
        "flipped": path.read_bytes().replace(b'"samples"', b'"semples"'),
        "of another state": manifest_bytes({**own, "images": {}}),
        "missing": b"",
    }[damage]
    path.unlink()
    if data:
        path.write_bytes(data)
    with pytest.raises(ResoluteError, match=rf"{path.name}: damaged, .* run `resolute shards .*, which repairs it"):
        ShardSet.open(copy)


def test_a_set_opens_while_prep_replaces_its_manifests(copy: Path) -> None:
    """As it adds a resolution: the manifests of the generations get other names, and the old ones are deleted."""
    before = (copy / "manifest.json").read_bytes()
    (path,) = copy.glob("manifest.g000.*.json")
    renamed = path.rename(copy / "manifest.g000.32-48-64-96.json")
    after = json.loads(before.replace(path.name.encode(), renamed.name.encode()))
    (copy / "manifest.json").write_bytes(manifest_bytes(after))
    (copy / "older").write_bytes(before)

    class Replaced(Folder):
        asked = 0

        def local(self, name: str) -> Path:
            self.asked += name == "manifest.json"
            return super().local("older" if name == "manifest.json" and self.asked == 1 else name)

    files = Replaced(str(copy))
    assert len(ShardSet.open(copy, files=files).splits["train"]) == 75
    assert files.asked == 3  # of the older one, to see that it was replaced, and of the new one


def test_a_set_of_version_5_opens_unless_it_leaves_out_photos(copy: Path, shard_set: ShardSet) -> None:
    """Versions 5 to 7 have a single manifest."""
    manifest = read_joined(copy)
    (generation,) = manifest["generations"]
    old = {**manifest, "version": 5, "generations": [{**generation, "dropped": {}}]}
    (copy / "manifest.json").write_bytes(manifest_bytes(old))
    assert ShardSet.open(copy).contents() == shard_set.contents()
    old["generations"].append({**generation, "dropped": {"train": 2, "val": 1}})
    (copy / "manifest.json").write_bytes(manifest_bytes(old))
    with pytest.raises(ResoluteError, match=r"made with DROP=1 .*, got a set that leaves out 3 photos.*--rebuild"):
        ShardSet.open(copy)


def test_a_truncated_shard_is_refused_by_name_and_size(copy: Path) -> None:
    tar = copy / "48" / "train-000001.tar"
    size = tar.stat().st_size
    with tar.open("r+b") as file:
        file.truncate(size - 512)
    with pytest.raises(ResoluteError, match=rf"train-000001\.tar: cut short.*got {size - 512} bytes, expected {size}"):
        ShardSet.open(copy)
    assert ShardSet.open(copy, resolutions=(32,)).splits["train"].stored.keys() == {32}
    tar.unlink()
    with pytest.raises(ResoluteError, match=r"train-000001\.tar: not found, expected \d+ bytes"):
        ShardSet.open(copy)


def test_a_changed_index_is_refused(copy: Path) -> None:
    index = copy / "index" / "train-32.npy"
    data = index.read_bytes()
    index.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    with pytest.raises(ResoluteError, match=r"train-32\.npy: changed since prep, got SHA-256 .*run `resolute verify`"):
        ShardSet.open(copy)
    assert 48 in ShardSet.open(copy, resolutions=(48,)).splits["train"].stored
    index.write_bytes(data)
    assert 32 in ShardSet.open(copy).splits["train"].stored
    index.unlink()
    with pytest.raises(ResoluteError, match=r"train-32\.npy: not found, expected \d+ bytes"):
        ShardSet.open(copy)


@pytest.mark.slow
def test_a_sets_identity_survives_an_added_resolution_and_no_other_change(tmp_path: Path) -> None:
    photos = make_photos(tmp_path / "photos", each=8)

    def made(name: str, *words: str, res: str = "32,48") -> ShardSet:
        argv = ["--src", photos, "--out", tmp_path / name, "--res", res, "--val-frac", "0.2", "--workers", "1"]
        assert prep([str(word) for word in [*argv, *words]]) == 0
        return ShardSet.open(tmp_path / name)

    before = made("shards")
    at_32, at_48, both = before.fingerprint([32]), before.fingerprint([48]), before.fingerprint()
    assert len({at_32, at_48, both}) == 3
    assert both == before.fingerprint([48, 32])
    after = made("shards", res="32,48,64")
    assert after.hash != before.hash
    assert (after.fingerprint([32]), after.fingerprint([48]), after.fingerprint([32, 48])) == (at_32, at_48, both)
    assert ShardSet.open(tmp_path / "shards", resolutions=(32,)).fingerprint() == at_32
    for change in (["--seed", "1"], ["--quality", "60"]):
        changed = made(change[0].strip("-"), *change)
        assert changed.fingerprint([32]) != at_32
        assert differences(changed.contents([32]), before.contents([32]))
    with pytest.raises(ResoluteError, match=r"64 px is not open, got \[32, 48\]; name it in ShardSet\.open"):
        before.fingerprint([32, 64])
