"""A set made by `resolute jobs` equals the set of a single prep, also when jobs are killed."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pytest

import resolute.prep.convert.codecs as codecs
from resolute.prep.run import work
from resolute.prep.storage.output import LOCK, open_output
from tests.conftest import make_photos
from tests.support.cli import prep as main
from tests.support.cli import verify
from tests.support.commands import Ended
from tests.support.damage import flip
from tests.support.refusals import Ran, refused
from tests.support.s3 import s3_server  # noqa: F401  # a fixture
from tests.support.source_formats import make_tree, pack, pack_table
from tests.support.trees import tree

Prep = Callable[..., Any]
SLOW = pytest.mark.slow
SIZES = ("--res", "32,48", "--shard-samples", 10)


@dataclass
class Jobs:
    """The commands of `resolute jobs` for the set at `out`, in this process."""

    src: Path
    out: Any
    capfd: pytest.CaptureFixture[str]

    def _run(self, *words: object) -> Ran:
        self.capfd.readouterr()
        status = main([str(word) for word in (*words, "--out", self.out)])
        return Ran(status, *self.capfd.readouterr())

    def plan(self, *more: object) -> Ran:
        return self._run("plan", "--src", self.src, *SIZES, *more)

    def range(self, part: str) -> Ran:
        return self._run("range", f"--range={part}", "--workers", 2)

    def finish(self) -> Ran:
        return self._run("finish")

    def convert(self, *ranges: str) -> None:
        for part in ranges:
            assert self.range(part)[0] == 0, part

    def complete(self, *ranges: str) -> dict[str, str]:
        """The files of the set after these ranges and `finish`."""
        self.convert(*ranges)
        status, _, err = self.finish()
        assert status == 0, err
        return tree(self.out)


@pytest.fixture
def jobs(photos: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Jobs:
    return Jobs(photos, tmp_path / "s", capfd)


@pytest.fixture(scope="module")
def single(photo_template: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the set that a single prep makes of `photos`."""
    out = tmp_path_factory.mktemp("single") / "set"
    assert main(["--src", photo_template, *SIZES, "--out", out, "--workers", 2]) == 0
    return tree(out)


def test_overlapping_ranges_in_any_order_produce_the_bytes_of_a_single_prep(
    jobs: Jobs, tmp_path: Path, prep: Prep
) -> None:
    (jobs.src / "apple" / "03.jpg").write_bytes(b"junk")
    (jobs.src / "bee" / "copy.jpg").write_bytes((jobs.src / "cat" / "05.jpg").read_bytes())
    status, out, _ = jobs.plan("--max-bad", 0.1)
    assert status == 0
    assert "planned 7 shards, numbered train 0:6, val 6:7; 0 of them are finished" in out
    assert f"  resolute jobs range --out {jobs.out} --range 0:7\n" in out
    (jobs.out / ".prep" / "lists").mkdir()
    (jobs.out / ".prep" / "lists" / "photos.db").write_bytes(b"https://host/a.jpg?token=secret")  # of a killed plan
    jobs.convert("6:99", "2:5", ":3", "5:6")
    status, out, err = jobs.finish()
    assert (status, err) == (0, "")
    assert "60 images, 3 classes" in out
    assert "WARNING: copies with different targets, one of which is wrong: 1 group" in out
    assert f"report: {jobs.out}/report.html" in out
    assert prep("--src", jobs.src, *SIZES, "--max-bad", 0.1, "--out", tmp_path / "fresh").status == 0
    assert tree(jobs.out) == tree(tmp_path / "fresh")
    assert not (jobs.out / ".prep").exists()
    assert json.loads((jobs.out / "rejects.jsonl").read_text())["path"] == "apple/03.jpg"


@pytest.mark.slow
@SLOW
def test_killed_and_overlapping_jobs_produce_the_bytes_of_a_single_prep(
    tmp_path: Path, prep: Prep, forked: Callable[..., Ended]
) -> None:
    photos = make_photos(tmp_path / "many", classes=2, each=30)
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", "1")
    done = forked("tests.support.kill_jobs", 4, 0, tmp_path / "s", *argv)
    assert done.status == 0, done.out + done.err
    met = re.search(r"^(\d+) of 16 kills met", done.out, re.MULTILINE)
    assert met is not None
    assert int(met[1]) >= 8, done.out
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


@pytest.mark.usefixtures("quick_retries")
@pytest.mark.parametrize("kind", ["folder", "tar.gz"])
def test_a_job_without_the_photos_ends_with_one_line_and_rejects_none(jobs: Jobs, tmp_path: Path, kind: str) -> None:
    lost = jobs.src
    if kind == "tar.gz":  # unpacked photos lie in OUT, which then is what the machine lacks
        jobs.src = pack(tmp_path, kind, make_tree(tmp_path / "tree"), "top/")
        lost = jobs.out / ".prep" / "scan_cache"
    assert jobs.plan("--max-bad", 1, "--val-frac", 0)[0] == 0
    away = lost.rename(lost.with_name("away"))
    ran = jobs.range(":")
    assert (ran[0], ran[2].count("\n")) == (2, 1), ran
    assert "storage is unavailable, got 'No such file or directory' 3 times" in ran[2]
    assert not list(jobs.out.rglob("*.rec"))
    away.rename(lost)
    jobs.complete(":")
    assert (jobs.out / "rejects.jsonl").read_bytes() == b""


def test_a_job_with_a_part_of_an_archive_ends_with_one_line_and_rejects_none(jobs: Jobs, tmp_path: Path) -> None:
    jobs.src = src = pack(tmp_path, "zip", make_tree(tmp_path / "tree"), "top/")
    data = src.read_bytes()
    assert jobs.plan("--max-bad", 1, "--val-frac", 0)[0] == 0
    src.write_bytes(data[: len(data) // 2])  # as on a machine that it is still being copied to
    what = f"{src}: not the archive that was planned, got {len(data) // 2} bytes, expected {len(data)}"
    refused(jobs.range(":"), what)
    assert not list(jobs.out.rglob("*.rec"))
    src.write_bytes(data)
    jobs.complete(":")
    assert (jobs.out / "rejects.jsonl").read_bytes() == b""


def test_an_invalid_range_is_refused(jobs: Jobs) -> None:
    for text in ("5", "3:3", "-1:4", "1:2:3", "²:3"):
        refused(jobs.range(text), f"--range: got {text!r}, expected A:B")
    assert not jobs.out.exists()


def test_finish_lists_missing_shards_and_a_single_prep_makes_them(
    jobs: Jobs, prep: Prep, single: dict[str, str]
) -> None:
    assert jobs.plan()[0] == 0
    jobs.convert("1:3", "5:6")
    (jobs.out / "48" / "train-000002.tar").unlink()
    ranges = f"`resolute jobs range --out {jobs.out} --range 0:7`"
    refused(jobs.finish(), "got 5 missing, numbers 0:1, 2:5, 6:7", ranges)
    ran = prep("--src", jobs.src, *SIZES, "--out", jobs.out)
    assert "kept 2 shards" in ran.out, ran.err
    assert tree(jobs.out) == single


def test_too_many_rejects_are_refused_at_the_end_and_a_new_plan_may_allow_them(jobs: Jobs) -> None:
    for name in ("03.jpg", "05.jpg"):
        (jobs.src / "apple" / name).write_bytes(b"junk")
    assert jobs.plan()[0] == 0
    jobs.convert(":")
    refused(jobs.finish(), "too many unusable images, got 2 of 60", "(MAX_BAD=0.01)")
    assert not (jobs.out / "manifest.json").exists()
    assert "7 of them are finished" in jobs.plan("--max-bad", 0.1)[1]
    assert jobs.finish()[0] == 0
    assert len((jobs.out / "rejects.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@SLOW
def test_a_finished_set_is_recognised_and_a_resolution_is_added_by_jobs(jobs: Jobs, tmp_path: Path, prep: Prep) -> None:
    assert jobs.plan()[0] == 0
    before = jobs.complete(":")
    for status, text, _ in (jobs.plan(), jobs.finish()):
        assert (status, "already there (train 54, val 6; 3 classes); nothing to do" in text) == (0, True)
    status, text, error = jobs.range(":")
    assert (status, text.splitlines()[0], error) == (0, f"{jobs.out}: the set is finished, nothing to do", "")
    assert tree(jobs.out) == before
    (jobs.out / "damaged.json").write_text('["48/train-000001.tar"]')
    refused(jobs.range(":"), "no plan for jobs, got none in .prep/plan")
    (jobs.out / "damaged.json").unlink()
    assert "0 of them are finished" in jobs.plan("--res", "64")[1]
    refused(jobs.finish(), "got 7 missing, numbers 0:7")
    made = jobs.complete("0:3", "3:")
    assert prep("--src", jobs.src, *SIZES, "--res", "32,48,64", "--out", tmp_path / "fresh").status == 0
    assert made == tree(tmp_path / "fresh")


@pytest.mark.slow
def test_jobs_repair_damage_detected_by_verify(jobs: Jobs, prep: Prep, single: dict[str, str]) -> None:
    assert prep("--src", jobs.src, *SIZES, "--out", jobs.out).status == 0
    for damaged in ("48/train-000001.tar", "index/train-48.npy", "records/val-000000-32.rec"):
        flip(jobs.out / damaged)
    assert verify([jobs.out, "--workers", "1"]) == 1
    refused(jobs.finish(), "no plan for jobs")
    assert jobs.plan()[0] == 0
    assert jobs.complete(":", ":") == single


def test_a_missing_plan_and_a_damaged_file_of_it_are_refused(jobs: Jobs) -> None:
    for ran in (jobs.range(":"), jobs.finish()):
        refused(ran, "no plan for jobs")
        assert not jobs.out.exists()
    plan = jobs.out / ".prep" / "plan"
    assert jobs.plan()[0] == 0
    (plan / "set.json").write_bytes((plan / "set.json").read_bytes().replace(b'"src"', b'"srd"'))
    refused(jobs.range(":"), "no plan for jobs, got none in .prep/plan")
    assert jobs.plan()[0] == 0
    flip(plan / "photos.parquet")
    refused(jobs.range("1:2"), "photos.parquet: got none or a damaged one")


@SLOW
def test_a_plan_with_other_settings_than_finished_shards_is_refused(jobs: Jobs, single: dict[str, str]) -> None:
    assert jobs.plan("--quality", 80)[0] == 0
    jobs.convert("2:3")
    refused(jobs.plan(), "an unfinished run with other settings: quality: got 80, expected 90")
    assert jobs.plan("--rebuild")[0] == 0
    assert jobs.complete(":") == single


def test_a_machine_with_other_decoder_versions_converts_nothing(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    assert jobs.plan()[0] == 0
    versions = {**codecs.codec_versions(), "Pillow": "0.1"}
    monkeypatch.setattr(codecs, "codec_versions", lambda: versions)
    refused(jobs.range(":"), "machine ", "Pillow: got 0.1, expected")
    assert not list(jobs.out.rglob("*.tar"))


def test_what_other_machines_cannot_read_is_refused_by_plan(jobs: Jobs, tmp_path: Path) -> None:
    rows = [(f"https://me:hunter2@host/{i}.jpg?sig=5ecret", "ab"[i % 2]) for i in range(4)]
    jobs.src = pack_table(tmp_path / "list.csv", rows)
    ran = jobs.plan()
    refused(ran, "got a URL with credentials, 'https://host/0.jpg?sig=***'", "ENGINE=local")
    written = [path.read_bytes() for path in jobs.out.rglob("*") if path.is_file()]
    assert not any(re.search(b"hunter2|5ecret", text) for text in [*written, ran[2].encode()])
    jobs.src = pack(tmp_path, "tar.gz", make_tree(tmp_path / "tree"), "")
    jobs.out = "memory://set"
    unpacked = "must be unpacked where all nodes can read it, got `resolute jobs plan` and OUT=memory://set"
    refused(jobs.plan(), unpacked)
    jobs.src = tmp_path / "photos"
    refused(jobs.plan(), "memory://set: ends with this process")


@SLOW
def test_jobs_need_no_lock_and_end_when_their_plan_is_replaced(
    jobs: Jobs, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert jobs.plan()[0] == 0
    with open_output(str(jobs.out)).exclusive_lock():
        jobs.convert("0:2")
        for ran in (jobs.plan(), jobs.finish()):
            refused(ran, "another prep is writing here, got host", f"pid {os.getpid()}")
    convert = work.convert_shards
    other = ("--src", jobs.src, *SIZES, "--quality", 70)

    def after_another_plan(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        assert prep(*other, "--rebuild", "--out", jobs.out).status == 0
        return convert(*args, **options)

    monkeypatch.setattr(work, "convert_shards", after_another_plan)
    refused(jobs.range(":"), "no longer the set that this job works on, got no plan")
    assert prep(*other, "--out", tmp_path / "fresh").status == 0
    assert tree(jobs.out) == tree(tmp_path / "fresh")


@pytest.mark.slow
@SLOW
def test_jobs_on_s3_produce_the_bytes_of_a_local_set(
    s3_server: str,  # noqa: F811
    jobs: Jobs,
    tmp_path: Path,
    single: dict[str, str],
) -> None:
    jobs.out = f"{s3_server}/set"
    assert jobs.plan()[0] == 0
    refused(jobs.finish(), "got 7 missing, numbers 0:7")
    jobs.convert("4:", "0:5")
    assert jobs.finish()[0] == 0
    fsspec.filesystem("s3").get(f"{jobs.out}/", str(tmp_path / "copy"), recursive=True)
    assert tree(tmp_path / "copy") == single
    assert open_output(jobs.out).names(LOCK) == []
