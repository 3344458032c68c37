"""Versions of the libraries that determine pixels and JPEG bytes; a set is made with a single combination of them.

The resize kernel uses integers and gives the same result with every version of numpy and numba, so these two are not
included; nor are decoders of formats that define their pixels exactly (PNG, BMP, GIF).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pipeline.errors import ResoluteError

__all__ = ["check_codecs", "codec_differences", "codec_versions"]


@cache
def codec_versions() -> dict[str, str]:
    """{library: version} of this process's decoders and encoder; "none" for a missing one."""
    import PIL
    import simplejpeg
    from PIL import features

    return {
        "simplejpeg": simplejpeg.__version__,
        "libjpeg-turbo in simplejpeg": _turbo_version(Path(simplejpeg._jpeg.__file__)),
        "Pillow": PIL.__version__,
        "libjpeg-turbo in Pillow": features.version("libjpeg_turbo") or "none",
        "libwebp in Pillow": features.version("webp") or "none",
        "libavif in Pillow": features.version("avif") or "none",
    }


def _turbo_version(extension: Path) -> str:
    """Version of the libjpeg-turbo linked into simplejpeg, which does not export it; "shared" if none is."""
    marked = re.search(rb"libjpeg-turbo version (\d+(?:\.\d+)*)", extension.read_bytes())
    return marked[1].decode() if marked else "shared"


def codec_differences(made_with: Mapping[str, str] | None, here: Mapping[str, str] | None) -> list[str]:
    """The differences in words; empty if either side is unknown, as for sets made by older versions of prep."""
    if made_with is None or here is None:
        return []
    return [
        f"{name}: got {here.get(name, 'none')}, expected {made_with.get(name, 'none')}"
        for name in sorted({*made_with, *here})
        if made_with.get(name, "none") != here.get(name, "none")
    ]


def check_codecs(made_with: Mapping[str, str] | None, where: str) -> None:
    """Raise `ResoluteError` if `made_with` is known and differs from this process; `where` begins the message."""
    if differences := codec_differences(made_with, codec_versions()):
        raise ResoluteError(
            f"{where}: was begun with other decoder versions, so its shards would differ, "
            f"{'; '.join(differences)}; install those versions (pip install 'NAME==VERSION'), or start over with "
            "REBUILD=1 (--rebuild)"
        )
