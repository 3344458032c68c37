"""Checks samples of third-party tars: finds image and label, decodes the image, and rejects what cannot be used."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resolute.pipeline.dataset.format import SAMPLE, STORED
from resolute.pipeline.dataset.target import CLASS, TargetKind
from resolute.pipeline.storage.base import Files

from .image_check import Unusable, upright_size
from .tar_reader import Member, Sample

__all__ = ["FOREIGN_SAMPLE", "CheckedSamples", "SampleFields", "check_samples"]

# SAMPLE, and 32 bits of a hash of the sample's key
FOREIGN_SAMPLE = np.dtype([*SAMPLE.descr, ("hash", "<u4")])

_MAX_LABEL = 10_000_000  # exclusive; larger numbers are ids rather than classes
_JSON_KEYS = ("label", "cls", "class", "target")  # keys of a sample's JSON, the first one present is the label
_MAX_LABELS = 1 << 16  # the same where a sample has a bit per class
_TARGET_KEYS = {"labels": ("labels",), "values": ("target",)}  # the same for several labels and for values
_MAX_LABEL_BYTES = 1 << 20
_MAX_IMAGE_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class SampleFields:
    """Extensions (everything after the first dot of the file name) of a sample's image and label, and what a label is.
    """

    image: tuple[str, ...] = ("jpg", "jpeg", "png", "webp", "bmp")  # a sample has exactly one of them
    label: tuple[str, ...] = ("cls", "json")  # the first one present; "json:KEY" selects a key
    target: TargetKind = CLASS
    classes: tuple[str, ...] = ()  # of several labels: names that stand for their numbers


@dataclass(frozen=True, kw_only=True)
class CheckedSamples:
    """Index records and rejects of some consecutive samples of one tar."""

    tar: int  # number of the tar
    samples: NDArray[np.void]  # (N,) FOREIGN_SAMPLE; label 0 unless the targets are classes
    targets: list[tuple[float, ...]]  # of labels, the class numbers, or the values, for each sample; else empty
    stored: NDArray[np.void]  # (N,) STORED
    rejects: list[dict[str, str]]  # tar, key, reason


def check_samples(
    files: Files, name: str, tar: int, samples: Sequence[Sample], first: int, fields: SampleFields
) -> CheckedSamples:
    """Read and decode consecutive `samples` of the tar `name`, which is number `tar`; `first` numbers the first one."""
    accepted, stored, rejects = [], [], []
    targets: list[tuple[float, ...]] = []
    for number, sample in enumerate(samples, first):
        try:
            image = _image(sample.members, fields.image)
            label = _label(files, name, sample.members, fields)
            data = files.read(name, image.offset, image.nbytes)
            width, height = upright_size(data)
        except Unusable as error:
            key = sample.key.encode("utf-8", "backslashreplace").decode()
            rejects.append({"tar": name, "key": key, "reason": str(error)})
            continue
        digest = hashlib.blake2b(sample.key.encode("utf-8", "surrogateescape"), digest_size=4).digest()
        if isinstance(label, tuple):
            targets.append(label)
        accepted.append((number, 0 if isinstance(label, tuple) else label, int.from_bytes(digest, "little")))
        stored.append((image.offset, image.nbytes, zlib.crc32(data), tar, width, height))
    return CheckedSamples(tar=tar, samples=np.array(accepted, FOREIGN_SAMPLE), stored=np.array(stored, STORED),
                          targets=targets, rejects=rejects)  # fmt: skip


def _image(members: Sequence[Member], extensions: Sequence[str]) -> Member:
    images = [member for member in members if member.extension in extensions]
    if len(images) != 1:
        names = ", ".join(member.extension for member in images or members)
        raise Unusable(f"{'several images' if images else 'no image'}: {names}")
    if images[0].nbytes > _MAX_IMAGE_BYTES:
        raise Unusable(f"too many bytes: {images[0].nbytes}")
    return images[0]


def _label(
    files: Files, name: str, members: Sequence[Member], fields: SampleFields
) -> int | tuple[int, ...] | tuple[float, ...]:
    """The class number, the class numbers, or the values of a sample. Raises `Unusable`."""
    for extension, _, key in (rule.partition(":") for rule in fields.label):
        for member in members:
            if member.extension == extension:
                if member.nbytes > _MAX_LABEL_BYTES:
                    raise Unusable(f"no label in .{extension}: too many bytes, {member.nbytes}")
                text = files.read(name, member.offset, member.nbytes).decode("utf-8", "replace").strip()
                keys = (key,) if key else _TARGET_KEYS.get(fields.target, _JSON_KEYS)
                value = _json_label(text, keys, explicit=bool(key)) if extension.rpartition(".")[2] == "json" else text
                if fields.target == "labels":
                    return _class_numbers(value, extension, fields.classes)
                return _numbers(value, extension) if fields.target == "values" else _whole_number(value, extension)
    raise Unusable(f"no label: {', '.join(member.extension for member in members)}")


def _class_numbers(value: Any, extension: str, classes: tuple[str, ...]) -> tuple[int, ...]:
    """From a list of class numbers or of names of `classes`."""
    expected = f"a list of numbers below {len(classes) or _MAX_LABELS}{' or names of the classes' if classes else ''}"
    numbers = []
    for item in value if isinstance(value, list) else [None]:
        if isinstance(item, str) and item in classes:
            numbers.append(classes.index(item))
        elif isinstance(item, int) and not isinstance(item, bool) and 0 <= item < (len(classes) or _MAX_LABELS):
            numbers.append(item)
        else:
            raise Unusable(f"no labels in .{extension}: got {str(value)[:40]!r}, expected {expected}")
    return tuple(numbers)


def _numbers(value: Any, extension: str) -> tuple[float, ...]:
    """From a finite number, or a list of them."""
    items = value if isinstance(value, list) else [value]
    largest = float(np.finfo(np.float32).max)
    for item in items:
        is_number = isinstance(item, int | float) and not isinstance(item, bool)
        if not is_number or not abs(item) <= largest:  # why not: NaN
            raise Unusable(f"no values in .{extension}: got {str(value)[:40]!r}, expected finite numbers")
    if not items:
        raise Unusable(f"no values in .{extension}: got an empty list, expected numbers")
    return tuple(map(float, items))


def _json_label(text: str, keys: Sequence[str], *, explicit: bool) -> Any:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise Unusable("no label in .json: not JSON") from None
    if isinstance(value, dict):
        return next((value[k] for k in keys if value.get(k) is not None), None)
    return None if explicit else value


def _whole_number(value: Any, extension: str) -> int:
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or not int(text) < _MAX_LABEL:
        raise Unusable(f"no label in .{extension}: got {str(value)[:40]!r}, expected a number below {_MAX_LABEL}")
    return int(text)
