"""Descriptions of a set for others: a dataset card (`README.md`) and Croissant metadata (`croissant.json`).

With the card, `datasets.load_dataset(folder or "USER/NAME", "224px")` reads the tars; `croissant.json` lists them with
their hashes. Both are functions of the manifest, so the same set has the same bytes.

The manifest lists `croissant.json`, which is derived again with it. It does not list the card, which is made to be
edited: once its last line no longer fits, it is the user's and stays.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

from resolute.console import say
from resolute.pipeline.dataset.format import FORMAT, tar_name
from resolute.pipeline.dataset.target import Target
from resolute.prep.storage.output import Store

from .existing_set import MANIFEST

__all__ = ["CARD", "CROISSANT", "card", "croissant", "is_own_croissant", "is_unedited", "write_card"]

CARD, CROISSANT = "README.md", "croissant.json"
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
_CROISSANT_HEAD = f'{{\n "@type": "sc:Dataset",\n "name": "{FORMAT}",\n'.encode()
_CONTEXT = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}  # Source: the context that the Croissant 1.0 specification recommends


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
    old, new = _read(store, CARD), card(manifest)
    if old is None or (is_unedited(old) and old != new):
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


def croissant(manifest: Mapping[str, Any]) -> bytes:
    """Croissant 1.0 metadata: every tar with its hash, and a record set for each resolution and split."""
    distribution: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    target = Target.from_manifest(manifest)
    for res in sorted(map(int, manifest["resolutions"])):
        for split, info in manifest["splits"].items():
            tars = [tar_name(res, shard) for shard in info["shards"]]
            if tars:
                distribution += _files(manifest, tars, f"{res}px/{_SPLITS[split]}", target)
                records += _record_sets(f"{res}px/{_SPLITS[split]}", target)
    if target.classes:
        records.append(
            {
                "@type": "cr:RecordSet",
                "@id": "classes",
                "name": "classes",
                "field": [_field("classes", "number", "sc:Integer"), _field("classes", "name", "sc:Text")],
                "data": [{"classes/number": i, "classes/name": name} for i, name in enumerate(target.classes)],
            }
        )
    described = "Photos as JPEGs in WebDataset tars, at several resolutions in the same order, written by Resolute"
    table = {
        "@type": "sc:Dataset",
        "name": FORMAT,
        "@context": _CONTEXT,
        "description": described,
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "distribution": distribution,
        "recordSet": records,
    }
    return (json.dumps(table, indent=1) + "\n").encode()


def is_own_croissant(store: Store) -> bool:
    """Whether prep may write `croissant.json`: there is none, prep wrote it, or the set's manifest lists it."""
    old, listed = _read(store, CROISSANT), f'"{CROISSANT}": {{'.encode()
    if old is None or old.startswith(_CROISSANT_HEAD) or listed in (_read(store, MANIFEST) or b""):
        return True
    say(f"{store.where}/{CROISSANT}: kept, got a file that prep has not written, expected none")
    return False


def _files(manifest: Mapping[str, Any], tars: list[str], name: str, target: Target) -> Iterator[dict[str, Any]]:
    for tar in tars:
        info = manifest["files"][tar]
        yield {
            "@type": "cr:FileObject",
            "@id": tar,
            "name": tar,
            "contentUrl": tar,
            "contentSize": f"{info['bytes']} B",
            "encodingFormat": "application/x-tar",
            "sha256": info["sha256"],
        }
    suffix = "cls" if target.kind == "class" else "json"
    for part, encoding, pattern in (("photos", "image/jpeg", "*.jpg"), ("targets", "text/plain", f"*.{suffix}")):
        yield {
            "@type": "cr:FileSet",
            "@id": f"{name}/{part}",
            "name": f"{name}/{part}",
            "containedIn": [{"@id": tar} for tar in tars],
            "encodingFormat": encoding,
            "includes": pattern,
        }


def _record_sets(name: str, target: Target) -> list[dict[str, Any]]:
    """The record set `name` of photos and targets, and that of the targets alone, with which it is joined by key.

    A list of labels or values is the text of its JSON: mlcroissant 1.1 parses no JSON that is inside a tar.
    """
    targets, photos = f"{name}/targets", f"{name}/photos"
    key = {"extract": {"fileProperty": "filename"}, "transform": {"regex": r"(\d+)"}}
    column, dtype = ("class", "sc:Integer") if target.kind == "class" else ("json", "sc:Text")
    content = {"extract": {"fileProperty": "content"}}
    return [
        {
            "@type": "cr:RecordSet",
            "@id": f"{name}-targets",
            "name": f"{name}-targets",
            "field": [
                _field(f"{name}-targets", "key", "sc:Text", source={"fileSet": {"@id": targets}, **key}),
                _field(f"{name}-targets", column, dtype, source={"fileSet": {"@id": targets}, **content}),
            ],
        },
        {
            "@type": "cr:RecordSet",
            "@id": name,
            "name": name,
            "field": [
                _field(
                    name,
                    "key",
                    "sc:Text",
                    source={"fileSet": {"@id": photos}, **key},
                    references={"field": {"@id": f"{name}-targets/key"}},
                ),
                _field(name, "image", "sc:ImageObject", source={"fileSet": {"@id": photos}, **content}),
                _field(name, column, dtype, source={"field": {"@id": f"{name}-targets/{column}"}}),
            ],
        },
    ]


def _field(record_set: str, name: str, dtype: str, **rest: Any) -> dict[str, Any]:
    own = f"{record_set}/{name}"
    return {"@type": "cr:Field", "@id": own, "name": own, "dataType": dtype, **rest}


def _read(store: Store, name: str) -> bytes | None:
    return store.read(name) if store.size(name) is not None else None
