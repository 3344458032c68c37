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
