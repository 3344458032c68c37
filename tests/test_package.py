"""The distribution: its wheel outside the checkout, a user's own modules beside it, versions, advice to install it."""

from __future__ import annotations

import importlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import resolute
from resolute import cli
from tests import ROOT
from tests.conftest import make_photos

PARTS = ("pipeline", "prep", "train", "benchmarks")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STACKS = ("cuda13", "cuda12")
RECIPE = """
model.name = "test_resnet"
precision.amp = "off"
eval.batch_size = 2
stages = [{ res = 32, epochs = 1, batch_size = 4 }, { res = 48, epochs = 1, batch_size = 8 }]
"""


def users_folder(folder: Path) -> Path:
    """A project with modules of the names of our parts, which nothing but the user's own code may import."""
    (folder / "prep").mkdir(parents=True)
    (folder / "train.py").write_text("WHOSE = 'mine'\n")
    for name in ("pipeline.py", "benchmarks.py", "prep/__init__.py"):
        (folder / name).write_text("raise SystemExit('a module of the user was imported')\n")
    return folder


def run(command: Sequence[object], folder: Path) -> str:
    """The output of a command in `folder`, without the checkout on Python's path."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("resolute", *PARTS):  # a copy: the build writes into its source
        ignored = shutil.ignore_patterns("__pycache__", "results")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    (source / "benchmarks" / "results").mkdir()
    (source / "benchmarks" / "results" / "figures.json").touch()
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check")
    run([sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, source], folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    results = "resolute/benchmarks/results/"  # belong to a checkout
    expected = {
        str(Path(folder, name).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "resolute", followlinks=True)
        for name in names
        if "__pycache__" not in folder
    }
    expected = {name for name in expected if not name.startswith(results)}
    assert {
        "resolute/py.typed",
        "resolute/train/recipes/demo.toml",
        "resolute/report/base.html",
    } <= expected
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == expected


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds only the wheel, and sees the packages of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    run([sys.executable, "-m", "pip", "--python", python, "install", "--no-compile", *options, wheel], folder)
    purelib = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    # Python does not read the .pth files of a folder that a .pth file names, so this checkout's stays without effect.
    Path(purelib, "packages.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _copy_compiled_functions(Path(purelib))
    return folder / "bin"


def _copy_compiled_functions(purelib: Path) -> None:
    """Give the installed package numba's caches of the checkout, with the times of its files, which the caches compare.

    why: to compile all functions again takes a minute; tests/pipeline/test_jit.py tests that.
    """
    for folder, _, names in os.walk(ROOT / "resolute", followlinks=True):
        installed = purelib / Path(folder).relative_to(ROOT)
        for name in names:
            path = Path(folder, name)
            if name.endswith((".nbi", ".nbc")):
                installed.mkdir(exist_ok=True)
                shutil.copy2(path, installed)
            elif name.endswith(".py"):
                shutil.copystat(path, installed / name)


@pytest.mark.slow
def test_the_wheel_prepares_trains_and_loads_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    folder = users_folder(tmp_path / "project")
    make_photos(folder / "photos", classes=2, each=5)
    (folder / "recipe.toml").write_text(RECIPE)
    command = installed / "resolute"
    assert PROJECT["version"] in run([command, "--version"], folder)
    run([command, "shards", "--src", "photos", "--out", "shards", "--res", "32,48", "--workers", "1"], folder)
    code = """if True:
        import resolute, train
        from resolute.cli import main
        words = "train --shards shards --recipe recipe.toml --run x --device cpu"
        assert main(words.split()) == 0
        print(resolute.__file__, train.WHOSE)"""
    path, whose = run([installed / "python", "-c", code], folder).splitlines()[-1].split()
    assert (Path(path).is_relative_to(installed.parent), whose) == (True, "mine")
    lines = [json.loads(line) for line in (folder / "runs/x/run.jsonl").read_text().splitlines()]
    assert [(line["step"], line["res"]) for line in lines if line["kind"] == "step"] == [(0, 32), (1, 32), (2, 48)]
    assert "<html" in (folder / "shards/report.html").read_text()
    assert "<html" in (folder / "runs/x/report.html").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    assert PROJECT["version"] == resolute.__version__
    assert f"version: {resolute.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def requirements(*extras: str) -> Iterator[Requirement]:
    """The distribution's requirements with these extras."""
    added = [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *added]):
        if requirement.name == PROJECT["name"]:
            yield from requirements(*requirement.extras)
        else:
            yield requirement


@pytest.mark.parametrize("stack", STACKS)
def test_the_locked_versions_lie_in_the_ranges_of_the_project(stack: str) -> None:
    lines = [line for line in (ROOT / "locks" / f"{stack}.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line)] == []
    pins = dict(line.split("==") for line in lines)
    wrong = [
        str(needed)
        for needed in requirements(stack, "dev")
        if not needed.specifier.contains(pins.get(canonicalize_name(needed.name), "0"))
    ]
    assert wrong == []
    decoders = {
        "cuda13": {"nvidia-nvimgcodec-cu13", "nvidia-nvjpeg"},
        "cuda12": {"nvidia-nvimgcodec-cu12", "nvidia-nvjpeg-cu12"},
    }
    assert {"torch", "torchvision", f"nvidia-dali-{stack}0", *decoders[stack]} <= set(pins)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "sys.platform = 'darwin'; import resolute",
            "ImportError: resolute: runs on Linux only, as NVIDIA DALI does, got darwin; on Windows, use WSL 2\n",
        ),
        (
            "sys.modules['timm'] = None; from resolute.cli import main; sys.exit(main(['train']))",
            "resolute train: not installed: timm; run `pip install 'resolute-vision[train]'`\n",
        ),
        (
            "sys.modules |= dict.fromkeys(('timm', 'torch', 'nvidia')); "
            "from resolute.cli import main; sys.exit(main(['train']))",
            "not installed: torch, nvidia.dali, timm; run `pip install 'resolute-vision[cuda13,train]'`, with cuda12",
        ),
        (
            "sys.modules |= dict.fromkeys(('timm', 'nvidia')); "
            "from resolute.cli import main; sys.exit(main(['bench-all', '--data', '.']))",
            "all: not installed: nvidia.dali, timm; run `pip install 'resolute-vision[cuda13,train]'`, with cuda12",
        ),
        (
            "sys.modules['nvidia.dali'] = None; from resolute.cli import main; sys.exit(main(['bench', '.']))",
            "not installed: nvidia.dali; run `pip install 'resolute-vision[cuda13]'`, with cuda12",
        ),
    ],
    ids=["another system", "no timm", "base install", "no DALI and timm", "no DALI"],
)
def test_what_is_missing_is_named_in_one_line(code: str, message: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1 if "darwin" in code else 2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1 or "darwin" in code  # a traceback of Python's own, as for every import


def test_without_torch_the_loader_says_what_to_install_and_the_rest_of_the_library_works() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from resolute import Augment, Plan, ResoluteError, ShardSet, Stage\n"
        "try: from resolute import Loader\nexcept ResoluteError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("resolute.Loader: not installed: torch; run `pip install 'resolute-vision[cuda13]'`")
    assert done.stderr == ""


@pytest.mark.slow
def test_a_base_install_shows_help_and_runs_what_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").touch()
    code = f"""if True:
        import sys
        sys.modules |= dict.fromkeys(("torch", "torchvision", "nvidia", "timm", "safetensors", "pynvml"))
        from resolute.cli import COMMANDS, main
        assert [main([*name.split(), "--help"]) for name in COMMANDS] == [0] * len(COMMANDS)
        assert main(["keys"]) == 0
        for words in (["shards", "gone"], ["verify", "gone"], ["report", {str(tmp_path)!r}], ["compare", "a", "b"]):
            assert main(words) == 2"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 4
    assert "not installed" not in done.stderr


def test_importing_everything_leaves_the_names_of_the_api_and_no_others() -> None:
    for module in ("resolute.train.trainer", "resolute.prep.build"):
        importlib.import_module(module)
    public = [name for name in dir(resolute) if not name.startswith("_")]
    assert public == sorted(name for name in resolute.__all__ if not name.startswith("_"))


def test_no_advice_installs_the_project_that_has_the_name_resolute_on_the_package_index() -> None:
    code = [path for folder in ("resolute", *PARTS) for path in (ROOT / folder).rglob("*.py")]
    # why the last: it would install a copy of the code beside the checkout
    wrong = re.compile(r"install '?resolute\b(?!-vision)|resolute\[|pip install '\.\[")
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    advising = [path for path in [*pages, ROOT / "Makefile", *code] if "pip install" in path.read_text()]
    assert len(advising) > 4
    assert [path for path in advising if wrong.search(path.read_text())] == []


def test_the_first_import_of_torch_and_timm_is_announced_and_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Installers such as uv leave the compilation of Python's files to the first start."""
    source = tmp_path / "timm" / "__init__.py"
    source.parent.mkdir()
    source.write_text("")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(origin=str(source)))
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for program in ("prep.commands:shards", "train.report.page:report"):
        cli._announce_first_start(program)
    assert capsys.readouterr().out == ""
    cli._announce_first_start("train.show:main")
    assert capsys.readouterr().out == (
        "importing torch and timm for the first time: about 15 s; later starts take 5 s\n"
    )
    py_compile.compile(str(source))
    cli._announce_first_start("train.show:main")
    assert capsys.readouterr().out == ""
