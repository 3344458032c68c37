"""A set made by `resolute jobs` equals the set of a single prep, also when jobs are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

import resolute.prep.convert.codecs as codecs
from resolute.files import atomic_file
from resolute.pipeline.dataset.format import manifest_bytes
from resolute.prep.run import planned
from resolute.prep.run.pool import Pool
from resolute.prep.storage.output import LOCK, LocalStore, open_store
from tests import ROOT
from tests.conftest import make_photos
from tests.support.cli import prep as main
from tests.support.cli import verify
from tests.support.faulty_worker import serve
from tests.support.s3 import s3_server  # noqa: F401  # a fixture
from tests.support.source_formats import jpeg, make_tree, pack, pack_parquet, pack_samples, pack_table
from tests.support.trees import tree

Prep = Callable[..., Any]
PLAN = Path(".prep/plan")


@contextmanager
def faulty_pool(workers: int) -> Iterator[Pool]:
    pool = Pool(workers, "fork", serve)
    try:
        yield pool
    finally:
        pool.end()


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """run("plan", ...): the command line in this process; returns status, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        words = [str(word) for word in argv]
        capfd.readouterr()
        status = main([*words, "--workers", "2"] if words[0] == "range" else words)
        return status, *capfd.readouterr()

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def argv(photos: Path) -> tuple[object, ...]:
    return ("--src", photos, "--res", "32,48", "--shard-samples", 10)


@pytest.fixture
def fresh(argv: tuple[object, ...], tmp_path: Path, prep: Prep) -> Callable[..., dict[str, str]]:
    """fresh(...): the files of the set as one prep makes it, with additional arguments."""

    def fresh(*more: object) -> dict[str, str]:
        assert prep(*argv, *more, "--out", tmp_path / "fresh").status == 0
        return tree(tmp_path / "fresh")

    return fresh


def refused(ran: tuple[int, str, str], *words: str) -> None:
    """Exactly one line, *where: got X, expected Y; do Z*, that contains `words`."""
    status, out, err = ran
    assert (status, out, err.count("\n")) == (2, "", 1), (out, err)
    assert re.match(r"resolute (jobs \w+|shards): .+: .*got .+; .+", err), err
    for word in words:
        assert word in err


def jobs(run: Run, out: object, *ranges: str) -> None:
    for part in ranges:
        assert run("range", "--out", out, "--range", part)[0] == 0, part


@pytest.mark.parametrize("ranges", [(":",), ("6:99", "2:5", ":3", "5:6"), ("0:4", "3:7", "1:2")])
def test_any_ranges_in_any_order_produce_the_bytes_of_a_single_prep(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, run: Run, fresh: Callable[..., Any], ranges: tuple[str, ...]
) -> None:
    (photos / "apple" / "03.jpg").write_bytes(b"junk")
    (photos / "bee" / "copy.jpg").write_bytes((photos / "cat" / "05.jpg").read_bytes())
    status, out, _ = run("plan", *argv, "--max-bad", 0.1, "--out", tmp_path / "s")
    assert status == 0
    assert "planned 7 shards, numbered train 0:6, val 6:7; 0 of them are finished" in out
    assert f"  resolute jobs range --out {tmp_path / 's'} --range 0:7\n" in out
    jobs(run, tmp_path / "s", *ranges)
    status, out, err = run("finish", "--out", tmp_path / "s")
    assert (status, err) == (0, "")
    assert "60 images, 3 classes" in out
    assert "WARNING: copies with different targets, one of which is wrong: 1 group" in out
    assert f"report: {tmp_path / 's'}/report.html" in out
    assert tree(tmp_path / "s") == fresh("--max-bad", 0.1)
    assert json.loads((tmp_path / "s" / "rejects.jsonl").read_text())["path"] == "apple/03.jpg"


@pytest.mark.parametrize("how", ["nothing held out", "val", "zip", "tar.gz"])
def test_any_source_produces_the_bytes_of_a_single_prep(tmp_path: Path, run: Run, prep: Prep, how: str) -> None:
    files = make_tree(tmp_path / "photos")
    make_tree(tmp_path / "val")
    val = ("--val", tmp_path / "val", "--duplicates", "keep")
    more = {"nothing held out": ("--val-frac", 0), "val": val}.get(how, ())
    src = tmp_path / "photos" if more else pack(tmp_path, how, files, "top/")
    argv = ("--src", src, *more, "--res", "32,48", "--shard-samples", 3)
    assert run("plan", *argv, "--out", tmp_path / "s")[0] == 0
    jobs(run, tmp_path / "s", "1:", "0:1")
    assert run("finish", "--out", tmp_path / "s")[0] == 0
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


@pytest.mark.slow
def test_killed_and_overlapping_jobs_produce_the_bytes_of_a_single_prep(tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "many", classes=2, each=60)
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", "1")
    command = [sys.executable, str(ROOT / "tests" / "support" / "kill_jobs.py"), "10", "0", str(tmp_path / "s")]
    here = {**os.environ, "PYTHONPATH": str(ROOT)}  # why: a script's own folder is on its path, not this one
    done = subprocess.run([*command, *map(str, argv)], cwd=ROOT, env=here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    met = re.search(r"^(\d+) of 40 kills met", done.stdout, re.MULTILINE)
    assert met is not None
    assert int(met[1]) >= 20, done.stdout
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_a_job_converts_only_its_own_shards_and_skips_finished_shards(
    argv: tuple[object, ...], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    converted = run("range", "--out", out, "--range", "1:3")[1]
    assert "2 shards converted (20 images), 0 already there, 0 images rejected" in converted
    assert sorted(path.stem for path in (out / "48").glob("*.tar")) == ["train-000001", "train-000002"]
    before = {path: path.stat().st_ino for path in out.glob("[0-9]*/*")}
    (out / "32" / "train-000002.idx").unlink()
    assert "1 shard converted (10 images), 1 already there" in run("range", "--out", out, "--range", "1:3")[1]
    changed = {path.name for path, inode in before.items() if path.stat().st_ino != inode}
    assert changed <= {"train-000002.tar", "train-000002.idx"}
    assert "0 shards converted (0 images), 0 already there" in run("range", "--out", out, "--range", "7:9")[1]


def test_a_job_lists_no_folder_and_reads_only_the_files_of_its_range(
    argv: tuple[object, ...], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    jobs(run, out, "1:4")
    used: list[str] = []

    def record(name: str, method: Callable[..., Any]) -> None:
        def recorded(store: LocalStore, file: str = "") -> Any:
            used.append(f"{name} {file}")
            return method(store, file)

        monkeypatch.setattr(LocalStore, name, recorded)

    for name in ("read", "size", "names", "sizes"):
        record(name, getattr(LocalStore, name))
    assert "2 shards converted (14 images), 2 already there" in run("range", "--out", out, "--range", "2:6")[1]
    numbers = {int(match[1]) for each in used if (match := re.search(r"train-(\d{6})", each))}
    assert numbers == {2, 3, 4, 5}
    assert not [each for each in used if each.startswith(("names", "sizes"))]


def away(path: Path) -> Callable[[], object]:
    """Move a file or folder away, as on a machine without it; returns the function that moves it back."""
    hidden = path.rename(path.with_name(f"{path.name}.away"))
    return lambda: hidden.rename(path)


@pytest.mark.parametrize("kind", ["folder", "list", "zip", "tar", "tar.gz", "webdataset", "parquet"])
def test_a_job_without_the_photos_ends_with_one_line_and_rejects_none(
    tmp_path: Path, run: Run, prep: Prep, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("resolute.prep.storage.retry.WAITS_S", (0.0, 0.0))
    monkeypatch.setattr("resolute.prep.sources.fetch.WAITS_S", (0.0, 0.0))
    files = make_tree(tmp_path / "photos")
    out, src = tmp_path / "s", tmp_path / "photos"
    if kind == "list":
        src = tmp_path / "list.txt"
        src.write_text("".join(f"{tmp_path}/photos/dog/{name} dog{i}\n" for i, name in enumerate(["1.jpg", "x.webp"])))
    elif kind == "webdataset":
        src = pack_samples(tmp_path / "x.tar", [(f"{i}.jpg", jpeg(i), {"cls": b"%d" % (i % 2)}) for i in range(8)])
    elif kind == "parquet":
        src = pack_parquet(tmp_path / "x.parquet", [(jpeg(i), f"{i}.jpg", i % 2) for i in range(8)], ["a", "b"])
    elif kind != "folder":
        src = pack(tmp_path, kind, files, "top/")
    argv = ("--src", src, "--res", "32", "--shard-samples", 3, "--max-bad", 1, "--val-frac", 0)
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert run("plan", *argv, "--out", out)[0] == 0
    # unpacked photos lie in OUT, which then is what the machine lacks
    lost = out / ".prep" / "spool" if kind in ("tar.gz", "parquet") else tmp_path / "photos" if kind == "list" else src
    back = away(lost)
    ran = run("range", "--out", out, "--range", ":")
    assert (ran[0], ran[2].count("\n")) == (2, 1), ran
    assert "storage is unavailable, got 'No such file or directory' 3 times" in ran[2]
    assert not list(out.rglob("*.rec"))
    back()
    jobs(run, out, ":")
    assert run("finish", "--out", out)[0] == 0
    assert tree(out) == tree(tmp_path / "fresh")


@pytest.mark.parametrize("kind", ["zip", "tar", "webdataset"])
def test_a_job_with_a_part_of_an_archive_ends_with_one_line_and_rejects_none(
    tmp_path: Path, run: Run, kind: str
) -> None:
    files = make_tree(tmp_path / "photos")
    if kind == "webdataset":
        src = pack_samples(tmp_path / "x.tar", [(f"{i}.jpg", jpeg(i), {"cls": b"%d" % (i % 2)}) for i in range(8)])
    else:
        src = pack(tmp_path, kind, files, "top/")
    out, data = tmp_path / "s", src.read_bytes()
    assert run("plan", "--src", src, "--res", "32", "--max-bad", 1, "--val-frac", 0, "--out", out)[0] == 0
    src.write_bytes(data[: len(data) // 2])  # as on a machine that it is still being copied to
    ran = run("range", "--out", out, "--range", ":")
    refused(ran, f"{src}: not the archive that was planned, got {len(data) // 2} bytes, expected {len(data)}")
    assert not list(out.rglob("*.rec"))
    src.write_bytes(data)
    jobs(run, out, ":")
    assert run("finish", "--out", out)[0] == 0
    assert (out / "rejects.jsonl").read_bytes() == b""


def test_a_repeated_job_deletes_partial_files_of_its_shards_that_no_job_is_writing(
    argv: tuple[object, ...], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    jobs(run, out, "0:1")
    own, others = (out / "32" / f".train-00000{n}.tar.0123456789ab.partial" for n in (1, 2))
    for path in (own, others):
        path.touch()
    with atomic_file(out / "48" / "train-000001.tar"):  # as a job of an overlapping range does
        jobs(run, out, "1:2")
        assert len(list(out.rglob("*-000001*.partial"))) == 1
    assert not own.exists()
    assert others.exists()


@pytest.mark.parametrize("text", ["5", "5:2", "3:3", "-1:4", "a:b", "1:2:3", ":0", "²:3"])
def test_an_invalid_range_is_refused(argv: tuple[object, ...], tmp_path: Path, run: Run, text: str) -> None:
    refused(run("range", "--out", tmp_path / "s", f"--range={text}"), f"--range: got {text!r}, expected A:B")
    assert not (tmp_path / "s").exists()


def test_finalize_lists_missing_shards(
    argv: tuple[object, ...], tmp_path: Path, run: Run, fresh: Callable[..., Any]
) -> None:
    assert run("plan", *argv, "--out", tmp_path / "s")[0] == 0
    jobs(run, tmp_path / "s", "1:3", "5:6")
    (tmp_path / "s" / "48" / "train-000002.tar").unlink()
    ran = run("finish", "--out", tmp_path / "s")
    refused(ran, "got 5 missing, numbers 0:1, 2:5, 6:7", f"`resolute jobs range --out {tmp_path / 's'} --range 0:7`")
    jobs(run, tmp_path / "s", "0:7")
    assert run("finish", "--out", tmp_path / "s")[0] == 0
    assert tree(tmp_path / "s") == fresh()


def test_too_many_rejects_are_refused_at_the_end_and_a_new_plan_may_allow_them(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, run: Run, fresh: Callable[..., Any]
) -> None:
    (photos / "apple" / "03.jpg").write_bytes(b"junk")
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    jobs(run, out, ":")
    refused(run("finish", "--out", out), "too many unusable images, got 1 of 60", "(--max-bad 0.01)")
    assert not (out / "manifest.json").exists()
    assert "7 of them are finished" in run("plan", *argv, "--max-bad", 0.1, "--out", out)[1]
    assert run("finish", "--out", out)[0] == 0
    assert tree(out) == fresh("--max-bad", 0.1)


def test_a_single_prep_resumes_from_the_shards_of_jobs(
    argv: tuple[object, ...], tmp_path: Path, run: Run, prep: Prep, fresh: Callable[..., Any]
) -> None:
    assert run("plan", *argv, "--out", tmp_path / "s")[0] == 0
    jobs(run, tmp_path / "s", "2:5")
    ran = prep(*argv, "--out", tmp_path / "s")
    assert ran.status == 0, ran.err
    assert "kept 3 shards" in ran.out
    assert tree(tmp_path / "s") == fresh()


def test_a_finished_set_is_recognised_and_a_resolution_is_added_by_jobs(
    argv: tuple[object, ...], tmp_path: Path, run: Run, prep: Prep, fresh: Callable[..., Any]
) -> None:
    out, more = tmp_path / "s", (*argv[:2], "--res", "64", *argv[4:])
    assert prep(*argv, "--out", out).status == 0
    before = tree(out)
    for command in (("plan", *argv, "--out", out), ("finish", "--out", out)):
        status, text, _ = run(*command)
        assert (status, "already there (train 54, val 6; 3 classes); nothing to do" in text) == (0, True)
    assert run("range", "--out", out, "--range", ":") == (0, f"{out}: the set is finished, nothing to do\n", "")
    assert tree(out) == before
    (out / "damaged.json").write_text('["48/train-000001.tar"]')
    refused(run("range", "--out", out, "--range", ":"), "no plan for jobs, got none in .prep/plan")
    (out / "damaged.json").unlink()
    assert "0 of them are finished" in run("plan", *more, "--out", out)[1]
    refused(run("finish", "--out", out), "got 7 missing, numbers 0:7")
    jobs(run, out, "0:3", "3:")
    assert run("finish", "--out", out)[0] == 0
    assert tree(out) == fresh("--res", "32,48,64")


@pytest.mark.parametrize("damaged", ["48/train-000001.tar", "index/train-48.npy", "records/val-000000-32.rec"])
def test_jobs_repair_damage_detected_by_verify(
    argv: tuple[object, ...], tmp_path: Path, run: Run, prep: Prep, damaged: str
) -> None:
    out = tmp_path / "s"
    assert prep(*argv, "--out", out).status == 0
    before = tree(out)
    data = bytearray((out / damaged).read_bytes())
    data[len(data) // 2] ^= 1
    (out / damaged).write_bytes(data)
    assert verify([str(out), "--workers", "1"]) == 1
    refused(run("finish", "--out", out), "no plan for jobs")
    assert run("plan", *argv, "--out", out)[0] == 0
    jobs(run, out, ":", ":")
    assert run("finish", "--out", out)[0] == 0
    assert tree(out) == before


def test_damage_detected_after_the_plan_requires_a_new_plan(
    argv: tuple[object, ...], tmp_path: Path, run: Run, prep: Prep
) -> None:
    out = tmp_path / "s"
    assert prep(*argv, "--out", out).status == 0
    assert run("plan", *argv[:2], "--res", "64", *argv[4:], "--out", out)[0] == 0
    (out / "damaged.json").write_text('["48/train-000001.tar"]')
    jobs(run, out, ":")
    refused(run("finish", "--out", out), "damaged since the plan was made", "48/train-000001.tar")


def test_an_unfinished_plan_and_a_damaged_file_of_it_are_refused(
    argv: tuple[object, ...], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "s"
    for command in (("range", "--range", ":"), ("finish",)):
        refused(run(*command, "--out", out), "no plan for jobs")
        assert not out.exists()
    assert run("plan", *argv, "--out", out)[0] == 0
    for damage in (Path.unlink, lambda path: path.write_bytes(path.read_bytes().replace(b'"src"', b'"srd"'))):
        damage(out / PLAN / "set.json")
        refused(run("range", "--out", out, "--range", ":"), "no plan for jobs, got none in .prep/plan")
        refused(run("finish", "--out", out), "no plan for jobs, got none in .prep/plan")
        assert run("plan", *argv, "--out", out)[0] == 0
    photos = out / PLAN / "photos.parquet"
    data = bytearray(photos.read_bytes())
    data[len(data) // 2] ^= 1
    photos.write_bytes(data)
    refused(run("range", "--out", out, "--range", "1:2"), "photos.parquet: got none or a damaged one")
    photos.unlink()
    refused(run("range", "--out", out, "--range", "1:2"), "photos.parquet: got none or a damaged one")


def test_a_refused_plan_keeps_the_unpacked_photos_of_the_plan_before(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "s"
    argv = ("--src", pack(tmp_path, "tar.gz", make_tree(tmp_path / "photos"), "top/"), "--res", "32", "--out", out)
    assert run("plan", *argv)[0] == 0
    refused(run("plan", *argv, "--val-list", tmp_path / "missing"), "missing")
    jobs(run, out, ":")
    assert run("finish", "--out", out)[0] == 0
    assert not (out / ".prep").exists()


def test_finalize_deletes_the_lists_of_a_killed_plan(argv: tuple[object, ...], tmp_path: Path, run: Run) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    jobs(run, out, ":")
    (out / ".prep" / "lists").mkdir(parents=True)
    (out / ".prep" / "lists" / "photos.db").write_bytes(b"https://host/a.jpg?token=secret")
    assert run("finish", "--out", out)[0] == 0
    assert not (out / ".prep").exists()


def test_jobs_read_the_archive_that_was_planned_although_it_was_replaced_since(
    tmp_path: Path, run: Run, prep: Prep
) -> None:
    files = make_tree(tmp_path / "photos")
    src = pack(tmp_path, "tar.gz", files, "top/")
    argv = ("--src", src, "--res", "32", "--shard-samples", 3)
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    assert run("plan", *argv, "--out", tmp_path / "s")[0] == 0
    jobs(run, tmp_path / "s", "0:1")
    pack(tmp_path, "tar.gz", dict(list(files.items())[:0:-1]), "top/")
    refused(run("plan", *argv, "--out", tmp_path / "s"), "an unfinished run with other settings")
    jobs(run, tmp_path / "s", ":")
    assert run("finish", "--out", tmp_path / "s")[0] == 0
    assert tree(tmp_path / "s") == tree(tmp_path / "fresh")


def test_a_plan_of_another_set_is_refused(
    argv: tuple[object, ...], tmp_path: Path, run: Run, fresh: Callable[..., Any]
) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    plan = json.loads((out / "records" / "plan.json").read_text())
    (out / "records" / "plan.json").write_bytes(manifest_bytes({**plan, "settings": {**plan["settings"], "seed": 1}}))
    for command in (("range", "--range", ":"), ("finish",)):
        refused(run(*command, "--out", out), "got shards planned with other settings")
    assert run("plan", *argv, "--quality", 80, "--out", out)[0] == 0  # no shard is finished: it replaces the plan
    jobs(run, out, "2:3")
    refused(run("plan", *argv, "--out", out), "an unfinished run with other settings: quality: got 80, expected 90")
    assert run("plan", *argv, "--rebuild", "--out", out)[0] == 0
    jobs(run, out, ":")
    assert run("finish", "--out", out)[0] == 0
    assert tree(out) == fresh()


def test_a_machine_with_other_decoder_versions_converts_nothing(
    argv: tuple[object, ...], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("plan", *argv, "--out", tmp_path / "s")[0] == 0
    versions = {**codecs.codec_versions(), "Pillow": "0.1"}
    monkeypatch.setattr(codecs, "codec_versions", lambda: versions)
    refused(run("range", "--out", tmp_path / "s", "--range", ":"), "machine ", "Pillow: got 0.1, expected")
    assert not list((tmp_path / "s").rglob("*.tar"))


def test_a_job_whose_worker_is_killed_rejects_nothing_and_can_be_repeated(
    argv: tuple[object, ...], photos: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the kernel when memory runs out."""
    (photos / "bee" / "03.jpg").write_bytes(b"slow " + bytes(tmp_path / "pid"))
    monkeypatch.setattr("resolute.prep.run.planned.open_pool", faulty_pool)
    assert run("plan", *argv, "--out", tmp_path / "s")[0] == 0

    def kill() -> None:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.005)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    job = run("range", "--out", tmp_path / "s", "--range", ":")
    thread.join()
    refused(job, "got SIGKILL in one of 2", "use fewer WORKERS (--workers)")
    jobs(run, tmp_path / "s", ":")
    assert run("finish", "--out", tmp_path / "s")[0] == 0
    assert (tmp_path / "s" / "rejects.jsonl").read_bytes() == b""


def test_a_url_with_credentials_is_refused_and_not_written(tmp_path: Path, run: Run) -> None:
    rows = [(f"https://me:hunter2@host/{i}.jpg?sig=5ecret", "ab"[i % 2]) for i in range(4)]
    table = pack_table(tmp_path / "list.csv", rows)
    ran = run("plan", "--src", table, "--res", "32", "--out", tmp_path / "s")
    refused(ran, "got a URL with credentials, 'https://host/0.jpg?sig=***'", "ENGINE=local")
    for path in [path for path in (tmp_path / "s").rglob("*") if path.is_file()]:
        assert not re.search(b"hunter2|5ecret", path.read_bytes()), path
    assert not re.search("hunter2|5ecret", ran[2])


def test_flags_of_the_conversion_are_refused_by_plan(argv: tuple[object, ...], tmp_path: Path, run: Run) -> None:
    for flags in (("--workers", 2), ("--engine", "ray"), ("--dry",)):
        status, _, err = run("plan", *argv, "--out", tmp_path / "s", *flags)
        assert (status, err.count("\n")) == (2, 1)
        assert f"Unknown option: {flags[0]}" in err


def test_folders_that_prep_did_not_create_are_not_changed(argv: tuple[object, ...], tmp_path: Path, run: Run) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "notes.txt").write_text("mine")
    commands = (("plan", *argv), ("range", "--range", ":"), ("finish",))
    for command in commands:
        refused(run(*command, "--out", tmp_path / "s"))
        assert [path.name for path in (tmp_path / "s").iterdir()] == ["notes.txt"]


def test_jobs_need_no_lock_and_end_when_their_plan_is_replaced(
    argv: tuple[object, ...], tmp_path: Path, run: Run, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--out", out)[0] == 0
    with open_store(str(out)).exclusive_lock():
        jobs(run, out, "0:2")
        for command in (("plan", *argv), ("finish",)):
            refused(run(*command, "--out", out), "another prep is writing here, got host", f"pid {os.getpid()}")
    convert = planned.convert_shards

    def after_another_plan(*args: Any, **options: Any) -> Any:
        monkeypatch.undo()
        assert prep(*argv, "--quality", 70, "--rebuild", "--out", out).status == 0
        return convert(*args, **options)

    monkeypatch.setattr(planned, "convert_shards", after_another_plan)
    refused(run("range", "--out", out, "--range", ":"), "no longer the set that this job works on, got no plan")
    assert prep(*argv, "--quality", 70, "--out", tmp_path / "fresh").status == 0
    assert tree(out) == tree(tmp_path / "fresh")


def test_a_job_whose_plan_is_replaced_while_it_begins_writes_nothing(
    argv: tuple[object, ...], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, read = tmp_path / "s", planned.read_set_plan
    assert run("plan", *argv, "--out", out)[0] == 0

    def before_another_plan(store: Any) -> Any:
        plan = read(store)
        monkeypatch.undo()
        assert main(["plan", *map(str, argv), "--quality", "70", "--out", str(out)]) == 0
        return plan

    monkeypatch.setattr(planned, "read_set_plan", before_another_plan)
    job = run("range", "--out", out, "--range", ":")
    assert "no longer the set that this job works on, got another plan" in job[2]
    assert not list(out.rglob("*.tar"))


def test_a_shard_whose_file_of_an_older_plan_appears_late_is_made_again(
    argv: tuple[object, ...], tmp_path: Path, run: Run, fresh: Callable[..., Any]
) -> None:
    out = tmp_path / "s"
    assert run("plan", *argv, "--quality", 1, "--out", out)[0] == 0
    jobs(run, out, "1:2")
    late = (out / "48" / "train-000001.tar").read_bytes()
    assert run("plan", *argv, "--rebuild", "--out", out)[0] == 0
    jobs(run, out, ":")
    (out / "48" / "train-000001.tar").write_bytes(late)
    refused(run("finish", "--out", out), "not all shards are finished, got 1 missing, numbers 1:2")
    jobs(run, out, "1:2")
    assert run("finish", "--out", out)[0] == 0
    assert tree(out) == fresh()


@pytest.mark.slow
def test_jobs_on_s3_produce_the_bytes_of_a_local_set(
    s3_server: str, argv: tuple[object, ...], tmp_path: Path, run: Run, fresh: Callable[..., Any]  # noqa: F811
) -> None:
    out = f"{s3_server}/set"
    assert run("plan", *argv, "--out", out)[0] == 0
    refused(run("finish", "--out", out), "got 7 missing, numbers 0:7")
    jobs(run, out, "4:", "0:5")
    assert run("finish", "--out", out)[0] == 0
    copy = tmp_path / "copy"
    fsspec.filesystem("s3").get(f"{out}/", str(copy), recursive=True)
    assert tree(copy) == fresh()
    assert open_store(out).names(LOCK) == []


@pytest.mark.timing
@pytest.mark.slow
def test_killed_and_overlapping_jobs_on_s3_produce_the_bytes_of_a_local_set(
    s3_server: str, tmp_path: Path, run: Run, prep: Prep  # noqa: F811
) -> None:
    photos = make_photos(tmp_path / "many", classes=2, each=40)
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", 2)
    out = f"{s3_server}/set"
    store = open_store(out)
    assert run("plan", *argv, "--out", out)[0] == 0
    finished = []
    for ranges in ((":25", "15:"), ("30:", "5:35")):
        words = [sys.executable, "-m", "resolute", "jobs", "range", "--out", out, "--workers", "1", "--range"]
        started = [subprocess.Popen([*words, part], cwd=ROOT, start_new_session=True) for part in ranges]
        enough, deadline = len(store.names("records")) + 12, time.monotonic() + 120
        while len(store.names("records")) < enough and time.monotonic() < deadline:
            time.sleep(0.02)
        for job in started:
            os.killpg(job.pid, signal.SIGKILL)
            assert job.wait() == -signal.SIGKILL
        finished.append(len(store.names("records")))
    assert 12 < finished[0] < finished[1] < 80, finished
    refused(run("finish", "--out", out), "not all shards are finished")
    jobs(run, out, "20:", ":21", "0:3")
    assert run("finish", "--out", out)[0] == 0
    assert prep(*argv, "--out", tmp_path / "fresh").status == 0
    fsspec.filesystem("s3").get(f"{out}/", str(tmp_path / "copy"), recursive=True)
    assert tree(tmp_path / "copy") == tree(tmp_path / "fresh")


def test_images_that_only_one_machine_could_read_are_refused(tmp_path: Path, run: Run) -> None:
    archive = pack(tmp_path, "tar.gz", make_tree(tmp_path / "photos"), "")
    ran = run("plan", "--src", archive, "--res", "32", "--out", "memory://set")
    refused(ran, "must be unpacked where all nodes can read it, got `resolute jobs plan` and OUT=memory://set")


def test_a_plan_for_jobs_in_memory_is_refused(argv: tuple[object, ...], run: Run) -> None:
    refused(run("plan", *argv, "--out", "memory://jobs"), "memory://jobs: ends with this process")


def test_a_set_with_many_shards_in_memory_equals_one_in_a_folder(
    argv: tuple[object, ...], tmp_path: Path, prep: Prep, fresh: Callable[..., Any]
) -> None:
    assert prep(*argv, "--out", "memory://many").status == 0  # 7 shards and 2 workers
    fsspec.filesystem("memory").get("/many/", str(tmp_path / "copy"), recursive=True)
    assert tree(tmp_path / "copy") == fresh()
