"""`resolute predict RUN --src photos --out pred.csv`: classes, labels or values of images, from a run or folds.

With `--sample`, a submission to a competition, in the form of its sample (`table.submission`).
Image files are selected and decoded exactly as by `prep`. The predictions of several folds are averaged, except on the
shards that they were trained on: there each photo is predicted by the fold that held it out (out of fold).
"""

from __future__ import annotations

import csv
import io
import itertools
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from tqdm import tqdm

from resolute.console import counted
from resolute.errors import ResoluteError
from resolute.files import check_output, output_file
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.plan.crops import centre_crop
from resolute.prep.convert.decode import Reject, decode
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.folders.image_folder import walk
from resolute.prep.sources.image_ref import MISSING, PLAIN, ByteRange, Listing
from resolute.prep.sources.names import SUFFIXES, is_image
from resolute.train.devices.device import pick_device
from resolute.train.learner import eval_logits
from resolute.train.model.outputs import Outputs
from resolute.train.options import PredictOptions
from resolute.train.run_folder import existing_run
from resolute.train.score import shown_metrics
from resolute.train.validation import metrics_of
from resolute.urls import is_url

from .saved_run import SavedRun, Weights, open_eval_set, open_saved_run, training_overlap, validation_loader
from .table import (
    HALF,
    Table,
    default_table,
    match_photos,
    read_sample,
    submission,
    true_cells,
    true_columns,
    wide_table,
)

__all__ = ["PredictionBatch", "main", "predict_photos", "predict_shards", "preprocess"]

_AHEAD = 2  # batches decoded while the model runs
_TOPK = 5


@dataclass(frozen=True, kw_only=True)
class PredictionBatch:
    """Predictions of a batch, (N, C or D) float32 on the CPU, see `Outputs.predictions`, and `targets` if known.

    `targets`: as `Batch.targets`, on the CPU; `classes`: their names, which may differ from the run's; `split`: that of
    the set, "" for photos. `errors` maps the names of images that could not be read to the reason; their rows are zero.
    """

    names: list[str]
    predictions: torch.Tensor
    targets: torch.Tensor | None
    classes: tuple[str, ...] = ()
    split: str = ""
    errors: dict[str, str]


class Ensemble:
    """Averages the predictions of one or more runs."""

    def __init__(
        self, members: list[SavedRun], *, weights: Weights | None, flip: bool, device: torch.device, res: int | None
    ) -> None:
        """`res`: side of the input images, px; None: the members' own. Raises `ResoluteError` if these expect different
        images."""
        self.first, self.device = members[0], device
        for member in members[1:]:
            if member.ensemble_key != self.first.ensemble_key:
                raise ResoluteError(
                    f"{member.path}: classes or values, mean, std, margin or folds differ from "
                    f"{self.first.path}, expected folds of the same recipe and set; predict with one "
                    "run"
                )
            if res is None and member.res != self.first.res:
                raise ResoluteError(
                    f"{member.path}: validated at {member.res} px, expected {self.first.res} px as "
                    f"{self.first.path}; choose the resolution with --res"
                )
        self.res = res or self.first.res
        self.flip = flip or self.first.recipe.eval.flip
        self._networks: list[nn.Module] = []
        self._heads = [member.head for member in members]
        for member in members:
            which = weights or member.best_weights
            if which not in member.weights:
                raise ResoluteError(f"--weights: got ema, but {member.path} has no averaged weights; omit it")
            self._networks.append(member.network(which, device, resolutions=[self.res]))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Predictions (N, C or D) float32 on the CPU for normalised images (N, 3, res, res) on the device.

        They are the mean over the runs of `Outputs.predictions`, each with its own scale of values.
        """
        precision = self.first.recipe.precision
        predictions = [
            head.predictions(eval_logits(network, images, precision, flip=self.flip))
            for head, network in zip(self._heads, self._networks, strict=True)
        ]
        return torch.stack(predictions).mean(0).cpu()


def preprocess(
    path: Path, *, res: int, margin: float, crop_pct: float | None, grey_bits: int = 16
) -> NDArray[np.uint8]:
    """(res, res, 3) RGB of an image file: decoded and shrunk as by prep, then cropped and resized as in validation.

    `margin`: stored short side / res; `grey_bits`: those that samples of 16 bits use.
    Raises `Reject` for images that prep would reject, `StorageError` if the file
    cannot be read.
    """
    is_broken_link = path.is_symlink() and not path.exists()
    data = fetch(ByteRange(str(path), stored_as=MISSING if is_broken_link else PLAIN))
    image = Image.fromarray(decode(data, bits=grey_bits))
    short = round(res * margin)
    scale = short / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y, width, height = centre_crop(*image.size, float(crop_pct or res / short))
    crop = image.crop((x, y, x + width, y + height))
    return np.asarray(crop.resize((res, res), Image.Resampling.BILINEAR))


def predict_photos(
    ensemble: Ensemble, photos: Sequence[tuple[str, Path]], *, threads: int
) -> Iterator[PredictionBatch]:
    """Predict image files, (name, path), in order; unreadable ones are reported in `errors`."""
    saved, res = ensemble.first, ensemble.res
    data, size = saved.recipe.data, saved.recipe.eval.batch_size
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (data.mean, data.std))

    def load(path: Path) -> NDArray[np.uint8] | str:
        try:
            crop_pct = saved.recipe.eval.crop_pct
            return preprocess(path, res=res, margin=saved.margin, crop_pct=crop_pct, grey_bits=saved.grey_bits)
        except Reject as reason:
            return str(reason)

    def batch(names: list[str], loaded: Iterator[NDArray[np.uint8] | str]) -> PredictionBatch:
        results = [*loaded]
        errors = {name: result for name, result in zip(names, results, strict=True) if isinstance(result, str)}
        pixels = [np.zeros((res, res, 3), np.uint8) if isinstance(result, str) else result for result in results]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).sub(mean).div(std)
        predictions = ensemble(images.to(ensemble.device, memory_format=torch.channels_last))
        predictions[[name in errors for name in names]] = 0
        return PredictionBatch(names=names, predictions=predictions, targets=None, errors=errors)

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[list[str], Iterator[NDArray[np.uint8] | str]]] = deque()
        for start in range(0, len(photos), size):
            names, paths = zip(*photos[start : start + size], strict=True)
            waiting.append(([*names], pool.map(load, paths)))
            if len(waiting) > _AHEAD:
                yield batch(*waiting.popleft())
        while waiting:
            yield batch(*waiting.popleft())


def predict_shards(ensemble: Ensemble, shards: ShardSet, *, split: str, threads: int) -> Iterator[PredictionBatch]:
    """Predict all samples of a split through the loader; names are those of `ShardSet.photo_names`.

    Raises `ResoluteError` if the set has targets of another kind, or other values.
    """
    head, names, stored = ensemble.first.head, shards.photo_names(split), shards.stored_split(split)
    if "values" in (head.target.kind, shards.target.kind) or head.target.kind != shards.target.kind:
        head.check_fits(shards.target, shards.root, str(ensemble.first.path), advice="use a set with these")
    with validation_loader(
        ensemble.first, shards, [ensemble.res], split=split, device=ensemble.device, threads=threads
    ) as loader:
        for batch in loader:
            yield PredictionBatch(
                names=[names[row] for row in batch.spec.ids],
                predictions=ensemble(batch.images),
                targets=batch.targets.cpu(),
                classes=shards.classes,
                split=stored,
                errors={},
            )


def open_members(run: Path) -> list[SavedRun]:
    """The run at `run` (a folder or a .pt file), or all folds in it."""
    folds = sorted(run.glob("fold-*"), key=lambda path: (len(path.name), path.name))
    is_single = run.is_file() or not folds or any((run / name).exists() for name in ("best.pt", "last.pt"))
    return [open_saved_run(path) for path in ([run] if is_single else folds)]


def find_images(source: Path) -> tuple[list[Path], Path]:
    """The image files at `source`, a folder or a single file, as prep selects them, and the folder names relate to.

    Raises `ResoluteError` if there are none or a folder cannot be listed.
    """
    if not source.exists():
        raise ResoluteError(f"{source}: not found, expected an image, a folder of images or a shard set; correct SRC")
    if source.is_file():
        root, files = source.parent, [source.name]
    else:
        root, files = source, [name for name, entry in walk(str(source), Listing()) if entry.kind == "file"]
    images = [root / name for name in files if is_image(name)]
    if not images:
        raise ResoluteError(
            f"{source}: no images among {counted(len(files), 'file')}, expected "
            f"{', '.join(sorted(SUFFIXES))}, or a shard set; correct SRC"
        )
    return images, root


def write_predictions(
    batches: Iterable[PredictionBatch],
    out: Path,
    table: Table,
    *,
    head: Outputs,
    total: int,
    from_set: bool = False,
    with_errors: bool = True,
) -> str:
    """Write the predictions to `out` as CSV, atomically; returns a one-line summary, with the metrics if known.

    `total`: number of images for the progress bar. `from_set`: with columns for the split and the targets of each
    image. `with_errors`: with a column for the reasons of images that could not be read, if there are any.
    """
    done, correct, failed, is_class = 0, 0, dict[str, str](), head.target.kind == "class"
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    header = [table.key, *(["split", *true_columns(head)] if from_set else []), *table.columns]
    # why first to another file: only at the end it is known whether there are errors
    with (
        output_file(out) as file,
        tempfile.TemporaryFile(dir=out.parent) as other,
        tqdm(total=total, unit="image", leave=False, disable=None) as bar,
    ):
        text, spool = (
            io.TextIOWrapper(each, newline="", encoding="utf-8", errors="surrogateescape") for each in (file, other)
        )
        rows = csv.writer(spool)
        for batch in batches:
            for i, name in enumerate(batch.names):
                cells = [""] * len(table.columns) if name in batch.errors else table.cells(batch.predictions[i])
                if batch.targets is not None:
                    true = true_cells(head, batch.targets[i], batch.classes)
                    correct += is_class and true == [head.target.names[int(batch.predictions[i].argmax())]]
                    cells = [batch.split, *true, *cells]
                rows.writerow([name, *cells, batch.errors.get(name, "")])
            if (own := _own_targets(head, batch)) is not None:
                known.append((batch.predictions, own))
            done += len(batch.names)
            failed.update(batch.errors)
            bar.update(len(batch.names))
        spool.seek(0)
        csv.field_size_limit(1 << 30)  # why: 128 KiB by default, and a photo may have thousands of labels
        columns = len(header) + (with_errors and bool(failed))
        csv.writer(text).writerows(row[:columns] for row in itertools.chain([[*header, "error"]], csv.reader(spool)))
        text.flush()
        text.detach()  # why: closing it would close the file before it is renamed
    failures = ""
    if failed:
        name, reason = next(iter(failed.items()))
        where = "see the column error" if with_errors else f"their cells are empty ({name}: {reason})"
        failures = f"; {len(failed)} could not be read, {where}"
    return f"{out}: {counted(done, 'image')}{_accuracy(head, known, correct) if known else ''}{failures}"


def _own_targets(head: Outputs, batch: PredictionBatch) -> torch.Tensor | None:
    """The targets of a batch in the order of the run's outputs; None if there are none, or of other labels."""
    if batch.targets is None or head.target.kind != "labels" or batch.classes == head.target.names:
        return batch.targets
    if {*batch.classes} != {*head.target.names}:
        return None
    return batch.targets[:, [batch.classes.index(name) for name in head.target.names]]


def _accuracy(head: Outputs, known: list[tuple[torch.Tensor, torch.Tensor]], correct: int) -> str:
    predictions, targets = (torch.cat(parts) for parts in zip(*known, strict=True))
    if head.target.kind == "class":
        return f", top-1 {100 * correct / len(targets):.3f} %"
    metrics = metrics_of(head, predictions, targets)
    shown = shown_metrics(head.target.kind, outputs=len(head.target), units=head.target.units)
    texts = [f"{metric.title} {metric.text(metrics[metric.key])}" for metric in shown]
    return f", {', '.join(texts)}"


def main(args: PredictOptions) -> None:
    """Run the command."""
    if args.src is not None and not args.src.strip():
        raise ResoluteError("SRC: got nothing, expected a folder of images, an image or a shard set; set SRC")
    _check_out(args.out, replaceable=not (args.format or args.sample))
    members, device = open_members(existing_run(args.run)), pick_device(args.device, threads=args.threads)
    head = members[0].head
    kind, classes = head.target.kind, head.target.names
    from_set = _is_set(args.src)
    for option, is_useless, why in (
        ("--threshold", args.threshold is not None and kind != "labels", "the run does not predict several labels"),
        ("--topk", args.topk is not None and kind != "class", "the run does not predict one class"),
        ("--topk", args.topk is not None and (args.format or args.sample), "the table has no ranks"),
        ("--format", args.format and kind != "class", "only predictions of one class have it"),
        ("--format", args.format and args.sample, "the sample has the columns"),
        ("--sample", args.sample and from_set, "SRC is a shard set, and a sample has ids of photos"),
        ("--fold", args.fold is not None and not from_set, "SRC is no shard set"),
    ):
        if is_useless:
            raise ResoluteError(f"{option}: without effect, {why}; omit it")
    threshold = HALF if args.threshold is None else args.threshold
    topk = min(args.topk or _TOPK, len(classes))
    table = wide_table(head) if args.format else default_table(head, topk=topk, threshold=threshold)
    note: str | None = None
    batches: Iterable[PredictionBatch]
    if from_set:
        sources, note = _sources(members, args)
        ensembles = [_ensemble(group, args, device) for group, _ in sources]
        batches = itertools.chain.from_iterable(
            predict_shards(ensemble, shards, split=args.split, threads=args.threads)
            for ensemble, (_, shards) in zip(ensembles, sources, strict=True)
        )
        total = sum(len(shards.splits[args.split]) for _, shards in sources)
        print(_predicted([shards for _, shards in sources], args.split, total))
    else:
        paths, root = find_images(Path(args.src or ""))
        photos = [(str(path.relative_to(root)), path) for path in paths]
        if args.sample is not None:
            sample = read_sample(args.sample)
            table, photos = submission(sample, head, threshold=threshold), match_photos(sample, paths, root)
        total = len(photos)
        ensembles = [_ensemble(members, args, device)]
        batches = predict_photos(ensembles[0], photos, threads=args.threads)
    what = f"{len(classes)} {'values' if kind == 'values' else 'classes'}"
    sizes = ", ".join(map(str, sorted({ensemble.res for ensemble in ensembles})))
    print(f"{len(members)} {'runs' if len(members) > 1 else 'run'}, {what}, {sizes} px, {device}")
    print(
        write_predictions(
            batches, args.out, table, head=head, total=total, from_set=from_set, with_errors=args.sample is None
        )
    )
    if note:
        print(note)


def _check_out(out: Path, *, replaceable: bool) -> None:
    """Refuse an existing file, unless it has a header of this command and so has the new one (`replaceable`).

    Other tables, of labels for example, may have the same header as a wide table or a submission.
    """
    check_output(out, setting="--out", suffixes=(".csv",))
    try:
        with out.open("rb") as file:
            cells = file.readline(1 << 16).decode(errors="replace").replace('"', "").split(",")
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResoluteError(f"--out: {out} cannot be read ({error.strerror}); choose another") from None
    if not replaceable or not any(cell == "class1" or cell.split()[:1] == ["predicted"] for cell in cells):
        raise ResoluteError(f"--out: {out} exists, expected a new name; choose another")


def _ensemble(members: list[SavedRun], args: PredictOptions, device: torch.device) -> Ensemble:
    return Ensemble(members, weights=args.weights, flip=args.flip, device=device, res=args.res)


def _is_set(source: str | None) -> bool:
    """Whether `source` is a shard set, which a URL always is; None: the run's own set."""
    return source is None or is_url(source) or (Path(source) / "manifest.json").exists()


def _predicted(sets: Sequence[ShardSet], split: str, total: int) -> str:
    """The line that says which photos of a set are predicted, and which are not."""
    others = [f"{len(part)} of {name} (--split {name})" for name, part in sets[0].splits.items() if name != split]
    # why not of several folds: each of them holds out photos of the others
    rest = f", not the {' and '.join(others)}" if len(sets) == 1 and others else ""
    is_fold = sets[0].stored_split(split) != split
    part = f"the {'folds' if len(sets) > 1 else 'fold'} held out" if is_fold else split
    return f"{sets[0].root}: predicting {counted(total, 'photo')} of {part}{rest}"


def _sources(members: list[SavedRun], args: PredictOptions) -> tuple[list[tuple[list[SavedRun], ShardSet]], str | None]:
    """(runs, shard set to predict) pairs, and a note for the user."""
    first = open_eval_set(args.src, members[0], fold=args.fold)
    if args.split not in first.splits:
        expected = ", ".join(first.splits)
        raise ResoluteError(f"{first.root}: got split {args.split}, expected one of {expected}; choose another")
    folds = {member.recipe.data.fold: member for member in members if member.recipe.data.fold is not None}
    are_of_one_split = len({member.recipe.data.folds for member in members}) == 1
    if len(members) == len(folds) > 1 and are_of_one_split and args.split == "val":
        sets = {fold: open_eval_set(args.src, member) for fold, member in folds.items()}
        if not any(training_overlap(folds[fold], shards, split="val", fold=None) for fold, shards in sets.items()):
            if args.fold is not None and args.fold not in sets:
                raise ResoluteError(f"--fold: got {args.fold}, expected one of {sorted(sets)}; choose one")
            chosen = sorted(fold for fold in sets if args.fold in (None, fold))
            return (
                [([folds[fold]], sets[fold]) for fold in chosen],
                f"out of fold: each photo of fold {', '.join(map(str, chosen))} by the run that held it out",
            )
    notes = (training_overlap(member, first, split=args.split, fold=args.fold) for member in members)
    note = next(filter(None, notes), None)
    return [(members, first)], note and f"note: {note}"
