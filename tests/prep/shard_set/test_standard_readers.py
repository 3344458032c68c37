"""Standard WebDataset readers read every sample with the keys, labels and bytes of the index."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from resolute.pipeline.dataset.format import key_name
from resolute.pipeline.dataset.shard_set import ShardSet

CASES = [("train", 32), ("train", 64), ("val", 48)]


@pytest.fixture(autouse=True)
def _close_at_once() -> Iterator[None]:
    """Readers leave files to the garbage collector; its complaints belong to the test that caused them."""
    yield
    gc.collect()


def tars(opened: ShardSet, split: str, res: int) -> list[str]:
    return [str(opened.path(res, shard)) for shard in opened.splits[split].shards]


def expected(opened: ShardSet, split: str, res: int) -> list[tuple[str, int, bytes]]:
    """(key, label, JPEG) of every sample, by our own index."""
    whole = [Path(path).read_bytes() for path in tars(opened, split, res)]
    part = opened.splits[split]
    return [
        (key_name(int(s["key"])), int(s["label"]), whole[r["shard"]][r["offset"] :][: r["nbytes"]])
        for s, r in zip(part.samples, part.stored[res], strict=True)
    ]


def pixels(image: Any) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(image)) if isinstance(image, bytes) else image)


def assert_same(got: list[tuple[str, int, Any]], rows: list[tuple[str, int, bytes]]) -> None:
    """The same keys, labels and pixels."""
    assert [row[:2] for row in got] == [row[:2] for row in rows]
    for (*_, image), (*_, jpeg) in zip(got, rows, strict=True):
        assert np.array_equal(pixels(image), pixels(jpeg))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # webdataset leaves the tars open
def test_webdataset_reads_every_sample(shard_set: ShardSet) -> None:
    wds = pytest.importorskip("webdataset")
    for split, res in CASES:
        pipeline = wds.WebDataset(tars(shard_set, split, res), shardshuffle=False).decode("pil")
        assert_same(list(pipeline.to_tuple("__key__", "cls", "jpg")), expected(shard_set, split, res))
    pattern = f"{shard_set.root}/48/train-{{000000..000002}}.tar"
    pipeline = wds.WebDataset(pattern, shardshuffle=3, seed=1).shuffle(50).decode("pil").to_tuple("__key__", "cls")
    assert sorted(pipeline) == [row[:2] for row in expected(shard_set, "train", 48)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # timm reads through webdataset, see there
@pytest.mark.parametrize(("split", "folder"), [("train", ""), ("val", "48")])
def test_timm_reads_every_sample(shard_set: ShardSet, split: str, folder: str) -> None:
    timm_data = pytest.importorskip("timm.data")
    root = str(Path(shard_set.root) / folder)
    dataset = timm_data.create_dataset("wds/set", root=root, split=split, is_training=False, batch_size=1)
    rows = expected(shard_set, split, int(folder or 64))
    assert len(dataset) == len(rows)
    got = list(dataset)
    assert_same([(key, label, image) for (key, *_), (image, label) in zip(rows, got, strict=True)], rows)


def test_dalis_webdataset_reader_accepts_the_index_files(shard_set: ShardSet) -> None:
    fn = pytest.importorskip("nvidia.dali.fn")
    types = pytest.importorskip("nvidia.dali.types")
    pipeline_def = pytest.importorskip("nvidia.dali.pipeline").pipeline_def
    paths = tars(shard_set, "train", 32)
    rows = expected(shard_set, "train", 32)

    @pipeline_def(batch_size=len(rows), num_threads=1, device_id=None)
    def graph() -> Any:
        jpeg, label = fn.readers.webdataset(
            paths=paths,
            index_paths=[path.replace(".tar", ".idx") for path in paths],
            ext=["jpg", "cls"],
            missing_component_behavior="error",
            name="reader",
        )
        return jpeg, fn.decoders.image(jpeg, output_type=types.RGB), label

    pipe = graph()
    pipe.build()
    jpegs, images, labels = pipe.run()
    assert pipe.epoch_size("reader") == len(rows)
    for i, (_, label, jpeg) in enumerate(rows):
        assert jpegs.at(i).tobytes() == jpeg
        assert int(labels.at(i).tobytes()) == label
        assert images.at(i).shape == pixels(jpeg).shape  # why: DALI's decoder rounds in another way than Pillow's
        assert np.abs(images.at(i).astype(int) - pixels(jpeg)).mean() < 3


@pytest.mark.slow
@pytest.mark.parametrize(("split", "streaming"), [("train", False), ("val", True)])
def test_hugging_face_datasets_reads_every_sample_of_a_resolution_by_the_dataset_card(
    shard_set: ShardSet, split: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = datasets.load_dataset(
        str(shard_set.root),
        "48px",
        split={"train": "train", "val": "validation"}[split],
        streaming=streaming,
        cache_dir=str(tmp_path),
    )
    got = [(row["__key__"], row["cls"], row["jpg"]) for row in loaded]
    assert loaded.features["cls"].names == list(shard_set.target.classes)
    assert_same(got, expected(shard_set, split, 48))
