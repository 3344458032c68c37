"""Recognition of sources: the same photos give the same catalogue in any format."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.targets import TargetSetting
from tests.support.source_formats import (
    assert_same_images,
    contents,
    jpeg,
    list_source,
    make_tree,
    names,
    pack,
    pack_parquet,
    pack_samples,
    pack_table,
)


@pytest.mark.parametrize(
    ("how", "top"),
    [
        ("folder", ""),
        ("zip", ""),
        ("zip", "./data/photos/"),
        ("tar", "photos/"),
        ("tar", "./data/photos/"),
        ("tar.gz", "photos/"),
        ("tar.bz2", ""),
        ("tar.xz", "photos/"),
    ],
)
def test_a_folder_and_its_archives_give_the_same_catalog(tmp_path: Path, work: Path, how: str, top: str) -> None:
    files = make_tree(tmp_path / "photos")
    got = list_source(work, pack(tmp_path, how, files, top))
    assert_same_images(got, files)
    assert got.by_class() == list_source(work, tmp_path / "photos").by_class()
    assert not got.ignored


def test_links_to_folders_are_followed_once(tmp_path: Path, work: Path) -> None:
    make_tree(tmp_path / "p")
    (tmp_path / "p" / "dog").rename(tmp_path / "elsewhere")
    (tmp_path / "p" / "dog").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "p" / "cat" / "loop").symlink_to(tmp_path / "p")
    (tmp_path / "p" / "cat" / "gone.jpg").symlink_to(tmp_path / "nowhere")
    source = open_source(str(tmp_path / "p"), scan_cache=work)
    for _ in range(2):  # what was visited counts for one iteration
        sizes = {image.name: image.nbytes for image in source}
        assert len(sizes) == 11
        assert sizes["cat/gone.jpg"] == 0
        assert source.listing.ignored == {"links to a folder read already": 1}


def test_a_table_of_this_machine_may_name_any_file_as_a_list_may_and_a_remote_one_may_not(
    tmp_path: Path, work: Path
) -> None:
    files = ("photos/cat/1.jpg", "photos/dog/2.jpg", "photos/odd\\name.jpg", "secret/x.jpg", "linked/y.jpg")
    for number, name in enumerate(files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(jpeg(number))
    (tmp_path / "photos" / "more").symlink_to(tmp_path / "linked")
    outside = (f"{tmp_path}/secret/x.jpg", "../secret/x.jpg", f"file://{tmp_path}/linked/y.jpg", "s3://bucket/x.jpg")
    inside = ("./cat//1.jpg", f"{tmp_path}/photos/dog/2.jpg", "odd\\name.jpg", "more/y.jpg", "gone.jpg")
    rows = [(name, label) for names, label in ((outside, "a"), ((*inside, "cat\\1.jpg"), "b")) for name in names]
    below = ["cat/1.jpg", "dog/2.jpg", "odd\\name.jpg", "more/y.jpg", "gone.jpg"]
    elsewhere = [name.removeprefix("file://") for name in outside]
    table = pack_table(tmp_path / "labels.csv", rows)
    source = open_source(str(tmp_path / "photos"), labels=str(table), scan_cache=work)
    assert sorted(names(source)) == sorted([*below, *elsewhere, "cat\\1.jpg"])
    assert not source.listing.ignored
    got = list_source(work, tmp_path / "photos", labels=str(table))
    (at,) = got.find([f"{tmp_path}/secret/x.jpg"])
    assert fetch(dict(got.places())[at]) == (tmp_path / "secret" / "x.jpg").read_bytes()
    fsspec.filesystem("memory").pipe("/tables/labels.csv", table.read_bytes())
    remote = open_source(str(tmp_path / "photos"), labels="memory://tables/labels.csv", scan_cache=work)
    assert sorted(names(remote)) == sorted(below)
    assert remote.listing.ignored == {"unsafe names": len(outside) + 1}
    listed = open_source(str(pack_table(tmp_path / "photos" / "list.csv", rows)), scan_cache=work)
    assert set(elsewhere) < set(names(listed))
    assert not listed.listing.ignored


def test_names_in_a_store_or_a_remote_table_or_list_never_open_local_files(tmp_path: Path, work: Path) -> None:
    fs = fsspec.filesystem("memory")
    for name in ("cat/1.jpg", "dog/2.jpg", "cat/3::4.jpg"):
        fs.pipe(f"/folder/{name}", b"x")
    source = open_source("memory://folder", kind="folders", scan_cache=work)
    assert names(source) == ["cat/1.jpg", "dog/2.jpg"]
    assert source.listing.ignored == {"unsafe names": 1}
    chain = f"memory://x.jpg::file://{tmp_path}/x.jpg"
    unsafe = (chain, "simplecache::file:///x.jpg", "a::b.jpg", "/etc/x.jpg", "../x.jpg", "file:///x.jpg")
    rows = [("cat/1.jpg", "a"), ("dog/2.jpg", "b"), *((name, "a") for name in unsafe)]
    table = pack_table(tmp_path / "labels.csv", rows)
    fs.pipe("/folder/list.txt", "".join(f"{name} {label}\n" for name, label in rows).encode())
    for source, ignored in (
        (open_source("memory://folder", labels=str(table), scan_cache=work), 1 + len(unsafe)),
        (open_source("memory://folder/list.txt", scan_cache=work), len(unsafe)),
    ):
        assert names(source) == ["cat/1.jpg", "dog/2.jpg"]
        assert source.listing.ignored["unsafe names"] == ignored


def test_paths_inside_parquet_rows_are_never_opened(tmp_path: Path, work: Path) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(jpeg(1))
    rows = [(jpeg(2), str(secret), 0), (jpeg(3), "../../x.jpg", 1), (None, str(secret), 0)]
    source = open_source(str(pack_parquet(tmp_path / "x.parquet", rows, None)), scan_cache=work)
    assert names(source) == ["x.parquet/000000000.jpg", "x.parquet/000000001.jpg"]
    assert source.listing.ignored == {"rows without an image's bytes": 1}


def test_folders_of_splits_are_refused_with_the_settings_to_use(tmp_path: Path, work: Path) -> None:
    src = tmp_path / "ann's"
    make_tree(src / "train")
    make_tree(src / "val")
    with pytest.raises(ResoluteError, match="holds splits, got train and val") as error:
        list_source(work, src)
    settings = str(error.value).partition("; use ")[2].partition(", or ")[0]
    assert shlex.split(settings) == [f"SRC={src / 'train'}", f"VAL={src / 'val'}"]


@pytest.mark.parametrize("header", ["Image,Label", '"id","breed"', "id;breed", "id\tbreed"])
def test_common_table_formats_are_read(tmp_path: Path, work: Path, header: str) -> None:
    (tmp_path / "p").mkdir()
    for number, name in enumerate(("a.jpg", "b c.png", "extra.jpg")):
        (tmp_path / "p" / name).write_bytes(jpeg(number))
    mark = next(sign for sign in ",;\t" if sign in header)
    rows = [header, f'a{mark}"pug{mark} ""old"""', "", f"b c.png{mark}elk", f"gone{mark}elk", ""]
    (tmp_path / "l.csv").write_text("\ufeff" + "\r\n".join(rows))
    got = list_source(work, tmp_path / "p", labels=str(tmp_path / "l.csv"), target=TargetSetting("class"))
    assert got.names(range(3)) == ["a.jpg", "b c.png", "gone"]
    assert got.classes == ("elk", f'pug{mark} "old"')
    assert got.ignored == {"unlabelled": 1}
    assert str(contents(got)[2]).startswith("not there:")


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("id,breed\na,pug\n", None, "line 2 names several files, got a"),
        ("who,what\nx.jpg,pug\ny.jpg,elk\n", None, "2 of 2 names are not in "),
        ("who,what\nx,pug\ny,elk\n", None, "no column names photos, got who .*COLUMNS=image,label"),
        ("id,breed\n", "id,what", "has no column what, got id, breed"),
    ],
)
def test_invalid_tables_are_reported(tmp_path: Path, work: Path, text: str, columns: str | None, words: str) -> None:
    (tmp_path / "p").mkdir()
    for name in ("a.jpg", "a.png", "b.jpg"):
        (tmp_path / "p" / name).write_bytes(b"x")
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(ResoluteError, match=words):
        list_source(work, tmp_path / "p", labels=str(tmp_path / "l.csv"), columns=columns, max_bad=0.01)


def labelled_source(root: Path, form: str, labels: list[str | None]) -> dict[str, str]:
    """Photos 00.jpg, 01.jpg, … with these labels (None: empty) in a format of labels; returns what opens them."""
    root.mkdir()
    photos = [(f"{i:02d}.jpg", jpeg(i)) for i in range(len(labels))]
    if form in ("table.csv", "list.txt"):
        for name, data in photos:
            (root / name).write_bytes(data)
        rows = [(name, label or "") for (name, _), label in zip(photos, labels, strict=True)]
        if form == "table.csv":
            return {"src": str(root), "labels": str(pack_table(root / form, rows))}
        (root / form).write_text("".join(f"{name} {label}\n" for name, label in rows))
        return {"src": str(root / form)}
    if form == "parquet":
        cells = [
            (data, name, None if label is None else int(label))
            for (name, data), label in zip(photos, labels, strict=True)
        ]
        return {"src": str(pack_parquet(root / "p.parquet", cells, None))}  # type: ignore[arg-type]
    content, empty = {"cls": ("{}", ""), "json": ('{{"label": {}}}', "null")}[form]
    samples = [
        (name, data, {form: content.format(label or empty).encode()})
        for (name, data), label in zip(photos, labels, strict=True)
    ]
    return {"src": str(pack_samples(root / "x.tar", samples))}


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("table.csv", "line 14: 12.jpg"),
        ("list.txt", "line 13: 12.jpg"),
        ("parquet", "p.parquet/000000012"),
        ("cls", "12.jpg"),
        ("json", "12.jpg"),
    ],
)
def test_an_empty_label_and_minus_one_are_refused_with_the_row_or_left_out_in_every_format(
    tmp_path: Path, work: Path, form: str, row: str
) -> None:
    for unlabelled, got in (("-1", "-1"), (None, "nothing")):
        labels = [*(str(i) for i in range(12)), unlabelled, "10"]
        options = labelled_source(tmp_path / got, form, labels)
        with pytest.raises(ResoluteError, match=rf"{row}.* unlabelled, got {got}.*, expected .*UNLABELLED=drop"):
            list_source(work, **options)
        kept = list_source(work, **options, target=TargetSetting(drop_unlabelled=True))
        assert kept.ignored["unlabelled"] == 1
        assert [kept.classes[n] for n in kept.labels] == [label for label in labels if label != unlabelled]
        assert kept.classes == tuple(map(str, range(12))), "they are numbers, not sorted as text"


def test_minus_one_is_a_number_where_numbers_are_predicted(tmp_path: Path, work: Path) -> None:
    for form in ("table.csv", "parquet", "json"):
        options = labelled_source(tmp_path / form, form, ["-1", "0", "1", "-1"])
        got = list_source(work, **options, target=TargetSetting("values"))
        assert got.column("target[1]").tolist() == [-1, 0, 1, -1]


def test_unknown_sources_are_reported(tmp_path: Path, work: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"")
    cases: list[tuple[str, dict[str, Any], str]] = [
        (f"{tmp_path}/a.jpg", {}, r"not recognised, got a file named a\.jpg"),
        (f"{tmp_path}/*.tar", {}, "no such file, got no match of the pattern"),
        (f"{tmp_path}", {"kind": "x"}, "KIND: unknown, got x"),
        (f"{tmp_path}", {"columns": "a,b"}, "COLUMNS: has no effect"),
        ("nope://x/y", {}, r"nope://x/y: not understood, got 'Protocol not known: nope'"),
    ]
    for src, options, words in cases:
        with pytest.raises(ResoluteError, match=words):
            open_source(src, scan_cache=work, **options)
