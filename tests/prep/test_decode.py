"""Any image becomes upright RGB, or a reject with a reason."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from prep.decode import MAX_PIXELS, Reject, decode

Scene = Callable[..., NDArray[np.uint8]]


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def psnr_db(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    assert a.shape == b.shape
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientations_come_out_upright(scene: Scene, kind: str, orientation: int) -> None:
    image = Image.fromarray(scene(1, 40, 24))
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    data = encoded(image, kind, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert psnr_db(decode(data), expected) > 45
    assert decode(data).flags.c_contiguous


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_impossible_orientations_are_ignored(scene: Scene, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(scene(1, 40, 24))
    assert np.array_equal(decode(encoded(image, "JPEG", exif=exif)), decode(encoded(image, "JPEG")))


def test_lossless_formats_keep_every_pixel(scene: Scene) -> None:
    pixels = scene(2, 33, 21)
    image = Image.fromarray(pixels)
    for kind, options in (("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        assert np.array_equal(decode(encoded(image, kind, **options)), pixels), kind


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    got = decode(encoded(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(got[..., 0], np.arange(256, dtype=np.uint8)[None].repeat(8, 0))
    assert np.array_equal(got[..., 0], got[..., 2])


def test_alpha_is_laid_over_white() -> None:
    rgba = np.zeros((10, 30, 4), np.uint8)
    rgba[:, :10] = (255, 0, 0, 255)
    rgba[:, 10:20] = (255, 0, 0, 0)
    rgba[:, 20:] = (0, 0, 0, 128)
    got = decode(encoded(Image.fromarray(rgba), "PNG"))
    assert got[5, 5].tolist() == [255, 0, 0]
    assert got[5, 15].tolist() == [255, 255, 255]
    assert np.abs(got[5, 25].astype(int) - 127).max() <= 1


def test_palette_transparency_is_laid_over_white() -> None:
    image = Image.new("P", (6, 4), 1)
    image.putpalette([0, 0, 0, 10, 20, 30] + [0] * 762)
    image.paste(0, (0, 0, 3, 4))
    got = decode(encoded(image, "PNG", transparency=0))
    assert got[0, 0].tolist() == [255, 255, 255]
    assert got[0, 5].tolist() == [10, 20, 30]


@pytest.mark.parametrize("mode", ["L", "CMYK", "1"])
def test_other_modes_match_pillows_conversion(scene: Scene, mode: str) -> None:
    image = Image.fromarray(scene(3, 48, 32)).convert(mode)
    data = encoded(image, "TIFF" if mode == "1" else "JPEG")
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert psnr_db(decode(data), expected) > 45


def test_deep_integers_are_refused_and_not_guessed() -> None:
    data = encoded(Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)), "TIFF")
    with pytest.raises(Reject, match=r"^depth not supported"):
        decode(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_truncated_images_are_never_taken(scene: Scene, kind: str, part: float) -> None:
    data = encoded(Image.fromarray(scene(4, 200, 150)), kind)
    with pytest.raises(Reject):
        decode(data[: int(len(data) * part)])


def test_no_image_at_all_says_so() -> None:
    with pytest.raises(Reject, match=r"^empty file$"):
        decode(b"")
    with pytest.raises(Reject, match=r"^not an image$"):
        decode(b"version https://git-lfs.github.com/spec/v1\n")


def test_absurd_sizes_are_refused_from_the_header() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    small = bytearray(encoded(Image.new("RGB", (8, 8)), "JPEG"))
    frame = small.index(b"\xff\xc0")
    small[frame + 5 : frame + 9] = side.to_bytes(2, "big") * 2
    with pytest.raises(Reject, match=f"^too many pixels: {side}x{side}$"):
        decode(bytes(small))
    with pytest.raises(Reject, match=r"^side out of range"):
        decode(encoded(Image.new("1", (70_000, 1)), "PNG"))


def test_pillow_warnings_do_not_escape(difficult: Path) -> None:
    # pytest turns warnings into errors; this file makes Pillow warn of corrupt EXIF data
    assert decode((difficult / "exif__pillow__hopper_bad_exif.jpg").read_bytes()).shape == (500, 500, 3)


def test_difficult_files_are_decoded_or_rejected_as_their_index_says(difficult: Path) -> None:
    """`ok` ones decode as Pillow does; `bad` ones are rejected but for those that Pillow decodes whole."""
    with (difficult / "INDEX.tsv").open() as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    whole_for_pillow = {
        "corrupt__jpegdec__extraneous-bytes-after-sos.jpg",
        "corrupt__mdx__316be81dfdeeb942e904feb3a77f4f83.jpg",
        "otherfmt__mdx__badrle.bmp",
        "png-corrupt__mdx__xcsn0g01.png",
    }
    seen = 0
    for row in rows:
        path = difficult / row["file"]
        if row["case"] not in ("ok", "bad") or not path.is_file():
            continue
        seen += 1
        if row["case"] == "ok":
            pixels = decode(path.read_bytes())
            width, height = map(int, row["size"].split("x"))
            turned = row["exif_orientation"] in "5678"
            assert pixels.shape == ((width, height, 3) if turned else (height, width, 3)), row["file"]
        elif row["file"] not in whole_for_pillow:
            with pytest.raises(Reject):
                decode(path.read_bytes())
    assert seen >= 50
