"""Draws `docs/stage_change.svg`: the time of each step across two changes of resolution, ours and a rebuilt DataLoader.

    python -m resolute.benchmarks.stage_change_picture [--result benchmarks/results/bench-cpu.json]

The result file is one of `resolute bench-all --only change`, first round: a consumer that takes a fixed time per
step. A step's time is that fixed time and the wait for its batch.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from resolute.console import guard_process

    guard_process()

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resolute.errors import ResoluteError
from resolute.files import output_file

from .cli import Parser, command
from .record import RESULTS

__all__ = ["PICTURE", "draw", "main"]

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "stage_change.svg"
_WIDTH, _HEIGHT = 860, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 16, 58, 44  # margins of the plot
_SKIPPED = 10  # first steps of the first stage: both loaders start
_SERIES = (("peer", "#d9730d", "DataLoader, rebuilt at each change"), ("ours", "#3b7dd8", "Resolute"))
_TICK_MS = 100


def draw(result: dict[str, Any]) -> str:
    """The picture as SVG, from a result of `resolute bench-all` with the part "change"."""
    change = result.get("change") or result["switch"]
    paced = change["consumers"]["paced"]
    resolutions = change.get("resolutions") or result["shards"]["resolutions"]
    waits = paced["batch_s"]
    first_rounds = {"ours": waits["ours"][0], "peer": waits["peer" if "peer" in waits else "pillow"][0]}
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
    starts = [0, *(per_stage * stage - _SKIPPED for stage in range(1, len(resolutions)))]
    count = len(steps["ours"])
    top = (max(max(values) for values in steps.values()) // _TICK_MS + 1) * _TICK_MS

    def x(step: float) -> float:
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * step / (count - 1), 1)

    def y(ms: float) -> float:
        return round(_TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - ms / top), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#414a56">',
        "<title>Time of each step across two changes of resolution</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="8" fill="#fff"/>',
        '<text x="14" y="24" font-size="15" font-weight="600" fill="#1c2430">Time of each step, ms</text>',
    ]
    for place, (_, colour, name) in enumerate(reversed(_SERIES)):
        left = _WIDTH - 400 + 105 * place
        parts += [f'<rect x="{left}" y="17" width="18" height="4" fill="{colour}"/>',
                  f'<text x="{left + 24}" y="24">{name}</text>']  # fmt: skip
    for ms in range(0, int(top) + 1, _TICK_MS):
        parts += [f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(ms)}" y2="{y(ms)}" stroke="#dfe3e8"/>',
                  f'<text x="{_LEFT - 8}" y="{y(ms) + 4}" text-anchor="end">{ms}</text>']  # fmt: skip
    for start, res in zip(starts, resolutions, strict=True):
        if start:
            parts.append(f'<line x1="{x(start)}" x2="{x(start)}" y1="{_TOP - 8}" y2="{_HEIGHT - _BOTTOM}" '
                         'stroke="#98a2b0" stroke-dasharray="4 3"/>')  # fmt: skip
        parts.append(f'<text x="{x(start) + 6}" y="{_TOP - 2}">{res} px</text>')
    for name, colour, _ in _SERIES:
        points = " ".join(f"{x(step)},{y(ms)}" for step, ms in enumerate(steps[name]))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" '
                     'stroke-linejoin="round"/>')  # fmt: skip
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts += [f'<text x="{middle}" y="{_HEIGHT - 12}" text-anchor="middle">step</text>', "</svg>"]
    return "\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    about = "Draw docs/stage_change.svg."
    parser = Parser(prog="python -m resolute.benchmarks.stage_change_picture", description=about)
    parser.add_argument("--result", type=Path, default=RESULTS / "bench-cpu.json", metavar="FILE",
        help="result of `resolute bench-all` (default: %(default)s)")  # fmt: skip

    def work(args: argparse.Namespace) -> None:
        try:
            picture = draw(json.loads(args.result.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError):
            raise ResoluteError(f"{args.result}: not such a result, expected one of `resolute bench-all` with the "
                                "part change; choose another") from None  # fmt: skip
        with output_file(PICTURE) as file:
            file.write(picture.encode())

    return command(parser, work, argv)


if __name__ == "__main__":
    from resolute.console import run_main

    run_main(main)
