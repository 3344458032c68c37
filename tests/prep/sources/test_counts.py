"""Every entry of a source is yielded or counted as ignored, whatever its format; of a set, stored or rejected too."""

from __future__ import annotations

import io
import os
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from resolute.prep.listing.database import Database
from resolute.prep.listing.list_photos import list_photos
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.image_ref import Source
from resolute.prep.sources.targets import TargetSetting
from tests.support.cli import prep
from tests.support.manifests import read_joined
from tests.support.source_formats import jpeg, pack_parquet, pack_samples, pack_tar, pack_zip

PHOTOS = ["cat/1.jpg", "cat/2.JPEG", "dog/deep/3.png", "dog/4.jpg"]
OTHERS = ["cat/.hidden.jpg", ".git/a", "cat/._1.jpg", "dog/Thumbs.db", "cat/notes.txt", "dog/x.odd-suffix", "flat.jpg"]
UNSAFE = ["../x.jpg", "/a/x.jpg", "cat\\x.jpg"]
MAKERS: dict[str, tuple[Callable[[Path], dict[str, Any]], int]] = {}
DROP = TargetSetting(drop_unlabelled=True)


def source(kind: str, listed: int) -> Callable[[Callable[[Path], dict[str, Any]]], None]:
    """Adds a function that makes a source with so many entries, and returns the arguments of `open_source`."""

    def add(make: Callable[[Path], dict[str, Any]]) -> None:
        MAKERS[kind] = make, listed

    return add


def members(*more: str) -> list[tuple[str, bytes]]:
    return [(name, jpeg(i)) for i, name in enumerate([*PHOTOS, *OTHERS, *more])]


def make_folder(root: Path) -> Path:
    """All of `members`, a link to a folder, one to a photo, a broken one, a pipe and an empty class: 16 entries."""
    for name, data in members():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "empty").mkdir()
    (root / "dog/again").symlink_to(root / "cat")
    (root / "cat/link.jpg").symlink_to(root / "dog/4.jpg")
    (root / "cat/gone.jpg").symlink_to(root / "nowhere")
    (root / "cat/gone.txt").symlink_to(root / "nowhere")
    os.mkfifo(root / "dog/pipe.jpg")
    return root


@source("folders", 16)
def _(tmp: Path) -> dict[str, Any]:
    return {"src": make_folder(tmp / "p")}


@source("zip", 17)
def _(tmp: Path) -> dict[str, Any]:
    path = pack_zip(tmp / "p.zip", members("cat/", *UNSAFE, "dog/4.jpg/.."))
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("cat/link.jpg")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "4.jpg")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("cat/1.jpg", jpeg(1))
    return {"src": path, "kind": "archive"}


@source("tar", 17)
def _(tmp: Path) -> dict[str, Any]:
    return {"src": add_links(pack_tar(tmp / "p.tar", members(*UNSAFE, "cat/1.jpg"))), "kind": "archive"}


@source("tar.gz", 15)
def _(tmp: Path) -> dict[str, Any]:
    return {"src": pack_tar(tmp / "p.tar.gz", members(*UNSAFE, "cat/1.jpg"), "gz"), "kind": "archive"}


def add_links(path: Path) -> Path:
    """Adds a folder and two links."""
    with tarfile.open(path, "a") as tar:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE):
            info = tarfile.TarInfo("cat/link.jpg")
            info.type, info.linkname = kind, "cat/1.jpg"
            tar.addfile(info)
    return path


@source("archives", 22)
def _(tmp: Path) -> dict[str, Any]:
    for name in ("a", "b"):
        pack_zip(
            tmp / f"{name}.zip",
            [(f"part-{name}/{member}".replace(f"part-{name}/flat", "flat"), data) for member, data in members()],
        )
    return {"src": tmp / "*.zip"}


@source("flat archives", 3)
def _(tmp: Path) -> dict[str, Any]:
    pack_tar(tmp / "a.tar", [("1.jpg", jpeg(1)), ("notes.txt", b"")])
    pack_tar(tmp / "b.tar", [("1.jpg", jpeg(2))])
    return {"src": tmp / "*.tar"}


@source("webdataset", 13)
def _(tmp: Path) -> dict[str, Any]:
    samples: list[tuple[str, bytes, dict[str, bytes]]] = [
        ("0.jpg", jpeg(0), {"cls": b"0", "txt": b"a caption"}),
        ("1.5.jpg", jpeg(1), {"cls": b"1"}),
        ("1.6.jpg", jpeg(2), {"cls": b"1"}),
        ("2.jpg", jpeg(3), {"json": b"{}"}),  # unlabelled
        ("3.jpg", jpeg(4), {"json": b"["}),  # damaged
        ("4.npy", b"", {"cls": b"0"}),  # no image
        ("README", b"", {}),
        ("5.png", jpeg(5), {"jpg": jpeg(6), "cls": b"0"}),  # two images
        ("6.png", jpeg(7), {"cls": b"0"}),  # not the image that is meant
        ("../7.jpg", jpeg(8), {}),
        ("._8.jpg", jpeg(8), {}),
    ]
    return {"src": add_links(pack_samples(tmp / "p.tar", samples)), "target": DROP, "image": ("jpg",)}


@source("parquet", 5)
def _(tmp: Path) -> dict[str, Any]:
    rows = [(jpeg(i) if i != 2 else None, f"{i}.jpg", label) for i, label in enumerate((0, 1, 1, -1, 0))]
    return {"src": pack_parquet(tmp / "p.parquet", rows, ["a", "b"]), "target": DROP}


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(["image,label", *lines]) + "\n")
    return str(path)


ROWS = ["cat/1.jpg,a", "dog/4.jpg,b", "cat/2.JPEG,-1", "absent.jpg,a", "cat/1.jpg,a", "dog/4.jpg,", "none.jpg,"]


@source("table", 20)  # the 16 of the folder, two rows without a file, a row twice and one for a file twice
def _(tmp: Path) -> dict[str, Any]:
    return {"src": make_folder(tmp / "p"), "labels": write(tmp / "t.csv", *ROWS), "target": DROP}


@source("table of two folders", 16)
def _(tmp: Path) -> dict[str, Any]:
    make_folder(tmp / "p")
    (tmp / "q").mkdir()
    (tmp / "q" / "9.jpg").write_bytes(jpeg(9))
    labels = write(tmp / "t.csv", "cat/1.jpg,a", "dog/4.jpg,b", "9.jpg,a")
    return {"src": tmp / "p", "labels": labels, "elsewhere": str(tmp / "q")}


@source("table beside one of val", 15)
def _(tmp: Path) -> dict[str, Any]:
    labels, also = write(tmp / "t.csv", "cat/1.jpg,a", "dog/4.jpg,b"), write(tmp / "v.csv", "cat/2.JPEG,a")
    return {"src": make_folder(tmp / "p"), "labels": labels, "also": also}


@source("table of val in the same folder", 3)
def _(tmp: Path) -> dict[str, Any]:
    labels = write(tmp / "v.csv", "cat/1.jpg,a", "dog/4.jpg,b", "cat/2.JPEG,")
    return {"src": make_folder(tmp / "p"), "labels": labels, "only_rows": True, "setting": "VAL", "target": DROP}


@source("list", 6)
def _(tmp: Path) -> dict[str, Any]:
    make_folder(tmp / "p")
    rows = ["cat/1.jpg,a", "dog/4.jpg,b", "cat/2.JPEG,-1", "gone.jpg,a", "cat/1.jpg,a", "dog/deep/3.png,"]
    return {"src": write(tmp / "p" / "t.csv", *rows), "target": DROP}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_entry_is_yielded_or_counted_as_ignored(tmp_path: Path, work: Path, kind: str) -> None:
    make, listed = MAKERS[kind]
    options = make(tmp_path)
    opened: Source = open_source(str(options.pop("src")), scan_cache=work / "scan_cache", **options)
    for _ in range(2):  # the second time from the cache of scans
        yielded = sum(1 for _ in opened)
        assert (opened.listing.listed, yielded + sum(opened.listing.ignored.values())) == (listed, listed), (
            opened.listing.ignored
        )
        assert yielded
    photos = list_photos(opened, Database(work), "photos")
    assert (photos.listed, len(photos) + sum(photos.ignored.values())) == (listed, listed), photos.ignored


Photos = dict[str, bytes]


def pack_archives(tmp: Path, photos: Photos) -> list[object]:
    """Two archives that hold all photos each, and two other files."""
    for name in ("a", "b"):
        pack_zip(tmp / f"{name}.zip", [*photos.items(), (f"cat/bad-{name}.jpg", name.encode()), ("cat/x.txt", b"")])
    return ["--src", tmp / "*.zip"]


def write_folders(tmp: Path, photos: Photos) -> list[object]:
    """Two folders of each class that hold all its photos each, and two other files."""
    for name in ("a", "b"):
        for photo, data in {**photos, f"cat/bad-{name}.jpg": name.encode(), f"cat/{name}.txt": b""}.items():
            label, file = photo.split("/")
            (tmp / "p" / label / name).mkdir(parents=True, exist_ok=True)
            (tmp / "p" / label / name / file).write_bytes(data)
    return ["--src", tmp / "p", "--kind", "folders"]


def write_table(tmp: Path, photos: Photos) -> list[object]:
    """The folders, and their table."""
    write_folders(tmp, photos)
    files = sorted((tmp / "p").rglob("*.jpg"))
    rows = [f"{file.relative_to(tmp / 'p')},{file.parent.parent.name}" for file in files]
    return ["--src", tmp / "p", "--labels", write(tmp / "t.csv", *rows)]


def pack_webdataset(tmp: Path, photos: Photos) -> list[object]:
    """Two tars that hold all photos each, and a sample without an image."""
    (tmp / "w").mkdir()
    for name in ("a", "b"):
        files = {**photos, f"cat/bad-{name}.jpg": name.encode()}
        samples: list[Any] = [(photo, data, {"txt": photo[:3].encode()}) for photo, data in files.items()]
        pack_samples(tmp / "w" / f"{name}.tar", [*samples, ("cat/none.npy", b"", {"txt": b"cat"})])
    return ["--src", tmp / "w", "--kind", "webdataset"]


@pytest.mark.parametrize(
    ("make", "duplicates"),
    [
        (pack_archives, "keep"),
        (pack_archives, "drop"),
        (write_folders, "drop"),
        (write_table, "keep"),
        (pack_webdataset, "drop"),
    ],
)
def test_of_a_set_every_entry_is_stored_or_rejected_or_counted_as_ignored(
    tmp_path: Path,
    scene: Callable[..., Any],
    make: Callable[[Path, Photos], list[object]],
    duplicates: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    photos = {f"{c}/{i}.jpg": encoded(scene(i + 9 * (c == "dog"), 40, 40)) for c in ("cat", "dog") for i in range(4)}
    source, out = make(tmp_path, photos), tmp_path / "set"
    options = ["--out", out, "--res", 32, "--max-bad", 0.5, "--duplicates", duplicates, "--workers", 1]
    assert prep([*source, *options]) == 0
    manifest = read_joined(out)
    stored = sum(split["samples"] for split in manifest["splits"].values())
    rejected = len((out / "rejects.jsonl").read_text().splitlines())
    said = re.search(r"listed (\d+) = (\d+) stored \+ (\d+) rejected \+ (\d+) ignored", "".join(capsys.readouterr()))
    assert said is not None
    assert [*map(int, said.groups())] == [20, stored, rejected, 2 if duplicates == "keep" else 10]
    assert (stored, rejected) == (16 if duplicates == "keep" else 8, 2)


def encoded(pixels: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()
