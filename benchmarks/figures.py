"""Writes the figures of README and `docs/` that come from result files, the pictures, and the list of the files.

    python -m resolute.benchmarks.figures           # writes them into the pages, and the pictures into docs/
    python -m resolute.benchmarks.figures --check   # only says which pages and pictures are out of date

A page holds a block of figures between `<!-- figures: NAME -->` and `<!-- end -->`. The template templates/NAME.md
makes what is between, sentences included, from the result files that it reads; templates/NAME.svg makes docs/NAME.svg.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from resolute.cli import program
from resolute.errors import ResoluteError
from resolute.files import output_file
from resolute.settings import setting, settings

from .record import RESULTS, digest, results_page

__all__ = ["PAGES", "PICTURES", "main", "stale", "write_all", "written"]

_ROOT = Path(__file__).resolve().parents[1]
_TEMPLATES = Path(__file__).parent / "templates"
PAGES = tuple(
    _ROOT / name for name in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/gpu.md", "docs/validation.md")
)
PICTURES = tuple(_ROOT / "docs" / path.name for path in sorted(_TEMPLATES.glob("*.svg")) if path.stem[0] != "_")
_BLOCK = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
_LINK = "benchmarks/results/"  # as README links to result files; pages in docs/ go up a folder


@cache
def result(name: str) -> Mapping[str, Any]:
    """The result file of this name. Raises `ResoluteError` if it is missing or was edited."""
    path = RESULTS / f"{name}.json"
    again = "measure it again, with its command in benchmarks/results/README.md"
    if not path.exists():
        raise ResoluteError(f"{path.name}: not found, expected in benchmarks/results; {again}")
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if values.get("digest") != digest(values):
        raise ResoluteError(f"{path.name}: got values that do not fit its digest, expected a file as measured; {again}")
    return values


def link(name: str) -> str:
    return f"[{name}.json]({_LINK}{name}.json)"


def processor(name: str) -> str:
    """Number and kind of a result's processor cores, in words."""
    machine = result(name)["machine"]
    cores = "two cores" if machine["cores"] == 2 else f"{machine['cores']} cores"
    kind = machine["cpu"].split("(")[0].strip()
    return f"{cores} of {'an' if kind[0] in 'AEIOU' else 'a'} {kind}"


def trainings(name: str) -> dict[str, Mapping[str, Any]]:
    """{tool or recipe: its row of `whole.summary`}."""
    from .whole.summary import summary

    return {row["tool"]: row for row in summary(result(name))}


def stage_costs(name: str) -> list[dict[str, Any]]:
    """The costs of the stage changes in a result of `resolute bench`, as `change.summary` gives them."""
    from . import bench

    return bench.stage_costs(result(name))


def curve(name: str, tool: str) -> list[tuple[float, float]]:
    """(seconds since the start of the command, prep included; top-1 in %) of each epoch, means over the seeds."""
    runs = [run["curve"] for run in result(name)["runs"] if run["tool"] == tool]
    prep_s = trainings(name)[tool]["prep_s"]
    return [
        (
            prep_s + statistics.fmean(point["elapsed_s"] for point in points),
            100 * statistics.fmean(point["top1"] for point in points),
        )
        for points in zip(*runs, strict=True)
    ]


def gpu_results() -> list[tuple[str, str]]:
    """(name, tables as text) of each GPU that `benchmarks/gpu.py` ran on."""
    from .gpu import tables

    names = [path.stem for path in sorted(RESULTS.glob("gpu-*.json"))]
    return [(name, tables(result(name))) for name in names]


def count(value: float) -> str:
    """A whole number with narrow groups of three digits."""
    return f"{value:,.0f}".replace(",", "\u00a0")


def number(value: float, digits: int = 0) -> str:
    return f"{value:.{digits}f}"


def with_error(value: Sequence[float] | None, digits: int = 1, factor: float = 1.0) -> str:
    """(mean, standard error) as text; "" for None."""
    return "" if value is None else f"{factor * value[0]:.{digits}f} ± {factor * value[1]:.{digits}f}"


def spread(values: Mapping[str, Any], digits: int = 0, factor: float = 1.0) -> str:
    """Repeated measurements as median (lowest to highest)."""
    middle, *ends = (
        f"{round(factor * value, digits) + 0:.{digits}f}"  # why + 0: without it, -0
        for value in (values["median"], min(values["raw"]), max(values["raw"]))
    )
    return f"{middle} ({' to '.join(ends)})"


def _environment() -> jinja2.Environment:
    # why no escaping: the values are numbers and names of this project's own files
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "count": count,
        "number": number,
        "with_error": with_error,
        "spread": spread,
        "median": statistics.median,
    }
    environment.tests["match"] = lambda text, pattern: re.match(pattern, text) is not None
    environment.globals |= {
        "result": result,
        "link": link,
        "processor": processor,
        "trainings": trainings,
        "stage_costs": stage_costs,
        "curve": curve,
        "gpu_results": gpu_results,
    }
    return environment


def _rendered(name: str) -> str:
    """The text of a rendered template. Raises `ResoluteError` for an unknown template, or a result without a value."""
    try:
        return _environment().get_template(name).render()
    except jinja2.TemplateNotFound:
        known = ", ".join(sorted(path.name for path in _TEMPLATES.iterdir()))
        raise ResoluteError(f"figures: got {name}, expected one of {known}; correct the page") from None
    except (jinja2.UndefinedError, KeyError, TypeError, ValueError) as error:
        raise ResoluteError(
            f"templates/{name}: got {error!r}, expected a result of today's programs; measure it again"
        ) from None


def written(text: str, *, folder: str = "") -> str:
    """`text` of a page with all its figures as the result files have them now.

    folder: of the page, relative to the repository's root. Raises `ResoluteError` for an unknown figure.
    """

    def block(match: re.Match[str]) -> str:
        begin, name, _, end = match.groups()
        figures = _rendered(f"{name}.md").strip()
        figures = figures.replace(f"]({_LINK}", f"]({'../' * len(Path(folder).parts)}{_LINK}")
        return f"{begin}\n{figures}\n\n{end}"

    if text.count("<!-- figures:") != len(_BLOCK.findall(text)):
        raise ResoluteError("figures: got a block without its end, expected <!-- end --> after each; correct the page")
    return _BLOCK.sub(block, text)


def stale() -> Iterator[tuple[Path, str]]:
    """The pages, the list of results and the pictures that are out of date, with the text that each should have."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if (new := written(text, folder=str(page.parent.relative_to(_ROOT)))) != text:
            yield page, new
    index = RESULTS / "README.md"
    if index.read_text(encoding="utf-8") != (new := results_page(RESULTS)):
        yield index, new
    for picture in PICTURES:
        new = _rendered(picture.name)
        if not picture.exists() or picture.read_text(encoding="utf-8") != new:
            yield picture, new


def write_all() -> None:
    """Write the pages and pictures that are out of date; prints their names."""
    for path, text in stale():
        with output_file(path) as file:
            file.write(text.encode())
        print(f"written: {path.relative_to(_ROOT)}")


@settings("")
class FiguresOptions:
    check: bool = setting(False, "write nothing; status 2 if a page or picture is out of date")


def _run(options: FiguresOptions) -> None:
    if not options.check:
        write_all()
    elif names := ", ".join(str(path.relative_to(_ROOT)) for path, _ in stale()):
        raise ResoluteError(
            f"{names}: got other figures than the result files have, expected the same; "
            "run `python -m resolute.benchmarks.figures`"
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    name = "python -m resolute.benchmarks.figures"
    return program(name, FiguresOptions, _run, words, help="Write the figures and pictures of README and docs/.")


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
