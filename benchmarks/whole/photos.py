"""The photos of the compared trainings: which are validated on, class folders, normalisation and validation crop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from resolute.errors import ResoluteError

__all__ = ["CROP", "MEAN", "STD", "class_files", "hash_rule", "photo_links", "write_photos"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = 0.875  # of the shorter side, in validation
_SALT = "whole"  # of `hash_rule`; another one would choose other photos


def class_files(folder: Path) -> list[tuple[str, int]]:
    """[(path, label)] of the photos in `folder`/CLASS, by class and name."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(str(path), label) for label, photos in enumerate(classes) for path in sorted(photos.iterdir())]


def hash_rule(one_of: int) -> Callable[[str], bool]:
    """Whether a photo CLASS/NAME is validated on: one of so many, by a hash, so that nobody chose them."""

    def held_out(name: str) -> bool:
        found = hashlib.sha256(f"{_SALT}/{name}".encode(errors="surrogateescape")).hexdigest()
        return int(found, 16) % one_of == 0

    return held_out


def write_photos(folders: Sequence[Path], held_out: Callable[[str], bool], out: Path) -> tuple[int, int]:
    """Links to the photos in `out`/train/CLASS and `out`/val/CLASS, as timm and the plain loop read them.

    folders: each with class folders. held_out: whether a photo CLASS/NAME is validated on. Returns how many photos are
    trained on and validated on. Raises `ResoluteError` if two have the same name.
    """
    links = photo_links(folders, held_out)
    for link, photo in links.items():
        (out / link).parent.mkdir(parents=True, exist_ok=True)
        (out / link).symlink_to(photo)
    trained = sum(link.startswith("train/") for link in links)
    return trained, len(links) - trained


def photo_links(folders: Sequence[Path], held_out: Callable[[str], bool]) -> dict[str, str]:
    """{PART/CLASS/NAME: photo} of all photos; the part is train or val."""
    links: dict[str, str] = {}
    for path in (path for photos in folders for path in sorted(photos.glob("*/*"))):
        name = f"{path.parent.name}/{path.name}"
        link = f"{'val' if held_out(name) else 'train'}/{name}"
        if link in links:
            raise ResoluteError(f"{path}: a second photo {name}, expected one; name fewer folders")
        links[link] = str(path.resolve())
    return links
