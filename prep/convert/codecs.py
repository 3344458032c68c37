"""Versions of the code that determines pixels and JPEG bytes: ours, and that of libraries. A set, or one generation of
it, is made with a single combination of them.

The resize kernel uses integers and gives the same result with every version of numpy and numba, so these two are not
included; nor are decoders of formats that define their pixels exactly (PNG, BMP, GIF).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from resolute.errors import ResoluteError

__all__ = ["PIXELS", "check_codecs", "codec_versions"]

# Version of our own pixel code: decode.py, pixels.py, reduced.py, resize.py and resize_kernel.py. Raise it with every
# change of what is stored of any photo: a set that is begun by one version is then not continued by another.
PIXELS = 3
_PIXELS_NAME = "Resolute's pixels"


@cache
def codec_versions() -> dict[str, str]:
    """{name: version} of this process's pixel code, decoders and encoder; "none" for a missing library."""
    import PIL
    import simplejpeg
    from PIL import features

    return {
        _PIXELS_NAME: str(PIXELS),
        "simplejpeg": simplejpeg.__version__,
        "libjpeg-turbo in simplejpeg": _turbo_version(Path(simplejpeg._jpeg.__file__)),
        "Pillow": PIL.__version__,
        "libjpeg-turbo in Pillow": features.version("libjpeg_turbo") or "none",
        "libwebp in Pillow": features.version("webp") or "none",
        "libavif in Pillow": features.version("avif") or "none",
        "LittleCMS in Pillow": features.version("littlecms2") or "none",
    }


def _turbo_version(extension: Path) -> str:
    """Version of the libjpeg-turbo linked into simplejpeg, which does not export it; "shared" if none is."""
    marked = re.search(rb"libjpeg-turbo version (\d+(?:\.\d+)*)", extension.read_bytes())
    return marked[1].decode() if marked else "shared"


def check_codecs(made_with: Mapping[str, str] | None, where: str) -> None:
    """Raise `ResoluteError` if this process differs from the versions `made_with`; None: any versions will do.

    `where` begins the message.
    """
    if made_with is None:
        return
    here = codec_versions()
    differences = [
        f"{name}: got {here.get(name, 'none')}, expected {version}"
        for name, version in made_with.items()
        if here.get(name, "none") != version
    ]
    if differences:
        own = any(each.startswith(_PIXELS_NAME) for each in differences)
        remedy = "use the Resolute that began it" if own else "install those versions (pip install 'NAME==VERSION')"
        raise ResoluteError(
            f"{where}: begun with other {'pixel code' if own else 'decoder versions'}, so further shards would differ, "
            f"{'; '.join(differences)}; {remedy}, or start over with REBUILD=1 (--rebuild)"
        )
