"""Tar bytes and index files equal those of Python's tarfile and DALI's own tool."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest

from resolute.pipeline.dataset.format import SAMPLE, STORED
from resolute.prep.shard_set.tar_format import dali_index, member, padded_bytes, tar_end

MEMBERS = [("000000000.jpg", b"x" * 700), ("000000000.cls", b"0001"), ("000000007.jpg", b"y" * 512)]
MEMBERS += [("000000007.cls", b"0002"), ("empty", b"")]


def archive(members: list[tuple[str, bytes]]) -> bytes:
    body = b"".join(member(name, content) for name, content in members)
    return body + tar_end(len(body))


def test_tar_bytes_are_those_of_pythons_ustar_writer() -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in MEMBERS:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    assert archive(MEMBERS) == buffer.getvalue()


def test_the_index_equals_that_of_dalis_own_tool(tmp_path: Path) -> None:
    wds2idx = pytest.importorskip("wds2idx", reason="DALI's wds2idx is not installed")
    (tmp_path / "a.tar").write_bytes(archive(MEMBERS[:4]))
    with wds2idx.IndexCreator(str(tmp_path / "a.tar"), str(tmp_path / "a.idx"), verbose=False) as creator:
        creator.create_index()
    samples = np.array([(0, 1), (7, 2)], SAMPLE)
    second = 512 + padded_bytes(700) + 512 + 512 + 512
    stored = np.array([(512, 700, 0, 0, 1, 1), (second, 512, 0, 0, 1, 1)], STORED)
    assert dali_index(samples, stored, 4) == (tmp_path / "a.idx").read_bytes()
