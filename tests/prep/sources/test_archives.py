"""Archives, WebDataset tars and Parquet as sources: contents are read unchanged and cannot refer to files outside."""

from __future__ import annotations

import io
import os
import re
import struct
import tarfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from resolute.errors import ResoluteError
from resolute.prep.listing.list_photos import list_photos
from resolute.prep.settings import ShardsOptions
from resolute.prep.sources import archive, parquet_file
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.sources.parquet_file import open_parquet
from resolute.prep.sources.targets import TargetSetting
from tests.support.source_formats import (
    assert_same_images,
    contents,
    files_in,
    jpeg,
    list_source,
    make_tree,
    pack_parquet,
    pack_samples,
    pack_tar,
    pack_zip,
)

DROP = TargetSetting(drop_unlabelled=True)


def test_archive_members_cannot_refer_to_files_outside(tmp_path: Path, work: Path) -> None:
    good = {"a/1.jpg": jpeg(1), "b/2.jpg": jpeg(2)}
    bad = ["/a/x.jpg", "../x.jpg", "a/../../x.jpg", "a\\x.jpg", "C:/a/x.jpg"]
    members = [*good.items(), *((name, b"x") for name in bad)]
    with zipfile.ZipFile(pack_zip(tmp_path / "p.zip", members), "a") as archive:
        link = zipfile.ZipInfo("a/link.jpg")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with tarfile.open(pack_tar(tmp_path / "p.tar", members), "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE):
            info = tarfile.TarInfo("a/link.jpg")
            info.type, info.linkname = kind, "a/1.jpg"
            tar.addfile(info)
    before = sorted(tmp_path.rglob("*.jpg"))
    for name, links in (("p.zip", 1), ("p.tar", 3)):
        got = list_source(work, tmp_path / name, kind="archive")
        assert_same_images(got, good)
        assert got.ignored == {"unsafe names": 4, "names with backslashes": 1, "links and devices": links}
    assert sorted(tmp_path.rglob("*.jpg")) == before


def test_damaged_archives_are_reported(tmp_path: Path, work: Path) -> None:
    files = {f"{c}/{i}.jpg": jpeg(i) for c in "ab" for i in range(20)}

    def error_of(path: Path) -> str:
        with pytest.raises(ResoluteError) as error:
            list_source(work, path)
        return str(error.value)

    whole = pack_tar(tmp_path / "p.tar", files.items()).read_bytes()
    (tmp_path / "p.tar").write_bytes(whole[:20_000])
    assert "p.tar" in error_of(tmp_path / "p.tar")
    (tmp_path / "p.tar").write_bytes(whole[:4_608] + b"!" * 512 + whole[5_120:])
    assert "damaged tar" in error_of(tmp_path / "p.tar")
    for how in ("gz", "bz2", "xz"):
        path = pack_tar(tmp_path / f"p.tar.{how}", files.items(), how)
        path.write_bytes(path.read_bytes()[:-30])
        assert f"p.tar.{how}: cannot be read" in error_of(path)
        assert not list((work / "scan_cache").glob(".*.partial"))
    data = pack_zip(tmp_path / "p.zip", files.items()).read_bytes()
    (tmp_path / "p.zip").write_bytes(data[:-200])
    assert "a zip archive that cannot be used: File is not a zip file" in error_of(tmp_path / "p.zip")
    locked = bytearray(data)
    at = data.index(b"PK\1\2")
    locked[at + 8] |= 1
    (tmp_path / "p.zip").write_bytes(locked)
    assert "got an encrypted member a/0.jpg" in error_of(tmp_path / "p.zip")


def test_long_names_and_pax_headers_of_usual_size_are_read(tmp_path: Path, work: Path) -> None:
    for layout in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar.gz", "w:gz", format=layout) as tar:
            for i, label in enumerate(("cat", "dög" * 40)):
                info = tarfile.TarInfo(f"p/{label}/{'x' * 200}{i}.jpg")
                info.size = len(jpeg(i))
                tar.addfile(info, io.BytesIO(jpeg(i)))
        assert contents(list_source(work, tmp_path / "a.tar.gz")) == [jpeg(0), jpeg(1)]


def test_one_tar_per_class_is_read(tmp_path: Path, work: Path) -> None:
    (tmp_path / "p").mkdir()
    for c in range(2):
        pack_tar(tmp_path / "p" / f"n{c}.tar", [(f"n{c}_{i}.JPEG", jpeg(i)) for i in range(3)])
    files = {f"n{c}/n{c}_{i}.JPEG": jpeg(i) for c in range(2) for i in range(3)}
    assert_same_images(list_source(work, tmp_path / "p"), files)


def test_samples_are_read_with_their_labels(tmp_path: Path, work: Path) -> None:
    (tmp_path / "p").mkdir()
    pack_samples(
        tmp_path / "p" / "x-000000.tar",
        [
            ("./k/000.jpg", jpeg(0), {"cls": b"0003\n"}),
            ("k/001.PNG", jpeg(1), {"json": b'{"caption": "x", "label": 1}'}),
            ("k/002.jpg", jpeg(2), {"json": b"7", "txt": b"a caption"}),
            ("k/003.npy", b"", {"cls": b"1"}),
            ("k/004.jpg", jpeg(5), {"json": b"{}"}),
            ("k/005.json", b"{}", {"cls": b"1"}),
            ("k/006.jpg", jpeg(7), {"json": b"[" * 100_000}),
            ("k/007.jpg", jpeg(8), {"cls": b"9" * 5_000}),
        ],
    )
    pack_samples(tmp_path / "p" / "x-000001.tar", [("000.webp", jpeg(6), {"cls": b"0"})])
    pack_samples(tmp_path / "text.tar", [("0.jpg", jpeg(0), {"cls": b"1"}), ("1.jpg", jpeg(1), {"txt": b"dog"})])
    assert list_source(work, tmp_path / "text.tar").classes == ("1", "dog")
    expected = {
        "x-000000.tar/k/000.jpg": 3,
        "x-000000.tar/k/001.PNG": 1,
        "x-000000.tar/k/002.jpg": 7,
        "x-000001.tar/000.webp": 0,
    }
    for src in ("p", "p/*.tar", "p/x-{000000..000001}.tar"):
        got = list_source(work, tmp_path / src, target=DROP)
        assert {got.name(i): int(got.labels[i]) for i in range(len(got))} == expected
        assert got.classes == tuple(map(str, range(8)))
        assert got.ignored == {
            "unlabelled": 1,
            "samples without an image": 2,
            "damaged labels": 2,
        }
        assert contents(got) == [jpeg(0), jpeg(1), jpeg(2), jpeg(6)]


def pack_members(path: Path, *names: str) -> list[bytes]:
    """A tar of images that differ, and of labels: 1 in .cls, `dog` in .txt; returns the images by position, or b""."""
    data = [jpeg(i) if name.lower().endswith(("jpg", "png")) else b"" for i, name in enumerate(names)]
    labels = {".cls": b"1", ".txt": b"dog", ".json": b'{"label": 1}'}
    contents = [d or labels.get(Path(name).suffix.lower(), b"") for name, d in zip(names, data, strict=True)]
    pack_tar(path, zip(names, contents, strict=True), "gz" if path.suffix == ".gz" else "")
    return data


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ("a.jpg a.cls 22.05.jpg 22.05.cls IMG_1.2.jpg IMG_1.2.cls", "a.jpg 22.05.jpg IMG_1.2.jpg"),
        ("22.05.cls 22.05.jpg 22.06.cls 22.06.jpg 22.cls 22.jpg", "22.05.jpg 22.06.jpg 22.jpg"),
        ("22.05.JPG 22.05.CLS 22.05.JSON 22.05.emb.npy", "22.05.JPG"),
        ("k.1/a.b.c.png k.1/a.b.c.cls", "k.1/a.b.c.png"),
        ("img.left.jpg img.cls img.emb.npy", "img.left.jpg"),
        ("img.left.jpg img.left.txt img.cls", "img.left.jpg"),
        ("a.jpg a.json a.meta.json", "a.jpg"),
    ],
)
def test_keys_with_dots_are_read(tmp_path: Path, work: Path, members: str, expected: str, suffix: str) -> None:
    pack_members(tmp_path / f"x.{suffix}", *members.split(), *["z.png", "z.cls"])
    source = open_source(str(tmp_path / f"x.{suffix}"), scan_cache=work)
    images = list(source)
    assert [image.name.removeprefix(f"x.{suffix}/") for image in images] == [*expected.split(), "z.png"]
    assert {image.label for image in images} == {"1"}
    assert not source.listing.ignored


@pytest.mark.parametrize(
    ("members", "seen", "image", "expected"),
    [
        (
            "0.jpg 0.seg.png 0.cls 1.jpg 1.seg.png 1.cls 2.jpg 2.cls",
            r"jpg \(2\), seg\.png \(2\)",
            "JPG",
            "0.jpg 1.jpg 2.jpg",
        ),
        ("a.left.jpg a.right.jpg a.cls", r"left\.jpg \(1\), right\.jpg \(1\)", ".left.jpg", "a.left.jpg"),
        ("1.5.jpg 1.5.png 1.5.txt 1.6.png 1.6.txt", r"jpg \(1\), png \(1\)", "jpg,png", "1.5.jpg 1.6.png"),
        ("a.jpg a.JPG a.cls", r"JPG \(1\), jpg \(1\)", "jpg", "a.jpg"),
        ("1.2.left.jpg 1.2.right.jpg 1.2.cls", r"left\.jpg \(1\)", "right.jpg", "1.2.right.jpg"),
        ("a.rgb.jpg a.depth.png a.cls", r"depth\.png \(1\), rgb\.jpg \(1\)", "jpg", "a.rgb.jpg"),
    ],
)
def test_of_samples_with_several_images_the_setting_chooses(
    tmp_path: Path, work: Path, members: str, seen: str, image: str, expected: str
) -> None:
    data = pack_members(tmp_path / "x.tar.gz", *members.split())
    with pytest.raises(ResoluteError, match=rf"samples with several images, got {seen}.*IMAGE="):
        list(open_source(str(tmp_path / "x.tar.gz"), scan_cache=work))
    kinds = ShardsOptions(src="x", image=image).images
    images = list(open_source(str(tmp_path / "x.tar.gz"), scan_cache=work, image=kinds))
    assert [image.name for image in images] == [f"x.tar.gz/{name}" for name in expected.split()]
    places = [ByteRange(image.container, image.offset, image.nbytes, image.stored_as, image.nbytes) for image in images]
    assert fetch_many(places) == [data[members.split().index(name)] for name in expected.split()]


def test_two_images_that_the_setting_may_mean_are_a_question(tmp_path: Path, work: Path) -> None:
    pack_members(tmp_path / "x.tar", *["a.left.jpg", "a.right.jpg", "a.mask.png", "a.cls"])
    with pytest.raises(ResoluteError, match=r"got left\.jpg \(1\), right\.jpg \(1\), expected one.*IMAGE=left\.jpg"):
        list(open_source(str(tmp_path / "x.tar"), scan_cache=work, image=("jpg",)))


def test_samples_without_the_image_that_is_meant_are_counted(tmp_path: Path, work: Path) -> None:
    pack_members(tmp_path / "x.tar", *["0.jpg", "0.png", "0.cls", "1.png", "1.cls"])
    source = open_source(str(tmp_path / "x.tar"), scan_cache=work, image=("jpg",))
    assert [image.name for image in source] == ["x.tar/0.jpg"]
    assert source.listing.ignored == {"samples without the image of IMAGE": 1}


def test_an_extension_that_is_no_image_is_refused() -> None:
    with pytest.raises(ResoluteError, match=r"IMAGE: got 'seg\.npy', which is no extension of an image"):
        ShardsOptions(src="x", image="jpg,seg.npy")


def test_image_without_samples_is_refused(tmp_path: Path, work: Path) -> None:
    make_tree(tmp_path / "photos")
    with pytest.raises(ResoluteError, match="IMAGE: has no effect for KIND=folders"):
        list_source(work, tmp_path / "photos", image=("jpg",))


def test_parquet_from_the_hugging_face_hub_is_read(tmp_path: Path, work: Path) -> None:
    rows = [(jpeg(i), f"p/{i}.jpg", label) for i, label in enumerate((0, 1, 2, 0, -1, 2, 0))]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pack_parquet(tmp_path / "hub" / "data" / "train-0.parquet", rows, ["z", "a", "m"])
    kept = [0, 1, 2, 3, 5, 6]
    for src in ("hub", "hub/data", "hub/data/*.parquet", "hub/data/train-0.parquet"):
        got = list_source(work, tmp_path / src, target=DROP)
        assert got.names(range(6)) == [f"train-0.parquet/{i:09d}.jpg" for i in kept]
        assert got.classes == ("z", "a", "m")  # numbers are kept, not sorted by name
        assert got.labels.tolist() == [0, 1, 2, 0, 2, 0]
        assert got.ignored == {"unlabelled": 1}
        assert contents(got) == [jpeg(i) for i in kept]
    for label in "amz":
        (tmp_path / "sorted" / label).mkdir(parents=True)
        (tmp_path / "sorted" / label / "1.jpg").write_bytes(jpeg(1))
    train = list_source(work, tmp_path / "sorted")
    source = open_source(str(tmp_path / "hub"), scan_cache=work, target=DROP)
    val = list_photos(source, train.database, "val", training=train)
    assert val.labels.tolist() == ["amz".index("zam"[n]) for n in got.labels]  # by name where both have names


def test_other_parquet_files_are_read_or_ambiguities_are_reported(tmp_path: Path, work: Path) -> None:
    table = pa.table({"n": [1, 2], "photo": [jpeg(1), jpeg(2)], "breed": ["elk", "pug"], "thumb": [b"x", b"y"]})
    pq.write_table(table.drop_columns("thumb"), tmp_path / "a.parquet")
    assert list_source(work, tmp_path / "a.parquet").classes == ("elk", "pug")
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(ResoluteError, match=r"ambiguous columns, got n, photo, breed, thumb.*COLUMNS"):
        list_source(work, tmp_path / "b.parquet")
    assert list_source(work, tmp_path / "b.parquet", columns="photo,n").classes == ("0", "1", "2")
    with pytest.raises(ResoluteError, match="column breed has the wrong type, got VARCHAR"):
        list_source(work, tmp_path / "b.parquet", columns="breed,n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ResoluteError, match=r"c\.parquet: cannot be read"):
        list_source(work, tmp_path / "c.parquet")


def test_the_scan_cache_is_reused_until_the_file_changes_or_the_cache_is_damaged(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_tree(tmp_path / "photos")
    path = pack_tar(tmp_path / "p.tar.gz", files_in(files, ""), "gz")
    opened: list[str] = []
    real = archive.open_tar

    def open_tar(path: str) -> Any:
        opened.append(path)
        return real(path)

    monkeypatch.setattr(archive, "open_tar", open_tar)

    def assert_listed(*, scans: int, blobs: int) -> None:
        assert_same_images(list_source(work, path), files)
        assert (len(opened), len(list((work / "scan_cache").glob("*.blob")))) == (scans, blobs)

    assert_listed(scans=1, blobs=1)
    assert_listed(scans=1, blobs=1)
    (blob,) = (work / "scan_cache").glob("*.blob")
    blob.write_bytes(blob.read_bytes()[:-1])
    assert_listed(scans=2, blobs=1)
    del files["dog/1.jpg"]
    pack_tar(path, files_in(files, ""), "gz")
    os.utime(path, ns=(1, 1))
    assert_listed(scans=3, blobs=2)  # jobs may still read the older version


class SlowSeek(io.BytesIO):
    """A file in which another of DuckDB's threads gets its turn between a seek and the read that follows."""

    def seek(self, offset: int, whence: int = 0) -> int:
        at = super().seek(offset, whence)
        time.sleep(0.002)
        return at


def test_threads_of_duckdb_that_share_a_file_each_read_their_own_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    rows: list[tuple[bytes | None, str, int]] = [(random.bytes(3000 + 17 * n), f"{n}.jpg", n) for n in range(60)]
    path = pack_parquet(tmp_path / "photos.parquet", rows, None)
    monkeypatch.setattr(parquet_file, "open_file", lambda path: SlowSeek(Path(path).read_bytes()))
    with open_parquet(str(path)) as opened:
        assert list(opened.rows(["image.bytes", "label"], 64)) == [(data, label) for data, _, label in rows]


def labels_of(photos: Any) -> dict[str, str]:
    return {photos.name(i): photos.classes[n] for i, n in enumerate(photos.labels)}


def pack_zips(folder: Path, **names: list[str]) -> str:
    """Zips by name, `-` written as `_`, of photos with these names; returns the pattern of all of them."""
    folder.mkdir()
    number = 0
    for name, members in names.items():
        files = []
        for member in members:
            files.append((member, jpeg(number)))
            number += 1
        pack_zip(folder / f"{name.replace('_', '-')}.zip", files)
    return f"{folder}/*.zip"


@pytest.mark.parametrize(
    ("archives", "expected"),
    [
        ({"part_a": ["part-a/cat/1.jpg"], "part_b": ["part-b/dog/2.jpg"]}, {"cat/1.jpg", "dog/2.jpg"}),
        (
            {"p1": ["data_1/cat/1.jpg", "data_1/dog/2.jpg"], "p2": ["data_2/cat/3.jpg", "data_2/dog/4.jpg"]},
            {"cat/1.jpg", "dog/2.jpg", "cat/3.jpg", "dog/4.jpg"},
        ),
        (
            {"a": ["ds/batch-1/images/cat/1.jpg"], "b": ["ds/batch-2/images/dog/2.jpg", "ds/batch-2/images/elk/3.jpg"]},
            {"cat/1.jpg", "dog/2.jpg", "elk/3.jpg"},
        ),
        (
            {"a": ["part 1 of 2/cat/images/1.jpg"], "b": ["part 2 of 2/dog/images/2.jpg"]},
            {"cat/images/1.jpg", "dog/images/2.jpg"},
        ),
        ({"a": ["cat/1.jpg"], "b": ["dog/2.jpg"]}, {"cat/1.jpg", "dog/2.jpg"}),
        (
            {"a": ["cat/x/1.jpg", "cat/2.jpg"], "b": ["dog/x/3.jpg", "dog/y/4.jpg"]},
            {"cat/x/1.jpg", "cat/2.jpg", "dog/x/3.jpg", "dog/y/4.jpg"},
        ),
        ({"a": ["cat/images/1.jpg"], "b": ["dog/images/2.jpg"]}, {"cat/images/1.jpg", "dog/images/2.jpg"}),
        (
            {"a": ["cat/x/1.jpg", "elk/2.jpg"], "b": ["dog/x/3.jpg", "dog/y/4.jpg"]},
            {"cat/x/1.jpg", "elk/2.jpg", "dog/x/3.jpg", "dog/y/4.jpg"},
        ),
    ],
)
def test_of_several_archives_the_top_folder_of_each_is_dropped_unless_it_is_a_class(
    tmp_path: Path, work: Path, archives: dict[str, list[str]], expected: set[str]
) -> None:
    got = labels_of(list_source(work, pack_zips(tmp_path / "z", **archives)))
    assert got == {name: name.partition("/")[0] for name in expected}


def test_two_levels_of_folders_that_could_be_classes_are_a_question(tmp_path: Path, work: Path) -> None:
    src = pack_zips(tmp_path / "z", x=["ann/cat/1.jpg", "ann/dog/2.jpg"], y=["bob/cat/3.jpg", "bob/elk/4.jpg"])
    with pytest.raises(ResoluteError, match=r"got ann, bob, and in them cat, dog, elk.*KIND=archive.*CLASSES="):
        list_source(work, src)
    assert list_source(work, src, kind="archive").classes == ("ann", "bob")
    assert list_source(work, src, named_classes=("cat", "dog", "elk", "fox")).classes == ("cat", "dog", "elk")
    assert list_source(work, src, known_classes=("ann", "bob")).classes == ("ann", "bob")


def test_archives_of_splits_are_a_question_about_splits(tmp_path: Path, work: Path) -> None:
    src = pack_zips(
        tmp_path / "z", train=["train/cat/1.jpg", "train/dog/2.jpg"], val=["val/cat/3.jpg", "val/dog/4.jpg"]
    )
    with pytest.raises(ResoluteError, match=r"SRC=\S*z/train\.zip VAL=\S*z/val\.zip"):
        list_source(work, src)


def test_without_a_kind_that_would_answer_the_question_only_classes_are_named(tmp_path: Path, work: Path) -> None:
    src = pack_zips(tmp_path / "z", a=["part-1/ann/cat/1.jpg"], b=["part-2/bob/dog/2.jpg"])
    with pytest.raises(ResoluteError, match=r"got ann, bob, and in them cat, dog, expected one; use CLASSES="):
        list_source(work, src)


@pytest.mark.parametrize(
    ("archives", "said"),
    [
        (
            {"a": ["animals/cat/1.jpg", "animals/elk/2.jpg"], "b": ["dog/3.jpg", "fox/4.jpg"]},
            r"folders cat, elk in animals of a\.zip, and dog, fox in b\.zip.*KIND=archive for animals, or CLASSES=",
        ),
        ({"a": ["animals/cat/1.jpg"], "b": ["dog/3.jpg"]}, r"folders cat in animals of a\.zip, and dog in b\.zip"),
        (
            {"a": ["w/cat/1.jpg"], "b": ["cat/2.jpg", "dog/3.jpg"]},
            r"folders cat in w of a\.zip, and cat, dog in b\.zip",
        ),
        (
            {"a": ["cat/x/1.jpg", "dog/x/2.jpg"], "b": ["w/elk/3.jpg", "w/fox/4.jpg"]},
            r"folders elk, fox in w of b\.zip, and cat, dog in a\.zip",
        ),
        (
            {"a": ["part-a/x/cat/1.jpg", "part-a/x/elk/2.jpg"], "b": ["part-b/dog/3.jpg"]},
            r"folders cat, elk in x of a\.zip, and dog in b\.zip.*one level; use CLASSES=",
        ),
        (
            {"a": ["ds1/cat/1.jpg"], "b": ["ds2/dog/2.jpg"], "c": ["elk/3.jpg"]},
            r"folders cat in ds1 of a\.zip, and elk",
        ),
    ],
)
def test_a_top_folder_that_only_some_archives_have_is_a_question(
    tmp_path: Path, work: Path, archives: dict[str, list[str]], said: str
) -> None:
    src = pack_zips(tmp_path / "z", **archives)
    with pytest.raises(ResoluteError, match=f"archives of two forms, got the {said}"):
        list_source(work, src)


def test_the_names_of_classes_tell_the_level_in_each_archive(tmp_path: Path, work: Path) -> None:
    src = pack_zips(
        tmp_path / "z", a=["x/cat/1.jpg", "x/elk/2.jpg"], b=["y/z/dog/3.jpg", "y/z/fox/4.jpg"], c=["cat/5.jpg"]
    )
    got = labels_of(list_source(work, src, named_classes=("cat", "dog", "elk", "fox")))
    assert got == {f"{c}/{i}.jpg": c for i, c in enumerate(("cat", "elk", "dog", "fox", "cat"), 1)}


@pytest.mark.parametrize("top", ["", "part-a/"])
def test_an_archive_without_photos_is_of_any_form(tmp_path: Path, work: Path, top: str) -> None:
    src = pack_zips(tmp_path / "z", a=[f"{top}cat/1.jpg", f"{top}dog/2.jpg"], b=["license.txt"])
    assert list_source(work, src).classes == ("cat", "dog")


def test_archives_named_as_splits_are_a_question(tmp_path: Path, work: Path) -> None:
    inside = ["cat/1.jpg", "dog/2.jpg"]
    src = pack_zips(tmp_path / "z", train_1=inside, train_2=inside, val=inside, notes=["a.txt"])
    with pytest.raises(
        ResoluteError,
        match=r"holds splits, got train-1\.zip, train-2\.zip and val\.zip, .*"
        r"SRC='\S*z/train-\*' VAL=\S*z/val\.zip, or KIND=archive",
    ):
        list_source(work, src)
    assert len(list_source(work, src, kind="archive")) == 6


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            ["labels.csv", "a/1.jpg", "b/2.jpg"],
            r"a table beside the folders, got labels\.csv .*LABELS=\S*p/labels\.csv",
        ),
        (["ds/train.csv", "ds/a/1.jpg", "ds/b/2.jpg"], r"a table beside the folders, got train\.csv"),
        (["labels.csv", "1.jpg", "2.jpg"], r"no class folders, got photos and a table.*unpack it and use SRC="),
        (["1.jpg", "2.jpg", "3.jpg", "a/1.jpg", "b/2.jpg"], r"more photos outside folders than in them, got 3 outside"),
    ],
)
@pytest.mark.parametrize("suffix", ["zip", "tar.gz"])
def test_tables_and_photos_outside_folders_are_looked_at_in_archives_too(
    tmp_path: Path, work: Path, members: list[str], said: str, suffix: str
) -> None:
    files = [(name, jpeg(i)) for i, name in enumerate(members)]
    path = tmp_path / f"p.{suffix}"
    pack_zip(path, files) if suffix == "zip" else pack_tar(path, files, "gz")
    with pytest.raises(ResoluteError, match=said):
        list_source(work, path)


def test_parts_that_are_dropped_are_said(tmp_path: Path, work: Path) -> None:
    src = pack_zips(tmp_path / "z", a=["part-a/cat/1.jpg"], b=["part-b/dog/2.jpg"])
    (line,) = list_source(work, src).about
    assert line.endswith("the top folders part-a, part-b are read as parts of the data, not as classes")


def test_archives_with_and_without_folders_are_a_question(tmp_path: Path, work: Path) -> None:
    src = pack_zips(tmp_path / "z", cats=["1.jpg", "2.jpg"], others=["dog/1.jpg", "elk/2.jpg"])
    with pytest.raises(
        ResoluteError, match=r"got cats\.zip without folders and others\.zip with folders.*KIND=archive"
    ):
        list_source(work, src)
    assert list_source(work, src, kind="archive").ignored == {"outside class folders": 2}


@pytest.mark.parametrize(
    ("suffix", "how"),
    [("tar", ""), ("tar.gz", "gz"), ("TGZ", "gz"), ("tar.bz2", "bz2"), ("tbz", "bz2"), ("txz", "xz"), ("zip", "")],
)
def test_the_class_of_a_flat_archive_is_its_name_without_any_suffix(
    tmp_path: Path, work: Path, suffix: str, how: str
) -> None:
    for n in ("n01", "v1.5"):
        path = tmp_path / f"{n}.{suffix}"
        files = [(f"{i}.jpg", jpeg(i)) for i in range(2)]
        pack_zip(path, files) if suffix == "zip" else pack_tar(path, files, how)
    assert list_source(work, f"{tmp_path}/*.{suffix}").classes == ("n01", "v1.5")
    before = Path(f"n01.{suffix}").stem  # as sets that exist may call it
    assert list_source(work, f"{tmp_path}/*.{suffix}", named_classes=(before,)).classes == (before, "v1.5")


def test_of_equal_names_in_several_archives_those_of_later_ones_begin_with_the_archive(
    tmp_path: Path, work: Path
) -> None:
    src = pack_zips(tmp_path / "z", a=["cat/1.jpg", "dog/2.jpg"], b=["cat/1.jpg", "dog/3.jpg"], c=["dog/1.jpg"])
    got = list_source(work, src)
    assert got.names(range(5)) == ["b.zip/cat/1.jpg", "cat/1.jpg", "dog/1.jpg", "dog/2.jpg", "dog/3.jpg"]
    assert got.classes == ("cat", "dog")
    assert contents(got) == [jpeg(2), jpeg(0), jpeg(4), jpeg(1), jpeg(3)]
    assert got.ignored == {}
    (tmp_path / "more").mkdir()
    for folder, number in (("x", 8), ("y", 9)):
        (tmp_path / "more" / folder).mkdir()
        pack_zip(
            tmp_path / "more" / folder / "p.zip", [("cat/1.jpg", jpeg(number)), (f"dog/{number}.jpg", jpeg(number))]
        )
    got = list_source(work, f"{tmp_path}/more/*/p.zip")
    assert got.names(range(4)) == ["cat/1.jpg", "dog/8.jpg", "dog/9.jpg", "y/p.zip/cat/1.jpg"]


def test_a_further_archive_changes_no_name_of_those_before_it(tmp_path: Path, work: Path) -> None:
    folder = tmp_path / "z"
    names: list[str] = []
    src = pack_zips(folder, a=["cat/1.jpg", "dog/1.jpg"])
    for more in ("a/b.zip", "b.zip", "c/b.zip"):
        got = list_source(work, src)
        before, names = names, got.names(range(len(got)))
        assert set(before) < set(names)
        (folder / more).parent.mkdir(exist_ok=True)
        pack_zip(folder / more, [("cat/1.jpg", jpeg(len(names))), ("dog/1.jpg", jpeg(len(names)))])
        src = f"{tmp_path}/z/**/*.zip"
    assert len(list_source(work, src)) == 8


def test_of_a_name_twice_in_an_archive_the_last_is_kept_and_the_other_counted(tmp_path: Path, work: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        path = pack_zip(tmp_path / "a.zip", [("cat/1.jpg", jpeg(1)), ("cat/1.jpg", jpeg(2)), ("dog/1.jpg", jpeg(3))])
    got = list_source(work, path)
    assert (contents(got), got.ignored) == ([jpeg(2), jpeg(3)], {"duplicate names": 1})


def patched(path: Path, **changes: bytes) -> Path:
    """The zip of two classes in which the placeholders, which have as many bytes, are replaced."""
    pack_zip(path, [("AAAA/1.jpg", jpeg(1)), ("BBBB/2.jpg", jpeg(2)), ("notes-CCCC.txt", b"")])
    data = path.read_bytes()
    for placeholder, new in changes.items():
        data = data.replace(placeholder.encode(), new)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("codec", "texts"),
    [
        ("gbk", ("\u72d7\u732b", "\u72d7\u72d7")),
        ("shift_jis", ("\u8868\u732b", "\u72ac\u8868")),
        ("cp1252", ("caf\xe9", "d\xf6gs")),
    ],
)
def test_names_in_zips_in_other_encodings_are_a_question_that_a_setting_answers(
    tmp_path: Path, work: Path, codec: str, texts: tuple[str, str]
) -> None:
    path = patched(
        tmp_path / "p.zip", **dict(zip(("AAAA", "BBBB"), (text.encode(codec) for text in texts), strict=True))
    )
    with pytest.raises(
        ResoluteError, match=rf"unknown encoding, which is .*{texts[0]}/1\.jpg in {codec}.*ZIP_NAMES=gbk"
    ):
        list_source(work, path)
    assert list_source(work, path, zip_names=codec).classes == tuple(sorted(texts))
    garbled = tuple(sorted(text.encode(codec).decode("cp437") for text in texts))
    if "\\" not in "".join(garbled):
        assert list_source(work, path, zip_names="cp437").classes == garbled
    with pytest.raises(ResoluteError, match=r"p\.zip: .*not in ZIP_NAMES=ascii"):
        list_source(work, path, zip_names="ascii")


def test_names_of_photos_in_other_encodings_are_a_warning(tmp_path: Path, work: Path) -> None:
    path = pack_zip(tmp_path / "p.zip", [("cat/AA.jpg", jpeg(1)), ("dog/2.jpg", jpeg(2))])
    path.write_bytes(path.read_bytes().replace(b"AA", "\u72d7".encode("gbk")))
    got = list_source(work, path)
    assert got.classes == ("cat", "dog")
    (warning,) = got.warnings
    assert re.search(
        r"p\.zip: the name cat/.*unknown encoding, which is cat/\u72d7\.jpg in gbk.*ZIP_NAMES=gbk", warning
    )
    assert list_source(work, path, zip_names="gbk").names([0]) == ["cat/\u72d7.jpg"]


def test_a_set_keeps_names_of_an_unknown_encoding(tmp_path: Path, work: Path) -> None:
    path = patched(tmp_path / "p.zip", AAAA="caf\xe9".encode("cp437"))
    assert list_source(work, path, known_classes=("BBBB", "caf\xe9")).classes == ("BBBB", "caf\xe9")


def test_names_of_other_files_are_no_question_and_names_in_utf_8_are_none(tmp_path: Path, work: Path) -> None:
    path = patched(tmp_path / "p.zip", AAAA="\u732ba".encode(), CCCC="\u732b\u732b".encode("gbk"))
    assert list_source(work, path).classes == ("BBBB", "\u732ba")


def test_the_unicode_name_beside_another_is_read(tmp_path: Path, work: Path) -> None:
    raw = "d\xf6gs/1.jpg".encode("cp850")
    field = b"\1" + zlib.crc32(raw).to_bytes(4, "little") + "d\xf6gs/1.jpg".encode()
    info = zipfile.ZipInfo("AAAA/1.jpg")
    info.extra = struct.pack("<HH", 0x7075, len(field)) + field
    with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
        archive.writestr(info, jpeg(1))
        archive.writestr("cat/1.jpg", jpeg(2))
    (tmp_path / "p.zip").write_bytes((tmp_path / "p.zip").read_bytes().replace(b"AAAA", raw[:4]))
    assert list_source(work, tmp_path / "p.zip").classes == ("cat", "d\xf6gs")


@pytest.mark.parametrize("name", ["rot13", "base64", "utf-16", "no-such"])
def test_what_is_no_encoding_of_names_is_refused(name: str) -> None:
    with pytest.raises(ResoluteError, match=f"ZIP_NAMES: got {name}, which is no encoding of file names"):
        ShardsOptions(src="x", zip_names=name)


def test_zip_names_without_a_zip_is_refused(tmp_path: Path, work: Path) -> None:
    pack_tar(tmp_path / "p.tar", [("a/1.jpg", jpeg(1)), ("b/1.jpg", jpeg(2))])
    with pytest.raises(ResoluteError, match="ZIP_NAMES: has no effect for"):
        list_source(work, tmp_path / "p.tar", zip_names="gbk")


def test_backslashes_are_folders_if_no_name_has_a_slash(tmp_path: Path, work: Path) -> None:
    files = {"cat/1.jpg": jpeg(1), "dog/2.jpg": jpeg(2)}
    members = [("ds\\", b""), *((f"ds\\{name}".replace("/", "\\"), data) for name, data in files.items())]
    got = list_source(work, pack_zip(tmp_path / "p.zip", [*members, ("..\\x.jpg", b"")]))
    assert_same_images(got, files)
    assert got.ignored == {"unsafe names": 1}
    assert got.about == (f"{tmp_path}/p.zip: backslashes in names are read as folders: ds/cat/1.jpg",)


def pack_backslashes(path: Path, names: list[str], system: int) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for i, name in enumerate(names):
            info = zipfile.ZipInfo()
            info.filename, info.create_system = name, system
            archive.writestr(info, jpeg(i) if name.endswith("jpg") else b"")
    return path


@pytest.mark.parametrize("others", [["cat/", "dog/"], ["../x.jpg"], ["notes/1.txt", "__MACOSX/cat/1.jpg"]])
def test_backslashes_in_names_that_windows_wrote_are_folders(tmp_path: Path, work: Path, others: list[str]) -> None:
    path = pack_backslashes(tmp_path / "p.zip", ["cat\\1.jpg", "dog\\2.jpg", "dog/x\\3.jpg", *others], 0)
    assert set(labels_of(list_source(work, path))) == {"cat/1.jpg", "dog/2.jpg", "dog/x/3.jpg"}


@pytest.mark.parametrize(
    "names",
    [["cat\\1.jpg", "dog\\2.jpg", "cat/3.jpg", "dog/4.jpg"], ["ds/cat\\1.jpg", "ds/dog\\2.jpg"]],
)
@pytest.mark.parametrize("how", ["zip", "tar"])
def test_backslashes_that_may_be_part_of_a_name_are_a_question(
    tmp_path: Path, work: Path, names: list[str], how: str
) -> None:
    path = tmp_path / f"p.{how}"
    if how == "zip":
        pack_backslashes(path, names, 3)
    else:
        pack_tar(path, [(name, jpeg(i)) for i, name in enumerate(names)])
    with pytest.raises(ResoluteError, match=r"got the name \S*cat\\1\.jpg with a backslash, expected slashes.*repack"):
        list_source(work, path)
    if len(names) == 4:
        assert list_source(work, path, kind="archive").ignored == {"names with backslashes": 2}


@pytest.mark.parametrize(("method", "said"), [(zipfile.ZIP_BZIP2, "bzip2"), (zipfile.ZIP_LZMA, "LZMA"), (98, "PPMd")])
def test_compression_that_is_not_read_is_refused_while_listing(
    tmp_path: Path, work: Path, method: int, said: str
) -> None:
    path = pack_zip(tmp_path / "p.zip", [("a/1.jpg", jpeg(1)), ("b/2.jpg", jpeg(2)), ("notes.txt", b"")])
    data = bytearray(path.read_bytes())
    for at in [m.start() for m in re.finditer(b"PK\1\2", data)][1:]:  # the second photo, and a text
        data[at + 10] = method
    path.write_bytes(data)
    with pytest.raises(ResoluteError, match=rf"got b/2\.jpg compressed by {said}, .*unpack.*repack"):
        list_source(work, path)


@pytest.mark.parametrize("how", ["last", "member", "first"])
def test_volumes_of_a_zip_are_refused(tmp_path: Path, work: Path, how: str) -> None:
    path = pack_zip(tmp_path / "p.zip", [("a/1.jpg", jpeg(1)), ("b/2.jpg", jpeg(2))])
    data = bytearray(path.read_bytes())
    if how == "last":
        data[data.index(b"PK\5\6") + 4] = 2
    elif how == "member":
        data[data.index(b"PK\1\2") + 34] = 1
    else:
        data = bytearray(b"PK\7\b") + data[: data.index(b"PK\1\2")]
    path.write_bytes(data)
    with pytest.raises(ResoluteError, match=r"p\.zip: got one of several volumes .*join"):
        list_source(work, path)
