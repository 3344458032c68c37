"""What the trainings of `whole` share about their photos: folders of classes, normalisation and validation crop."""

from __future__ import annotations

from pathlib import Path

__all__ = ["CROP", "MEAN", "STD", "class_files"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP = 0.875  # of the shorter side, in validation


def class_files(folder: Path) -> list[tuple[str, int]]:
    """[(path, label)] of the photos in `folder`/CLASS, by class and name."""
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    return [(str(path), label) for label, photos in enumerate(classes) for path in sorted(photos.iterdir())]
