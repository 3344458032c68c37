"""The settings of training's commands; each field is an option of `resolute train`, `plan`, `eval` and so on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from resolute.errors import ResoluteError
from resolute.machine import cpus_per_process
from resolute.settings import described, repeatable, setting, settings
from resolute.train.recipe import RECIPES

__all__ = [
    "CompareOptions",
    "EvalOptions",
    "ExportOptions",
    "KeysOptions",
    "LaunchOptions",
    "LrFindOptions",
    "LrOptions",
    "PlanOptions",
    "PredictOptions",
    "RecipeOptions",
    "ReportOptions",
    "RunOptions",
    "ShowOptions",
    "TrainOptions",
]

_SHARDS = "shard set: folder written by `resolute shards` or URL (s3://, gs://, http://)"
_RUN = "name or folder of a run (its best checkpoint is used), or one of its .pt files"


def _recipe_file(path: Path) -> Path:
    """The file of an included recipe that is given by its name, "imagenet_rn50"; any other path as it is."""
    is_name = len(path.parts) == 1 and path.suffix != ".toml" and not path.is_file()  # demo/ is a folder
    return RECIPES / f"{path}.toml" if is_name else path


Shards = Annotated[str, described(_SHARDS, min_length=1)]
_Recipe = Annotated[Path, AfterValidator(_recipe_file)] | None
_RECIPE = "TOML file, or the name of an included recipe: demo (default: {}a starter recipe that fits the set)"
_SET = "replace a value of the recipe: optim.lr=0.1, stages[0].epochs=3; may be given several times"


@settings("")
class _Device:
    device: str = setting("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1")
    threads: Annotated[int, described("CPU threads per process: all cores by default", ge=1, le=1024)] = Field(
        default_factory=cpus_per_process
    )


@settings("")
class _RecipeOptions:
    recipe: _Recipe = setting(None, _RECIPE.format(""))
    set_: tuple[str, ...] = repeatable(_SET, metavar="KEY=VALUE")


@settings("")
class LaunchOptions:
    """Several processes, one per GPU, started by torchrun."""

    gpus: int | None = setting(None, "number of processes on this machine, one per GPU (default: one process)", ge=1)
    nodes: str = setting(
        "1",
        "number of machines, or FEWEST:MOST, which all run the same command with --head",
        pattern=r"^[1-9]\d*(:[1-9]\d*)?$",
    )
    head: str | None = setting(None, "with --gpus: first machine of several, as NAME:PORT")
    restarts: int | None = setting(
        None, "with --gpus: times that all processes are started again after one died (default: 3; 0 with --from)", ge=0
    )

    def __post_init__(self) -> None:
        given = {"--head": self.head is not None, "--restarts": self.restarts is not None, "--nodes": self.nodes != "1"}
        unused = [name for name, is_given in given.items() if is_given and self.gpus is None]
        if unused:
            raise ResoluteError(f"{unused[0]}: has no effect, got no --gpus, expected their number; add --gpus 8")
        if self.nodes != "1" and self.head is None:
            raise ResoluteError(
                f"--nodes: got {self.nodes} without --head, expected the first machine's address; add --head NAME:29400"
            )


@settings("")
class RunOptions(_RecipeOptions, LaunchOptions, _Device):
    run: str | None = setting(None, "name of the run, or the path of its folder (default: recipe and set)")
    runs: Path = setting(Path("runs"), "parent of all run folders")
    decode: Literal["cpu", "gpu"] = setting("cpu", "where JPEGs are decoded for a GPU; docs/gpu.md says when gpu pays")
    folds: str | None = setting(
        None,
        "cross-validation: train K runs, each in RUN/fold-NUMBER with another K-th of the training split held "
        "out for validation; 0,2/K: only these two",
    )
    gpu_memory_gib: float = setting(0.0, "limit of GPU memory for tensors, as on a smaller GPU; 0: none", ge=0, le=1e6)
    save_every_s: float = setting(300.0, "seconds between checkpoints", ge=0, le=1e9)
    save_every_steps: int = setting(0, "optimizer steps between checkpoints; 0: by time only", ge=0, le=10**12)


@settings("")
class PlanOptions(RunOptions):
    shards: Shards
    budget: str | None = setting(
        None, "time limit (90s, 11m, 1.5h): names the scale_epochs that fits, and other changes"
    )
    json: Path | None = setting(None, "write the forecast to this JSON file")
    limit: str | None = setting(
        None, "time for measuring; stages that would take longer are estimated (default: 60s on a CPU, else none)"
    )


@settings("")
class TrainOptions(RunOptions):
    shards: str | None = setting(None, _SHARDS + " (with --more-epochs, default: that of the run)", min_length=1)
    more_epochs: int | None = setting(
        None,
        "continue the finished run --run from its weights, as a new run of this many epochs: NAME-plus-NUMBER",
        ge=1,
        le=10**6,
    )
    keep: int = setting(2, "number of newest checkpoints to keep, besides the best", ge=1, le=10**6)
    from_: str = setting(
        "last.pt", "checkpoint of the run to resume from once, a file in its folder; later ones are discarded"
    )
    loggers: tuple[str, ...] = setting(
        (), "also log to csv (RUN/csv), tensorboard (RUN/tb), wandb, mlflow; several: csv,wandb"
    )
    calibrate: bool = setting(False, "measure loader and model throughput before training, for the report")

    def __post_init__(self) -> None:
        super().__post_init__()
        if Path(self.from_).name != self.from_:
            raise ResoluteError(f"--from: got {self.from_}, expected a file name in the run's folder; omit the path")
        if self.from_ != "last.pt" and (restarts := int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))):
            raise ResoluteError(
                f"--from: got {self.from_} with up to {restarts} restarts, expected none, since each would begin at "
                "that checkpoint again; set RESTARTS=0 (torchrun --max-restarts=0)"
            )
        if self.more_epochs is None and self.shards is None:
            raise ResoluteError("--shards: missing, expected a shard set; name it: `resolute train SHARDS`")
        if self.more_epochs is not None:
            given = {"--recipe": self.recipe, "--folds": self.folds}
            if unused := next((name for name, value in given.items() if value is not None), None):
                raise ResoluteError(f"--more-epochs: got {unused} as well, expected the recipe of the run; omit it")
            if self.run is None:
                raise ResoluteError("--more-epochs: got no --run, expected the finished run to continue; add it")
        if self.loggers:
            from resolute.train.logs.loggers import check_loggers  # why here: slow, and rarely needed

            check_loggers(self.loggers)


@settings("")
class RecipeOptions(_Device):
    out: Path | None = setting(None, "TOML file to write, for `resolute train --recipe`")
    shards: str | None = setting(None, _SHARDS, min_length=1)
    model: str | None = setting(None, "any timm model (default: one that suits set and device)")
    budget: str | None = setting(None, "time that the run may take (90s, 11m, 1.5h): measures, and sets the epochs")
    upgrade: Path | None = setting(
        None,
        "instead: translate this recipe of an earlier version, to OUT or in its place (FILE.old keeps the old one)",
    )

    def __post_init__(self) -> None:
        if self.upgrade is not None:
            given = {"--shards": self.shards, "--model": self.model, "--budget": self.budget}
            if unused := next((name for name, value in given.items() if value is not None), None):
                raise ResoluteError(f"--upgrade: got {unused} as well, which it does not read; omit it")
        else:
            for name, value, what in (("--out", self.out, "a new TOML file"), ("--shards", self.shards, "a shard set")):
                if value is None:
                    raise ResoluteError(f"{name}: missing, expected {what}; add it")


@settings("")
class _Inference(_Device):
    split: str = setting("val", "split of a shard set")
    fold: int | None = setting(None, "for a run with folds and its own set: fold to use (default: the run's)", ge=0)
    flip: bool = setting(False, "test-time flip, even if the recipe does not use it")


@settings("")
class EvalOptions(_Inference):
    run: str = setting("", _RUN)
    shards: str | None = setting(None, _SHARDS + ", with the same classes (default: the run's own set)", min_length=1)
    res: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] = setting(
        (), "resolutions, px (default: that at which these weights were validated)"
    )
    json: Path | None = setting(None, "JSON file to write (default: eval.json in the run's folder)")


@settings("")
class PredictOptions(_Inference):
    run: str = setting("", _RUN + ", or the parent folder of its folds")
    src: str | None = setting(
        None, "folder of images, single image, or shard set (folder or URL) (default: the run's own set)"
    )
    out: Path = setting(Path("pred.csv"), "CSV file to write")
    format: Literal["wide"] | None = setting(None, "wide: a column per class, with its probability")
    sample: Path | None = setting(
        None,
        "a competition's sample_submission.csv: write a submission with its header, ids and order; an id is a "
        "photo's path or name, with or without suffix",
    )
    topk: int | None = setting(
        None, "classes per row, most likely first (default: 5, or all if there are fewer)", ge=1, le=10**9
    )
    threshold: float | None = setting(
        None, "several labels per sample: probability from which on one is predicted (default: 0.5)", ge=0, le=1
    )
    res: int | None = setting(
        None, "input resolution, px (default: that at which these weights were validated)", ge=1, le=65_535
    )
    weights: Literal["raw", "ema"] | None = setting(None, "weights to use (default: those with the best validation)")


@settings("")
class ExportOptions:
    run: str = setting("", _RUN)
    format: Literal["timm", "onnx"] = setting("timm", "program that reads the model: timm or ONNX Runtime")
    out: Path | None = setting(None, "folder to write (default: export in the run's folder, export-onnx for ONNX)")


@settings("")
class ReportOptions:
    run: str = setting("", "name or folder of a run")


@settings("")
class CompareOptions:
    runs: Annotated[tuple[str, ...], described("names or folders of runs, or of runs' folds", min_length=1)]
    out: Path | None = setting(None, "HTML file to write (default: runs/compare.html)")


@settings("")
class KeysOptions:
    schema: Path | None = setting(None, "write the JSON Schema of recipes, for editors, to this file instead")


@settings("")
class LrOptions(_RecipeOptions):
    shards: str | None = setting(None, _SHARDS, min_length=1)
    samples: int | None = setting(None, "number of training samples, instead of --shards", ge=1)
    out: Path | None = setting(None, "HTML file to write (default: runs/RECIPE-lr.html)")

    def __post_init__(self) -> None:
        if (self.shards is None) == (self.samples is None):
            got = "none" if self.shards is None else "both"
            raise ResoluteError(f"--shards, --samples: got {got}, expected one of them; give one")
        if self.shards is None and self.recipe is None:
            raise ResoluteError("--samples: got no --recipe, and a starter recipe needs a set; add one of the two")


@settings("")
class LrFindOptions(_RecipeOptions, _Device):
    shards: Shards
    min_lr: float | None = setting(
        None, "first learning rate (default: 0.001; 1e-5 for optimizers with betas)", ge=1e-12, le=1e6
    )
    max_lr: float | None = setting(
        None, "last learning rate (default: 10; 0.1 for optimizers with betas)", ge=1e-12, le=1e6
    )
    steps: int = setting(200, "optimizer steps of the sweep", ge=25, le=10**6)
    out: Path | None = setting(None, "HTML file to write (default: runs/RECIPE-lr-find.html)")


@settings("")
class ShowOptions(_RecipeOptions):
    shards: Shards
    out: Path | None = setting(None, "HTML file to write (default: runs/RECIPE-show.html)")
    count: int = setting(6, "images per row", ge=1, le=1000)
