"""The dataset card of a set (`README.md`), with which `datasets.load_dataset(folder or "USER/NAME", "224px")` reads it.

It is a function of the manifest, which does not list it, since the card is made to be edited: once its last line no
longer fits, it is the user's and stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from resolute.console import say
from resolute.pipeline.dataset.target import Target
from resolute.prep.storage.output import Store, read_present

__all__ = ["CARD", "card", "is_unedited", "write_card"]

CARD = "README.md"
_SPLITS = {"train": "train", "val": "validation"}  # names in the Hub's convention
_MAX_NAMED = 1000  # of more classes the card gives no names, for each config repeats them
_SIZES = (
    ("n<1K", 10**3),
    ("1K<n<10K", 10**4),
    ("10K<n<100K", 10**5),
    ("100K<n<1M", 10**6),
    ("1M<n<10M", 10**7),
    ("10M<n<100M", 10**8),
    ("100M<n<1B", 10**9),
    ("n>1B", 10**20),
)
_TASKS = {"class": "image-classification", "labels": "image-classification", "values": "other"}
_SEAL = "<!-- as prep wrote it, {}: once it is edited, it stays as it is -->\n"


def card(manifest: Mapping[str, Any]) -> bytes:
    """The dataset card, in which every resolution is a config."""
    import yaml  # why here: slow to import, and needed only when a set is finished

    target = Target.from_manifest(manifest)
    samples = {split: info["samples"] for split, info in manifest["splits"].items() if info["samples"]}
    sides = sorted((int(res), table["short_side"]) for res, table in manifest["resolutions"].items())
    configs: list[dict[str, Any]] = [
        {
            "config_name": f"{res}px",
            "data_files": [{"split": _SPLITS[split], "path": f"{res}/{split}-*.tar"} for split in samples],
        }
        for res, _ in sides
    ]
    configs[-1]["default"] = True
    front = {
        "task_categories": [_TASKS[target.kind]],
        "size_categories": [next(name for name, end in _SIZES if sum(samples.values()) < end)],
        "configs": configs,
        "dataset_info": [{"config_name": f"{res}px", "features": _features(target)} for res, _ in sides],
    }
    counts = " and ".join(f"{n} {'training' if split == 'train' else 'validation'}" for split, n in samples.items())
    what = {
        "class": f"{len(target)} classes",
        "labels": f"any of {len(target)} labels" + (", some unknown (`ignored`)" if target.ignored else ""),
        "values": ", ".join(target.names),
    }[target.kind]
    short_sides = ", ".join(f"{side} px ({res}px)" for res, side in sides)
    text = f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True, width=10**6)}---

# Photos at {", ".join(f"{res}" for res, _ in sides)} px

{counts} photos; target: {what}. Every config holds the same photos in the same
order, as JPEGs in WebDataset tars, with a short side of {short_sides}, written by Resolute.

```python
from datasets import load_dataset

photos = load_dataset("USER/NAME", "{sides[-1][0]}px", split="train", streaming=True)
```
"""
    data = text.encode(errors="replace")
    return data + _seal(data)


def is_unedited(data: bytes) -> bool:
    """Whether a card has the bytes that prep once wrote."""
    end = len(data) - len(_seal(b""))
    return end > 0 and data[end:] == _seal(data[:end])


def _seal(data: bytes) -> bytes:
    return _SEAL.format(hashlib.sha256(data).hexdigest()).encode()


def write_card(store: Store, manifest: Mapping[str, Any]) -> None:
    """Write the card, unless there is one that the user wrote or edited: then a line says which configs it lacks."""
    old, new = read_present(store, CARD), card(manifest)
    if not old or (is_unedited(old) and old != new):
        store.write(CARD, new)
    elif not is_unedited(old):
        missing = [f"{res}px" for res in manifest["resolutions"] if f"{res}px".encode() not in old]
        if missing:
            say(
                f"{store.where}/{CARD}: kept, got one that was written or edited by someone else, without a config for "
                f"{', '.join(missing)}, which load_dataset needs; add it, or delete the file and run the same command"
            )


def _features(target: Target) -> list[dict[str, Any]]:
    """The columns of a sample. Without them `datasets` would guess from the first five, such as empty lists."""
    number: Any = "int64"
    if 0 < len(target.classes) <= _MAX_NAMED:
        number = {"class_label": {"names": {str(i): name for i, name in enumerate(target.classes)}}}
    described: dict[str, Any] = {"name": "cls", "dtype": number}
    if target.kind == "labels":
        lists = ("labels", "ignored") if target.ignored else ("labels",)
        described = {"name": "json", "struct": [{"name": name, "list": deepcopy(number)} for name in lists]}
    elif target.kind == "values":
        described = {"name": "json", "struct": [{"name": "target", "list": "float32"}]}
    texts = [{"name": name, "dtype": "string"} for name in ("__key__", "__url__")]
    return [{"name": "jpg", "dtype": "image"}, described, *texts]
