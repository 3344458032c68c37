"""Third-party WebDataset tars: every usable sample is read with its exact pixels, everything else is refused."""

from __future__ import annotations

import gzip
import io
import os
import random
import re
import shutil
import tarfile
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from resolute import Augment, Loader, Plan, ResoluteError, Stage
from resolute.errors import StorageError
from resolute.pipeline.__main__ import main
from resolute.pipeline.dataset.open_dataset import open_dataset
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.loader.reader import Reader
from tests.support import reference
from tests.support.tar_headers import DAMAGED_HEADERS, header
from tests.support.third_party_tars import BAD, encoded, expected_samples, opened, rejects, sample, write

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def test_every_usable_sample_has_its_bytes_size_and_label(tars: Path) -> None:
    shards, lines = opened(tars)
    assert {name: len(split) for name, split in shards.splits.items()} == {"train": 28, "val": 10}
    for split in shards.splits.values():
        stored, want = split.stored[224][:], expected_samples(tars, split.name)
        np.testing.assert_array_equal(split.samples["label"], [label for _, label in want])
        for row, (data, _) in zip(stored, want, strict=True):
            tar = shards.path(7, split.shards[row["shard"]]).read_bytes()
            assert tar[row["offset"] :][: row["nbytes"]] == data
            assert (row["width"], row["height"]) == ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size
    assert len(shards.classes) == 908
    reasons = {reject["key"]: reject["reason"] for reject in rejects(tars)}
    assert set(reasons) == BAD
    assert reasons["cut"].startswith("damaged JPEG")
    assert reasons["unlabelled"] == "no label: jpg"
    assert reasons["named"] == "no label in .cls: got 'dog', expected a number below 10000000"
    assert reasons["gif"] == "not a JPEG, PNG, WebP or BMP"
    assert reasons["two"] == "several images: jpg, png"
    assert any("left out 8 of 46: " in line and "rejects.jsonl" in line for line in lines)


def test_pixels_of_every_image_format_equal_pillows_at_any_resolution(tars: Path) -> None:
    shards, _ = opened(tars)
    plain = Augment(scale=(0.3, 1.0))
    stages = [Stage(res=res, epochs=1, batch_size=9, augment=plain, eval_res=ev) for res, ev in ((32, None), (57, 40))]
    seen = set()
    with Loader(Plan(shards, stages, eval_batch_size=10)) as loader:
        for batch in loader:
            spec, want = batch.spec, expected_samples(tars, batch.spec.split)
            for i, number in enumerate(spec.ids.tolist()):
                image = ImageOps.exif_transpose(Image.open(io.BytesIO(want[number][0]))).convert("RGB")
                pixels = (batch.images[i].permute(1, 2, 0).numpy().astype(np.float64) * STD + MEAN) * 255
                error = np.abs(pixels - reference.crop_and_flip(image, spec, i))
                assert error.mean() < 1.5, (number, error.mean())
                assert batch.labels[i] == want[number][1]
                seen.add((spec.split, spec.res, number))
    assert len(seen) == 28 * 2 + 10 * 2


def test_a_damaged_image_is_reported_with_its_tar_when_it_is_read(tars: Path) -> None:
    shards, _ = opened(tars)
    row = shards.splits["train"].stored[32][3]
    tar = tars / "train-000.tar"
    before = tar.stat()
    with tar.open("r+b") as file:
        file.seek(int(row["offset"]) + 30)
        file.write(b"????")
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))  # bit rot does not change the modification time
    with closing(Reader(shards)) as reader:
        errors = reader.submit("train", 32, np.array([2, 3])).result().errors
    assert list(errors) == [1]
    assert re.search(r"train-000\.tar: sample 000000003 .* is damaged.*fetch the tar again", str(errors[1]))


def test_a_replaced_or_missing_tar_is_unavailable_and_not_damaged(tars: Path) -> None:
    shards, _ = opened(tars)
    tar = tars / "train-000.tar"
    data = tar.read_bytes()
    with closing(Reader(shards)) as reader:
        tar.write_bytes(bytes(len(data)))
        with pytest.raises(StorageError, match=r"train-000\.tar: the tar was replaced while it was read"):
            reader.submit("train", 32, np.array([2, 3])).result()
        tar.unlink()
        reader._shards.files.release()
        with pytest.raises(StorageError, match=r"train-000\.tar: the tar is gone, expected it as it was opened"):
            reader.submit("train", 32, np.array([2, 3])).result()


def test_a_validation_split_by_keys_does_not_depend_on_the_tars_of_the_samples(tmp_path: Path) -> None:
    every = [sample(i) for i in range(60)]
    write(tmp_path / "a" / "%03d.tar", every, size=7)
    random.Random(0).shuffle(every)
    write(tmp_path / "b" / "%03d.tar", every, size=60)
    a, b = (opened(tmp_path / name, val=0.25)[0] for name in "ab")
    assert 5 <= len(a.splits["val"]) <= 25
    for split in ("train", "val"):
        first, second = a.splits[split].stored[32]["crc32"], b.splits[split].stored[32]["crc32"]
        assert sorted(first) == sorted(second)
    assert len(a.splits["train"]) + len(a.splits["val"]) == 60


def test_patterns_select_tars_and_members(tmp_path: Path) -> None:
    others = {"seg.png": b"not looked at", "n.json": b'{"id": 4}'}
    write(tmp_path / "x" / "%03d.tar", [{**sample(i), **others} for i in range(9)], size=3)
    shards, _ = opened(tmp_path / "x", val="00{1,2}.tar", image=".JPG")
    assert (len(shards.splits["train"]), len(shards.splits["val"])) == (3, 6)
    shards, _ = opened(str(tmp_path / "x" / "00[01].tar"), label="n.json:id", classes=[f"c{i}" for i in range(5)])
    assert (len(shards.splits["train"]), len(shards.splits["val"])) == (6, 0)
    assert set(shards.splits["train"].samples["label"]) == {4}
    assert shards.classes[4] == "c4"
    with pytest.raises(ResoluteError, match="got 4 class names, expected 5: the largest label is 4"):
        opened(str(tmp_path / "x" / "00[01].tar"), label="n.json:id", classes=["a", "b", "c", "d"])


@pytest.mark.parametrize(
    ("change", "source", "options", "words"),
    [
        ("gzip", "", {}, r"z\.tar\.gz: got a gzip file, expected an uncompressed tar.*unpack it"),
        ("cut", "", {}, r"train-000\.tar: cut short or damaged, got 4500 bytes, expected \d+ or more"),
        ("header", "", {}, r"train-000\.tar: cut short or damaged, got 'bad checksum' at byte 0"),
        ("empty", "", {}, r"train-000\.tar: cut short or damaged, got 'empty file' at byte 0, expected a complete tar"),
        ("", "", {"val": "val-{0"}, "unbalanced braces"),
        ("", "", {"threads": 0}, "threads: out of range, got 0"),
        ("", "", {"val": "test*"}, "val 'test.' matches no tar, the first is train-000.tar"),
        ("", "", {"val": "*"}, "val '.' selects 38 of 38 samples"),
        ("", "", {"val": 1.5}, r"got val 1\.5, expected a fraction above 0"),
        ("", "", {"label": "label"}, r"no usable sample in 4 tars, got 4\d no label, .*label= *"),
        ("", "nothing-*.tar", {}, "no tars found"),
        ("", "train-{000..009}.tar", {}, r"train-003\.tar: not found, expected a tar"),
    ],
)
def test_unusable_tars_and_options_are_refused(
    tars: Path, change: str, source: str, options: dict[str, Any], words: str
) -> None:
    tar = tars / "train-000.tar"
    if change == "gzip":
        (tars / "z.tar.gz").write_bytes(gzip.compress(tar.read_bytes()))
    elif change == "cut":
        os.truncate(tar, 4_500)
    elif change == "empty":
        os.truncate(tar, 0)
    elif change == "header":
        tar.write_bytes(b"x" + tar.read_bytes()[1:])
    with pytest.raises(ResoluteError, match=words):
        opened(tars / source if source else tars, **options)


def test_long_names_of_all_tar_formats_are_read(tmp_path: Path) -> None:
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        root = tmp_path / str(kind)
        root.mkdir()
        long = "folder/" * 13 + "k" * (40 if kind == tarfile.USTAR_FORMAT else 150) + "é"
        with tarfile.open(root / "t.tar", "w", format=kind) as tar:
            tar.addfile(tarfile.TarInfo("./.hidden.jpg"))
            files = {f"{long}.jpg": encoded(1), f"{long}.cls": b"3", "b.jpg": encoded(2), "b.cls": b"1"}
            for name, data in files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        shards, lines = opened(root)
        assert shards.splits["train"].samples["label"].tolist() == [3, 1]
        assert len(lines) == 1


def test_the_index_command_prints_the_counts(tars: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(tars), "--val", "val-*", "--threads", "2"]) == 0
    assert "train 28, val 10; 908 classes, 5 of them used" in capsys.readouterr().out
    assert main(["index", str(tars / "nothing")]) == 2
    assert "not found, expected a tar" in capsys.readouterr().err


def test_open_dataset_accepts_shard_sets_and_third_party_tars(tars: Path, shard_root: Path, tmp_path: Path) -> None:
    shard_set = open_dataset(shard_root, resolutions=(32,))
    assert shard_set.hash == ShardSet.open(shard_root).hash
    by_pattern = opened(tars, val="*val*")[0].hash
    assert open_dataset(tars, val="*val*").hash == by_pattern
    assert open_dataset(tars).splits.keys() == open_dataset(f"{tars}/**/*.tar").splits.keys() == {"train", "val"}
    part = open_dataset(tars, val="0.5")
    assert 0 < len(part.splits["val"]) < sum(map(len, part.splits.values()))
    with pytest.raises(ResoluteError, match="expected a finished shard set"):
        open_dataset(tmp_path / "mistyped")


@pytest.mark.parametrize("name", ["set[1]", "what?", "a*b", "{x,y}", "left{", "plain", "shards.tar"])
def test_a_shard_set_is_recognised_whatever_characters_its_path_contains(
    shard_root: Path, tmp_path: Path, name: str
) -> None:
    root = Path(shutil.copytree(shard_root, tmp_path / name))
    shards = open_dataset(root)
    assert not shards.single_resolution
    assert {split: len(part) for split, part in shards.splits.items()} == {"train": 75, "val": 15}
    for words in ({"val": "val-*"}, {"classes": "names.txt"}):
        with pytest.raises(ResoluteError, match=r"for a shard set of prep, expected none.*; leave"):
            open_dataset(root, **words)


@pytest.mark.parametrize("state", ["finished", "unfinished", "a damaged manifest"])
@pytest.mark.parametrize("pattern", ["", "/*/*.tar", "/{32,48}/train-*.tar", "/**/*.tar"])
def test_the_resolutions_of_a_shard_set_are_never_read_as_separate_samples(
    shard_root: Path, tmp_path: Path, state: str, pattern: str
) -> None:
    root = Path(shutil.copytree(shard_root, tmp_path / "shards"))
    if state == "unfinished":  # as a killed prep leaves it
        (root / "manifest.json").unlink()
        (root / ".prep").mkdir()
    elif state == "a damaged manifest":
        (root / "manifest.json").write_text("{")
    with pytest.raises(ResoluteError, match="got a shard set of prep, which holds each photo once per"):
        opened(f"{root}{pattern}")
    if state == "finished" and not pattern:
        open_dataset(root)
    else:
        with pytest.raises(ResoluteError, match=r"got a shard set of prep|manifest\.json"):
            open_dataset(f"{root}{pattern}")
    assert len(opened(root / "32", val="val-*")[0].splits["train"]) == 75  # a single resolution named explicitly


def test_tars_beside_a_foreign_manifest_are_read_as_third_party_tars(tars: Path) -> None:
    (tars / "manifest.json").write_text('{"name": "their own"}')
    assert len(open_dataset(tars).splits["train"]) == 28


def test_folds_of_tars_are_those_of_their_training_split_at_every_resolution(tars: Path) -> None:
    whole = open_dataset(tars)
    sets = [open_dataset(tars, fold=fold, folds=3) for fold in range(3)]
    keys = [key for shards in sets for key in shards.splits["val"].samples["key"].tolist()]
    assert sorted(keys) == sorted(whole.splits["train"].samples["key"].tolist())
    for shards in sets:
        assert len(shards.splits["train"]) + len(shards.splits["val"]) == 28
        assert len(shards.splits["train"].stored[32]) == len(shards.splits["train"].stored[48])
    assert len({shards.identity() for shards in [whole, *sets]}) == 4


def test_tars_in_a_folder_with_glob_characters_are_read(written_tars: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(written_tars, tmp_path / "a[1]{b"))
    assert len(opened(root)[0].splits["train"]) == 28
    assert len(opened(root / "train-000.tar")[0].splits["train"]) > 0


@pytest.mark.parametrize("name", DAMAGED_HEADERS)
def test_a_damaged_tar_header_is_reported_with_its_offset_in_bounded_memory(
    tmp_path: Path, name: str
) -> None:
    good = header(tarfile.REGTYPE, 3, b"abc")
    (tmp_path / "t.tar").write_bytes(good + DAMAGED_HEADERS[name] + bytes(1024))
    os.truncate(tmp_path / "t.tar", 3 << 30)  # 3 GiB of nothing
    tracemalloc.start()
    with pytest.raises(ResoluteError, match=r"t\.tar: cut short or damaged, got '.*' at byte 1024, expected"):
        opened(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()


def test_members_that_are_not_regular_files_are_skipped(tmp_path: Path) -> None:
    sparse = b"1\n0\n3\n".ljust(512, b"\0") + b"abc"
    with tarfile.open(tmp_path / "t.tar", "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "for all"}) as tar:
        for name, kind, content, pax in (
            ("folder", tarfile.DIRTYPE, b"", {}), ("0.jpg", tarfile.SYMTYPE, b"", {}),
            ("sparse.jpg", tarfile.REGTYPE, sparse, {"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
                                                    "GNU.sparse.name": "1.jpg", "GNU.sparse.realsize": "3"}),
            ("2.jpg", tarfile.REGTYPE, encoded(2), {}), ("2.cls", tarfile.REGTYPE, b"1", {}),
        ):  # fmt: skip
            info = tarfile.TarInfo(name)
            info.type, info.size, info.pax_headers = kind, len(content), pax
            tar.addfile(info, io.BytesIO(content))
    assert opened(tmp_path)[0].splits["train"].samples["label"].tolist() == [1]
    assert not rejects(tmp_path)
