"""Decoding: any image becomes upright RGB, or is rejected with a reason."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from resolute.prep.convert.decode import MAX_BYTES, MAX_PIXELS, MAX_SCANS, Reject, decode, decode_reduced

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
    with pytest.raises(Reject, match=r"^32-bit TIFF: |^signed TIFF: 32 bits"):
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


def isobmff(brand: bytes) -> bytes:
    return b"\0\0\0\x18ftyp" + brand + bytes(4) + b"mif1" + brand + bytes(600)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n", "git-lfs pointer: run git lfs"),
        (b"../../.git/annex/objects/4d/7a/SHA256E-s1--a.jpg/SHA256E-s1--a.jpg", "git-annex pointer: "),
        (isobmff(b"heic"), "HEIC photo: "),
        (isobmff(b"mif1"), "HEIF photo: "),
        (isobmff(b"avif"), "AVIF photo: "),
        (isobmff(b"mp42"), "video: "),
        (isobmff(b"qt  "), "video: "),
        (isobmff(b"crx "), "camera raw: "),
        (b"II*\0\x10\0\0\0CR\2\0" + bytes(500), "camera raw: "),
        (b"FUJIFILMCCD-RAW 0201" + bytes(500), "camera raw: "),
        (b"\xff\x0a" + bytes(100), "JPEG XL photo: "),
        (b"\0\0\0\x0cJXL \r\n\x87\n" + bytes(100), "JPEG XL photo: "),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(100), "JPEG 2000 photo: "),
        (b"\xff\x4f\xff\x51" + bytes(100), "JPEG 2000 photo: "),
        (b"8BPS\0\1" + bytes(100), "Photoshop file: "),
        (b"%PDF-1.7\n" + bytes(100), "PDF document: "),
        (b"PK\3\4" + bytes(100), "zip archive: "),
        (b"\x1f\x8b\x08" + bytes(100), "gzip file: "),
        (bytes(128) + b"DICM" + bytes(100), "DICOM file: "),
        (b"\n<!DOCTYPE html>\n<html><body>404</body></html>", "HTML page: "),
        (b"<html>404</html>", "HTML page: "),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG drawing: "),
        (b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>', "XML document: "),
        (b'{"error": "rate limit"}', "JSON document: "),
        (b"404: Not Found\n", "text: not an image"),
        (b"P6 4 4 255\n" + bytes(48), "PNM file: "),
        (bytes(5000), "only zero bytes: "),
        (b"\xff\xd8\xff\xe0" + bytes(100), "damaged: JPEG"),
        (b"\x01\x02\x03\x04" * 100, "not an image"),
        (b"", "empty file"),
    ],
)
def test_what_is_no_image_of_a_known_format_is_rejected_by_its_name(data: bytes, reason: str) -> None:
    with pytest.raises(Reject, match=f"^{reason}"):
        decode(data)


def with_chunks(data: bytes, *chunks: bytes) -> bytes:
    """A PNG with further chunks, (kind and content), after its header."""
    made = b"".join(
        (len(chunk) - 4).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big") for chunk in chunks
    )
    return data[:33] + made + data[33:]


def test_metadata_of_a_png_decide_nothing_whatever_their_size(scene: Scene) -> None:
    pixels = scene(9, 40, 30)
    data, packed = encoded(Image.fromarray(pixels), "PNG"), zlib.compress(bytes(3_000_000))
    for chunk in (
        b"zTXtprompt\0\0" + packed,
        b"iTXtprompt\0\1\0\0\0" + packed,
        b"tEXtprompt\0" + b"x" * 3_000_000,
        b"iTXtXML:com.adobe.xmp\0\1\0\0\0" + packed,
        b"zTXtRaw profile type exif\0\0" + packed,
        b"iCCPbig\0\0" + packed,
        b"iCCPbroken\0\0not zlib",
        b"eXIfnot exif",
        b"pHYs",
        b"sRGB",
        b"gAMA\0",
        b"tIMEx",
    ):
        assert np.array_equal(decode(with_chunks(data, chunk)), pixels), chunk[:30]
        damaged = bytearray(with_chunks(data, chunk))
        damaged[33 + 8 + len(chunk) - 4] ^= 1  # of the checksum
        assert np.array_equal(decode(bytes(damaged)), pixels), chunk[:30]
    assert np.array_equal(decode(with_chunks(data, *[b"zTXta\0\0" + packed] * 40)), pixels)


def test_a_png_that_lacks_its_end_is_truncated(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(9, 40, 30)), "PNG")
    for end in (len(data) - 1, len(data) - 12, len(data) - 20, 60):
        with pytest.raises(Reject, match=r"^truncated"):
            decode(data[:end])


def test_an_orientation_in_text_of_a_png_is_applied(scene: Scene) -> None:
    pixels = scene(9, 40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6
    lines = b"\nexif\n%8d\n" % len(exif.tobytes()) + exif.tobytes().hex().encode() + b"\n"
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><a tiff:Orientation="6"/></x:xmpmeta>'
    for chunk in (
        b"zTXtRaw profile type exif\0\0" + zlib.compress(lines),
        b"tEXtRaw profile type exif\0" + lines,
        b"iTXtXML:com.adobe.xmp\0\0\0\0\0" + xmp,
    ):
        data = with_chunks(encoded(Image.fromarray(pixels), "PNG"), chunk)
        assert np.array_equal(decode(data), np.rot90(pixels, -1)), chunk[:20]


def progressive(pixels: NDArray[np.uint8], **options: object) -> bytes:
    return encoded(Image.fromarray(pixels), "JPEG", quality=90, progressive=True, **options)


def test_only_scans_of_the_image_itself_count(scene: Scene) -> None:
    pixels = scene(6, 160, 120)
    data = progressive(pixels)
    many = b"\xff\xda\0\x08" * (MAX_SCANS + 10)
    for other in (
        data + b"\0\0\0\x18ftypmp42" + many,  # a motion photo
        data + progressive(pixels) * 12,
        progressive(pixels, exif=b"Exif\0\0" + many),
        progressive(pixels, comment=many),
    ):
        assert np.array_equal(decode(other), decode(data))
    scan = data[data.rindex(b"\xff\xda") : -2]
    for fill in (b"", b"\xff\xff\xff"):
        with pytest.raises(Reject, match=r"^too many scans: 1[01]\d$"):
            decode(data[:-2] + (fill + scan) * MAX_SCANS + data[-2:] + many)


def test_padding_before_the_end_of_a_jpeg_is_found_whatever_follows(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(5, 320, 240)), "JPEG", quality=95)
    behind = b"video \xff\xd9 and more"
    assert np.array_equal(decode(data[:-2] + bytes(36) + data[-2:] + behind), decode(data))
    with pytest.raises(Reject, match="extraneous bytes"):
        decode(data[:-2] + b"junk" * 9 + data[-2:] + bytes(40) + data[-2:])


@pytest.mark.parametrize("sampling", [0x14, 0x41, 0x12, 0x21, 0x22, 0x11, 0x31, 0x13, 0x24, 0x42, 0x44, 0x00, 0xFF])
def test_any_chroma_subsampling_is_decoded_or_rejected(scene: Scene, sampling: int) -> None:
    data = bytearray(encoded(Image.fromarray(np.full((64, 64, 3), 90, np.uint8)), "JPEG", subsampling=2))
    data[data.index(b"\xff\xc0") + 11] = sampling
    for factor in (1, 2):
        try:
            assert decode_reduced(bytes(data), factor).pixels.shape[2] == 3
        except Reject as reject:
            assert sampling not in (0x14, 0x41, 0x22), reject  # noqa: PT017


def test_jpegs_of_12_bits_and_lossless_ones_are_rejected_by_name(scene: Scene) -> None:
    data = encoded(Image.fromarray(scene(1, 32, 24)), "JPEG")
    at = data.index(b"\xff\xc0")
    with pytest.raises(Reject, match=r"^12-bit JPEG: not supported"):
        decode(data[: at + 4] + b"\x0c" + data[at + 5 :])
    with pytest.raises(Reject, match=r"^lossless JPEG: not supported"):
        decode(data[: at + 1] + b"\xc3" + data[at + 2 :])


def test_a_damaged_jpeg_of_4_4_1_is_rejected(scene: Scene) -> None:
    data = bytearray(encoded(Image.fromarray(np.full((64, 64, 3), 90, np.uint8)), "JPEG", subsampling=2))
    data[data.index(b"\xff\xc0") + 11] = 0x14
    assert (decode(bytes(data)) == 90).all()
    with pytest.raises(Reject, match=r"^damaged"):
        decode(bytes(data[:-40] + data[-2:]))
    with pytest.raises(Reject, match=r"^too many pixels: 64x64$"):
        decode(bytes(data), 4000)


def test_an_error_of_the_jpeg_decoder_ends_one_photo(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.fromarray(scene(1, 32, 24)), "JPEG")

    def fails(error: Exception) -> Callable[..., object]:
        def call(*_: object, **__: object) -> object:
            raise error

        return call

    for error in (KeyError(9), IndexError("none"), ValueError("new message")):
        monkeypatch.setattr("simplejpeg.decode_jpeg", fails(error))
        assert decode(data).shape == (24, 32, 3)  # by Pillow
    monkeypatch.setattr("simplejpeg.decode_jpeg", fails(MemoryError()))
    with pytest.raises(MemoryError):
        decode(data)


def test_sixteen_bit_pngs_use_the_bits_that_a_setting_says() -> None:
    ramp = np.arange(4096, dtype=np.uint16).reshape(64, 64)
    expected = np.rint(ramp / 4095 * 255)
    assert np.abs(decode(encoded(Image.fromarray(ramp), "PNG"), bits=12)[..., 0] - expected).max() <= 0.51
    size = (64).to_bytes(4, "big") * 2
    for colour, bands in ((2, 3), (6, 4)):
        samples = np.dstack([ramp, ramp.T, ramp, np.full_like(ramp, 65535)])[..., :bands].astype(">u2")
        data = png(size + bytes([16, colour, 0, 0, 0]), [row.tobytes() for row in samples])
        got = decode(data, bits=12)
        assert np.abs(got - np.dstack([expected, expected.T, expected])).max() <= 0.51
        assert decode(data).max() == 15
        assert decode_reduced(data, 1).largest == 4095
    data = png(size + bytes([16, 4, 0, 0, 0]), [row.tobytes() for row in np.dstack([ramp, ramp]).astype(">u2")])
    with pytest.raises(Reject, match=r"^16-bit LA not supported: with GREY_RANGE"):
        decode(data, bits=12)
