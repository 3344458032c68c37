"""Scenarios of the soak test: prep, verify, training and evaluation of tiny photos, and checks of their results.

A scenario has variants (by the cycle's number), phases (commands that run one after another), places where storage may
fail, and checks against a reference, the same variant run undisturbed. All cycles use the same paths, so that manifests
can be compared byte by byte.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import io
import itertools
import json
import multiprocessing
import os
import random
import shutil
import tarfile
import tempfile
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg

from resolute.cli import main
from resolute.errors import ResoluteError
from resolute.scratch import ScratchFolder

from . import library_loop
from .checks import check_training, compare_trees, leftover_files, planned_samples, tree
from .events import Event, Place, draw
from .objects import BUCKET, ObjectStore
from .processes import Command, in_child, start

__all__ = ["SCENARIOS", "Phase", "PrepMemory", "Scenario", "World", "make_photos"]

RESOLUTIONS = "32,48,64"
HANG_S = 1.0  # the decoder's time limit in the soak test, instead of two minutes
_RECIPE = """
seed = 5
[model]
name = "{model}"
[precision]
amp = "{amp}"
[optim]
name = "sgd"
lr = {lr}
grad_accum_steps = {grad_accum_steps}
[ema]
decay = 0.9
[augment]
mixup_alpha = 0.2
mixup_prob = 0.5
[eval]
batch_size = 16
[[stages]]
res = 32
epochs = 2
batch_size = {batch}
fraction = 0.5
[[stages]]
res = 48
epochs = 1
batch_size = {batch}
[[stages]]
res = 64
epochs = 1
batch_size = {large}
"""
_RECIPES: Mapping[str, Mapping[str, object]] = {
    "one": {"model": "test_resnet", "amp": "bf16", "lr": 0.05, "grad_accum_steps": 2, "batch": 8, "large": 12},
    # why: batch statistics depend on which samples share a rank, bf16 rounds each rank's gradient, large steps amplify
    # differences in the last bits, and with mixing each of four ranks takes a pair of the smallest batch
    "many": {"model": "test_convnext", "amp": "off", "lr": 0.005, "grad_accum_steps": 1, "batch": 16, "large": 18},
}

_EVERY_FEATURE = {  # line of the recipe "one" -> lines after it
    '[model]\n': "kwargs = { drop_rate = 0.2 }",
    '[precision]\n': "compile = true",
    '[optim]\n': "clip_norm = 1.0\nlookahead = 5",
    '[augment]\n': 'policy = "randaugment"\ncutmix_alpha = 1.0\nmixup_mode = "elem"',
    '[eval]\nbatch_size = 16\n': '[loss]\nlabel_smoothing = 0.1\n[freeze]\nmode = "unfreeze"',
    'fraction = 0.5\n': 'unfreeze_to = "layer2"',
}


@dataclass(kw_only=True)
class World:
    """State shared by all cycles. root: the soak's temporary folder; store: None if moto is not installed."""

    root: Path
    store: ObjectStore | None
    references: dict[str, Path] = field(default_factory=dict)

    @property
    def cycle(self) -> Path:
        return self.root / "cycle"

    @property
    def photos(self) -> Path:
        return self.root / "photos"

    @property
    def shards(self) -> Path:
        """A finished shard set, created at the start."""
        return self.root / "shards"

    def recipe(self, name: str) -> Path:
        return self.root / f"{name}.toml"


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A command (by number of the start) that is restarted until it ends with status `final`.

    concurrent: commands that are started while it runs, once each. refused: a status that is as good as `final`.
    """

    name: str
    command: Callable[[int], Command]
    final: int = 0
    concurrent: Sequence[Phase] = ()
    refused: int | None = None


def make_photos(folder: Path, *, seed: int = 0, count: int = 90, classes: int = 3) -> None:
    """`count` JPEGs of about 100 px in `classes` class folders; the same seed gives the same files."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        height, width = (int(n) for n in rng.integers(90, 130, 2))
        tint = np.array([40 + 80 * (i % classes), 120, 200 - 60 * (i % classes)])
        slope = np.linspace(-30, 30, width)[None, :, None] * rng.uniform(-1, 1, 3)
        pixels = np.clip(tint + slope + rng.normal(0, 25, (height, width, 3)), 0, 255).astype(np.uint8)
        path = folder / f"class{i % classes}" / f"photo{i:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(simplejpeg.encode_jpeg(pixels, quality=85))


def write_recipes(world: World) -> None:
    for name, values in _RECIPES.items():
        world.recipe(name).write_text(_RECIPE.format(**values), encoding="utf-8")
    text = _RECIPE.format(**_RECIPES["one"])
    for line, more in _EVERY_FEATURE.items():
        assert line in text
        text = text.replace(line, f"{line}{more}\n", 1)
    world.recipe("all").write_text(text, encoding="utf-8")


class Scenario(ABC):
    """One cycle of a scenario: prepared in `world.cycle`, disturbed by the caller, then checked."""

    name = ""
    variants = 1
    several = False  # whether its commands have worker processes or ranks
    loss: frozenset[int] = frozenset()  # correct exit statuses, besides success, if one of those is killed
    remote = False  # whether the object store takes part
    kills, faults = 0, 0  # of the soak's 300 and 100
    by_default = True  # False: only on request
    attempt_s = 120.0  # timeout of a started command

    def __init__(self, world: World, index: int, *, alone: bool = False) -> None:
        """alone: for the undisturbed reference, which trains on one rank."""
        self.world, self.index, self.variant, self.alone = world, index, index % self.variants, alone
        self.folder = world.cycle

    @property
    def key(self) -> str:
        """Cycles with the same key must produce the same bytes."""
        return f"{self.name}-{self.variant}"

    def path(self, name: str) -> Path:
        return self.folder / name

    def env(self) -> dict[str, str]:
        store = self.world.store.variables if self.remote and self.world.store else {}
        return {"TMPDIR": str(self.path("tmp")), "RESOLUTE_CACHE": str(self.path("cache")), **store}

    def prepare(self) -> None:
        """Create the cycle's folder as it is before the first start."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.path("tmp").mkdir(parents=True)

    @abstractmethod
    def phases(self) -> list[Phase]:
        """The commands of a cycle, in order."""

    def ranks(self, attempt: int) -> int:
        """Number of ranks of a start."""
        return 1

    def places(self) -> dict[str, Place]:
        return {}

    def draw(self, rng: random.Random, **properties: Any) -> Event:
        """An event that may hit one of its commands; `properties` are those of `events.draw`."""
        return draw(rng, **properties)

    def in_process(self, attempt: int) -> None:
        """Called in each forked process of the command before its `main`."""
        shorten_limits(forks=not self.remote)

    @abstractmethod
    def keep(self, reference: Path) -> None:
        """Save the results of this undisturbed cycle in the folder `reference`."""

    @abstractmethod
    def check(self, reference: Path, *, complete: bool) -> list[str]:
        """Findings against the reference. complete: every attempt was a fork of this interpreter."""

    def temporary(self) -> list[str]:
        """Findings for temporary files, after a process has deleted those of killed ones, as every process does."""

        def delete_abandoned() -> None:
            tempfile.tempdir = str(self.path("tmp"))
            ScratchFolder().close()

        in_child(delete_abandoned)
        return leftover_files("TMPDIR", self.path("tmp"))

    def command(self, *words: object, ranks: int = 1) -> Command:
        return Command(module="resolute", main=main, arguments=[str(word) for word in words],
                       env=self.env(), ranks=ranks)  # fmt: skip


def shorten_limits(*, forks: bool) -> None:
    """In a forked process: use short time limits; `forks`: fork prep's workers instead of starting interpreters.

    why not always: the clients of object stores do not work in a fork of a process that has used them.
    """
    from resolute.pipeline.storage.cache import CacheSettings
    from resolute.prep.run import pool as process_pool
    from resolute.prep.storage import lease

    process_pool.Pool = functools.partial(process_pool.Pool, hang_s=HANG_S)  # type: ignore[assignment, misc]
    if forks:
        get_context = multiprocessing.get_context
        multiprocessing.get_context = lambda method=None: get_context(  # type: ignore[assignment]
            "fork" if method == "forkserver" else method
        )
        process_pool.open_pool = functools.partial(process_pool.open_pool, method="fork")
        process_pool.start_fork_server = lambda: None
    lease._LEASE_S, lease._MARGIN_S, lease._RENEW_S = 8.0, 2.0, 1.0
    defaults = CacheSettings.__init__.__kwdefaults__
    assert defaults is not None
    defaults.update(stall_s=1.5)


class Prep(Scenario):
    """A folder of class folders to shards; every fourth time with two commands, the second of which adds a size.

    Of more shards than workers, each worker writes whole ones; others are spread over all workers.
    """

    name, variants, several = "prep-folder", 4, True
    loss = frozenset({2})  # of a worker, as by the kernel when memory runs out
    kills, faults = 40, 12
    shard_samples: Sequence[int] = (16, 8, 128, 16)  # by variant; 128: one shard per split

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.world.photos, self.path("photos"))

    @property
    def source(self) -> str:
        return str(self.path("photos"))

    @property
    def out(self) -> str:
        return str(self.path("out"))

    def prep(self, resolutions: str = RESOLUTIONS) -> Command:
        return self.command("shards", *self.settings(resolutions), "--workers", 2)

    def settings(self, resolutions: str = RESOLUTIONS) -> list[object]:
        return ["--src", self.source, "--out", self.out, "--res", resolutions,
                "--shard-samples", self.shard_samples[self.variant]]  # fmt: skip

    def phases(self) -> list[Phase]:
        all_sizes = Phase(name="prep", command=lambda _: self.prep())
        if self.variant != 3:
            return [all_sizes]
        return [Phase(name="prep at 32 px", command=lambda _: self.prep("32")), all_sizes]

    def places(self) -> dict[str, Place]:
        return {"photos": Place(path=self.path("photos"), reads=True, vanishes=True),
                "out": Place(path=self.path("out"), reads=True, writes=True, vanishes=True)}  # fmt: skip

    def written(self) -> dict[str, str]:
        return tree(self.path("out"))

    def keep(self, reference: Path) -> None:
        (reference / "tree.json").write_text(json.dumps(self.written()))

    def check(self, reference: Path, *, complete: bool) -> list[str]:
        expected = json.loads((reference / "tree.json").read_text())
        return compare_trees("OUT", self.written(), expected) + self.temporary()


class PrepMemory(Prep):
    """Workers that are killed one by one, as by the kernel when memory runs out: each ends the run with one line."""

    name, variants = "prep-memory", 3
    kills, faults = 12, 0

    def draw(self, rng: random.Random, **properties: Any) -> Event:
        return Event(  # why early: a worker that has no work left is not missed
            kind="kill", how="SIGKILL", target="worker", at=rng.uniform(0.0, 0.25), expected=self.loss,
            says="worker process: died, got SIGKILL in one of 2",
        )  # fmt: skip


class PrepList(Prep):
    """A list of `file://` names, whose photos are on a mount that is lost, for a while or until the command ends."""

    name, variants = "prep-list", 3
    kills, faults = 0, 8

    def prepare(self) -> None:
        super().prepare()
        photos = sorted(self.path("photos").rglob("*.jpg"))
        self.path("list.txt").write_text("".join(f"file://{photo} {photo.parent.name}\n" for photo in photos))

    @property
    def source(self) -> str:
        return str(self.path("list.txt"))

    def places(self) -> dict[str, Place]:
        return {"photos": Place(path=self.path("photos"), vanishes=True)}


class PrepExtend(Prep):
    """A set to which a quarter of the photos is added later, every other time without some that are gone by then."""

    name, variants = "prep-extend", 2
    kills, faults = 20, 6

    def prepare(self) -> None:
        super().prepare()
        for photo in sorted(self.path("photos").rglob("*.jpg"))[::4]:
            later = self.path("later") / photo.relative_to(self.path("photos"))
            later.parent.mkdir(parents=True, exist_ok=True)
            photo.rename(later)

    def phases(self) -> list[Phase]:
        def extend(_: int) -> Command:
            shutil.copytree(self.path("later"), self.path("photos"), dirs_exist_ok=True)
            if self.variant:
                for photo in sorted(self.path("photos").rglob("*1.jpg")):
                    photo.unlink()
            return self.command("shards", *self.settings(), "--workers", 2, "--extend")

        return [Phase(name="prep", command=lambda _: self.prep()), Phase(name="extension", command=extend)]


class PrepArchive(Prep):
    """The same photos in a zip, tar or tar.gz."""

    name, variants = "prep-archive", 3
    kills, faults = 20, 6

    def prepare(self) -> None:
        super(Prep, self).prepare()
        files = [path for path in sorted(self.world.photos.rglob("*")) if path.is_file()]
        self.path("archive").mkdir()
        if self.variant == 0:
            with zipfile.ZipFile(self.source, "w") as archive:
                for path in files:
                    archive.writestr(zipfile.ZipInfo(str(path.relative_to(self.world.photos))), path.read_bytes())
            return
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            for path in files:
                info = tarfile.TarInfo(str(path.relative_to(self.world.photos)))
                info.size = path.stat().st_size
                with path.open("rb") as file:
                    tar.addfile(info, file)
        content = data.getvalue() if self.variant == 1 else gzip.compress(data.getvalue(), 1, mtime=0)
        Path(self.source).write_bytes(content)
        os.utime(self.source, (1_700_000_000, 1_700_000_000))

    @property
    def source(self) -> str:
        return str(self.path("archive") / f"photos.{('zip', 'tar', 'tar.gz')[self.variant]}")

    def phases(self) -> list[Phase]:
        return [Phase(name="prep", command=lambda _: self.prep())]

    def places(self) -> dict[str, Place]:
        return {"archive": Place(path=self.path("archive"), reads=True, vanishes=True),
                "out": Place(path=self.path("out"), reads=True, writes=True, vanishes=True)}  # fmt: skip


class PrepObjects(Prep):
    """Photos in an object store, or OUT there, or both."""

    name, variants, remote = "prep-s3", 3, True
    kills, faults = 20, 12
    shard_samples = (16, 16, 128)

    def prepare(self) -> None:
        super().prepare()
        assert self.world.store
        self.world.store.delete("out")

    @property
    def source(self) -> str:
        return super().source if self.variant == 1 else f"s3://{BUCKET}/photos"

    @property
    def out(self) -> str:
        return super().out if self.variant == 0 else f"s3://{BUCKET}/out"

    def phases(self) -> list[Phase]:
        return [Phase(name="prep", command=lambda _: self.prep())]

    def places(self) -> dict[str, Place]:
        places = super().places()
        return {name: places[name] for name in ([["out"], ["photos"], []][self.variant])}

    def written(self) -> dict[str, str]:
        import hashlib

        store = self.world.store
        if self.variant == 0 or store is None:
            return super().written()
        return {name: hashlib.sha256(store.read(f"out/{name}")).hexdigest() for name in store.names("out")
                if name != "report.html"}  # fmt: skip


class PrepJobs(Prep):
    """The same set by `plan`, several `shards` jobs at the same time, whose ranges overlap, and `finalize`."""

    name, variants = "prep-jobs", 2
    kills, faults = 40, 14

    def shards(self, selected: str, workers: int, *concurrent: Phase) -> Phase:
        command = self.command("jobs", "range", "--out", self.out, "--range", selected, "--workers", workers)
        return Phase(name=f"shards {selected}", command=lambda _: command, concurrent=concurrent)

    def phases(self) -> list[Phase]:
        def finalize(_: int) -> Command:
            return self.command("jobs", "finish", "--out", self.out)

        return [Phase(name="plan", command=lambda _: self.command("jobs", "plan", *self.settings())),
                self.shards(":5", 2, self.shards("2:4", 1), self.shards("1:5", 3)),
                self.shards(":", 2, self.shards("3:6", 1), self.shards("4:", 3)),
                Phase(name="finalize", command=finalize)]  # fmt: skip

    def keep(self, reference: Path) -> None:
        """Save the set that `resolute shards` makes instead."""
        self.prepare()
        single = start(self.prep(), self.world.root / "output" / "single", prepare=lambda: self.in_process(0))
        if single.wait(self.attempt_s):
            raise ResoluteError(f"soak: prep ended with status {single.status}, expected 0: {single.stderr[-500:]}")
        super().keep(reference)


class PrepJobsObjects(PrepJobs, PrepObjects):
    """The same jobs with OUT in an object store, every other time the photos too."""

    name = "prep-jobs-s3"
    kills, faults = 20, 14
    shard_samples = (16, 16, 16)

    def __init__(self, world: World, index: int, *, alone: bool = False) -> None:
        super().__init__(world, index, alone=alone)
        self.variant += 1  # of `PrepObjects`


class Verify(Prep):
    """`verify` of an intact set; every other time of a set with a flipped byte, which `prep` then repairs."""

    name, variants, loss = "verify", 2, frozenset({2})
    kills, faults = 20, 8
    shard_samples = (16, 16)

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.world.shards, self.path("out"))
        if self.variant == 1:
            tar = sorted(self.path("out").glob("48/*.tar"))[1]
            data = bytearray(tar.read_bytes())
            data[len(data) // 3] ^= 4
            tar.write_bytes(data)

    @property
    def source(self) -> str:
        return str(self.world.photos)

    def phases(self) -> list[Phase]:
        def verify(_: int) -> Command:
            return self.command("verify", self.out)

        if self.variant == 0:
            return [Phase(name="verify", command=verify)]
        return [Phase(name="verify", command=verify, final=1), Phase(name="repair", command=lambda _: self.prep()),
                Phase(name="verify again", command=verify)]  # fmt: skip

    def places(self) -> dict[str, Place]:
        return {"out": Place(path=self.path("out"), reads=True, writes=self.variant == 1, vanishes=True)}


class Train(Scenario):
    """Training on one rank: bit-identical."""

    name = "train-1"
    recipe = "one"
    kills, faults = 40, 10
    folds: Sequence[int] = ()  # of a cross-validation

    def prepare(self) -> None:
        super().prepare()
        for run in range(len(self.run_names())):
            self.path(f"seen/{run}").mkdir(parents=True)
        self.path("runs").mkdir()
        if not self.remote:
            shutil.copytree(self.world.shards, self.path("shards"))

    @property
    def shards(self) -> str:
        return str(self.path("shards"))

    @property
    def run(self) -> Path:
        return self.path("runs") / "run"

    def run_names(self) -> list[str]:
        """Folders of the single runs in `run`."""
        return [f"fold-{fold}" for fold in self.folds] or [""]

    def train(self, attempt: int) -> Command:
        words = ["--shards", self.shards, "--recipe", self.world.recipe(self.recipe), "--runs", self.path("runs"),
                 "--run", "run", "--device", "cpu", "--threads", 1, "--save-every-steps", 3]  # fmt: skip
        words += ["--folds", len(self.folds)] if self.folds else []
        return self.command("train", *words, ranks=self.ranks(attempt))

    def phases(self) -> list[Phase]:
        return [Phase(name="train", command=self.train)]

    def places(self) -> dict[str, Place]:
        return {"shards": Place(path=self.path("shards"), reads=True, vanishes=True),
                "run": Place(path=self.run, reads=True, writes=True, vanishes=True)}  # fmt: skip

    def in_process(self, attempt: int) -> None:
        super().in_process(attempt)
        _record_samples(self.path("seen"), f"{attempt:03d}.{os.environ.get('RANK', '0')}")

    def keep(self, reference: Path) -> None:
        shutil.copytree(self.run, reference / "run")
        shards, recipe = str(self.world.shards), self.world.recipe(self.recipe)
        folds: list[tuple[int, int] | None] = [(fold, len(self.folds)) for fold in self.folds]
        planned = in_child(lambda: [planned_samples(shards, recipe, fold) for fold in folds or [None]])
        (reference / "planned.json").write_text(json.dumps(planned))
        (reference / "cache.json").write_text(json.dumps(sorted(tree(self.path("cache")))))

    def check(self, reference: Path, *, complete: bool) -> list[str]:
        planned = json.loads((reference / "planned.json").read_text())
        problems = in_child(lambda: [
            problem for number, name in enumerate(self.run_names())
            for problem in check_training(
                self.run / name, reference / "run" / name, self.path(f"seen/{number}"), planned[number],
                exact=self.recipe != "many", complete=complete,
            )
        ])  # fmt: skip
        assert isinstance(problems, list)
        cache = json.loads((reference / "cache.json").read_text())
        problems += self.temporary()
        if self.path("shards").exists():
            problems += compare_trees("SHARDS", tree(self.path("shards")), tree(self.world.shards))
        left = [str(path.relative_to(self.path("cache"))) for path in self.path("cache").rglob("*") if path.is_file()]
        if extra := sorted(set(left) - set(cache)):
            problems.append(f"cache: {len(extra)} files left over: {', '.join(extra[:3])}")
        return problems


class TrainFolds(Train):
    """Cross-validation with two folds: bit-identical runs, and the same summary."""

    name, folds = "train-folds", (0, 1)
    kills, faults = 20, 4

    def check(self, reference: Path, *, complete: bool) -> list[str]:
        summary, expected = (json.loads((run / "folds.json").read_text()) for run in (self.run, reference / "run"))
        for fold in (*summary["folds"].values(), *expected["folds"].values()):
            del fold["elapsed_s"]
        problems = [] if summary == expected else [f"folds.json: got {summary}, expected {expected}"]
        return problems + super().check(reference, complete=complete)


class TrainAll(Train):
    """Training on one rank with every feature, torch.compile included, in new interpreters: bit-identical."""

    name, recipe = "train-all", "all"
    kills, by_default, attempt_s = 6, False, 1800.0  # the first start compiles for minutes

    def env(self) -> dict[str, str]:
        return {**super().env(), "TORCHINDUCTOR_CACHE_DIR": str(self.world.root / "inductor")}

    def train(self, attempt: int) -> Command:
        return dataclasses.replace(super().train(attempt), new_interpreter=True)

    def temporary(self) -> list[str]:
        for folder in self.path("tmp").glob("torchinductor_*"):  # PyTorch keeps precompiled headers there
            shutil.rmtree(folder)
        for file in self.path("tmp").glob("cc??????.*"):  # of a C compiler that was killed
            file.unlink()
        return super().temporary()

    def check(self, reference: Path, *, complete: bool) -> list[str]:
        return super().check(reference, complete=False)  # why: only forks record their samples


class TrainRanks(Train):
    """Training on 1, 2 and 4 ranks, a different number at each start: equal within rounding."""

    name, recipe, several, loss = "train-ranks", "many", True, frozenset({137, 2})
    kills, faults = 30, 6

    def ranks(self, attempt: int) -> int:
        return 1 if self.alone else (2, 4, 1)[(attempt + self.index) % 3]


class TrainObjects(Train):
    """Training from an object store through the cache."""

    name, remote = "train-s3", True
    kills, faults = 20, 8

    @property
    def shards(self) -> str:
        return f"s3://{BUCKET}/shards"

    def places(self) -> dict[str, Place]:
        return {"run": Place(path=self.run, reads=True, writes=True),
                "cache": Place(path=self.path("cache"), reads=True, writes=True)}  # fmt: skip


class Evaluate(Train):
    """Evaluation during the training, both disturbed; the final result must be that of the undisturbed run."""

    name = "eval"
    kills, faults = 30, 6

    def evaluate(self, *words: object) -> Command:
        return self.command("eval", self.run, "--shards", self.shards, "--device", "cpu",
                            "--threads", 1, *words)  # fmt: skip

    def phases(self) -> list[Phase]:
        # why refused: there may be no checkpoint yet
        concurrent = Phase(name="concurrent eval", command=lambda _: self.evaluate(), refused=2)
        return [Phase(name="train", command=self.train, concurrent=[concurrent]),
                Phase(name="eval", command=lambda _: self.evaluate("--res", "48,64"))]  # fmt: skip

    def check(self, reference: Path, *, complete: bool) -> list[str]:
        problems = super().check(reference, complete=complete)
        result, expected = (json.loads((run / "eval.json").read_text()) for run in (self.run, reference / "run"))
        if result != expected:
            problems.append(f"eval.json: got {result['rows']} at step {result['step']}, expected {expected['rows']}")
        return problems


class LibraryLoop(Scenario):
    """A loop over the library's loader with Ctrl-C at random moments, also inside `next()`: the same batches."""

    name, variants = "loop", 3
    kills, faults = 12, 4

    def prepare(self) -> None:
        super().prepare()
        shutil.copytree(self.world.shards, self.path("shards"))

    @property
    def key(self) -> str:
        return self.name  # the interrupts of a variant must change nothing

    def phases(self) -> list[Phase]:
        words = [str(self.path("shards")), str(self.path("batches.txt"))]
        words += [] if self.alone else ["--interrupts", str(self.variant)]
        loop = Command(module=library_loop.__name__, main=library_loop.main, arguments=words, env=self.env())
        return [Phase(name="loop", command=lambda _: loop)]

    def places(self) -> dict[str, Place]:
        return {"shards": Place(path=self.path("shards"), reads=True, vanishes=True)}

    def keep(self, reference: Path) -> None:
        shutil.copy(self.path("batches.txt"), reference)

    def check(self, reference: Path, *, complete: bool) -> list[str]:
        got, expected = ((folder / "batches.txt").read_text().splitlines() for folder in (self.folder, reference))
        wrong = [n for n, (line, other) in enumerate(itertools.zip_longest(got, expected)) if line != other]
        return ([f"batches: {len(wrong)} differ, the first is {wrong[0]}"] if wrong else []) + self.temporary()


def _record_samples(folder: Path, name: str) -> None:
    """Have each training step of this process record its samples in `folder`/FOLD/`name` before it runs."""
    from resolute.train import loop

    step: Callable[..., Any] = loop.Learner.train_step

    def record_and_step(learner: Any, batch: Any) -> Any:
        with (folder / str(learner.recipe.data.fold or 0) / name).open("a", encoding="utf-8") as lines:
            print(json.dumps([batch.spec.step, batch.spec.ids.tolist()]), file=lines)
        return step(learner, batch)

    loop.Learner.train_step = record_and_step  # type: ignore[assignment, method-assign]


SCENARIOS: Mapping[str, type[Scenario]] = {
    scenario.name: scenario
    for scenario in (Prep, PrepMemory, PrepList, PrepExtend, PrepArchive, PrepObjects, PrepJobs, PrepJobsObjects,
                     Verify, Train, TrainFolds, TrainAll, TrainRanks, TrainObjects, Evaluate, LibraryLoop)
}  # fmt: skip


def chosen_scenarios(only: Sequence[str]) -> list[str]:
    """Names of scenarios: those in `only`, or that begin with one of them and a dash (`prep` selects prep-folder …).

    If `only` is empty: all that run by default.
    """
    return [name for name, scenario in SCENARIOS.items() if (not only and scenario.by_default)
            or any(name == word or name.startswith(f"{word}-") for word in only)]  # fmt: skip
