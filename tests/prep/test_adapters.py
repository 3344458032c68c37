"""The same photos are the same catalog, however they are packed and wherever they lie."""

from __future__ import annotations

import os
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pipeline.errors import ResoluteError
from prep.adapters import open_source
from prep.catalog import Catalog, write_catalog
from prep.fetch import fetch_many
from prep.found import Source
from tests.prep.packed import files_in, jpeg, make_tree, pack_parquet, pack_samples, pack_table, pack_tar, pack_zip
from tests.s3 import s3_server  # noqa: F401


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def catalog(work: Path, src: str | Path, **options: Any) -> Catalog:
    return write_catalog(open_source(str(src), spool=work / "spool", **options), work / "catalog")


def names(source: Source) -> list[str]:
    return [found.name for found in source]


def same(got: Catalog, files: dict[str, bytes]) -> None:
    """`got` holds exactly these files of class folders, in order, and their bytes can be fetched."""
    classes = sorted({name.partition("/")[0] for name in files})
    assert [got.name(i) for i in range(len(got))] == list(files)
    assert got.classes == tuple(classes)
    assert [classes[n] for n in got.labels] == [name.partition("/")[0] for name in files]
    assert fetch_many([got.location(i) for i in range(len(got))]) == list(files.values())
    assert got.entries["size_bytes"].tolist() == [len(data) for data in files.values()]


def pack(tmp: Path, how: str, files: dict[str, bytes], top: str) -> Path:
    if how == "folder":
        return tmp / "photos"
    if how == "zip":
        return pack_zip(tmp / "p.zip", files_in(files, top))
    return pack_tar(tmp / f"p.{how}", files_in(files, top), how.partition(".")[2])


@pytest.mark.parametrize("top", ["", "photos/", "./data/photos/"])
@pytest.mark.parametrize("how", ["folder", "zip", "tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_a_folder_and_its_archives_are_one_catalog(tmp_path: Path, work: Path, how: str, top: str) -> None:
    files = make_tree(tmp_path / "photos")
    got = catalog(work, pack(tmp_path, how, files, top))
    same(got, files)
    assert got.fingerprint() == catalog(work, tmp_path / "photos").fingerprint()
    assert not got.ignored


def test_a_table_a_list_and_class_folders_agree(tmp_path: Path, work: Path) -> None:
    files = make_tree(tmp_path / "photos")
    by_folder = catalog(work, tmp_path / "photos").fingerprint()
    labels = pack_table(tmp_path / "labels.csv", [(name, name.partition("/")[0]) for name in reversed(files)])
    assert catalog(work, tmp_path / "photos", labels=str(labels)).fingerprint() == by_folder
    rows = pack_table(tmp_path / "photos" / "list.csv", [(name, name.partition("/")[0]) for name in files])
    assert catalog(work, rows).fingerprint() == by_folder


def test_names_that_are_no_text_come_through(tmp_path: Path, work: Path) -> None:
    odd = os.fsdecode(b"b\xff\n\xe4.jpg")
    files = {f"a/{odd}": jpeg(1), "b/\u00e4.jpg": jpeg(2)}
    for name, data in files.items():
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        (tmp_path / "photos" / name).write_bytes(data)
    same(catalog(work, tmp_path / "photos"), files)
    with tarfile.open(tmp_path / "p.tar", "w", errors="surrogateescape") as archive:
        archive.add(tmp_path / "photos", "photos")
    same(catalog(work, tmp_path / "p.tar"), files)


# ---------------------------------------------------------------- folders


def test_folders_yield_ascending_bytes_whatever_the_names(tmp_path: Path, work: Path) -> None:
    for name in ("a/x.jpg", "a.b/x.jpg", "a-b/x.jpg", "a/b/x.jpg", "a/b.jpg", "a/b-.jpg", "\u00e9/x.jpg", "Z/x.jpg"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(b"x")
    got = names(open_source(str(tmp_path / "p"), spool=work))
    assert len(got) == 8
    assert got == sorted(got, key=os.fsencode)


def test_what_is_no_image_is_counted_by_its_kind(tmp_path: Path, work: Path) -> None:
    make_tree(tmp_path / "p")
    for name in ("cat/notes.txt", "loose.jpg", "cat/.hidden.jpg", ".git/a.jpg", "cat/Thumbs.db", "__MACOSX/cat/1.jpg",
                 "empty/more/readme", "cat/._1.jpg", "cat/.DS_Store"):  # fmt: skip
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(b"x")
    os.mkfifo(tmp_path / "p" / "cat" / "pipe.jpg")
    source = open_source(str(tmp_path / "p"), spool=work)
    for _ in range(2):  # the counts are those of one iteration
        assert len(names(source)) == 10
        assert source.ignored == {
            "other files": 2, "outside class folders": 1, "hidden": 2, "junk": 4, "empty classes": 1,
            "pipes and devices": 1,
        }  # fmt: skip


def test_linked_folders_are_followed_but_not_for_ever(tmp_path: Path, work: Path) -> None:
    make_tree(tmp_path / "p")
    (tmp_path / "p" / "dog").rename(tmp_path / "elsewhere")
    (tmp_path / "p" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "p" / "cat" / "loop").symlink_to(tmp_path / "p")
    (tmp_path / "p" / "cat" / "gone.jpg").symlink_to(tmp_path / "nowhere")
    source = open_source(str(tmp_path / "p"), spool=work)
    found = {found.name: found.nbytes for found in source}
    assert len(found) == 11
    assert found["cat/gone.jpg"] == 0
    assert source.ignored == {"links to a folder above": 1}


def test_folders_of_splits_are_told(tmp_path: Path, work: Path) -> None:
    make_tree(tmp_path / "p" / "train")
    make_tree(tmp_path / "p" / "val")
    with pytest.raises(ResoluteError, match=r"holds splits, got train, val.*/train' VAL='.*/val'"):
        open_source(str(tmp_path / "p"), spool=work)
    pack_zip(tmp_path / "p.zip", [(f"p/{s}/{c}/1.jpg", b"x") for s in ("train", "test") for c in "ab"])
    with pytest.raises(ResoluteError, match="holds splits, got test, train"):
        catalog(work, tmp_path / "p.zip")


# ---------------------------------------------------------------- tables and lists


@pytest.mark.parametrize(
    "header", ["id,breed", "Image,Label", "file_name,class", '"id","breed"', "id;breed", "id\tbreed"]
)
def test_usual_tables_are_understood(tmp_path: Path, work: Path, header: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.jpg").write_bytes(jpeg(1))
    (tmp_path / "p" / "b c.png").write_bytes(jpeg(2, "PNG"))
    (tmp_path / "p" / "extra.jpg").write_bytes(jpeg(3))
    mark = next(sign for sign in ",;\t" if sign in header)
    (tmp_path / "l.csv").write_text(
        f'\ufeff{header}\r\na{mark}"pug{mark} ""old"""\r\n\r\nb c.png{mark}elk\r\ngone{mark}elk\r\n'
    )
    got = catalog(work, tmp_path / "p", labels=str(tmp_path / "l.csv"))
    assert [got.name(i) for i in range(3)] == ["a.jpg", "b c.png", "gone"]
    assert got.classes == ("elk", f'pug{mark} "old"')
    assert got.ignored == {"unlabelled": 1}
    assert [str(data)[:10] for data in fetch_many([got.location(2)])] == ["unreadable"]


def test_tables_that_do_not_fit_are_told(tmp_path: Path, work: Path) -> None:
    (tmp_path / "p").mkdir()
    for name in ("a.jpg", "a.png", "b.jpg"):
        (tmp_path / "p" / name).write_bytes(b"x")

    def told(text: str, columns: str | None = None) -> str:
        (tmp_path / "l.csv").write_text(text)
        with pytest.raises(ResoluteError) as error:
            catalog(work, tmp_path / "p", labels=str(tmp_path / "l.csv"), columns=columns)
        return str(error.value)

    assert "line 2 names several files, got a" in told("id,breed\na,pug\n")
    assert "a.jpg: belongs to two classes" in told("id,breed\na.jpg,pug\na.jpg,elk\n")
    assert "name the two with COLUMNS" in told("who,what\na.jpg,pug\n")
    assert "has no column what, got id, breed" in told("id,breed\n", "id,what")
    assert "COLUMNS: not two names" in told("id,breed\n", "id")
    assert "line 3 is incomplete" in told("id,breed\nb,pug\nb\n")
    assert "no classes" in told("id,breed\n")


@pytest.mark.parametrize("separator", [" ", "\t", ",", "   "])
def test_lists_keep_their_numbers(tmp_path: Path, work: Path, separator: str) -> None:
    (tmp_path / "p").mkdir()
    rows = [("p/a b.jpg", 10), ("./p/c,d.jpg", 2), (f"{tmp_path}/p/e.JPEG", 2)]
    for i, (name, _) in enumerate(rows):
        (tmp_path / name).write_bytes(jpeg(i))
    (tmp_path / "train.txt").write_text("".join(f"{name}{separator}{label}\n" for name, label in rows))
    got = catalog(work, tmp_path / "train.txt")
    assert got.classes == tuple(map(str, range(11)))
    assert {got.name(i): int(got.labels[i]) for i in range(3)} == {
        "p/a b.jpg": 10,
        "p/c,d.jpg": 2,
        f"{tmp_path}/p/e.JPEG": 2,
    }
    assert sorted(map(len, fetch_many([got.location(i) for i in range(3)]))) == sorted(len(jpeg(i)) for i in range(3))


def test_a_remote_list_cannot_name_files_of_this_machine(tmp_path: Path, work: Path) -> None:
    files = fsspec.filesystem("memory")
    lines = [
        "/etc/a.jpg 0",
        "../a.jpg 0",
        "file:///etc/a.jpg 0",
        "simplecache::file:///etc/a.jpg 1",
        "cat/1.jpg 0",
        "2.jpg 1",
    ]
    files.pipe("/remote/list.txt", "\n".join(lines).encode())
    source = open_source("memory://remote/list.txt", spool=work)
    assert names(source) == ["cat/1.jpg", "2.jpg"]
    assert source.ignored == {"unsafe names": 4}


# ---------------------------------------------------------------- archives


def test_nothing_in_an_archive_leads_out_of_it(tmp_path: Path, work: Path) -> None:
    good = {"a/1.jpg": jpeg(1), "b/2.jpg": jpeg(2)}
    bad = ["/a/x.jpg", "../x.jpg", "a/../../x.jpg", "a\\x.jpg", "C:/a/x.jpg"]
    members = [*good.items(), *((name, b"x") for name in bad)]
    with zipfile.ZipFile(pack_zip(tmp_path / "p.zip", members), "a") as archive:
        link = zipfile.ZipInfo("a/link.jpg")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    with tarfile.open(pack_tar(tmp_path / "p.tar", members), "a") as tar:
        for name, kind in (
            ("a/link.jpg", tarfile.SYMTYPE),
            ("a/hard.jpg", tarfile.LNKTYPE),
            ("a/dev.jpg", tarfile.CHRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a/1.jpg"
            tar.addfile(info)
    before = sorted(tmp_path.rglob("*.jpg"))
    for name, links in (("p.zip", 1), ("p.tar", 3)):
        got = catalog(work, tmp_path / name)
        same(got, good)
        assert got.ignored == {"unsafe names": 5, "links and devices": links}
    assert sorted(tmp_path.rglob("*.jpg")) == before


def test_broken_archives_are_told(tmp_path: Path, work: Path) -> None:
    files = {f"{c}/{i}.jpg": jpeg(i) for c in "ab" for i in range(20)}

    def told(path: Path) -> str:
        with pytest.raises(ResoluteError) as error:
            catalog(work, path)
        return str(error.value)

    whole = pack_tar(tmp_path / "p.tar", files.items()).read_bytes()
    (tmp_path / "p.tar").write_bytes(whole[:20_000])
    assert "p.tar" in told(tmp_path / "p.tar")
    (tmp_path / "p.tar").write_bytes(whole[:4_608] + b"!" * 512 + whole[5_120:])
    assert "damaged tar" in told(tmp_path / "p.tar")
    for how in ("gz", "bz2", "xz"):
        path = pack_tar(tmp_path / f"p.tar.{how}", files.items(), how)
        path.write_bytes(path.read_bytes()[:-30])
        assert f"p.tar.{how}: cannot be read" in told(path)
        assert not list((work / "spool").glob("*.part"))
    data = pack_zip(tmp_path / "p.zip", files.items()).read_bytes()
    (tmp_path / "p.zip").write_bytes(data[:-200])
    assert "not a zip archive, or cut short" in told(tmp_path / "p.zip")
    locked = bytearray(data)
    at = data.index(b"PK\1\2")
    locked[at + 8] |= 1
    (tmp_path / "p.zip").write_bytes(locked)
    assert "a/0.jpg is encrypted" in told(tmp_path / "p.zip")


def test_a_tar_for_each_class_is_understood(tmp_path: Path, work: Path) -> None:
    files = {f"n{c}/n{c}_{i}.JPEG": jpeg(i) for c in range(2) for i in range(3)}
    (tmp_path / "p").mkdir()
    for c in range(2):
        pack_tar(
            tmp_path / "p" / f"n{c}.tar",
            [(name[3:], data) for name, data in files.items() if name.startswith(f"n{c}/")],
        )
    same(catalog(work, tmp_path / "p"), files)


# ---------------------------------------------------------------- samples and Parquet


def test_samples_are_read_with_their_labels(tmp_path: Path, work: Path) -> None:
    (tmp_path / "p").mkdir()
    pack_samples(tmp_path / "p" / "x-000000.tar", [
        ("./k/000.jpg", jpeg(0), {"cls": b"0003\n"}),
        ("k/001.PNG", jpeg(1), {"json": b'{"caption": "x", "label": 1}'}),
        ("k/002.jpg", jpeg(2), {"json": b"7", "txt": b"a caption"}),
        ("k/003.jpg", jpeg(3), {"png": jpeg(4), "cls": b"1"}),
        ("k/004.jpg", jpeg(5), {"json": b"{}"}),
        ("k/005.json", b"{}", {"cls": b"1"}),
    ])  # fmt: skip
    pack_samples(tmp_path / "p" / "x-000001.tar", [("000.webp", jpeg(6), {"cls": b"0"})])
    expected = {
        "x-000000.tar/k/000.jpg": 3,
        "x-000000.tar/k/001.PNG": 1,
        "x-000000.tar/k/002.jpg": 7,
        "x-000001.tar/000.webp": 0,
    }
    for src in ("p", "p/*.tar", "p/x-{000000..000001}.tar"):
        got = catalog(work, tmp_path / src)
        assert {got.name(i): int(got.labels[i]) for i in range(len(got))} == expected
        assert got.classes == tuple(map(str, range(8)))
        assert got.ignored == {"samples with several images": 1, "unlabelled": 1, "samples without an image": 1}
        assert fetch_many([got.location(i) for i in range(4)]) == [jpeg(0), jpeg(1), jpeg(2), jpeg(6)]


def test_compressed_samples_are_unpacked_once(tmp_path: Path, work: Path) -> None:
    (tmp_path / "p").mkdir()
    for n in range(2):
        members = [("0.jpg", jpeg(n)), ("0.cls", b"%d" % n), ("1.jpg", jpeg(n + 2)), ("1.cls", b"0")]
        pack_tar(tmp_path / "p" / f"x{n}.tar.gz", members, "gz")
    got = catalog(work, tmp_path / "p")
    assert [got.name(i) for i in range(4)] == [f"x{n}.tar.gz/{i}.jpg" for n in range(2) for i in range(2)]
    assert got.labels.tolist() == [0, 0, 1, 0]
    assert fetch_many([got.location(i) for i in range(4)]) == [jpeg(0), jpeg(2), jpeg(1), jpeg(3)]


def test_samples_with_words_are_not_numbered(tmp_path: Path, work: Path) -> None:
    pack_samples(tmp_path / "x.tar", [("0.jpg", jpeg(0), {"cls": b"1"}), ("1.jpg", jpeg(1), {"txt": b"dog"})])
    got = catalog(work, tmp_path / "x.tar")
    assert got.classes == ("1", "dog")


def test_tars_that_webdataset_writes_are_understood(tmp_path: Path, work: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "w.tar")) as sink:
        for i in range(5):
            sink.write({"__key__": f"s{i:04d}", "jpg": jpeg(i), "cls": i % 2})
    got = catalog(work, tmp_path / "w.tar")
    assert got.labels.tolist() == [0, 1, 0, 1, 0]
    assert fetch_many([got.location(i) for i in range(5)]) == [jpeg(i) for i in range(5)]


def test_files_of_several_splits_or_of_one_name_are_told(tmp_path: Path, work: Path) -> None:
    for name in ("train-00.tar", "val-00.tar", "a/x.tar", "b/x.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pack_samples(tmp_path / name, [("0.jpg", jpeg(0), {"cls": b"1"})])
    with pytest.raises(ResoluteError, match=r"holds splits, got train, val.*SRC='.*/train-\*' VAL='.*/val-\*'"):
        open_source(str(tmp_path / "*.tar"), spool=work)
    with pytest.raises(ResoluteError, match=r"same name, got 2 called x\.tar"):
        open_source(str(tmp_path / "?/x.tar"), spool=work)


def test_parquet_from_the_hub_is_read_as_it_is(tmp_path: Path, work: Path) -> None:
    rows = [(jpeg(i), f"p/{i}.jpg", i % 3 - (i == 4) * 2) for i in range(7)]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    pack_parquet(tmp_path / "hub" / "data" / "train-0.parquet", rows, ["z", "a", "m"])
    for src in ("hub", "hub/data", "hub/data/*.parquet", "hub/data/train-0.parquet"):
        got = catalog(work, tmp_path / src)
        kept = [i for i in range(7) if i != 4]
        assert [got.name(i) for i in range(6)] == [f"train-0.parquet/{i:09d}.jpg" for i in kept]
        assert got.classes == ("z", "a", "m")  # numbers are kept, not sorted by name
        assert got.labels.tolist() == [i % 3 for i in kept]
        assert got.ignored == {"unlabelled": 1}
        assert fetch_many([got.location(i) for i in range(6)]) == [jpeg(i) for i in kept]
    (tmp_path / "sorted").mkdir()
    for label in "amz":
        (tmp_path / "sorted" / label).mkdir()
        (tmp_path / "sorted" / label / "1.jpg").write_bytes(jpeg(1))
    train = catalog(work, tmp_path / "sorted")
    val = write_catalog(open_source(str(tmp_path / "hub"), spool=work), work / "val", training=train)
    assert val.labels.tolist() == ["amz".index("zam"[i % 3]) for i in kept]  # by name where both have names


def test_parquet_of_other_makers_is_understood_or_told(tmp_path: Path, work: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"n": [1, 2], "photo": [jpeg(1), jpeg(2)], "breed": ["elk", "pug"], "thumb": [b"x", b"y"]})
    pq.write_table(table.drop_columns("thumb"), tmp_path / "a.parquet")
    assert catalog(work, tmp_path / "a.parquet").classes == ("elk", "pug")
    pq.write_table(table, tmp_path / "b.parquet")
    with pytest.raises(ResoluteError, match=r"not plain, got n, photo, breed, thumb.*COLUMNS"):
        catalog(work, tmp_path / "b.parquet")
    assert catalog(work, tmp_path / "b.parquet", columns="photo,n").classes == ("0", "1", "2")
    with pytest.raises(ResoluteError, match="column breed does not fit, got string"):
        catalog(work, tmp_path / "b.parquet", columns="breed,n")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ResoluteError, match=r"c\.parquet: cannot be read"):
        catalog(work, tmp_path / "c.parquet")


# ---------------------------------------------------------------- spool


def test_the_spool_is_used_again_until_the_file_changes_or_it_is_damaged(
    tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = make_tree(tmp_path / "photos")
    path = pack_tar(tmp_path / "p.tar.gz", files_in(files, ""), "gz")
    opened: list[str] = []
    from prep.adapters import archive

    real = archive.open_tar
    monkeypatch.setattr(archive, "open_tar", lambda path: opened.append(path) or real(path))
    same(catalog(work, path), files)
    same(catalog(work, path), files)
    assert len(opened) == 1
    (blob,) = (work / "spool").glob("*.blob")
    blob.write_bytes(blob.read_bytes()[:-1])
    same(catalog(work, path), files)
    assert len(opened) == 2
    del files["dog/1.jpg"]
    pack_tar(path, files_in(files, ""), "gz")
    os.utime(path, ns=(1, 1))
    same(catalog(work, path), files)
    assert len(opened) == 3
    assert len(list((work / "spool").iterdir())) == 3


# ---------------------------------------------------------------- where there is nothing, and elsewhere


def test_what_is_not_understood_is_told(tmp_path: Path, work: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    for src, words in (
        ("gone", "no such folder, got nothing there"),
        ("a.jpg", r"not understood, got a file called a\.jpg"),
        ("*.tar", "no such file, got nothing that fits"),
    ):
        with pytest.raises(ResoluteError, match=words):
            open_source(str(tmp_path / src), spool=work)
    with pytest.raises(ResoluteError, match="KIND: not known, got x"):
        open_source(str(tmp_path), kind="x", spool=work)
    with pytest.raises(ResoluteError, match="COLUMNS: without effect"):
        open_source(str(tmp_path), columns="a,b", spool=work)
    with pytest.raises(ResoluteError, match=r"nope://.*cannot be listed"):
        open_source("nope://x/y", spool=work)


def test_every_kind_is_read_from_an_object_store(tmp_path: Path, work: Path, s3_server: str) -> None:  # noqa: F811
    files = make_tree(tmp_path / "photos")
    del files["dog/line\nbreak.jpg"]  # why: moto, not S3, loses it
    (tmp_path / "photos" / "dog" / "line\nbreak.jpg").unlink()
    fs = fsspec.filesystem("s3")
    for name, data in files.items():
        fs.pipe(f"{s3_server}/photos/{name}", data)
    fs.pipe(f"{s3_server}/photos/empty/", b"")
    for how in ("zip", "tar", "tar.gz"):
        path = pack(tmp_path, how, files, "photos/")
        fs.pipe(f"{s3_server}/{path.name}", path.read_bytes())
    for src in ("photos", "p.zip", "p.tar", "p.tar.gz"):
        got = catalog(work, f"{s3_server}/{src}")
        same(got, files)
    samples = pack_samples(tmp_path / "x-0.tar", [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})])
    rows = pack_parquet(tmp_path / "x.parquet", [(jpeg(i), "", i % 2) for i in range(4)], None)
    table = pack_table(tmp_path / "list.csv", [(f"photos/{name}", name.partition("/")[0]) for name in files])
    for path in (samples, rows, table):
        fs.pipe(f"{s3_server}/{path.name}", path.read_bytes())
    assert len(catalog(work, f"{s3_server}/x-{{0..0}}.tar")) == 2
    assert len(catalog(work, f"{s3_server}/x-*.tar")) == 2
    assert len(catalog(work, f"{s3_server}/x.parquet")) == 4
    got = catalog(work, f"{s3_server}/list.csv")
    assert fetch_many([got.location(i) for i in range(len(got))]) == list(files.values())


class Ranged(SimpleHTTPRequestHandler):
    """Python's file server, and byte ranges where `ranges` is set."""

    ranges = True

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        asked = self.headers.get("Range")
        if not (self.ranges and asked and path.is_file()):
            return super().do_GET()
        data = path.read_bytes()
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first) : int(last) + 1 if last else None]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)
        return None


@pytest.fixture
def http(tmp_path: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranged, directory=str(tmp_path)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_archives_are_read_from_a_web_server(tmp_path: Path, work: Path, http: str) -> None:
    files = make_tree(tmp_path / "photos")
    for how in ("zip", "tar", "tar.gz"):
        same(catalog(work, f"{http}/{pack(tmp_path, how, files, '').name}"), files)
    pack_samples(tmp_path / "x-00.tar", [("0.jpg", jpeg(0), {"cls": b"0"}), ("1.jpg", jpeg(1), {"cls": b"1"})])
    assert len(catalog(work, f"{http}/x-{{00..00}}.tar")) == 2
    with pytest.raises(ResoluteError, match="cannot be read"):
        catalog(work, f"{http}/gone.zip")


def test_a_web_server_without_byte_ranges_is_told_where_they_are_needed(
    tmp_path: Path, work: Path, http: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranged, "ranges", False)
    files = make_tree(tmp_path / "photos")
    same(catalog(work, f"{http}/{pack(tmp_path, 'tar.gz', files, '').name}"), files)
    with pytest.raises(ResoluteError, match=r"p\.zip: its server sends whole files only"):
        same(catalog(work, f"{http}/{pack(tmp_path, 'zip', files, '').name}"), files)
