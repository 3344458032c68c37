"""Decoding: any image becomes upright RGB, or is rejected with a reason."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from resolute.prep.convert.decode import MAX_BYTES, MAX_PIXELS, MAX_SCANS, Reject, decode

Scene = Callable[..., NDArray[np.uint8]]


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def png(header: bytes, rows: list[bytes]) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")

    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def psnr_db(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    assert a.shape == b.shape
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return float(10 * np.log10(255**2 / max(error, 1e-9)))


@pytest.mark.parametrize("orientation", [*range(1, 9), 9])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientations_come_out_upright_and_impossible_ones_are_ignored(
    scene: Scene, kind: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    data = encoded(Image.fromarray(scene(1, 40, 24)), kind, exif=exif, **options)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert psnr_db(decode(data), expected) > 45
    assert decode(data).flags.c_contiguous


def test_lossless_formats_keep_every_pixel(scene: Scene) -> None:
    pixels = scene(2, 33, 21)
    image = Image.fromarray(pixels)
    for kind, options in (("PNG", {}), ("BMP", {}), ("TIFF", {}), ("WEBP", {"lossless": True})):
        assert np.array_equal(decode(encoded(image, kind, **options)), pixels), kind


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).astype(np.uint16)[None].repeat(8, 0)
    got = decode(encoded(Image.fromarray(ramp), "PNG"))
    assert (got == np.arange(256, dtype=np.uint8)[None, :, None]).all()


def test_transparent_pixels_are_composited_over_white() -> None:
    rgba = np.zeros((10, 30, 4), np.uint8)
    rgba[:, :10] = (255, 0, 0, 255)
    rgba[:, 10:20] = (255, 0, 0, 0)
    rgba[:, 20:] = (0, 0, 0, 128)
    got = decode(encoded(Image.fromarray(rgba), "PNG"))
    assert got[5, [5, 15]].tolist() == [[255, 0, 0], [255, 255, 255]]
    assert np.abs(got[5, 25].astype(int) - 127).max() <= 1
    palette = Image.new("P", (6, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30] + [0] * 762)
    palette.paste(0, (0, 0, 3, 4))
    assert decode(encoded(palette, "PNG", transparency=0))[0, [0, 5]].tolist() == [[255, 255, 255], [10, 20, 30]]
    grey = np.full((4, 6), 1000, np.uint16)
    grey[:, 3:] = 1001  # the same in 8 bits
    got = decode(encoded(Image.fromarray(grey), "PNG", transparency=1001))
    assert got[0, :, 0].tolist() == [4, 4, 4, 255, 255, 255]


def test_grey_and_black_and_white_match_pillows_conversion(scene: Scene) -> None:
    for mode, kind in (("L", "JPEG"), ("1", "TIFF")):
        data = encoded(Image.fromarray(scene(3, 48, 32)).convert(mode), kind)
        assert psnr_db(decode(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))) > 45


def test_32_bit_integers_are_refused() -> None:
    data = encoded(Image.fromarray(np.arange(64, dtype=np.int32).reshape(8, 8)), "TIFF")
    with pytest.raises(Reject, match=r"^depth not supported"):
        decode(data)


def test_truncated_images_are_rejected(scene: Scene) -> None:
    for kind in ("JPEG", "PNG", "WEBP", "GIF"):
        data = encoded(Image.fromarray(scene(4, 200, 150)), kind)
        for part in (0.1, 0.9):
            with pytest.raises(Reject):
                decode(data[: int(len(data) * part)])


def test_formats_are_recognised_by_content_and_others_are_rejected(scene: Scene) -> None:
    image = Image.fromarray(scene(8, 40, 30))
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"):
        assert decode(encoded(image, kind)).shape == (30, 40, 3)
    with pytest.raises(Reject, match=r"^empty file$"):
        decode(b"")
    for data in (b"version https://git-lfs.github.com/spec/v1\n", encoded(image, "PPM")):
        with pytest.raises(Reject, match=r"^not an image$"):
            decode(data)


def test_huge_dimensions_are_rejected_from_the_header() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    small = bytearray(encoded(Image.new("RGB", (8, 8)), "JPEG"))
    frame = small.index(b"\xff\xc0")
    small[frame + 5 : frame + 9] = side.to_bytes(2, "big") * 2
    with pytest.raises(Reject, match=f"^too many pixels: {side}x{side}$"):
        decode(bytes(small))
    with pytest.raises(Reject, match=r"^side out of range"):
        decode(encoded(Image.new("1", (70_000, 1)), "PNG"))


def test_broken_exif_is_ignored_and_pillow_warnings_are_suppressed(scene: Scene) -> None:
    pixels = scene(5, 32, 24)
    broken = b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01\x02\0\xff\xff\0\0\xff\xff\0\0"
    data = encoded(Image.fromarray(pixels), "JPEG", quality=95, exif=broken)
    with pytest.warns(UserWarning, match="EXIF|Tag data|Truncated"), Image.open(io.BytesIO(data)) as image:
        image.getexif()
    assert decode(data).shape == pixels.shape  # pytest turns warnings into errors


def test_a_jpeg_that_ends_in_the_middle_is_rejected(scene: Scene) -> None:
    for mode in ("RGB", "L", "CMYK"):
        data = encoded(Image.fromarray(scene(5, 320, 240)).convert(mode), "JPEG", quality=95)
        with pytest.raises(Reject, match=r"^damaged: Corrupt JPEG data: premature end"):
            decode(data[: len(data) // 2] + b"\xff\xd9")


def test_junk_in_a_scan_is_rejected_but_zero_padding_at_its_end_is_not(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(5, 320, 240)), "JPEG", quality=95, restart_marker_rows=2)
    restart = data.index(b"\xff\xd3")
    with pytest.raises(Reject, match=r"^damaged: Corrupt JPEG data: 36 extraneous bytes before marker 0xd3"):
        decode(data[:restart] + b"junk" * 9 + data[restart:])
    with pytest.raises(Reject, match=r"^damaged: Corrupt JPEG data: \d+ extraneous bytes before marker 0xd9"):
        decode(data[:-2] + b"junk" * 9 + data[-2:])
    assert np.array_equal(decode(data[:-2] + bytes(36) + data[-2:]), decode(data))


def test_a_progressive_jpeg_may_lack_its_last_scans_but_not_its_first(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(6, 320, 240)), "JPEG", quality=95, progressive=True)
    last = data.rindex(b"\xff\xda")
    assert psnr_db(decode(data[: last + 200] + b"\xff\xd9"), decode(data)) > 25
    first = data.index(b"\xff\xda")
    with pytest.raises(Reject, match=r"^damaged"):
        decode(data[: first + 200] + b"\xff\xd9")


def test_too_many_scans_or_bytes_are_rejected_before_decoding(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(6, 64, 64)), "JPEG", progressive=True)
    scan = data[data.rindex(b"\xff\xda") : -2]
    with pytest.raises(Reject, match=r"^too many scans"):
        decode(data[:-2] + scan * MAX_SCANS + data[-2:])
    with pytest.raises(Reject, match=r"^too many bytes"):
        decode(bytes(MAX_BYTES + 1))


def test_a_png_with_a_wrong_checksum_is_rejected(scene: Scene) -> None:
    data = bytearray(encoded(Image.fromarray(scene(6, 64, 64)), "PNG"))
    data[data.index(b"IEND") - 5] ^= 1  # the last byte of the checksum of IDAT
    with pytest.raises(Reject, match="checksum"):
        decode(bytes(data))


def test_sixteen_bit_colour_keeps_its_high_bits(scene: Scene) -> None:
    pixels = scene(7, 20, 10)
    header = (20).to_bytes(4, "big") + (10).to_bytes(4, "big") + bytes([16, 2, 0, 0, 0])
    assert np.array_equal(decode(png(header, [(row.astype(">u2") * 257).tobytes() for row in pixels])), pixels)


def test_cmyk_is_converted_to_the_printed_colours() -> None:
    for ink, colour in (
        ((0, 255, 255, 0), (255, 0, 0)),
        ((0, 0, 0, 255), (0, 0, 0)),
        ((255, 0, 0, 0), (0, 255, 255)),
        ((0, 0, 0, 0), (255, 255, 255)),
    ):
        for kind, options in (("JPEG", {"quality": 95}), ("TIFF", {})):
            got = decode(encoded(Image.new("CMYK", (16, 16), ink), kind, **options))
            assert np.abs(got[8, 8].astype(int) - colour).max() <= 3, kind


def test_the_first_of_several_frames_is_decoded() -> None:
    for kind in ("GIF", "PNG", "WEBP", "MPO", "TIFF"):
        # why new ones for each: Pillow keeps a format's settings in images that it has saved
        frames = [Image.new("RGB", (24, 16), colour) for colour in ("red", "lime", "blue")]
        got = decode(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
        assert got.shape == (16, 24, 3)
        assert np.abs(got[8, 8].astype(int) - (255, 0, 0)).max() <= 3, kind
