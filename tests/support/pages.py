"""Every kind of HTML page of the project, of tiny or made-up data, some of them with very many rows."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.conftest import make_photos
from tests.support.cli import prep
from tests.support.synthetic_log import GPU, write_log

__all__ = ["PAGES", "bench_result"]

MANY = 1000  # classes


def shard_report(request: pytest.FixtureRequest, _: Path) -> bytes:
    return (request.getfixturevalue("shard_root") / "report.html").read_bytes()


def shard_report_of_many_classes(_: pytest.FixtureRequest, folder: Path) -> bytes:
    make_photos(folder / "photos", classes=300, each=2)
    words = ["--src", folder / "photos", "--out", folder / "s", "--res", "32", "--workers", "1"]
    assert prep([str(word) for word in words]) == 0
    return (folder / "s" / "report.html").read_bytes()


def run_report(_: pytest.FixtureRequest, folder: Path) -> bytes:
    write_log(folder, calibrated=True, machine=GPU)
    return _report(folder, classes=12)


def run_report_of_many_epochs_and_classes(_: pytest.FixtureRequest, folder: Path) -> bytes:
    records = write_log(folder, epochs_of_last=94, steps=20, ema=False)
    start = next(record for record in records if record["kind"] == "start")
    start |= {"class_names": _names(MANY), "class_samples": [*range(1, MANY + 1)]}
    for record in records:
        if record["kind"] == "epoch":
            record["class_counts"] = [1] * MANY
    (folder / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return _report(folder, classes=MANY)


def _report(folder: Path, *, classes: int) -> bytes:
    """The report of the run in `folder`, with a validation of `classes` classes."""
    from resolute.train.logs.run_log import RunLogReader
    from resolute.train.report.page import write_page
    from resolute.train.report.validation import FILE

    rng, names = random.Random(0), _names(classes)
    per_cell = -(-classes // 100)
    cells = -(-classes // per_cell)
    confused = [
        {"label": names[k], "predicted": names[-k - 1], "count": 20 - k, "samples": [k, 20 + k]}
        for k in range(min(20, classes // 2))
    ]
    details = {
        "kind": "class",
        "epoch": 7,
        "res": 224,
        "weights": "ema",
        "confused": confused,
        "confusion": {
            "classes_per_cell": per_cell,
            "counts": [[rng.choice((0, 0, 1, 12, 130)) for _ in range(cells)] for _ in range(cells)],
        },
        "classes": [{"name": name, "samples": 50, "accuracy": rng.random()} for name in names],
        "photos": {str(k): _jpeg(k) for k in range(40)},
    }
    (folder / FILE).write_text(json.dumps(details))
    log = RunLogReader(folder / "run.jsonl")
    log.read()
    return write_page(log, folder).read_bytes()


def _names(count: int) -> list[str]:
    return [f"class {k}, with a name that is longer than most" for k in range(count)]


def _jpeg(seed: int) -> str:
    buffer = io.BytesIO()
    Image.effect_noise((112, 84), 10 + seed).save(buffer, "JPEG", quality=60)
    return base64.b64encode(buffer.getvalue()).decode()


def comparison(_: pytest.FixtureRequest, folder: Path) -> bytes:
    from resolute.train.report.page import open_runs, page

    write_log(folder / "a")
    write_log(folder / "b", switch_s=0.5, machine=GPU)
    for number in range(6):
        write_log(folder / f"a-run-with-a-long-name-{number}", epochs_of_last=14, steps=10 + number, ema=False)
    return page(open_runs([str(each) for each in sorted(folder.iterdir())]))


def bench(_: pytest.FixtureRequest, __: Path) -> bytes:
    from resolute.benchmarks.bench import page

    return page(bench_result())


def bench_result() -> dict[str, Any]:
    """A result of `benchmarks.bench`: a loader that is slower than the model at 128 px, and slow first steps."""
    sizes, rng, peer = (128, 160, 224), random.Random(0), "simplejpeg-sized"

    def rounds(value: float) -> dict[str, Any]:
        return {"raw": [value, value], "median": value}

    def steps(late_s: float) -> list[list[list[float]]]:
        return [
            [
                [step_s * rng.uniform(0.98, 1.02) + (late_s if i and not k else 0.0) for k in range(30)]
                for i, step_s in enumerate((0.02, 0.03, 0.06))
            ]
            for _ in range(2)
        ]

    return {
        "command": "resolute bench",
        "date": "2026-01-02",
        "rounds": 2,
        "commit": "0123456789ab",
        "took_s": 88.0,
        "machine": {"cpu": "Some CPU", "cores": 2, "gpu": None, "load_before": 1.5},
        "settings": {"device": "cpu", "threads": 2, "batch_size": 32, "model": "resnet10t"},
        "shards": {"name": "some <photos>", "resolutions": sizes},
        "peer": {"loader": peer, "tried": {"v2-sized": 280.0, peer: 300.0}},
        "loader": {
            "res": [
                {
                    "res": res,
                    "loaders": {
                        "ours": {"images_per_s": rounds(ours), "ours_times": rounds(1.0)},
                        peer: {"images_per_s": rounds(ours / 3), "ours_times": rounds(3.0)},
                    },
                }
                for res, ours in zip(sizes, (2000.0, 1500.0, 900.0), strict=True)
            ]
        },
        "training": {
            "res": [
                {
                    "res": res,
                    "alone": rounds(alone),
                    "loaders": {"ours": rounds(alone * 0.8), peer: rounds(alone * 0.4)},
                    "headroom": rounds(1.25),
                }
                for res, alone in zip(sizes, (1900.0, 1066.0, 533.0), strict=True)
            ]
        },
        "change": {"batch_size": 32, "step_s": {"ours": steps(0.003), peer: steps(0.006), "v2": steps(0.9)}},
    }


SCHEDULE = """
[model]
name = "test_resnet"
[loss]
label_smoothing = 0.2
[augment]
policy = "randaugment"
magnitude = 10
mixup_alpha = 0.2
[[stages]]
res = 32
epochs = 2
batch_size = 16
loss.label_smoothing = 0.0
augment.magnitude = 5
[[stages]]
res = 64
epochs = 1
batch_size = 16
"""


def model_input(request: pytest.FixtureRequest, folder: Path) -> bytes:
    return _command(folder, "show", request.getfixturevalue("shard_root"))


def schedule(_: pytest.FixtureRequest, folder: Path) -> bytes:
    return _command(folder, "lr", "--samples", "500")


def _command(folder: Path, *words: object) -> bytes:
    from resolute.cli import main

    folder.mkdir()
    (folder / "recipe.toml").write_text(SCHEDULE)
    words = (*words, "--recipe", folder / "recipe.toml", "--out", folder / "page.html")
    assert main([str(word) for word in words]) == 0
    return (folder / "page.html").read_bytes()


# by name; each gets the fixtures and a folder that does not exist yet
PAGES: dict[str, Callable[[pytest.FixtureRequest, Path], bytes]] = {
    maker.__name__: maker
    for maker in (
        shard_report,
        shard_report_of_many_classes,
        run_report,
        run_report_of_many_epochs_and_classes,
        comparison,
        bench,
        model_input,
        schedule,
    )
}
