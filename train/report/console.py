"""A run's output, all derived from run.jsonl: the epoch table, the final summary, the HTML page and TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.logs.run_log import SWITCH_STEPS, RunLogReader, best_epoch, best_top1, switch_costs
from train.logs.tensorboard import TensorBoardWriter

from .html import write_page

__all__ = ["EPOCH_HEADER", "Reports", "epoch_line", "summary"]

EPOCH_HEADER = (
    "epoch stage  res batch  images/s  stall %  wait s  compute s  eval s      lr   loss  "
    "val loss  top-1  top-5  EMA: loss  top-1  top-5    GiB  GPU %"
)


class Reports:
    """Keeps the HTML page and TensorBoard up to date. `on`: False on ranks that write nothing."""

    def __init__(self, folder: Path, *, on: bool, tensorboard: bool) -> None:
        self._folder, self._on, self._run = folder, on, RunLogReader(folder / "run.jsonl")
        self._tensorboard = tensorboard
        self._board: TensorBoardWriter | None = None

    def update(self) -> None:
        """Read the log's new records and update page and event files."""
        if self._on:
            new = self._run.read()
            write_page(self._run, self._folder)
            if self._tensorboard:
                self._board = self._board or TensorBoardWriter(self._folder / "tb")
                self._board.add(new)

    def summary(self) -> str:
        self._run.read()
        return summary(self._run, self._folder)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def epoch_line(record: dict[str, Any]) -> str:
    """The row of the console's epoch table for an epoch record, under `EPOCH_HEADER`."""
    def number(key: str, width: int, digits: int, scale: float = 1.0) -> str:
        value = record.get(key)
        return "-".rjust(width) if value is None else f"{scale * value:{width}.{digits}f}"

    return " ".join([
        f"{record['epoch']:5d} {record['stage']:5d} {record['res']:4d} {record['batch_size']:5d}",
        number("images_per_s", 9, 1), number("stall_frac", 8, 2, 100), number("wait_s", 7, 2),
        f"{record['train_s'] - record['wait_s']:10.2f}", number("eval_s", 7, 2), f"{record['lr']:7.4f}",
        number("loss", 6, 3), number("eval_loss", 9, 3), number("top1", 6, 2, 100), number("top5", 6, 2, 100),
        number("ema_eval_loss", 10, 3), number("ema_top1", 6, 2, 100), number("ema_top5", 6, 2, 100),
        number("memory_bytes", 6, 2, 2**-30), number("gpu_frac", 6, 0, 100),
    ])  # fmt: skip


def summary(run: RunLogReader, folder: Path) -> str:
    """The closing lines of a run: accuracy, time, cost of each stage change, files."""
    epochs, steps = run.epochs, run.steps
    train_s, wait_s = sum(e["train_s"] for e in epochs), sum(e["wait_s"] for e in epochs)
    last, best = epochs[-1], best_epoch(epochs) or epochs[-1]
    lines = [
        f"\ntop-1 {100 * best_top1(last):.2f} % at the end, best {100 * best_top1(best):.2f} % (epoch {best['epoch']})",
        f"{last['elapsed_s']:.1f} s: training {train_s:.1f} s, validation {sum(e['eval_s'] for e in epochs):.1f} s; "
        f"waiting for data {100 * wait_s / train_s:.2f} % of training",
    ]
    for cost in switch_costs(steps["stage"], steps["time_s"]):
        lines.append(
            f"switch to stage {cost['stage']}: {1e3 * cost['cost_s']:+.0f} ms over its first {SWITCH_STEPS} steps, "
            f"slowest {cost['slowest_ratio']:.2f}x the median ({1e3 * cost['median_s']:.0f} ms)"
        )
    return "\n".join([*lines, f"{folder}: report.html, run.jsonl, best.pt, last.pt"])
