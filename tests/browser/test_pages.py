"""Every report in a real browser: no errors, no other host, readable at all widths, usable without a mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from resolute.train.logs.run_log import RunLogReader
from resolute.train.report.page import write_page
from tests.support.browser import NEEDS_BROWSER, Tab, browser, open_tab
from tests.support.pages import PAGES
from tests.support.synthetic_log import write_log

pytestmark = [pytest.mark.slow, NEEDS_BROWSER]
NARROW, WIDE = 400, 1400

# what is cut off at the right
OVERFLOW = r"""(() => {
  const overflow = [];
  const words = node => (node.tagName || "text").toLowerCase() + " " + (node.textContent || "").trim().slice(0, 60);
  const scrolls = node => { for (let up = node.parentElement; up; up = up.parentElement)
    if (getComputedStyle(up).overflowX !== "visible" && up !== document.body) return true; return false; };
  if (document.documentElement.scrollWidth > innerWidth)
    for (const node of document.body.querySelectorAll("*"))
      if (node.getBoundingClientRect().right > innerWidth + 1 && !scrolls(node)) overflow.push(words(node));
  return overflow;
})()"""
# why the index: it names an element in what Tab reaches
TARGETS = r"""[...document.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")]
  .filter(node => node.tabIndex >= 0 && node.checkVisibility({visibilityProperty: true, opacityProperty: true}))"""
FOCUS = f"""(() => {{ const node = document.activeElement, style = getComputedStyle(node);
  return [{TARGETS}.indexOf(node), style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0]; }})()"""
PLOT = "document.querySelector('.plot:has([aria-label^=\"Step time\"])')"
READING = f"{PLOT}.closest('.chart').querySelector('.read').textContent"


@pytest.fixture(scope="module")
def running() -> Iterator[Browser]:
    with browser() as running:
        yield running


def _tab_through(tab: Tab) -> tuple[int, int]:
    """Number of elements that Tab does not reach, and number that show no focus."""
    count = tab.run(f"{TARGETS}.length")
    reached, dull = set(), 0
    for _ in range(count):
        tab.page.keyboard.press("Tab")
        index, shown = tab.run(FOCUS)
        reached.add(index)
        dull += index >= 0 and not shown
    return count - len(reached - {-1}), dull


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_ours_is_readable_and_works_with_keys_and_screen_readers(
    name: str, running: Browser, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In a narrow dark window and in a wide light one."""
    path = tmp_path / f"{name}.html"
    path.write_bytes(PAGES[name](request, tmp_path / name))
    assert path.stat().st_size < 3_000_000
    colours = set()
    for width in (NARROW, WIDE):
        with open_tab(running, path.as_uri(), width=width, dark=width == NARROW) as tab:
            tab.run("document.querySelectorAll('details').forEach(node => node.open = true)")
            assert tab.run(OVERFLOW) == []
            colours.add(tab.run("getComputedStyle(document.body).color"))
            if width == NARROW:
                roles = tab.accessible("image", "table", "slider", "region", "button", "link")
                assert [role for role, label in roles if not label.strip()] == []
                assert _tab_through(tab) == (0, 0)
            assert tab.errors() == []
            assert [url for url in tab.requests if not url.startswith((path.as_uri(), "data:"))] == []
    assert len(colours) == 2


def test_charts_show_their_values_at_the_pointer_and_at_the_place_set_by_keys(running: Browser, tmp_path: Path) -> None:
    records = write_log(tmp_path / "run")
    steps = [record for record in records if record["kind"] == "step"]
    log = RunLogReader(tmp_path / "run" / "run.jsonl")
    log.read()
    with open_tab(running, write_page(log, tmp_path / "run").as_uri(), width=NARROW) as tab:
        tab.run(f"{PLOT}.scrollIntoView()")
        box = tab.run(f"{PLOT}.getBoundingClientRect().toJSON()")
        tab.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
        assert tab.run(READING).startswith(f"step 160 · compute {1e3 * steps[160]['compute_s']:.1f}")
        tab.run(f"{PLOT}.focus()")
        tab.page.keyboard.press("End")
        assert tab.run(READING).startswith(f"step 319 · compute {1e3 * steps[319]['compute_s']:.1f}")
        tab.page.keyboard.press("ArrowLeft")
        assert tab.run(READING).startswith("step 318 ")
        assert ("slider", "Values of Step time") in tab.accessible("slider")
        others = tab.run("[...document.querySelectorAll('.read')].map(read => read.textContent)")
        assert sum(text.startswith("step 318 ") for text in others) == 7  # all charts over steps
        tab.page.keyboard.press("Escape")
        assert tab.run(READING).startswith("Longest step: ")
