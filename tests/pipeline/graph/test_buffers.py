"""Output buffers are reused only when no view of them exists any more."""

from __future__ import annotations

import torch

from resolute.pipeline.graph.buffers import BufferPool


def test_a_buffer_is_reused_only_after_its_last_view_is_deleted() -> None:
    buffers = BufferPool(nbytes=4 * 6 * 5, count=1)
    first = buffers.take((2, 3, 5))
    address = first.ctypes.data
    row = torch.from_numpy(first).permute(2, 0, 1)[3]
    del first
    other = buffers.take((2, 3, 5))
    assert other.ctypes.data != address
    row.fill_(7)
    other[:] = 1
    assert (row == 7).all()
    del other, row  # in this order: of two released buffers only the later is kept
    assert buffers.take((6,)).ctypes.data == address


def test_memory_begins_at_a_line_of_the_caches() -> None:
    """`resize` writes past the caches only to such addresses."""
    buffers = BufferPool(nbytes=100, count=3)
    assert [buffers.take((25,)).ctypes.data % 64 for _ in range(5)] == [0] * 5
