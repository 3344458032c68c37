"""Near copies in the summary, as lines, and in the report, as pairs of photos."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.console import counted
from resolute.pipeline.dataset.format import near_copies_name, near_pairs_name
from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.pipeline.dataset.target import Target
from resolute.prep.shard_set.near_copies import GROUPED

from .browse import read_jpeg, read_lines, row_of

__all__ = ["describe_near_copies", "is_across", "near_copy_figures", "near_counts", "target_text"]

_SHOWN_PAIRS = 60
_SHOWN_TARGETS = 4  # labels or values of a photo
_SIDE_PX, _QUALITY = 110, 80  # longer side of a photo in the report, and its JPEG quality


def near_counts(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The newest generation's counts of near copies; {} if they were not looked for."""
    counts: dict[str, int] = manifest["generations"][-1].get("near_copies", {})
    return counts


def describe_near_copies(manifest: Mapping[str, Any], shards: ShardSet) -> list[str]:
    """Lines of the summary of a set; none if there is nothing to say."""
    counts, lines = near_counts(manifest), []
    if not counts:
        return []
    table, listed = (f"{shards.root}/{name(shards.generation)}" for name in (near_copies_name, near_pairs_name))
    if counts["photos"]:
        lines.append(
            f"near copies: {counted(counts['photos'], 'photo')} in groups that show the same picture or the same "
            f"moment; all are kept, see {table}"
        )
    if across := counts["across_splits"]:
        verb = "shows" if across == 1 else "show"
        what_to_do = f"GROUP={table} puts each group on one side, with REBUILD=1 (--rebuild), since the set is finished"
        if manifest["settings"]["val"]["how"] != "frac":  # VAL, SPLIT or VAL_LIST says where each photo is
            what_to_do = (
                f"a run reports its accuracy also without them; in place of the given split, GROUP={table} "
                "VAL_FRAC=0.1 REBUILD=1 (--rebuild) holds out a part that divides no group"
            )
        lines.append(
            f"WARNING: {across} of {manifest['splits']['val']['samples']} validation photos {verb} the same picture or "
            f"the same moment as a training photo; {what_to_do}"
        )
    if counts["two_labels"]:
        pair = next(pair for pair in read_lines(shards, near_pairs_name(shards.generation)) if _differ(pair))
        example = " and ".join(f"{photo['path']} ({target_text(shards.target, photo)})" for photo in pair["photos"])
        what = "values" if shards.target.kind == "values" else "labels"
        lines.append(
            f"WARNING: {counted(counts['two_labels'], 'pair')} of photos with the same picture or the same moment but "
            f"different {what}, such as {example}; see {listed}"
        )
    if counts["warned_across_splits"]:
        lines.append(
            f"WARNING: {counted(counts['warned_across_splits'], 'more pair')} of a validation and a training photo may "
            "show the same moment; look at them in report.html"
        )
    if counts["warned_two_labels"]:
        what = "values" if shards.target.kind == "values" else "labels"
        lines.append(
            f"WARNING: {counted(counts['warned_two_labels'], 'more pair')} of photos with different {what} may show "
            "the same moment; look at them in report.html"
        )
    if "asked" in counts:
        lines.append(
            f"near copies of {counted(counts['asked'], 'photo')} were looked for, those of val and of groups; "
            "NEAR_COPIES=all REBUILD=1 (--near-copies all --rebuild) looks for those of all photos"
        )
    if "cut_short" in counts:
        lines.append(
            f"WARNING: {counted(counts['cut_short'], 'photo')} resemble too many others, such as placeholders do: only "
            "the closest were compared, and near copies may be missing"
        )
    if "undescribed" in counts:
        lines.append(
            f"near copies were not looked for among {counted(counts['undescribed'], 'photo')} that an older version "
            "converted; REBUILD=1 (--rebuild) makes the set anew"
        )
    return lines


def near_copy_figures(shards: ShardSet) -> list[dict[str, Any]]:
    """Pairs of the set as figures of a contact sheet, from what is stored at the smallest resolution.

    Pairs in two splits or with different targets come first, then the most alike.
    """
    pairs = list(read_lines(shards, near_pairs_name(shards.generation)))
    pairs.sort(key=lambda pair: (not (_differ(pair) or is_across(pair)), -pair["score"]))
    return [_figure(shards, pair) for pair in pairs[:_SHOWN_PAIRS]]


def _figure(shards: ShardSet, pair: Mapping[str, Any]) -> dict[str, Any]:
    images = [_small(shards, photo) for photo in pair["photos"]]
    lines = [
        f"score {pair['score']:.3f}{'' if pair['score'] >= GROUPED else ', not grouped'}",
        *_captions(shards.target, pair),
    ]
    (first, width, height), (second, *size) = images
    return {
        "data": second,
        "width": size[0],
        "height": size[1],
        "original": {"data": first, "width": width, "height": height},
        "lines": lines,
        "title": " | ".join(photo["path"] for photo in pair["photos"]),
    }


def _captions(target: Target, pair: Mapping[str, Any]) -> Iterator[str]:
    for photo in pair["photos"]:
        yield f"{photo['split']}: {photo['path']}"
        yield target_text(target, photo)


def _small(shards: ShardSet, photo: Mapping[str, Any]) -> tuple[bytes, int, int]:
    """A small JPEG of a photo, its width and height in px."""
    row = row_of(shards, photo["split"], photo["key"])
    assert row is not None
    with Image.open(io.BytesIO(read_jpeg(shards, photo["split"], shards.resolutions[0], row))) as image:
        image.thumbnail((_SIDE_PX, _SIDE_PX))
        jpeg = io.BytesIO()
        image.save(jpeg, "JPEG", quality=_QUALITY)
        return jpeg.getvalue(), *image.size


def is_across(pair: Mapping[str, Any]) -> bool:
    """Whether the photos of a pair are in two splits."""
    one, other = pair["photos"]
    return bool(one["split"] != other["split"])


def _differ(pair: Mapping[str, Any]) -> bool:
    """Whether the photos of a pair have different targets."""
    targets = [{name: photo[name] for name in photo.keys() - {"path", "split", "key"}} for photo in pair["photos"]]
    return targets[0] != targets[1]


def target_text(target: Target, photo: Mapping[str, Any]) -> str:
    """The target of a photo in a list, as of duplicates.jsonl, in words."""
    if "target" in photo:
        values: NDArray[Any] = np.asarray(photo["target"])
        return ", ".join(f"{value:.5g}" for value in values[:_SHOWN_TARGETS].tolist())
    numbers = photo.get("labels", [photo.get("label")])
    names = [target.names[number] for number in numbers]
    names += [f"{target.names[number]} ignored" for number in photo.get("ignored", ())]
    return " + ".join(names[:_SHOWN_TARGETS]) or "no label"
