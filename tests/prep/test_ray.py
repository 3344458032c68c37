"""The Ray engine makes the bytes of the local one, also when a node is lost in the middle."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_photos
from tests.prep.trees import tree

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")
Prep = Callable[..., Any]
pytestmark = [
    # why: Ray's own sockets and processes end after the interpreter looks
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head without CPUs and two nodes with one CPU each, as separate processes on this machine."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.nodes = [made.add_node(num_cpus=1), made.add_node(num_cpus=1)]
    made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_lost_node_costs_only_its_unfinished_shards(cluster: Any, tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=3, each=80)
    argv = ("--src", photos, "--res", "32,48", "--shard-samples", 8)
    out = tmp_path / "ray"
    seen: list[int] = []

    def lose_a_node() -> None:
        deadline = time.monotonic() + 120
        while len(list(out.glob(".prep/*.npz"))) < 4 and time.monotonic() < deadline:
            time.sleep(0.005)
        seen.append(len(list(out.glob(".prep/*.npz"))))
        # why: a node killed in a write leaves this; where the kill below falls is chance
        (out / "48" / "train-000001.tar.0123abcd.part").write_bytes(b"half")
        cluster.remove_node(cluster.nodes[1], allow_graceful=False)

    killer = threading.Thread(target=lose_a_node)
    killer.start()
    ran = prep(*argv, "--out", out, "--engine", "ray", "--ray-address", cluster.address)
    killer.join()
    assert ran.status == 0, ran.err
    assert 4 <= seen[0] < 30
    assert prep(*argv, "--out", tmp_path / "local").status == 0
    assert tree(out) == tree(tmp_path / "local")


def test_no_cluster_is_one_clear_line(tmp_path: Path, prep: Prep) -> None:
    photos = make_photos(tmp_path / "photos", classes=2, each=6)
    argv = ("--src", photos, "--out", tmp_path / "s", "--res", "32", "--engine", "ray")
    ran = prep(*argv, "--ray-address", "127.0.0.1:1")
    assert ran.status == 2
    assert ran.err.count("\n") == 1
    assert "RAY_ADDRESS: no cluster at 127.0.0.1:1" in ran.err
