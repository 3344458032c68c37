"""The source for WebDataset tars of images and labels.

Source: the WebDataset format: the files of a sample are adjacent and share their path up to the first dot of the file
name, https://github.com/webdataset/webdataset. Many tars have keys with dots, `22.05.jpg` and `22.05.cls`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

from resolute.errors import ResoluteError
from resolute.pipeline.storage.cancel import CancelScope

from .archives.tar_members import TarMember, is_compressed, open_tar
from .filesystem import file_name
from .image_ref import MAX_BYTES
from .names import SUFFIXES, ignore_reason, safe_relative_path
from .scan_cache import ScannedSource, ScanResult, ScanWriter, cached_scan
from .targets import AUTO, Cell, TargetSetting

__all__ = ["LABEL_KEYS", "WebDatasetSource", "are_in_folders", "is_webdataset_tar"]

LABEL_KEYS = ("label", "cls", "class", "class_name", "target")  # keys of a sample's JSON; the first one present is used
_LABELS = ("cls", "json", "txt")  # extensions of labels; the first one present is used
_MAX_LABEL_BYTES = 1 << 20
_PEEK_MEMBERS = 64


class WebDatasetSource(ScannedSource):
    """Tars of samples, each an image and a target in .cls, .json or .txt. A `Source`.

    Labels in .cls and .json may be numbers, those in .txt are names. A .json may also hold several labels, or numbers
    to predict: see `_json_label`. An image's name is TAR/KEY.EXT with the tar's own name. `image` are the extensions
    of the images of samples that hold several, such as "jpg" or "left.jpg", by priority. Plain tars are read in place,
    compressed ones are unpacked once into one file in `scan_cache`, which also keeps the scan. `note` is a line for
    `target.about`.
    """

    def __init__(
        self,
        paths: Sequence[str],
        scan_cache: Path,
        setting: TargetSetting = AUTO,
        note: str | None = None,
        image: Sequence[str] = (),
    ) -> None:
        super().__init__(paths, scan_cache, unpacks=any(map(is_compressed, paths)), setting=setting, note=note)
        self._image = image

    def _scan(self, path: str, stop: CancelScope) -> ScanResult:
        how = f"samples by key {','.join(self._image)}"
        return cached_scan(
            self._scan_cache,
            path,
            how,
            lambda out: _Scan(path, out, self._image).fill(),
            unpacks=is_compressed(path),
            stop=stop,
        )


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
    found: dict[str, set[str]] = {}
    for _, block in groupby(filter(None, names), lambda name: _split(name)[0]):
        for key, extensions in _samples(block).items():
            found.setdefault(key, set()).update(extensions)
    return {
        key: kinds
        for key, kinds in found.items()
        if any(map(_is_image, kinds))
        and not kinds.isdisjoint(_LABELS)
        # why: in class folders, such a name rather has its usual meaning
        and ("." not in key.rpartition("/")[2] or "/" not in key or "cls" in kinds)
    }


def _split(name: str) -> tuple[str, str]:
    """(key, lower-case extension) of a member; the extension starts at the first dot of the file name."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return f"{folder}{slash}{stem}", extension.lower()


def _is_image(extension: str) -> bool:
    """Whether an extension, which may have several parts, is that of an image."""
    return f".{extension.rpartition('.')[2].lower()}" in SUFFIXES


def _samples(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """{key: {lower-case extension: name}} of adjacent members that share their path up to the first dot.

    The key of a label ends at its last dot: `22.05` of `22.05.cls`. Others belong to the longest such key that they
    begin with, so that `img.cls` has the images `left.jpg` and `right.jpg`; without one, images have keys of their own.
    """
    names = list(names)
    kinds = {name: _split(name)[1].rpartition(".")[2] for name in names}
    strongest = next((label for label in _LABELS if label in kinds.values()), "")
    keys = {name.rpartition(".")[0] for name in names if kinds[name] == strongest}
    samples: dict[str, dict[str, str]] = {}
    for chosen in (True, False):  # images first: what has no label's key belongs to theirs
        for name in names:
            if _is_image(kinds[name]) != chosen:
                continue
            key = next((key for key in _prefixes(name) if key in keys or key in samples), "")
            key = key or (name.rpartition(".")[0] if chosen else _split(name)[0])
            sample, extension = samples.setdefault(key, {}), name[len(key) + 1 :]
            lower = extension.lower()
            sample[extension if lower in sample else lower] = name  # `a.jpg` and `a.JPG` are two images
    for key in [key for key, inside in samples.items() if "cls" not in inside and not any(map(_is_image, inside))]:
        owner = next((other for other in _prefixes(key) if other in samples), None)
        if owner is not None:  # `img.meta.json` beside `img.json` is no sample
            del samples[key]
    return samples


def _prefixes(name: str) -> Iterator[str]:
    """Yield `name` up to each dot of its file name, the longest first."""
    folder = name.rpartition("/")[0]
    while (dot := name.rfind(".", len(folder) + 1)) >= 0:
        name = name[:dot]
        yield name


class _Member(NamedTuple):
    """Where an image's bytes are, in the blob or else in the tar; or a label, None if there is none or it
    `is_damaged`; or neither.
    """

    offset: int = -1
    nbytes: int = 0
    label: Cell = None
    is_damaged: bool = False


class _Scan:
    """The scan of a tar."""

    def __init__(self, path: str, out: ScanWriter, image: Sequence[str]) -> None:
        self._path, self._out, self._image = path, out, image
        self._unpacks = is_compressed(path)
        self._kinds: Counter[str] = Counter()  # extensions of the images of samples with several

    def fill(self) -> None:
        key, members = "", dict[str, _Member]()
        out = self._out
        with open_tar(self._path) as tar:
            for member in tar:
                if member.kind == "folder":
                    continue
                name = safe_relative_path(member.name)
                reason = "unsafe names" if name is None else ignore_reason(file_name(name))
                if name is None or reason or member.kind == "other":
                    out.listed += 1
                    out.ignored[reason or "links and devices"] += 1
                    continue
                member_key = _split(name)[0]
                if member_key != key:
                    self._end(members)
                    key, members = member_key, {}
                if name in members:
                    out.listed += 1
                    out.ignored["duplicate names"] += 1
                members[name] = self._read(name, member)
            self._end(members)
        if self._kinds:
            raise ResoluteError(
                f"{self._path}: samples with several images, got {_counts(self._kinds)}, expected one that is meant; "
                f"set IMAGE to its extension, such as IMAGE={min(self._kinds, key=_by_priority)}"
            )

    def _read(self, name: str, member: TarMember) -> _Member:
        extension = _split(name)[1]
        last = extension.rpartition(".")[2]
        if _is_image(extension):
            is_meant = not self._image or f".{extension}".endswith(tuple(f".{kind}" for kind in self._image))
            if self._unpacks and is_meant and member.nbytes <= MAX_BYTES:  # why: larger ones are never read
                return _Member(self._out.copy(member.read()), member.nbytes)
            return _Member(member.offset, member.nbytes)
        if last not in _LABELS:
            return _Member()
        try:
            if member.nbytes > _MAX_LABEL_BYTES:
                raise ValueError("too many bytes")
            return _Member(label=_label(last, member.read()))
        except (ValueError, RecursionError):
            return _Member(is_damaged=True)

    def _end(self, members: Mapping[str, _Member]) -> None:
        """End adjacent members that share their path up to the first dot."""
        samples = _samples(members)
        self._out.listed += len(samples)
        for names in samples.values():
            self._end_sample(names, members)

    def _end_sample(self, names: Mapping[str, str], members: Mapping[str, _Member]) -> None:
        out = self._out
        labels = [members[names[kind]] for kind in _LABELS if kind in names]
        label = next((member.label for member in labels if member.label is not None), None)
        images = all_images = [kind for kind in names if _is_image(kind)]
        if self._image:
            images = next(filter(None, (_meant(names, images, kind) for kind in self._image)), [])
        if len(images) > 1:
            self._kinds.update(images)
        elif images and label is None and any(member.is_damaged for member in labels):
            out.ignored["damaged labels"] += 1
        elif images:
            name = names[images[0]]
            cells = () if label is None else (label,)
            out.note(f"{file_name(self._path)}/{name}", cells, members[name].offset, members[name].nbytes)
        else:
            out.ignored["samples without the image of IMAGE" if all_images else "samples without an image"] += 1


def _meant(names: Mapping[str, str], images: Sequence[str], meant: str) -> list[str]:
    """The images with the extension `meant`; without any, those that have it as their last part."""
    own = [kind for kind in images if kind == meant]
    # why: `left.jpg` may also be that of the sample `img.left`
    own = own or [kind for kind in images if _split(names[kind])[1] == meant]
    return own or [kind for kind in images if kind.lower().endswith(f".{meant}")]


def _counts(kinds: Mapping[str, int]) -> str:
    most = sorted(kinds.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{kind} ({count})" for kind, count in most[:6]) + (", …" if len(most) > 6 else "")


def _by_priority(kind: str) -> tuple[bool, bool, str]:
    return "." in kind, kind not in ("jpg", "jpeg"), kind


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
