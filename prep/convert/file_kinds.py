"""Names files that no decoder knows by their first bytes, for the reasons of rejects."""

from __future__ import annotations

import re

__all__ = ["file_kind"]

_HEAD = 1024
_BOM = rb"(\xef\xbb\xbf)?\s*"
_PROLOG = _BOM + rb"(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)*"
_RAW = "camera raw: not supported, develop it to JPEG or TIFF"
_FLOAT = "float pixels are not supported, convert it to 8 or 16 bits"
# (pattern at the start of a file, reason); the first that matches counts
_KINDS = (
    (rb"version https://git-lfs\.github\.com/spec/", "git-lfs pointer: run git lfs pull in its repository"),
    (rb"(\.\./)*(\.git)?/annex/objects/", "git-annex pointer: run git annex get in its repository"),
    (rb".{4}ftyp(heic|heix|heim|heis|hevc|hevx|hevm|hevs)", "HEIC photo: not supported, convert it to JPEG"),
    (rb".{4}ftypavi[fs]", "AVIF photo: this Pillow cannot open it, convert it to JPEG"),
    (rb".{4}ftyp(mif1|msf1)", "HEIF photo: not supported, convert it to JPEG"),
    (rb".{4}ftypcrx ", _RAW),
    (rb".{4}(ftyp|moov|mdat|wide)", "video: MP4 or QuickTime, not an image"),
    (rb"RIFF.{4}AVI ", "video: AVI, not an image"),
    (rb"\x1aE\xdf\xa3", "video: Matroska or WebM, not an image"),
    (rb"\0\0\0\x0cJXL \r\n\x87\n|\xff\x0a", "JPEG XL photo: not supported, convert it to JPEG"),
    (rb"\0\0\0\x0cjP  \r\n\x87\n|\xff\x4f\xff\x51", "JPEG 2000 photo: not supported, convert it to JPEG"),
    (rb"II\xbc", "JPEG XR photo: not supported, convert it to JPEG"),
    (rb"II\*\0.{4}CR|IIRO|IIRS|MMOR|IIU\0|FUJIFILMCCD-RAW|FOVb|\0MRM", _RAW),
    (rb"8BP[SB]", "Photoshop file: not supported, save it as JPEG or TIFF"),
    (rb"gimp xcf", "GIMP file: not supported, export it as JPEG or PNG"),
    (rb"v/1\x01", f"OpenEXR file: {_FLOAT}"),
    (rb"#\?(RADIANCE|RGBE)", f"Radiance HDR file: {_FLOAT}"),
    (rb"P[1-7Ff]\s", "PNM file: not supported, convert it to PNG"),
    (rb"SIMPLE  =", "FITS file: not supported, convert it to PNG or TIFF"),
    (rb".{128}DICM", "DICOM file: not supported, convert it to PNG, of 16 bits if it has more than 8"),
    (rb"(\x5c\x01\0\0|\x6e\x2b\x31\0)", "NIfTI file: not supported, convert its slices to PNG"),
    (rb"%PDF-", "PDF document: not an image"),
    (rb"%!PS|\xc5\xd0\xd3\xc6", "PostScript document: not an image"),
    (rb"\x93NUMPY", "NumPy array: not an image file, convert it to PNG"),
    (rb"\x89HDF\r\n\x1a\n", "HDF5 file: not an image"),
    (rb"PK(\x03\x04|\x05\x06)", "zip archive: not an image, unpack it"),
    (rb"\x1f\x8b", "gzip file: not an image, unpack it"),
    (rb"7z\xbc\xaf\x27\x1c|Rar!\x1a\x07|BZh[1-9]|\xfd7zXZ\0|\x28\xb5\x2f\xfd", "archive: not an image, unpack it"),
    (_PROLOG + rb"(<!doctype svg.*?>\s*)?<svg", "SVG drawing: not supported, render it to PNG"),
    (_PROLOG + rb"<(!doctype html|html|head|body)", "HTML page: a failed download, fetch the photo again"),
    (_PROLOG + rb"(<\?xml|<[a-z])", "XML document: not an image, perhaps a server's error"),
    (_BOM + rb'(\{\s*["}]|\[\s*[\[{"\d\]])', "JSON document: not an image, perhaps a server's error"),
    (rb"\xff\xd8", "damaged: JPEG without a usable header"),
    (rb"\x89PNG\r\n\x1a\n", "damaged: PNG without a usable header"),
    (rb"GIF8[79]a", "damaged: GIF without a usable header"),
    (rb"RIFF.{4}WEBP", "damaged: WebP without a usable header"),
)
_PATTERNS = tuple((re.compile(pattern, re.DOTALL | re.IGNORECASE), reason) for pattern, reason in _KINDS)
_TEXT = bytes([9, 10, 12, 13, *range(0x20, 0x7F)])


def file_kind(data: bytes) -> str:
    """The reason for rejecting a file that no decoder knows: `kind: detail`, or just "not an image"."""
    head = data[:_HEAD]
    for pattern, reason in _PATTERNS:
        if pattern.match(head):
            return reason
    if not data.strip(b"\0"):
        return "only zero bytes: a failed download or copy"
    if not head.removeprefix(b"\xef\xbb\xbf").translate(None, _TEXT):
        return "text: not an image"
    return "not an image"
