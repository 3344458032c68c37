"""The check of third-party images: DALI decodes every accepted image, intact or damaged, to the reported size."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from nvidia.dali import Pipeline, fn, pipeline_def, types

from resolute.pipeline.dataset.webdataset.image_check import Unusable, upright_size
from tests.support.third_party_tars import encoded, exif, random_image

WHOLE = {
    "baseline": encoded(1), "progressive": encoded(2, progressive=True), "444": encoded(3, subsampling=0),
    **{f"exif {o}": encoded(4, exif=exif(o)) for o in range(9)},
    "png": encoded(5, "PNG"), "png exif": encoded(6, "PNG", exif=exif(6)),
    "webp": encoded(7, "WEBP"), "bmp": encoded(8, "BMP"),
}  # fmt: skip


@pipeline_def(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True, prefetch_queue_depth=1)
def graph() -> Any:
    data = fn.external_source(name="data", dtype=types.UINT8, ndim=1)
    window = fn.external_source(name="window", dtype=types.INT32, ndim=1)
    return fn.decoders.image_slice(data, start=window[:2], shape=window[2:], axes=[0, 1], device="cpu")


class Dali:
    """Decodes crops of images; builds a new DALI pipeline after an error, which ends the old one."""

    pipe: Pipeline | None = None

    def takes(self, data: bytes, window: tuple[int, int, int, int]) -> bool:
        if self.pipe is None:
            self.pipe = graph()
            self.pipe.build()
        try:
            self.pipe.feed_input("data", [np.frombuffer(data, np.uint8)])
            self.pipe.feed_input("window", [np.array(window, np.int32)])
            (out,) = self.pipe.run()
        except RuntimeError:
            self.pipe = None
            return False
        return tuple(out[0].shape()) == (window[2], window[3], 3)

    def agrees(self, data: bytes) -> bool:
        """Whether DALI decodes exactly the size that `upright_size` reports: the whole image and its last row."""
        width, height = upright_size(data)
        edge = (height - 1, width // 2, 1, width - width // 2)
        return self.takes(data, (0, 0, height, width)) and self.takes(data, edge)


@pytest.fixture(scope="module")
def dali() -> Dali:
    return Dali()


@pytest.mark.parametrize("kind", WHOLE)
def test_dali_decodes_intact_files_to_the_reported_size(dali: Dali, kind: str) -> None:
    width, height = upright_size(WHOLE[kind])
    assert dali.agrees(WHOLE[kind])
    assert not dali.takes(WHOLE[kind], (0, 0, height + 1, width))
    dali.pipe = None


@pytest.mark.parametrize("kind", WHOLE)
def test_bytes_after_an_image_do_not_change_its_size(dali: Dali, kind: str) -> None:
    """The reader passes images in rows of equal width, so that each is followed by arbitrary bytes."""
    for rest in (b"\xff" * 5000, bytes(5000), WHOLE["baseline"], WHOLE["progressive"][300:], WHOLE["png"][40:]):
        assert dali.agrees(WHOLE[kind] + rest)


@pytest.mark.parametrize("kind", ["baseline", "progressive", "444", "exif 6", "png", "webp", "bmp"])
def test_dali_decodes_every_accepted_damaged_file(dali: Dali, kind: str) -> None:
    rng = np.random.default_rng(0)
    taken = 0
    for how in range(120):
        data = bytearray(WHOLE[kind])
        at = int(rng.integers(2, len(data)))
        if how % 4 == 0:
            data[at] = rng.integers(256)
        elif how % 4 == 1:
            del data[at:]
        elif how % 4 == 2:
            del data[at : at + 9]
        else:
            data[-20 + how // 4 % 20] ^= 1
        try:
            upright_size(bytes(data))
        except Unusable:
            continue
        taken += 1
        assert dali.agrees(bytes(data)), bytes(data)
    assert taken < 100  # some are damaged beyond decoding


def jpeg_with_exif(tiff: bytes) -> bytes:
    segment = b"\xff\xe1" + struct.pack(">H", len(tiff) + 8) + b"Exif\0\0" + tiff
    return WHOLE["baseline"][:2] + segment + WHOLE["baseline"][2:]


def test_dali_agrees_on_every_accepted_orientation(dali: Dali) -> None:
    """A wrong orientation would swap width and height: crops outside the image end the run."""
    rng = np.random.default_rng(0)
    accepted = 0
    tags, kinds, counts, values = (
        [0x100, 0x10E, 0x11A, 0x11B, 0x128, 0x131, 0x13E, 0x13F, 0x211, 0x213, 0x214, 0x8298, 0x8769, 0x9C9B],
        [2, 3, 4, 5, 7], [1, 2, 4, 5, 20], [0, 8, 20, 30, 40, 50, 60, 70, 300],
    )  # fmt: skip
    for k in range(800):
        order, magic = ("<", b"II*\0") if k % 2 else (">", b"MM\0*")
        entries = [struct.pack(f"{order}HHIHH", 0x112, 3, 1, 6, 0)]
        for _ in range(int(rng.integers(0, 3))):  # further entries before or after it, ending inside or outside
            entry = [int(rng.choice(choices)) for choices in (tags, kinds, counts, values)]
            entries.insert(int(rng.integers(len(entries) + 1)), struct.pack(f"{order}HHII", *entry))
        body = bytearray(magic + struct.pack(f"{order}IH", 8, len(entries)) + b"".join(entries) + bytes(8))
        for _ in range(int(rng.integers(0, 3)) if k % 4 < 2 else 0):
            body[int(rng.integers(len(body)))] = int(rng.choice([0, 1, 2, 3, 4, 6, 8, 18, 255]))
        data = jpeg_with_exif(bytes(body))
        try:
            upright_size(data)
        except Unusable:
            continue
        accepted += 1
        assert dali.agrees(data), bytes(body)
    assert accepted > 100


def test_images_that_dali_cannot_decode_are_refused(dali: Dali) -> None:
    turned = encoded(1, "WEBP", exif=exif(6), lossless=True)
    for data, words in ((turned, "WebP with EXIF"), (encoded(1, "GIF"), "not a JPEG"), (b"\xff", "not a JPEG"),
                        (WHOLE["baseline"][:-2], "damaged JPEG"), (encoded(1, "PNG")[:-8], "damaged")):  # fmt: skip
        with pytest.raises(Unusable, match=words):
            upright_size(data)
        assert not dali.takes(data, (0, 0, *random_image(1).size[::-1]))


def test_huge_images_are_refused_before_decoding() -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    for side, words in ((60_000, "exceeds limit"), (9_000, "too large: 9000x9000 px")):
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
        with pytest.raises(Unusable, match=words):
            upright_size(b"\x89PNG\r\n\x1a\n" + head + chunk(b"IEND", b""))
