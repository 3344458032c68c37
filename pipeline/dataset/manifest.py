"""The manifest of a shard set: `manifest.json`, which lists the manifests of its generations.

The manifest of a generation, such as `manifest.g001.128-224.json`, is about its shards and index files alone, at the
resolutions in its name. It is never changed: an extension writes another one, and a resolution that is added, one of
another name for each generation. `manifest.json` comes last, and lists those that count with their hashes, so a set is
either as it was or as it is to be. Both kinds end with a hash of their own bytes, their seal.

    manifest.json       format, version, settings, classes, target, codecs, resolutions {RES: {short_side}}, splits
                        {SPLIT: {samples}}, generations [file names], files {name: {bytes, sha256}} of these, source
    manifest.g001.….json   plan (hash), spec, images, samples and shards {SPLIT: number}, lengths {SPLIT: {shard:
                        samples}}, classes (number), removed, changed, rejected, duplicates, files {name: {…}}, and,
                        if there are any, near_copies and pixels

`read_manifest` returns them as one, in the form that manifests of versions 5 to 7 have on disk.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.pipeline.storage.base import Files
from resolute.pipeline.storage.local import retry_local
from resolute.urls import is_url

from .source_json import missing_set_hint, read_source_json, repair_hint, shards_command

__all__ = [
    "FORMAT",
    "MANIFEST",
    "READ_VERSIONS",
    "VERSION",
    "generation_manifest_name",
    "info_files",
    "is_sealed",
    "join_manifest",
    "manifest_bytes",
    "read_manifest",
]

MANIFEST = "manifest.json"
FORMAT, VERSION = "resolute-shards", 8
_ONE_FILE = (5, 6, 7)  # versions with a single manifest; 7 marks sets with a GROUP file
READ_VERSIONS = (*_ONE_FILE, VERSION)  # of sets that can be trained on and verified
_INFO = "_info.json"  # timm's list of shards, in the folder of each resolution and in the set's
_LOOKED_AT = 10_000  # names of a folder that is no shard set. why so few: it may be any, such as /usr
# Written only by prep: the first while it runs, the second before any shard.
_PREP_FILES = (".prep", "records/plan.json")


def generation_manifest_name(generation: int, resolutions: Collection[int]) -> str:
    """The file name of a generation's manifest at `resolutions` (px)."""
    return f"manifest.g{generation:03d}.{'-'.join(map(str, sorted(resolutions)))}.json"


def read_manifest(files: Files) -> tuple[dict[str, Any], str]:
    """Read and check the manifest and those of the generations; returns them as one, and the hash (12 hex digits).

    Raises `ResoluteError` if one is missing, damaged or of another version, `StorageError` if it cannot be read.
    """
    where = files.where(MANIFEST)
    try:
        text = retry_local(files.local(MANIFEST).read_bytes, where)
        manifest = json.loads(text)
        got = (manifest["format"], manifest["version"])
    except FileNotFoundError:
        is_unfinished = any(files.file_version(name) is not None for name in _PREP_FILES)
        if not is_unfinished and _are_tars(files.root):
            raise ResoluteError(
                f"{files.root}: got WebDataset tars, expected a finished shard set; make one of them: run `resolute "
                f"shards --src {files.root} --out shards`"
            ) from None
        record = read_source_json(files)
        hint = missing_set_hint(shards_command(files.root, (), record), record)
        raise ResoluteError(f"{where}: not found, expected a finished shard set; {hint}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ResoluteError(
            f"{where}: unreadable ({error!r}), expected a {FORMAT} manifest; {repair_hint(files.root)}"
        ) from None
    if got not in [(FORMAT, version) for version in READ_VERSIONS]:
        raise ResoluteError(
            f"{where}: got format {got[0]} version {got[1]}, expected {FORMAT} version {VERSION}; "
            f"rebuild it: run {shards_command(files.root, _stored(manifest), read_source_json(files), rebuild=True)}"
        )
    if not is_sealed(text):
        raise _damaged(files, where, manifest)
    if left_out := sum(_dropped(manifest)):
        raise ResoluteError(
            f"{where}: made with DROP=1 by an earlier version, got a set that leaves out {left_out} photos of its "
            "shards, expected one that holds all of them; use that version, or rebuild the set: run "
            f"{shards_command(files.root, _stored(manifest), read_source_json(files), rebuild=True)}"
        )

    def read(name: str) -> bytes:
        try:
            return retry_local(files.local(name).read_bytes, files.where(name))
        except FileNotFoundError:
            return b""

    try:
        joined = join_manifest(manifest, read)
    except ValueError as error:
        if retry_local(files.local(MANIFEST).read_bytes, where) != text:
            return read_manifest(files)  # why: prep has just added a resolution, and deleted what this one lists
        raise _damaged(files, files.where(str(error)), manifest) from None
    files.expect(joined["files"])
    return joined, hashlib.sha256(text).hexdigest()[:12]


def join_manifest(manifest: Mapping[str, Any], read: Callable[[str], bytes]) -> dict[str, Any]:
    """The manifest of a set with those of its generations, which `read(name)` gets, as one.

    `generations` are those of the generations, without their files, which are in `files` with all others; each split
    has the names of its shards. Raises `ValueError` with the name of one that is missing or damaged.
    """
    if manifest["version"] in _ONE_FILE:
        return dict(manifest)
    joined = {**manifest, "files": dict(manifest["files"]), "generations": []}
    shards: dict[str, list[str]] = {split: [] for split in manifest["splits"]}
    for name in manifest["generations"]:
        data = read(name)
        if hashlib.sha256(data).hexdigest() != manifest["files"][name]["sha256"]:
            raise ValueError(name)
        own = json.loads(data)
        joined["files"] |= own.pop("files")
        joined["generations"].append({key: value for key, value in own.items() if key != "sha256"})
        for split, lengths in own["lengths"].items():
            shards[split] += lengths
    joined["splits"] = {split: {**info, "shards": shards[split]} for split, info in manifest["splits"].items()}
    for name, data in info_files(joined).items():
        joined["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return joined


def info_files(manifest: Mapping[str, Any]) -> dict[str, bytes]:
    """{name: content} of timm's info files of a set with this joined manifest, from which alone they follow."""
    resolutions = sorted(map(int, manifest["resolutions"]))
    lengths: dict[str, dict[str, int]] = {split: {} for split in manifest["splits"]}
    for added in manifest["generations"]:
        for split, own in added["lengths"].items():
            lengths[split] |= own
    # why: timm opens "wds/..." at the folder of a resolution, or at the set's root for the largest one
    folders = [*((f"{res}/", "") for res in resolutions), ("", f"{resolutions[-1]}/")]
    return {f"{folder}{_INFO}": _timm_info(lengths, prefix) for folder, prefix in folders}


def _timm_info(lengths: Mapping[str, Mapping[str, int]], prefix: str) -> bytes:
    """timm's `_info.json` from {split: {shard: samples}}. Source: timm's data/readers/reader_wds.py,
    `_parse_split_info`."""
    splits = {
        name: {
            "name": name,
            "num_samples": sum(shards.values()),
            "filenames": [f"{prefix}{shard}.tar" for shard in shards],
            "shard_lengths": list(shards.values()),
        }
        for name, shards in lengths.items()
    }
    return (json.dumps({"splits": splits}, indent=1) + "\n").encode()


def _damaged(files: Files, where: str, manifest: Mapping[str, Any]) -> ResoluteError:
    is_older = manifest["version"] != VERSION
    command = shards_command(files.root, _stored(manifest), read_source_json(files), rebuild=is_older)
    return ResoluteError(
        f"{where}: damaged, got bytes that do not match its own hash, expected them as prep wrote them; run {command}, "
        f"which {'makes the set anew' if is_older else 'repairs it'}"
    )


def _dropped(manifest: Mapping[str, Any]) -> Sequence[int]:
    """The numbers of photos that a set of an earlier version leaves out."""
    newest = manifest.get("generations", [])[-1:]
    return [n for added in newest if isinstance(added, dict) for n in added.get("dropped", {}).values()]


def _are_tars(root: str) -> bool:
    """Whether a path or URL without a manifest is one of tars, a pattern or a folder of some."""
    if root.endswith((".tar", ".tar.gz", ".tgz")) or "{" in root or glob.has_magic(root):
        return ".tar" in root or ".tgz" in root
    return not is_url(root) and _holds_tars(Path(root))


def _holds_tars(folder: Path) -> bool:
    """Whether a folder, or one in it, holds tars, by its first names and the first ones one level below."""
    names = list(islice(_paths(folder), _LOOKED_AT))
    below = chain.from_iterable(map(_paths, names))
    return any(path.suffix == ".tar" for path in chain(names, islice(below, _LOOKED_AT)))


def _paths(folder: Path) -> Iterator[Path]:
    """The paths in a folder; none if it is a file, or cannot be read."""
    with suppress(OSError):
        yield from folder.iterdir()


def _stored(manifest: Mapping[str, Any]) -> list[int]:
    """Resolutions (px) of a manifest of any version, for messages."""
    resolutions = manifest.get("resolutions")
    return [int(res) for res in resolutions if str(res).isdecimal()] if isinstance(resolutions, dict) else []


def manifest_bytes(manifest: Mapping[str, Any]) -> bytes:
    """`manifest` as written to disk; its last entry, `sha256`, covers all bytes before it."""
    unsealed = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(unsealed, indent=1).removesuffix("\n}").encode()
    return text + _seal(text)


def _seal(text: bytes) -> bytes:
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(text).hexdigest().encode()


def is_sealed(text: bytes) -> bool:
    """Whether `text` ends with the correct seal. why not serialise again: seconds for 10 000s of shards."""
    end = len(text) - len(_seal(b""))
    return end > 0 and text[end:] == _seal(text[:end])
