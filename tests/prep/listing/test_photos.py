"""The table of photos: those of a source in one order, independent of listing order."""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.prep.listing import list_photos as tables
from resolute.prep.listing.class_file import read_classes
from resolute.prep.listing.database import Database
from resolute.prep.listing.inputs import list_sources
from resolute.prep.listing.list_photos import list_photos
from resolute.prep.listing.photos import Photos
from resolute.prep.settings import Settings
from resolute.prep.sources.image_ref import ZIPPED, ByteRange, ImageRef, Label, Listing


class ListedSource:
    """A source that yields a list of images."""

    def __init__(
        self,
        images: Iterable[ImageRef],
        *,
        numbered: bool = False,
        names: Sequence[str] | None = None,
        root: str = "src",
    ) -> None:
        self.root = root
        self.unpacks = False
        self.files: Sequence[str] = ()
        self.listing = Listing(ignored=Counter(hidden=2), numbered=numbered, label_names=names)
        self._images = images

    def __iter__(self) -> Iterator[ImageRef]:
        return iter(self._images)


def random_images(count: int, seed: int = 0) -> list[ImageRef]:
    rng = random.Random(seed)
    names = {os.fsdecode(rng.randbytes(rng.randrange(1, 12)).replace(b"\0", b"/")) for _ in range(count)}
    return [
        ImageRef(
            name,
            f"class {rng.randrange(5)}",
            rng.randrange(99),
            rng.choice(["", "s3://b/a.zip", "s3://b/c.tar"]),
            rng.randrange(1 << 40),
            rng.randrange(2),
            rng.choice([-1, 7]),
        )
        for name in sorted(names, key=lambda name: (rng.random(), name))
    ]


def listed(tmp_path: Path, source: ListedSource, **options: Any) -> Photos:
    return list_photos(source, Database(Path(tempfile.mkdtemp(dir=tmp_path))), "photos", **options)


def rows(photos: Photos) -> list[tuple[str, str, ByteRange]]:
    classes = [photos.classes[label] for label in photos.labels]
    return [(photos.name(i), classes[i], place) for i, place in photos.places()]


def expected(images: Iterable[ImageRef]) -> list[tuple[str, Label, ByteRange]]:
    """The slow oracle."""
    last = {image.name: image for image in images}
    return [
        (
            image.name,
            image.label,
            ByteRange(
                image.container or (image.name if image.name.startswith("/") else f"src/{image.name}"),
                image.offset,
                image.nbytes,
                image.stored_as,
                image.nbytes if image.size_bytes < 0 else image.size_bytes,
            ),
        )
        for image in sorted(last.values(), key=lambda image: os.fsencode(image.name))
    ]


@pytest.mark.parametrize(("order", "block"), [("random", 1), ("nearly ascending", 7)])
def test_the_table_is_sorted_for_any_listing_order_and_size_of_blocks(
    tmp_path: Path, order: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "_BLOCK", block)
    images = random_images(300 if block > 1 else 40)
    if order == "nearly ascending":
        images.sort(key=lambda image: os.fsencode(image.name))
        images.append(images.pop(3))
    photos = listed(tmp_path, ListedSource(images))
    assert rows(photos) == expected(images)
    assert photos.ignored == {"hidden": 2}


def test_the_last_of_duplicate_names_is_kept_and_two_classes_are_an_error(tmp_path: Path) -> None:
    rows_in = [("b", "x", 1), ("a", "y", 2), ("b", "x", 3), ("c", "y", 4), ("b", "x", 5)]
    images = [ImageRef(*row) for row in rows_in]
    photos = listed(tmp_path, ListedSource(images))
    assert rows(photos) == expected(images)
    assert photos.ignored == {"hidden": 2, "duplicate names": 2}
    assert photos.column("position").tolist() == [0, 1, 2]
    with pytest.raises(ResoluteError, match="b: belongs to two classes"):
        listed(tmp_path, ListedSource([*images, ImageRef("b", "y", 5)]))


def test_credentials_are_in_no_name_and_tell_two_photos_apart(tmp_path: Path) -> None:
    urls = ["https://u:pw@h/a.jpg", "https://h/b.jpg?token=2", "https://h/b.jpg?token=1"]
    photos = listed(tmp_path, ListedSource([ImageRef(url, "xy"[i % 2], 1) for i, url in enumerate(urls)], root="/"))
    assert photos.names(range(3)) == ["https://h/b.jpg?token=***", "https://h/b.jpg?token=***", "https://h/a.jpg"]
    assert [place.path for _, place in photos.places()] == sorted(urls)
    assert photos.path_with_credentials() in urls


def test_class_fingerprints_depend_on_names_sizes_and_classes_only(tmp_path: Path) -> None:
    base = [ImageRef("a/1", "a", 1), ImageRef("a/2", "a", 2), ImageRef("b/1", "b", 1)]

    def fingerprints(images: list[ImageRef]) -> dict[str, tuple[int, str]]:
        return listed(tmp_path, ListedSource(images)).by_class()

    before = fingerprints(base)
    assert fingerprints(base[::-1]) == before
    archived = ImageRef("b/1", "b", 99, "s3://b/x.zip", 7, ZIPPED, 1)
    assert fingerprints([*base[:2], archived]) == before
    for changed in (
        [*base, ImageRef("b/2", "b", 1)],
        [*base[:2], ImageRef("b/1", "b", 2)],
        [*base[:2], ImageRef("b/9", "b", 1)],
    ):
        classes = fingerprints(changed)
        assert classes["a"] == before["a"]
        assert classes["b"] != before["b"]
    assert fingerprints([*base[:2], ImageRef("b/1", "c", 1)]).keys() != before.keys()


def labelled(*labels: str) -> list[ImageRef]:
    return [ImageRef(f"{i}.jpg", label, 1) for i, label in enumerate(labels)]


def test_classes_are_numbered_by_name_or_list_or_keep_numeric_labels(tmp_path: Path) -> None:
    def numbers(source: ListedSource, **options: Any) -> tuple[tuple[str, ...], list[int]]:
        photos = listed(tmp_path, source, **options)
        return photos.classes, photos.labels.tolist()

    assert numbers(ListedSource(labelled("b", "B", "\u00e9", "b"))) == (("B", "b", "\u00e9"), [1, 0, 2, 1])
    assert numbers(ListedSource(labelled("b", "a")), classes=("x", "b", "a")) == (("x", "b", "a"), [1, 2])
    assert numbers(ListedSource(labelled("3", "1"), numbered=True)) == (("0", "1", "2", "3"), [3, 1])
    assert numbers(ListedSource(labelled("2", "0"), numbered=True, names="xyz")) == (("x", "y", "z"), [2, 0])
    named = ListedSource(labelled("2", "0"), numbered=True, names="xyz")
    assert numbers(named, classes="abc") == (("a", "b", "c"), [2, 0])
    assert numbers(named, classes="zyx") == (("z", "y", "x"), [0, 2])


@pytest.mark.parametrize(
    ("labels", "options", "classes", "words"),
    [
        ("", {}, None, r"src: no classes, got no image with a class \(ignored: 2 hidden\).*class folders"),
        ("aa", {}, None, r"too few classes, got one class \(a\), expected at least two"),
        ("abc", {}, ("a", "c"), "classes that C.txt lacks, got 1 such as b"),
        ("05", {"numbered": True}, "abc", "class number out of range, got 5, expected 0 to 2 as C.txt names 3"),
        (["0", "1000000"], {"numbered": True}, None, "got 1000000, expected 0 to 999999"),
    ],
)
def test_invalid_classes_are_reported(
    tmp_path: Path, labels: Sequence[str], options: dict[str, Any], classes: Sequence[str] | None, words: str
) -> None:
    source = ListedSource(labelled(*labels), **options)
    with pytest.raises(ResoluteError, match=words):
        listed(tmp_path, source, classes=classes, classes_file="C.txt")


def test_validation_uses_the_class_numbers_of_training(tmp_path: Path) -> None:
    train = listed(tmp_path, ListedSource(labelled("a", "b", "c")))
    val = listed(tmp_path, ListedSource(labelled("c", "c"), root="val"), training=train)
    assert (val.classes, val.labels.tolist()) == (("a", "b", "c"), [2, 2])
    with pytest.raises(
        ResoluteError, match="val: classes that training lacks, got 1 such as 'd', expected only those of src"
    ):
        listed(tmp_path, ListedSource(labelled("c", "d"), root="val"), training=train)


def test_class_lists_are_read_and_invalid_ones_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("\ufeffcat\r\n golden retriever \n\u00fc\n\n")
    assert read_classes(path).names == ("cat", "golden retriever", "\u00fc")
    for text, words in (("a\n\nb\n", "line 2 is empty"), ("a\nb\na\n", "duplicate class, got a in lines 1 and 3")):
        path.write_text(text)
        with pytest.raises(ResoluteError, match=words):
            read_classes(path)


def list_of(path: Path, rows: Iterable[tuple[str, str]]) -> str:
    """A list of photos and labels, beside which the photos lie."""
    for name, _ in rows:
        (path.parent / name).parent.mkdir(parents=True, exist_ok=True)
        (path.parent / name).write_bytes(name.encode())
    path.write_text("".join(f"{name} {label}\n" for name, label in rows))
    return str(path)


def split_classes(tmp_path: Path, **options: Any) -> dict[str, dict[str, list[str]]]:
    """{split: {photo: names of its classes}} of the sources that the options of `Settings` name."""
    settings = Settings(out=str(tmp_path / "out"), res=(32,), **options)
    sources, _ = list_sources(settings, Database(Path(tempfile.mkdtemp(dir=tmp_path))), tmp_path / "cache")
    found: dict[str, dict[str, list[str]]] = {}
    for split, each in sources.items():
        assert each.classes == sources["train"].classes
        numbers = "target" if each.target.kind == "class" else "unnest(target)"
        rows = each.database.run(f"SELECT position, {numbers} FROM {each.rows}")
        found[split] = {each.name(position): [] for position, _ in rows}
        for position, number in rows:
            found[split][each.name(position)].append(each.classes[number])
    return found


def test_numbers_in_a_validation_list_are_names_where_the_class_folders_are_numbers(tmp_path: Path) -> None:
    for label in range(12):
        (tmp_path / "train" / str(label)).mkdir(parents=True)
        for name in ("t.jpg", "u.jpg"):
            (tmp_path / "train" / str(label) / name).write_bytes(b"%d" % label)
    val = list_of(tmp_path / "val" / "val.txt", [(f"v{label}.jpg", str(label)) for label in (10, 2, 11, 0)])
    found = split_classes(tmp_path, src=str(tmp_path / "train"), val=val)
    assert found["val"] == {"v10.jpg": ["10"], "v2.jpg": ["2"], "v11.jpg": ["11"], "v0.jpg": ["0"]}
    assert found["train"]["10/t.jpg"] == ["10"]
    list_of(tmp_path / "val" / "val.txt", [("v12.jpg", "12")])
    with pytest.raises(ResoluteError, match="classes that training lacks, got 1 such as '12' in line 1"):
        split_classes(tmp_path, src=str(tmp_path / "train"), val=val)


@pytest.mark.parametrize(("odd", "where", "sign"), [("odd", "shared table", "|"), ("012", "lists", "")])
def test_an_odd_label_of_the_training_part_leaves_the_classes_of_the_validation_part_as_written(
    tmp_path: Path, odd: str, where: str, sign: str
) -> None:
    def cell(label: int) -> str:  # alone, or a list of two labels
        return f"{label}{sign}{(label + 1) % 12}" if sign else str(label)

    train = [(f"t{label}.jpg", cell(label)) for label in range(12)] + [("odd.jpg", odd)]
    val = [(f"v{label}.jpg", cell(label)) for label in (2, 10, 11)]
    src, own = list_of(tmp_path / "train" / "t.txt", train), list_of(tmp_path / "val" / "v.txt", val)
    options = {"target": "labels:bar" if sign else "class", "src": src, "val": own}
    if where == "shared table":
        table = tmp_path / "labels.csv"
        table.write_text("".join(f"{name},{label}\n" for name, label in [("id", "label"), *train, *val]))
        options |= {"src": str(tmp_path / "train"), "val": str(tmp_path / "val"), "labels": str(table)}
    found = split_classes(tmp_path, **options)
    assert {name: sorted(labels) for name, labels in found["val"].items()} == {
        name: sorted(label.split("|")) for name, label in val
    }
    assert found["train"]["odd.jpg"] == [odd]
