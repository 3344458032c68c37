"""Draws the pictures in `docs/` that come from result files.

    python -m resolute.benchmarks.pictures [--only stage_change,whole]

stage_change.svg  the time of each step across two changes of resolution, Resolute and a rebuilt DataLoader: the first
                  round of `python -m resolute.benchmarks.change`: a step is a fixed pause and the wait for its batch
whole.svg         top-1 against the time since the start of the command, for each tool: the mean over the seeds of
                  `python -m resolute.benchmarks.whole`, with the time that prep takes first
siblings.svg      top-1 of a validation with changed copies of training photos, and of one without: the means of
                  `python -m resolute.benchmarks.siblings`
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import output_file

from .cli import Parser, chosen, command
from .record import RESULTS

__all__ = ["PICTURES", "draw_stage_change", "draw_whole", "drawn", "main"]

_FOLDER = Path(__file__).resolve().parents[1] / "docs"
_WIDTH, _HEIGHT = 860, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 58, 44  # margins of the plot
_SKIPPED = 10  # first steps of the first stage: both loaders start
_CHANGE_LINES = {"peer": ("DataLoader, rebuilt at each change", "#d9730d"), "ours": ("Resolute", "#3b7dd8")}
_WHOLE_LINES = {
    "timm": ("timm, 224 px", "#d9730d"),
    "timm-sizes": ("timm, its sizes", "#b8860b"),
    "plain": ("plain loop", "#6b7280"),
    "ffcv": ("FFCV", "#2f855a"),
    "ours": ("Resolute", "#3b7dd8"),
}
_GREY = "#98a2b0"
_SIBLING_SIDES = {"at random": ("divided at random", "#d9730d"), "GROUP": ("GROUP", "#3b7dd8")}
_SIBLING_FIGURES = {
    "top1": "all validation photos",
    "without_near_copies": "those without a near copy in train",
    "true_top1": "other photos",
}
Line = tuple[str, str, Sequence[tuple[float, float]]]  # name, colour, points (x, y)


class _Plot:
    """An SVG with a title, a legend, axes from 0 and lines."""

    def __init__(self, title: str, below: str, lines: Sequence[Line], *, steps: tuple[float, float]) -> None:
        """`steps`: between the ticks of x (0: none) and y."""
        self._lines, (self._step_x, step_y) = lines, steps
        points = [point for _, _, line in lines for point in line]
        self._most_x = max(x for x, _ in points)
        self._most_y = (max(y for _, y in points) // step_y + 1) * step_y
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="13" fill="#414a56">',
            f"<title>{title}</title>",
            f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#fff"/>',
            f'<text x="14" y="24" font-size="15" font-weight="600" fill="#1c2430">{title}</text>',
        ]
        left = float(_WIDTH - _RIGHT)
        for name, colour, _ in lines:
            left -= 44 + 7 * len(name)
            self._parts += [
                f'<rect x="{left}" y="17" width="18" height="4" fill="{colour}"/>',
                f'<text x="{left + 24}" y="24">{name}</text>',
            ]
        for i in range(math.ceil(self._most_y / step_y) + 1):
            y = self.y(i * step_y)
            self._parts += [
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#dfe3e8"/>',
                f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{i * step_y:g}</text>',
            ]
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        self._parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">{below}</text>')
        if self._step_x:
            for i in range(int(self._most_x / self._step_x) + 1):
                self._parts.append(
                    f'<text x="{self.x(i * self._step_x)}" y="{_HEIGHT - _BOTTOM + 18}" '
                    f'text-anchor="middle">{i * self._step_x:g}</text>'
                )

    def x(self, value: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self._most_x, 1)

    def y(self, value: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - value / self._most_y), 1)

    def mark(self, value: float, name: str) -> None:
        """A name above the plot at x = `value`, with a dashed line below it unless it is the start."""
        if value:
            self._parts.append(
                f'<line x1="{self.x(value)}" x2="{self.x(value)}" y1="{_TOP - 8}" '
                f'y2="{_HEIGHT - _BOTTOM}" stroke="#98a2b0" stroke-dasharray="4 3"/>'
            )
        self._parts.append(f'<text x="{self.x(value) + 6}" y="{_TOP - 2}">{name}</text>')

    def svg(self, *, dots: bool = False) -> str:
        """`dots`: at each point."""
        for _, colour, line in self._lines:
            points = " ".join(f"{self.x(x)},{self.y(y)}" for x, y in line)
            self._parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
            )
            self._parts += [
                f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="3" fill="{colour}"/>' for x, y in line if dots
            ]
        return "\n".join([*self._parts, "</svg>"]) + "\n"


def _first_waits(result: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """The wait for each batch of each stage, in s, of the first round: with "ours" and with a rebuilt "peer"."""
    waits = (result.get("change") or result["switch"])["consumers"]["paced"]["batch_s"]
    return {"ours": waits["ours"][0], "peer": waits["peer" if "peer" in waits else "pillow"][0]}


def draw_stage_change(result: Mapping[str, Any]) -> str:
    """The picture as SVG, from a result of `resolute.benchmarks.change`."""
    change = result.get("change") or result["switch"]
    paced = change["consumers"]["paced"]
    resolutions = change.get("resolutions") or result["shards"]["resolutions"]
    first_rounds = _first_waits(result)
    # why the least: the picture puts the changes at the same place for both loaders
    per_stage = min(len(waits_s) for stages in first_rounds.values() for waits_s in stages)
    steps = {
        name: [
            (step_s + wait_s) * 1e3
            for step_s, waits_s in zip(paced["step_s"], stages, strict=True)
            for wait_s in waits_s[:per_stage]
        ][_SKIPPED:]
        for name, stages in first_rounds.items()
    }
    lines = [(*_CHANGE_LINES[name], list(enumerate(steps[name]))) for name in _CHANGE_LINES]
    plot = _Plot("Time of each step, ms", "step", lines, steps=(0, 100))
    for stage, res in enumerate(resolutions):
        plot.mark(max(0, per_stage * stage - _SKIPPED), f"{res} px")
    return plot.svg()


def draw_whole(result: Mapping[str, Any]) -> str:
    """The picture as SVG, from a result of `whole`."""
    lines = []
    for tool, (name, colour) in _WHOLE_LINES.items():
        curves = [run["curve"] for run in result["runs"] if run["tool"] == tool and not run["round"]]
        if not curves:
            continue
        prep_s = result["prep_s"].get(tool.partition("-")[0], 0.0)
        epochs = zip(*curves, strict=True)
        lines.append(
            (
                name,
                colour,
                [
                    (
                        prep_s + statistics.fmean(point["elapsed_s"] for point in points),
                        100 * statistics.fmean(point["top1"] for point in points),
                    )
                    for points in epochs
                ],
            )
        )
    longest = max(x for _, _, line in lines for x, _ in line)
    step_x = next(step for step in (10, 20, 50, 100, 200, 500, 1000, 10_000) if longest / step <= 12)
    return _Plot("top-1, %", "seconds since the start of the command, prep included", lines, steps=(step_x, 10)).svg(
        dots=True
    )


def draw_siblings(result: Mapping[str, Any]) -> str:
    """The picture as SVG, from a result of `siblings`: a bar for each accuracy."""
    title = "top-1, %: what the validation says, and the same networks on other photos"
    bars = []
    for side, (name, colour) in _SIBLING_SIDES.items():
        figures = result["summary"][side]
        for key, what in _SIBLING_FIGURES.items():
            if key in figures and (key != "without_near_copies" or side == "at random"):
                bars.append((f"{name}: {what}", _GREY if key == "true_top1" else colour, 100 * figures[key]["mean"]))
    height = 52 + 34 * len(bars)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#414a56">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#fff"/>',
        f'<text x="14" y="24" font-size="15" font-weight="600" fill="#1c2430">{title}</text>',
    ]
    left, widest = 380, 420
    for number, (name, colour, value) in enumerate(bars):
        y = 44 + 34 * number
        width = round(widest * value / 100, 1)
        parts += [
            f'<text x="{left - 10}" y="{y + 15}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{width}" height="22" rx="3" fill="{colour}"/>',
            f'<text x="{left + width + 8}" y="{y + 15}">{value:.1f}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


PICTURES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {  # {name: (result file, function)}
    "stage_change": ("bench-cpu", draw_stage_change),
    "whole": ("whole", draw_whole),
    "siblings": ("siblings", draw_siblings),
}


def drawn(name: str) -> tuple[Path, str]:
    """The picture's file, and what it should hold. Raises `ResoluteError` for a result file of another kind."""
    source, draw = PICTURES[name]
    path = RESULTS / f"{source}.json"
    try:
        return _FOLDER / f"{name}.svg", draw(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError):
        raise ResoluteError(f"{path.name}: got another kind of result, expected one for {name}; measure it") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = Parser(prog="python -m resolute.benchmarks.pictures", description="Draw the pictures in docs/.")
    parser.add_argument("--only", default=",".join(PICTURES), help="(default: %(default)s)")

    def work(args: argparse.Namespace) -> None:
        for name in chosen(args.only, list(PICTURES)):
            path, picture = drawn(name)
            with output_file(path) as file:
                file.write(picture.encode())
            print(f"written: {path.relative_to(_FOLDER.parent)}")

    return command(parser, work, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
