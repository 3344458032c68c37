"""Asks for GREY_RANGE where photos with 16-bit samples look as if they used fewer bits, such as X-rays of 12 bits.

A file does not say how many bits its samples use, and the photos of a scanner of 12 bits would be stored almost black.
A sample of the photos is looked at before anything is written, and all of them when they are converted.
"""

from __future__ import annotations

from resolute.errors import ResoluteError
from resolute.prep.listing.inputs import Inputs
from resolute.prep.shard_set.record import Records
from resolute.prep.shard_set.work_list import WorkList
from resolute.prep.sources.fetch import fetch
from resolute.prep.sources.image_ref import ByteRange
from resolute.prep.sources.reject import Reject

from .settings import Settings

__all__ = ["check_all", "check_sample"]

_SAMPLED = 64
_MANY = 4  # photos of which the brightest says something
_WHITE = 65_535
_BRIGHT = _WHITE // 3  # 14 bits are below
_SUFFIXES = (".png", ".tif", ".tiff")  # of formats with 16-bit samples


def check_sample(settings: Settings, inputs: Inputs) -> None:
    """Look at up to `_SAMPLED` photos. Raises `ResoluteError` if those with 16-bit samples are dark.

    Photos behind URLs are left to `check_all`, since each would be asked for twice.
    """
    if settings.grey_range != "auto":
        return
    deep, largest = 0, 0
    for photos in inputs.sources.values():
        if photos.is_remote:
            continue
        for _, place in photos.sampled_places(_SAMPLED // len(inputs.sources), _SUFFIXES):
            found = _brightest(place, settings.max_megapixels)
            if found is not None:
                deep, largest = deep + 1, max(largest, found)
            if largest >= _BRIGHT:
                return
    _ask(settings.src, deep, largest, "sampled ", "")


def _brightest(place: ByteRange, max_megapixels: int | None) -> int | None:
    """The largest sample of a photo with 16-bit samples; None for another one, or one that cannot be used."""
    from resolute.prep.convert.decode import MAX_PIXELS, decode_reduced  # why here: Pillow's formats import slowly
    from resolute.prep.convert.pixels import is_deep

    try:
        data = fetch(place)
        max_pixels = MAX_PIXELS if max_megapixels is None else max_megapixels * 1_000_000
        return decode_reduced(data, 1, max_pixels=max_pixels).largest if is_deep(data) else None
    except Reject:
        return None


def check_all(todo: WorkList, records: Records) -> None:
    """Raises `ResoluteError` if the photos with 16-bit samples in the finished shards of a new set are dark."""
    spec = todo.generations[-1]
    if "grey_range" not in spec.settings and not spec.number:
        facts = records.facts(todo)
        _ask(todo.src, facts.deep, facts.largest, "", " with REBUILD=1")


def _ask(src: str, deep: int, largest: int, which: str, how: str) -> None:
    if deep < _MANY or largest >= _BRIGHT:
        return
    bits = max(8, largest.bit_length())
    top = (1 << bits) - 1
    raise ResoluteError(
        f"{src}: {deep} {which}photos have 16-bit samples, got {largest} as the brightest value, expected white near "
        f"{_WHITE}; choose GREY_RANGE={bits}{how} if {top} is white, or GREY_RANGE=16{how} to keep them dark"
    )
