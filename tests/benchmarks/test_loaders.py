"""Ours and the peer are given the same work: the same stored images, in full batches."""

from __future__ import annotations

import io
import multiprocessing
import tarfile
import threading
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.ours import full_batches, our_batches, train_plan
from benchmarks.peer import Stored, peer_batches
from benchmarks.peers.dataloader import pillow
from benchmarks.peers.job import MEAN, STD
from pipeline.dataset.shard_set import ShardSet, key_name
from pipeline.errors import ResoluteError
from pipeline.loader.reader import Reader
from tests.conftest import RESOLUTIONS

CPU = torch.device("cpu")


@pytest.mark.parametrize("res", RESOLUTIONS)
def test_the_peer_decodes_the_members_of_the_tars(shard_set: ShardSet, res: int) -> None:
    split, peer = shard_set.splits["train"], Stored(shard_set, res)
    members = {}
    for shard in split.shards:
        with tarfile.open(shard_set.path(res, shard)) as tar:
            members |= {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
    assert len(peer) == len(split) == len(members) // 2
    for sample, (key, label, _) in enumerate(split.samples):
        name = key_name(int(key))
        expected = np.asarray(Image.open(io.BytesIO(members[f"{name}.jpg"])).convert("RGB"))
        np.testing.assert_array_equal(np.asarray(pillow(peer.jpeg(sample))), expected)
        assert peer.labels[sample] == label == int(members[f"{name}.cls"])


def test_the_peer_reads_what_our_reader_reads(shard_set: ShardSet) -> None:
    peer, ids = Stored(shard_set, 48), np.arange(len(shard_set.splits["train"]))
    with closing(Reader(shard_set)) as reader:
        read = reader.submit("train", 48, ids).result()
        assert not read.errors
        for sample, jpeg in zip(ids, read.images, strict=True):
            ours = np.asarray(Image.open(io.BytesIO(jpeg.tobytes())).convert("RGB"))
            np.testing.assert_array_equal(np.asarray(pillow(peer.jpeg(int(sample)))), ours)


def test_both_deliver_normalised_float32_batches_of_one_shape(shard_set: ShardSet) -> None:
    torch.manual_seed(0)  # the peer's workers are seeded from it
    plan = train_plan(shard_set, [full_batches(shard_set, 64, batches=6, batch_size=16)])
    with closing(our_batches(plan, device=CPU, threads=1)) as stream:
        ours = torch.stack(list(stream))
    with closing(peer_batches(shard_set, [64], batches=6, batch_size=16, device=CPU, workers=1)) as stream:
        theirs = torch.stack(list(stream))
    assert ours.shape == theirs.shape == (6, 16, 3, 64, 64)
    assert ours.dtype == theirs.dtype == torch.float32
    low, high = (-np.array(MEAN) / STD).min() - 1e-3, ((1 - np.array(MEAN)) / STD).max() + 1e-3
    for images in (ours, theirs):
        assert low <= images.min()
        assert images.max() <= high
    # same photos, other crops: the means of 96 images agree to a few hundredths of a standard deviation
    np.testing.assert_allclose(ours.mean((0, 1, 3, 4)), theirs.mean((0, 1, 3, 4)), atol=0.15)


def test_the_peer_goes_through_the_resolutions_and_leaves_no_worker(shard_set: ShardSet) -> None:
    with closing(peer_batches(shard_set, [32, 64], batches=3, batch_size=8, device=CPU, workers=2)) as stream:
        assert [tuple(images.shape[1:]) for images in stream] == [(3, 32, 32)] * 3 + [(3, 64, 64)] * 3
    assert multiprocessing.active_children() == []


def test_loaders_that_are_closed_early_leave_nothing_running(shard_set: ShardSet) -> None:
    before = set(threading.enumerate())
    plan = train_plan(shard_set, [full_batches(shard_set, 64, batches=50, batch_size=8)])
    for stream in (
        our_batches(plan, device=CPU, threads=1),
        peer_batches(shard_set, [64], batches=50, batch_size=8, device=CPU, workers=2),
    ):
        with closing(stream):
            next(stream)
        assert multiprocessing.active_children() == []
        for thread in set(threading.enumerate()) - before:
            thread.join(timeout=20)  # torch's queue feeders end a moment after their queue is closed
        assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("batch_size", [2, 10, 64, 75])
@pytest.mark.parametrize("batches", [1, 7, 30, 200])
def test_stages_have_only_full_batches_and_enough_of_them(shard_set: ShardSet, batches: int, batch_size: int) -> None:
    plan = train_plan(shard_set, [full_batches(shard_set, 32, batches=batches, batch_size=batch_size)])
    assert plan.total_batches >= batches
    assert plan.total_batches < batches + len(plan.passes)
    for segment in plan.passes:
        assert {end - start for start, end in map(segment.bounds, range(segment.batches))} == {batch_size}


def test_a_set_smaller_than_a_batch_is_refused(shard_set: ShardSet) -> None:
    with pytest.raises(ResoluteError, match="got 75 training samples, expected a full batch of 76"):
        full_batches(shard_set, 32, batches=1, batch_size=76)
