"""Every command line of the README against every kind of bad input: status 2, one line, nothing partially written.

A row of `BAD` is a command line with a single fault. Words in braces name paths made by the fixture `place`: good ones
(`{shards}`, `{run}`, `{recipe}`, ...) and bad ones (`{shards-truncated}`, ...).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from resolute.cli import COMMANDS as COMMANDS_OF_RESOLUTE
from resolute.cli import main as train
from tests.conftest import make_photos
from tests.support.cli import prep
from tests.support.commands import Command, assert_one_line, run, snapshot

pytestmark = pytest.mark.slow
RECIPE = """
seed = 3
[model]
name = "test_resnet"
[optim]
lr = 0.001
[eval]
batch_size = 8
[[stages]]
res = 32
epochs = 1
batch_size = 16
[[stages]]
res = 48
epochs = 1
batch_size = 16
"""

# Command lines as the README and the Makefile give them; {out} does not exist yet.
PREP = ("shards", "--src", "{photos}", "--out", "{out}", "--res", "32,48", "--workers", "1")
VERIFY = ("verify", "{shards}", "--workers", "1")
CPU = ("--device", "cpu", "--threads", "1")
RUNS = ("--shards", "{shards}", "--recipe", "{recipe}", "--runs", "{out}", *CPU)
TRAIN = ("train", *RUNS)
PLAN = ("plan", *RUNS)
EVAL = ("eval", "{run}", "--shards", "{shards}", *CPU, "--json", "{out}.json")
PREDICT = ("predict", "{run}", "--src", "{photos}", "--out", "{out}.csv", *CPU)
EXPORT = ("export", "{run}", "--out", "{out}")
REPORT = ("report", "{run}")
LR = ("lr", "--recipe", "{recipe}", "--shards", "{shards}", "--out", "{out}.html")
LR_FIND = ("lr-find", "--recipe", "{recipe}", "--shards", "{shards}", "--out", "{out}.html", *CPU)
SHOW = ("show", "{shards}", "--recipe", "{recipe}", "--out", "{out}.html")
BENCH = ("bench-all", "--shards", "{shards}", "--only", "loader", "--seconds", "0.2", "--rounds", "1", *CPU,
         "--out", "{out}.json")  # fmt: skip
COMMANDS = {"prep": PREP, "verify": VERIFY, "train": TRAIN, "plan": PLAN, "eval": EVAL, "predict": PREDICT,
            "export": EXPORT, "report": REPORT, "lr": LR, "lr-find": LR_FIND, "show": SHOW,
            "bench": BENCH}  # fmt: skip

TAKE_SHARDS = ("verify", "train", "plan", "eval", "lr", "lr-find", "show", "bench")
TAKE_RECIPE = ("plan", "lr", "lr-find", "show")
TAKE_RUN = ("eval", "predict", "export", "report")
BAD_SHARDS = ("missing", "empty-folder", "text-file", "photos", "manifest-truncated", "manifest-list",
              "manifest-version", "index-truncated", "index-gone", "foreign", "forbidden")  # fmt: skip
BAD_RECIPES = ("missing", "empty-folder", "empty-file", "binary-file", "unknown-key", "unknown-table", "wrong-type",
               "out-of-range", "no-such-res", "no-such-model", "forbidden-file")  # fmt: skip
BAD_RUNS = ("missing", "empty-folder", "text-file", "run-truncated", "run-foreign", "run-version", "run-forbidden")


def rows() -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, command line) of every faulty command line."""
    for name in TAKE_SHARDS:
        for bad in BAD_SHARDS:
            if name == "verify" and bad.startswith(("manifest", "index")):
                continue  # why: verify reports these itself; see its own test
            yield f"{name}: shards {bad}", replaced(COMMANDS[name], "{shards}", f"{{{bad}}}")
    for name in TAKE_RECIPE:
        for bad in BAD_RECIPES:
            if name in ("lr", "show") and bad == "no-such-model":
                continue  # why: these two build no model
            yield f"{name}: recipe {bad}", replaced(COMMANDS[name], "{recipe}", f"{{{bad}}}")
    for name in TAKE_RUN:
        for bad in BAD_RUNS:
            yield f"{name}: run {bad}", replaced(COMMANDS[name], "{run}", f"{{{bad}}}")
    for name in ("eval", "predict", "lr", "lr-find", "show", "bench"):
        for bad in ("empty-folder", "read-only/x", "text-file/x"):
            command = COMMANDS[name]
            out = next(word for word in command if word.startswith("{out}."))
            suffix = "" if bad == "empty-folder" else out.removeprefix("{out}")
            parent, _, rest = bad.partition("/")
            yield f"{name}: output {bad}", replaced(command, out, f"{{{parent}}}{'/' + rest if rest else ''}{suffix}")
    for bad in ("read-only/x", "text-file/x", "text-file"):
        parent, _, rest = bad.partition("/")
        out = f"{{{parent}}}{'/' + rest if rest else ''}"
        for name in ("prep", "train", "plan", "export"):
            yield f"{name}: output {bad}", replaced(COMMANDS[name], "{out}", out)
    for bad in ("missing", "empty-folder", "text-file", "empty-file", "binary-file", "zip-truncated", "tar-truncated",
                "zip-empty", "tar-empty", "foreign-empty", "forbidden"):  # fmt: skip
        yield f"prep: source {bad}", replaced(PREP, "{photos}", f"{{{bad}}}")
    for bad in ("missing", "empty-folder", "text-file", "binary-file", "foreign", "forbidden"):
        yield f"predict: source {bad}", replaced(PREDICT, "{photos}", f"{{{bad}}}")
    for bad in ("missing", "empty-folder", "empty-file", "binary-file"):
        yield f"predict: sample {bad}", (*PREDICT, "--sample", f"{{{bad}}}")
    for option in ("--labels", "--classes", "--val", "--val-list"):
        for bad in ("missing", "empty-file", "binary-file", "empty-folder"):
            yield f"prep: {option} {bad}", (*PREP, option, f"{{{bad}}}")
    for option, value in (  # further settings: tests/prep/test_bad_input.py
        ("--res", ""), ("--res", "99999999999999999999"), ("--val-frac", "nan"), ("--workers", "1e9"), ("--src", ""),
        ("--out", ""), ("--nonsense", "1"),
    ):  # fmt: skip
        yield f"prep: {option} {value or 'empty'}", (*PREP, option, value)
    for name, option, value in (
        ("train", "--device", "gpu9"), ("train", "--device", "cuda:x"), ("train", "--device", "cuda:99"),
        ("train", "--device", "cpu:0"), ("train", "--threads", "0"), ("train", "--threads", "many"),
        ("train", "--keep", "0"),
        ("train", "--save-every-s", "-1"), ("train", "--save-every-steps", "-1"), ("train", "--decode", "tpu"),
        ("train", "--run", ".."), ("train", "--from", "nothing.pt"),
        ("train", "--folds", "all"), ("train", "--folds", "999"),
        ("train", "--nonsense", "1"), ("train", "--gpu-memory-gib", "nan"),
        ("plan", "--budget", "soon"), ("plan", "--json", "{read-only}/x.json"),
        ("eval", "--res", "0"), ("eval", "--res", "32,x"), ("eval", "--split", "test"), ("eval", "--fold", "1"),
        ("eval", "--threads", "0"), ("eval", "--device", "gpu9"), ("eval", "--res", "100000000"),
        ("predict", "--topk", "0"), ("predict", "--topk", "x"), ("predict", "--res", "-1"), ("predict", "--src", ""),
        ("predict", "--weights", "best"), ("predict", "--fold", "7"), ("predict", "--out", "{photo}"),
        ("lr", "--samples", "0"), ("lr", "--samples", "10"), ("lr-find", "--steps", "1"),
        ("lr-find", "--min-lr", "nan"), ("lr-find", "--max-lr", "1e-9"), ("show", "--count", "0"),
        ("show", "--count", "1000000000"),
        ("verify", "--workers", "-1"), ("bench", "--only", "nothing"), ("bench", "--seconds", "0"),
        ("bench", "--rounds", "0"), ("bench", "--batch-size", "0"), ("bench", "--model", "no_such_net"),
        ("bench", "--seconds", "nan"), ("bench", "--batch-size", "1000000"), ("bench", "--device", "tpu"),
    ):  # fmt: skip
        yield f"{name}: {option} {value or 'empty'!r}", (*COMMANDS[name], option, value)
    yield "train: another recipe in the run folder", (
        *replaced(TRAIN, "{out}", "{runs}"), "--run", "good", "--recipe", "{recipe-other}",
    )  # fmt: skip
    yield "train: other shards in the run folder", (
        *replaced(TRAIN, "{out}", "{runs}"), "--run", "good", "--shards", "{shards-other}",
    )  # fmt: skip
    yield "eval: shards with other classes", replaced(EVAL, "{shards}", "{shards-other}")
    yield "prep: another source into a finished set", replaced(
        replaced(PREP, "{photos}", "{photos-other}"), "{out}", "{shards}"
    )
    yield "prep: another quality for a finished set", (*replaced(PREP, "{out}", "{shards}"), "--quality", "50")


def replaced(command: tuple[str, ...], good: str, bad: str) -> tuple[str, ...]:
    return tuple(bad + word.removeprefix(good) if word.startswith(good) else word for word in command)


BAD = dict(rows())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, readable by other users, with everything good and bad that the command lines name."""
    root = tmp_path_factory.mktemp("place")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)
    make_photos(root / "photos", each=12)
    make_photos(root / "photos-other", classes=4, each=8)
    for photos, out in (("photos", "shards"), ("photos-other", "shards-other")):
        words = ["--src", root / photos, "--out", root / out, "--res", "32,48", "--workers", "2"]
        assert prep([str(word) for word in words]) == 0
    (root / "photo").write_bytes((root / "photos/class0/000.jpg").read_bytes())
    (root / "recipe").write_text(RECIPE)
    words = ["train", "--shards", root / "shards", "--recipe", root / "recipe", "--runs", root / "runs", "--run",
             "good", "--device", "cpu", "--threads", "1"]  # fmt: skip
    assert train([str(word) for word in words]) == 0
    (root / "run").symlink_to(root / "runs" / "good")
    _make_bad_files(root)
    _make_bad_shards(root)
    _make_bad_recipes(root)
    _make_bad_runs(root)
    _make_archives(root)
    for path in root.rglob("*"):  # why: some commands run as another user here
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    for name in ("forbidden", "forbidden-file", *(f"run-forbidden/{n}" for n in ("best.pt", "last.pt", "run.jsonl"))):
        (root / name).chmod(0)
    (root / "read-only").chmod(0o555)
    return root


@pytest.fixture(scope="module")
def snapshot_before(place: Path) -> dict[str, tuple[int, bytes]]:
    """The snapshot of `place` before any command has run."""
    return snapshot(place)


def _make_bad_files(root: Path) -> None:
    for name in ("empty-folder", "read-only", "forbidden"):
        (root / name).mkdir()
    (root / "text-file").write_text("no data\n")
    (root / "empty-file").touch()
    (root / "binary-file").write_bytes(bytes(range(256)) * 16)
    (root / "forbidden-file").write_text(RECIPE)


def _make_bad_shards(root: Path) -> None:
    good = root / "shards"
    manifest = (good / "manifest.json").read_text()
    for name, text in {
        "manifest-truncated": manifest[: len(manifest) // 2],
        "manifest-list": "[]",
        "manifest-version": json.dumps({**json.loads(manifest), "version": 99}),
    }.items():
        shutil.copytree(good, root / name)
        (root / name / "manifest.json").write_text(text)
    for name in ("index-truncated", "index-gone"):
        shutil.copytree(good, root / name)
        for path in (root / name / "index").glob("*.npy"):
            if name == "index-gone":
                path.unlink()
            else:
                os.truncate(path, 100)


def _make_bad_recipes(root: Path) -> None:
    for name, text in {
        "unknown-key": RECIPE.replace("lr =", "learning_rate ="),
        "unknown-table": RECIPE + "[nonsense]\nx = 1\n",
        "wrong-type": RECIPE.replace("lr = 0.001", 'lr = "fast"'),
        "out-of-range": RECIPE.replace("lr = 0.001", "lr = -1.0"),
        "no-such-res": RECIPE.replace("res = 48", "res = 56"),
        "no-such-model": RECIPE.replace("test_resnet", "test_nothing"),
        "recipe-other": RECIPE.replace("lr = 0.001", "lr = 0.002"),
    }.items():
        (root / name).write_text(text)


def _make_bad_runs(root: Path) -> None:
    good = root / "runs" / "good"
    for name in ("run-truncated", "run-foreign", "run-version", "run-forbidden"):
        shutil.copytree(good, root / name)
        for path in (root / name).glob("*.pt"):
            if name == "run-truncated":
                os.truncate(path, path.stat().st_size // 2)
            elif name == "run-foreign":
                torch.save({"weights": torch.zeros(3)}, path)
            elif name == "run-version":
                torch.save({**torch.load(path, weights_only=True), "format": "resolute-checkpoint-99"}, path)
        if name != "run-forbidden":  # what the report is drawn from
            os.truncate(root / name / "run.jsonl", 40)


def _make_archives(root: Path) -> None:
    photos = root / "photos"
    with zipfile.ZipFile(root / "whole.zip", "w") as file:
        for path in sorted(photos.rglob("*.jpg")):
            file.write(path, path.relative_to(photos))
    with tarfile.open(root / "whole.tar", "w") as archive:
        archive.add(photos, "photos")
    for kind in ("zip", "tar"):
        whole = (root / f"whole.{kind}").read_bytes()
        (root / f"{kind}-truncated").mkdir()
        (root / f"{kind}-truncated" / f"x.{kind}").write_bytes(whole[: len(whole) // 2])
    for name in ("zip-empty", "tar-empty", "foreign-empty", "foreign"):
        (root / name).mkdir()
    zipfile.ZipFile(root / "zip-empty" / "x.zip", "w").close()
    tarfile.open(root / "tar-empty" / "x.tar", "w").close()
    tarfile.open(root / "foreign-empty" / "train-000000.tar", "w").close()
    with tarfile.open(root / "foreign" / "train-000000.tar", "w") as archive:
        for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
            archive.add(path, f"{number:06d}.jpg")
            label = root / "label"
            label.write_text(path.parent.name.removeprefix("class"))
            archive.add(label, f"{number:06d}.cls")


def words_of(command: tuple[str, ...], place: Path, out: Path) -> list[str]:
    words = []
    for word in command:
        name, brace, rest = word.removeprefix("{").partition("}")
        if not brace:
            words.append(word)
            continue
        path = out if name == "out" else place / name
        special = {"zip-truncated": "x.zip", "zip-empty": "x.zip", "tar-truncated": "x.tar", "tar-empty": "x.tar"}
        words.append(str(path / special[name] if name in special else path) + rest)
    return words


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_reported_in_one_line_and_leaves_nothing(
    name: str, place: Path, snapshot_before: dict[str, tuple[int, bytes]], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in (tmp_path, tmp_path.parent):
        parent.chmod(0o755)
    module, *words = words_of(BAD[name], place, folder / "out")
    ended = run(module, words, folder=folder, scratch=tmp_path, unprivileged=True)
    assert_one_line(ended)
    assert snapshot(place) == snapshot_before
    assert not snapshot(folder)


@pytest.mark.parametrize("bad", [name for name in BAD_SHARDS if name.startswith(("manifest", "index"))])
def test_verify_reports_damage_with_status_1(bad: str, place: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(place / bad, tmp_path / bad)
    ended = run("verify", [copy, "--workers", "1"], folder=tmp_path, scratch=tmp_path)
    assert ended.status == 1
    assert "resolute shards --" in ended.out
    assert not ended.err


ODD = ["two  spaces [a]{b}*?", "back\\slash", "new\nline", "ünï-Ⅷ o'brien \"x\" $(touch x)", "-dash"]


@pytest.mark.parametrize("odd", ODD)
def test_paths_with_special_characters_work_in_every_command(odd: str, place: Path, tmp_path: Path) -> None:
    root = tmp_path / odd
    root.mkdir()
    shutil.copytree(place / "photos", root / "photos")
    (root / "recipe").write_text(RECIPE)

    def good(command: tuple[str, ...], out: str, *more: object) -> None:
        module, *words = words_of(command, root, root / out)
        ended = run(module, [*words, *more], folder=root, scratch=tmp_path)
        assert ended.status == 0, ended.err
        assert "Traceback" not in ended.err

    good(PREP, "shards")
    good(VERIFY, "")
    good(TRAIN, "runs", "--run", "odd")
    (root / "run").symlink_to(root / "runs" / "odd")
    for name in ("plan", "eval", "predict", "export", "report", "lr", "show", "bench"):
        good(COMMANDS[name], f"out-{name}")
    assert not any(path.name == "x" for path in tmp_path.rglob("*"))


@pytest.mark.timing
@pytest.mark.parametrize("name", ["train", "plan"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("times", [1, 2])
def test_signals_during_warm_up_end_without_a_traceback(
    name: str, number: int, times: int, place: Path, tmp_path: Path
) -> None:
    module, *words = words_of(COMMANDS[name], place, tmp_path / "out")
    command = Command(module, [*words, "--run", "x"], folder=tmp_path, scratch=tmp_path)
    while name == "plan" and command.running and not any((tmp_path / "out").glob(".plan-*")):
        time.sleep(0.01)
    if name == "train":
        command.wait_for("starting")
    for _ in range(times):
        command.send(number)
    ended = command.end()
    assert ended.status == 128 + number, ended.err
    assert "Traceback" not in ended.err + ended.out
    assert len(ended.err.splitlines()) <= 1
    if name == "plan":
        assert not any(path.name.startswith(".plan") for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("prep", "verify", "train", "plan")])
def test_ctrl_c_ends_with_status_130_and_no_partial_files(name: str, place: Path, tmp_path: Path) -> None:
    for number, delay_s in enumerate((0.0, 0.05, 0.2)):
        out = tmp_path / f"{number}"
        out.mkdir()
        module, *words = words_of(COMMANDS[name], place, out / "out")
        command = Command(module, words, folder=out, scratch=tmp_path)
        time.sleep(delay_s)
        command.send(signal.SIGINT)
        ended = command.end()
        assert ended.status in (0, 130), ended.err
        assert "Traceback" not in ended.err
        if ended.status == 130:
            assert not [path for path in out.rglob("*") if "part" in path.name]


# why without lr-find: the losses of a few steps on a tiny set may show no learning rate
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "lr-find"])
@pytest.mark.parametrize("output", ["full", "closed"])
def test_full_and_closed_stdout_are_handled(name: str, output: str, place: Path, tmp_path: Path) -> None:
    module, *words = words_of(COMMANDS[name], place, tmp_path / "out")
    if output == "full":
        ended = run(module, words, folder=tmp_path, scratch=tmp_path, stdout="/dev/full")
        assert ended.status == 2
        assert len([line for line in ended.err.splitlines() if ": stdout: " in line]) == 1
    else:
        ended = run(module, words, folder=tmp_path, scratch=tmp_path, closed=(1, 2))
        assert ended.status == 0
    assert "Traceback" not in ended.err


def test_the_table_covers_the_commands() -> None:
    named = {command[0] for command in COMMANDS.values()}
    # compare reads several runs, keys nothing; bench takes 90 s; gpu-check and jobs have tests of their own
    others = {"compare", "keys", "bench", "gpu-check", "jobs plan", "jobs range", "jobs finish"}
    assert named - {"resolute.pipeline"} == {*COMMANDS_OF_RESOLUTE} - others


def test_snapshots_detect_changed_content(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a")
    before = snapshot(tmp_path)
    (tmp_path / "f").write_text("b")
    assert snapshot(tmp_path) != before
    assert stat.S_ISREG(before["f"][0])
