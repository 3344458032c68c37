"""Whole trainings of several tools: the same photos and settings for each, and what is read from their logs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from resolute.benchmarks import resize_once, whole
from resolute.benchmarks.proc import stat_fields
from resolute.benchmarks.whole import main
from resolute.errors import ResoluteError
from tests import ROOT
from tests.conftest import make_photos
from tests.support.commands import run as run_forked

TINY = whole.Case(model="test_resnet", model_kwargs={}, stages=((32, 1), (48, 1)), batch_size=16, eval_batch_size=8)
# stands in for timm's train.py: notes its arguments and writes a log as timm does
TIMM = """
import json, pathlib, sys, time
words = sys.argv[1:]
after = lambda flag: words[words.index(flag) + 1]
out = pathlib.Path(after("--output"), after("--experiment"))
out.mkdir(parents=True)
(out.parent / "words.json").write_text(json.dumps(words))
print("Train: 0 [   0/10 (  0%)]", flush=True)
with (out / "summary.csv").open("w") as file:
    file.write("epoch,eval_top1\\n")
    for epoch in range(int(after("--epochs"))):
        time.sleep(0.3)
        file.write(f"{epoch},{50 + epoch}\\n")
        file.flush()
    time.sleep(0.3)
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line for tiny photos, a tiny case and a stand-in for timm."""
    monkeypatch.setitem(whole.CASES, "small", TINY)
    photos = make_photos(tmp_path / "photos", each=8)
    held_out = [f"{path.parent.name}/{path.name}" for path in sorted(photos.rglob("*.jpg")) if path.stem[-1] in "01"]
    (tmp_path / "val.txt").write_text("\n".join(held_out))
    (tmp_path / "timm").mkdir()
    (tmp_path / "timm/train.py").write_text(TIMM)
    return [
        "--photos",
        str(photos),
        "--val-list",
        str(tmp_path / "val.txt"),
        "--timm",
        str(tmp_path / "timm"),
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "whole.json"),
    ]


@pytest.mark.slow  # trains five times
def test_tools_train_the_same_photos_in_turns(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = whole._time

    def fork(job: whole.Job, words: list[str], log: Path, *, limit_s: float | None = None) -> float:
        """Forked instead of started, which saves the imports."""
        if words[0] != "-m":
            return start(job, words, log, limit_s=limit_s)
        began = time.perf_counter()
        done = run_forked(words[1], words[2:], folder=ROOT, scratch=tmp_path, stdout=str(log))
        assert done.status == 0, done.err
        return time.perf_counter() - began

    monkeypatch.setattr(whole, "_time", fork)
    assert main([*command, "--tools", "ours,plain,plain-once,timm,timm-sizes", "--lr", "plain=0.1"]) == 0
    result = json.loads((tmp_path / "whole.json").read_text())
    assert {*result["prep_s"]} == {"ours", "once"}
    assert [run["tool"] for run in result["runs"]] == ["ours", "plain", "plain-once", "timm", "timm-sizes"]
    assert [run["lr"] for run in result["runs"]] == [TINY.lr, 0.1, TINY.lr, TINY.lr, TINY.lr]
    for run in result["runs"]:
        times = [point["elapsed_s"] for point in run["curve"]]
        assert len(times) == 2
        assert 0 < run["start_s"] < times[0] < times[1] <= run["wall_s"] + 0.2, run
        assert run["top1"] == run["curve"][-1]["top1"]
    assert result["photos"] == 3 * 8 - len((tmp_path / "val.txt").read_text().split())
    once = tmp_path / "work/once"
    assert len([*(once / "train").glob("*/*.jpg")]) == result["photos"]
    fixed, sizes = (
        json.loads((tmp_path / "work" / tool / "words.json").read_text()) for tool in ("timm", "timm-sizes")
    )
    assert sizes[-5:] == ["--train-img-sizes", "32", "48", "--train-size-schedule", "progressive"]
    assert fixed[fixed.index("--img-size") + 1] == "48"
    printed = capsys.readouterr().out
    assert "timm-sizes" in printed
    assert "51.0 ± 0.0" in printed


def test_a_tool_that_hangs_is_stopped_with_its_children(command: list[str], tmp_path: Path) -> None:
    photos = tmp_path / "links"
    assert whole.write_photos([tmp_path / "photos"], lambda name: name.endswith("0.jpg"), photos) == (21, 3)
    (tmp_path / "timm/train.py").write_text(
        "import os, pathlib, time\npathlib.Path(__file__).with_name('pid').write_text(str(os.fork() or os.getpid()))\n"
        "time.sleep(600)\n"
    )
    job = whole.Job(
        case=TINY,
        tool="timm",
        seed=0,
        lr=0.1,
        workers=1,
        threads=1,
        bf16=False,
        photos=photos,
        shards=tmp_path,
        timm=tmp_path / "timm",
        ffcv_python=None,
        folder=tmp_path / "out",
    )
    with pytest.raises(ResoluteError, match="timm, seed 0: no result after 2 s"):
        whole.run(job, limit_s=2)
    child = int((tmp_path / "timm/pid").read_text())
    until = time.monotonic() + 20
    while (stat_fields(child) or ["Z"])[0] != "Z":  # "Z": killed, and not yet waited for
        assert time.monotonic() < until


def test_a_photo_that_is_in_two_folders_is_refused(tmp_path: Path) -> None:
    first, second = make_photos(tmp_path / "a", each=2), make_photos(tmp_path / "b", each=2)
    with pytest.raises(ResoluteError, match=r"class0/000\.jpg: a second photo class0/000\.jpg, expected one"):
        whole.write_photos([first, second], lambda name: False, tmp_path / "links")


def test_a_tool_that_fails_ends_the_benchmark_with_its_last_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timm/train.py").write_text("raise SystemExit('no such network')")
    assert main([*command, "--tools", "timm"]) == 2
    assert "timm, seed 0: got status 1, expected 0: no such network" in capsys.readouterr().err


def test_rates_are_tried_with_each_tool_and_the_best_is_printed(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = TIMM.replace("50 + epoch", "50 + epoch + 10 * (after('--lr') == '0.2')")
    (tmp_path / "timm/train.py").write_text(better)
    assert main([*command, "--tools", "timm,timm-sizes", "--rates", "0.1,0.2,0.3"]) == 0
    assert "--lr timm=0.2 timm-sizes=0.2" in capsys.readouterr().out.splitlines()


def test_peers_train_as_many_epochs_as_fit_in_the_time_of_ours(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(whole._COMMANDS, "ours", whole._timm)  # as fast as timm, which trains both epochs again
    monkeypatch.setattr(whole, "prepare", lambda job: 0.0)
    case = replace(TINY, stages=((32, 6), (48, 2)))
    monkeypatch.setitem(whole.CASES, "small", case)
    (tmp_path / "timm/train.py").write_text(TIMM.replace("time.sleep(0.3)", "time.sleep(0.3 * ('32' in words))"))
    assert main([*command, "--tools", "ours,timm-sizes", "--same-time"]) == 0
    runs = json.loads((tmp_path / "whole.json").read_text())["runs"]
    assert [(run["tool"], run["round"]) for run in runs] == [("ours", 0), ("timm-sizes", 0), ("timm-sizes", 1)]
    assert runs[0]["epochs"] == runs[1]["epochs"] == 8
    assert 1 <= runs[2]["epochs"] < 8


def test_the_summary_adds_prep_and_finds_the_time_of_equal_accuracy() -> None:
    def run(tool: str, wall_s: float, *top1: float) -> dict[str, Any]:
        curve = [{"elapsed_s": wall_s * (i + 1) / len(top1), "top1": value} for i, value in enumerate(top1)]
        return {
            "tool": tool,
            "round": 0,
            "seed": 0,
            "lr": 0.1,
            "workers": 2,
            "epochs": 2,
            "wall_s": wall_s,
            "start_s": 1.5,
            "curve": curve,
            "top1": top1[-1],
        }

    result = {
        "prep_s": {"ours": 5.0},
        "runs": [run("ours", 10.0, 0.6, 0.7), run("timm", 40.0, 0.3, 0.5), run("plain", 20.0, 0.1, 0.2)],
    }
    ours, timm, plain = whole.summary(result)
    assert (ours["wall_s"][0], ours["equal_s"]) == (15.0, (10.0, 0.0))
    assert (timm["wall_s"][0], timm["equal_s"]) == (40.0, (40.0, 0.0))
    assert plain["equal_s"] is None
    assert ours["start_s"] == (1.5, 0.0)


def test_photos_are_resized_once_to_a_short_side_of_256_px_and_never_enlarged(tmp_path: Path) -> None:
    for name, size in (("train/a/wide.png", (900, 600)), ("val/b/small.jpg", (300, 200))):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        Image.new("RGB", size, (200, 10, 10)).save(tmp_path / "photos" / name)
    assert resize_once.main([str(tmp_path / "photos"), str(tmp_path / "once")]) == 0
    sizes = {}
    for path in (tmp_path / "once").rglob("*.jpg"):
        with Image.open(path) as image:
            sizes[str(path.relative_to(tmp_path / "once"))] = (image.format, image.size)
    assert sizes == {"train/a/wide.jpg": ("JPEG", (384, 256)), "val/b/small.jpg": ("JPEG", (300, 200))}
