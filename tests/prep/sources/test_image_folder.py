"""The walk over folders of images: links to folders, folders without photos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from resolute.prep.sources.folders.image_folder import ImageFolderSource, walk
from resolute.prep.sources.image_ref import Listing
from tests.support.source_formats import jpeg

Prep = Callable[..., Any]
READ_ALREADY = {"links to a folder read already": 1}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """tmp_path/p: class folders cat and dog with a photo each, dog/more with another."""
    for number, name in enumerate(("cat/1.jpg", "dog/2.jpg", "dog/more/3.jpg")):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / name).write_bytes(jpeg(number))
    return tmp_path / "p"


def listed(root: Path) -> tuple[list[str], dict[str, int]]:
    source = ImageFolderSource(str(root))
    return [image.name for image in source], dict(source.listing.ignored)


@pytest.mark.parametrize(
    ("link", "to"),
    [
        ("Latest", "cat"),
        ("zzz", "cat"),
        ("Latest", "dog/more"),
        ("cat/Latest", "dog"),
        ("Latest", "dog/../cat"),
        ("Latest", "."),
        ("dog/up", "."),
    ],
)
def test_a_link_never_names_a_folder_that_has_its_own_path(tree: Path, link: str, to: str) -> None:
    names, _ = listed(tree)
    (tree / link).symlink_to(tree / to)
    assert listed(tree) == (names, READ_ALREADY)
    (tree.parent / "root").symlink_to(tree)
    assert listed(tree.parent / "root") == (names, READ_ALREADY), "by another path to the same folder"


def test_a_link_to_a_link_never_names_a_folder_that_has_its_own_path(tree: Path) -> None:
    names, _ = listed(tree)
    (tree / "A").symlink_to(tree / "B")
    (tree / "B").symlink_to(tree / "cat")
    assert listed(tree) == (names, {"links to a folder read already": 2})


def test_of_two_links_to_a_folder_elsewhere_the_first_by_name_counts(tree: Path) -> None:
    (tree / "dog").rename(tree.parent / "elsewhere")
    for link in ("hound", "dog"):
        (tree / link).symlink_to(tree.parent / "elsewhere")
    assert listed(tree) == (["cat/1.jpg", "dog/2.jpg", "dog/more/3.jpg"], READ_ALREADY)


def test_links_inside_a_folder_elsewhere_give_way_to_its_real_folders(tree: Path) -> None:
    (tree / "dog").rename(tree.parent / "elsewhere")
    (tree.parent / "elsewhere" / "latest").symlink_to("more")
    (tree / "dog").symlink_to(tree.parent / "elsewhere")
    assert listed(tree) == (["cat/1.jpg", "dog/2.jpg", "dog/more/3.jpg"], READ_ALREADY)


def test_a_link_is_followed_to_a_folder_that_is_skipped_under_its_own_name(tree: Path) -> None:
    (tree / "cat").rename(tree / ".cat")
    (tree / "cat").symlink_to(".cat")
    assert listed(tree) == (["cat/1.jpg", "dog/2.jpg", "dog/more/3.jpg"], {"hidden": 1})


def test_many_links_elsewhere_are_followed_each_once(tree: Path) -> None:
    for i in range(300):
        (tree.parent / "store" / f"{i:03d}").mkdir(parents=True)
        (tree / f"class {i:03d}").symlink_to(tree.parent / "store" / f"{i:03d}")
    counts = Listing()
    assert sum(entry.kind == "folder" for _, entry in walk(str(tree), counts)) == 303
    assert not counts.ignored


def test_every_entry_is_a_photo_or_counted_as_ignored(tree: Path) -> None:
    (tree / "empty").mkdir()
    for name in ("outside.jpg", "notes.txt", "cat/.hidden", "cat/Thumbs.db", "dog/odd"):
        (tree / name).write_bytes(b"x")
    (tree / "dog" / "gone").symlink_to("nowhere")
    names, ignored = listed(tree)
    files: Sequence[Path] = [path for path in tree.rglob("*") if not path.is_dir()]
    assert len(files) == len(names) + sum(ignored.values())


def test_class_folders_without_photos_are_named_in_a_warning(tmp_path: Path, photos: Path, prep: Prep) -> None:
    (photos / "bird").mkdir()
    (photos / "fish").mkdir()
    (photos / "fish" / "list.txt").write_text("no photo")
    ran = prep("--src", photos, "--out", tmp_path / "set", "--res", 32, "--dry")
    assert ran.status == 0
    assert f"WARNING: {photos}: folders without photos are no classes: bird and fish\n" in ran.out + ran.err
