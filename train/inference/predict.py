"""`python -m train predict RUN --src photos --out pred.csv`: classes and probabilities, from a run or folds.

Image files are selected and decoded exactly as by `prep`. The probabilities of several folds are averaged, except on
the shards that they were trained on: there each photo is predicted by the fold that held it out (out of fold).
"""

from __future__ import annotations

import argparse
import csv
import functools
import io
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn
from tqdm import tqdm

from pipeline.dataset.open_dataset import is_foreign
from pipeline.dataset.shard_set import ShardSet, key_name
from pipeline.errors import ResoluteError, StorageError, is_unavailable
from pipeline.plan.crops import centre_crops
from pipeline.storage.atomic_file import check_output, output_file
from pipeline.storage.base import is_url
from prep.convert.decode import MAX_BYTES, Reject, decode
from prep.sources.image_folder import walk
from prep.sources.names import SUFFIXES, is_image
from train.device import pick_device
from train.loop import eval_logits
from train.run_folder import existing_run

from .saved_run import (
    SavedRun,
    Weights,
    open_eval_set,
    open_saved_run,
    training_overlap,
    validation_loader,
)

__all__ = ["PredictionBatch", "main", "predict_folder", "predict_shards", "preprocess"]

_AHEAD = 2  # batches decoded while the model runs
_HEADER = b"image,label,class1,prob1"  # start of every file that this command writes


@dataclass(frozen=True, kw_only=True)
class PredictionBatch:
    """Predictions of a batch: `names`, `probabilities` (N, classes) float32 on the CPU, and `labels` if known.

    `errors` maps the names of images that could not be read to the reason; their rows are zero.
    """

    names: list[str]
    probabilities: torch.Tensor
    labels: list[str] | None
    errors: dict[str, str]


class Ensemble:
    """Averages the probabilities of one or more runs."""

    def __init__(
        self, members: list[SavedRun], *, weights: Weights | None, flip: bool, device: torch.device, res: int
    ) -> None:
        """`res`: side of the input images, px. Raises `ResoluteError` if `members` expect different images."""
        self.first, self.device = members[0], device
        for member in members[1:]:
            if member.ensemble_key != self.first.ensemble_key:
                raise ResoluteError(f"{member.path}: classes, res, mean, std or margin differ from {self.first.path}, "
                                    "expected folds of the same recipe and set; predict with one run")  # fmt: skip
        self.flip = flip or self.first.recipe.eval.flip
        self._networks: list[nn.Module] = []
        for member in members:
            which = weights or member.best_weights
            if which not in member.weights:
                raise ResoluteError(f"--weights: got ema, but {member.path} has no averaged weights; omit it")
            self._networks.append(member.network(which, device, resolutions=[res]))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Probabilities (N, classes) float32 on the CPU for normalised images (N, 3, res, res) on the device.

        Rows sum to 1 for runs trained with cross-entropy; with binary cross-entropy the classes are independent.
        """
        bce = self.first.recipe.loss.kind == "bce"
        activation = torch.sigmoid if bce else functools.partial(torch.softmax, dim=1)
        precision = self.first.recipe.precision
        outputs = [eval_logits(network, images, precision, flip=self.flip) for network in self._networks]
        return torch.stack([activation(output) for output in outputs]).mean(0).cpu()


def preprocess(
    path: Path, *, res: int, margin: float, crop_pct: float | None, single_resolution: bool = False
) -> NDArray[np.uint8]:
    """(res, res, 3) RGB of an image file: decoded and shrunk as by prep, then cropped and resized as in validation.

    `margin`: stored short side / res. `single_resolution`: do not shrink before the crop, for runs trained on plain
    tars. Raises `Reject` for images that prep would reject, `StorageError` if the file cannot be read.
    """
    image = Image.fromarray(decode(_content(path)))
    short = round(res * margin)
    scale = short / min(image.size)
    if scale < 1 and not single_resolution:
        image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    x, y, width, height = centre_crops(np.array([image.size]), crop_pct or res / short)[0].tolist()
    crop = image.crop((x, y, x + width, y + height))
    return np.asarray(crop.resize((res, res), Image.Resampling.BILINEAR))


def _content(path: Path) -> bytes:
    try:
        if path.is_symlink() and not path.exists():
            raise Reject("a broken symbolic link")
        nbytes = path.stat().st_size
        if nbytes > MAX_BYTES:
            raise Reject(f"too many bytes: {nbytes}")
        return path.read_bytes()
    except OSError as error:
        if not is_unavailable(error):
            raise Reject(f"cannot be read: {error.strerror}") from None
        raise StorageError(
            f"{path}: cannot be read, got '{error.strerror}', expected a readable image; "
            "check the disk and its permissions, then run the same command again"
        ) from None


def predict_folder(
    ensemble: Ensemble, paths: list[Path], root: Path, *, res: int, threads: int
) -> Iterator[PredictionBatch]:
    """Predict image files in order; unreadable ones are reported in `errors`. Names are relative to `root`."""
    saved = ensemble.first
    data, size = saved.recipe.data, saved.recipe.eval.batch_size
    mean, std = (torch.tensor(values).view(3, 1, 1) * 255 for values in (data.mean, data.std))

    def load(path: Path) -> NDArray[np.uint8] | str:
        try:
            return preprocess(path, res=res, margin=saved.margin, crop_pct=saved.recipe.eval.crop_pct,
                            single_resolution=saved.single_resolution)  # fmt: skip
        except Reject as reason:
            return str(reason)

    def batch(part: list[Path], futures: list[Future[NDArray[np.uint8] | str]]) -> PredictionBatch:
        names, results = [str(path.relative_to(root)) for path in part], [future.result() for future in futures]
        errors = {name: result for name, result in zip(names, results, strict=True) if isinstance(result, str)}
        pixels = [np.zeros((res, res, 3), np.uint8) if isinstance(result, str) else result for result in results]
        images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).sub(mean).div(std)
        probabilities = ensemble(images.to(ensemble.device, memory_format=torch.channels_last))
        probabilities[[name in errors for name in names]] = 0
        return PredictionBatch(names=names, probabilities=probabilities, labels=None, errors=errors)

    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[list[Path], list[Future[NDArray[np.uint8] | str]]]] = deque()
        for start in range(0, len(paths), size):
            part = paths[start : start + size]
            waiting.append((part, [pool.submit(load, path) for path in part]))
            if len(waiting) > _AHEAD:
                yield batch(*waiting.popleft())
        while waiting:
            yield batch(*waiting.popleft())


def predict_shards(
    ensemble: Ensemble, shards: ShardSet, *, res: int, split: str, threads: int
) -> Iterator[PredictionBatch]:
    """Predict all samples of a split through the loader; names are the samples' keys, labels are class names."""
    with validation_loader(
        ensemble.first, shards, [res], split=split, device=ensemble.device, threads=threads
    ) as loader:
        for batch in loader:
            keys = shards.splits[split].samples[batch.spec.ids]["key"].tolist()
            yield PredictionBatch(names=[key_name(key) for key in keys], probabilities=ensemble(batch.images),
                            labels=[shards.classes[label] for label in batch.labels.tolist()], errors={})  # fmt: skip


def open_members(run: Path) -> list[SavedRun]:
    """The run at `run` (a folder or a .pt file), or all folds in it."""
    folds = sorted(run.glob("fold-*"), key=lambda path: (len(path.name), path.name))
    is_single = run.is_file() or not folds or any((run / name).exists() for name in ("best.pt", "last.pt"))
    return [open_saved_run(path) for path in ([run] if is_single else folds)]


def find_images(source: Path) -> tuple[list[Path], Path]:
    """The image files at `source`, a folder or a single file, as prep selects them, and the folder names relate to.

    Raises `ResoluteError` if there are none or a folder cannot be listed.
    """
    if source.is_file():
        names, ignored, root = [source.name] if is_image(source.name) else [], Counter(other=1), source.parent
    else:
        ignored, root = Counter[str](), source
        files = [name for name, entry in walk(str(source), ignored) if entry.kind == "file"] if source.exists() else []
        names = [name for name in files if is_image(name)]
        ignored["other"] = len(files) - len(names)
    if not names:
        got = f"{ignored['other']} files of other kinds" if ignored["other"] else "nothing"
        raise ResoluteError(f"{source}: no images, got {got}, expected {', '.join(sorted(SUFFIXES))} files, a folder "
                            "of them, or a shard set; correct SRC")  # fmt: skip
    return [root / name for name in names], root


def write_predictions(
    batches: Iterable[PredictionBatch], out: Path, *, classes: list[str], topk: int, total: int, accuracy: bool = True
) -> str:
    """Write the predictions to `out` as CSV, atomically; returns a one-line summary, with top-1 if `accuracy`.

    `topk`: classes per row. `total`: number of images for the progress bar, 0 if unknown.
    """
    done, failed, correct, labelled = 0, 0, 0, 0
    with output_file(out) as file, tqdm(total=total or None, unit="image", leave=False, disable=None) as bar:
        text = io.TextIOWrapper(file, newline="", encoding="utf-8", errors="surrogateescape")
        rows = csv.writer(text)
        columns = [f"{what}{k}" for k in range(1, topk + 1) for what in ("class", "prob")]
        rows.writerow(["image", "label", *columns, "error"])
        for batch in batches:
            values, indices = batch.probabilities.topk(topk, dim=1)
            for i, name in enumerate(batch.names):
                label = "" if batch.labels is None else batch.labels[i]
                pairs = zip(indices[i].tolist(), values[i].tolist(), strict=True)
                best = [text for index, value in pairs for text in (classes[index], f"{value:.6f}")]
                error = batch.errors.get(name, "")
                rows.writerow([name, label, *([""] * len(best) if error else best), error])
                correct += label == classes[indices[i, 0]]
            labelled += len(batch.labels or [])
            done, failed = done + len(batch.names), failed + len(batch.errors)
            bar.update(len(batch.names))
        text.flush()
        text.detach()  # why: closing it would close the file before it is renamed
    failures = f"; {failed} could not be read, see the column error" if failed else ""
    top1 = f", top-1 {100 * correct / labelled:.3f} %" if labelled and accuracy else ""
    return f"{out}: {done} images{top1}{failures}"


def main(args: argparse.Namespace) -> None:
    """Run the command."""
    if not args.src.strip():
        raise ResoluteError("SRC: got nothing, expected a folder of images, an image or a shard set; set SRC")
    _check_out(args.out)
    members, device = open_members(existing_run(args.run)), pick_device(args.device, threads=args.threads)
    classes, res = members[0].classes, args.res or members[0].res
    note, accuracy, total = "", True, 0
    batches: Iterable[PredictionBatch]
    if _is_set(args.src):
        sources, note, accuracy = _sources(members, args)
        passes = [(_ensemble(group, args, res, device), shards) for group, shards in sources]
        batches = itertools.chain.from_iterable(
            predict_shards(ensemble, shards, res=res, split=args.split, threads=args.threads)
            for ensemble, shards in passes
        )
    else:
        if args.fold is not None:
            raise ResoluteError(f"--fold: got {args.fold} for photos, expected a shard set with folds; omit it")
        paths, root = find_images(Path(args.src))
        total = len(paths)
        batches = predict_folder(_ensemble(members, args, res, device), paths, root, res=res, threads=args.threads)
    print(f"{len(members)} {'runs' if len(members) > 1 else 'run'}, {len(classes)} classes, {res} px, {device}")
    topk = min(args.topk, len(classes))
    print(write_predictions(batches, args.out, classes=classes, topk=topk, total=total, accuracy=accuracy))
    if note:
        print(note)


def _check_out(out: Path) -> None:
    check_output(out, setting="--out", suffixes=(".csv",))
    try:
        with out.open("rb") as file:
            is_other = file.read(len(_HEADER)) != _HEADER
    except FileNotFoundError:
        return
    except OSError as error:
        raise ResoluteError(f"--out: {out} cannot be read ({error.strerror}); choose another") from None
    if is_other:
        raise ResoluteError(f"--out: {out} exists and holds no predictions, expected a new name; choose another")


def _ensemble(members: list[SavedRun], args: argparse.Namespace, res: int, device: torch.device) -> Ensemble:
    return Ensemble(members, weights=args.weights, flip=args.flip, device=device, res=res)


def _is_set(source: str) -> bool:
    """Whether `source` is a shard set or plain tars; a folder that contains image files counts as neither."""
    if is_url(source) or (Path(source) / "manifest.json").exists():
        return True
    if not is_foreign(source):
        return False
    return not Path(source).is_dir() or not any(is_image(name) for name, _ in walk(source, Counter()))


def _sources(
    members: list[SavedRun], args: argparse.Namespace
) -> tuple[list[tuple[list[SavedRun], ShardSet]], str, bool]:
    """Which runs predict which shard set, a note for the user, and whether the accuracy is meaningful.

    The accuracy is not printed if ensemble members were trained on the photos.
    """

    def opened(member: SavedRun, fold: int | None) -> ShardSet:
        return open_eval_set(args.src, member, fold=fold, val=args.val, classes=args.classes)

    folds = {member.recipe.data.fold: member for member in members if member.recipe.data.fold is not None}
    first = opened(members[0], args.fold)
    if len(members) == len(folds) > 1 and args.split == "val":
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
