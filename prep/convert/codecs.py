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

__all__ = ["check_codecs", "codec_versions"]


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


def check_codecs(made_with: Mapping[str, str] | None, where: str) -> None:
    """Raise `ResoluteError` if this process differs from the versions `made_with`; None: any versions will do.

    `where` begins the message.
    """
    here = codec_versions()
    differences = [f"{name}: got {here.get(name, 'none')}, expected {version}"
                   for name, version in (made_with or {}).items() if here.get(name, "none") != version]  # fmt: skip
    if differences:
        raise ResoluteError(
            f"{where}: begun with other decoder versions, so further shards would differ, "
            f"{'; '.join(differences)}; install those versions (pip install 'NAME==VERSION'), or start over with "
            "REBUILD=1 (--rebuild)"
        )
