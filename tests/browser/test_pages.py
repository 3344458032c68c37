"""Every HTML page in a real browser: no errors, no other host, readable at all widths, usable without a mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resolute.train.logs.run_log import RunLogReader
from resolute.train.report.page import write_page
from tests.support.browser import BROWSER, Browser, Tab
from tests.support.http_server import serving
from tests.support.pages import PAGES
from tests.support.synthetic_log import write_log

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="opens pages in a browser: no chromium or chrome is installed"),
]
SITE = ["index.html", "benchmarks.html", "gpu.html", "recipe_keys.html", "api.html"]  # with the widest tables
NARROW, WIDE = 400, 1400

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


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


def look(browser: Browser, url: str, *, keys: bool = False) -> dict[int, dict[str, Any]]:
    """What is seen of a page in a narrow dark window and in a wide light one; with `keys`, also what Tab reaches."""
    seen = {}
    for width in (NARROW, WIDE):
        with browser.open(url, width=width, dark=width == NARROW) as tab:
            tab.run("document.querySelectorAll('details').forEach(node => node.open = true)")
            seen[width] = tab.run(INSPECT)
            if keys and width == NARROW:
                seen[width]["roles"] = tab.accessible("image", "table", "slider", "region", "button", "link")
                seen[width]["unreached"], seen[width]["unseen_focus"] = _tab_through(tab)
            seen[width] |= {"errors": tab.errors(), "requests": tab.requests()}
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


def check(seen: dict[int, dict[str, Any]], here: str) -> None:
    """No errors, no request elsewhere, text that fits, headers, headings, and the colours that the system asks for."""
    for width, page in seen.items():
        assert page["errors"] == []
        assert [url for url in page["requests"] if not url.startswith((here, "data:"))] == []
        assert {kind: page["wrong"][kind][:10] for kind in ("overflow", "small", "tables", "headings")} == {
            "overflow": [], "small": [], "tables": [], "headings": []}, width  # fmt: skip
        assert page["lang"]
        assert page["title"]
    assert seen[NARROW]["light"] < 0.1
    assert seen[WIDE]["light"] > 0.8


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_ours_is_readable_and_works_with_keys_and_screen_readers(
    name: str, browser: Browser, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / f"{name}.html"
    path.write_bytes(PAGES[name](request, tmp_path / name))
    assert path.stat().st_size < 3_000_000
    seen = look(browser, path.as_uri(), keys=True)
    check(seen, path.as_uri())
    for page in seen.values():
        assert page["wrong"]["overlap"][:10] == page["wrong"]["contrast"][:10] == []
    assert (seen[NARROW]["unreached"], seen[NARROW]["unseen_focus"]) == (0, 0)
    assert [role for role, label in seen[NARROW]["roles"] if not label.strip()] == []


@pytest.mark.parametrize("name", SITE)
def test_a_page_of_the_site_is_readable(name: str, browser: Browser, site: Path) -> None:
    """Colours, icons and menus are its theme's."""
    with serving(site) as port:
        here = f"http://127.0.0.1:{port}"
        check(look(browser, f"{here}/{name}"), here)


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
