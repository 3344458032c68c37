"""Every command line of the README against bad input: status 2, one line, nothing partially written.

`BAD` pairs each kind of bad input with a few commands that take it. Words in braces name paths that the fixture `place`
makes: good ones (`{shards}`, `{run}`, `{recipe}`, ...) and bad ones (`{forbidden}`, ...).
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from resolute.cli import main as resolute
from tests.conftest import make_photos
from tests.support.cli import prep
from tests.support.commands import Command, Ended, assert_one_line, run, snapshot

pytestmark = pytest.mark.slow
RECIPE = """
model.name = "test_resnet"
optim.lr = 0.001
eval.batch_size = 8
stages = [{ res = 32, epochs = 1, batch_size = 16 }, { res = 48, epochs = 1, batch_size = 16 }]
"""

# command lines as the README and the Makefile give them; {out} does not exist yet
CPU = ("--device", "cpu", "--threads", "1")
RUNS = ("--shards", "{shards}", "--recipe", "{recipe}", "--runs", "{out}", *CPU)
COMMANDS = {
    "prep": ("shards", "--src", "{photos}", "--out", "{out}", "--res", "32,48", "--workers", "1"),
    "verify": ("verify", "{shards}", "--workers", "1"),
    "train": ("train", *RUNS),
    "plan": ("plan", *RUNS),
    "eval": ("eval", "{run}", "--shards", "{shards}", *CPU, "--json", "{out}.json"),
    "predict": ("predict", "{run}", "--src", "{photos}", "--out", "{out}.csv", *CPU),
    "export": ("export", "{run}", "--out", "{out}"),
    "report": ("report", "{run}"),
    "lr": ("lr", "--recipe", "{recipe}", "--shards", "{shards}", "--out", "{out}.html"),
    "lr-find": ("lr-find", "--recipe", "{recipe}", "--shards", "{shards}", "--out", "{out}.html", *CPU),
    "show": ("show", "{shards}", "--recipe", "{recipe}", "--out", "{out}.html"),
    "bench": (
        "bench",
        "--shards",
        "{shards}",
        "--parts",
        "loader",
        "--seconds",
        "0.2",
        *CPU,
        "--out",
        "{out}.html",
    ),
}


def swapped(command: tuple[str, ...], good: str, bad: str) -> tuple[str, ...]:
    """The command line with a bad path in the place of a good one."""
    return tuple(bad + word.removeprefix(good) if word.startswith(good) else word for word in command)


# what is bad -> what it replaces -> (command, bad path)
PATHS = {
    "shards": (
        "{shards}",
        [
            ("train", "missing"),
            ("eval", "empty-folder"),
            ("plan", "text-file"),
            ("verify", "photos"),
            ("eval", "forbidden"),
        ],
    ),
    "recipe": (
        "{recipe}",
        [
            ("plan", "missing"),
            ("lr", "empty-folder"),
            ("show", "binary-file"),
            ("train", "unknown-key"),
            ("lr-find", "no-such-model"),
            ("show", "forbidden-file"),
        ],
    ),
    "run": (
        "{run}",
        [
            ("eval", "missing"),
            ("predict", "empty-folder"),
            ("export", "text-file"),
            ("report", "run-truncated"),
            ("eval", "run-truncated"),
            ("predict", "run-foreign"),
            ("report", "run-forbidden"),
        ],
    ),
    "output": (
        "{out}",
        [
            ("eval", "folder"),
            ("predict", "read-only/x"),
            ("lr", "text-file/x"),
            ("lr-find", "folder"),
            ("show", "read-only/x"),
            ("bench", "text-file/x"),
            ("prep", "read-only/x"),
            ("train", "text-file/x"),
            ("plan", "text-file"),
            ("export", "read-only/x"),
        ],
    ),
    "source": (
        "{photos}",
        [
            ("prep", "missing"),
            ("predict", "empty-folder"),
            ("predict", "text-file"),
            ("prep", "binary-file"),
            ("prep", "forbidden"),
        ],
    ),
}
# further settings of prep: tests/prep/test_bad_input.py
OPTIONS = [
    ("prep", "--labels", "{missing}"),
    ("prep", "--classes", "{empty-file}"),
    ("prep", "--val", "{empty-folder}"),
    ("prep", "--val-list", "{binary-file}"),
    ("predict", "--sample", "{empty-file}"),
    ("prep", "--workers", "1e9"),
    ("train", "--device", "gpu9"),
    ("train", "--run", ".."),
    ("train", "--from", "nothing.pt"),
    ("train", "--gpu-memory-gib", "nan"),
    ("plan", "--budget", "soon"),
    ("plan", "--json", "{read-only/x.json}"),
    ("eval", "--res", "100000000"),
    ("eval", "--split", "test"),
    ("eval", "--fold", "1"),
    ("predict", "--out", "{photo}"),
    ("lr-find", "--max-lr", "1e-9"),
    ("verify", "--nonsense", "1"),
    ("bench", "--batch-size", "1000000"),
    ("bench", "--model", "no_such_net"),
]
BAD = {
    what: [swapped(COMMANDS[name], good, f"{{{bad}}}") for name, bad in pairs] for what, (good, pairs) in PATHS.items()
}
BAD["option"] = [(*COMMANDS[name], option, value) for name, option, value in OPTIONS]
IN_THE_RUN = (*swapped(COMMANDS["train"], "{out}", "{runs}"), "--run", "good")
IN_THE_SET = swapped(COMMANDS["prep"], "{out}", "{shards}")
BAD["a finished run or set of something else"] = [
    swapped(IN_THE_RUN, "{recipe}", "{recipe-other}"),
    swapped(IN_THE_RUN, "{shards}", "{shards-other}"),
    swapped(COMMANDS["eval"], "{shards}", "{shards-other}"),
    swapped(IN_THE_SET, "{photos}", "{photos-other}"),
    (*IN_THE_SET, "--quality", "50"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, readable by other users, with everything good and bad that the command lines name."""
    root = tmp_path_factory.mktemp("place")
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)
    make_photos(root / "photos", each=12)
    make_photos(root / "photos-other", classes=4, each=8)
    for photos, out in (("photos", "shards"), ("photos-other", "shards-other")):
        assert prep(["--src", root / photos, "--out", root / out, "--res", "32,48", "--workers", "2"]) == 0
    (root / "photo").write_bytes((root / "photos/class0/000.jpg").read_bytes())
    (root / "recipe").write_text(RECIPE)
    words = [
        "train",
        "--shards",
        root / "shards",
        "--recipe",
        root / "recipe",
        "--runs",
        root / "runs",
        "--run",
        "good",
        *CPU,
    ]
    assert resolute([str(word) for word in words]) == 0
    (root / "run").symlink_to(root / "runs" / "good")
    _make_bad_files(root)
    _make_bad_recipes(root)
    _make_bad_runs(root)
    for path in root.rglob("*"):  # why: some commands run as another user here
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    for name in ("forbidden", "forbidden-file", *(f"run-forbidden/{n}" for n in ("best.pt", "last.pt", "run.jsonl"))):
        (root / name).chmod(0)
    (root / "read-only").chmod(0o555)
    return root


def _make_bad_files(root: Path) -> None:
    for name in ("empty-folder", "read-only", "forbidden", "folder.json", "folder.html"):
        (root / name).mkdir()
    (root / "text-file").write_text("no data\n")
    (root / "empty-file").touch()
    (root / "binary-file").write_bytes(bytes(range(256)) * 16)
    (root / "forbidden-file").write_text(RECIPE)


def _make_bad_recipes(root: Path) -> None:
    for name, text in {
        "unknown-key": RECIPE.replace("lr =", "learning_rate ="),
        "no-such-model": RECIPE.replace("test_resnet", "test_nothing"),
        "recipe-other": RECIPE.replace("lr = 0.001", "lr = 0.002"),
    }.items():
        (root / name).write_text(text)


def _make_bad_runs(root: Path) -> None:
    for name in ("run-truncated", "run-foreign", "run-forbidden"):
        shutil.copytree(root / "runs" / "good", root / name)
        for path in (root / name).glob("*.pt"):
            if name == "run-truncated":
                os.truncate(path, path.stat().st_size // 2)
            elif name == "run-foreign":
                torch.save({"weights": torch.zeros(3)}, path)
        if name != "run-forbidden":  # what the report is drawn from
            os.truncate(root / name / "run.jsonl", 40)


def words_of(command: tuple[str, ...], place: Path, out: Path) -> list[str]:
    """The command line with paths in the place of words in braces, which are below `place`, and {out}."""
    words = []
    for word in command:
        name, brace, rest = word.removeprefix("{").partition("}")
        words.append(f"{out if name == 'out' else place / name}{rest}" if brace else word)
    return words


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_reported_in_one_line_and_leaves_nothing(
    what: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in (tmp_path, tmp_path.parent):
        parent.chmod(0o755)
    before = snapshot(place)
    for command in BAD[what]:
        name, *words = words_of(command, place, folder / "out")
        if not any(place in word for word in command for place in ("forbidden", "read-only")):  # faster in this process
            monkeypatch.chdir(folder)
            status, (out, err) = resolute([name, *words]), capsys.readouterr()
            ended = Ended(status=status, out=out, err=err)
        else:
            ended = run(name, words, folder=folder, scratch=tmp_path, unprivileged=True)
        print(*command, flush=True)
        assert_one_line(ended)
        assert not snapshot(folder), command
    assert snapshot(place) == before


def test_paths_with_special_characters_work_in_every_command(place: Path, tmp_path: Path) -> None:
    root = tmp_path / '-two  spaces [a]{b}*? back\\slash new\nline ünï-Ⅷ o\'brien "x" $(touch x)'
    root.mkdir()
    shutil.copytree(place / "photos", root / "photos")
    (root / "recipe").write_text(RECIPE)

    def good(name: str, out: str, *more: object) -> None:
        module, *words = words_of(COMMANDS[name], root, root / out)
        ended = run("tests.support.quick", [module, *words, *more], folder=root, scratch=tmp_path)
        assert ended.status == 0, ended.err
        assert "Traceback" not in ended.err

    good("prep", "shards")
    good("verify", "")
    good("train", "runs", "--run", "odd")
    (root / "run").symlink_to(root / "runs" / "odd")
    for name in ("plan", "eval", "predict", "export", "report", "lr", "show", "bench"):
        good(name, f"out-{name}")
    assert not any(path.name == "x" for path in tmp_path.rglob("*"))


@pytest.mark.timing
@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGHUP, 2)])
def test_a_signal_to_plan_ends_it_without_a_traceback_or_files(
    number: int, times: int, place: Path, tmp_path: Path
) -> None:
    module, *words = words_of(COMMANDS["plan"], place, tmp_path / "out")
    command = Command(module, [*words, "--run", "x"], folder=tmp_path, scratch=tmp_path)
    while command.running and not any((tmp_path / "out").glob(".plan-*")):
        time.sleep(0.01)
    for _ in range(times):
        command.send(number)
    ended = command.end()
    assert ended.status == 128 + number, ended.err
    assert "Traceback" not in ended.err + ended.out
    assert len(ended.err.splitlines()) <= 1
    assert not any(path.name.startswith(".plan") for path in tmp_path.rglob("*"))
