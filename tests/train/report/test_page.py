"""report.html: self-contained, with the figures of run.jsonl and a diagnosis of what limited the run."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resolute.cli import main
from resolute.train.logs.run_log import RunLogReader
from resolute.train.recipe.toml import recipe_text
from resolute.train.report.diagnosis import diagnose
from resolute.train.report.page import write_page
from tests.support.synthetic_log import GPU, write_log
from tests.train.report.parsed_page import charts, rows


def _read(folder: Path) -> RunLogReader:
    run = RunLogReader(folder / "run.jsonl")
    run.read()
    return run


def _drawn(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The page of the log, and the data of its charts."""
    text = write_page(_read(folder), folder).read_text(encoding="utf-8")
    return text, charts(text)


def _of_kind(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record for record in records if record["kind"] == kind]


def _flaws(folder: Path) -> list[str]:
    return [finding.text for finding in diagnose(_read(folder)) if finding.bad]


def test_the_page_is_well_formed_and_needs_no_network(tmp_path: Path) -> None:
    folder = tmp_path / "a <run> & more"
    write_log(folder, calibrated=True, machine=GPU)
    text, _ = _drawn(folder)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttp", text)
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"<[^>]* (src|srcset|href|data)=", markup)
    tags = re.findall(r"<(/?)(body|main|section|table|thead|tbody|tr|td|th|figure|div|span|svg|p)\b", markup)
    assert Counter(name for end, name in tags if end) == Counter(name for end, name in tags if not end)
    assert "<run>" not in text
    assert "A &lt;CPU&gt; &amp; more" in text
    assert ["cpu", "A <CPU> & more"] in rows(text)
    assert {path.name for path in folder.iterdir()} == {"run.jsonl", "report.html"}


def test_the_figures_of_the_page_equal_the_log(tmp_path: Path) -> None:
    records = write_log(tmp_path, calibrated=True)
    text, drawn = _drawn(tmp_path)
    steps, epochs = _of_kind(records, "step"), _of_kind(records, "epoch")
    compute, wait = drawn["Step time"]["series"]
    assert compute["x"] == [s["step"] for s in steps]
    assert compute["y"] == pytest.approx([1e3 * s["compute_s"] for s in steps], rel=1e-4)
    assert wait["y"] == pytest.approx([1e3 * s["wait_s"] for s in steps], rel=1e-4)
    for title, key in (("Learning rate", "lr"), ("Momentum", "momentum"), ("Loss", "loss")):
        assert drawn[title]["series"][0]["y"] == pytest.approx([s[key] for s in steps], rel=1e-4)
    rates, loader, model = drawn["Throughput"]["series"]
    assert rates["y"] == pytest.approx([s["samples"] / (s["wait_s"] + s["compute_s"]) for s in steps], rel=1e-4)
    assert loader["y"] == [900, 900, 800, 800, 700, 700]
    assert model["y"] == [1000, 1000, 750, 750, 500, 500]
    assert model["x"] == [0, 119, 120, 239, 240, 319]
    raw, ema, _ = drawn["Accuracy against time"]["series"]
    assert raw["x"] == pytest.approx([e["elapsed_s"] for e in epochs], rel=1e-4)
    assert raw["y"] == pytest.approx([100 * e["top1"] for e in epochs], rel=1e-4)
    assert ema["y"] == pytest.approx([100 * e["ema_top1"] for e in epochs], rel=1e-4)
    heads, *table = [row for row in rows(text) if len(row) > 15]
    for row, epoch in zip(table, epochs, strict=True):
        assert row[:4] == [str(epoch[key]) for key in ("epoch", "stage", "res", "batch_size")]
        cells = dict(zip(heads, row, strict=True))
        assert float(cells["top-1 %"]) == pytest.approx(100 * epoch["top1"], abs=0.006)
        assert float(cells["waiting %"]) == pytest.approx(100 * epoch["stall_frac"], abs=0.006)
        assert float(cells["images/s"].replace(",", "")) == pytest.approx(epoch["images_per_s"], abs=0.06)
    assert "# as written\nseed = 1" in text


def test_the_command_prints_the_path_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no run or checkpoint" in capsys.readouterr().err
    write_log(tmp_path, steps=4)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (
            {"waits": (0.02, 0.02, 0.3), "calibrated": True, "machine": {"threads": 1}},
            r"Stage 2 \(224 px\) waited .*alone, the loader \(700 .*Use more threads: `--threads 4` \(it ran with 1\)",
        ),
        (
            {"waits": (0.3, 0.02, 0.02), "calibrated": True, "machine": {**GPU, "threads": 4}},
            r"the loader delivers 900 images/s, the model can use 1,000\. All cores are in use: .*`--decode gpu`",
        ),
        (
            {"switch_s": 0.9},
            r"^Change 128 -> 160 px cost 0\.8\d s: first 5 steps \+0\.8\d s, other groups of 5 steps ±",
        ),
        ({"machine": GPU}, r"GPU was busy only 70 % of the time"),
        ({"steps": 8}, r"Validation took 33 % of the run \(4\.0 s\): `eval.every_epochs = 2` would save about 2\.0 s"),
    ],
)
def test_the_diagnosis_names_what_limited_the_run(tmp_path: Path, log: dict[str, Any], expected: str) -> None:
    steps = _of_kind(write_log(tmp_path, **log), "step")
    flaws = _flaws(tmp_path)
    assert any(re.search(expected, text) for text in flaws), flaws
    for stage, percent in re.findall(r"Stage (\d) \(\d+ px\) waited (\d+) %", " ".join(flaws)):
        own = [(s["wait_s"], s["wait_s"] + s["compute_s"]) for s in steps if s["stage"] == int(stage)]
        assert float(percent) == pytest.approx(100 * sum(w for w, _ in own) / sum(t for _, t in own), abs=0.51)


def test_accuracy_and_loss_come_first_and_advice_only_with_something_to_change(tmp_path: Path) -> None:
    def headings(folder: Path, **log: Any) -> list[str]:
        write_log(folder, **log)
        return re.findall(r"<h2>(.*?)</h2>", _drawn(folder)[0])

    good, bad = headings(tmp_path / "good"), headings(tmp_path / "bad", switch_s=0.9)
    assert good[:3] == ["Loss and accuracy", "What limited this run", "Time"]
    assert bad[:3] == ["Loss and accuracy", "What limited this run, and what to change", "Time"]


def test_the_keys_of_the_recipe_are_laid_out_in_tables(tmp_path: Path) -> None:
    records = write_log(tmp_path)
    records[0]["recipe_text"] = "optim.lr = 0.5\n[[stages]]\nres = 32\naugment = { flip_prob = 0.1 }\n"
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    text, _ = _drawn(tmp_path)
    assert rows(text, "Stages that the recipe sets") == [["stage", "res", "augment"], ["0", "32", "flip_prob = 0.1"]]
    assert rows(text, "Other keys that it sets") == [["key", "value"], ["optim.lr", "0.5"]]


def _rewritten(folder: Path, change: Callable[[dict[str, Any]], object], **log: Any) -> Path:
    """A log in which each record was changed in place."""
    records = write_log(folder, **log)
    for record in records:
        change(record)
    (folder / "run.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_cost_is_no_flaw_if_its_noise_is_unknown_and_the_page_tells_all_costs(tmp_path: Path) -> None:
    write_log(tmp_path / "few", switch_s=3.0, steps=8)
    assert not any("160" in text for text in _flaws(tmp_path / "few"))
    assert re.search(
        r">Change 128 -&gt; 160 px: first 5 steps \+3\.0 s; too few other steps to know the noise\.<",
        _drawn(tmp_path / "few")[0],
    )
    write_log(tmp_path / "many")
    assert re.search(
        r">No measurable cost at 160 -&gt; 224 px: first 5 steps \S+ m?s, other groups of 5 steps ±\S+ m?s\.<",
        _drawn(tmp_path / "many")[0],
    )


def test_waiting_for_the_first_batches_of_a_run_is_no_flaw(tmp_path: Path) -> None:
    def wait(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == first:
            record["wait_s"] += 5.0

    first = 0
    assert _flaws(_rewritten(tmp_path / "first", wait)) == []
    first = 60
    (flaw,) = _flaws(_rewritten(tmp_path / "later", wait))
    assert 'Read in blocks (`data.order = "windowed"`), or keep the shards on a local disk.' in flaw

    def in_blocks(record: dict[str, Any]) -> None:
        wait(record)
        record["order"] = "windowed"

    (flaw,) = _flaws(_rewritten(tmp_path / "blocks", in_blocks))
    assert flaw.endswith("not a slow loader. Keep the shards on a local disk.")


def test_the_same_advice_is_given_once(tmp_path: Path) -> None:
    write_log(tmp_path, waits=(0.3, 0.3, 0.02), machine={"threads": 1})
    first, second = _flaws(tmp_path)
    assert first.endswith("Use more threads: `--threads 4` (it ran with 1).")
    assert re.fullmatch(
        r"Stage 1 \(160 px\) waited (?:29|3\d) % of its time .* images/s, \d+ without the waits\.", second
    )


def test_a_page_says_why_a_run_stopped_early(tmp_path: Path) -> None:
    def stopped(record: dict[str, Any]) -> None:
        if record["kind"] == "end":
            record["stopped_early"] = "top-1 no better than 43.48 % for 2 epochs"

    assert " · stopped early: top-1 no better than 43.48 % for 2 epochs</p>" in _drawn(_rewritten(tmp_path, stopped))[0]
    write_log(tmp_path)
    assert " · finished</p>" in _drawn(tmp_path)[0]


def test_rarer_validations_are_advised_relative_to_the_recipe(tmp_path: Path) -> None:
    def rare(record: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["recipe_values"]["eval"] = {"every_epochs": 3}

    (flaw,) = _flaws(_rewritten(tmp_path, rare, steps=8))
    assert "`eval.every_epochs = 6` would save about 2.0 s" in flaw


def test_a_page_has_no_sections_or_columns_without_content(tmp_path: Path) -> None:
    write_log(tmp_path, waits=(0.08, 0.0, 0.0))
    lines = (tmp_path / "run.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_text("".join(lines[:3]))  # two steps, which waited
    text, _ = _drawn(tmp_path)
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Loss", "Time", "Stages", "Schedule", "Recipe", "Machine and data"]
    heads, _ = rows(text, "Stages")
    assert not {"loader alone images/s", "change cost s"} & {*heads}


def test_the_head_of_a_page_names_photos_majority_and_the_epoch_of_a_run_that_goes_on(tmp_path: Path) -> None:
    def majority(record: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["val_majority"] = 0.25
        if record["kind"] == "end":
            record["kind"] = "other"

    text, _ = _drawn(_rewritten(tmp_path, majority))
    assert "top-1 in epoch 7, of 100 photos; always the most frequent class: 25.0 %" in text
    assert "val majority" not in text
    write_log(tmp_path)
    assert "top-1 at the end, of 100 photos<" in _drawn(tmp_path)[0]


def test_a_row_of_the_classes_has_a_bar_for_its_samples(tmp_path: Path) -> None:
    def classes(count: int) -> Callable[[dict[str, Any]], None]:
        def change(record: dict[str, Any]) -> None:
            if record["kind"] == "start":
                record |= {"class_names": [f"c{k}" for k in range(count)], "class_samples": [*range(1, count + 1)]}
            if record["kind"] == "epoch":
                record["class_counts"] = [1] * count

        return change

    text, drawn = _drawn(_rewritten(tmp_path / "few", classes(4)))
    heads, *table = rows(text, "Classes")
    assert heads[:3] == ["class", "in the set", ""]
    widths = [(row[0], row[1], re.findall(r"width:(\S+)%", row[2])) for row in table]
    assert widths == [("c3", "4", ["100.00"]), ("c2", "3", ["75.00"]), ("c1", "2", ["50.00"]), ("c0", "1", ["25.00"])]
    assert "Samples of each class" not in drawn
    text, drawn = _drawn(_rewritten(tmp_path / "many", classes(2000)))
    table = rows(text, "Classes")
    assert re.findall(r"width:(\S+)%", table[1][2]) == ["100.00"]
    assert table[11] == ["(1,980 more classes)", "", "", "", ""]
    assert "Samples of each class" in drawn


def test_values_in_several_units_are_told_each_in_its_own_and_one_outlier_flattens_no_chart(tmp_path: Path) -> None:
    def values(record: dict[str, Any]) -> None:
        if record["kind"] == "start":
            record["units"] = ["cm", "g"]
            del record["classes"]
        if record["kind"] == "epoch":
            record |= {"r2": record.pop("top1"), "ema_r2": None, "rmse": 123.456, "ema_rmse": None}

    log = _read(_rewritten(tmp_path, values))
    assert log.best_epoch is not None
    points = [[float(i), i + 0.5] for i in range(20)]
    errors = {"counts": [20], "edges": [0.0, 1.0], "outside": 2}
    column = {"unit": "cm", "mae": 1.0, "rmse": 2.5, "r2": 0.5, "points": points, "errors": errors}
    other = {**column, "name": "weight", "unit": "g", "rmse": 400.0, "points": [*points, [1e6, 3.0]]}
    table = {"kind": "values", "epoch": log.best_epoch["epoch"], "weights": "raw", "res": 224}
    (tmp_path / "validation.json").write_text(json.dumps({**table, "columns": [{**column, "name": "height"}, other]}))
    text, drawn = _drawn(tmp_path)
    for error, name in (("2.5 cm", "height"), ("400 g", "weight")):
        assert f'<b>{error}</b><span class="soft">RMSE of {name}, ' in text
    assert "123.5" not in [cell for row in rows(text) for cell in row]  # the mean over values in different units
    assert drawn["height: predicted and true"]["series"][0]["x"] == [true for true, _ in points]
    assert drawn["weight: predicted and true"]["series"][0]["x"] == [true for true, _ in points]
    assert text.count("Without 1 photo far from the others.") == 1
    assert text.count("2 photos with larger errors.") == 2
    assert re.findall(r"<h2>(.*?)</h2>", text)[0] == "Loss and R²"


def test_a_run_without_flaws_gets_no_advice_but_the_limit(tmp_path: Path) -> None:
    write_log(tmp_path)
    assert _flaws(tmp_path) == []
    assert any("The model was the limit: 98.0 %" in finding.text for finding in diagnose(_read(tmp_path)))


def test_the_values_of_a_recipe_are_shown_as_toml() -> None:
    stages: list[dict[str, Any]] = [
        {"res": 32, "fold": None, "augment": {"kind": 'a "b" ä 🦊 \x7f'}},
        {"res": 48, "augment": {}},
    ]
    values = {"seed": 1, "none": None, "optim": {"lr": 0.5, "betas": [0.9, 0.99]}, "empty": {}, "stages": stages}
    assert tomllib.loads(recipe_text(values)) == {
        "seed": 1,
        "optim": values["optim"],
        "stages": [{"res": 32, "augment": stages[0]["augment"]}, {"res": 48}],
    }
