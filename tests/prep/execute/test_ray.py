"""The Ray engine produces the same bytes as the local one, whatever happens to nodes, tasks and the run itself."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import make_photos
from tests.support.source_formats import jpeg, make_tree, pack, pack_parquet
from tests.support.trees import tree

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")
Prep = Callable[..., Any]
pytestmark = [
    pytest.mark.slow,
    # why: Ray's own sockets and processes end after the interpreter's check
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of the nodes: as on other machines, relative paths differ there."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def started(nodes: Path) -> Iterator[Any]:
    """A head without CPUs and two nodes with one CPU each, as separate processes on this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with contextlib.chdir(nodes):
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            made.add_node(num_cpus=1)
        made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def cluster(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    return started


@contextlib.contextmanager
def patched_node(cluster: Any, folder: Path, code: str) -> Iterator[None]:
    """A further node, whose Python processes run `code` when they start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    node = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"})
    cluster.wait_for_nodes()
    try:
        yield
    finally:
        cluster.remove_node(node)


@pytest.mark.timing
def test_a_set_made_by_three_nodes_of_which_one_is_killed_has_the_bytes_of_a_local_one(
    cluster: Any, nodes: Path, tmp_path: Path, prep: Prep
) -> None:
    with contextlib.chdir(nodes):
        lost = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
    photos = make_photos(tmp_path / "photos", classes=3, each=80)
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", 8)
    out = tmp_path / "ray"
    seen: list[int] = []

    def lose_a_node() -> None:
        deadline = time.monotonic() + 120
        while len(list(out.glob("records/*-48.rec"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append(len(list(out.glob("records/*-48.rec"))))
        # why: a node killed during a write leaves such a file; the moment of the kill below is random
        (out / "48" / ".train-000001.tar.0123456789ab.partial").write_bytes(b"half")
        cluster.remove_node(lost, allow_graceful=False)

    killer = threading.Thread(target=lose_a_node)
    killer.start()
    ran = prep(*argv, "--out", out, "--engine", "ray", "--ray-address", cluster.address)
    killer.join()
    assert ran.status == 0, ran.err
    assert 4 <= seen[0] < 30
    assert prep(*argv, "--out", tmp_path / "local").status == 0
    assert tree(out) == tree(tmp_path / "local")


def test_relative_paths_are_resolved_before_they_are_sent_to_nodes(cluster: Any, tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=12)
    val = make_photos(tmp_path / "val", classes=2, each=4)
    argv = ("--res", "32", "--shard-samples", 8, "--duplicates", "keep")  # why: both hold the same photos
    on_ray = ("--engine", "ray", "--ray-address", cluster.address)
    ran = prep("--src", "photos", "--val", "val", "--out", "ray", *argv, *on_ray)
    assert ran.status == 0, ran.err
    assert prep("--src", photos, "--val", val, "--out", tmp_path / "local", *argv).status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    make_photos(tmp_path / "photos" / "more", classes=1, each=3)  # a new class, for an extension
    ran = prep("--src", "photos", "--val", "val", "--out", "ray", *argv, *on_ray, "--extend")
    assert ran.status == 0, ran.err
    assert prep("--src", photos, "--val", val, "--out", tmp_path / "local", *argv, "--extend").status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")


def test_nodes_without_the_photos_or_the_output_end_the_run_with_one_line_and_reject_no_photo(
    cluster: Any, tmp_path: Path, prep: Prep
) -> None:
    # why: these paths lead to the working directory of the process that opens them, as without a shared disk
    photos = make_photos(tmp_path / "photos", classes=2, each=12)
    argv = ("--res", "32", "--shard-samples", 8, "--engine", "ray", "--ray-address", cluster.address)
    for src, out, words in (
        ("/proc/self/cwd/photos", tmp_path / "a", "storage is unavailable, got"),
        (photos, "/proc/self/cwd/b", "no plan for jobs, got none in .prep/plan"),
    ):
        ran = prep("--src", src, "--out", out, *argv)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert words in ran.err
        assert not list(Path(out).rglob("*.tar"))
        assert not list(Path(out).rglob("manifest.json"))


def test_a_node_with_other_decoders_ends_the_run_with_a_line_that_names_them(
    cluster: Any, tmp_path: Path, prep: Prep
) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=40)
    code = "from PIL import features\nfeatures.version = lambda name: '0.1'\n"
    with patched_node(cluster, tmp_path / "webp", code):
        ran = prep("--src", photos, "--out", tmp_path / "ray", "--res", "32", "--shard-samples", 2, "--engine", "ray",
                   "--ray-address", cluster.address)  # fmt: skip
    assert ran.status == 2
    assert re.search(r"\nresolute shards: machine .*libwebp in Pillow", f"\n{ran.err}")
    ran = prep("--src", photos, "--out", tmp_path / "ray", "--res", "32", "--shard-samples", 2)
    assert ran.status == 0, ran.err
    assert prep("--src", photos, "--out", tmp_path / "local", "--res", "32", "--shard-samples", 2).status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")


def test_too_many_rejects_end_the_run(cluster: Any, tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=12)
    for name in ("class0/001.jpg", "class1/003.jpg"):
        (photos / name).write_bytes(b"junk")
    ran = prep("--src", photos, "--out", tmp_path / "ray", "--res", "32", "--engine", "ray", "--ray-address",
               cluster.address)  # fmt: skip
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert "too many unusable images, got" in ran.err
    assert len((tmp_path / "ray" / "rejects.jsonl").read_text().splitlines()) in (1, 2)


def test_an_image_that_crashes_its_decoder_is_rejected(cluster: Any, tmp_path: Path, prep: Prep) -> None:
    make_photos(tmp_path / "photos", classes=2, each=20)
    fatal = tmp_path / "photos" / "class1" / "007.jpg"
    fatal.write_bytes(fatal.read_bytes() + b"fatal")
    kills = (
        "import os, signal, simplejpeg\ndecode = simplejpeg.decode_jpeg\n"
        "def fatal(data, *args, **options):\n"
        "    if bytes(data).endswith(b'fatal'):\n        os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    return decode(data, *args, **options)\n"
        "simplejpeg.decode_jpeg = fatal\n"
    )
    with patched_node(cluster, tmp_path / "shim", kills):
        ran = prep("--src", tmp_path / "photos", "--out", tmp_path / "ray", "--res", "32", "--shard-samples", 8,
                   "--max-bad", 0.1, "--engine", "ray", "--ray-address", cluster.address)  # fmt: skip
    assert ran.status == 0, ran.err
    rejects = [json.loads(line) for line in (tmp_path / "ray" / "rejects.jsonl").read_text().splitlines()]
    # another node may have converted it
    assert rejects == [] or [(row["path"], row["reason"]) for row in rejects] == [
        ("class1/007.jpg", "decoder died: SIGSEGV")
    ]


@pytest.mark.timing
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_was_ended_is_replaced_by_one_of_other_settings(
    cluster: Any, tmp_path: Path, prep: Prep, ending: signal.Signals
) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=80)
    out = tmp_path / "ray"
    argv = ["--src", photos, "--out", out, "--res", "32,48", "--shard-samples", 2]
    words = [sys.executable, "-m", "resolute", "shards", *argv, "--engine", "ray", "--ray-address", cluster.address]
    with subprocess.Popen(list(map(str, words)), cwd=ROOT, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 120
        while len(list(out.glob("records/*-48.rec"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        driver.send_signal(ending)
    assert 4 <= len(list(out.glob("records/*-48.rec"))) < 80
    settings = ("--quality", 70, "--rebuild")
    assert prep(*argv, *settings).status == 0  # at once, while tasks of the ended run may still be there
    assert prep(*argv[:2], *argv[4:], *settings, "--out", tmp_path / "local").status == 0
    time.sleep(5)
    assert tree(out) == tree(tmp_path / "local")


def test_sources_unpacked_to_a_local_disk_are_refused_for_a_cluster(tmp_path: Path, prep: Prep) -> None:
    files = make_tree(tmp_path / "photos")
    pack_parquet(tmp_path / "x.parquet", [(jpeg(i), "", i % 2) for i in range(8)], None)
    pack(tmp_path, "tar.gz", files, "")
    argv = ("--out", "memory://set", "--res", "32", "--engine", "ray")
    for src in (("x.parquet",), ("p.tar.gz",), ("photos", "--val", str(tmp_path / "p.tar.gz"))):
        ran = prep("--src", tmp_path / src[0], *src[1:], *argv)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert "must be unpacked where all nodes can read it, got ENGINE=ray and OUT=memory://set" in ran.err


def test_a_missing_cluster_is_reported_in_one_line(tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=6)
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--engine", "ray")
    ran = prep(*argv, "--ray-address", "127.0.0.1:1")
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert "RAY_ADDRESS: no cluster at 127.0.0.1:1" in ran.err
