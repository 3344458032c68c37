"""The benchmark for a GPU, on a CPU with tiny sizes: its rows, its result file, and rows that fail."""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.benchmarks import gpu, gpu_rows
from resolute.benchmarks.loaders import dali
from resolute.benchmarks.loaders.child import adapter
from resolute.benchmarks.loaders.job import MEAN, STD, Job
from resolute.benchmarks.loaders.on_device import normalised_on_device
from resolute.benchmarks.loaders.registry import GPU_LOADERS
from resolute.benchmarks.loaders.tars import Tars
from resolute.benchmarks.record import commit, digest
from resolute.benchmarks.whole import tools
from resolute.errors import ResoluteError
from tests.conftest import make_photos
from tests.support.commands import timed_in_forks

LOADERS = ("ours", "ours-gpu", "v2", "v2-sized", "dali")
TOOLS = ("ours", "plain-once", "timm-once")


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line on tiny photos."""
    photos, more = make_photos(tmp_path / "photos", each=8), make_photos(tmp_path / "more", each=16)
    return [
        f"--photos={photos}",
        f"--training-photos={more}",
        "--device=cpu",
        f"--work={tmp_path / 'work'}",
        f"--out={tmp_path / 'gpu.json'}",
    ]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[gpu.Row]:
    """Rows that were measured, without measuring them; the second fails."""
    seen: list[gpu.Row] = []

    def measure(self: Any, row: gpu.Row, limit_s: float) -> dict[str, Any]:
        seen.append(row)
        if len(seen) == 2:
            raise ResoluteError("out of memory")
        return {"speed": "as before"}

    monkeypatch.setattr(gpu._Bench, "measure", measure)
    monkeypatch.setattr(gpu, "rows", lambda *_, **__: [{"part": "none", "number": number} for number in range(3)])
    monkeypatch.setattr(gpu, "PARTS", ("none",))
    monkeypatch.setitem(gpu._LIMITS_S, "none", 60)
    return seen


def read(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "gpu.json").read_text()))


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_the_first_rows_compare_every_loader_and_every_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available_cpus", lambda: 16)
    sizes = gpu.Sizes.for_device("cuda")
    rows = gpu.rows(sizes, loaders=LOADERS, tools=TOOLS)
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)
    feeds = [row for row in rows if row["part"] == "feed" and not row["compile"]]
    compared = {(row["loader"], row["cores"], row["batch_size"]) for row in feeds}
    assert compared == {*itertools.product(("ours", "ours-gpu", "v2", "dali"), (2, 4, 8, 16), (1024, 256))}
    assert all(row["models"] == ["resnet50", "resnet18"] for row in feeds)
    trained = {(row["tool"], row.get("model"), row["seed"]) for row in rows if row["part"] == "training"}
    tools = {*itertools.product(TOOLS, ("resnet18", "resnet50"), (0, 1, 2))}
    assert trained == tools | {("imagenette_cpu_whole", None, seed) for seed in range(3)}
    assert {row["processes"] for row in rows if row["part"] == "ranks"} >= {1, 2}
    first = {row["part"]: number for number, row in reversed([*enumerate(rows)])}
    assert max(first.values()) < len(rows) / 2  # each part has a row in the first half
    assert {row["loader"] for row in rows if row["part"] == "change"} == {"ours", "v2", "v2-sized"}
    assert [row["loader"] for row in rows if row["part"] == "feed" and row["compile"]] == ["ours", "v2"]


@pytest.mark.parametrize("cores", [1, 2, 3, 8, 64])
def test_machines_of_all_sizes_have_rows(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available_cpus", lambda: cores)
    rows = gpu.rows(gpu.Sizes.for_device("cuda"), loaders=LOADERS, tools=TOOLS)
    assert len({json.dumps(row, sort_keys=True) for row in rows}) == len(rows)
    assert max(row["cores"] for row in rows if row["part"] == "feed") == min(cores, 16)


# ---- the result file -------------------------------------------------------------------------------------------------


def test_the_same_command_continues_and_failed_rows_wait_for_another_commit(
    words: list[str],
    measured: list[gpu.Row],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert gpu.main([*words, "--minutes=0"]) == 0
    assert not measured
    assert gpu.main(words) == 0
    assert [row["number"] for row in measured] == [0, 1, 2]
    out = capsys.readouterr().out
    assert "failed: none 1: out of memory" in out
    assert "3 of 3 rows" in out
    assert gpu.main(words) == 0
    assert len(measured) == 3
    monkeypatch.setattr(gpu, "commit", lambda: "another")
    assert gpu.main(words) == 0
    assert [row["number"] for row in measured] == [0, 1, 2, 1]
    rows = read(tmp_path)["rows"]
    assert sorted(row["row"]["number"] for row in rows) == [0, 1, 2]
    assert {row["commit"] for row in rows} == {commit(), "another"}
    assert all("result" in row and row["took_s"] >= 0 and row["load_before"] >= 0 for row in rows)
    assert str(tmp_path) not in json.dumps(rows)


def test_an_edited_file_and_one_of_another_machine_are_refused(
    words: list[str], measured: list[gpu.Row], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(words) == 0
    file, whole_text = tmp_path / "gpu.json", (tmp_path / "gpu.json").read_text()
    file.write_text(whole_text.replace("as before", "better"))
    assert gpu.main(words) == 2
    assert "gpu.json: changed since it was written; restore it, or name another --out" in capsys.readouterr().err
    result = json.loads(whole_text)
    result["machine"]["cores"] = 1000
    result["digest"] = digest(result)
    file.write_text(json.dumps(result))
    assert gpu.main(words) == 2
    assert "measured with cores 1000, got" in capsys.readouterr().err
    file.write_text("[]")
    assert gpu.main(words) == 2
    assert "not a result of this command" in capsys.readouterr().err


def test_photos_that_are_not_in_class_folders_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert gpu.main([*words[1:], f"--photos={tmp_path / 'empty'}"]) == 2
    assert "got no CLASS/PHOTO" in capsys.readouterr().err


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # trains four times
def test_every_part_is_measured_on_a_cpu(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(
        '[model]\nname = "test_resnet"\n[optim]\nlr = 0.1\n[[stages]]\nres = 32\nepochs = 1\nbatch_size = 8\n'
        "[[stages]]\nres = 64\nepochs = 1\nbatch_size = 8\n"
    )
    sizes = dataclasses.replace(gpu.Sizes.for_device("cpu"), recipe=recipe, scale_epochs=1.0)
    monkeypatch.setattr(gpu.Sizes, "for_device", lambda _: sizes)
    all_rows = gpu.rows

    def some(*args: Any, **options: Any) -> list[gpu.Row]:
        """A row of each part, and the training of both tools and of the recipe."""
        firsts = {(row["part"], row.get("tool")): row for row in reversed(all_rows(*args, **options))}
        return [*firsts.values()]

    monkeypatch.setattr(gpu, "rows", some)
    for module in (gpu, tools):
        monkeypatch.setattr(module, "timed", timed_in_forks(tools.timed, tmp_path))
    assert gpu.main(words) == 0
    rows = read(tmp_path)["rows"]
    assert [row["failed"] for row in rows if "failed" in row] == []
    results = {part: [row["result"] for row in rows if row["row"]["part"] == part] for part in gpu.PARTS}
    for feed in results["feed"]:
        for res in ("32", "48"):
            assert feed["res"][res]["alone"]["images_per_s"] > 0
    assert [len(change["step_s"]) for change in results["change"]] == [2]
    ours, once, of_recipe = sorted(results["training"], key=lambda each: str(each["tool"]))
    assert ours["photos"] + ours["validated"] == 48
    assert [len(each["curve"]) for each in (ours, once, of_recipe)] == [2, 2, 2]
    assert of_recipe["tool"] == "tiny"
    assert (tmp_path / "work/recipe/shards/manifest.json").exists()
    (ranks,) = results["ranks"]
    assert {res: len(rates) for res, rates in ranks["images_per_s"].items()} == {"32": 1, "48": 1}
    assert all(rate > 0 for rates in ranks["images_per_s"].values() for rate in rates)
    out = capsys.readouterr().out
    for text in ("loader alone, batches of 8", "live ÷ synthetic", "ms lost in the first", "over all processes"):
        assert text in out


def serve(connection: Connection, log: Path, setup: str) -> None:
    """A stand-in for `gpu_rows.serve`: it answers, fails or hangs, as a row says."""
    while True:
        row = connection.recv()
        if row["do"] == "fail":
            log.write_text("CUDA out of memory")
            return
        if row["do"] == "hang":
            time.sleep(600)
        connection.send({**row, "setup": setup})


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_worker_that_fails_or_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_SPAWN", multiprocessing.get_context("fork"))  # why: a new interpreter takes seconds
    worker = gpu._Worker(serve, "tiny", tmp_path / "log")
    answer = {"do": "well", "setup": "tiny"}
    assert worker.measure({"do": "well"}, 60) == answer
    with pytest.raises(ResoluteError, match="CUDA out of memory"):
        worker.measure({"do": "fail"}, 60)
    with pytest.raises(ResoluteError, match="no result after 1 s"):
        worker.measure({"do": "hang"}, 1)
    assert worker.measure({"do": "well"}, 60) == answer
    worker.close()


def job(shard_root: Path, name: str, **values: Any) -> Job:
    entry = GPU_LOADERS[name]
    common: dict[str, Any] = {"resolutions": (32, 48), "batches": 2, "batch_size": 8, "workers": 1}
    return Job(module=entry.module, variant=entry.variant, shards=str(shard_root), **{**common, **values})


@pytest.mark.parametrize("name", ["ours", "v2", "v2-sized"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
def test_loaders_deliver_normalised_batches_of_every_size(name: str, shard_root: Path) -> None:
    described = job(shard_root, name)
    batches = list(itertools.islice(adapter(described).stream(described), 4))
    assert [batch.shape for batch in batches] == [(8, 3, 32, 32)] * 2 + [(8, 3, 48, 48)] * 2
    for batch in batches:
        assert batch.dtype == torch.float32
        assert name != "ours" or batch.is_contiguous(memory_format=torch.channels_last)
        assert abs(float(batch.mean())) < 2
        assert 0.3 < float(batch.std()) < 3


def test_bytes_are_normalised_on_the_device() -> None:
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    ((got, labels),) = normalised_on_device(
        [(images, torch.tensor([1, 2]))], device=torch.device("cpu"), dtype=torch.float32
    )
    expected = (images / 255 - torch.tensor(MEAN).view(1, 3, 1, 1)) / torch.tensor(STD).view(1, 3, 1, 1)
    torch.testing.assert_close(got, expected)
    assert labels.tolist() == [1, 2]


def test_the_stock_graph_for_a_gpu_can_be_built(shard_root: Path) -> None:
    """Serialised only: there is no GPU here."""
    described = job(shard_root, "dali", dtype="float16")
    graph = dali._gpu_graph(described, Tars(shard_root, 32), 32, batch_size=8, num_threads=1, device_id=None, seed=0)
    text = graph.serialize()
    assert b"decoders__Image" in text
    assert b"RandomResizedCrop" in text


def test_cores_are_limited_and_given_back(shard_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = gpu_rows.Setup(shards=str(shard_root), device="cpu", resolutions=(32,), seconds=0.01)
    measurements, used = gpu_rows.Measurements(setup), list[int]()
    monkeypatch.setattr(measurements, "_use", used.append)
    found = measurements.feed(loader="ours", cores=1, batch_size=8, models=["test_resnet"], compile=False)
    assert used == [1, len(measurements._cpus)]
    assert found["res"]["32"]["test_resnet"]["synthetic"][1] > 0


# ---- tables ----------------------------------------------------------------------------------------------------------


def result_of(*rows: tuple[gpu.Row, dict[str, Any]]) -> dict[str, Any]:
    return {
        "machine": {"gpu": "H100", "cores": 16, "cpu": "Xeon"},
        "settings": {"resolutions": [128]},
        "rows": [{"row": row, "commit": "abc", "result": result} for row, result in rows],
    }


def test_live_is_divided_by_the_mean_of_synthetic_rates() -> None:
    row = {"part": "feed", "loader": "v2", "cores": 4, "batch_size": 256, "models": ["resnet50"], "compile": False}
    timed = {"images_per_s": 900.0, "cpu_s_per_1000": 1.25, "cores_busy": 3.5}
    found = {
        "workers": 6,
        "tried": {},
        "res": {"128": {"alone": timed, "resnet50": {"live": timed, "synthetic": [950.0, 1050.0]}}},
    }
    text = gpu.tables(result_of((row, found)))
    lines = [line.split() for line in text.splitlines() if "DataLoader" in line]
    assert lines[0][-4:] == ["4", "6", "900", "1.25"]
    assert lines[1][-5:] == ["4", "6", "900", "0.900", "3.5"]


def test_rates_of_several_processes_are_medians_over_the_epochs() -> None:
    def run(processes: int, rates: list[float]) -> tuple[gpu.Row, dict[str, Any]]:
        row = {"part": "ranks", "model": "resnet50", "batch_size": 1024, "processes": processes}
        return row, {"devices": 1, "wall_s": 50.0, "images_per_s": {"96": rates}}

    text = gpu.tables(result_of(run(2, [500.0, 900.0, 800.0]), run(1, [1000.0])))
    one, two = [line.split() for line in text.splitlines()[-2:]]
    assert one == ["1", "1", "1,000", "50.0"]
    assert two == ["2", "1", "800", "(500..900)", "50.0"]


@pytest.fixture(autouse=True)
def _no_training_time_left() -> Iterator[None]:
    """Settings of torch that measurements change."""
    threads, tuned = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = tuned


def test_the_tools_read_photos_resized_once(tmp_path: Path) -> None:
    args = type("Args", (), {"work": tmp_path, "timm": tmp_path / "timm"})()
    bench = gpu._Bench(args, gpu.Sizes.for_device("cuda"), "cuda")
    row = {"part": "training", "model": "resnet18", "seed": 0}
    timm, loop = (bench._job({**row, "tool": tool}) for tool in ("timm-once", "plain-once"))
    assert timm.source == loop.source == tmp_path / "training/once"
    (tmp_path / "training/photos/train/a").mkdir(parents=True)
    for described in (timm, loop):
        described.folder.mkdir()
    words, _ = tools.call(timm)
    assert words[words.index("--device") + 1] == "cuda"
    assert {"--pin-mem", "--amp"} <= {*words}
    settings = json.loads(tools.described(loop).read_text())
    assert (settings["device"], settings["photos"]) == ("cuda", str(tmp_path / "training/once"))
