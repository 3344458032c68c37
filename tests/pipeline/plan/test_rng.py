"""Random numbers are a pure function of (seed, epoch, sample)."""

from __future__ import annotations

import numpy as np
import pytest

from resolute.pipeline.plan import permutation
from resolute.pipeline.plan.rng import permute, philox, uniforms
from tests.support import reference_rng


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # Source: Random123's kat_vectors, philox4x32 with 10 rounds
        ([0] * 4, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 0xFFFFFFFFFFFFFFFF, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], 0x299F31D0A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_equals_its_published_test_vectors(counter: list[int], key: int, expected: str) -> None:
    got = philox(*np.asarray([*counter, key], np.uint64))
    assert " ".join(f"{int(word):08x}" for word in got) == expected


KEYS = (0, 12345678901234567, 2**64 - 1)


def test_compiled_numbers_equal_the_numpy_oracle_and_do_not_depend_on_the_batch() -> None:
    ids = np.random.default_rng(0).integers(0, 2**62, 40)
    for key in KEYS:
        for count in (1, 4, 5, 23):
            got = uniforms(key, ids, count)
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, reference_rng.uniforms(key, ids, count))
            np.testing.assert_array_equal(uniforms(key, ids[7:8], count), got[7:8])


@pytest.mark.parametrize("n", [1, 2, 65, 4097, 2**40 + 7])
def test_the_permutations_of_numpy_and_of_compiled_code_are_the_same(n: int) -> None:
    places = np.random.default_rng(0).integers(0, n, (20, 3))
    for key in KEYS:
        got = permutation.permute(key, places, n)
        assert (got.dtype, got.shape) == (np.int64, (20, 3))
        np.testing.assert_array_equal(permute(key, places, n), got)
