"""prep's HTML report shows the contents of the set on one self-contained page with escaped names."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from resolute.pipeline.dataset.shard_set import ShardSet
from resolute.prep.build import BuildResult, build
from resolute.prep.report.browse import open_set
from resolute.prep.report.report import write_report
from resolute.prep.settings import Settings
from resolute.prep.storage.output import LocalStore, Store, open_output

ODD = ['<b>bold</b> & "co"', "$x_1$ 猫", "a" * 90]
VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks nesting; collects text, sheets (images of each <details>) and titles."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: Counter[str] = Counter()
        self.text = ""
        self.sheets: list[list[bytes]] = []
        self.titles: list[str] = []
        self.feed(data.decode())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] += 1
        known = dict(attrs)
        assert not any(name.startswith("on") or name == "href" for name in known)
        assert "src" not in known or (known["src"] or "").startswith("data:")
        if tag not in VOID:
            self.open.append(tag)
        if tag == "details":
            self.sheets.append([])
        if tag == "figure" and "title" in known:
            self.titles.append(known["title"] or "")
        if tag == "img":
            data = base64.b64decode((known["src"] or "").partition(",")[2], validate=True)
            if "details" in self.open:
                self.sheets[-1].append(data)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["style"], ["script"]):
            self.text += data + "\n"


def write(store: Store, built: BuildResult) -> str:
    with open_set(store) as shards:
        return write_report(store, built, shards)


def made(src: Path, out: Path, **settings: Any) -> tuple[BuildResult, Page]:
    words: dict[str, Any] = {"res": (32, 48), "workers": 2, "shard_samples": 20, **settings}
    built = build(Settings(src=str(src), out=str(out), **words))
    assert write(LocalStore(out), built) == f"{out}/report.html"
    return built, Page((out / "report.html").read_bytes())


def test_the_report_shows_the_stored_jpegs(photos: Path, tmp_path: Path) -> None:
    _, page = made(photos, tmp_path / "s")
    opened = ShardSet.open(tmp_path / "s")
    split = opened.splits["train"]
    names = [json.loads(line) for line in (tmp_path / "s" / "index" / "train.sources.jsonl").read_text().splitlines()]
    assert [len(sheet) for sheet in page.sheets] == [48, 48]
    for res, sheet in zip((32, 48), page.sheets, strict=True):
        rows = split.stored[res]
        stored = [
            opened.path(res, split.shards[row["shard"]]).read_bytes()[row["offset"] :][: row["nbytes"]] for row in rows
        ]
        assert [stored.index(jpeg) for jpeg in sheet] == sorted({stored.index(jpeg) for jpeg in sheet})
        for jpeg, title in zip(sheet, page.titles[: len(sheet)], strict=True):
            row = stored.index(jpeg)
            assert title == f"{split.samples['key'][row]:09d} {names[row]}"
    assert page.seen["link"] == 0


def test_the_report_shows_the_figures_of_the_set(photos: Path, tmp_path: Path) -> None:
    (photos / "bee" / "twin.jpg").write_bytes((photos / "cat" / "01.jpg").read_bytes())
    (photos / "bee" / "bad.jpg").write_bytes(b"\xff\xd8 nothing")
    (photos / "apple" / "worse.jpg").write_bytes(b"")
    built, page = made(photos, tmp_path / "s", max_bad=0.5)
    words = page.text
    assert f"{built.manifest['splits']['train']['samples']}\n" in words
    assert "train samples" in words
    assert "2 of 63 images were rejected." in words
    assert "bee/bad.jpg: " in words
    assert "apple/worse.jpg: empty file" in words
    assert "Exact copies of other images: 1, in 1 group;" in words
    assert "Copies with different targets, one of which is wrong: 1 group" in words
    assert "bee/twin.jpg" in words
    for res in ("32", "48"):
        tars = [i["bytes"] for n, i in built.manifest["files"].items() if n.startswith(f"{res}/") and n.endswith("tar")]
        assert f"{sum(tars) / 1e6:,.1f}" in words
    sizes = sorted(((p.stat().st_size, p) for p in photos.rglob("*.*") if p.name[0].isdigit()), reverse=True)
    for size, path in sizes[:12]:
        assert str(path.relative_to(photos)) in words
        assert f"{size / 1e3:,.1f} kB" in words
    assert built.stats is not None
    assert all(seconds > 0 for seconds, _, _ in built.stats.slowest)
    assert "Slowest images" in words
    assert "63 images in" in words


def test_a_set_in_another_store_has_the_same_report(photos: Path, tmp_path: Path) -> None:
    root = tmp_path / "s"
    built, _ = made(photos, root)
    url = f"memory://{tmp_path}/s"
    store = open_output(url)
    for path in [path for path in root.rglob("*") if path.is_file() and path.name != "report.html"]:
        store.write(str(path.relative_to(root)), path.read_bytes())
    assert write(store, built) == f"{url}/report.html"
    assert store.read("report.html") == (root / "report.html").read_bytes().replace(str(root).encode(), url.encode())


def test_names_are_escaped(tmp_path: Path, scene: Callable[..., NDArray[np.uint8]]) -> None:
    for name in ODD:
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(4):
            odd = tmp_path / "photos" / name / f"<img src=x onerror=alert(1)> \u202egpj{i}\n.jpg"
            Image.fromarray(scene(i, 60, 50)).save(odd, format="JPEG")
    _, page = made(tmp_path / "photos", tmp_path / "s", val_frac=0.3)
    for name in ODD:
        assert name in page.text
    assert "<img src=x onerror=alert(1)> \\u202egpj" in page.text
    assert page.seen["b"] == 8 + 2  # of the headline and of the charts' titles
