"""Scenarios of the soak test: prep, verify, training and evaluation of tiny photos.

`SCENARIOS` has what the main loop must know of each. A `Cycle` is one run through a scenario: its files, its commands,
and the check of its results against a reference, the same cycle undisturbed. All cycles use the same paths, so that
manifests can be compared byte by byte.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg

from resolute.scratch import _delete_abandoned

from .checks import check_training, compare_trees, digests, leftover_files, names_below, tree
from .events import Faults
from .objects import BUCKET, ObjectStore

__all__ = ["SCENARIOS", "Cycle", "Phase", "Scenario", "World", "chosen_scenarios", "make_photos", "write_recipes"]

Words = list[object]
_OUT_URL = f"s3://{BUCKET}/out"


@dataclass(frozen=True)
class World:
    """What all cycles share. root: the soak's folder, with photos, shards and recipes; store: None if not needed."""

    root: Path
    faults: Faults
    store: ObjectStore | None


@dataclass(frozen=True)
class Phase:
    """A command of `resolute`, which is started again until it succeeds, and the commands that start while it runs."""

    name: str
    words: Words
    success: Sequence[int] = (0,)  # exit statuses
    concurrent: Sequence[Phase] = ()
    before: Callable[[], None] = lambda: None  # called before each start


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the main loop must know of a scenario."""

    phases: Callable[[Cycle], list[Phase]]  # prepares a cycle's files; returns its commands, in order
    share: int  # of the events of a soak, relative to the other shares; 0: only on request
    places: Mapping[str, Sequence[str]]  # folders where storage may fail; commands "reads" or "writes", it "vanishes"
    variants: int = 1  # cycles take turns
    loss: frozenset[int] = frozenset()  # correct statuses if a worker or rank is killed; empty: it has none
    ranks: Sequence[int] = (1,)  # by start
    recipe: str = ""  # of a training
    same_as: str = ""  # key of the cycles whose results it must have, if not its own
    remote: bool = False  # whether the object store takes part


class Cycle:
    """One run through a scenario.

    key: cycles with the same key must have the same results. out: place of a shard set that is written.
    attempt: number of the start, set by the caller.
    """

    def __init__(self, world: World, name: str, index: int, *, alone: bool = False) -> None:
        """alone: on one rank, for the reference."""
        self.world, self.name, self.index, self.scenario, self.alone = world, name, index, SCENARIOS[name], alone
        self.variant, self.attempt = index % self.scenario.variants, 0
        self.key = f"{name}-{self.variant}"
        self.folder, self.reference = world.root / "cycle", world.root / "references" / self.key
        self.out = str(self.path("out"))

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
            "TMPDIR": str(self.path("tmp")), "RESOLUTE_CACHE": str(self.path("cache")), "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(self.world.root / "inductor"), "PYTHONFAULTHANDLER": "1",
            **self.world.faults.variables, **(self.world.store.variables if self.world.store else {}),
        }  # fmt: skip

    def prepare(self) -> list[Phase]:
        """Create the files as they are before the first start; returns the commands."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("tmp", "cache", "runs"):
            self.path(name).mkdir(parents=True)
        if self.world.store is not None and self.world.store.files.exists(_OUT_URL):
            self.world.store.files.rm(_OUT_URL, recursive=True)
        return self.scenario.phases(self)

    def keep(self) -> None:
        """Save the results as the reference."""
        shutil.copytree(self.path("runs"), self.reference / "runs")
        files = {"out": self._written(), "cache": names_below(self.path("cache"))}
        (self.reference / "files.json").write_text(json.dumps(files))

    def check(self) -> list[str]:
        """Findings against the reference."""
        reference = self.reference.with_name(self.scenario.same_as or self.key)
        expected = json.loads((reference / "files.json").read_text())
        _delete_abandoned(self.path("tmp"))  # as the next process does
        problems = [
            *compare_trees("OUT", self._written(), expected["out"]), *leftover_files("TMPDIR", self.path("tmp")),
            *leftover_files("cache", self.path("cache"), expected["cache"]),
        ]  # fmt: skip
        if self.path("shards").exists():
            problems += compare_trees("SHARDS", tree(self.path("shards")), tree(self.world.root / "shards"))
        if self.scenario.recipe:
            exact = self.scenario.ranks == (1,)
            problems += check_training(self.path("runs/run"), reference / "runs" / "run", exact=exact)
        return problems

    def _written(self) -> dict[str, str]:
        """The shard set that was written; {} if none was."""
        if self.world.store is not None and self.out == _OUT_URL:
            files = self.world.store.files
            return digests({key.removeprefix(f"{BUCKET}/out/"): files.cat_file(key) for key in files.find(_OUT_URL)})
        return tree(self.path("out"))


def _settings(cycle: Cycle, src: object, *, res: str = "32,48,64", samples: int = 16) -> Words:
    return ["--src", src, "--out", cycle.out, "--res", res, "--shard-samples", samples]


def _prep(cycle: Cycle, src: object, *, res: str = "32,48,64", samples: int = 16) -> Phase:
    words = ["shards", *_settings(cycle, src, res=res, samples=samples), "--workers", 2]
    return Phase(f"prep at {res} px", words)


def _prep_folder(cycle: Cycle) -> list[Phase]:
    """Workers write whole shards, or share the only one of a split; or a second command adds sizes."""
    src = cycle.copy("photos")
    if cycle.variant == 2:
        return [_prep(cycle, src, res="32"), _prep(cycle, src)]
    return [_prep(cycle, src, samples=(16, 128)[cycle.variant])]


def _prep_extend(cycle: Cycle) -> list[Phase]:
    """A set to which a fifth of the photos is added later, without some that are gone by then."""
    src, later = cycle.copy("photos"), cycle.world.root / "photos"
    for photo in src.rglob("*[05].jpg"):
        photo.unlink()

    def change() -> None:
        shutil.copytree(later, src, dirs_exist_ok=True)
        for photo in src.rglob("*1.jpg"):
            photo.unlink()

    prep = _prep(cycle, src)
    return [prep, Phase("extension", [*prep.words, "--extend"], before=change)]


def _prep_archive(cycle: Cycle) -> list[Phase]:
    """A tar.gz, which prep unpacks into a temporary file."""
    src = cycle.path("photos") / "photos.tar.gz"
    src.parent.mkdir()
    with tarfile.open(src, "w:gz", compresslevel=1) as tar:
        tar.add(cycle.world.root / "photos", arcname="photos")
    os.utime(src, (1_700_000_000, 1_700_000_000))
    return [_prep(cycle, src)]


def _prep_s3(cycle: Cycle) -> list[Phase]:
    """Photos and OUT in an object store."""
    cycle.out = _OUT_URL
    return [_prep(cycle, f"s3://{BUCKET}/photos")]


def _prep_jobs(cycle: Cycle) -> list[Phase]:
    """Several `jobs range` run at the same time, and their ranges overlap."""

    def job(selected: str, workers: int, *concurrent: Phase) -> Phase:
        words: Words = ["jobs", "range", "--out", cycle.out, "--range", selected, "--workers", workers]
        return Phase(f"range {selected}", words, concurrent=concurrent)

    return [Phase("plan", ["jobs", "plan", *_settings(cycle, cycle.copy("photos"))]),
            job(":5", 2, job("2:4", 1), job("1:5", 3)), job(":", 2, job("3:6", 1), job("4:", 3)),
            Phase("finish", ["jobs", "finish", "--out", cycle.out])]  # fmt: skip


def _verify(cycle: Cycle) -> list[Phase]:
    """A set with a flipped byte, which `shards` repairs."""
    shutil.copytree(cycle.world.root / "shards", cycle.out)
    tar = sorted(cycle.path("out").glob("48/*.tar"))[1]
    data = bytearray(tar.read_bytes())
    data[len(data) // 3] ^= 4
    tar.write_bytes(data)
    return [Phase("verify", ["verify", cycle.out], success=(1,)), _prep(cycle, cycle.copy("photos")),
            Phase("verify again", ["verify", cycle.out])]  # fmt: skip


def _training(cycle: Cycle, shards: object) -> Phase:
    return Phase("train", [
        "train", "--shards", shards, "--recipe", cycle.world.root / f"{cycle.scenario.recipe}.toml",
        "--runs", cycle.path("runs"), "--run", "run", "--device", "cpu", "--threads", 1, "--save-every-steps", 3,
    ])  # fmt: skip


def _train(cycle: Cycle) -> list[Phase]:
    return [_training(cycle, cycle.copy("shards"))]


def _train_s3(cycle: Cycle) -> list[Phase]:
    """From an object store, through the cache."""
    return [_training(cycle, f"s3://{BUCKET}/shards")]


def _eval(cycle: Cycle) -> list[Phase]:
    """Evaluation during the training and after it."""
    training = _training(cycle, shards := cycle.copy("shards"))
    words = ["eval", cycle.path("runs/run"), "--shards", shards, "--device", "cpu", "--threads", 1]
    early = Phase("concurrent eval", words, success=(0, 2))  # why 2: there may be no checkpoint yet
    return [Phase("train", training.words, concurrent=[early]), Phase("eval", [*words, "--res", "48,64"])]


_IN, _OUT, _BOTH = ("reads", "vanishes"), ("reads", "writes"), ("reads", "writes", "vanishes")
# loss: a run of prep that loses a worker, as by the kernel when memory runs out, ends with status 2
_PrepScenario = functools.partial(Scenario, places={"photos": _IN, "out": _BOTH}, loss=frozenset({2}))
_TrainScenario = functools.partial(Scenario, phases=_train, places={"shards": _IN, "runs/run": _BOTH}, recipe="one")

SCENARIOS: Mapping[str, Scenario] = {
    "prep-folder": _PrepScenario(phases=_prep_folder, share=60, variants=3),
    "prep-extend": _PrepScenario(phases=_prep_extend, share=25),
    "prep-archive": _PrepScenario(phases=_prep_archive, share=20),
    "prep-s3": _PrepScenario(phases=_prep_s3, share=30, places={}, remote=True),
    "prep-jobs": _PrepScenario(phases=_prep_jobs, share=50, same_as="prep-folder-0"),
    "verify": _PrepScenario(phases=_verify, share=25, places={"out": _BOTH}),
    "train-1": _TrainScenario(share=50),
    "train-all": _TrainScenario(share=0, recipe="all"),  # every feature; its first start compiles for minutes
    "train-ranks": _TrainScenario(share=30, recipe="many", ranks=(2, 4, 1), loss=frozenset({137, 2})),
    "train-s3": _TrainScenario(phases=_train_s3, share=25, places={"runs/run": _OUT, "cache": _OUT}, remote=True),
    "eval": _TrainScenario(phases=_eval, share=30),
}


def chosen_scenarios(only: Sequence[str]) -> list[str]:
    """Names of scenarios: those in `only`, or that begin with one of them and a dash (`prep` selects prep-folder …).

    If `only` is empty: all that run by default.
    """
    return [name for name, scenario in SCENARIOS.items() if (not only and scenario.share)
            or any(name == word or name.startswith(f"{word}-") for word in only)]  # fmt: skip


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
    return (f"[{{ res = 32, epochs = 2, batch_size = {batch_size}, fraction = 0.5{first} }}, "
            f"{{ res = 48, epochs = 1, batch_size = {batch_size} }}, "
            f"{{ res = 64, epochs = 1, batch_size = {large} }}]")  # fmt: skip


_ONE = {
    "seed": 5, "model.name": '"test_resnet"', "precision.amp": '"bf16"', "optim.name": '"sgd"', "optim.lr": 0.05,
    "optim.grad_accum_steps": 2, "ema.decay": 0.9, "augment.mixup_alpha": 0.2, "augment.mixup_prob": 0.5,
    "eval.batch_size": 16, "stages": _stages(8, 12),
}  # fmt: skip
# why: batch statistics depend on which samples share a rank, bf16 rounds each rank's gradient, large steps amplify
# differences in the last bits, and with mixing each of four ranks takes a pair of the smallest batch
_MANY = {"model.name": '"test_convnext"', "precision.amp": '"off"', "optim.lr": 0.005, "optim.grad_accum_steps": 1,
         "stages": _stages(16, 18)}  # fmt: skip
_ALL = {
    "model.kwargs.drop_rate": 0.2, "precision.compile": "true", "optim.clip_norm": 1.0, "optim.lookahead": 5,
    "augment.policy": '"randaugment"', "augment.cutmix_alpha": 1.0, "augment.mixup_mode": '"elem"',
    "loss.label_smoothing": 0.1, "freeze.mode": '"unfreeze"', "stages": _stages(8, 12, ', unfreeze_to = "layer2"'),
}  # fmt: skip


def write_recipes(folder: Path) -> None:
    """Write the recipes one.toml, many.toml and all.toml."""
    for name, changes in (("one", {}), ("many", _MANY), ("all", _ALL)):
        lines = [f"{key} = {value}\n" for key, value in {**_ONE, **changes}.items()]
        (folder / f"{name}.toml").write_text("".join(lines), encoding="utf-8")
