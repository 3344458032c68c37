"""The segments and scans of a JPEG file: what its headers say, and where the image ends.

Photos inside a photo (thumbnails in EXIF, the video of a motion photo, further images behind the end) do not count.
Source: ITU-T T.81, annex B; ICC.1:2022, annex B.4
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["BROKEN", "JpegMarkers", "jpeg_markers", "scans_and_end", "without_profile"]

_SOI, _EOI, _SOS, _APP1, _APP2 = 0xD8, 0xD9, 0xDA, 0xE1, 0xE2
_FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_PROGRESSIVE = (0xC2, 0xC6, 0xCA, 0xCE)
BROKEN = b"?"  # a profile that no program accepts
_LOSSLESS = (0xC3, 0xC7, 0xCB, 0xCF)
_ICC = b"ICC_PROFILE\0"
# a marker in or after a scan: no stuffed zero, no restart marker, no fill byte
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd8-\xfe]")


@dataclass(frozen=True, kw_only=True)
class JpegMarkers:
    """`frame` is the offset of the frame header's content (-1: none), `first_scan` that of the first scan's.

    `profile` is the embedded ICC profile: None without one, `BROKEN` if parts are missing; `profile_segments` are the
    (start, end) of its segments.
    """

    is_progressive: bool
    is_lossless: bool
    bits: int  # of a sample
    has_exif: bool
    frame: int
    first_scan: int
    profile: bytes | None
    profile_segments: tuple[tuple[int, int], ...]


def jpeg_markers(data: bytes) -> JpegMarkers:
    """Read the segments of a JPEG up to its first scan; stops at the first malformed one."""
    is_progressive, has_exif, frame, first_scan, pos = False, False, -1, len(data), 2
    segments: list[tuple[int, int]] = []
    while pos + 4 <= len(data) and data[pos] == 0xFF:
        marker = data[pos + 1]
        if marker == 0xFF:  # a fill byte
            pos += 1
            continue
        at, end = pos + 4, pos + 2 + (data[pos + 2] << 8 | data[pos + 3])
        if marker == _SOS:
            first_scan = at
            break
        if marker in _FRAMES:
            frame, is_progressive = at, is_progressive or marker in _PROGRESSIVE
        elif marker == _APP1:
            has_exif = has_exif or data.startswith(b"Exif\0\0", at)
        elif marker == _APP2 and data.startswith(_ICC, at):
            segments.append((at - 4, end))
        pos = end
    return JpegMarkers(
        is_progressive=is_progressive,
        is_lossless=frame >= 0 and data[frame - 3] in _LOSSLESS,
        bits=data[frame] if 0 <= frame < len(data) else 8,
        has_exif=has_exif,
        frame=frame,
        first_scan=first_scan,
        profile=_profile([data[start + 4 + len(_ICC) : end] for start, end in segments]) if segments else None,
        profile_segments=tuple(segments),
    )


def scans_and_end(data: bytes, first_scan: int) -> tuple[int, int]:
    """The number of scans, and the offset of the marker that ends the image (the length of `data` if none does).

    `first_scan` is as in `JpegMarkers`.
    """
    scans, pos = 1, first_scan
    while found := _MARKER.search(data, pos):
        marker, pos = data[found.start() + 1], found.end()
        if marker in (_EOI, _SOI):
            return scans, found.start()
        scans += marker == _SOS
        pos += data[pos] << 8 | data[pos + 1] if pos + 2 <= len(data) else 2
    return scans, len(data)


def without_profile(data: bytes, markers: JpegMarkers) -> bytes:
    """The file without its ICC profile."""
    parts, pos = [], 0
    for start, end in markers.profile_segments:
        parts.append(data[pos:start])
        pos = end
    return b"".join(parts) + data[pos:]


def _profile(parts: list[bytes]) -> bytes:
    """The profile of APP2 segments: number, count (from 1) and a piece each, in any order."""
    pieces = {part[0]: part[2:] for part in parts if len(part) > 2}
    counts = {part[1] for part in parts if len(part) > 2}
    is_whole = len(pieces) == len(parts) and counts == {len(parts)} and sorted(pieces) == [*range(1, len(parts) + 1)]
    return b"".join(pieces[number] for number in sorted(pieces)) if is_whole else BROKEN
