"""What counts as finished after kills, rebuilds and changes of codecs: records of the same plan and codecs alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.prep import finish as finishing
from resolute.prep import plan as planning
from resolute.prep.convert import codecs
from resolute.prep.storage.output import LocalStore, open_output
from resolute.prep.verify import verify
from tests.support.manifests import read_joined
from tests.support.trees import tree

Prep = Callable[..., Any]
Argv = tuple[object, ...]


class Stopped(Exception):
    """As if the run had been killed before its manifest."""


@pytest.fixture
def whole(made: Path) -> dict[str, str]:
    """The files of the set, made without interruption."""
    return tree(made / "set")


@pytest.fixture
def run_until_manifest(prep: Prep, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def stop(*args: object) -> None:
        raise Stopped

    def run(*argv: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(finishing, "finalize_set", stop)
            with pytest.raises(Stopped):
                prep(*argv)

    return run


@pytest.fixture
def unfinished(argv: Argv, tmp_path: Path, run_until_manifest: Callable[..., None]) -> Path:
    """The set at tmp_path/s without its manifest and what is derived from its records."""
    run_until_manifest(*argv)
    return tmp_path / "s"


@pytest.mark.slow
def test_a_killed_addition_of_a_resolution_does_not_change_the_finished_set(
    argv: Argv,
    copied: Path,
    tmp_path: Path,
    prep: Prep,
    run_until_manifest: Callable[..., None],
    whole: dict[str, str],
) -> None:
    run_until_manifest(*argv, "--res", "32,48,64")
    assert whole.items() <= tree(copied).items()
    assert "already there" in prep(*argv).out
    assert verify(open_output(str(copied)), workers=1).damaged == {}
    ran = prep(*argv, "--res", "32,48,64")
    assert ran.status == 0, ran.err
    assert "kept 4 shards" in ran.out
    assert prep(*argv, "--res", "32,48,64", "--out", tmp_path / "all").status == 0
    assert tree(copied) == tree(tmp_path / "all")


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["write", "remove", "sync"])
def test_a_rebuild_that_is_killed_keeps_no_shard_of_the_old_set(
    own_photos: Path, copied: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, stop: str
) -> None:
    """The old shards may be of other photos with the same names and sizes, which no plan can distinguish."""
    argv = ("--src", own_photos, "--res", "32,48", "--shard-samples", 20, "--max-bad", 0.1)
    path = own_photos / "class1" / "003.jpg"
    path.write_bytes(path.read_bytes()[:-300] + bytes(300))
    real = getattr(LocalStore, stop)
    calls = 0

    def kill(store: LocalStore, name: str, *data: bytes) -> Any:
        nonlocal calls
        calls += name.startswith(("records", "manifest"))
        if calls > 1 or stop == "sync":
            raise Stopped
        return real(store, name, *data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, stop, kill)
        with pytest.raises(Stopped):
            prep(*argv, "--out", copied, "--rebuild")
    ran = prep(*argv, "--out", copied)
    if ran.status == 2:
        assert "REBUILD=1" in ran.err
        ran = prep(*argv, "--out", copied, "--rebuild")
    assert ran.status == 0, ran.err
    assert "kept" not in ran.out
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert tree(copied) == tree(tmp_path / "fresh")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """installed(versions): from here on, this process has these versions of codecs."""
    real = codecs.codec_versions()

    def install(versions: dict[str, str]) -> None:
        for module in (planning, codecs):
            monkeypatch.setattr(module, "codec_versions", lambda: {**real, **versions})

    return install


def test_an_unfinished_run_is_not_continued_with_other_codecs_or_pixel_code(
    argv: Argv, unfinished: Path, prep: Prep, installed: Callable[[dict[str, str]], None]
) -> None:
    (unfinished / "records" / "val-000000-48.rec").unlink()
    pillow, pixels = codecs.codec_versions()["Pillow"], codecs.PIXELS
    for versions, words in (
        ({"Pillow": "7.7.7"}, f"Pillow: got 7.7.7, expected {pillow}; install those versions"),
        ({"Resolute's pixels": str(pixels + 1)}, f"Resolute's pixels: got {pixels + 1}, expected {pixels}"),
    ):
        installed(versions)
        ran = prep(*argv)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.out
        assert words in ran.err
        assert "REBUILD=1" in ran.err
    installed({})
    assert prep(*argv).status == 0
    named = read_joined(unfinished)["codecs"]
    assert named == codecs.codec_versions()
    assert "none" not in (named["libjpeg-turbo in Pillow"], named["libjpeg-turbo in simplejpeg"])


def test_a_finished_set_of_other_codecs_gets_derived_files_but_no_shards(
    argv: Argv, copied: Path, prep: Prep, whole: dict[str, str], installed: Callable[[dict[str, str]], None]
) -> None:
    installed({"Pillow": "7.7.7"})
    assert "already there" in prep(*argv).out
    (copied / "_info.json").unlink()
    assert prep(*argv).status == 0
    assert tree(copied) == whole
    assert "Pillow: got 7.7.7, expected " in prep(*argv, "--res", "32,48,64").err
    assert tree(copied) == whole
    (copied / "48" / "train-000001.tar").unlink()
    ran = prep(*argv)
    assert ran.status == 2
    assert "Pillow: got 7.7.7, expected " in ran.err
