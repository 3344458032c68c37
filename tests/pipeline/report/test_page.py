"""The toolkit of HTML reports: everything is text, and nothing on a page is invisible or fails for lack of values."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from pipeline.report.charts import Series, chart, short
from pipeline.report.page import render


def rendered(folder: Path, body: str, **values: object) -> str:
    (folder / "template.html").write_text(
        '{% extends "base.html" %}{% from "parts.html" import bars, preformatted, table %}'
        f"{{% block body %}}{body}{{% endblock %}}"
    )
    page = render(folder / "template.html", title="T", subtitle="S", **values).decode()
    return page[page.index("S</p>") + len("S</p>") : page.index("</main>")].strip()


def test_values_are_text_and_characters_without_a_glyph_are_shown_as_escapes(tmp_path: Path) -> None:
    value = "caf\udce9\x07\n\u202e <é> & \"q\""
    expected = "caf\\udce9\\x07\\n\\u202e &lt;é&gt; &amp; &#34;q&#34;"
    page = rendered(tmp_path, "{{ value }}{{ table(['h'], [[value]]) }}", value=value)
    assert page.startswith(expected)
    assert f'<td class="">{expected}</td>' in page


def test_backticks_become_code_and_the_text_stays_text(tmp_path: Path) -> None:
    text = "<b> use `--threads <n>` & `x`"
    expected = "&lt;b&gt; use <code>--threads &lt;n&gt;</code> &amp; <code>x</code>"
    assert rendered(tmp_path, "{{ text|code }}", text=text) == expected


def test_cells_hold_lines_with_remarks_and_number_columns_are_marked(tmp_path: Path) -> None:
    rows = [[1, ["<a>", ("b", "(c)")]]]
    page = rendered(tmp_path, "{{ table(['n#', 'lines'], rows) }}", rows=rows)
    assert '<th class="n">n</th><th class="">lines</th>' in page
    assert '<td class="n">1</td><td class="">&lt;a&gt;<br>b <span class="soft">(c)</span></td>' in page


def test_preformatted_text_keeps_its_lines(tmp_path: Path) -> None:
    page = rendered(tmp_path, "{{ preformatted(text) }}", text="a = 1\n\n\tb = '<'")
    assert page == "<pre>a = 1\n\n        b = &#39;&lt;&#39;\n</pre>"


@pytest.mark.parametrize(("rows", "count"), [([], 0), ([("a", 0.0, "0")], 1)])
def test_bars_without_any_value_are_still_bars(tmp_path: Path, rows: list[tuple[str, float, str]], count: int) -> None:
    assert rendered(tmp_path, "{{ bars(rows) }}", rows=rows).count("width:0.00%") == count


def test_a_value_that_the_template_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(jinja2.UndefinedError):
        rendered(tmp_path, "{{ absent }}")


def test_a_chart_without_finite_values_is_no_chart() -> None:
    assert chart("t", [Series(name="n", colour="a", x=[0.0, 1.0], y=[float("nan")] * 2)], unit="") is None


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (12.5, "12.5"), (1200, "1,200"), (1.25e6, "1.25M")]
)
def test_tick_labels_are_short(value: float, text: str) -> None:
    assert short(value) == text
