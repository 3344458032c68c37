"""Every image belongs to exactly one split, determined by seed and class alone."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from resolute.errors import ResoluteError
from resolute.pipeline.plan.permutation import permute, stream_key
from resolute.prep.listing import splits as members
from resolute.prep.listing.inputs import check_no_overlap
from resolute.prep.listing.photos import Photos
from resolute.prep.listing.splits import make_splits
from resolute.prep.settings import Settings
from resolute.prep.sources.image_ref import ImageRef
from tests.prep.listing.test_photos import ListedSource, listed

SIZES = {"ant": 1, "bee": 2, "cat": 3, "dog": 29, "elk": 100, "f\u00fcchs": 257}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(members, "_CHUNK", 37)  # why: so that classes span several chunks
    return members


def make(folder: Path, sizes: dict[str, int] = SIZES) -> Photos:
    """Names in which classes alternate, as they do in lists."""
    images = [ImageRef(f"{i:04d} {label}", label, 1) for label, size in sizes.items() for i in range(size)]
    return listed(folder, ListedSource(images))


def of_class(photos: Photos, label: int) -> list[int]:
    return np.flatnonzero(photos.labels == label).tolist()


@pytest.mark.parametrize(("frac", "seed"), [(0.001, 0), (0.1, 7), (0.999, 0)])
def test_validation_splits_equal_the_slow_oracle(tmp_path: Path, frac: float, seed: int) -> None:
    photos = make(tmp_path)
    expected = set()
    for label, name in enumerate(photos.classes):
        positions = of_class(photos, label)
        count = min(len(positions) - 1, max(1, round(len(positions) * frac)))
        key = stream_key(seed, 0x5641_4C, zlib.crc32(name.encode()))
        expected |= {positions[rank] for rank in permute(key, np.arange(count), len(positions)).tolist()}
    splits = make_splits(photos, val_frac=frac, seed=seed)
    assert set(splits["val"].positions.tolist()) == expected
    both = [*splits["train"].positions.tolist(), *splits["val"].positions.tolist()]
    assert sorted(both) == list(range(len(photos)))
    for split in splits.values():
        assert (np.diff(split.positions.astype(int)) > 0).all()


def test_a_new_class_does_not_change_the_splits_of_the_others(tmp_path: Path) -> None:
    def of(sizes: dict[str, int]) -> set[str]:
        photos = make(tmp_path, sizes)
        return {photos.name(int(i)) for i in make_splits(photos)["val"].positions}

    before, after = of(SIZES), of({"aardvark": 40, **SIZES})
    assert {name for name in after if "aardvark" not in name} == before


def test_a_validation_list_selects_the_validation_images(tmp_path: Path) -> None:
    images = [ImageRef(name, name[0], 1) for name in ("a/1", "a/2", "b/1", "b/2 ", "b/\udcff")]
    photos = listed(tmp_path, ListedSource(images))
    val_list = tmp_path / "val.txt"
    val_list.write_bytes(b"./a//2\r\n\nb/2 \nb/\xff\nb/\xff\n")
    got = make_splits(photos, val_list=val_list)
    assert [photos.name(int(i)) for i in got["val"].positions] == ["a/2", "b/2 ", "b/\udcff"]
    assert [photos.name(int(i)) for i in got["train"].positions] == ["a/1", "b/1"]
    val_list.write_text("a/2\nz/9\na/3\n")
    with pytest.raises(ResoluteError, match=r"2 of 3 paths are not images of src, got a/3, expected paths such as a/1"):
        make_splits(photos, val_list=val_list)
    with pytest.raises(ResoluteError, match=r"cannot be read, got No such file.*VAL_LIST"):
        make_splits(photos, val_list=tmp_path / "gone")
    for text, split in (("\n", "val"), ("\n".join(photos.name(i) for i in range(5)), "train")):
        val_list.write_text(text, errors="surrogateescape")
        with pytest.raises(ResoluteError, match=f"no image left for {split}"):
            make_splits(photos, val_list=val_list)


def test_empty_splits_and_folds_are_reported(tmp_path: Path) -> None:
    photos = make(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(ResoluteError, match="no image left for val, got 2 for train and 0 for val"):
        make_splits(photos)


def test_overlapping_folders_are_refused(tmp_path: Path) -> None:
    for name in ("photos/bee", "val", "out"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    photos = str(tmp_path / "photos")

    def check(**places: str) -> None:
        check_no_overlap(Settings(res=(32,), **places))  # type: ignore[arg-type]

    for out in (photos, f"{photos}/new/deep", f"{tmp_path}/link/x", f"{tmp_path}/out/../photos/x"):
        with pytest.raises(ResoluteError, match=r"is inside SRC.*OUT"):
            check(out=out, src=photos)
    with pytest.raises(ResoluteError, match="is inside VAL"):
        check(out=f"{tmp_path}/val/x", src=photos, val=f"{tmp_path}/val")
    for val in (photos, f"{photos}/bee", str(tmp_path)):
        with pytest.raises(ResoluteError, match="overlaps SRC"):
            check(out="/somewhere/else", src=photos, val=val)
    check(out=f"{tmp_path}/out", src=photos, val=f"{tmp_path}/val")
    check(out="s3://b/photos/x", src="s3://b/photos", val=f"{tmp_path}/val")
