"""Counts and names in words, for messages about sources and sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from resolute.pipeline.dataset.target import Target

__all__ = ["by_count", "describe_ignored", "describe_target", "first_names"]

_MAX_NAMED = 8


def describe_ignored(ignored: Mapping[str, int]) -> str:
    """Counts in words: `1 hidden, 8 other files (5 .heic, 2 .txt, 1 without a usual suffix)`, or `nothing`."""
    suffixes = {kind: count for kind, count in ignored.items() if kind.startswith(".") and count}
    kinds = {kind: count for kind, count in ignored.items() if not kind.startswith(".") and count}
    unnamed = kinds.get("other files", 0)
    parts = {kind: f"{count} {kind}" for kind, count in kinds.items()}
    if suffixes:
        listed = by_count(suffixes) + ([f"{unnamed} without a usual suffix"] if unnamed else [])
        parts["other files"] = f"{sum(suffixes.values()) + unnamed} other files ({', '.join(listed)})"
    return ", ".join(parts[kind] for kind in sorted(parts)) or "nothing"


def describe_target(target: Target) -> str:
    """`10 classes`, `17 labels`, or `2 values (age, mass)`."""
    if target.kind != "values":
        return f"{len(target)} {'classes' if target.kind == 'class' else 'labels'}"
    return f"{len(target)} value{'s'[: len(target) != 1]} ({first_names(target.names)})"


def by_count(counts: Mapping[str, int]) -> list[str]:
    """`5 .heic`, the most frequent kinds first, and how many there are of all others."""
    listed = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(count for _, count in listed[_MAX_NAMED:])
    return [f"{count} {kind}" for kind, count in listed[:_MAX_NAMED]] + ([f"{rest} more"] if rest else [])


def first_names(names: Sequence[str]) -> str:
    """The first names, and an ellipsis if there are more."""
    return ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
