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
from resolute.prep.listing.photos import Photos
from resolute.prep.listing.splits import make_splits
from resolute.prep.sources.image_ref import ImageRef
from tests.prep.listing.test_photos import ListedSource, listed

SIZES = {"ant": 1, "bee": 2, "cat": 3, "dog": 29, "elk": 100, "f\u00fcchs": 257}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(members, "_CHUNK", 37)  # why: so that classes span several chunks
    return members


def make(folder: Path) -> Photos:
    """Names in which classes alternate, as they do in lists."""
    images = [ImageRef(f"{i:04d} {label}", label, 1) for label, size in SIZES.items() for i in range(size)]
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


def test_a_validation_list_selects_the_validation_images(tmp_path: Path) -> None:
    images = [ImageRef(name, name[0], 1) for name in ("a/1", "a/2", "b/1", "b/2 ", "b/\udcff")]
    photos = listed(tmp_path, ListedSource(images))
    val_list = tmp_path / "val.txt"
    val_list.write_bytes(b"./a//2\r\n\nb/2 \nb/\xff\nb/\xff\n")
    got = make_splits(photos, val_list=val_list)
    assert [photos.name(int(i)) for i in got["val"].positions] == ["a/2", "b/2 ", "b/\udcff"]
    assert [photos.name(int(i)) for i in got["train"].positions] == ["a/1", "b/1"]
    val_list.write_text("a/2\nz/9\na/3\n")
    with pytest.raises(
        ResoluteError, match=r"2 of 3 paths are not images of src, got 'z/9', expected paths such as 'a/1'"
    ):
        make_splits(photos, val_list=val_list)
    for text, split in (("\n", "val"), ("\n".join(photos.name(i) for i in range(5)), "train")):
        val_list.write_text(text, errors="surrogateescape")
        with pytest.raises(ResoluteError, match=f"no image left for {split}"):
            make_splits(photos, val_list=val_list)
