"""Real files that trip decoders: each is decoded or rejected as its index says, in bounded time."""

from __future__ import annotations

import csv
import io
import time
import warnings
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms, ImageOps

from resolute.prep.convert.decode import Photo, Reject, decode
from resolute.prep.convert.resize import resize_and_encode
from tests import SHARED_DATA

FOLDER = SHARED_DATA / "difficult"
# why: most of these files are not ours to pass on; test_decode.py makes one of each kind itself and always runs
ABSENT = "the 80 photos are not here: others own them; test_decode.py makes files of the same kinds and checks those"
INDEX = (FOLDER / "INDEX.tsv").read_text() if FOLDER.is_dir() else ""
ROWS = list(csv.DictReader(INDEX.splitlines(), delimiter="\t"))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not ROWS, reason=ABSENT)]
# `bad` in the index, but accepted: no decoder complains, and the image is complete.
WHOLE_TO_THE_DECODERS = {"corrupt__mdx__316be81dfdeeb942e904feb3a77f4f83.jpg"}
# `ok` in the index for its broken EXIF, but rejected: its scan is damaged too, and every decoder shows grey blocks.
DAMAGED_TOO = {"exif__pillow__hopper_bad_exif.jpg"}
# `refuse` in the index, but accepted: text that would inflate without end is skipped, and the image is one pixel.
BOMBS_IN_METADATA = {"bomb__pillow__png_decompression_dos.png"}
# `ok` in the index, but rejected: Pillow cannot distinguish complete runs from damaged ones.
RUN_LENGTH_ENCODED = {"otherfmt__mdx__pal8rle.bmp"}


def decode_with_pillow(path: Path) -> NDArray[np.uint8]:
    """The oracle: Pillow's own conversions of the whole image, over white, upright."""
    with warnings.catch_warnings(), Image.open(path) as opened:
        warnings.simplefilter("ignore")  # pytest makes errors of them; some files have broken EXIF
        image = ImageOps.exif_transpose(opened)
    if image.mode == "I;16":
        grey = np.rint(np.asarray(image).astype(np.float64) / 257).astype(np.uint8)
        return np.stack([grey] * 3, -1)
    if (profile := image.info.get("icc_profile")) and image.mode in ("L", "RGB", "CMYK"):
        with suppress(ImageCms.PyCMSError):
            source, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
            intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
            mode = "RGB" if image.mode == "L" and profile[16:20] == b"RGB " else image.mode
            image = ImageCms.buildTransform(source, srgb, mode, "RGB", intent, flags).apply(image.convert(mode))
    rgba = image.convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"))


def decode_timed(name: str, limit_s: float = 10.0) -> NDArray[np.uint8] | str:
    """The pixels of a file, or why it is rejected; in bounded time."""
    began = time.process_time()
    result: NDArray[np.uint8] | str
    try:
        result = decode((FOLDER / name).read_bytes())
        resize_and_encode([Photo.full(result)] * 2, (32, 146), 90)
    except Reject as reject:
        result = str(reject)
    assert time.process_time() - began < limit_s, name
    return result


def of(case: str) -> list[str]:
    return [row["file"] for row in ROWS if row["case"] == case]


def test_intact_files_are_decoded_as_pillow_decodes_them() -> None:
    for name in of("ok"):
        ours = decode_timed(name)
        if name in DAMAGED_TOO:
            assert str(ours).startswith("damaged: Corrupt JPEG data")
        elif name in RUN_LENGTH_ENCODED:
            assert "run-length encoded" in str(ours)
        else:
            assert isinstance(ours, np.ndarray), (name, ours)
            theirs = decode_with_pillow(FOLDER / name)
            assert (ours.shape, ours.dtype) == (theirs.shape, np.uint8), name
            error = np.abs(ours.astype(np.int16) - theirs)
            assert error.max() <= 2, f"{name}: {error.max()} levels"


def test_damaged_files_and_decompression_bombs_are_rejected_with_a_reason() -> None:
    for name in of("bad"):
        ours = decode_timed(name)
        if name in WHOLE_TO_THE_DECODERS:
            assert isinstance(ours, np.ndarray)
            assert ours.shape == decode_with_pillow(FOLDER / name).shape
        else:
            assert isinstance(ours, str), name
            assert len(ours) >= len("empty file"), name
    for name in of("refuse"):
        assert isinstance(decode_timed(name, limit_s=2), str) == (name not in BOMBS_IN_METADATA), name
