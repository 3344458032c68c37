"""Whole trainings of several tools: the same photos and settings for each, and what is read from their logs."""

from __future__ import annotations

import json
import shutil
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from resolute.benchmarks.proc import stat_fields
from resolute.benchmarks.whole import loop, resize_once, tools
from resolute.benchmarks.whole.__main__ import main
from resolute.benchmarks.whole.photos import MEAN, STD, hash_rule, write_photos
from resolute.benchmarks.whole.summary import summary
from resolute.errors import ResoluteError
from tests.conftest import make_photos
from tests.support.commands import timed_in_forks

TINY = tools.Case(model="test_resnet", model_kwargs={}, stages=((32, 1), (48, 1)), batch_size=16, eval_batch_size=8)
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

QUICK_TIMM = TIMM.replace("sleep(0.3)", "sleep(0)")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command line for tiny photos, a tiny case and a stand-in for timm."""
    monkeypatch.setitem(tools.CASES, "small", TINY)
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


def tiny(folder: Path, name: str, stages: Sequence[tuple[int, int]]) -> Path:
    """A recipe with stages of (res, epochs)."""
    text = "".join(f"[[stages]]\nres = {res}\nepochs = {epochs}\nbatch_size = 16\n" for res, epochs in stages)
    path = folder / f"{name}.toml"
    path.write_text(f'[model]\nname = "test_resnet"\n[optim]\nlr = 0.1\n[eval]\nbatch_size = 8\n{text}')
    return path


@pytest.mark.nightly  # trains seven times
def test_tools_and_recipes_train_the_same_photos_in_turns(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tools, "timed", timed_in_forks(tools.timed, tmp_path))
    recipe = tiny(tmp_path, "own", [(32, 1), (40, 1)])
    recipe.write_text(recipe.read_text() + "[ema]\ndecay = 0.5\n")
    words = ["--tools", "ours,plain,plain-once,timm,timm-sizes", "--lr", "plain=0.1", "--recipes", str(recipe)]
    assert main([*command, *words, "--seeds", "3"]) == 0
    result = json.loads((tmp_path / "whole.json").read_text())
    assert {*result["prep_s"]} == {"ours", "once"}
    names = ["ours", "plain", "plain-once", "timm", "timm-sizes", "own"]
    assert [run["tool"] for run in result["runs"]] == names
    assert [run["lr"] for run in result["runs"]] == [TINY.lr, 0.1, TINY.lr, TINY.lr, TINY.lr, 0.1]
    for run in result["runs"]:
        times = [point["elapsed_s"] for point in run["curve"]]
        assert len(times) == run["epochs"] == 2
        assert 0 < run["start_s"] < times[0] < times[1] <= run["wall_s"] + 0.2, run
        assert run["top1"] == run["curve"][-1]["top1"]
        assert ("ema_top1" in run) == (run["tool"] == "own")
    assert result["recipes"] == {"own": recipe.read_text()}
    assert result["photos"] == 3 * 8 - len((tmp_path / "val.txt").read_text().split())
    work = tmp_path / "work"
    assert len([*(work / "once/train").glob("*/*.jpg")]) == result["photos"]
    sizes = {path.name for path in (work / "shards").iterdir() if path.name.isdecimal()}
    assert sizes == {"32", "40", "48"}  # of the case and the recipe
    assert tomllib.loads((work / "own/run/recipe.toml").read_text())["seed"] == 3
    printed = capsys.readouterr().out
    assert "timm-sizes" in printed
    assert "51.0 ± 0.0" in printed
    assert "EMA top-1, %" in printed


def described(tmp_path: Path, tool: str, **values: Any) -> tools.Job:
    common: dict[str, Any] = {
        "case": TINY,
        "tool": tool,
        "seed": 0,
        "lr": 0.1,
        "workers": 1,
        "threads": 1,
        "bf16": False,
        "photos": tmp_path / "photos",
        "shards": tmp_path / "shards",
        "timm": tmp_path / "timm",
        "ffcv_python": "python",
        "folder": tmp_path / "own" / tool,
    }
    job = tools.Job(**{**common, **values})
    (job.photos / "train/a").mkdir(parents=True, exist_ok=True)
    job.folder.mkdir(parents=True, exist_ok=True)
    return job


def test_all_tools_train_the_same_epochs_and_validate_at_the_same_size(tmp_path: Path) -> None:
    fixed, sizes = [(48, 2)], [(32, 1), (48, 1)]
    for tool in ("ours", "ours-224"):
        words, _ = tools.call(described(tmp_path, tool))
        recipe = tomllib.loads(Path(words[words.index("--recipe") + 1]).read_text())
        stages = [(stage["res"], stage["epochs"]) for stage in recipe["stages"]]
        assert stages == (fixed if tool == "ours-224" else sizes)
        assert [stage["eval_res"] for stage in recipe["stages"]] == [48] * len(stages)
    for tool in ("plain", "plain-once", "ffcv"):
        words, _ = tools.call(described(tmp_path, tool))
        settings = json.loads(Path(words[-1]).read_text())
        assert (settings["stages"], settings["eval_res"]) == ([[32, 1], [48, 1]], 48)
    for tool in ("timm", "timm-once", "timm-sizes", "timm-sizes-once"):
        words, read = tools.call(described(tmp_path, tool))
        log = tmp_path / "own" / tool / "run/summary.csv"
        log.parent.mkdir()
        log.write_text("epoch,eval_top1\n")
        read(0.0)  # which ends the thread that watches the log
        assert [words[words.index(flag) + 1] for flag in ("--img-size", "--epochs")] == ["48", "2"]
        own = ["--train-img-sizes", "32", "48", "--train-size-schedule", "progressive"]
        assert words[-5:] == own if "sizes" in tool else "--train-img-sizes" not in words


def test_before_it_is_measured_a_recipe_trains_few_epochs_in_all_its_stages(tmp_path: Path) -> None:
    for stages, epochs in (([(32, 6), (48, 1)], [2, 1]), ([(32, 1), (48, 1), (64, 1)], [1, 1, 1]), ([(32, 9)], [2])):
        job = described(tmp_path, "own", recipe=tiny(tmp_path, "own", stages)).short()
        text = job.recipe.read_text() if job.recipe else ""
        recipe = tools.Recipe.parse({**tomllib.loads(text), "scale_epochs": job.scale_epochs}, name="own")
        assert [stage.epochs for stage in recipe.stages] == epochs


def test_the_plain_loop_normalises_uint8_batches_in_the_training_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[torch.Tensor] = []
    normalise = loop.normalised_on_device

    def spied(batches: Any, **how: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        def kept() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for images, labels in batches:
                loaded.append(images.clone())
                yield images, labels

        return normalise(kept(), **how)

    monkeypatch.setattr(loop, "normalised_on_device", spied)
    epochs = loop._Epochs(
        make_photos(tmp_path / "photos", each=2),
        device=torch.device("cpu"),
        dtype=torch.float32,
        scale=(0.35, 1.0),
        batch_size=4,
        seed=0,
        workers=1,
    )
    for size in (32, 48):
        loaded.clear()
        given = [images for images, _ in epochs.epoch(size)]
        assert [(images.dtype, images.shape[1:]) for images in loaded] == [(torch.uint8, (3, size, size))] * 2
        mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
        for pixels, images in zip(loaded, given, strict=True):
            torch.testing.assert_close(images, (pixels / 255 - mean) / std, atol=1e-4, rtol=0)


def test_photos_are_held_out_by_a_hash_of_their_names_alone(tmp_path: Path) -> None:
    names = [f"{label}/{k}.jpg" for label in "ab" for k in range(500)]
    rule = hash_rule(10)
    held_out = [name for name in names if rule(name)]
    # another choice would change what published results were validated on
    assert held_out[:4] == ["a/8.jpg", "a/14.jpg", "a/28.jpg", "a/46.jpg"]
    assert 60 < len(held_out) < 140
    assert [name for name in names[::-1] if rule(name)] == held_out[::-1]
    for name in names[:100]:
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).touch()
    assert write_photos([tmp_path / "photos"], rule, tmp_path / "links") == (92, 8)
    parts = [
        {f"{path.parent.name}/{path.name}" for path in tmp_path.glob(f"links/{part}/*/*")} for part in ("train", "val")
    ]
    assert parts[1] == {name for name in names[:100] if rule(name)}
    assert parts[0] == {*names[:100]} - parts[1]


def test_a_tool_that_hangs_is_stopped_with_its_children(command: list[str], tmp_path: Path) -> None:
    photos = tmp_path / "links"
    assert write_photos([tmp_path / "photos"], lambda name: name.endswith("0.jpg"), photos) == (21, 3)
    (tmp_path / "timm/train.py").write_text(
        "import os, pathlib, time\npathlib.Path(__file__).with_name('pid').write_text(str(os.fork() or os.getpid()))\n"
        "time.sleep(600)\n"
    )
    job = described(tmp_path, "timm", photos=photos)
    with pytest.raises(ResoluteError, match="timm, seed 0: no result after 2 s"):
        tools.run(job, limit_s=2)
    child = int((tmp_path / "timm/pid").read_text())
    until = time.monotonic() + 20
    while (stat_fields(child) or ["Z"])[0] != "Z":  # "Z": killed, and not yet waited for
        assert time.monotonic() < until


def test_a_photo_that_is_in_two_folders_is_refused(tmp_path: Path) -> None:
    first, second = make_photos(tmp_path / "a", each=2), make_photos(tmp_path / "b", each=2)
    with pytest.raises(ResoluteError, match=r"class0/000\.jpg: a second photo class0/000\.jpg, expected one"):
        write_photos([first, second], lambda name: False, tmp_path / "links")


def test_a_tool_that_fails_ends_the_benchmark_with_its_last_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "timm/train.py").write_text("raise SystemExit('no such network')")
    assert main([*command, "--tools", "timm"]) == 2
    assert "timm, seed 0: got status 1, expected 0: no such network" in capsys.readouterr().err


def test_rates_are_tried_with_each_tool_and_the_best_is_printed_and_taken(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    better = QUICK_TIMM.replace(
        "50 + epoch", "50 + epoch + 10 * (after('--lr') == ('0.3' if '32' in words else '0.2'))"
    )
    (tmp_path / "timm/train.py").write_text(better)
    assert main([*command, "--tools", "timm,timm-sizes", "--rates", "0.1,0.2,0.3"]) == 0
    printed = capsys.readouterr().out
    assert "--lr timm=0.2,timm-sizes=0.3" in printed.splitlines()
    assert "0.2 best  " in printed
    assert "0.3 best, at the edge" in printed
    tuned = tmp_path / "whole.json"
    best = {"timm": {"lr": 0.2, "at_edge": False}, "timm-sizes": {"lr": 0.3, "at_edge": True}}
    assert json.loads(tuned.read_text())["best"] == best
    words = [*command, "--tools", "timm,timm-sizes", "--lr-from", str(tuned), "--out", str(tmp_path / "second.json")]
    assert main(words) == 0
    assert [run["lr"] for run in json.loads((tmp_path / "second.json").read_text())["runs"]] == [0.2, 0.3]


def test_an_unfinished_benchmark_is_continued_and_no_training_is_repeated(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = QUICK_TIMM.replace(
        "words = sys.argv", "print(*sys.argv, file=open(__file__ + '.log', 'a'))\nwords = sys.argv", 1
    )
    train, log, out = tmp_path / "timm/train.py", tmp_path / "timm/train.py.log", tmp_path / "whole.json"
    words = [*command, "--tools", "timm,timm-sizes", "--seeds", "7,8"]

    def trained() -> int:
        """The number of trainings since the last call."""
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return len(lines)

    before = 2 * 2  # each tool with two numbers of workers
    train.write_text(
        noted.replace("out.mkdir", "assert '--seed 8' not in ' '.join(words) or '32' not in words\nout.mkdir")
    )
    assert main(words) == 2
    assert "timm-sizes, seed 8: got status 1" in capsys.readouterr().err
    first = json.loads(out.read_text())
    assert [(run["tool"], run["seed"]) for run in first["runs"]] == [("timm", 7), ("timm-sizes", 7), ("timm", 8)]
    assert first["missing"] == 1
    assert trained() == before + 4
    train.write_text(noted)
    assert main(words) == 0
    done = json.loads(out.read_text())
    assert trained() == 1
    assert (done["runs"][:3], done["missing"]) == (first["runs"], 0)
    assert [(run["tool"], run["seed"]) for run in done["runs"][3:]] == [("timm-sizes", 8)]
    content = out.read_bytes()
    assert main(words) == 0
    assert (trained(), out.read_bytes()) == (0, content)

    words = [*command, "--tools", "timm", "--seeds", "7"]

    def anew(*more: str) -> bool:
        """Whether the command trains everything."""
        assert main([*words, *more]) == 0
        assert len(json.loads(out.read_text())["runs"]) == 1
        return trained() == 2 + 1

    assert anew("--epochs", "32=1,48=2")
    assert anew()  # another command wrote the file
    out.write_text(json.dumps({**(edited := json.loads(out.read_text())), "photos": edited["photos"] + 1}))
    assert anew()
    shutil.rmtree(tmp_path / "work/photos")
    assert anew()
    next((tmp_path / "photos").rglob("*3.jpg")).rename(tmp_path / "gone.jpg")
    assert anew()
    monkeypatch.setattr("resolute.benchmarks.record.commit", lambda: "0123456789ab")
    assert anew()
    assert not anew()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--val-hash", "5"], "--val-list, --val-hash: got both or none, expected one of them"),
        (["--tools", "ffcv"], "--tools: got ffcv without what they need"),
        (["--rates", "0.1"], "--rates: got equal rates, a single one"),
        (["--lr", "nosuch=1"], "--lr: got nosuch, expected some of ours,"),
        (["--epochs", "96"], "--epochs: got 96, expected PX=EPOCHS,…"),
        (["--seeds", "1,1"], "--seeds: got 1,1, expected different ones"),
        (["--recipes", "timm.toml"], "--recipes: got timm.toml, expected different names, none of a tool"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main([*command, *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_the_summary_divides_times_adds_prep_and_finds_the_time_of_equal_accuracy() -> None:
    def run(tool: str, wall_s: float, *top1: float) -> dict[str, Any]:
        curve = [{"elapsed_s": wall_s * (i + 1) / len(top1), "top1": value} for i, value in enumerate(top1)]
        return {
            "tool": tool,
            "seed": 0,
            "lr": 0.1,
            "workers": 2,
            "epochs": 2,
            "wall_s": wall_s,
            "start_s": 1.5,
            "curve": curve,
            "top1": top1[-1],
        }

    result: dict[str, Any] = {
        "prep_s": {"ours": 5.0},
        "runs": [run("ours", 10.0, 0.6, 0.7), run("timm", 40.0, 0.3, 0.5), run("plain", 20.0, 0.1, 0.2)],
    }
    ours, timm, plain = summary(result)
    assert (ours["wall_s"][0], ours["equal_s"]) == (15.0, (10.0, 0.0))
    assert (timm["wall_s"][0], timm["equal_s"]) == (40.0, (40.0, 0.0))
    assert plain["equal_s"] is None
    assert (ours["start_s"], ours["train_s"], ours["prep_s"]) == ((1.5, 0.0), (8.5, 0.0), 5.0)
    second = {**run("ours", 12.0, 0.6, 0.8), "start_s": 2.5}
    (both,) = summary({**result, "runs": [result["runs"][0], second]})
    assert both["seeds"] == 2
    assert (both["wall_s"], both["start_s"], both["train_s"]) == ((16.0, 1.0), (2.0, 0.5), (9.0, 0.5))
    assert both["top1"] == pytest.approx((75.0, 5.0))
    assert both["ema_top1"] is None
    averaged = [{**each, "tool": "own", "ema_top1": 0.9} for each in (result["runs"][0], second)]
    (own,) = summary({**result, "runs": averaged})
    assert (own["ema_top1"], own["prep_s"]) == (pytest.approx((90.0, 0.0)), 5.0)


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
