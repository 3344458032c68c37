"""Every HTML page in a real browser: no errors, no other host, readable at all widths, usable without a mouse.

    RESOLUTE_PAGES="runs/demo/report.html bench" python -m pytest tests/browser

checks these pages too: files, or folders with all pages in them. They and the site are served from a loopback address.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resolute.train.logs.run_log import RunLogReader
from resolute.train.report.page import write_page
from tests import ROOT
from tests.support.browser import BROWSER, Browser, Tab
from tests.support.http_server import serving
from tests.support.pages import PAGES
from tests.support.synthetic_log import write_log

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="opens pages in a browser: no chromium or chrome is installed"),
]
# (folder that is served, page in it)
OTHERS = [(root, path) for word in map(Path, os.environ.get("RESOLUTE_PAGES", "").split())
          for root in [word if word.is_dir() else word.parent]
          for path in (sorted(word.rglob("*.html")) if word.is_dir() else [word])]  # fmt: skip
SITE = [f"{page}.html" for page in re.findall(r": (\w+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)]
NARROW, WIDE = 400, 1400
MAX_BYTES = 3_000_000

# why one script: it sees the page as a reader does, after layout; returns lists of what is wrong, by kind
INSPECT = r"""(() => {
  const wrong = {overflow: [], small: [], overlap: [], contrast: [], headings: [], tables: []};
  const words = node => (node.tagName || "text").toLowerCase() + " " + (node.textContent || "").trim().slice(0, 60);
  const visible = node => node.checkVisibility({visibilityProperty: true, opacityProperty: true});
  const scrolls = node => { for (let up = node.parentElement; up; up = up.parentElement)
    if (getComputedStyle(up).overflowX !== "visible" && up !== document.body) return true; return false; };
  if (document.documentElement.scrollWidth > innerWidth)
    for (const node of document.body.querySelectorAll("*"))
      if (node.getBoundingClientRect().right > innerWidth + 1 && !scrolls(node)) wrong.overflow.push(words(node));
  const rgba = text => { const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (top, under) => top.slice(0, 3).map((c, i) => c * top[3] + under[i] * (1 - top[3])).concat(1);
  const behind = node => { const layers = [];
    for (let up = node; up; up = up.parentElement) layers.push(rgba(getComputedStyle(up).backgroundColor));
    return layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]); };
  const linear = c => (c /= 255) <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4;
  const light = colour => { const [r, g, b] = colour.map(linear);
    return .2126 * r + .7152 * g + .0722 * b; };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let text = walker.nextNode(); text; text = walker.nextNode()) {
    const node = text.parentElement, style = getComputedStyle(node);
    if (!text.data.trim() || node.closest("script, style") || !visible(node)) continue;
    const drawn = node instanceof SVGElement;
    const size = parseFloat(style.fontSize) * (drawn ? Math.abs(node.getScreenCTM().d) : 1);
    if (size < 10) wrong.small.push(size.toFixed(1) + " px: " + words(node));
    if (drawn) continue;
    const back = behind(node), fore = over(rgba(style.color), back);
    const [high, low] = [light(fore), light(back)].sort((a, b) => b - a), ratio = (high + .05) / (low + .05);
    if (ratio < (size >= 24 ? 3 : 4.5)) wrong.contrast.push(ratio.toFixed(2) + ": " + words(node));
  }
  for (const axis of document.querySelectorAll(".x, .y, .marks")) {
    const boxes = [...axis.querySelectorAll("span")].map(span => [span.getBoundingClientRect(), span.textContent])
      .filter(([box]) => box.width);
    for (let i = 0; i < boxes.length; i++) for (let k = 0; k < i; k++) {
      const [[a, one], [b, two]] = [boxes[i], boxes[k]];
      if (Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4) wrong.overlap.push(one + " and " + two);
    }
  }
  for (const label of document.querySelectorAll(".marks *"))
    if (label.textContent.trim() && !label.children.length && label.checkVisibility() && label.clientWidth < 30)
      wrong.overlap.push("cut: " + label.textContent);
  let level = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4, h5, h6")) {
    const own = Number(heading.tagName[1]);
    if (own > level + 1 || (own === 1 && level)) wrong.headings.push(words(heading));
    level = own;
  }
  for (const table of document.querySelectorAll("table"))
    if (!table.querySelector("th") || [...table.querySelectorAll("th")].some(head => !head.textContent.trim()))
      wrong.tables.push(words(table));
  return {wrong, lang: document.documentElement.lang, title: document.title, light: light(behind(document.body))};
})()"""
# why the index: it names an element in what Tab reaches
TARGETS = r"""[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
  .filter(node => node.tabIndex >= 0 && node.checkVisibility({visibilityProperty: true, opacityProperty: true}))"""
FOCUS = f"""(() => {{ const node = document.activeElement, style = getComputedStyle(node);
  return [{TARGETS}.indexOf(node), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0]; }})()"""


READING = "document.querySelector('.read').textContent"


@dataclass
class Seen:
    """Observations of a page in a browser, in a narrow dark window and in a wide light one."""

    url: str
    nbytes: int
    windows: dict[int, dict[str, Any]]
    named: list[tuple[str, str]]
    errors: list[str]
    requests: list[str]
    unreached: int
    unseen_focus: int


def inspect(browser: Browser, url: str, nbytes: int, picture: Path) -> Seen:
    seen = Seen(url, nbytes, {}, [], [], [], 0, 0)
    for width in (NARROW, WIDE):
        with browser.open(url, width=width, dark=width == NARROW) as tab:
            tab.run("document.querySelectorAll('details').forEach(node => node.open = true)")
            seen.windows[width] = tab.run(INSPECT)
            tab.screenshot(picture.with_suffix(f".{width}.png"))
            if width == NARROW:
                seen.named = tab.accessible("image", "table", "slider", "region", "button", "link")
                seen.unreached, seen.unseen_focus = _tab_through(tab)
            seen.errors += tab.errors()
            seen.requests += tab.requests()
    return seen


def _tab_through(tab: Tab) -> tuple[int, int]:
    """Number of elements that Tab does not reach, and number that show no focus."""
    count = tab.run(f"{TARGETS}.length")
    reached, dull = set(), 0
    for _ in range(count):
        tab.press("Tab")
        index, shown = tab.run(FOCUS)
        reached.add(index)
        dull += index >= 0 and not shown
    return count - len(reached - {-1}), dull


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="session")
def seen(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[Any], Seen]:
    """seen(page): what the browser showed of a page of `PAGES` or `SITE`, by name, or of `OTHERS`; opened once each."""
    folder = tmp_path_factory.mktemp("pages")

    @functools.cache
    def look(page: Any) -> Seen:
        if page in SITE:
            root = request.getfixturevalue("site")
            page = (root, root / page)
        if not isinstance(page, str):
            root, path = page
            with serving(root) as port:
                url = f"http://127.0.0.1:{port}/{path.relative_to(root)}"
                return inspect(browser, url, path.stat().st_size, folder / "-".join(path.relative_to(root).parts))
        path = folder / f"{page}.html"
        path.write_bytes(PAGES[page](request, folder / page))
        return inspect(browser, path.as_uri(), path.stat().st_size, path)

    return look


@pytest.fixture(params=[*PAGES, *SITE, *OTHERS], ids=str, scope="module")
def page(request: pytest.FixtureRequest, seen: Callable[[Any], Seen]) -> Seen:
    return seen(request.param)


@pytest.fixture(params=PAGES, scope="module")
def own_page(request: pytest.FixtureRequest, seen: Callable[[Any], Seen]) -> Seen:
    """A page of our own templates; those of a site have the colours, icons and menus of its theme."""
    return seen(request.param)


FAULTY = """<!doctype html><body style="background: #fff; color: #000; margin: 0">
<h2>second</h2><div style="width: 2000px">wide</div><p style="font-size: 9px">small</p>
<p style="color: #aaa">pale</p>
<svg viewBox="0 0 100 100" width="50" height="50"><text y="50" font-size="16">tiny</text></svg>
<div class="x" style="position: relative"><span style="position: absolute">100,000</span>
<span style="position: absolute">200,000</span></div>
<table><tr><th></th></tr><tr><td>1</td></tr></table><svg role="img" width="9" height="9"></svg>
<button style="outline: none">b</button><button tabindex="5">c</button><div inert><button>d</button></div>
<img src="http://127.0.0.1:9/x.png" alt="x">
<script>console.error("wrong"); nowhere();</script></body>"""


def test_the_inspection_sees_every_kind_of_fault(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "faulty.html").write_text(FAULTY)
    seen = inspect(browser, (tmp_path / "faulty.html").as_uri(), 0, tmp_path / "faulty.html")
    for window in seen.windows.values():
        wrong = window["wrong"]
        assert ["wide" in text for text in wrong["overflow"]] == [True]
        assert [text.split()[0] for text in wrong["small"]] == ["9.0", "8.0"]
        assert [text.partition(": ")[2] for text in wrong["contrast"]] == ["p pale"]
        assert len(wrong["overlap"]) == len(wrong["headings"]) == len(wrong["tables"]) == 1
        assert (window["lang"], window["title"]) == ("", "")
    assert seen.windows[NARROW]["light"] > 0.9  # not dark
    assert ("image", "") in seen.named
    assert seen.unseen_focus == 1
    assert seen.unreached == 1
    assert any(url.startswith("http://127.0.0.1:9/") for url in seen.requests)
    errors = " ".join(seen.errors)
    assert "wrong" in errors
    assert "Uncaught" in errors


def test_a_page_loads_without_errors_and_asks_no_other_host(page: Seen) -> None:
    assert page.errors == []
    here = "/".join(page.url.split("/")[:3]) if page.url.startswith("http") else page.url
    assert [url for url in page.requests if not url.startswith((here, "data:"))] == []


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("kind", ["overflow", "small", "tables"])
def test_text_fits_and_tables_have_headers_in_narrow_and_wide_windows(page: Seen, width: int, kind: str) -> None:
    assert page.windows[width]["wrong"][kind][:10] == []


@pytest.mark.parametrize("width", [NARROW, WIDE])
@pytest.mark.parametrize("kind", ["overlap", "contrast"])
def test_text_is_distinct_in_narrow_dark_and_wide_light_windows(own_page: Seen, width: int, kind: str) -> None:
    assert own_page.windows[width]["wrong"][kind][:10] == []


def test_a_page_follows_the_dark_mode_of_the_system(page: Seen) -> None:
    assert page.windows[NARROW]["light"] < 0.1
    assert page.windows[WIDE]["light"] > 0.8


def test_all_that_reacts_is_reached_by_tab_and_shows_its_focus(own_page: Seen) -> None:
    assert (own_page.unreached, own_page.unseen_focus) == (0, 0)


def test_a_screen_reader_gets_language_title_and_headings_in_order(page: Seen) -> None:
    for window in page.windows.values():
        assert window["lang"]
        assert window["title"]
        assert window["wrong"]["headings"] == []


def test_a_screen_reader_gets_the_names_of_images_tables_and_controls(own_page: Seen) -> None:
    assert [role for role, name in own_page.named if not name.strip()] == []


def test_a_page_has_less_than_three_megabytes(page: Seen) -> None:
    assert page.nbytes < MAX_BYTES


def test_charts_show_their_values_at_the_pointer_and_at_the_place_set_by_keys(browser: Browser, tmp_path: Path) -> None:
    records = write_log(tmp_path / "run")
    steps = [record for record in records if record["kind"] == "step"]
    log = RunLogReader(tmp_path / "run" / "run.jsonl")
    log.read()
    with browser.open(write_page(log, tmp_path / "run").as_uri(), width=NARROW) as tab:
        tab.run("document.querySelector('.plot').scrollIntoView()")
        box = tab.run("document.querySelector('.plot').getBoundingClientRect().toJSON()")
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 2, y=box["y"] + 10)
        assert tab.run(READING).startswith(f"step 160 · compute {1e3 * steps[160]['compute_s']:.1f}")
        tab.run("document.querySelector('.plot').focus()")
        tab.press("End")
        assert tab.run(READING).startswith(f"step 319 · compute {1e3 * steps[319]['compute_s']:.1f}")
        tab.press("ArrowLeft")
        assert tab.run(READING).startswith("step 318 ")
        assert ("slider", "Values of Step time") in tab.accessible("slider")
        others = tab.run("[...document.querySelectorAll('.read')].map(read => read.textContent)")
        assert sum(text.startswith("step 318 ") for text in others) == 7  # all charts over steps
        tab.press("Escape")
        assert tab.run(READING).startswith("Longest step: ")
