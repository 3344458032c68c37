"""What a run says of its machine and of itself is so."""

from __future__ import annotations

import os
import time

import pytest

from train.machine import process_age_s


def test_the_age_of_a_process_counts_real_time_from_its_start() -> None:
    before, began = process_age_s(), time.perf_counter()
    time.sleep(0.5)
    assert process_age_s() - before == pytest.approx(time.perf_counter() - began, abs=0.2)
    assert before > time.process_time() / (os.cpu_count() or 1)  # it has worked before this
