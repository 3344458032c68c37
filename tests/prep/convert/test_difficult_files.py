"""Real files that trip decoders: each is decoded or rejected as its index says, in bounded time and memory."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from resolute.prep.convert.decode import decode
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
# `ok` in the index, but rejected: Pillow cannot distinguish complete runs from damaged ones.
RUN_LENGTH_ENCODED = {"otherfmt__mdx__pal8rle.bmp"}

CHILD = """
import json, resource, signal, sys, time
from pathlib import Path
import numpy as np
from resolute.prep.convert.decode import Photo, Reject, decode
from resolute.prep.convert.resize import resize_and_encode
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
out = Path(sys.argv[1])
for number, path in enumerate(sys.argv[2:]):
    signal.alarm(20)  # ends this process
    began = time.process_time()
    try:
        pixels = decode(Path(path).read_bytes())
        stored = resize_and_encode([Photo.full(pixels)] * 2, (32, 146), 90)
        np.save(out / f"{number}.npy", pixels)
        report = {"stored": [list(size) for _, *size in stored]}
    except Reject as reject:
        report = {"reject": str(reject)}
    print(json.dumps({"seconds": time.process_time() - began, **report}), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    """The outcome of each file, from one child process with a 3 GiB address space and 20 s per file."""
    folder = tmp_path_factory.mktemp("pixels")
    paths = [str(FOLDER / row["file"]) for row in ROWS]
    done = subprocess.run([sys.executable, "-c", CHILD, folder, *paths], capture_output=True, text=True, check=False)
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    outcomes = {}
    for number, (row, outcome) in enumerate(zip(ROWS, reports, strict=False)):
        outcomes[row["file"]] = {**outcome, "pixels": folder / f"{number}.npy"}
    assert len(reports) == len(ROWS), f"{ROWS[len(reports)]['file']} ended the process: {done.stderr[-500:]}"
    return outcomes


def decode_with_pillow(path: Path) -> NDArray[np.uint8]:
    """The oracle: Pillow's own conversions of the whole image, over white, upright."""
    with warnings.catch_warnings(), Image.open(path) as opened:
        warnings.simplefilter("ignore")  # pytest makes errors of them; some files have broken EXIF
        image = ImageOps.exif_transpose(opened)
    if image.mode == "I;16":
        grey = np.rint(np.asarray(image).astype(np.float64) / 257).astype(np.uint8)
        return np.stack([grey] * 3, -1)
    rgba = image.convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB"))


def of(case: str) -> list[str]:
    return [row["file"] for row in ROWS if row["case"] == case]


def test_intact_files_are_decoded_as_pillow_decodes_them(outcomes: dict[str, dict[str, object]]) -> None:
    for name in of("ok"):
        outcome = outcomes[name]
        if name in DAMAGED_TOO:
            assert str(outcome["reject"]).startswith("damaged: Corrupt JPEG data")
        elif name in RUN_LENGTH_ENCODED:
            assert "run-length encoded" in str(outcome["reject"])
        else:
            assert "reject" not in outcome, (name, outcome)
            ours, theirs = np.load(str(outcome["pixels"])), decode_with_pillow(FOLDER / name)
            assert (ours.shape, ours.dtype) == (theirs.shape, np.uint8), name
            error = np.abs(ours.astype(np.int16) - theirs)
            assert error.max() <= 2, f"{name}: {error.max()} levels"


def test_damaged_files_are_rejected_with_a_reason_and_bombs_soon(outcomes: dict[str, dict[str, object]]) -> None:
    for name in of("bad"):
        if name in WHOLE_TO_THE_DECODERS:
            assert np.load(str(outcomes[name]["pixels"])).shape == decode_with_pillow(FOLDER / name).shape
        else:
            assert len(str(outcomes[name]["reject"])) >= len("empty file"), name
    for name in of("refuse"):
        assert "reject" in outcomes[name], name
        assert float(str(outcomes[name]["seconds"])) < 2, name
    for name, outcome in outcomes.items():
        assert ("stored" in outcome) != ("reject" in outcome), name
        assert float(str(outcome["seconds"])) < 10, name


def test_colours_match_known_pixels_of_the_images() -> None:
    """Oracles that need no decoder: white paper, a word printed in red, a transparent colour key, a grey image."""

    def pixels(name: str) -> NDArray[np.int16]:
        return decode((FOLDER / name).read_bytes()).astype(np.int16)

    assert pixels("cmyk__jpegdec__jpg-cmyk-2.jpg")[-8:].min() > 250
    red = pixels("cmyk__pillow__pil_sample_cmyk.jpg")[1, 4]
    assert red[0] > 220
    assert red[1:].max() < 60
    assert pixels("png__mdx__tbrn2c08.png")[0, 0].tolist() == [255, 255, 255]
    grey = pixels("gray__twelvemonkeys__gray-sample.jpg")
    assert (grey == grey[..., :1]).all()
