"""Large JPEGs: decoded at a fraction of their size only where the stored images stay the same within 50 dB."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.prep.convert.batch import Batch, EncodeOptions
from resolute.prep.convert.decode import Photo, Reject, decode, decode_reduced
from resolute.prep.convert.reduced import decode_for_sizes
from resolute.prep.convert.resize import fit, resize, resize_and_encode, resize_photo
from resolute.prep.run import worker
from resolute.prep.sources.image_ref import ByteRange
from tests.prep.convert.test_decode import psnr_db
from tests.support.baseline_cpu import BASELINE_CPU

Scene = Callable[..., NDArray[np.uint8]]
REMAINING = 2.75  # times the stored short side


def jpeg(pixels: NDArray[np.uint8], mode: str | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", **{"quality": 92, "subsampling": "4:2:0"} | options)
    return buffer.getvalue()


def db_to_full(data: bytes, factor: int) -> float:
    """dB between images resized from the reduced and from the full image, at the least remaining pixels."""
    full, photo = decode(data), decode_reduced(data, factor)
    assert (photo.averaged, photo.height, photo.width) == (factor, *full.shape[:2])
    size = fit(photo.width, photo.height, int(min(photo.width, photo.height) / factor / REMAINING))
    return psnr_db(resize_photo(photo, *size), resize(full, *size))


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((1024, 768), {}),
        ((1001, 803), {"subsampling": "4:4:4"}),
        ((797, 1006), {"progressive": True}),
    ],
)
def test_reduced_images_give_the_stored_image_within_50_db(
    scene: Scene, factor: int, size: tuple[int, int], options: dict[str, Any]
) -> None:
    assert db_to_full(jpeg(scene(2, *size), **options), factor) > 50


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_partial_pixel_at_the_edge_shifts_nothing_in_any_orientation(scene: Scene, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    factor = (2, 4, 8)[orientation % 3]
    assert db_to_full(jpeg(scene(3, 999, 807), exif=exif), factor) > 50


def test_what_an_encoder_puts_beyond_the_edge_is_ignored(scene: Scene) -> None:
    pixels = scene(4, 1008, 808)
    pixels[:, 1001:] = pixels[803:] = (255, 0, 255)
    data = bytearray(jpeg(pixels, quality=98, subsampling="4:4:4"))
    sof = data.index(b"\xff\xc0")
    data[sof + 5 : sof + 9] = (803).to_bytes(2, "big") + (1001).to_bytes(2, "big")
    assert decode(bytes(data)).shape == (803, 1001, 3)
    for factor in (2, 4, 8):
        assert db_to_full(bytes(data), factor) > 50


def test_photos_below_the_threshold_keep_the_bytes_of_the_full_decode(scene: Scene) -> None:
    sides = (146, 183, 256)
    pixels = scene(5, 1500, round(2 * REMAINING * 256))
    photos = decode_for_sizes(jpeg(pixels), sides)
    assert [photo.averaged for photo in photos] == [2, 2, 2]
    below = jpeg(pixels[:-1])
    photos = decode_for_sizes(below, sides)
    assert [photo.averaged for photo in photos] == [1, 1, 1]
    expected = resize_and_encode([Photo.full(decode(below))] * 3, sides, 90)
    assert resize_and_encode(photos, sides, 90) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "options", "size", "factor"),
    [
        ("RGB", {"progressive": True}, (3000, 2816), 4),
        ("RGB", {"subsampling": "4:2:2"}, (3000, 2252), 1),
        ("RGB", {"subsampling": "4:2:2"}, (3000, 2253), 2),
        ("CMYK", {}, (3000, 2816), 1),
        ("L", {}, (5700, 5632), 8),
    ],
)
def test_the_factor_follows_from_size_and_subsampling(
    mode: str, options: dict[str, object], size: tuple[int, int], factor: int
) -> None:
    ramp = np.linspace(40, 200, size[0], dtype=np.float32)[None] + np.linspace(-30, 30, size[1])[:, None]
    data = jpeg(ramp.astype(np.uint8), mode, **options)
    (photo,) = decode_for_sizes(data, (256,))
    assert (photo.averaged, photo.width, photo.height) == (factor, *size)


def test_detail_that_means_would_fold_into_the_image_is_decoded_in_full(scene: Scene) -> None:
    y, x = np.mgrid[:1440, :1600]
    zone_plate = (127.5 + 127.5 * np.cos((x * x + y * y) * (np.pi / 8000))).astype(np.uint8)
    (photo,) = decode_for_sizes(jpeg(zone_plate), (256,))
    assert photo.averaged == 1
    (photo,) = decode_for_sizes(jpeg(scene(6, 1600, 1440)), (256,))
    assert photo.averaged == 2


def test_damage_is_found_at_every_factor_for_the_same_reason(scene: Scene) -> None:
    data = jpeg(scene(7, 640, 480), restart_marker_rows=2)
    restart = data.index(b"\xff\xd3")
    for damaged in (
        data[: len(data) // 2],
        data[: len(data) // 2] + b"\xff\xd9",
        data[:restart] + b"junk" * 9 + data[restart:],
        data[: restart - 40] + bytes(40) + data[restart:],
    ):
        with pytest.raises(Reject) as expected:
            decode(damaged)
        for factor in (1, 2, 4, 8):
            with pytest.raises(Reject, match=f"^{re.escape(str(expected.value))}$"):
                decode_reduced(damaged, factor)
    data = jpeg(scene(8, 1600, 1440))
    with pytest.raises(Reject, match=r"^truncated"):
        decode_for_sizes(data[: len(data) * 3 // 4], (146, 256))


def test_bytes_of_a_size_do_not_depend_on_which_others_are_stored(scene: Scene, tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    path.write_bytes(jpeg(scene(9, 1501, 1420)))

    def convert(*short_sides: int) -> list[bytes | bytearray]:
        batch = Batch(first_key=0, byte_ranges=(ByteRange(str(path)),), labels=(1,), short_sides=short_sides)
        result = worker.convert(EncodeOptions(quality=90, label_digits=4), batch)
        assert (result.sources["width"], result.sources["height"]) == (1501, 1420)  # of the full image
        return list(result.tars)

    sides = (64, 256, 257)
    assert [photo.averaged for photo in decode_for_sizes(path.read_bytes(), sides)] == [2, 2, 1]
    assert convert(*sides) == [tar for short_side in sides for tar in convert(short_side)]


@pytest.mark.slow
def test_cpus_without_vector_instructions_decode_and_resize_to_the_same_bytes(scene: Scene, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from resolute.prep.convert.decode import decode_reduced; "
        "from resolute.prep.convert.resize import resize\n"
        "for name in sys.argv[1:]:\n"
        "    for pixels in (decode_reduced(Path(name).read_bytes(), factor).pixels for factor in (2, 4, 8)):\n"
        "        sys.stdout.buffer.write(pixels.tobytes() + resize(pixels, 61, 38).tobytes())"
    )
    expected = b""
    ways: list[dict[str, Any]] = [{}, {"subsampling": "4:2:2"}, {"subsampling": "4:4:4", "progressive": True}]
    for number, options in enumerate(ways):
        data = jpeg(scene(10, 501, 411), **options)
        (tmp_path / f"{number}.jpg").write_bytes(data)
        for pixels in (decode_reduced(data, factor).pixels for factor in (2, 4, 8)):
            expected += pixels.tobytes() + resize(pixels, 61, 38).tobytes()
    old = {**BASELINE_CPU, "JSIMD_FORCENONE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *(f"{tmp_path}/{number}.jpg" for number in range(3))],
        env={**os.environ, **old, "NUMBA_CACHE_DIR": "/proc/none"},
        capture_output=True,
        check=True,
    )
    assert done.stdout == expected
