"""Third-party tars whose .json files hold several labels or numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from resolute.errors import ResoluteError
from tests.support.third_party_tars import encoded, opened, write

NAMES = ("cat", "dog", "bird", *(f"c{n}" for n in range(3, 10)))
LABELS: list[Any] = [[0, 2], [9], [], ["dog", 0], [2, 2]]
BAD_LABELS: list[Any] = ["cat", [10], [-1], [True], ["fish"], [1.5], None, 3]
VALUES: list[Any] = [1, 2.5, [-3], 1e30, [0]]
BAD_VALUES: list[Any] = ["1", [True], None, [], {}, 1e39, float("nan")]


def tars(root: Path, key: str, contents: list[Any]) -> Path:
    write(root / "train-%03d.tar", [
        {"__key__": f"{n:03d}", "jpg": encoded(n), "json": json.dumps({"caption": "x", key: content}).encode()}
        for n, content in enumerate(contents)
    ])  # fmt: skip
    return root


def test_several_labels_are_numbers_or_names_of_the_classes(tmp_path: Path) -> None:
    shards, lines = opened(tars(tmp_path, "labels", LABELS + BAD_LABELS), target="labels", classes=NAMES)
    assert (shards.target.kind, shards.classes) == ("labels", NAMES)
    got = shards.target.decode(shards.splits["train"].samples[:])
    expected = [[0, 2], [9], [], [0, 1], [2]]
    np.testing.assert_array_equal(got, [[float(c in row) for c in range(10)] for row in expected])
    assert f"left out {len(BAD_LABELS)} of {len(LABELS + BAD_LABELS)}" in "\n".join(lines)
    again, lines = opened(tmp_path, target="labels", classes=NAMES)
    assert (again.hash, lines) == (shards.hash, [])


def test_without_names_the_classes_are_numbers(tmp_path: Path) -> None:
    shards, _ = opened(tars(tmp_path, "labels", [[3], [0, 8]]), target="labels")
    assert shards.classes == tuple(map(str, range(9)))
    assert shards.target.decode(shards.splits["train"].samples[:]).sum(0).tolist() == [1, 0, 0, 1, 0, 0, 0, 0, 1]


def test_values_are_finite_numbers_or_lists_of_them(tmp_path: Path) -> None:
    shards, lines = opened(tars(tmp_path, "target", VALUES + BAD_VALUES), target="values", classes=("age",))
    assert (shards.target.kind, shards.target.names, shards.classes) == ("values", ("age",), ())
    got = shards.target.decode(shards.splits["train"].samples[:])
    np.testing.assert_array_equal(got, np.array([[1], [2.5], [-3], [1e30], [0]], np.float32))
    assert f"left out {len(BAD_VALUES)} of" in "\n".join(lines)


def test_the_key_of_the_json_file_can_be_named(tmp_path: Path) -> None:
    shards, _ = opened(tars(tmp_path, "size", [[1, 2], [3, 4]]), target="values", label="json:size")
    assert shards.target.names == ("value0", "value1")
    with pytest.raises(ResoluteError, match=r"no usable sample .*target=values"):
        opened(tmp_path, target="values")


@pytest.mark.parametrize(("target", "contents", "options", "message"), [
    ("values", [1, [1, 2]], {}, "samples with 1 and with 2 values, expected equally many"),
    ("values", [1, 2], {"classes": ("a", "b")}, "got 2 names, expected 1, one per value"),
    ("labels", [[], []], {}, "got no label in any sample"),
    ("label", [1, 2], {}, "target: got label, expected class, labels, values"),
])  # fmt: skip
def test_targets_that_do_not_fit_are_one_clear_line(
    tmp_path: Path, target: Any, contents: list[Any], options: dict[str, Any], message: str
) -> None:
    key = "labels" if target == "labels" else "target"
    with pytest.raises(ResoluteError, match=message):
        opened(tars(tmp_path, key, contents), target=target, **options)


def test_each_kind_of_target_has_its_own_index(tmp_path: Path) -> None:
    tars(tmp_path, "target", [1, 2, 3])
    of_class, _ = opened(tmp_path)
    of_values, _ = opened(tmp_path, target="values")
    assert of_class.classes == ("0", "1", "2", "3")
    assert of_values.target.decode(of_values.splits["train"].samples[:]).tolist() == [[1], [2], [3]]
    assert opened(tmp_path)[1] == opened(tmp_path, target="values")[1] == []
