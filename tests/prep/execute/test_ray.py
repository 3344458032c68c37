"""The Ray engine produces the same bytes as the local one; nodes that are lost or lack something change nothing."""

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

from resolute.prep.storage.output import open_store
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


@pytest.mark.timing
def test_only_unfinished_shards_of_a_lost_node_are_repeated(
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


def test_nodes_that_see_other_photos_or_another_output_convert_nothing(
    cluster: Any, nodes: Path, tmp_path: Path, prep: Prep
) -> None:
    # why: these paths lead to the working directory of the process that opens them, as without a shared disk
    photos = make_photos(tmp_path / "photos", classes=2, each=12)
    argv = ("--res", "32", "--shard-samples", 8, "--engine", "ray", "--ray-address", cluster.address)
    for src, out, words in (
        ("/proc/self/cwd/photos", tmp_path / "a", "does not see the photos as this machine does, got"),
        (photos, "/proc/self/cwd/b", "does not see OUT as this machine does, got nothing at /proc/self/cwd/b"),
    ):
        ran = prep("--src", src, "--out", out, *argv)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert words in ran.err
        assert not list(Path(out).rglob("*.tar"))
        assert not list(Path(out).rglob("manifest.json"))
    assert not list(nodes.rglob("*.tar"))


def add_node(cluster: Any, folder: Path, **options: Any) -> Any:
    """A node with one CPU whose working directory is `folder`."""
    folder.mkdir(exist_ok=True)
    with contextlib.chdir(folder):
        node = cluster.add_node(num_cpus=1, **options)
        cluster.wait_for_nodes()
    return node


@contextlib.contextmanager
def extra_nodes(cluster: Any, *nodes: tuple[Path, dict[str, Any]]) -> Iterator[list[Any]]:
    """Additional nodes for the length of the block: (working directory, options)."""
    added = [add_node(cluster, folder, **options) for folder, options in nodes]
    try:
        yield added
    finally:
        for node in added:
            if node in cluster.list_all_nodes():
                cluster.remove_node(node)


def left_out(err: str) -> list[str]:
    """The lines about nodes that are left out; there are no others."""
    lines = err.splitlines()
    assert all(line.startswith("resolute shards: ENGINE=ray: left out: node ") for line in lines), err
    return lines


def patched_python(folder: Path, code: str) -> dict[str, Any]:
    """Options of a node whose Python processes run `code` when they start."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    return {"env_vars": {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}}


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[list[str], dict[str, Any]]]:
    """held(n): the lines about nodes, and options of a node that decodes nothing until there are `n` of them."""
    go, lines = tmp_path / "go", []

    def make(expected: int) -> tuple[list[str], dict[str, Any]]:
        def take(line: str) -> None:
            lines.append(line)
            if len(lines) == expected:
                go.touch()

        monkeypatch.setattr("resolute.prep.execute.ray.say", take)
        code = (
            "import os, time, simplejpeg\ndecode = simplejpeg.decode_jpeg\nend_s = time.monotonic() + 90\n"
            "def held(*args, **options):\n"
            f"    while not os.path.exists({str(go)!r}) and time.monotonic() < end_s:\n        time.sleep(0.01)\n"
            "    return decode(*args, **options)\n"
            "simplejpeg.decode_jpeg = held\n"
        )
        return lines, patched_python(tmp_path / "held", code)

    return make


@pytest.mark.timing
def test_nodes_without_the_photos_are_left_out_with_a_line_also_those_that_join_later(
    cluster: Any, tmp_path: Path, prep: Prep, held: Any
) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=20)
    argv = ("--res", "32,48", "--shard-samples", 6)
    lines, held_node = held(3)
    joined: list[subprocess.Popen[bytes]] = []

    def join() -> None:
        deadline = time.monotonic() + 60
        while len(lines) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        (tmp_path / "elsewhere").mkdir()
        words = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--num-cpus=1"]
        # why a process: Ray's own nodes can only be started by the main thread
        joined.append(
            subprocess.Popen([*words, "--block"], cwd=tmp_path / "elsewhere", stdout=subprocess.DEVNULL)
        )

    # why this path: it leads to the working directory of the process that opens it, as without a shared disk
    on_ray = ("--src", "/proc/self/cwd/photos", "--engine", "ray", "--ray-address", cluster.address)
    with extra_nodes(cluster, (tmp_path, held_node)):
        joiner = threading.Thread(target=join)
        joiner.start()
        ran = prep(*on_ray, *argv, "--out", tmp_path / "ray")
        joiner.join()
        for node in joined:
            node.terminate()
            node.wait()
    assert (ran.status, ran.err) == (0, "")
    assert len(lines) == 3
    for line in lines:
        assert line.startswith("ENGINE=ray: left out: node ")
        assert "does not see the photos as this machine does, got '/proc/self/cwd/photos/" in line
    assert prep("--src", photos, *argv, "--out", tmp_path / "local").status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")


def test_a_node_that_loses_the_photos_during_the_run_is_left_out_and_no_photo_is_rejected(
    cluster: Any, nodes: Path, tmp_path: Path, prep: Prep
) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=60)
    mount = nodes / "photos"
    mount.symlink_to(photos)
    argv = ("--res", "32,48", "--shard-samples", 6)
    out = tmp_path / "ray"

    def unmount() -> None:
        deadline = time.monotonic() + 120
        while len(list(out.glob("records/*-48.rec"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.005)
        mount.unlink()

    unmounter = threading.Thread(target=unmount)
    with extra_nodes(cluster, (tmp_path, {})):
        unmounter.start()
        ran = prep("--src", "/proc/self/cwd/photos", "--out", out, *argv, "--engine", "ray", "--ray-address",
                   cluster.address)  # fmt: skip
        unmounter.join()
    assert ran.status == 0, ran.err
    for line in left_out(ran.err):
        assert "another node can: '/proc/self/cwd/photos/" in line
        assert "storage is unavailable" in line
    assert prep("--src", photos, "--out", tmp_path / "local", *argv).status == 0
    assert tree(out) == tree(tmp_path / "local")


def test_nodes_with_other_versions_without_resolute_or_with_too_little_memory_are_left_out(
    cluster: Any, tmp_path: Path, prep: Prep, held: Any
) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=20)
    argv = ("--res", "32", "--shard-samples", 8)
    lines, held_node = held(5)
    other_webp = patched_python(tmp_path / "webp", "from PIL import features\nfeatures.version = lambda name: '0.1'\n")
    broken = patched_python(tmp_path / "broken", "import sys\nsys.modules['simplejpeg'] = None\n")
    on_ray = ("--src", "/proc/self/cwd/photos", "--engine", "ray", "--ray-address", cluster.address)
    with extra_nodes(cluster, *((tmp_path, kind) for kind in (held_node, other_webp, broken, {"memory": 200 << 20}))):
        ran = prep(*on_ray, *argv, "--out", tmp_path / "ray")
    assert (ran.status, ran.err) == (0, "")
    reasons = sorted(line.partition(") ")[2] for line in lines)
    assert re.match(r"cannot import Resolute, got 'import of simplejpeg halted.*', expected this", reasons[0])
    assert all(reason.startswith("does not see the photos") for reason in reasons[1:3])
    assert re.match(r"got 200 MiB of memory for Ray, expected at least \d+ for a task; give it more", reasons[3])
    assert re.match(r"has other versions, .*libwebp in Pillow: got 0\.1, expected [\d.]+.*; install", reasons[4])
    assert prep("--src", photos, *argv, "--out", tmp_path / "local").status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")


@pytest.mark.parametrize("sent", [signal.SIGSEGV, signal.SIGKILL])
def test_an_image_that_crashes_its_decoder_is_rejected_and_a_kill_from_outside_ends_the_run(
    cluster: Any, tmp_path: Path, prep: Prep, sent: signal.Signals
) -> None:
    make_photos(tmp_path / "photos", classes=2, each=20)
    fatal = tmp_path / "photos" / "class1" / "007.jpg"
    fatal.write_bytes(fatal.read_bytes() + b"fatal")
    kills = (
        "import os, signal, simplejpeg\ndecode = simplejpeg.decode_jpeg\n"
        "def fatal(data, *args, **options):\n"
        f"    if bytes(data).endswith(b'fatal'):\n        os.kill(os.getpid(), signal.{sent.name})\n"
        "    return decode(data, *args, **options)\n"
        "simplejpeg.decode_jpeg = fatal\n"
    )
    with extra_nodes(cluster, (tmp_path, patched_python(tmp_path / "shim", kills))):
        ran = prep("--src", "/proc/self/cwd/photos", "--out", tmp_path / "ray", "--res", "32", "--shard-samples", 8,
                   "--max-bad", 0.1, "--engine", "ray", "--ray-address", cluster.address)  # fmt: skip
    if sent == signal.SIGKILL:
        assert ran.status == 2
        expected = r"\nresolute shards: worker process: died, got SIGKILL .* use a machine with more memory"
        assert re.search(expected, f"\n{ran.err}")
        assert not (tmp_path / "ray" / "rejects.jsonl").exists()
        return
    assert ran.status == 0, ran.err
    (row,) = map(json.loads, (tmp_path / "ray" / "rejects.jsonl").read_text().splitlines())
    assert (row["path"], row["reason"]) == ("class1/007.jpg", "decoder died: SIGSEGV")
    assert json.loads((tmp_path / "ray" / "manifest.json").read_text())["source"]["images"] == 40


@pytest.mark.timing
@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_tasks_of_an_ended_driver_write_nothing_more(
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
    with open_store(str(out)).exclusive_lock():  # as the next run does at once
        before = tree(out)
        time.sleep(5)
        assert tree(out) == before
    assert 4 <= len(list(out.glob("records/*-48.rec"))) < 80
    settings = ("--quality", 70, "--rebuild")
    assert prep(*argv, *settings).status == 0
    assert prep(*argv[:2], *argv[4:], *settings, "--out", tmp_path / "local").status == 0
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
