"""The JPEG decoder of the CPU graph gives the pixels of libjpeg-turbo or declines an image, whatever its bytes are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from numpy.typing import NDArray

from resolute.pipeline.graph.batch_pipeline import BatchPipeline
from resolute.pipeline.graph.kernels.jpeg.memory import MAX_PIXELS
from resolute.pipeline.graph.kernels.pread import TAG_BYTES
from resolute.pipeline.plan.augment_params import AugmentOps
from tests import ROOT
from tests.support import jpeg_fuzz
from tests.support.baseline_cpu import BASELINE_CPU
from tests.support.batch_spec import batch_spec
from tests.support.jpeg import Region, encode, our_region, photo, random_region, regions_by_dali

PLAIN: list[dict[str, Any]] = [
    {"quality": 90, "subsampling": 2},
    {"quality": 20, "subsampling": 2, "optimize": True},
    {"quality": 100, "subsampling": 2},
    {"quality": 92, "subsampling": 0},
    {"quality": 35, "subsampling": 0, "optimize": True},
]
SIZES = [(5, 1), (5, 60), (16, 16), (17, 15), (33, 47), (64, 48), (131, 90), (400, 9), (250, 301)]
DIFFICULT = ROOT.parent / "shared" / "data" / "difficult"


def whole(jpeg: bytes) -> NDArray[np.uint8]:
    """(h, w, 3) pixels by libjpeg-turbo's accurate transform and interpolation."""
    pixels = simplejpeg.decode_jpeg(jpeg, "RGB", fastdct=False, fastupsample=False)
    return np.asarray(pixels)


def faults(jpeg: bytes, regions: list[Region]) -> list[Region]:
    """Regions that are declined or differ from the whole image; of 4:2:0, the narrowest are to be declined."""
    expected, wrong = whole(jpeg), []
    is_420, width = jpeg[jpeg.index(b"\xff\xc0") + 11] == 0x22, expected.shape[1]
    for x, y, w, h in regions:
        got, left, right = our_region(jpeg, (x, y, w, h)), max(x - 1, 0), min(x + w + 1, width)
        if is_420 and right - left // 16 * 16 <= 4:
            is_right = got is None
        else:
            is_right = got is not None and np.array_equal(got, expected[y : y + h, x : x + w])
        if not is_right:
            wrong.append((x, y, w, h))
    return wrong


@pytest.mark.parametrize("options", [*PLAIN, {"grey": True}], ids=str)
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_each_region_has_the_pixels_of_the_whole_image(width: int, height: int, options: dict[str, Any]) -> None:
    image, rng = photo(width, height, width), np.random.default_rng(height)
    jpeg = encode(image[:, :, 0].copy(), quality=85) if "grey" in options else encode(image, **options)
    corners = [(0, 0, width, height), (width - 1, height - 1, 1, 1), (0, height // 2, width, 1)]
    assert faults(jpeg, corners + [random_region(width, height, rng) for _ in range(20)]) == []


def test_noise_and_flat_colours_of_any_quality_have_the_same_pixels() -> None:
    """Noise has coefficients up to the largest; flat colours have DC coefficients only."""
    rng = np.random.default_rng(3)
    for k in range(60):
        width, height = (int(n) for n in rng.integers(5, 80, 2))
        noise = rng.integers(0, 2, (height, width, 3), dtype=np.uint8) * 255
        image = [noise, np.full_like(noise, rng.integers(256, size=3)), np.sort(noise, axis=1)][k % 3]
        jpeg = encode(image, quality=int(rng.integers(5, 101)), subsampling=int(rng.choice([0, 2])))
        assert faults(jpeg, [random_region(width, height, rng) for _ in range(6)]) == [], k


def test_tables_of_the_image_before_are_not_used() -> None:
    """The decoder keeps Huffman tables; each file here has others under the same numbers."""
    rng = np.random.default_rng(4)
    jpegs = [encode(photo(90, 70, k), quality=q, optimize=k % 3 > 0) for k, q in enumerate((30, 95, 60, 80, 30, 100))]
    for _ in range(4):
        for k in rng.permutation(len(jpegs)):
            assert faults(jpegs[k], [random_region(90, 70, rng)]) == []


def test_tables_that_differ_in_their_symbols_only_are_not_confused() -> None:
    """Of the second file, two symbols have each other's code: runs of three and of four zeros before a 1 or -1."""
    jpeg = encode(photo(90, 70), quality=40)
    other = jpeg.replace(b"\x21\x31\x41\x06", b"\x21\x41\x31\x06")
    region = (5, 0, 80, 30)
    expected = regions_by_dali([jpeg, other], [region] * 2)
    assert not np.array_equal(expected[0], expected[1])
    for k in (0, 1, 0, 1):
        got = our_region((jpeg, other)[k], region)
        assert got is not None
        np.testing.assert_array_equal(got, expected[k])


@pytest.mark.parametrize("options", [{"subsampling": 2}, {"subsampling": 0}], ids=str)
def test_a_region_larger_than_the_decoders_memory_is_declined(options: dict[str, Any]) -> None:
    """A flat image takes few bytes, whatever its size; from it, smaller regions are decoded."""
    jpeg = encode(np.full((1500, 1400, 3), (9, 200, 77), np.uint8), **options)
    assert len(jpeg) < MAX_PIXELS < 1400 * 1500
    assert our_region(jpeg, (0, 0, 1400, 1500)) is None
    assert our_region(jpeg, (0, 0, 1400, 800)) is None
    assert our_region(jpeg, (1, 0, 700, 1500)) is None
    assert faults(jpeg, [(400, 500, 800, 900), (0, 0, 1400, 500), (3, 0, 400, 1500)]) == []


# ---- images that it declines -----------------------------------------------------------------------------------------


def declined() -> dict[str, bytes]:
    """By what is special: JPEGs that the decoder leaves to libjpeg-turbo."""
    image, plain = photo(96, 80), encode(photo(96, 80), quality=90)
    scan = plain.index(b"\xff\xda")
    damaged = bytearray(plain)
    damaged[scan + 200 : scan + 230] = b"\xff\x00" * 15  # ones only: no code
    return {
        "progressive": encode(image, progressive=True),
        "restart markers": encode(image, restart_marker_blocks=3),
        "4:2:2": encode(image, subsampling=1),
        "CMYK": encode(np.dstack([image, image[:, :, 0]])),
        "damaged": bytes(damaged),
        "bytes behind the end": plain + b"\0" * 7,
        "Exif": plain[:2] + b"\xff\xe1\x00\x0aExif\0\0\0\0" + plain[2:],
        "no quantisation table": plain.replace(b"\xff\xdb", b"\xff\xfe"),
    }


def graph_of(n: int, **options: Any) -> BatchPipeline:
    plain: dict[str, Any] = {
        "batch_size": n,
        "num_threads": 2,
        "device_id": None,
        "decode": "cpu",
        "batches_ahead": 1,
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
        "dtype": torch.uint8,
        "ops": AugmentOps(),
        "largest_pixels": n * 64 * 64,
    }
    return BatchPipeline(**{**plain, **options})


def tagged(jpeg: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(jpeg + bytes(TAG_BYTES), np.uint8)


def run(jpegs: list[bytes], regions: list[Region]) -> NDArray[np.uint8]:
    """(N, 64, 64, 3) of the CPU graph; the batch runs twice."""
    spec = batch_spec(len(jpegs), res=64, crop=regions)
    graph, sizes = graph_of(len(jpegs)), np.array([len(jpeg) for jpeg in jpegs])
    graph.prime(spec, [tagged(jpeg) for jpeg in jpegs], sizes)
    graph.start(spec, [tagged(jpeg) for jpeg in jpegs], sizes)
    out = graph.take(spec, None).numpy().copy()
    graph.close()
    return out


@pytest.mark.parametrize("name", declined())
def test_a_declined_image_has_the_pixels_of_dalis_decoder(name: str) -> None:
    """Also in one batch with others, of which each keeps its own pixels. A region of 64 px is not resized."""
    odd, plain = declined()[name], [encode(photo(96, 80, k)) for k in (1, 2, 3)]
    regions = [(3, 9, 64, 64), (32, 16, 64, 64), (0, 0, 64, 64), (7, 1, 64, 64)]
    jpegs = [plain[0], odd, plain[1], plain[2]]
    if name == "no quantisation table":
        with pytest.raises(RuntimeError):
            regions_by_dali([odd], regions[1:2])
        with pytest.raises(RuntimeError):
            run(jpegs, regions)
        return
    assert our_region(odd, (0, 0, 96, 80)) is None
    np.testing.assert_array_equal(run(jpegs, regions), np.stack(regions_by_dali(jpegs, regions)))
    np.testing.assert_array_equal(run([odd] * 3, regions[:3]), np.stack(regions_by_dali([odd] * 3, regions[:3])))


@pytest.mark.skipif(not DIFFICULT.exists(), reason="no folder of difficult files here")
def test_difficult_files_give_pixels_or_are_refused_as_before() -> None:
    accepted = 0
    for path in sorted(DIFFICULT.iterdir()):
        jpeg = path.read_bytes()
        got = our_region(jpeg, (1, 1, 3, 3)) if jpeg[:2] == b"\xff\xd8" else None
        if got is not None:
            accepted += 1
            np.testing.assert_array_equal(got, regions_by_dali([jpeg], [(1, 1, 3, 3)])[0], err_msg=path.name)
    assert accepted > 5


# ---- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_accepted_changed_file_has_the_pixels_of_dalis_decoder() -> None:
    """Changes in the header and in the scan; a third is accepted, for example where only values changed."""
    rng, accepted = np.random.default_rng(5), 0
    jpegs, regions, pixels = list[bytes](), list[Region](), []
    files = jpeg_fuzz.bases()
    for k in range(1000):
        base = np.frombuffer(files[k % len(files)], np.uint8)
        scratch = np.zeros(len(base), np.uint8)
        jpeg = scratch[: jpeg_fuzz.changed(base, scratch, rng)].tobytes()
        width, height = jpeg_fuzz.size(files[k % len(files)])
        region = random_region(width, height, rng)
        got = our_region(jpeg, region)
        if got is not None:
            accepted += 1
            jpegs.append(jpeg)
            regions.append(region)
            pixels.append(got)
    assert accepted > 100
    for k, expected in enumerate(regions_by_dali(jpegs, regions)):
        np.testing.assert_array_equal(pixels[k], expected, err_msg=f"{k}: {regions[k]}")


def in_child(*words: str, **variables: str) -> str:
    command = [sys.executable, "-m", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, **variables}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_changed_files_are_read_and_written_nowhere_outside() -> None:
    """Between pages that may not be touched; ten million were once (see LOG.md)."""
    out = in_child("tests.support.jpeg_fuzz", "--files=3000")
    assert out.startswith("3000 files, ")
    assert out.endswith(" 0 whole ones wrong\n")


@pytest.mark.slow  # compiles for another CPU
def test_code_for_any_cpu_gives_the_same_pixels(tmp_path: Path) -> None:
    """In a process whose code has no instructions that some CPUs lack, the tests of this file's first part pass."""
    words = ["-p", "no:cacheprovider", "-n0", "-k", "region_has or noise_and_flat", str(Path(__file__))]
    out = in_child("pytest", *words, NUMBA_CACHE_DIR=str(tmp_path), **BASELINE_CPU)
    assert " passed" in out
    assert "failed" not in out
