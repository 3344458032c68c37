"""Output files: a path that cannot be written is reported before the work in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from resolute.cli import main
from tests.support.cli import bench

Command = Callable[[str], int]
SUFFIXES = {
    "eval": ".json",
    "predict": ".csv",
    "lr": ".html",
    "lr-find": ".html",
    "show": ".html",
    "plan": ".json",
    "bench": ".json",
}


@pytest.fixture
def commands(trained: Path, shard_root: Path) -> dict[str, Command]:
    """Each command as a function of its output file; returns its exit status."""
    run, shards, recipe = str(trained), str(shard_root), str(trained.parent / "small.toml")
    photos = str(shard_root.parent / "photos" / "class0")
    return {
        "eval": lambda out: main(["eval", run, "--shards", shards, "--json", out, "--device", "cpu"]),
        "predict": lambda out: main(["predict", run, "--src", photos, "--out", out, "--device", "cpu"]),
        "lr": lambda out: main(["lr", "--recipe", recipe, "--samples", "99", "--out", out]),
        "lr-find": lambda out: main(["lr-find", "--shards", shards, "--recipe", recipe, "--out", out]),
        "show": lambda out: main(["show", shards, "--recipe", recipe, "--out", out]),
        "plan": lambda out: main(["plan", "--shards", shards, "--recipe", recipe, "--device", "cpu", "--json", out]),
        "bench": lambda out: bench(["--shards", shards, "--out", out, "--device", "cpu"]),
    }


@pytest.mark.parametrize("command", SUFFIXES)
def test_every_command_checks_its_output_path_beforehand(
    commands: dict[str, Command],
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    suffix = SUFFIXES[command]
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / "photo.jpg").write_bytes(b"a photo")
    before = sorted(tmp_path.rglob("*"))
    for name, message in (
        (f"photo.jpg/x{suffix}", "not written (No such folder)"),
        (f"folder{suffix}", "not written (Is a directory)"),
        ("photo.txt", "expected a name that ends in"),
    ):
        assert commands[command](name) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before


def test_predict_overwrites_its_own_earlier_result_but_no_table_of_something_else(
    commands: dict[str, Command], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.csv"
    for content in ("image,label\n", "image,class0,class2\n"):
        out.write_text(content)
        assert commands["predict"](str(out)) == 2
        assert "choose another" in capsys.readouterr().err
        assert out.read_text() == content
    out.unlink()
    for _ in range(2):
        assert commands["predict"](str(out)) == 0
    assert list(tmp_path.iterdir()) == [out]


def test_pages_are_written_below_runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lr", "--recipe", str(trained.parent / "small.toml"), "--samples", "99"]) == 0
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")] == ["runs/small-lr.html"]
