"""The source for WebDataset tars of images and labels.

Source: the WebDataset format: the files of a sample are adjacent and share their path up to the first dot of the file
name, https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError

from .archives.tar_members import is_compressed, open_tar
from .filesystem import file_name
from .image_ref import MAX_BYTES
from .names import SUFFIXES, safe_relative_path
from .scan_cache import ScannedSource, ScanResult, ScanWriter, Stop, cached_scan
from .targets import AUTO, Cell, TargetSetting

__all__ = ["LABEL_KEYS", "WebDatasetSource", "are_in_folders", "is_webdataset_tar"]

LABEL_KEYS = ("label", "cls", "class", "class_name", "target")  # keys of a sample's JSON; the first one present is used
_MAX_LABEL_BYTES = 1 << 20
_PEEK_MEMBERS = 64


class WebDatasetSource(ScannedSource):
    """Tars of samples, each an image and a target in .cls, .json or .txt. A `Source`.

    Labels in .cls and .json may be numbers, those in .txt are names. A .json may also hold several labels, or numbers
    to predict: see `_json_label`. An image's name is TAR/KEY.EXT with the tar's own
    name. Plain tars are read in place, compressed ones are unpacked once into one file in `scan_cache`, which also
    keeps the scan. `note` is a line for `target.about`.
    """

    def __init__(
        self, paths: Sequence[str], scan_cache: Path, setting: TargetSetting = AUTO, note: str | None = None
    ) -> None:
        super().__init__(paths, scan_cache, copies=any(map(is_compressed, paths)), setting=setting, note=note)

    def _scan(self, path: str, stop: Stop) -> ScanResult:
        copies = is_compressed(path)
        return cached_scan(self._scan_cache, path, "samples", lambda out: _fill(path, out), copies=copies, stop=stop)


def is_webdataset_tar(path: str) -> bool:
    """Whether some of the first images in a tar have label files next to them."""
    return bool(_first_samples(path))


def are_in_folders(path: str) -> bool:
    """Whether the first samples of a WebDataset tar are in folders without a .cls: these could be classes instead."""
    return all("/" in key and "cls" not in kinds for key, kinds in _first_samples(path).items())


def _first_samples(path: str) -> dict[str, set[str]]:
    """{key: extensions} of the first samples of a tar with an image and a label."""
    with open_tar(path) as members:
        names = [safe_relative_path(member.name) for member in islice(members, _PEEK_MEMBERS)]
    kinds: dict[str, set[str]] = {}
    for key, extension in (_split(name) for name in names if name):
        kinds.setdefault(key, set()).add(extension)
    return {key: kind for key, kind in kinds.items() if _images(kind) and not kind.isdisjoint({"cls", "json", "txt"})}


def _split(name: str) -> tuple[str, str]:
    """(key, lower-case extension) of a member; the extension starts at the first dot of the file name."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _images(extensions: set[str]) -> list[str]:
    return [extension for extension in extensions if f".{extension}" in SUFFIXES]


def _fill(path: str, out: ScanWriter) -> None:
    tar_name = file_name(path)
    key = ""
    images: list[tuple[str, int, int, bytes | None]] = []
    copies = is_compressed(path)
    labels: dict[str, Cell] = {}
    damaged_label = False  # a label of the sample is unreadable

    def end_sample() -> None:
        label = labels.get("cls", labels.get("json", labels.get("txt")))
        if len(images) > 1:
            out.ignored["samples with several images"] += 1
        elif images and label is None and damaged_label:
            out.ignored["damaged labels"] += 1
        elif images:
            name, offset, nbytes, data = images[0]
            cells = () if label is None else (label,)
            if data is not None and cells:
                out.add(f"{tar_name}/{name}", cells, data)
            else:
                out.note(f"{tar_name}/{name}", cells, offset, nbytes)
        elif labels:
            out.ignored["samples without an image"] += 1

    with open_tar(path) as members:
        for member in members:
            if member.kind == "folder":
                continue
            name = safe_relative_path(member.name)
            if name is None or member.kind == "other":
                out.ignored["unsafe names" if name is None else "links and devices"] += 1
                continue
            member_key, extension = _split(name)
            if member_key != key:
                end_sample()
                key, images, labels, damaged_label = member_key, [], {}, False
            if f".{extension}" in SUFFIXES:
                # why: a second image of a sample, or one that is too large, is never used
                is_read = copies and not images and member.nbytes <= MAX_BYTES
                images.append((name, member.offset, member.nbytes, member.read() if is_read else None))
            elif extension in ("cls", "json", "txt"):
                try:
                    if member.nbytes > _MAX_LABEL_BYTES:
                        raise ValueError("too many bytes")
                    label = _label(extension, member.read())
                except (ValueError, RecursionError):
                    damaged_label = True
                    continue
                if label is not None:
                    labels[extension] = label
        end_sample()


def _label(extension: str, content: bytes) -> Cell:
    """A sample's label, a number only from .cls and .json; None if it holds none.

    Raises `ValueError` or `RecursionError` for malformed or too deeply nested JSON and for numbers with too many
    digits.
    """
    text = content.decode("utf-8", "surrogateescape").strip()
    if extension == "json":
        return _json_label(json.loads(text))
    digits = text.removeprefix("-")
    if extension == "cls" and digits.isascii() and digits.isdigit():
        return int(text)
    return text or None


def _json_label(value: Any) -> Cell:
    """The label in a sample's JSON: under the first of `LABEL_KEYS`, or in the list `labels`; None if it holds none.

    Names and integers are classes, other numbers are values. A list holds labels, or values if it is under `target` or
    one of them has a fraction. Raises `ValueError` for a list of anything else.
    """
    key = ""
    if isinstance(value, dict):
        key = next((key for key in (*LABEL_KEYS, "labels") if value.get(key) is not None), "")
        if key == "labels" and isinstance(value.get("ignored"), list) and value["ignored"]:
            raise ResoluteError(
                f"a sample's JSON: got {str(value)[:80]}, expected no ignored labels, which prep reads from tables "
                "alone; use the table that these samples were made from, with UNCERTAIN=ignore"
            )
        value = value.get(key)
    if isinstance(value, list):
        if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in value):
            raise ValueError("neither names nor numbers")
        is_values = not any(isinstance(item, str) for item in value) and (
            key == "target" or any(isinstance(item, float) for item in value)
        )
        if is_values and not value:
            return None
        return list(map(float, value)) if is_values else value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return value if isinstance(value, str) and value else None
