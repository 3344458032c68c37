"""Loggers show the log's scalars with their real packages, continue after a resume, and never end a training."""

from __future__ import annotations

import csv
import importlib.util
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.logs import loggers
from resolute.train.logs.loggers import LOGGERS, Csv, Loggers, Point
from resolute.train.options import TrainOptions
from tests.support.synthetic_log import write_log
from tests.train.conftest import train_words, without_clocks

# why: the packages of others may warn of each other's ageing interfaces
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No logger reaches a network, reads the user's account or sends usage statistics."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_CONFIG_DIR": tmp_path,
        "WANDB_CACHE_DIR": tmp_path,
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
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
    return {
        (record["step"] if kind == "step" else 5 * (record["epoch"] + 1) - 1): record[name]
        for record in records
        if record["kind"] == kind
    }


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_files_have_every_step_once_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "csv", texts=texts)
    assert capsys.readouterr().out == f"logger csv: {tmp_path / 'csv'}\n" * 2
    rows = read_csv(tmp_path / "csv" / "step.csv")
    assert {int(row["step"]): float(row["loss"]) for row in rows} == expected(records, "step", "loss")
    assert len(rows) == 40
    epochs = read_csv(tmp_path / "csv" / "epoch.csv")
    assert {int(row["step"]): float(row["top1"]) for row in epochs} == expected(records, "epoch", "top1")
    config = {row["name"]: row["value"] for row in read_csv(tmp_path / "csv" / "config.csv")}
    assert config["recipe.optim.betas"] == "[0.9, 0.999]"
    assert config["recipe.stages.1.res"] == "160"
    assert config["recipe.data.fold"] == "null"
    assert config["environment.machine.cpu"] == "A <CPU> & more"
    assert not any(name.startswith(("environment.recipe_text", "environment.kind")) for name in config)


def test_csv_has_the_columns_of_a_first_validation_in_the_epochs_before(tmp_path: Path) -> None:
    logger = Csv(tmp_path, {}, None)
    epochs: list[dict[str, float]] = [{"loss": 2.0}, {"loss": 1.0, "top1": 0.5}, {"loss": 0.9}]
    for step, values in enumerate(epochs):
        logger.add([Point("epoch", step, values)])
    assert (tmp_path / "csv" / "epoch.csv").read_text() == "step,loss,top1\n0,2.0,\n1,1.0,0.5\n2,0.9,\n"


def test_tensorboard_shows_the_scalars_of_the_log_after_a_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "tensorboard", texts=texts)
    events = accumulator.EventAccumulator(str(tmp_path / "tb")).Reload()
    for kind, name in (("step", "loss"), ("epoch", "top1")):
        scalars = {event.step: event.value for event in events.Scalars(f"{kind}/{name}")}
        assert scalars == pytest.approx(expected(records, kind, name))
    assert "epoch/gpu_frac" not in events.Tags()["scalars"]
    text = events.Tensors("recipe/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    seed = 1" in text


@pytest.mark.slow
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
    for kind, name in (("step", "loss"), ("epoch", "top1")):
        history = client.get_metric_history(run.info.run_id, f"{kind}/{name}")
        assert len(history) == len(expected(records, kind, name))
        assert {metric.step: metric.value for metric in history} == expected(records, kind, name)
    assert resumed.data.params["recipe.optim.lr"] == "0.5"
    assert resumed.data.params["environment.recipe_hash"] == "0123456789ab"


@pytest.mark.slow
def test_wandb_offline_continues_the_same_run_with_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    logged: list[tuple[tuple[str, float], int, Mapping[str, float]]] = []
    log = wandb.Run.log

    def spied(run: Any, scalars: Mapping[str, float], step: int) -> None:
        logged.append(((run.id, run.config["recipe"]["optim"]["lr"]), step, scalars))
        log(run, scalars, step=step)

    monkeypatch.setattr(wandb.Run, "log", spied)
    records, texts = cut_log(tmp_path)
    follow(tmp_path, "wandb", texts=texts)
    wandb.teardown()
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2
    assert all(file.stat().st_size for file in files)
    ((_, lr),) = {run for run, _, _ in logged}
    assert lr == 0.5
    steps = [step for _, step, scalars in logged if "step/loss" in scalars]
    assert steps == list(range(40)), "W&B ignores steps that are not in order"
    for kind, name in (("step", "loss"), ("epoch", "top1")):
        key = f"{kind}/{name}"
        assert {step: scalars[key] for _, step, scalars in logged if key in scalars} == expected(records, kind, name)


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


@pytest.mark.slow
def test_a_training_with_failing_and_slow_loggers_ends_with_the_same_weights_and_a_warning_each(
    trained: Path,
    shard_root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain, logged = Path(shutil.copytree(trained, tmp_path / "plain" / "small")), tmp_path / "logged" / "small"
    words = [train_words(shard_root, trained.parent / "small.toml", run.parent) for run in (plain, logged)]
    monkeypatch.setattr(loggers, "LOGGERS", LOGGERS | {"failing": (Failing, ""), "slow": (Slow, "")})
    monkeypatch.setattr(loggers, "_MOST_S", 1.0)
    assert main([*words[1], "--loggers", "failing,csv,slow"]) == 0
    failing, slow = (line for line in capfd.readouterr().err.splitlines() if line.startswith("resolute train: logger"))
    assert "logger failing: is off, the training continues without it (OSError: [Errno 28]" in failing
    assert "logger slow: is off, the training continues without it (TimeoutError: it took over" in slow
    assert without_clocks(plain / "run.jsonl") == without_clocks(logged / "run.jsonl")
    weights = [torch.load(folder / "last.pt", weights_only=True)["model"] for folder in (plain, logged)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    steps = sum(record["kind"] == "step" for record in without_clocks(logged / "run.jsonl"))
    assert len(read_csv(logged / "csv" / "step.csv")) == steps
    assert main([*words[0], "--loggers", "csv"]) == 0  # a finished run
    assert len(read_csv(plain / "csv" / "step.csv")) == steps


def test_loggers_that_are_unknown_or_not_installed_are_refused(
    words: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for text in ("csvs", "csv,csv", "csv,"):
        assert main([*words(tmp_path), "--loggers", text]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--loggers: got {text}, expected csv, tensorboard, wandb, mlflow" in line
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResoluteError, match=r"wandb is not installed.*pip install 'resolute-vision\[wandb\]'"):
        TrainOptions(shards="x", loggers=("csv", "wandb"))
