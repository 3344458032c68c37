"""The Ray engine produces the same bytes as the local one, whatever happens to nodes, tasks and the run itself."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_photos
from tests.support.commands import Command
from tests.support.trees import tree

ray = pytest.importorskip("ray", reason="the optional package ray is not installed")
Prep = Callable[..., Any]
ARGV = ("--res", "32", "--shard-samples", 8)
pytestmark = [
    pytest.mark.slow,
    # why: Ray's own sockets and processes end after the interpreter's check
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Tip. In future versions of Ray:FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A head without CPUs and a node with one CPU: processes in a working directory of their own."""
    from ray.cluster_utils import Cluster

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with contextlib.chdir(tmp_path_factory.mktemp("nodes")):
        # why: Ray asks nodes every 3 s, and takes one for dead only after several questions without an answer
        made = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0,
                "include_dashboard": False,
                "_system_config": {"health_check_period_ms": 500},
            },
        )
        made.add_node(num_cpus=1)
        made.wait_for_nodes()
    yield made
    ray.shutdown()
    made.shutdown()


def on(cluster: Any) -> tuple[str, ...]:
    return ("--engine", "ray", "--ray-address", cluster.address)


def assert_local_is_alike(prep: Prep, out: Path, *argv: object) -> None:
    ran = prep(*argv, "--out", out.parent / "local")
    assert ran.status == 0, ran.err
    assert tree(out) == tree(out.parent / "local")


def assert_refused(ran: Any, *words: str) -> None:
    assert (ran.status, ran.err.count("\n")) == (2, 1), ran.err
    assert all(each in ran.err for each in words), ran.err


def wait_for_records(out: Path, count: int) -> int:
    """The number of finished records, at least `count`."""
    deadline = time.monotonic() + 120
    while (found := len(list(out.glob("records/*-48.rec")))) < count and time.monotonic() < deadline:
        time.sleep(0.005)
    return found


@pytest.mark.timing
def test_a_killed_run_that_is_resumed_and_loses_one_of_two_nodes_makes_the_bytes_of_a_local_one(
    cluster: Any, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With relative paths, which nodes would resolve in their own folders, and an unusable photo."""
    lost = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    monkeypatch.chdir(tmp_path)
    make_photos(tmp_path / "photos", classes=3, each=40)
    (tmp_path / "photos" / "class0" / "001.jpg").write_bytes(b"junk")
    argv = ("--src", "photos", "--res", "32,48", "--shard-samples", 2, "--max-bad", 0.1)
    out = tmp_path / "ray"
    driver = Command("shards", [*argv, "--out", "ray", *on(cluster)], folder=tmp_path, scratch=tmp_path)
    seen = [wait_for_records(out, 4)]
    driver.send(signal.SIGKILL)
    assert driver.end().status == 128 + signal.SIGKILL

    def lose_a_node() -> None:
        seen.append(wait_for_records(out, seen[0] + 8))  # more than tasks of the killed run can still add
        # why: a node killed during a write leaves such a file; the moment of the kill below is random
        (out / "48" / ".train-000001.tar.0123456789ab.partial").write_bytes(b"half")
        cluster.remove_node(lost, allow_graceful=False)

    killer = threading.Thread(target=lose_a_node)
    killer.start()
    ran = prep(*argv, "--out", "ray", *on(cluster))  # at once, while tasks of the killed run may still be there
    killer.join()
    assert ran.status == 0, ran.err
    assert 4 <= seen[0] < seen[1] < 60
    assert_local_is_alike(prep, out, *argv)


def test_nodes_without_the_photos_or_the_output_end_the_run_with_one_line_and_reject_no_photo(
    cluster: Any, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resolute.prep.run.ray._RETRIES", 0)  # why: each waits for the storage
    # why: these paths lead to the working directory of the process that opens them, as without a shared disk
    monkeypatch.chdir(tmp_path)
    photos = make_photos(tmp_path / "photos", classes=2, each=12)
    # why a connection of our own: the second run finds the processes of the first on the node
    with ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR):
        for src, out, words in (
            ("/proc/self/cwd/photos", tmp_path / "a", "storage is unavailable, got"),
            (photos, "/proc/self/cwd/b", "no plan for jobs, got none in .prep/plan"),
        ):
            assert_refused(prep("--src", src, "--out", out, *ARGV, *on(cluster)), "resolute shards: node ", words)
            assert not [path for path in Path(out).rglob("*") if path.name == "manifest.json" or path.suffix == ".tar"]
