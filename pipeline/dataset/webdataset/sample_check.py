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

from pipeline.dataset.shard_set import SAMPLE, STORED
from pipeline.storage.base import Files

from .image_check import Unusable, upright_size
from .tar_reader import Member, Sample

__all__ = ["CheckedSamples", "SampleFields", "check_samples"]

_MAX_LABEL = 10_000_000  # exclusive; larger numbers are ids rather than classes
_JSON_KEYS = ("label", "cls", "class", "target")  # keys of a sample's JSON, the first one present is the label
_MAX_LABEL_BYTES = 1 << 20
_MAX_IMAGE_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class SampleFields:
    """Extensions (everything after the first dot of the file name) of a sample's image and label."""

    image: tuple[str, ...] = ("jpg", "jpeg", "png", "webp", "bmp")  # a sample has exactly one of them
    label: tuple[str, ...] = ("cls", "json")  # the first one present; "json:KEY" selects a key


@dataclass(frozen=True, kw_only=True)
class CheckedSamples:
    """Index records and rejects of some consecutive samples of one tar."""

    tar: int  # number of the tar
    samples: NDArray[np.void]  # (N,) SAMPLE
    stored: NDArray[np.void]  # (N,) STORED
    rejects: list[dict[str, str]]  # tar, key, reason


def check_samples(
    files: Files, name: str, tar: int, samples: Sequence[Sample], first: int, fields: SampleFields
) -> CheckedSamples:
    """Read and decode consecutive `samples` of the tar `name`, which is number `tar`; `first` numbers the first one."""
    accepted, stored, rejects = [], [], []
    for number, sample in enumerate(samples, first):
        try:
            image = _image(sample.members, fields.image)
            label = _label(files, name, sample.members, fields.label)
            data = files.read(name, image.offset, image.nbytes)
            width, height = upright_size(data)
        except Unusable as error:
            key = sample.key.encode("utf-8", "backslashreplace").decode()
            rejects.append({"tar": name, "key": key, "reason": str(error)})
            continue
        digest = hashlib.blake2b(sample.key.encode("utf-8", "surrogateescape"), digest_size=4).digest()
        accepted.append((number, label, int.from_bytes(digest, "little")))
        stored.append((image.offset, image.nbytes, zlib.crc32(data), tar, width, height))
    return CheckedSamples(tar=tar, samples=np.array(accepted, SAMPLE), stored=np.array(stored, STORED), rejects=rejects)


def _image(members: Sequence[Member], extensions: Sequence[str]) -> Member:
    images = [member for member in members if member.extension in extensions]
    if len(images) != 1:
        names = ", ".join(member.extension for member in images or members)
        raise Unusable(f"{'several images' if images else 'no image'}: {names}")
    if images[0].nbytes > _MAX_IMAGE_BYTES:
        raise Unusable(f"too many bytes: {images[0].nbytes}")
    return images[0]


def _label(files: Files, name: str, members: Sequence[Member], extensions: Sequence[str]) -> int:
    for extension, _, key in (rule.partition(":") for rule in extensions):
        for member in members:
            if member.extension == extension:
                if member.nbytes > _MAX_LABEL_BYTES:
                    raise Unusable(f"no label in .{extension}: too many bytes, {member.nbytes}")
                text = files.read(name, member.offset, member.nbytes).decode("utf-8", "replace").strip()
                value = _json_label(text, key) if extension.rpartition(".")[2] == "json" else text
                return _whole_number(value, extension)
    raise Unusable(f"no label: {', '.join(member.extension for member in members)}")


def _json_label(text: str, key: str) -> Any:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise Unusable("no label in .json: not JSON") from None
    if isinstance(value, dict):
        return next((value[k] for k in ((key,) if key else _JSON_KEYS) if value.get(k) is not None), None)
    return None if key else value


def _whole_number(value: Any, extension: str) -> int:
    text = str(value).strip() if isinstance(value, int | str) and not isinstance(value, bool) else ""
    if not (text.isascii() and text.isdigit()) or len(text) > 20 or not int(text) < _MAX_LABEL:
        raise Unusable(f"no label in .{extension}: got {str(value)[:40]!r}, expected a number below {_MAX_LABEL}")
    return int(text)
