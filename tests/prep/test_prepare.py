"""A shard set is complete, faithful to its sources, byte-deterministic, and consistent in itself."""

from __future__ import annotations

import io
import json
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from resolute.pipeline.dataset.format import key_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.shard_set.tar_format import dali_index
from tests.support.manifests import read_joined
from tests.support.trees import tree

Prep = Callable[..., Any]
RES = (32, 48)


def test_index_points_at_the_jpegs_in_the_tars(set_template: Path) -> None:
    opened = ShardSet.open(set_template)
    assert opened.classes == ("apple", "bee", "cat")
    assert {name: len(split) for name, split in opened.splits.items()} == {"train": 54, "val": 6}
    for name, split in opened.splits.items():
        for res in RES:
            members: list[tuple[str, bytes]] = []
            offsets: list[int] = []
            for shard in split.shards:
                with tarfile.open(opened.path(res, shard)) as tar:
                    members += [(m.name, tar.extractfile(m).read()) for m in tar]  # type: ignore[union-attr]
                    offsets += [m.offset_data for m in tar]
            assert len(members) == 2 * len(split)
            for i, (sample, stored) in enumerate(zip(split.samples, split.stored[res], strict=True)):
                (jpeg_name, jpeg), (label_name, label) = members[2 * i : 2 * i + 2]
                assert jpeg_name == f"{key_name(sample['key'])}.jpg"
                assert label_name == f"{key_name(sample['key'])}.cls"
                assert label == b"%04d" % sample["label"]
                assert (stored["offset"], stored["nbytes"]) == (offsets[2 * i], len(jpeg))
                assert stored["crc32"] == zlib.crc32(jpeg)
                whole = opened.path(res, split.shards[stored["shard"]]).read_bytes()
                assert whole[stored["offset"] :][: stored["nbytes"]] == jpeg
                assert (stored["width"], stored["height"]) == Image.open(io.BytesIO(jpeg)).size
            assert np.array_equal(split.samples["key"] // 20, split.stored[res]["shard"]), name


def test_stored_images_match_their_sources(set_template: Path, photo_template: Path) -> None:
    opened = ShardSet.open(set_template)
    for name, split in opened.splits.items():
        lines = (set_template / "index" / f"{name}.sources.jsonl").read_text().splitlines()
        assert len(lines) == len(split)
        for line, sample, stored in zip(lines, split.samples, split.stored[48], strict=True):
            path = json.loads(line)
            assert opened.classes[sample["label"]] == path.split("/")[0]
            source = Image.open(photo_template / path).convert("RGB")
            tar = opened.path(48, split.shards[stored["shard"]]).read_bytes()
            jpeg = Image.open(io.BytesIO(tar[stored["offset"] :][: stored["nbytes"]]))
            short_side = min(opened.short_side(48), *source.size)
            assert min(jpeg.size) == short_side
            expected = np.asarray(source.resize(jpeg.size, Image.Resampling.LANCZOS), np.float64)
            error = np.mean((np.asarray(jpeg, np.float64) - expected) ** 2)
            assert 10 * np.log10(255**2 / error) > 25, path  # quality 90 and 4:2:0 of noisy images


def test_manifest_accounts_for_every_file(set_template: Path) -> None:
    manifest = read_joined(set_template)
    hashes = tree(set_template)
    del hashes["manifest.json"], hashes["README.md"]  # the user may edit the latter
    assert {name: info["sha256"] for name, info in manifest["files"].items()} == hashes
    assert all((set_template / name).stat().st_size == info["bytes"] for name, info in manifest["files"].items())
    assert manifest["resolutions"] == {"32": {"short_side": 37}, "48": {"short_side": 55}}
    assert manifest["source"]["images"] == 60
    assert manifest["source"]["rejected"] == 0
    assert str(set_template.parent) not in (set_template / "manifest.json").read_text()


def test_derived_files_agree_with_the_index(set_template: Path) -> None:
    """`verify` only compares files with their hashes, so their consistency is checked here."""
    manifest = read_joined(set_template)
    for name, split in ShardSet.open(set_template).splits.items():
        samples, sources = (np.load(set_template / "index" / f"{name}{kind}.npy") for kind in ("", ".source"))
        assert (np.diff(samples["key"].astype(np.int64)) > 0).all()
        assert samples["label"].max() < 3
        assert all(sources[column].min() > 0 for column in ("nbytes", "width", "height"))
        counts = np.bincount(split.stored[32]["shard"]).tolist()
        for res, prefix, folder in ((32, "", "32"), (48, "", "48"), (48, "48/", "")):
            info = json.loads((set_template / folder / "_info.json").read_text())["splits"][name]
            assert info["filenames"] == [f"{prefix}{shard}.tar" for shard in split.shards]
            assert (info["num_samples"], info["shard_lengths"]) == (len(split), counts)
            stored = np.load(set_template / f"index/{name}-{res}.npy")
            short_side = manifest["resolutions"][str(res)]["short_side"]
            sides = np.minimum(np.minimum(sources["width"], sources["height"]), short_side)
            assert np.array_equal(np.minimum(stored["width"], stored["height"]), sides)
            for number, shard in enumerate(split.shards):
                rows = stored["shard"] == number
                idx = dali_index(samples[rows], stored[rows], 4)
                assert (set_template / str(res) / f"{shard}.idx").read_bytes() == idx
                assert f"records/{shard}-{res}.rec" in manifest["files"]


def test_one_worker_makes_the_bytes_of_two(set_template: Path, photos: Path, tmp_path: Path, prep: Prep) -> None:
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", 20, "--workers", 1)
    assert prep(*argv, "--out", tmp_path / "s").status == 0
    assert tree(tmp_path / "s") == tree(set_template)


def test_another_seed_gives_another_order_and_validation_split(
    set_template: Path, photos: Path, tmp_path: Path, prep: Prep
) -> None:
    assert prep("--src", photos, "--res", "32", "--seed", 1, "--out", tmp_path / "other").status == 0
    for name in ("train", "val"):
        first, second = (
            (folder / "index" / f"{name}.sources.jsonl").read_text().splitlines()
            for folder in (set_template, tmp_path / "other")
        )
        assert len(first) == len(second)
        assert sorted(first) != sorted(second)
