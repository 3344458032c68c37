"""Makes, reads and changes what a local shard set says of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from resolute.pipeline.dataset.manifest import join_manifest, manifest_bytes
from resolute.prep.shard_set.generation import GenerationSpec

__all__ = ["generation_spec", "read_joined", "update_manifest"]


def generation_spec(*, images: Mapping[str, int], shard_samples: int = 8, **values: Any) -> GenerationSpec:
    """The specification of generation 0 of a set of classes."""
    return GenerationSpec(
        **{
            "settings": {"shard_samples": shard_samples},
            "classes": ["a", "b"],
            "target": {"kind": "class"},
            "codecs": {},
            "source": {},
            "images": images,
            "first_key": dict.fromkeys(images, 0),
            "first_shard": dict.fromkeys(images, 0),
            **values,
        }
    )


def read_joined(root: Path) -> dict[str, Any]:
    """The manifest of the set at `root` with those of its generations, see `join_manifest`."""
    return join_manifest(json.loads((root / "manifest.json").read_bytes()), lambda name: (root / name).read_bytes())


def update_manifest(
    root: Path, changed: Iterable[str] = (), *, sizes: Mapping[str, int] | None = None, **values: Any
) -> None:
    """List the files `changed` of generation 0 as they are on the disk.

    `sizes` {name: bytes} are listed for other files, and `values` are entries of the manifest.
    """
    top = json.loads((root / "manifest.json").read_bytes())
    name = top["generations"][0]
    own = json.loads((root / name).read_bytes())
    own["files"] |= {file: _info((root / file).read_bytes()) for file in changed}
    for file, size in (sizes or {}).items():
        own["files"][file]["bytes"] = size
    data = manifest_bytes({**own, "files": dict(sorted(own["files"].items()))})
    (root / name).write_bytes(data)
    top["files"][name] = _info(data)
    (root / "manifest.json").write_bytes(manifest_bytes({**top, **values}))


def _info(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
