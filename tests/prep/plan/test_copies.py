"""The same file in SRC and VAL, and exact copies: found before the conversion, and kept out of one of the splits."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.source_formats import jpeg, pack_samples

Prep = Callable[..., Any]


def refused(ran: Any, *words: str) -> None:
    assert (ran.status, ran.out, ran.err.count("\n")) == (2, "", 1), (ran.out, ran.err)
    for word in words:
        assert word in ran.err


@pytest.mark.parametrize("how", ["lists", "absolute lists", "tar", "tar.gz", "link to the folder", "list of links"])
def test_a_file_in_src_and_val_is_refused_before_the_conversion(
    tmp_path: Path, prep: Prep, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, link = tmp_path / "p", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    names = [f"{i:02d}.jpg" for i in range(12)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(jpeg(i))
    if how in ("tar", "tar.gz"):
        for n in range(3):
            samples = [(name, jpeg(i), {"cls": b"%d" % (i % 2)}) for i, name in enumerate(names) if i % 3 == n]
            path = pack_samples(tmp_path / f"p{n}.tar", samples)
            path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
        parts = f"p{{0..2}}.{how}", f"p{{2..2}}.{how}"
    else:
        prefix = {"absolute lists": f"{folder}/", "list of links": "link/"}.get(how, "p/")
        lines = [f"{name} {i % 2}\n" for i, name in enumerate(names)]
        (tmp_path / "train.txt").write_text("".join(f"p/{line}" for line in lines))
        (tmp_path / "val.txt").write_text("".join(f"{prefix}{line}" for line in lines[2::3]))
        parts = "train.txt", "val.txt"
    if how == "link to the folder":
        (folder / "val.txt").write_text("".join(lines[2::3]))
        parts = "train.txt", "link/val.txt"
    monkeypatch.chdir(tmp_path)
    shown = f"p2.{how}/02.jpg, p2.{how}/05.jpg, p2.{how}/08.jpg, …" if how.startswith("tar") else "05.jpg"
    for dry in ([], ["--dry-run"]):
        ran = prep("--src", parts[0], "--val", parts[1], "--out", tmp_path / "s", "--res", "32", *dry)
        refused(ran, f"{parts[1]}: holds photos of SRC, got 4 files that are also in {parts[0]}, such as ", shown)
        assert not (tmp_path / "s" / "32").exists()
