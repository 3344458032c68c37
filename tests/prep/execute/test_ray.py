"""The Ray engine makes the bytes of the local one, also when a node is lost in the middle."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_photos
from tests.support.packed import jpeg, make_tree, pack, pack_parquet
from tests.support.trees import tree

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")
Prep = Callable[..., Any]
pytestmark = [
    pytest.mark.slow,
    # why: Ray's own sockets and processes end after the interpreter looks
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the nodes run, as on other machines: a relative path means something else to them."""
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


def test_a_lost_node_costs_only_its_unfinished_shards(cluster: Any, nodes: Path, tmp_path: Path, prep: Prep) -> None:
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
        # why: a node killed in a write leaves this; where the kill below falls is chance
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


def test_relative_paths_mean_the_same_on_every_node(cluster: Any, tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=12)
    val = make_photos(tmp_path / "val", classes=2, each=4)
    argv = ("--res", "32", "--shard-samples", 8)
    on_ray = ("--engine", "ray", "--ray-address", cluster.address)
    ran = prep("--src", "photos", "--val", "val", "--out", "ray", *argv, *on_ray)
    assert ran.status == 0, ran.err
    assert prep("--src", photos, "--val", val, "--out", tmp_path / "local", *argv).status == 0
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")


def test_nodes_that_see_other_photos_or_another_out_get_no_shard(
    cluster: Any, nodes: Path, tmp_path: Path, prep: Prep
) -> None:
    # why: these names lead to the working directory of whoever follows them, as on machines that share no disk
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


def test_sources_unpacked_to_this_machines_disk_are_refused_for_a_cluster(tmp_path: Path, prep: Prep) -> None:
    files = make_tree(tmp_path / "photos")
    pack_parquet(tmp_path / "x.parquet", [(jpeg(i), "", i % 2) for i in range(8)], None)
    pack(tmp_path, "tar.gz", files, "")
    argv = ("--out", "memory://set", "--res", "32", "--engine", "ray")
    for src in (("x.parquet",), ("p.tar.gz",), ("photos", "--val", str(tmp_path / "p.tar.gz"))):
        ran = prep("--src", tmp_path / src[0], *src[1:], *argv)
        assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
        assert "must be unpacked where all nodes can read it, got ENGINE=ray and OUT=memory://set" in ran.err


def test_no_cluster_is_one_clear_line(tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=6)
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--engine", "ray")
    ran = prep(*argv, "--ray-address", "127.0.0.1:1")
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert "RAY_ADDRESS: no cluster at 127.0.0.1:1" in ran.err
