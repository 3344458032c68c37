"""`resolute predict RUN --src photos --out pred.csv`: classes, labels or values of images, from a run or folds.

Image files are selected and decoded exactly as by `prep`. The predictions of several folds are averaged, except on the
shards that they were trained on: there each photo is predicted by the fold that held it out (out of fold).
"""

from __future__ import annotations

import csv
import io
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from resolute.pipeline.plan.crops import centre_crops
from resolute.pipeline.storage.base import is_url
from resolute.prep.convert.decode import Reject, decode
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.image_folder import walk
from resolute.prep.sources.image_ref import MISSING, PLAIN, ByteRange
from resolute.prep.sources.names import SUFFIXES, is_image
from resolute.train.devices.device import pick_device
from resolute.train.logs.score import METRICS
from resolute.train.loop import eval_logits
from resolute.train.model.head import Head
from resolute.train.options import PredictOptions
from resolute.train.run_folder import existing_run
from resolute.train.validation import metrics_of

from .saved_run import SavedRun, Weights, open_eval_set, open_saved_run, training_overlap, validation_loader

__all__ = ["PredictionBatch", "main", "predict_folder", "predict_shards", "preprocess"]

_AHEAD = 2  # batches decoded while the model runs
# starts of the files that this command writes: of classes, labels and values
_HEADERS = (b"image,split,", b"image,label,class1,prob1", b"image,labels,predicted", b"image,predicted ",
            b'image,"predicted ')  # fmt: skip
_TOPK = 5
_HALF = 0.5  # probability from which on a label is predicted


@dataclass(frozen=True, kw_only=True)
class PredictionBatch:
    """Predictions of a batch, (N, C or D) float32 on the CPU, see `Head.predictions`, and `targets` if known.

    `targets`: as `Batch.targets`, on the CPU; `classes`: their names, which may differ from the run's; `split`: that of
    the set, "" for photos. `errors` maps
    the names of images that could not be read to the reason; their rows are zero.
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
                raise ResoluteError(f"{member.path}: classes or values, mean, std, margin or folds differ from "
                                    f"{self.first.path}, expected folds of the same recipe and set; predict with one "
                                    "run")  # fmt: skip
            if res is None and member.res != self.first.res:
                raise ResoluteError(f"{member.path}: validated at {member.res} px, expected {self.first.res} px as "
                                    f"{self.first.path}; choose the resolution with --res")  # fmt: skip
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

        They are the mean over the runs of `Head.predictions`, each with its own scale of values.
        """
        precision = self.first.recipe.precision
        predictions = [head.predictions(eval_logits(network, images, precision, flip=self.flip))
                       for head, network in zip(self._heads, self._networks, strict=True)]  # fmt: skip
        return torch.stack(predictions).mean(0).cpu()


def preprocess(path: Path, *, res: int, margin: float, crop_pct: float | None) -> NDArray[np.uint8]:
    """(res, res, 3) RGB of an image file: decoded and shrunk as by prep, then cropped and resized as in validation.

    `margin`: stored short side / res. Raises `Reject` for images that prep would reject, `StorageError` if the file
    cannot be read.
    """
    is_broken_link = path.is_symlink() and not path.exists()
    image = Image.fromarray(decode(fetch(ByteRange(str(path), packed=MISSING if is_broken_link else PLAIN))))
    short = round(res * margin)
    scale = short / min(image.size)
    if scale < 1:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y, width, height = centre_crops(np.array([image.size]), crop_pct or res / short)[0].tolist()
    crop = image.crop((x, y, x + width, y + height))
    return np.asarray(crop.resize((res, res), Image.Resampling.BILINEAR))


def predict_folder(ensemble: Ensemble, paths: list[Path], root: Path, *, threads: int) -> Iterator[PredictionBatch]:
    """Predict image files in order; unreadable ones are reported in `errors`. Names are relative to `root`."""
    saved, res = ensemble.first, ensemble.res
    data, size = saved.recipe.data, saved.recipe.eval.batch_size
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (data.mean, data.std))

    def load(path: Path) -> NDArray[np.uint8] | str:
        try:
            return preprocess(path, res=res, margin=saved.margin, crop_pct=saved.recipe.eval.crop_pct)
        except Reject as reason:
            return str(reason)

    def batch(part: list[Path], futures: list[Future[NDArray[np.uint8] | str]]) -> PredictionBatch:
        names, results = [str(path.relative_to(root)) for path in part], [future.result() for future in futures]
        errors = {name: result for name, result in zip(names, results, strict=True) if isinstance(result, str)}
        pixels = [np.zeros((res, res, 3), np.uint8) if isinstance(result, str) else result for result in results]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).sub(mean).div(std)
        predictions = ensemble(images.to(ensemble.device, memory_format=torch.channels_last))
        predictions[[name in errors for name in names]] = 0
        return PredictionBatch(names=names, predictions=predictions, targets=None, errors=errors)

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[list[Path], list[Future[NDArray[np.uint8] | str]]]] = deque()
        for start in range(0, len(paths), size):
            part = paths[start : start + size]
            waiting.append((part, [pool.submit(load, path) for path in part]))
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
            yield PredictionBatch(names=[names[row] for row in batch.spec.ids], predictions=ensemble(batch.images),
                                  targets=batch.targets.cpu(), classes=shards.classes, split=stored,
                                  errors={})  # fmt: skip


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
        names, ignored, root = [source.name] if is_image(source.name) else [], Counter(other=1), source.parent
    else:
        ignored, root = Counter[str](), source
        files = [name for name, entry in walk(str(source), ignored) if entry.kind == "file"]
        names = [name for name in files if is_image(name)]
        ignored["other"] = len(files) - len(names)
    if not names:
        got = f"{ignored['other']} files of other kinds" if ignored["other"] else "nothing"
        raise ResoluteError(f"{source}: no images, got {got}, expected {', '.join(sorted(SUFFIXES))} files, a folder "
                            "of them, or a shard set; correct SRC")  # fmt: skip
    return [root / name for name in names], root


class _Table:
    """Columns of the CSV file by kind of target: `heads`, and the cells of `row`."""

    def __init__(self, head: Head, *, topk: int, threshold: float) -> None:
        self.head, self.topk, self.threshold = head, topk, threshold
        self.names = head.target.names

    @property
    def heads(self) -> list[str]:
        if self.head.target.kind == "class":
            return ["label", *(f"{what}{k}" for k in range(1, self.topk + 1) for what in ("class", "prob"))]
        if self.head.target.kind == "labels":
            return ["labels", "predicted", *self.names]
        return [f"{what} {name}" for what in ("predicted", "true") for name in self.names]

    def row(self, prediction: torch.Tensor, target: torch.Tensor | None, classes: tuple[str, ...]) -> list[str]:
        """`prediction` (C or D,); `target`: its row of `Batch.targets`, of classes with the names `classes`."""
        if self.head.target.kind == "class":
            values, indices = prediction.topk(self.topk)
            pairs = zip(indices.tolist(), values.tolist(), strict=True)
            best = [text for index, value in pairs for text in (self.names[index], f"{value:.6f}")]
            return ["" if target is None else classes[int(target)], *best]
        if self.head.target.kind == "labels":
            labels = "" if target is None else _joined(classes, target > _HALF)
            predicted = _joined(self.names, prediction >= self.threshold)
            return [labels, predicted, *(f"{probability:.6f}" for probability in prediction.tolist())]
        true = [""] * len(self.names) if target is None else [f"{value:.7g}" for value in target.tolist()]
        return [*(f"{value:.7g}" for value in prediction.tolist()), *true]

    def failed(self) -> list[str]:
        """The row of an image that could not be read."""
        return [""] * len(self.heads)


def _joined(names: Sequence[str], chosen: torch.Tensor) -> str:
    """The chosen names, as in a table of labels: separated by |."""
    return "|".join(name for name, is_chosen in zip(names, chosen.tolist(), strict=True) if is_chosen)


def write_predictions(
    batches: Iterable[PredictionBatch], out: Path, *, head: Head, topk: int, total: int, threshold: float = _HALF,
    accuracy: bool = True, splits: bool = False,
) -> str:  # fmt: skip
    """Write the predictions to `out` as CSV, atomically; returns a one-line summary, with the metrics if `accuracy`.

    `topk`: classes per row. `threshold`: probability from which on a label is predicted. `total`: number of images for
    the progress bar. `splits`: with a column for the split of each image.
    """
    done, failed, correct = 0, 0, 0
    known: list[tuple[torch.Tensor, torch.Tensor]] = []
    table = _Table(head, topk=topk, threshold=threshold)
    with output_file(out) as file, tqdm(total=total, unit="image", leave=False, disable=None) as bar:
        text = io.TextIOWrapper(file, newline="", encoding="utf-8", errors="surrogateescape")
        rows = csv.writer(text)
        rows.writerow(["image", *["split"] * splits, *table.heads, "error"])
        for batch in batches:
            for i, name in enumerate(batch.names):
                error = batch.errors.get(name, "")
                target = None if batch.targets is None else batch.targets[i]
                cells = table.failed() if error else table.row(batch.predictions[i], target, batch.classes)
                rows.writerow([name, *[batch.split] * splits, *cells, error])
                correct += head.target.kind == "class" and cells[0] != "" and cells[0] == cells[1]
            if batch.targets is not None:
                known.append((batch.predictions, batch.targets))
            done, failed = done + len(batch.names), failed + len(batch.errors)
            bar.update(len(batch.names))
        text.flush()
        text.detach()  # why: closing it would close the file before it is renamed
    failures = f"; {failed} could not be read, see the column error" if failed else ""
    return f"{out}: {counted(done, 'image')}{_accuracy(head, known, correct) if known and accuracy else ''}{failures}"


def _accuracy(head: Head, known: list[tuple[torch.Tensor, torch.Tensor]], correct: int) -> str:
    predictions, targets = (torch.cat(parts) for parts in zip(*known, strict=True))
    if head.target.kind == "class":
        return f", top-1 {100 * correct / len(targets):.3f} %"
    if predictions.shape != targets.shape:  # other classes
        return ""
    metrics = metrics_of(head, predictions, targets)
    texts = [f"{metric.title} {metric.text(metrics[metric.key])}" for metric in METRICS[head.target.kind]]
    return f", {', '.join(texts)}"


def main(args: PredictOptions) -> None:
    """Run the command."""
    if args.src is not None and not args.src.strip():
        raise ResoluteError("SRC: got nothing, expected a folder of images, an image or a shard set; set SRC")
    _check_out(args.out)
    members, device = open_members(existing_run(args.run)), pick_device(args.device, threads=args.threads)
    head = members[0].head
    kind, classes = head.target.kind, head.target.names
    if args.threshold is not None and kind != "labels":
        raise ResoluteError("--threshold: without effect, the run does not predict several labels; omit it")
    if args.topk is not None and kind != "class":
        raise ResoluteError("--topk: without effect, the run does not predict one class; omit it")
    note, accuracy = "", True
    batches: Iterable[PredictionBatch]
    if _is_set(args.src):
        sources, note, accuracy = _sources(members, args)
        ensembles = [_ensemble(group, args, device) for group, _ in sources]
        batches = itertools.chain.from_iterable(
            predict_shards(ensemble, shards, split=args.split, threads=args.threads)
            for ensemble, (_, shards) in zip(ensembles, sources, strict=True)
        )
        total = sum(len(shards.splits[args.split]) for _, shards in sources)
        print(_predicted([shards for _, shards in sources], args.split, total))
    else:
        if args.fold is not None:
            raise ResoluteError(f"--fold: got {args.fold} for photos, expected a shard set; omit it")
        paths, root = find_images(Path(args.src or ""))
        total = len(paths)
        ensembles = [_ensemble(members, args, device)]
        batches = predict_folder(ensembles[0], paths, root, threads=args.threads)
    what = f"{len(classes)} {'values' if kind == 'values' else 'classes'}"
    sizes = ", ".join(map(str, sorted({ensemble.res for ensemble in ensembles})))
    print(f"{len(members)} {'runs' if len(members) > 1 else 'run'}, {what}, {sizes} px, {device}")
    topk = min(args.topk or _TOPK, len(classes))
    threshold = _HALF if args.threshold is None else args.threshold
    print(write_predictions(batches, args.out, head=head, topk=topk, total=total, threshold=threshold,
                            accuracy=accuracy, splits=_is_set(args.src)))  # fmt: skip
    if note:
        print(note)


def _check_out(out: Path) -> None:
    check_output(out, setting="--out", suffixes=(".csv",))
    try:
        with out.open("rb") as file:
            is_other = not file.read(max(map(len, _HEADERS))).startswith(_HEADERS)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResoluteError(f"--out: {out} cannot be read ({error.strerror}); choose another") from None
    if is_other:
        raise ResoluteError(f"--out: {out} exists and holds no predictions, expected a new name; choose another")


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


def _sources(
    members: list[SavedRun], args: PredictOptions
) -> tuple[list[tuple[list[SavedRun], ShardSet]], str, bool]:
    """(runs, shard set to predict) pairs, a note for the user, and whether the accuracy is meaningful.

    The accuracy is not printed if ensemble members were trained on the photos.
    """

    def opened(member: SavedRun, fold: int | None) -> ShardSet:
        return open_eval_set(args.src, member, fold=fold)

    folds = {member.recipe.data.fold: member for member in members if member.recipe.data.fold is not None}
    are_of_one_split = len({member.recipe.data.folds for member in members}) == 1
    first = opened(members[0], args.fold)
    if args.split not in first.splits:
        expected = ", ".join(first.splits)
        raise ResoluteError(f"{first.root}: got split {args.split}, expected one of {expected}; choose another")
    if len(members) == len(folds) > 1 and are_of_one_split and args.split == "val":
        sets = {fold: opened(member, None) for fold, member in folds.items()}
        if not any(training_overlap(folds[fold], shards, split="val", fold=None) for fold, shards in sets.items()):
            if args.fold is not None and args.fold not in sets:
                raise ResoluteError(f"--fold: got {args.fold}, expected one of {sorted(sets)}; choose one")
            chosen = sorted(fold for fold in sets if args.fold in (None, fold))
            return ([([folds[fold]], sets[fold]) for fold in chosen],
                    f"out of fold: each photo of fold {', '.join(map(str, chosen))} by the run that held it out",
                    True)  # fmt: skip
    overlaps = [training_overlap(member, first, split=args.split, fold=args.fold) for member in members]
    certain = next((overlap for overlap in overlaps if overlap and overlap.certain), None)
    overlap = certain or next(filter(None, overlaps), None)
    if overlap is None:
        return [(members, first)], "", True
    if overlap.certain and len(members) > 1:
        return [(members, first)], f"no accuracy: {overlap.text}", False
    return [(members, first)], f"note: {overlap.text}", True
