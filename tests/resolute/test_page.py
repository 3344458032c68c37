"""The toolkit of the HTML reports: values are escaped, and pages are complete even with missing values."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from resolute.report.charts import Chart, Series, chart
from resolute.report.page import render


def rendered(folder: Path, body: str, **values: object) -> str:
    template = folder / f"template{len(list(folder.iterdir()))}.html"  # why another one: they are loaded once
    template.write_text(
        '{% extends "base.html" %}{% from "parts.html" import bars, preformatted, table %}'
        f"{{% block body %}}{body}{{% endblock %}}"
    )
    page = render(template, title="T", subtitle="S", **values).decode()
    return page[page.index("S</p>") + len("S</p>") : page.index("</main>")].strip()


def test_values_are_escaped_and_invisible_characters_are_shown_as_escapes(tmp_path: Path) -> None:
    value = 'caf\udce9\x07\n\u202e <é> & "q"'
    expected = "caf\\udce9\\x07\\n\\u202e &lt;é&gt; &amp; &#34;q&#34;"
    page = rendered(tmp_path, "{{ value }}{{ table(['h'], [[value]], 'Table') }}", value=value)
    assert page.startswith(expected)
    assert f'<td class="">{expected}</td>' in page
    code = rendered(tmp_path, "{{ text|code }}", text="<b> use `--threads <n>`")
    assert code == "&lt;b&gt; use <code>--threads &lt;n&gt;</code>"
    lines = rendered(tmp_path, "{{ preformatted(text) }}", text="a = 1\n\n\tb = '<'")
    assert lines == "<pre>a = 1\n\n        b = &#39;&lt;&#39;\n</pre>"


def test_missing_values_leave_a_chart_out_and_bars_empty_but_undefined_ones_are_an_error(tmp_path: Path) -> None:
    assert chart("t", [Series(name="n", colour="a", x=[0.0, 1.0], y=[float("nan")] * 2)], unit="") is None
    for rows, count in (([], 0), ([("a", 0.0, "0")], 1)):
        assert rendered(tmp_path, "{{ bars(rows) }}", rows=rows).count("width:0.00%") == count
    with pytest.raises(jinja2.UndefinedError):
        rendered(tmp_path, "{{ absent }}")


def test_outliers_do_not_flatten_a_robust_chart_and_the_note_says_how_far_they_reach() -> None:
    def drawn(values: list[float], *, robust: bool, zero: bool = True) -> Chart:
        series = [Series(name="y", colour="a", x=[float(i) for i in range(len(values))], y=values)]
        made = chart("y", series, unit="", robust=robust, zero=zero)
        assert made is not None
        return made

    usual = [1.0 + i / 100 for i in range(100)]
    high = drawn([*usual, 500.0], robust=True)
    assert high.note == "Values above the axis reach 500."
    assert 2 <= float(high.y_ticks[-1][1]) < 4
    low = drawn([-30.0, *usual], robust=True, zero=False)
    assert low.note == "Values below the axis reach -30."
    assert 0 <= float(low.y_ticks[0][1]) <= 1
    both = drawn([-30.0, *usual, 500.0], robust=True, zero=False)
    assert both.note == "Values above the axis reach 500. Values below the axis reach -30."
    for values, robust in ((usual, True), ([*usual, 500.0], False), ([*usual, 2.5], True)):
        assert drawn(values, robust=robust).note == ""
    assert drawn([2.0, 1.8, 1.6, 90.0, 1.4], robust=True).note == "Values above the axis reach 90."
    assert drawn([2.0, 1.8, 90.0], robust=True).note == ""  # of so few, none is an outlier
    assert drawn([*usual[:3], *[9.0] * 97], robust=True).note == ""  # most values are none
