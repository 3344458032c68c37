"""`--set KEY=VALUE`: the values replace those of the recipe, exactly as if they were written in the file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.train.recipe import RECIPES
from resolute.train.recipe.schema import Recipe
from resolute.train.recipe.text import RecipeText, assignments

TOML = """
model = { name = "test_resnet", kwargs = { stem_width = 8 } }
optim.lr = 0.1
[[stages]]
res = 32
epochs = 2
batch_size = 8
[[stages]]
res = 64
epochs = 1
batch_size = 8
"""
TEXT = RecipeText(name="x", toml=TOML, where="x.toml")


@pytest.mark.parametrize(
    ("settings", "old", "new"),
    [
        (["optim.lr=0.3"], "optim.lr = 0.1", "optim.lr = 0.3"),
        (["optim.lr = 3e-1"], "optim.lr = 0.1", "optim.lr = 0.3"),
        (["stages[1].epochs=5"], "epochs = 1", "epochs = 5"),
        (["stages[0].epochs=5", "stages[0].res=48"], "res = 32\nepochs = 2", "res = 48\nepochs = 5"),
        (["stages[0].epochs=5 stages[0].res=48"], "res = 32\nepochs = 2", "res = 48\nepochs = 5"),
        (["model.name=test_vit"], '"test_resnet"', '"test_vit"'),
        (["model.kwargs.stem_width=16"], "stem_width = 8", "stem_width = 16"),
        (["ema.decay=0.9"], "optim.lr = 0.1", "optim.lr = 0.1\nema.decay = 0.9"),
        (["augment.scale=[0.2, 0.9]"], "optim.lr = 0.1", "optim.lr = 0.1\naugment.scale = [0.2, 0.9]"),
        (["stages[0].augment={ vflip_prob = 0.5 }"], "res = 32", "res = 32\naugment = { vflip_prob = 0.5 }"),
        (["optim.lr=0.3", "optim.lr=0.4"], "optim.lr = 0.1", "optim.lr = 0.4"),
    ],
)
def test_a_recipe_with_set_values_is_that_with_the_values_in_its_file(settings: list[str], old: str, new: str) -> None:
    written = Recipe.parse(tomllib.loads(TOML.replace(old, new, 1)), name="x")
    changed = TEXT.with_values(settings)
    assert Recipe.from_text(changed) == written != Recipe.from_text(TEXT)
    assert Recipe.from_text(changed).hash == written.hash
    assert RecipeText(name="x", toml=changed.toml, where="").table() == changed.table()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optim.lr", "--set: got 'optim.lr', expected KEY=VALUE, such as"),
        ("optim.lr=", "--set: got 'optim.lr=', expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("optim..lr=3", "expected KEY=VALUE"),
        ("optim.lrr=3", "optim.lrr: no such setting; did you mean lr?"),
        ("optim.lr=fast", "optim.lr: got 'fast', expected number, above 0"),
        ("optim.fused=True", "optim.fused: got 'True', expected true, false"),
        ("stages[2].epochs=3", "stages[2].epochs, expected an item of the recipe, which has 2 of them, from 0"),
        ("stages.epochs=3", "stages.epochs, but the recipe has no table before 'epochs'"),
        ("stages[0]=3", "stages[0], which is a table of res, epochs, batch_size; name one of its keys"),
        ("optim=3", "optim, which is a table of lr; name one of its keys"),
        ("lr=3", "lr: no such setting"),
        ("ema.last_epochs=9", "ema.last_epochs: got 9, expected at most the run's 3 epochs"),
        ("freeze.mode=freeze", "freeze: no such setting, expected stages.train_from; rename it"),
    ],
)
def test_wrong_settings_are_refused_with_what_was_seen(setting: str, message: str) -> None:
    with pytest.raises(ResoluteError) as raised:
        Recipe.from_text(TEXT.with_values([setting]))
    assert message in str(raised.value)


def test_text_that_looks_like_toml_is_read_as_such_and_all_other_text_as_it_is() -> None:
    texts = {
        "a=1": 1,
        "a=1e-3": 0.001,
        "a=true": True,
        "a='b c'": "b c",
        'a="1"': "1",
        "a=b c": "b c",
        "a=resnet50.a1_in1k": "resnet50.a1_in1k",
        "a=[1, 2]": [1, 2],
        "a=1\nb = 2": "1\nb = 2",
    }
    assert {text: assignments([text])["a"] for text in texts} == texts


def test_without_settings_the_text_stays_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("# mine\n" + TOML)
    assert RecipeText.read(tmp_path / "r.toml").with_values([]).toml == "# mine\n" + TOML


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("imagenet_r50", "did you mean imagenet_rn50 or imagenet_rn50_ffcv?"),
        ("imagenette", "did you mean imagenette_cpu or imagenette_cpu_quick or imagenette_cpu_whole?"),
        ("imagenete_cpu", "did you mean imagenette_cpu or imagenette_cpu_whole?"),
        ("efficientnet", "did you mean dogs_efficientnet_b4?"),
        ("ffcv", "did you mean imagenet_rn18_ffcv or imagenet_rn50_ffcv?"),
        ("demo.tml", "did you mean demo?"),
        ("mine/frst.toml", "did you mean mine/first.toml?"),
        ("mine/zz9.toml", "included are demo, dogs"),
    ],
)
def test_a_recipe_that_is_not_there_is_answered_with_those_that_may_be_meant(
    name: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "first.toml").touch()
    assert main(["lr", "--samples", "9", "--recipe", name]) == 2
    assert f"{name}: no readable recipe (No such file or directory)" in (text := capsys.readouterr().err)
    assert advice in text


def test_the_help_of_training_lists_the_included_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.partition("Included recipes:\n")[2].splitlines()
    assert lines[0] == "  demo: The generated demo photos, ten classes, in three stages"
    assert [line.split(":")[0].strip() for line in lines] == sorted(path.stem for path in RECIPES.glob("*.toml"))
    assert max(map(len, lines)) <= 80
