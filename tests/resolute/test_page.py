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


def test_an_outlier_does_not_flatten_a_robust_chart_and_the_note_names_it() -> None:
    def drawn(values: list[float], *, robust: bool) -> Chart:
        series = [Series(name="y", colour="a", x=[float(i) for i in range(len(values))], y=values)]
        made = chart("y", series, unit="", robust=robust)
        assert made is not None
        return made

    usual = [1.0 + i / 100 for i in range(100)]
    high = drawn([*usual, 500.0], robust=True)
    assert "The axis ends at 2.23; the highest value is 500." in high.note
    assert float(high.y_ticks[-1][1]) < 4
    for values, robust in ((usual, True), ([*usual, 500.0], False), ([*usual, 2.5], True)):
        assert drawn(values, robust=robust).note == ""
    assert "highest value is 90" in drawn([2.0, 1.8, 1.6, 90.0, 1.4], robust=True).note
