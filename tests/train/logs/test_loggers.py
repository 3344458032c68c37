"""Loggers show the log's scalars with their real packages, continue after a resume, and never end a training."""

from __future__ import annotations

import csv
import importlib.util
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.logs import loggers
from resolute.train.logs.loggers import LOGGERS, Csv, Loggers, Point, configuration, flat
from resolute.train.setup import Options
from tests.support.synthetic_log import write_log
from tests.train.conftest import without_clocks

# why: the packages of others may warn of each other's ageing interfaces
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No logger reaches a network, reads the user's account or sends usage statistics."""
    for name, value in {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_CONFIG_DIR": tmp_path,
                        "WANDB_CACHE_DIR": tmp_path, "MLFLOW_DISABLE_TELEMETRY": "true"}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_PROJECT", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def follow(folder: Path, *names: str, texts: Sequence[str]) -> None:
    """Send the points of these logs as consecutive processes of one run would, in an update for each part of a log."""
    for text in texts:
        lines = text.splitlines(keepends=True)
        (folder / "run.jsonl").write_text(lines[0])
        running = Loggers(names, folder)
        for first in range(1, len(lines), 9):
            with (folder / "run.jsonl").open("a") as file:
                file.writelines(lines[first : first + 9])
            running.update()
        running.close()


def cut_log(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Write a log; returns its records, and the logs of a run that is killed after step 17 and resumed from step 12."""
    records = write_log(folder, steps=5)
    lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
    first_epochs = [number for number, record in enumerate(records) if record["kind"] == "epoch"][:3]
    return records, ["".join(lines[: first_epochs[2] + 4]), "".join(lines)]


def expected(records: list[dict[str, Any]], kind: str, name: str) -> dict[int, float]:
    """The scalar `name` of the log by step; an epoch's at its last."""
    return {(record["step"] if kind == "step" else 5 * (record["epoch"] + 1) - 1): record[name]
            for record in records if record["kind"] == kind}  # fmt: skip


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_files_have_every_step_once_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "csv", texts=texts)
    rows = read_csv(tmp_path / "csv" / "step.csv")
    assert {int(row["step"]): float(row["loss"]) for row in rows} == expected(records, "step", "loss")
    assert len(rows) == 40
    epochs = read_csv(tmp_path / "csv" / "epoch.csv")
    assert {int(row["step"]): float(row["top1"]) for row in epochs} == expected(records, "epoch", "top1")
    config = {row["name"]: row["value"] for row in read_csv(tmp_path / "csv" / "config.csv")}
    assert config["recipe.optim.lr"] == "0.5"
    assert config["recipe.optim.betas"] == "[0.9, 0.999]"
    assert config["recipe.stages.1.res"] == "160"
    assert config["environment.torch"] == "2.14.1"
    assert config["environment.machine.cpu"] == "A <CPU> & more"
    assert capsys.readouterr().out == f"logger csv: {tmp_path / 'csv'}\n" * 2


def test_tensorboard_shows_the_scalars_of_the_log_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "tensorboard", texts=texts)
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    scalars = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert scalars["step/loss"] == pytest.approx(expected(records, "step", "loss"))
    assert scalars["step/wait_s"] == pytest.approx(expected(records, "step", "wait_s"))
    assert scalars["epoch/top1"] == pytest.approx(expected(records, "epoch", "top1"))
    assert "epoch/gpu_frac" not in scalars
    text = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    seed = 1" in text


def test_mlflow_continues_the_same_run_with_every_step_once(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "mlflow", texts=texts[:1])
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("resolute").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "KILLED"
    follow(tmp_path, "mlflow", texts=texts[1:])
    (resumed,) = client.search_runs([experiment])
    assert (resumed.info.run_id, resumed.info.status) == (run.info.run_id, "FINISHED")
    for kind, name in (("step", "loss"), ("step", "lr"), ("epoch", "top1")):
        history = client.get_metric_history(run.info.run_id, f"{kind}/{name}")
        assert sorted(metric.step for metric in history) == sorted(expected(records, kind, name))
        assert {metric.step: metric.value for metric in history} == expected(records, kind, name)
    assert resumed.data.params["recipe.optim.lr"] == "0.5"
    assert resumed.data.params["environment.recipe_hash"] == "0123456789ab"


def wandb_rows(file: Path) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """The run's id, its configuration and its history rows in an offline file of W&B."""
    from wandb.proto import wandb_internal_pb2 as proto

    run_id, config, rows = "", {}, []
    for data in _leveldb_records(file.read_bytes()):
        record = proto.Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run_id = record.run.run_id
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            rows.append({**items, "step": record.history.step.num})
    return run_id, config, rows


def _leveldb_records(data: bytes) -> Iterator[bytes]:
    """Source: the log format of LevelDB, blocks of 32 KiB, after W&B's header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, last
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandb_offline_continues_the_same_run_with_every_step_once(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "wandb", texts=texts)
    wandb.teardown()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    (first, config, rows), (second, _, more) = (wandb_rows(file) for file in files)
    assert first == second != ""
    assert config["recipe"]["optim"]["lr"] == 0.5
    assert config["environment"]["torch"] == "2.14.1"
    losses = [(row["step"], row["step/loss"]) for row in [*rows, *more] if "step/loss" in row]
    assert dict(losses) == expected(records, "step", "loss")
    assert len(losses) == 40
    scores = [(row["step"], row["epoch/top1"]) for row in [*rows, *more] if "epoch/top1" in row]
    assert dict(scores) == expected(records, "epoch", "top1")


class Failing:
    place, id = "nowhere", None

    def __init__(self, folder: Path, start: Mapping[str, Any], id_: str | None) -> None:
        pass

    def add(self, points: Sequence[Point]) -> None:
        raise OSError(28, "No space left on device")

    def close(self, *, finished: bool) -> None:
        raise AssertionError("closed after its failure")


class Slow(Failing):
    def add(self, points: Sequence[Point]) -> None:
        time.sleep(1.2)


def test_a_training_with_failing_and_slow_loggers_ends_with_the_same_weights_and_a_warning_each(
    words: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert main(words(tmp_path / "plain")) == 0
    capfd.readouterr()
    monkeypatch.setattr(loggers, "LOGGERS", LOGGERS | {"failing": (Failing, ""), "slow": (Slow, "")})
    monkeypatch.setattr(loggers, "_MOST_S", 1.0)
    assert main([*words(tmp_path / "logged"), "--loggers", "failing,csv,slow"]) == 0
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("resolute train: logger")]
    assert len(warnings) == 2
    assert "logger failing: is off, the training continues without it (OSError: [Errno 28]" in warnings[0]
    assert "logger slow: is off, the training continues without it (TimeoutError: it took over" in warnings[1]
    plain, logged = (tmp_path / name / "tiny" for name in ("plain", "logged"))
    assert without_clocks(plain / "run.jsonl") == without_clocks(logged / "run.jsonl")
    weights = [torch.load(folder / "last.pt", weights_only=True)["model"] for folder in (plain, logged)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    steps = sum(record["kind"] == "step" for record in without_clocks(logged / "run.jsonl"))
    assert len(read_csv(logged / "csv" / "step.csv")) == steps
    assert main([*words(tmp_path / "plain"), "--loggers", "csv"]) == 0  # a finished run
    assert len(read_csv(plain / "csv" / "step.csv")) == steps


@pytest.mark.parametrize("file", ["step.csv", "config.csv"])
def test_a_full_disk_ends_a_logger_only(tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str) -> None:
    write_log(tmp_path, steps=5)
    (tmp_path / "csv").mkdir()
    (tmp_path / "csv" / file).symlink_to("/dev/full")
    Loggers(["csv"], tmp_path).close()
    (line,) = capsys.readouterr().err.splitlines()
    assert "logger csv: is off, the training continues without it (OSError: [Errno 28]" in line


@pytest.mark.timing
def test_a_server_that_never_answers_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    write_log(tmp_path, steps=5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # takes connections and is silent
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        began = time.monotonic()
        Loggers(["mlflow"], tmp_path).close()
    assert time.monotonic() - began < 30
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "logger" in line]
    assert "logger mlflow: is off, the training continues without it" in line


@pytest.mark.parametrize("text", ["csvs", "csv,csv", "csv,", "csv tensorboard"])
def test_unknown_loggers_are_refused_with_the_names_of_all(
    words: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    assert main([*words(tmp_path), "--loggers", text]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--loggers: got {text}, expected csv, tensorboard, wandb, mlflow" in line


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_logger_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResoluteError, match=rf"{name} is not installed.*pip install 'resolute-vision\[{name}\]'"):
        Options(shards="x", recipe=Path("x"), folder=Path("x"), loggers=("csv", name))


def test_the_configuration_is_the_recipe_and_the_environment(tmp_path: Path) -> None:
    values = flat(configuration(write_log(tmp_path, steps=1)[0]))
    assert values["recipe.data.fold"] == "null"
    assert values["recipe.stages.2.augment.mixup_alpha"] == "0.2"
    assert not any(name.startswith(("environment.recipe_text", "environment.kind")) for name in values)


def test_csv_has_the_columns_of_a_first_validation_in_the_epochs_before(tmp_path: Path) -> None:
    logger = Csv(tmp_path, {}, None)
    epochs: list[dict[str, float]] = [{"loss": 2.0}, {"loss": 1.0, "top1": 0.5}, {"loss": 0.9}]
    for step, values in enumerate(epochs):
        logger.add([Point("epoch", step, values)])
    assert (tmp_path / "csv" / "epoch.csv").read_text() == "step,loss,top1\n0,2.0,\n1,1.0,0.5\n2,0.9,\n"
