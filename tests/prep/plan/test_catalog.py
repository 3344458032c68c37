"""A catalog is the source's images in one order, whatever order they come in, with flat memory."""

from __future__ import annotations

import os
import pickle
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from pipeline.errors import ResoluteError
from prep.plan import catalog as catalogs
from prep.plan import external_sort as runs
from prep.plan.catalog import Catalog, write_catalog
from prep.plan.classes import read_classes
from prep.sources.image_ref import ZIPPED, ByteRange, ImageRef


class Given:
    """A source that yields what it was given."""

    def __init__(
        self, found: Iterable[ImageRef], *, numbered: bool = False, names: Sequence[str] | None = None,
        root: str = "src",
    ) -> None:
        self.root, self.numbered, self.label_names = root, numbered, names
        self.copies = False
        self.ignored: Counter[str] = Counter(hidden=2)
        self._found = found

    def __iter__(self) -> Iterator[ImageRef]:
        return iter(self._found)


def some(count: int, seed: int = 0) -> list[ImageRef]:
    rng = random.Random(seed)
    names = {os.fsdecode(rng.randbytes(rng.randrange(1, 12)).replace(b"\0", b"/")) for _ in range(count)}
    return [
        ImageRef(name, f"class {rng.randrange(5)}", rng.randrange(99), rng.choice(["", "a.zip", "s3://b/c.tar"]),
              rng.randrange(1 << 40), rng.randrange(2), rng.choice([-1, 7]))
        for name in sorted(names, key=lambda name: (rng.random(), name))
    ]  # fmt: skip


def rows(catalog: Catalog) -> list[tuple[str, str, ByteRange]]:
    return [(catalog.name(i), catalog.classes[catalog.labels[i]], catalog.byte_range(i)) for i in range(len(catalog))]


def expected(found: Iterable[ImageRef]) -> list[tuple[str, str, ByteRange]]:
    """The slow way."""
    last = {one.name: one for one in found}
    return [
        (
            one.name,
            one.label,
            ByteRange(
                one.container or (one.name if one.name.startswith("/") else f"src/{one.name}"),
                one.offset, one.nbytes, one.packed, one.nbytes if one.size_bytes < 0 else one.size_bytes,
            ),
        )
        for one in sorted(last.values(), key=lambda one: os.fsencode(one.name))
    ]  # fmt: skip


@pytest.mark.parametrize("run_records", [1, 7, 100, 10_000])
@pytest.mark.parametrize("order", ["random", "ascending", "descending", "nearly"])
def test_any_order_and_any_run_size_give_the_sorted_catalog(tmp_path: Path, order: str, run_records: int) -> None:
    found = some(300 if run_records > 1 else 40)
    if order != "random":
        found.sort(key=lambda one: os.fsencode(one.name), reverse=order == "descending")
    if order == "nearly":
        found.append(found.pop(3))
    catalog = write_catalog(Given(found), tmp_path, run_records=run_records)
    assert rows(catalog) == expected(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.entries", "catalog.names"]
    assert catalog.ignored == {"hidden": 2}


def test_of_one_name_the_last_stays_but_not_with_two_classes(tmp_path: Path) -> None:
    images = [("b", "x", 1), ("a", "y", 2), ("b", "x", 3), ("c", "y", 4), ("b", "x", 5)]
    found = [ImageRef(*image) for image in images]
    for run_records in (1, 2, 100):
        catalog = write_catalog(Given(found), tmp_path, run_records=run_records)
        assert rows(catalog) == expected(found)
        assert catalog.ignored == {"hidden": 2, "duplicate names": 2}
    with pytest.raises(ResoluteError, match="b: belongs to two classes"):
        write_catalog(Given([*found, ImageRef("b", "y", 5)]), tmp_path)


@pytest.mark.parametrize("ascending", [True, False])
def test_memory_does_not_grow_with_the_number_of_images(
    tmp_path: Path, ascending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_BLOCK", 64)
    monkeypatch.setattr(catalogs, "_CHUNK", 1_000)

    def peak(count: int) -> int:
        order = range(count) if ascending else range(count - 1, -1, -1)
        source = Given(ImageRef(f"{i:09d}.jpg", str(i % 3), 1) for i in order)
        tracemalloc.start()
        try:
            catalog = write_catalog(source, tmp_path, run_records=2_000)
            catalog.by_class()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(10_000), peak(40_000)
    assert large - small < 1_500_000  # 30 000 objects would be some 9 MB; the merge holds a block of each run


def test_positions_are_found_by_name(tmp_path: Path) -> None:
    found = some(300)
    catalog = write_catalog(Given(found), tmp_path)
    for i in range(len(catalog)):
        assert catalog.find(catalog.name(i)) == i
    assert catalog.find("nobody") is None
    assert catalog.find("") is None
    assert catalog.find("\U0010ffff" * 9) is None


def test_absolute_names_and_urls_are_their_own_place(tmp_path: Path) -> None:
    found = [ImageRef("/abs/a.jpg", "x", 1), ImageRef("b.jpg", "y", 1), ImageRef("s3://c/d.jpg", "y", 1)]
    catalog = write_catalog(Given(found, root="/data/"), tmp_path)
    assert [catalog.byte_range(i).path for i in range(3)] == ["/abs/a.jpg", "/data/b.jpg", "s3://c/d.jpg"]
    assert pickle.loads(pickle.dumps(catalog.byte_range(0))) == catalog.byte_range(0)


def test_fingerprints_tell_what_matters(tmp_path: Path) -> None:
    base = [ImageRef("a/1", "a", 1), ImageRef("a/2", "a", 2), ImageRef("b/1", "b", 1)]

    def told(found: list[ImageRef]) -> dict[str, tuple[int, str]]:
        return write_catalog(Given(found), tmp_path).by_class()

    before = told(base)
    assert told(base[::-1]) == before
    assert told([*base[:2], ImageRef("b/1", "b", 99, "x.zip", 7, ZIPPED, 1)]) == before  # packed otherwise
    for changed in (
        [*base, ImageRef("b/2", "b", 1)],
        [*base[:2], ImageRef("b/1", "b", 2)],
        [*base[:2], ImageRef("b/9", "b", 1)],
    ):
        classes = told(changed)
        assert classes["a"] == before["a"]
        assert classes["b"] != before["b"]
    assert told([*base[:2], ImageRef("b/1", "c", 1)]).keys() != before.keys()


def two(*labels: str) -> list[ImageRef]:
    return [ImageRef(f"{i}.jpg", label, 1) for i, label in enumerate(labels)]


def test_classes_are_numbered_by_name_by_list_or_keep_their_numbers(tmp_path: Path) -> None:
    def numbers(source: Given, **options: object) -> tuple[tuple[str, ...], list[int]]:
        catalog = write_catalog(source, tmp_path, **options)  # type: ignore[arg-type]
        return catalog.classes, catalog.labels.tolist()

    assert numbers(Given(two("b", "B", "\u00e9", "b"))) == (("B", "b", "\u00e9"), [1, 0, 2, 1])
    assert numbers(Given(two("b", "a")), classes=("x", "b", "a")) == (("x", "b", "a"), [1, 2])
    assert numbers(Given(two("3", "1"), numbered=True)) == (("0", "1", "2", "3"), [3, 1])
    assert numbers(Given(two("2", "0"), numbered=True, names="xyz")) == (("x", "y", "z"), [2, 0])
    assert numbers(Given(two("2", "0"), numbered=True), classes="abc") == (("a", "b", "c"), [2, 0])
    assert numbers(Given(two("2", "0"), numbered=True, names="xyz"), classes="abc") == (("a", "b", "c"), [2, 0])
    assert numbers(Given(two("2", "0"), numbered=True, names="xyz"), classes="zyx") == (("z", "y", "x"), [0, 2])


@pytest.mark.parametrize(("source", "classes", "words"), [
    (Given([]), None, r"src: no classes, got no image with a class \(ignored: 2 hidden\).*class folders"),
    (Given(two("a", "a")), None, r"too few classes, got one class \(a\), expected at least two"),
    (Given(two("a", "b", "c")), ("a", "c"), "classes that C.txt lacks, got 1 such as b"),
    (Given(two("0", "5"), numbered=True), "abc", "class number out of range, got 5, expected 0 to 2 as C.txt names 3"),
    (Given(two("0", "3"), numbered=True, names="abc"), None, "got 3, expected 0 to 2 as this source names 3"),
    (Given(two("0", "-1"), numbered=True), None, "got -1, expected 0 to"),
    (Given(two("0", "1000000"), numbered=True), None, "got 1000000, expected 0 to 999999"),
    (Given(two("0", "1"), numbered=True, names="ab"), "bc", "classes that C.txt lacks, got 1 such as a"),
])  # fmt: skip
def test_classes_that_do_not_fit_are_told(
    tmp_path: Path, source: Given, classes: Sequence[str] | None, words: str
) -> None:
    with pytest.raises(ResoluteError, match=words):
        write_catalog(source, tmp_path, classes=classes, classes_file="C.txt")


def test_validation_takes_the_numbers_of_training(tmp_path: Path) -> None:
    train = write_catalog(Given(two("a", "b", "c")), tmp_path / "train")
    val = write_catalog(Given(two("c", "c"), root="val"), tmp_path / "val", training=train)
    assert (val.classes, val.labels.tolist()) == (("a", "b", "c"), [2, 2])
    with pytest.raises(
        ResoluteError, match="val: classes that training lacks, got 1 such as d, expected only those of src"
    ):
        write_catalog(Given(two("c", "d"), root="val"), tmp_path / "val", training=train)
    with pytest.raises(ResoluteError, match="got 3, expected 0 to 2 as src names 3 classes"):
        write_catalog(Given(two("0", "3"), numbered=True, root="val"), tmp_path / "val", training=train)
    with pytest.raises(ResoluteError, match="point VAL at"):
        write_catalog(Given([], root="val"), tmp_path / "val", training=train)


def test_class_lists_are_read_or_told(tmp_path: Path) -> None:
    path = tmp_path / "classes.txt"
    path.write_text("\ufeffcat\r\n golden retriever \n\u00fc\n\n")
    assert read_classes(path) == ("cat", "golden retriever", "\u00fc")
    for text, words in (
        ("", "line 1 is empty"),
        ("a\n\nb\n", "line 2 is empty"),
        ("a\nb\na\n", "duplicate class, got a in lines 1 and 3"),
    ):
        path.write_text(text)
        with pytest.raises(ResoluteError, match=words):
            read_classes(path)
    with pytest.raises(ResoluteError, match="cannot be read, got No such file"):
        read_classes(tmp_path / "gone")
