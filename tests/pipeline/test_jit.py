"""Compiled functions: the same results on every CPU, no cache folder needed, and the GIL is released."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest

import resolute.pipeline.jit as compiled_module
from resolute.pipeline.jit import compiled, has_cache, is_cached
from resolute.pipeline.plan.order import sample_ids
from resolute.pipeline.plan.rng import uniforms
from resolute.pipeline.plan.stage import Augment
from tests import ROOT
from tests.support.baseline_cpu import BASELINE_CPU
from tests.support.batch_spec import drawn_rows
from tests.support.commands import Ended


def digest() -> str:
    """Hash of everything random in a batch: positions, numbers, crops and augmentation."""
    ids = [
        sample_ids(order, np.arange(3000), seed=1, epoch=2, samples=3000, offset=900, total=4001)
        for order in ("shuffled", "windowed")
    ]
    u = uniforms(3, ids[0], 22)
    augments = [
        Augment(scale=(0.08, 1.0), policy="randaugment", magnitude_std=1.5, blur_prob=0.5, random_erasing_prob=0.5),
        Augment(policy="autoaugment", jitter=(0.4, 0.3, 0.2, 0.1), mixup_alpha=0.2, cutmix_alpha=1, mixup_mode="elem"),
    ]
    rows = [drawn_rows(augment, ids[0], res=res) for augment in augments for res in (64, 500)]
    return hashlib.sha256(b"".join(each.tobytes() for each in (*ids, u, *rows))).hexdigest()


@pytest.mark.slow
def test_baseline_cpus_compute_the_same_numbers_without_a_compile_cache_folder() -> None:
    old = {**BASELINE_CPU, "NUMBA_CACHE_DIR": "/proc/none"}
    code = "from tests.pipeline.test_jit import digest; print(digest())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **old}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == digest()


def _twice(value: int) -> int:
    return 2 * value


def test_a_change_in_any_source_file_recompiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba alone would keep code that was compiled with an older version of an inlined function."""
    compiled(_twice)(1)
    kept = compiled(_twice)
    assert kept.targetoptions["nogil"]  # threads of the loader run meanwhile
    assert kept(1) == 2
    assert sum(kept.stats.cache_hits.values()) == 1
    files = {name for name, _, _ in compiled_module._STAMP}
    assert {"graph/kernels/augment.py", "plan/autoaugment.py", "graph/kernels/resize.py", "plan/rng.py"} <= files
    monkeypatch.setattr(compiled_module, "_STAMP", (("resize.py", 1, 1),))
    recompiled = compiled(_twice)
    assert recompiled(1) == 2
    assert not recompiled.stats.cache_hits


def test_it_is_known_whether_a_function_has_to_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    first = compiled(_twice)
    assert has_cache(first)
    assert not is_cached(first)
    assert first(1) == 2
    assert is_cached(first)
    assert is_cached(compiled(_twice))  # from the disk
    monkeypatch.setattr(type(first.targetctx.codegen()), "magic_tuple", lambda self: ("another CPU",))
    assert not is_cached(compiled(_twice))
    monkeypatch.undo()
    without = numba.njit(_twice)
    assert not has_cache(without)
    assert not is_cached(without)
    assert without(1) == 2
    assert is_cached(without)


@pytest.mark.slow
@pytest.mark.parametrize(
    "decorator",
    [
        "from resolute.pipeline.jit import compiled as c",
        "from resolute.pipeline.jit import compiled_at_import as c_",
    ],
)
def test_a_renamed_module_does_not_use_the_cache_of_its_earlier_name(
    decorator: str, tmp_path: Path, forked: Callable[..., Ended]
) -> None:
    """An upgrade renames packages, but not each of their files: the old name cannot be imported any more."""
    (tmp_path / "one").mkdir()
    use = "@c_('int64(int64)')" if decorator.endswith("c_") else "@c"
    (tmp_path / "one" / "a.py").write_text(f"{decorator}\n\n{use}\ndef f(x):\n    return x + 1\n")
    for name in ("one", "two"):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from {name}.a import f; print(f(1), f.stats)"
        done = forked("tests.support.execute", code)
        assert done.out.startswith("2 "), done.err
        if name == "one":
            (tmp_path / "one").rename(tmp_path / "two")
