"""Measures `resolute jobs plan`, `range` and `finish`, and a prep with nothing to do, on a slow store with many shards.

    python -m resolute.benchmarks.prep.many_shards [--shards 24000] [--latency 0.03]

The store is in this process's memory. Each request to it sleeps for the latency; as on S3, a list request returns 1000
keys and a delete request takes up to 1000. The photos are one tar. The commands are the real ones; only the shards are
not converted: their records are written directly, with their tars and idx files as sizes without bytes. A shard has few
samples; `bytes_of_4096` is what the records of shards of 4096 samples would add.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import io
import resource
import tarfile
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from resolute.benchmarks.cli import Parser, command
from resolute.benchmarks.record import check_writable, header, write
from resolute.pipeline.dataset.format import SAMPLE, SOURCE, STORED, shard_name
from resolute.prep import jobs
from resolute.prep.build import build
from resolute.prep.settings import Settings
from resolute.prep.shard_set.existing_set import PLAN, read_sealed
from resolute.prep.shard_set.record import RECORDS, ShardRecord, plan_hash
from resolute.prep.shard_set.set_plan import ShardLayout
from resolute.prep.storage.hashed_file import FileInfo
from resolute.prep.storage.output import open_store

RESOLUTIONS = (128, 160, 224)
PAGE_KEYS = 1000  # keys of a list or delete request of S3
OUT = "slow://bucket/set"


class SlowStore(MemoryFileSystem):
    """Objects in memory, or sizes of objects without bytes; every request sleeps for `latency_s`."""

    protocol = "slow"
    latency_s = 0.0
    objects: ClassVar[dict[str, dict[str, bytes | int]]] = defaultdict(dict)  # folder -> name -> content, or its size
    requests: ClassVar[Counter[str]] = Counter()
    in_flight = max_in_flight = 0
    lock = threading.Lock()

    @classmethod
    def request(cls, kind: str, count: int = 1) -> None:
        """Wait for `count` requests, one after another."""
        with cls.lock:
            cls.requests[kind] += count
            cls.in_flight += 1
            cls.max_in_flight = max(cls.max_in_flight, cls.in_flight)
        time.sleep(cls.latency_s * count)
        with cls.lock:
            cls.in_flight -= 1

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("slow://").strip("/")

    def _place(self, path: str) -> tuple[dict[str, bytes | int], str]:
        folder, _, name = self._strip_protocol(path).rpartition("/")
        return self.objects[folder], name

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = self._strip_protocol(path)
        with self.lock:
            files = dict(self.objects[folder])
            folders = [name for name, members in self.objects.items() if members and name.startswith(f"{folder}/")]
        below = {name.removeprefix(f"{folder}/").partition("/")[0] for name in folders}
        self.request("LIST", 1 + (len(files) + len(below)) // PAGE_KEYS)
        rows = [{"name": f"{folder}/{name}", "type": "directory", "size": 0} for name in below]
        return rows + [
            {"name": f"{folder}/{name}", "type": "file", "size": value if isinstance(value, int) else len(value)}
            for name, value in files.items()
        ]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.request("HEAD")
        files, name = self._place(path)
        if name not in files:
            raise FileNotFoundError(path)
        value = files[name]
        return {"name": path, "type": "file", "size": value if isinstance(value, int) else len(value)}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.request("GET")
        files, name = self._place(path)
        if name not in files:
            raise FileNotFoundError(path)
        value = files[name]
        return value[start:end] if isinstance(value, bytes) else bytes(value)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self.request("PUT")
        files, name = self._place(path)
        with self.lock:
            if mode == "create" and name in files:
                raise FileExistsError(path)
            files[name] = bytes(value)

    def put_file(self, local: str, path: str, *_: Any, **__: Any) -> None:
        data = Path(local).read_bytes()
        self.request("PUT", 1 + len(data) // (50 << 20))
        files, name = self._place(path)
        with self.lock:
            files[name] = data

    def get_file(self, path: str, local: str, *_: Any, **__: Any) -> None:
        Path(local).write_bytes(self.cat_file(path))

    def _open(self, path: str, *_: Any, **__: Any) -> BinaryIO:
        return io.BytesIO(self.cat_file(path))

    def rm(self, path: str | list[str], *_: Any, **__: Any) -> None:
        paths = [path] if isinstance(path, str) else path
        self.request("DELETE", -(-len(paths) // PAGE_KEYS))
        for each in paths:
            files, name = self._place(each)
            with self.lock:
                files.pop(name, None)

    def rm_file(self, path: str) -> None:
        self.rm(path)


@contextmanager
def measured(result: dict[str, Any], name: str) -> Iterator[None]:
    """Add the seconds, CPU seconds and requests of the block to `result`."""
    SlowStore.requests, SlowStore.max_in_flight = Counter(), 0
    began, cpu = time.perf_counter(), time.process_time()
    yield
    result[name] = {
        "seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu,
        "requests": dict(SlowStore.requests), "max_in_flight": SlowStore.max_in_flight,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }  # fmt: skip
    print(f"{name:<28} {result[name]}", flush=True)


def pack_photos(path: Path, images: int) -> None:
    """A tar of two class folders with `images` tiny JPEGs."""
    with tarfile.open(path, "w") as archive:
        for number in range(images):
            if number % 256 == 0:
                file = io.BytesIO()
                Image.new("RGB", (16, 16), (number // 256 % 256, 40, 90)).save(file, "JPEG")
            info = tarfile.TarInfo(f"{'ab'[number % 2]}/{number:07d}.jpg")
            info.size = len(file.getvalue())
            archive.addfile(info, io.BytesIO(file.getvalue()))


def write_shards(layout: ShardLayout, plan: str) -> int:
    """Finish all shards without converting them; returns the bytes of their records."""
    root, nbytes = OUT.removeprefix("slow://"), 0
    for split, number in layout:
        keys = layout.keys(split, number)
        samples, sources, stored = (np.zeros(len(keys), dtype) for dtype in (SAMPLE, SOURCE, STORED))
        samples["key"], samples["label"] = list(keys), [key % 2 for key in keys]
        sources["digest"] = np.asarray(keys, np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15)  # odd: no two are equal
        stored["offset"], stored["nbytes"] = 512 + 20_480 * np.arange(len(keys)), 17_000
        name, tar, idx = shard_name(split, number), 20_480 * len(keys), 60
        for res in RESOLUTIONS:
            files = {f"{res}/{name}.tar": FileInfo(nbytes=tar, sha256="0" * 64),
                     f"{res}/{name}.idx": FileInfo(nbytes=idx, sha256="0" * 64)}  # fmt: skip
            record = ShardRecord(
                plan=plan, split=split, number=number, res=res, samples=samples, sources=sources, stored=stored,
                files=files, rejects=(),
            )  # fmt: skip
            data = record.to_bytes()
            SlowStore.objects[f"{root}/{RECORDS}"].setdefault(record.name.partition("/")[2], data)
            SlowStore.objects[f"{root}/{res}"].setdefault(f"{name}.tar", tar)
            SlowStore.objects[f"{root}/{res}"].setdefault(f"{name}.idx", idx)
            nbytes += len(data)
    return nbytes


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.prep.many_shards", description=__doc__)
    parser.add_argument("--shards", type=int, default=24_000, help="number of shards (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=2, help="samples per shard (default: %(default)s)")
    parser.add_argument("--latency", type=float, default=0.03, help="seconds per request (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prep-many-shards.json"), help="JSON file")
    return command(parser, _measure_all, argv)


def _measure_all(args: argparse.Namespace) -> None:
    check_writable(args.out)
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    SlowStore.latency_s = args.latency
    result: dict[str, Any] = {
        **header(), "shards": args.shards, "samples": args.samples, "latency_s": args.latency,
        "resolutions": RESOLUTIONS,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="resolute-many-") as folder:
        photos = Path(folder) / "photos.tar"
        pack_photos(photos, args.shards * args.samples)
        settings = Settings(
            src=str(photos), out=OUT, res=RESOLUTIONS, val_frac=0.0, shard_samples=args.samples, engine="jobs"
        )
        steps: list[tuple[str, Callable[[], object]]] = [
            ("plan", lambda: jobs.plan_jobs(settings)),
            ("shards --range 100:108", lambda: jobs.convert_range(OUT, (100, 108), workers=1)),
            ("the same again", lambda: jobs.convert_range(OUT, (100, 108), workers=1)),
            ("finalize", lambda: jobs.finalize_jobs(OUT)),
            ("no-op prep", lambda: build(settings)),
        ]
        for name, step in steps:
            if name == "finalize":
                images = {"train": args.shards * args.samples}
                layout = ShardLayout(generations=(images,), shard_samples=args.samples)
                nbytes = write_shards(layout, plan_hash(read_sealed(open_store(OUT), PLAN)))
                row = SAMPLE.itemsize + SOURCE.itemsize + STORED.itemsize
                result["record_bytes"] = nbytes
                result["bytes_of_4096"] = row * (4096 - args.samples) * args.shards * len(RESOLUTIONS)
            with measured(result, name):
                step()
    write(args.out, result)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
