"""Class numbers: from the names that CLASSES lists, from the sorted names, or from labels that are numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from resolute.errors import ResoluteError

from .label_checks import alike

__all__ = ["MAX_CLASSES", "are_listed_names", "by_name", "by_number"]

MAX_CLASSES = 1_000_000


def by_name(
    labels: Sequence[str],
    *,
    classes: Sequence[str] | None,
    src: str,
    listed_in: str,
    training: str | None,
    listed: Mapping[str, int] | None = None,
    locate: Callable[[str], str] = lambda label: "",
) -> tuple[tuple[str, ...], dict[str, int]]:
    """(all class names, {label: class number}) for labels that are class names.

    A name's number is its position in `classes`, or among the labels sorted by code point if `classes` is None.
    `listed_in` names the file of `classes` and `training` is SRC if the labels are VAL's; `listed` are the class
    numbers that the file gives to numbers, which the labels may be too, as names of folders are. `locate(label)` says
    where a label is written, " in line 7", for messages. Raises `ResoluteError` for a label that `classes` lacks.
    """
    names = tuple(sorted(labels)) if classes is None else tuple(classes)
    numbers = {name: n for n, name in enumerate(names)}
    unknown = sorted(set(labels) - set(numbers))
    if unknown and listed is not None:
        by_digits = {label: str(int(label)) for label in labels if label.isascii() and label.isdigit()}
        if len(by_digits) == len(labels) and set(by_digits.values()) <= listed.keys():
            return names, {label: listed[digits] for label, digits in by_digits.items()}
    near = {alike(name): name for name in names}.get(alike(unknown[0])) if unknown else None
    only = f" ({near!a} differs only in form)" if near is not None else ""
    if unknown and training is not None:
        raise ResoluteError(
            f"{src}: classes that training lacks, got {len(unknown)} such as {unknown[0]!a}{locate(unknown[0])}, "
            f"expected only those of {training}{only}; rename or remove them"
        )
    if unknown:
        shown = unknown[0] if near is None else f"{unknown[0]!a}"
        if listed is not None:
            only += ", read as a map of numbers and names (if these are names with numbers, write a JSON list)"
        raise ResoluteError(
            f"{src}: classes that {listed_in} lacks, got {len(unknown)} such as {shown}{locate(unknown[0])}, "
            f"expected only its {len(names)}{only}; add them to the end of the file, or rename or remove them"
        )
    return names, {name: numbers[name] for name in labels}


def by_number(
    labels: Sequence[str],
    *,
    names: Sequence[str] | None,
    classes: Sequence[str] | None,
    src: str,
    listed_in: str,
    training: str | None,
    are_names: bool = False,
    listed: Mapping[str, int] | None = None,
    locate: Callable[[str], str] = lambda label: "",
) -> tuple[tuple[str, ...], Mapping[str, int]]:
    """As `by_name`, for labels that are class numbers, which they keep.

    `names` are the source's own names of these numbers. If `classes` contains any of the names in use, classes are
    matched by name instead, because `classes` may number them differently; `are_names`: in any case, without `names` by
    the label itself. `listed` are the class numbers that the file of `classes` gives to labels. Raises `ResoluteError`
    for a number out of range.
    """
    if classes is not None and listed is not None and names is None and not are_names:
        unknown = sorted(set(labels) - set(listed), key=int)
        if unknown:
            raise ResoluteError(
                f"{src}: class number that {listed_in} lacks, got {unknown[0]}{locate(unknown[0])}, expected one of "
                f"its {len(listed)}, {min(listed, key=int)} to {max(listed, key=int)}; correct the labels or the file"
            )
        return tuple(classes), {label: listed[label] for label in labels}
    numbers = {label: int(label) for label in labels}
    low, high = min(numbers.values()), max(numbers.values())
    limit = len(names) if names is not None else MAX_CLASSES
    if classes is not None:
        own_names = {label: names[n] for label, n in numbers.items() if 0 <= n < len(names)} if names else {}
        if are_names or not set(classes).isdisjoint(own_names.values()):
            name_of = {label: own_names.get(label, label) for label in labels}
            all_names, numbers_of = by_name(
                tuple(set(name_of.values())),
                classes=classes,
                src=src,
                listed_in=listed_in,
                training=training,
                locate=locate,
            )
            return all_names, {label: numbers_of[name] for label, name in name_of.items()}
        limit = len(classes)
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        known_to = training or (listed_in if classes is not None else "this source")
        expected = f"0 to {limit - 1}" + (f" as {known_to} names {limit} classes" if limit < MAX_CLASSES else "")
        raise ResoluteError(
            f"{src}: class number out of range, got {wrong}{locate(str(wrong))}, expected {expected}; correct the "
            "labels or the names"
        )
    if classes is not None:
        return tuple(classes), numbers
    return (tuple(names) if names is not None else tuple(map(str, range(high + 1)))), numbers


def are_listed_names(labels: Collection[str], classes: Sequence[str], listed_in: str) -> bool:
    """Whether labels that are numbers are names among `classes`, such as aircraft, rather than places in that list.

    Raises `ResoluteError`, naming the file `listed_in`, if they could be either.
    """
    if not set(labels) <= set(classes):
        return False
    if any(int(label) >= len(classes) for label in labels):
        return True
    moved = next((label for label in labels if classes[int(label)] != label), None)
    if moved is not None:
        raise ResoluteError(
            f"{listed_in}: names that are numbers, got {moved} in place {classes.index(moved)} (from 0), expected one "
            f"meaning of the label {moved}, its name or its place; write a map of labels and names in JSON, "
            f'{{"{moved}": "{moved}", …}}'
        )
    return False
