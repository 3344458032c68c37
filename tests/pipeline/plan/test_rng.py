"""Random numbers are a pure function of (seed, epoch, sample)."""

from __future__ import annotations

import numpy as np
import pytest

from resolute.pipeline.plan import permutation
from resolute.pipeline.plan.permutation import stream_key
from resolute.pipeline.plan.rng import betas, permute, philox, uniforms
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


def test_compiled_numbers_equal_the_numpy_oracle() -> None:
    rng = np.random.default_rng(0)
    for key in (0, 1, 12345678901234567, 2**64 - 1):
        ids = np.concatenate([np.arange(40), rng.integers(0, 2**62, 40)])
        for count in (1, 3, 4, 5, 23):
            got = uniforms(key, ids, count)
            assert got.dtype == np.float64
            np.testing.assert_array_equal(got, reference_rng.uniforms(key, ids, count))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000, 4096, 4097, 10**8, 2**40 + 7])
def test_the_permutations_of_numpy_and_of_compiled_code_are_the_same(n: int) -> None:
    rng = np.random.default_rng(0)
    for key in (0, 1, 12345678901234567, 2**64 - 1):
        places = rng.integers(0, n, (20, 3))
        got = permutation.permute(key, places, n)
        assert (got.dtype, got.shape) == (np.int64, (20, 3))
        np.testing.assert_array_equal(permute(key, places, n), got)


def test_numbers_of_a_sample_do_not_depend_on_its_batch() -> None:
    ids = np.asarray([5, 2**40 + 3, 7])
    together = uniforms(99, ids, 23)
    alone = [uniforms(99, ids[i : i + 1], 23)[0] for i in range(3)]
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(uniforms(99, ids, 5), together[:, :5])
    assert len(np.unique(together)) == together.size


def test_uniforms_are_uniform() -> None:
    values = np.sort(uniforms(3, np.arange(20_000), 5).ravel())
    distance = np.abs(values - (np.arange(len(values)) + 0.5) / len(values)).max()
    assert distance < 1.95 / np.sqrt(len(values))  # Kolmogorov-Smirnov at 0.1 %


def test_permute_is_a_permutation() -> None:
    for n in (1, 2, 3, 4, 5, 17, 64, 1000, 4097):
        assert sorted(permute(8, np.arange(n), n)) == list(range(n))


def test_permutations_are_unordered_and_independent_between_keys() -> None:
    n = 5000
    first, second = permute(1, np.arange(n), n), permute(2, np.arange(n), n)
    assert (first == second).sum() < 8  # Poisson(1): 8 or more has a probability of 1e-5
    assert (np.abs(np.diff(first)) == 1).sum() < 12  # Poisson(2)
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < 4 / np.sqrt(n)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 2.0])
def test_beta_samples_have_the_mean_and_variance_of_the_distribution(alpha: float) -> None:
    draws = betas(17, np.arange(4000), alpha, pairs=4)
    variance = 1 / (4 * (2 * alpha + 1))
    assert abs(draws.mean() - 0.5) < 4 * np.sqrt(variance / len(draws))
    assert abs(draws.var() / variance - 1) < 0.1
    assert betas(17, np.array([3]), alpha, pairs=4) == draws[3]  # independent of the other draws


def test_keys_of_different_purposes_differ() -> None:
    keys = {stream_key(seed, purpose, epoch) for seed in range(4) for purpose in range(4) for epoch in range(8)}
    assert len(keys) == 4 * 4 * 8
