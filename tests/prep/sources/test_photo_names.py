"""Names as tables write them are found, matched by form, or explained."""

from __future__ import annotations

import json
import tarfile
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from resolute.errors import ResoluteError
from resolute.prep.sources import label_file
from resolute.prep.sources.detect import open_source
from resolute.prep.sources.filesystem import Entry
from resolute.prep.sources.image_ref import MISSING
from resolute.prep.sources.tables.photo_names import AmbiguousName, NameIndex
from tests.support.manifests import read_joined
from tests.support.source_formats import jpeg

Prep = Callable[..., Any]


def test_paths_win_over_own_names_and_names_of_several_photos_are_ambiguous() -> None:
    index = NameIndex(["1.jpg", "a/1.jpg", "a/2.jpg", "b/2.jpg", "c/3.png"])
    assert index.find("1.jpg") == "1.jpg"
    assert index.find("a//1.jpg") == index.find("a/1") == "a/1.jpg"
    assert index.find("3.png") == index.find("3") == "c/3.png"
    assert index.find("4") is None
    for name in ("2.jpg", "2"):
        with pytest.raises(AmbiguousName):
            index.find(name)


@pytest.mark.parametrize(
    ("photo", "written", "differs"),
    [
        ("a/IMG_1.jpg", "a/img_1.jpg", ("upper and lower case",)),
        ("007.jpg", "7.jpg", ("leading zeros",)),
        ("007.jpg", "7", ("leading zeros",)),
        ("x_01_002.jpg", "x_1_2.jpg", ("leading zeros",)),
        ("1.jpg", "1.tif", ("the suffix",)),
        ("0/1.jpg", "Train/0/1.jpg", ("a folder in front",)),
        ("1.jpg", "images/train/1.jpg", ("a folder in front",)),
        ("IMG_1.jpg", "img_1.png", ("upper and lower case", "the suffix")),
        ("0.png", "0.0", ("a .0 at the end",)),
        ("a b.jpg", "a%20b.jpg", ("signs written as %20 and the like",)),
        ("Cat/1.jpg", "cat/1.jpg", ("upper and lower case",)),
        ("1.jpg", "2.jpg", None),
    ],
)
def test_the_difference_to_a_similar_name_is_described(
    photo: str, written: str, differs: tuple[str, ...] | None
) -> None:
    index = NameIndex([photo, "other.jpg"])
    assert index.same_form(written) is None
    assert index.closest(written) == (None if differs is None else (photo, differs))


class Case:
    """A folder `photos` and a table beside it; `read` gives {photo: label} of the photos that are there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.photos = folder, folder / "photos"

    def write(self, *names: str) -> None:
        for number, name in enumerate(names):
            path = self.photos / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(number))

    def read(self, rows: dict[str, str], *, as_list: bool = False, max_bad: float = 0.01) -> Mapping[str, object]:
        text = "image,label\n" + "".join(f"{name},{label}\n" for name, label in rows.items())
        table = (self.photos if as_list else self.folder) / "l.csv"
        table.write_text(text)
        if as_list:
            source = open_source(str(table), scan_cache=self.folder / "work", max_bad=max_bad)
        else:
            source = open_source(str(self.photos), labels=str(table), scan_cache=self.folder / "work", max_bad=max_bad)
        got = {image.name: image.label for image in source if image.stored_as != MISSING}
        self.about = source.listing.target.about
        return got


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


NFC, NFD = (unicodedata.normalize(form, "mü/é1.jpg") for form in ("NFC", "NFD"))


@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    ("photo", "written", "said"),
    [
        (NFD, NFC, "the Unicode form"),
        (NFC, NFD, "the Unicode form"),
        ("1.JPG", "1.jpg", "the case of the suffix"),
        ("a/1.jpg", "/a/1.jpg", "a slash at the beginning"),
        ("a/1.jpg", "a\\1.jpg", "backslashes"),
    ],
)
def test_names_that_differ_in_form_alone_are_matched_and_that_is_said(
    case: Case, photo: str, written: str, said: str, as_list: bool
) -> None:
    case.write(photo, "x.jpg", "y.jpg")
    assert case.read({written: "a", "x.jpg": "b", "y.jpg": "a"}, as_list=as_list) == {
        photo: "a",
        "x.jpg": "b",
        "y.jpg": "a",
    }
    assert any("1 name matched" in line and said in line for line in case.about)


def test_other_forms_of_names_in_a_list_are_found_at_once_and_each_folder_is_listed_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    case.write(*(f"{'ab'[i % 2]}/{i}.JPG" for i in range(20)))
    listed: list[str] = []
    list_folder = label_file.list_folder

    def counted(path: str) -> list[Entry]:
        listed.append(path)
        return list_folder(path)

    monkeypatch.setattr(label_file, "list_folder", counted)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waited for storage that answers"))
    rows = {f"/{'ab'[i % 2]}/{i}.jpg": "xy"[i % 2] for i in range(20)}
    assert len(case.read(rows, as_list=True)) == 20
    assert Counter(listed) == {f"{case.photos}{folder}": 1 for folder in ("", "/a", "/b")}


def test_two_names_are_never_matched_to_one_photo(case: Case) -> None:
    case.write("1.JPG", "x.jpg", "y.jpg")
    with pytest.raises(ResoluteError, match="2 of 4 names are not in"):
        case.read({"1.jpg": "a", "1.Jpg": "b", "x.jpg": "b", "y.jpg": "a"})
    assert case.read({"1.jpg": "a", "1.JPG": "b", "x.jpg": "b", "y.jpg": "a"}, max_bad=0.5)["1.JPG"] == "b"
    case.write("1.jpg", "2.JPG", "2.jpg", "x.jpg")
    assert case.read({"2.Jpg": "a", "1.jpg": "a", "x.jpg": "b"}, max_bad=0.5) == {"1.jpg": "a", "x.jpg": "b"}


def test_names_may_be_relative_to_a_folder_above_or_to_the_table(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.write("a/1.jpg", "b/1.jpg")
    want = {"a/1.jpg": "x", "b/1.jpg": "y"}
    assert case.read({"photos/a/1.jpg": "x", "photos/b/1.jpg": "y"}) == want
    assert case.read({f"{case.photos}/a/1.jpg": "x", f"{case.folder.name}/photos/b/1.jpg": "y"}) == want
    monkeypatch.chdir(case.photos / "a")
    assert case.read({"../a/1.jpg": "x", "../../photos/b/1.jpg": "y"}) == want


@pytest.mark.slow
@pytest.mark.parametrize("as_list", [False, True])
@pytest.mark.parametrize(
    ("photo", "written", "words"),
    [
        ("a/00{}.jpg", "a/{}.jpg", r"got 'a/\d.jpg' in line 2, expected 'a/00\d.jpg' \(difference: leading zeros\)"),
        ("a/IMG_{}.jpg", "a/img_{}.jpg", r"\(difference: upper and lower case\)"),
        ("a/{}.jpg", "a/{}.png", r"\(difference: the suffix\)"),
        ("a/{}.jpg", "Train/a/{}.jpg", r"\(difference: a folder in front\)"),
        ("a/{}.jpg", "a/zzz{}.jpg", "expected names such as 'a/0.jpg'"),
    ],
)
def test_names_that_are_not_there_are_explained(
    case: Case, photo: str, written: str, words: str, as_list: bool
) -> None:
    case.write(*(photo.format(i) for i in range(4)))
    if as_list and "front" in words:
        words = "there is no folder"
    with pytest.raises(ResoluteError, match=words) as error:
        case.read({written.format(i): "ab"[i % 2] for i in range(4)}, as_list=as_list)
    assert "mount" not in str(error.value)
    assert "max-bad" not in str(error.value).lower().replace("_", "-")


def test_the_folder_to_which_names_are_relative_is_named(case: Case) -> None:
    case.write("train/1.jpg", "val/2.jpg")
    table = case.folder / "l.csv"
    table.write_text("image,label\nval/2.jpg,a\nval/2.jpg,a\n")
    source = open_source(str(case.photos / "train"), labels=str(table), scan_cache=case.folder / "work", max_bad=0.01)
    with pytest.raises(ResoluteError, match=rf"relative to another folder, {case.photos}; use SRC={case.photos}$"):
        list(source)


def test_a_few_photos_that_are_not_there_become_rejects(case: Case) -> None:
    case.write("1.jpg", "2.jpg", "3.jpg")
    rows = {"1.jpg": "a", "2.jpg": "b", "3.jpg": "a", "gone.jpg": "b"}
    assert len(case.read(rows)) == 3
    with pytest.raises(ResoluteError, match="1 of 4 names are not in"):
        case.read(rows, max_bad=0)


def test_a_row_without_the_name_of_an_image_file_is_refused_where_all_others_have_one(case: Case) -> None:
    case.write(*(f"{i}.jpg" for i in range(20)))
    rows = {f"{i}.jpg": "ab"[i % 2] for i in range(20)}
    with pytest.raises(ResoluteError, match="line 22 names no photo, got 'total', expected the name of an image file"):
        case.read({**rows, "total": "c"}, max_bad=0.5)


def photos_of(prepared: Path) -> dict[str, dict[str, str]]:
    """{split: {photo: class}} of a set."""
    classes = read_joined(prepared)["classes"]
    out: dict[str, dict[str, str]] = {}
    for split in ("train", "val"):
        rows = (prepared / "index" / f"{split}.sources.jsonl").read_text().splitlines()
        labels: dict[str, str] = {}
        for tar in sorted((prepared / "32").glob(f"{split}-*.tar")):
            with tarfile.open(tar) as members:
                for member in members:
                    if member.name.endswith(".cls"):
                        content = members.extractfile(member)
                        assert content is not None
                        labels[member.name[:-4]] = classes[int(content.read())]
        out[split] = dict(zip(map(json.loads, rows), labels.values(), strict=True))
    return out


def test_two_tables_may_divide_the_photos_of_one_folder(case: Case, prep: Prep) -> None:
    case.write(*(f"{i:03d}.jpg" for i in range(12)))
    (case.folder / "trainval.txt").write_text("".join(f"{i:03d} {'ab'[i % 2]} 1 1\n" for i in range(8)))
    (case.folder / "test.txt").write_text("".join(f"{i:03d} {'ab'[i % 2]} 1 1\n" for i in range(8, 11)))
    words = ("--src", case.photos, "--out", case.folder / "s", "--res", "32", "--columns", "0,1")
    tables = ("--labels", case.folder / "trainval.txt", "--val-labels", case.folder / "test.txt")
    ran = prep(*words, *tables)
    assert ran.status == 0, ran.err
    got = photos_of(case.folder / "s")
    assert got["train"] == {f"{i:03d}.jpg": "ab"[i % 2] for i in range(8)}
    assert got["val"] == {f"{i:03d}.jpg": "ab"[i % 2] for i in range(8, 11)}
    assert "ignored: 1 unlabelled" in ran.out
    assert "already there" in prep(*words, *tables).out
    ran = prep("--src", case.photos, "--out", case.folder / "t", "--val-labels", case.folder / "test.txt")
    assert ran.status == 2
    assert "set VAL to their folder, or LABELS" in ran.err


def test_a_table_may_label_the_validation_photos_of_class_folders(case: Case, prep: Prep) -> None:
    case.write(*(f"train/{'ab'[i % 2]}/images/{i}.jpg" for i in range(6)), *(f"val/images/v{i}.jpg" for i in range(4)))
    table = case.photos / "val" / "val_annotations.txt"
    table.write_text("".join(f"v{i}.jpg\t{'ab'[i // 2]}\t0\t{i}\t9\n" for i in range(4)))
    words = ("--src", case.photos / "train", "--val", case.photos / "val" / "images", "--res", "32")
    ran = prep(*words, "--val-labels", table, "--out", case.folder / "s")
    assert ran.status == 0, ran.err
    assert photos_of(case.folder / "s")["val"] == {f"v{i}.jpg": "ab"[i // 2] for i in range(4)}
    ran = prep(*words, "--val-labels", table, "--columns", "0,1", "--out", case.folder / "t")
    assert photos_of(case.folder / "t") == photos_of(case.folder / "s")


@pytest.mark.parametrize(
    ("lines", "val"),
    [
        (["a/2", "b/5"], {"a/2.jpg", "b/5.jpg"}),
        (["photos/a/2.jpg", "5"], {"a/2.jpg", "b/5.jpg"}),
        (["a/2.JPG", "/b/5.jpg"], {"a/2.jpg", "b/5.jpg"}),
    ],
)
def test_a_list_of_validation_photos_may_name_them_in_any_form(
    case: Case, prep: Prep, lines: list[str], val: set[str]
) -> None:
    case.write(*(f"{'ab'[i % 2]}/{i}.jpg" for i in range(8)))
    (case.folder / "val.txt").write_text("\n".join(lines))
    words = ("--src", case.photos, "--out", case.folder / "s", "--res", "32", "--val-list", case.folder / "val.txt")
    ran = prep(*words)
    assert ran.status == 0, ran.err
    assert set(photos_of(case.folder / "s")["val"]) == val
    (case.folder / "val.txt").write_text("a/2\na/2.jpg\n")
    assert "two names of one photo, got 'a/2' and 'a/2.jpg'" in prep(*words, "--rebuild").err
    (case.folder / "val.txt").write_text("x/a/7.png\n")
    assert "got 'x/a/7.png', expected paths such as" in prep(*words, "--rebuild").err


def test_the_table_of_an_image_folder_is_read_and_class_folders_with_it_are_asked(case: Case, tmp_path: Path) -> None:
    work = tmp_path / "work"
    case.write(*(f"{i}.png" for i in range(4)))
    (case.photos / "metadata.csv").write_text(
        "file_name,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(4))
    )
    source = open_source(str(case.photos), scan_cache=work)
    assert {image.name: image.label for image in source} == {f"{i}.png": "ab"[i % 2] for i in range(4)}
    assert "metadata.csv: read as the table" in source.listing.target.about[0]
    folders = Case(tmp_path / "other")
    folders.write("a/1.jpg", "b/2.jpg")
    (folders.photos / "metadata.jsonl").write_text('{"file_name": "a/1.jpg", "label": "x"}\n')
    with pytest.raises(ResoluteError, match=r"LABELS=.*metadata\.jsonl for the table, or KIND=folders"):
        open_source(str(folders.photos), scan_cache=work)
    insisted = open_source(str(folders.photos), kind="folders", scan_cache=work)
    assert Counter(image.label for image in insisted) == {"a": 1, "b": 1}
