"""The same photos in every source format of prep."""

from __future__ import annotations

import csv
import io
import json
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from resolute.prep.listing.database import Database
from resolute.prep.listing.list_photos import list_photos
from resolute.prep.listing.photos import Photos
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.fetch import fetch_many
from resolute.prep.sources.image_ref import Source
from resolute.prep.sources.reject import Reject

TREE = {
    "cat": ["1.jpg", "more/2.JPEG", "a b.png", "quo\"te's.jpg", "-dash.jpg"],
    "dog": ["1.jpg", "line\nbreak.jpg", "x.webp"],
    "c\u00e4t \u732b": ["\u00fc.jpg", "cat.jpg"],
}


def jpeg(number: int, kind: str = "JPEG") -> bytes:
    """A small image that differs for each number."""
    out = io.BytesIO()
    Image.new("RGB", (8, 8), (number * 7 % 256, number * 31 % 256, 90)).save(out, kind)
    return out.getvalue() + bytes(number % 5)  # why: sizes differ


def noise_photos(folder: Path, names: Iterable[str], first: int = 0) -> Path:
    """Photos of noise with these names in `folder`, all different; other ones for another `first`."""
    for seed, name in enumerate(names, first):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return folder


def make_tree(root: Path) -> dict[str, bytes]:
    """A folder of class folders; returns {name: bytes}, ascending by the name's bytes."""
    files: dict[str, bytes] = {}
    for label, names in TREE.items():
        for name in names:
            kind = {"png": "PNG", "webp": "WEBP"}.get(name[-3:], "WEBP" if name.endswith("webp") else "JPEG")
            files[f"{label}/{name}"] = jpeg(len(files), kind)
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return dict(sorted(files.items(), key=lambda item: item[0].encode()))


def files_in(files: dict[str, bytes], top: str) -> Iterable[tuple[str, bytes]]:
    """The files in an arbitrary order, below the folder `top`."""
    return [(f"{top}{name}", files[name]) for name in sorted(files, key=lambda name: name[::-1])]


def pack_zip(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for i, (name, data) in enumerate(files):
            archive.writestr(name, data, zipfile.ZIP_DEFLATED if i % 2 else zipfile.ZIP_STORED)
    return path


def pack_tar(path: Path, files: Iterable[tuple[str, bytes]], how: str = "") -> Path:
    mode: Any = f"w:{how}"
    with tarfile.open(path, mode) as archive:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def pack_table(path: Path, rows: Iterable[tuple[str, str]], header: tuple[str, str] = ("id", "breed")) -> Path:
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",").writerows([header, *rows])
    return path


def pack_samples(path: Path, samples: Iterable[tuple[str, bytes, dict[str, bytes]]]) -> Path:
    """`samples`: name of the image, its bytes, {suffix: content} of the other files of the sample."""
    members = []
    for name, data, other_files in samples:
        key = name.rpartition(".")[0]
        members += [(name, data), *((f"{key}.{suffix}", text) for suffix, text in other_files.items())]
    return pack_tar(path, members)


def pack_parquet(path: Path, rows: Sequence[tuple[bytes | None, str, int]], names: list[str] | None) -> Path:
    """Rows of image, path and label number, as `datasets` writes them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}
    about = {"info": {"features": features}}
    table = pa.table(
        {
            "image": pa.array([{"bytes": data, "path": name} for data, name, _ in rows]),
            "label": pa.array([label for _, _, label in rows], pa.int64()),
        }
    )
    if names is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps(about)})
    pq.write_table(table, path, row_group_size=2)
    return path


def list_source(work: Path, src: str | Path, **options: Any) -> Photos:
    work.mkdir(exist_ok=True)
    database = Database(Path(tempfile.mkdtemp(dir=work)))
    return list_photos(open_source(str(src), scan_cache=work / "scan_cache", **options), database, "photos")


def contents(photos: Photos) -> list[bytes | Reject | None]:
    """The bytes of all photos, by position."""
    return fetch_many([place for _, place in photos.places()])


def names(source: Source) -> list[str]:
    return [image.name for image in source]


def assert_same_images(got: Photos, files: dict[str, bytes]) -> None:
    """`got` holds exactly these files of class folders, in order, and their bytes are fetched unchanged."""
    classes = sorted({name.partition("/")[0] for name in files})
    assert got.names(range(len(got))) == list(files)
    assert got.classes == tuple(classes)
    assert [classes[n] for n in got.labels] == [name.partition("/")[0] for name in files]
    assert contents(got) == list(files.values())
    assert got.column("size_bytes").tolist() == [len(data) for data in files.values()]


def pack(tmp: Path, how: str, files: dict[str, bytes], top: str) -> Path:
    if how == "folder":
        return tmp / "photos"
    if how == "zip":
        return pack_zip(tmp / "p.zip", files_in(files, top))
    return pack_tar(tmp / f"p.{how}", files_in(files, top), how.partition(".")[2])
