"""Divides photos into the parts train, tune, choose and report, and keeps the reported part unseen until the end.

    python -m resolute.benchmarks.training.split --src photos [more_photos …] --out FOLDER

tune     learning rates and settings are tuned on it
choose   decides between the tuned candidates
report   read once, for the published figures

FOLDER holds train.csv, tune.csv, choose.csv, report.csv, and rest.csv (all but report, to train on for the report):
lists that prep reads (path, label), with the first 16 hex digits of each file's SHA-256. A photo's part is decided by a
salted hash of its name CLASS/NAME, within each class: the lowest go to report, the next to choose, then to tune, so
that every part has its share of each class to within rounding. If FOLDER exists, its photos keep their parts, and new
ones fill the parts up to their shares. Byte-identical photos get the part of the first of them.

The benchmark opens the sets made of these lists with `Parts`, which refuses a set that holds photos of a later part,
and logs every run in FOLDER/tuning.jsonl.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import csv
import hashlib
import io
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resolute.benchmarks.cli import Parser, command, text_table
from resolute.errors import ResoluteError
from resolute.files import atomic_write, write_errors
from resolute.prep.report.browse import input_files, open_set
from resolute.prep.sources.folders.image_folder import ImageFolderSource
from resolute.prep.storage.output import open_output

__all__ = ["PARTS", "Parts", "Photo", "divide", "main", "source_digests"]

PARTS = ("train", "tune", "choose", "report")  # a set may train on the parts before the one it is validated on
_SETTINGS, _LOG = "split.json", "tuning.jsonl"
_DIGEST_DIGITS = 16  # hex digits; prep keeps as many of each input file's SHA-256
_MISSING = 0.01  # largest fraction of a part that a set may lack: photos that prep rejected


class Photo(NamedTuple):
    name: str  # CLASS/NAME, below its source
    path: Path
    digest: str

    @property
    def label(self) -> str:
        return self.name.partition("/")[0]


def divide(
    photos: Iterable[Photo], *, shares: Mapping[str, float], salt: str, known: Mapping[str, str] | None = None
) -> dict[str, list[Photo]]:
    """{part: photos by name}. `shares`: of all parts but train, 0 to 1. `known`: {digest: part} of an earlier division.

    Photos of the same digest get the same part.
    """

    def rank(photo: Photo) -> str:
        return hashlib.sha256(f"{salt}\0{photo.name}".encode(errors="surrogateescape")).hexdigest() + photo.digest

    copies: dict[str, list[Photo]] = defaultdict(list)
    for photo in sorted(photos, key=rank):
        copies[photo.digest].append(photo)
    classes: dict[str, list[str]] = defaultdict(list)
    for digest, same in copies.items():
        classes[same[0].label].append(digest)
    parts: dict[str, list[Photo]] = {part: [] for part in PARTS}
    part_of = dict(known or {})
    for digests in classes.values():
        counts = Counter(part_of[digest] for digest in digests if digest in part_of)
        new = iter([digest for digest in digests if digest not in part_of])
        for part in reversed(PARTS[1:]):
            wanted = round(shares[part] * len(digests)) - counts[part]
            part_of |= {digest: part for _, digest in zip(range(wanted), new, strict=False)}
        part_of |= dict.fromkeys(new, "train")
    for digest, same in copies.items():
        parts[part_of[digest]] += same
    return {part: sorted(each) for part, each in parts.items()}


@dataclass(frozen=True)
class Parts:
    """An existing division in `folder`. `digests`: {part: those of its photos}, as in SOURCE records."""

    folder: Path
    salt: str
    shares: Mapping[str, float]
    digests: Mapping[str, frozenset[int]]

    @classmethod
    def open(cls, folder: Path) -> Parts:
        """Raises `ResoluteError` if the folder does not hold a division."""
        try:
            settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
            digests = {part: frozenset(map(_number, _read_list(folder / f"{part}.csv"))) for part in PARTS}
            return cls(folder, settings["salt"], settings["shares"], digests)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ResoluteError(
                f"{folder}: cannot be read, got {error!r}, expected the folder of a division; make it with "
                "`python -m resolute.benchmarks.training.split`"
            ) from None

    def check(self, root: str | Path, part: str) -> None:
        """Raise `ResoluteError` unless the set at `root` validates on `part` alone and trains on earlier parts only."""
        held_out, training = (frozenset(source_digests(root, split).tolist()) for split in ("val", "train"))
        earlier = PARTS[: PARTS.index(part)]
        rest = "rest" if part == "report" else "train"  # the list of training photos
        for split, got, allowed, made_of in (("val", held_out, (part,), part), ("train", training, earlier, rest)):
            for other in (each for each in reversed(PARTS) if each not in allowed):
                if seen := got & self.digests[other]:
                    raise ResoluteError(
                        f"{root}: {split} holds {len(seen)} photos of the part {other}, expected only "
                        f"{' and '.join(allowed)}; make the set from {self.folder}/{made_of}.csv"
                    )
            if unknown := len(got.difference(*self.digests.values())):
                raise ResoluteError(
                    f"{root}: {split} holds {unknown} photos that {self.folder} does not divide, expected only those "
                    f"of {' and '.join(allowed)}; repeat the division with all photos"
                )
        missing = len(self.digests[part] - held_out)
        if missing > _MISSING * len(self.digests[part]):
            raise ResoluteError(
                f"{root}: val lacks {missing} of the {len(self.digests[part])} photos of the part {part}, expected at "
                f"most {_MISSING:.0%}; make the set from {self.folder}/{part}.csv"
            )

    def log(self, **run: Any) -> None:
        """Append a run to the tuning log, durably. Raises `ResoluteError` if it cannot be written."""
        with write_errors(self.folder / _LOG), (self.folder / _LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(run) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def runs(self) -> dict[str, int]:
        """{part: runs in the tuning log}."""
        path = self.folder / _LOG
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        counts = Counter(json.loads(line)["part"] for line in lines)
        return {part: counts[part] for part in PARTS[1:]}


def source_digests(root: str | Path, split: str) -> NDArray[np.uint64]:
    """(n,) digests of the input files of a split's samples, of all generations."""
    with open_set(open_output(str(root))) as shards:
        return np.array(input_files(shards, split)["digest"])


def _number(digest: str) -> int:
    return int.from_bytes(bytes.fromhex(digest), "little")


def _read_list(path: Path) -> list[str]:
    with path.open(newline="", encoding="utf-8", errors="surrogateescape") as file:
        return [row["sha256"] for row in csv.DictReader(file)]


def _scan(sources: Sequence[Path]) -> list[Photo]:
    photos = []
    for source in sources:
        for image in ImageFolderSource(str(source)):
            path = source / image.name
            digest = hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGEST_DIGITS]
            photos.append(Photo(image.name, path, digest))
    if not photos:
        raise ResoluteError(f"--src: got {sources[0]} without photos, expected class folders of photos; correct it")
    return photos


def _write_list(path: Path, photos: Iterable[Photo]) -> None:
    text = io.StringIO(newline="")
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["path", "label", "sha256"])
    # why relative: the photos and the lists can be moved together
    rows.writerows((os.path.relpath(photo.path, path.parent), photo.label, photo.digest) for photo in photos)
    atomic_write(path, text.getvalue().encode(errors="surrogateescape"))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m resolute.benchmarks.training.split",
        description="Divide photos into the parts train, tune, choose and report, by a salted hash of their names.",
        epilog="Again with more photos: those of earlier calls keep their parts. Exit status: 0 done, 2 for a problem "
        "that the one line on stderr explains.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--src", type=Path, nargs="+", required=True, metavar="DIR", help="folders of class folders of photos")
    add("--out", type=Path, required=True, metavar="FOLDER", help="folder for the lists and the tuning log")
    add(
        "--shares",
        default="0.1,0.1,0.1",
        metavar="X,X,X",
        help="fractions of each class to tune on, choose on and report (default: %(default)s)",
    )
    add("--salt", default="0", metavar="TEXT", help="another text makes another division (default: %(default)s)")
    return parser


def _shares(text: str) -> dict[str, float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = []
    if len(values) != len(PARTS) - 1 or not all(0 < value < 1 for value in values) or sum(values) >= 1:
        raise ResoluteError(f"--shares: got {text}, expected three fractions, in all below 1; write 0.1,0.1,0.1")
    return dict(zip(PARTS[1:], values, strict=True))


def _run(args: argparse.Namespace) -> None:
    shares, known = _shares(args.shares), dict[str, str]()
    if (args.out / _SETTINGS).exists():
        before = Parts.open(args.out)
        if (before.salt, dict(before.shares)) != (args.salt, shares):
            raise ResoluteError(
                f"{args.out}: made with --salt {before.salt} --shares {','.join(map(str, before.shares.values()))}, "
                f"got {args.salt} and {args.shares}, expected the same; repeat them or choose another --out"
            )
        known = {digest: part for part in PARTS for digest in _read_list(args.out / f"{part}.csv")}
    parts = divide(_scan(args.src), shares=shares, salt=args.salt, known=known)
    if empty := [part for part, photos in parts.items() if not photos]:
        raise ResoluteError(f"--shares: got {args.shares}, which leaves no photo for {empty[0]}; change it")
    with write_errors(args.out):
        args.out.mkdir(parents=True, exist_ok=True)
        rest = sorted(photo for part in PARTS[:-1] for photo in parts[part])
        for name, photos in (*parts.items(), ("rest", rest)):
            _write_list(args.out / f"{name}.csv", photos)
        settings = {"salt": args.salt, "shares": shares, "photos": {part: len(each) for part, each in parts.items()}}
        atomic_write(args.out / _SETTINGS, json.dumps(settings, indent=1) + "\n")
    print(_summary(parts, known, args.out))


def _summary(parts: Mapping[str, Sequence[Photo]], known: Mapping[str, str], out: Path) -> str:
    total = sum(map(len, parts.values()))
    classes = sorted({photo.label for photos in parts.values() for photo in photos})
    rows = []
    for part, photos in parts.items():
        counts = Counter(photo.label for photo in photos)
        sizes = [counts[label] for label in classes]
        copies = len(photos) - len({photo.digest for photo in photos})
        rows.append(
            [
                part,
                str(len(photos)),
                f"{100 * len(photos) / total:.1f}",
                f"{min(sizes)} to {max(sizes)}",
                str(copies),
                str(sum(photo.digest not in known for photo in photos)),
            ]
        )
    head = ["part", "photos", "%", "per class", "copies", "new"]
    gone = len(known.keys() - {photo.digest for photos in parts.values() for photo in photos})
    return "\n".join(
        [
            text_table(f"{out}: {total} photos, {len(classes)} classes", head, rows),
            *([f"{gone} photos of the earlier division are gone"] if gone else []),
            f"make shards SRC={out}/train.csv VAL={out}/tune.csv OUT={out}/tune RES=…   # likewise choose",
            f"make shards SRC={out}/rest.csv VAL={out}/report.csv OUT={out}/report RES=…",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. Prints one line to stderr for a `ResoluteError`."""
    return command(_parser(), _run, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
