"""Text tables of the peers' comparison."""

from __future__ import annotations

from typing import Any

from benchmarks.table import spread, text_table

from .registry import PEERS

__all__ = ["changes_table", "quality_table", "rates_table", "words"]


def rates_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for entry in results:
        for name, values in entry["peers"].items():
            used, busy = values["cpu_s_per_1000"], values["cores_busy"]
            rows.append([
                f"{entry['res']} px", PEERS[name].title, spread(values["images_per_s"]),
                spread(values["ours_times"], 2) if "ours_times" in values else "",
                spread(used, 2) if used else "", f"{busy['median']:.1f}" if busy else "",
                f"{values['processes']} / {values['threads']}", values["layout"],
                f"{values['first_batch_s']['median']:.1f}",
            ])  # fmt: skip
    header = ["", "loader", "images/s", "ours is times", "CPU s / 1000", "cores", "processes / threads", "memory",
              "first batch s"]  # fmt: skip
    return text_table("float32 batches on the CPU: median (min..max)", header, rows, left=2)


def quality_table(results: list[dict[str, Any]]) -> str:
    """dB to Pillow of those that can be given a window; all others in words below."""
    if not results:
        return "quality: nothing to compare: no validation images in the set, or no peer that can be given a window"
    names = list(results[0]["psnr_db"])
    header = ["centre square of", "", *names]
    rows = [
        [f"{entry['crop_frac']:g} short sides", f"-> {entry['res']} px",
         *(f"{entry['psnr_db'][name]:.1f}" for name in names)]
        for entry in results
    ]  # fmt: skip
    title = f"PSNR in dB to Pillow's antialiased bilinear, mean of {results[0]['images']} images (99: the same)"
    return text_table(title, header, rows, left=2)


def words(names: list[str]) -> str:
    return "\n".join(["how they resize", *(f"  {name:16s} {PEERS[name].resample}" for name in names)])


def changes_table(results: dict[str, Any]) -> str:
    rows = []
    for change in results["changes"]:
        for name, values in change["peers"].items():
            rows.append([
                f"{change['from_res']} -> {change['to_res']} px", PEERS[name].title, PEERS[name].at_change,
                spread(values["cost_s"], 0, 1e3), spread(values["around_s"], 0, 1e3),
                f"{1e3 * values['slowest_s']['median']:.0f}", f"{1e3 * values['steady_s']['median']:.1f}",
            ])  # fmt: skip
    header = ["", "loader", "at the change", "cost ms", "around ms", f"slowest of {results['first']} ms", "steady ms"]
    return text_table("stage change, drained: time a batch", header, rows, left=3)
