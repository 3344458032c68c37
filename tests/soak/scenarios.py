"""Scenarios of the soak test: prep, verify, training and evaluation of tiny photos.

`SCENARIOS` has what the main loop must know of each. A `Cycle` is one run through a scenario: its files, its commands,
and the check of its results against a reference, the same cycle undisturbed. All cycles use the same paths, so that
manifests can be compared byte by byte.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg

from resolute.scratch import _delete_abandoned
from tests.support.trees import tree

from .checks import check_training, compare_trees, leftover_files
from .events import Faults

__all__ = ["SCENARIOS", "Cycle", "Phase", "Scenario", "World", "make_photos", "write_recipes"]

Words = list[object]


@dataclass(frozen=True)
class World:
    """The files that all cycles use. root: the folder with photos, shards and recipes."""

    root: Path
    faults: Faults


@dataclass(frozen=True)
class Phase:
    """A command of `resolute`, which is started again until it succeeds, and the commands that start while it runs."""

    name: str
    words: Words
    success: Sequence[int] = (0,)  # exit statuses
    concurrent: Sequence[Phase] = ()


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the main loop must know of a scenario."""

    phases: Callable[[Cycle], list[Phase]]  # prepares a cycle's files; returns its commands, in order
    places: Mapping[str, Sequence[str]]  # folders where storage may fail; commands "reads" or "writes", it "vanishes"
    usual: bool = True  # False: only on request
    loss: frozenset[int] = frozenset()  # correct statuses if a worker or rank is killed; empty: it has none
    ranks: Sequence[int] = (1,)  # by start
    recipe: str = ""  # of a training
    same_as: str = ""  # name of the cycles whose results it must have, if not its own


class Cycle:
    """One run through a scenario. attempt: number of the start, set by the caller."""

    def __init__(self, world: World, name: str, index: int, *, alone: bool = False) -> None:
        """alone: on one rank, for the reference."""
        self.world, self.name, self.index, self.scenario, self.alone = world, name, index, SCENARIOS[name], alone
        self.folder, self.reference = world.root / "cycle", world.root / "references" / name
        self.out, self.attempt = self.path("out"), 0

    def path(self, name: str) -> Path:
        return self.folder / name

    def copy(self, name: str) -> Path:
        """Copy the photos or shards that all cycles share."""
        return shutil.copytree(self.world.root / name, self.path(name))

    @property
    def ranks(self) -> int:
        ranks = self.scenario.ranks
        return 1 if self.alone else ranks[(self.attempt + self.index) % len(ranks)]

    @property
    def env(self) -> dict[str, str]:
        """Environment of the commands."""
        return {
            "TMPDIR": str(self.path("tmp")),
            "RESOLUTE_CACHE": str(self.path("cache")),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.world.root / "inductor"),
            "PYTHONFAULTHANDLER": "1",
            **self.world.faults.variables,
        }

    def prepare(self) -> list[Phase]:
        """Create the files as they are before the first start; returns the commands."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("tmp", "cache", "runs"):
            self.path(name).mkdir(parents=True)
        return self.scenario.phases(self)

    def keep(self) -> None:
        """Save the results as the reference."""
        shutil.copytree(self.path("runs"), self.reference / "runs")
        (self.reference / "files.json").write_text(json.dumps(tree(self.out)))

    def check(self) -> list[str]:
        """Findings against the reference."""
        reference = self.reference.with_name(self.scenario.same_as or self.name)
        expected = json.loads((reference / "files.json").read_text())
        _delete_abandoned(self.path("tmp"))  # as the next process does
        problems = compare_trees("OUT", tree(self.out), expected) + leftover_files("TMPDIR", self.path("tmp"))
        if self.path("shards").exists():
            problems += compare_trees("SHARDS", tree(self.path("shards")), tree(self.world.root / "shards"))
        if self.scenario.recipe:
            exact = self.scenario.ranks == (1,)
            problems += check_training(self.path("runs/run"), reference / "runs" / "run", exact=exact)
        return problems


def _settings(cycle: Cycle, *, samples: int = 16) -> Words:
    return ["--src", cycle.copy("photos"), "--out", cycle.out, "--res", "32,48,64", "--shard-samples", samples]


def _prep(cycle: Cycle, *, samples: int = 16) -> Phase:
    return Phase("prep", ["shards", *_settings(cycle, samples=samples), "--workers", 2])


def _prep_folder(cycle: Cycle) -> list[Phase]:
    """Workers write whole shards."""
    return [_prep(cycle)]


def _prep_shared(cycle: Cycle) -> list[Phase]:
    """Workers share the only shard."""
    return [_prep(cycle, samples=128)]


def _prep_jobs(cycle: Cycle) -> list[Phase]:
    """Several `jobs range` run at the same time, and their ranges overlap."""

    def job(selected: str, workers: int, *concurrent: Phase) -> Phase:
        words: Words = ["jobs", "range", "--out", cycle.out, "--range", selected, "--workers", workers]
        return Phase(f"range {selected}", words, concurrent=concurrent)

    return [
        Phase("plan", ["jobs", "plan", *_settings(cycle)]),
        job(":5", 2, job("2:4", 1), job("1:5", 3)),
        job(":", 2, job("3:6", 1), job("4:", 3)),
        Phase("finish", ["jobs", "finish", "--out", cycle.out]),
    ]


def _verify(cycle: Cycle) -> list[Phase]:
    """A set with a flipped byte, which `shards` repairs."""
    shutil.copytree(cycle.world.root / "shards", cycle.out)
    tar = sorted(cycle.out.glob("48/*.tar"))[1]
    data = bytearray(tar.read_bytes())
    data[len(data) // 3] ^= 4
    tar.write_bytes(data)
    return [
        Phase("verify", ["verify", cycle.out], success=(1,)),
        _prep(cycle),
        Phase("verify again", ["verify", cycle.out]),
    ]


def _training(cycle: Cycle, shards: object) -> Phase:
    return Phase(
        "train",
        [
            "train",
            "--shards",
            shards,
            "--recipe",
            cycle.world.root / f"{cycle.scenario.recipe}.toml",
            "--runs",
            cycle.path("runs"),
            "--run",
            "run",
            "--device",
            "cpu",
            "--threads",
            1,
            "--save-every-steps",
            3,
        ],
    )


def _train(cycle: Cycle) -> list[Phase]:
    return [_training(cycle, cycle.copy("shards"))]


def _eval(cycle: Cycle) -> list[Phase]:
    """Evaluation during the training and after it."""
    training = _training(cycle, shards := cycle.copy("shards"))
    words = ["eval", cycle.path("runs/run"), "--shards", shards, "--device", "cpu", "--threads", 1]
    early = Phase("concurrent eval", words, success=(0, 2))  # why 2: there may be no checkpoint yet
    return [Phase("train", training.words, concurrent=[early]), Phase("eval", [*words, "--res", "48,64"])]


_IN, _BOTH = ("reads", "vanishes"), ("reads", "writes", "vanishes")
# loss: a run of prep that loses a worker, as by the kernel when memory runs out, ends with status 2
_PrepScenario = functools.partial(Scenario, places={"photos": _IN, "out": _BOTH}, loss=frozenset({2}))
_TrainScenario = functools.partial(Scenario, phases=_train, places={"shards": _IN, "runs/run": _BOTH}, recipe="one")

SCENARIOS: Mapping[str, Scenario] = {
    "prep-folder": _PrepScenario(phases=_prep_folder),
    "prep-shared": _PrepScenario(phases=_prep_shared),
    "prep-jobs": _PrepScenario(phases=_prep_jobs, same_as="prep-folder"),
    "verify": _PrepScenario(phases=_verify, places={"out": _BOTH}),
    "train-1": _TrainScenario(),
    "train-all": _TrainScenario(recipe="all", usual=False),  # every feature; its first start compiles for minutes
    "train-ranks": _TrainScenario(recipe="many", ranks=(2, 4, 1), loss=frozenset({137, 2})),
    "eval": _TrainScenario(phases=_eval),
}


def make_photos(folder: Path) -> None:
    """90 JPEGs of about 100 px in three class folders, always the same."""
    rng = np.random.default_rng(0)
    for i in range(90):
        height, width = rng.integers(90, 130, 2)
        pixels = rng.normal(60 + 60 * (i % 3), 25, (height, width, 3)).clip(0, 255).astype(np.uint8)
        path = folder / f"class{i % 3}" / f"photo{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(pixels, quality=85))


def _stages(batch_size: int, large: int, first: str = "") -> str:
    return (
        f"[{{ res = 32, epochs = 2, batch_size = {batch_size}, fraction = 0.5{first} }}, "
        f"{{ res = 48, epochs = 1, batch_size = {batch_size} }}, "
        f"{{ res = 64, epochs = 1, batch_size = {large} }}]"
    )


_ONE = {
    "seed": 5,
    "model.name": '"test_resnet"',
    "precision.amp": '"bf16"',
    "optim.name": '"sgd"',
    "optim.lr": 0.05,
    "optim.grad_accum_steps": 2,
    "ema.decay": 0.9,
    "augment.mixup_alpha": 0.2,
    "augment.mixup_prob": 0.5,
    "eval.batch_size": 16,
    "stages": _stages(8, 12),
}
# why: batch statistics depend on which samples share a rank, bf16 rounds each rank's gradient, large steps amplify
# differences in the last bits, and with mixing each of four ranks takes a pair of the smallest batch
_MANY = {
    "model.name": '"test_convnext"',
    "precision.amp": '"off"',
    "optim.lr": 0.005,
    "optim.grad_accum_steps": 1,
    "stages": _stages(16, 18),
}
_ALL = {
    "model.kwargs.drop_rate": 0.2,
    "precision.compile": "true",
    "optim.clip_norm": 1.0,
    "optim.lookahead": 5,
    "augment.policy": '"randaugment"',
    "augment.cutmix_alpha": 1.0,
    "augment.mixup_mode": '"elem"',
    "loss.label_smoothing": 0.1,
    "stages": _stages(8, 12, ', train_from = "layer2"'),
}


def write_recipes(folder: Path) -> None:
    """Write the recipes one.toml, many.toml and all.toml."""
    for name, changes in (("one", {}), ("many", _MANY), ("all", _ALL)):
        lines = [f"{key} = {value}\n" for key, value in {**_ONE, **changes}.items()]
        (folder / f"{name}.toml").write_text("".join(lines), encoding="utf-8")
