"""Image files that Pillow does not write: ICC profiles of any matrix and curve, and TIFFs of any layout."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["ADOBE_RGB", "DISPLAY_P3", "GREY_22", "SRGB", "icc_profile", "tiff"]

# red, green and blue as columns, X, Y and Z as rows, adapted to D50. Source: the profiles that are usual for them
_PRIMARIES = {
    "sRGB": ((0.43607, 0.38515, 0.14307), (0.22249, 0.71687, 0.06061), (0.01392, 0.09708, 0.7141)),
    "Adobe RGB": ((0.60974, 0.20528, 0.14919), (0.31111, 0.62567, 0.06322), (0.01947, 0.06087, 0.74457)),
    "Display P3": ((0.51512, 0.29198, 0.1571), (0.2412, 0.69225, 0.06657), (-0.00105, 0.04189, 0.78407)),
}
_D50 = (0.9642, 1.0, 0.8249)


def _fixed(values: Iterable[float]) -> bytes:
    return b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def _curve(gamma: float | None, points: int) -> bytes:
    """A tone curve: a power, or sRGB's (None), as a formula or as a table of `points`."""
    if gamma is not None:
        return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    if not points:
        return b"para\0\0\0\0" + struct.pack(">HH", 3, 0) + _fixed((2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045))
    x = np.linspace(0, 1, points)
    y = np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)
    table = (y * 65535).round().astype(">u2").tobytes()
    return b"curv\0\0\0\0" + struct.pack(">I", points) + table + bytes(-len(table) % 4)


def icc_profile(
    primaries: str | None, gamma: float | None, *, points: int = 0, device: bytes = b"mntr", padding: int = 0
) -> bytes:
    """An ICC profile of version 2: a matrix and one curve, or grey if `primaries` is None."""
    curve = _curve(gamma, points)
    text = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"made\0" + bytes(79)
    tags = [(b"desc", text), (b"cprt", b"text\0\0\0\0none" + bytes(4 + padding))]
    tags.append((b"wtpt", b"XYZ \0\0\0\0" + _fixed(_D50)))
    if primaries is None:
        tags.append((b"kTRC", curve))
    else:
        for column, name in enumerate((b"r", b"g", b"b")):
            tags.append((name + b"XYZ", b"XYZ \0\0\0\0" + _fixed(row[column] for row in _PRIMARIES[primaries])))
            tags.append((name + b"TRC", curve))
    at, table, body = 132 + 12 * len(tags), b"", b""
    for name, content in tags:
        table += name + struct.pack(">II", at + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    space = b"GRAY" if primaries is None else b"RGB "
    head = struct.pack(">I", at + len(body)) + bytes(4) + b"\2\x40\0\0" + device + space + b"XYZ " + bytes(12) + b"acsp"
    head = (head + bytes(28) + _fixed(_D50)).ljust(128, b"\0")
    return head + struct.pack(">I", len(tags)) + table + body


SRGB = icc_profile("sRGB", None)
ADOBE_RGB = icc_profile("Adobe RGB", 2.2)
DISPLAY_P3 = icc_profile("Display P3", None)
GREY_22 = icc_profile(None, 2.2)


def tiff(
    bands: NDArray[Any],
    photometric: int | None,
    *,
    extra: Sequence[int] | None = None,
    planar: int = 1,
    deflate: bool = False,
    order: Literal["<", ">"] = "<",
    sample_format: int | None = None,
    tags: Sequence[tuple[int, int, Sequence[int]]] = (),
) -> bytes:
    """A TIFF of (H, W, S) samples, in two strips; `order` is < or >, `tags` are further (tag, type, values)."""
    height, width, samples = bands.shape
    rows = -(-height // 2)
    planes = [bands] if planar == 1 else [bands[..., s : s + 1] for s in range(samples)]
    dtype = bands.dtype.newbyteorder(order)
    strips = [plane[y : y + rows].astype(dtype).tobytes() for plane in planes for y in range(0, height, rows)]
    if deflate:
        strips = [zlib.compress(strip) for strip in strips]
    entries: list[tuple[int, int, Sequence[int]]] = [
        (256, 4, [width]),
        (257, 4, [height]),
        (258, 3, [bands.dtype.itemsize * 8] * samples),
        (259, 3, [8 if deflate else 1]),
        (277, 3, [samples]),
        (278, 4, [rows]),
        (284, 3, [planar]),
        *tags,
    ]
    entries += [] if photometric is None else [(262, 3, [photometric])]
    entries += [] if extra is None else [(338, 3, extra)]
    entries += [] if sample_format is None else [(339, 3, [sample_format] * samples)]
    offsets, pixels = [], b""
    for strip in strips:
        offsets.append(8 + len(pixels))
        pixels += strip + bytes(len(strip) % 2)
    entries += [(273, 4, offsets), (279, 4, [len(strip) for strip in strips])]
    start = 8 + len(pixels)
    table, rest, after = struct.pack(order + "H", len(entries)), b"", start + 6 + 12 * len(entries)
    for tag, kind, values in sorted(entries, key=lambda entry: entry[0]):
        content = struct.pack(f"{order}{len(values)}{ {1: 'B', 3: 'H', 4: 'I', 7: 'B'}[kind] }", *values)
        if len(content) > 4:
            place, rest = struct.pack(order + "I", after + len(rest)), rest + content + bytes(len(content) % 2)
        else:
            place = content.ljust(4, b"\0")
        table += struct.pack(order + "HHI", tag, kind, len(values)) + place
    return (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", start) + pixels + table + bytes(4) + rest
