"""Finds what makes the host wait for a device, on a machine without one: the device "meta" stands in for it.

Tensors on "meta" have no values, so nothing is computed; every operation that would have to wait is recorded.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import ROOT

__all__ = ["DEVICE", "DeviceTrace"]

DEVICE = torch.device("meta")
_PACKAGES = (str(ROOT / "resolute" / "pipeline"), str(ROOT / "resolute" / "train"))
_aten = torch.ops.aten
_READS = {_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default}
_DYNAMIC = {_aten.nonzero.default, _aten.masked_select.default, _aten._unique2.default}


class DeviceTrace(TorchDispatchMode):
    """Records in `events`, one line each, what would make the host wait for the device:

    read           of a value: item(), float(), bool(), comparisons in a condition
    dynamic shape  whose size depends on values: nonzero(), a mask as an index
    host copy      from the device: cpu(), tolist()
    pageable copy  to the device, from memory that is not pinned
    blocking copy  to the device, from pinned memory, without `non_blocking`
    """

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.copies = 0  # to the device
        self._pinned: dict[int, torch.Tensor] = {}  # by address; why kept: an address must not be used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            made = func(*args, **{**kwargs, "pin_memory": False})
            self._pinned[made.untyped_storage().data_ptr()] = made
            return made
        on_device = [arg.device == DEVICE for arg in args if isinstance(arg, torch.Tensor)]
        if func in _READS and any(on_device):
            self._record("read")
            return func is not _aten._local_scalar_dense.default or 1
        if (func in _DYNAMIC and any(on_device)) or (func is _aten.index.Tensor and _has_mask(args)):
            self._record("dynamic shape")
            return torch.empty((1, *args[0].shape[1:]), dtype=args[0].dtype, device=args[0].device)
        if func is _aten._to_copy.default and "device" in kwargs and kwargs["device"] != args[0].device:
            return self._copy(args[0], kwargs, torch.device(kwargs["device"]))
        if func is _aten.copy_.default and on_device[0] != on_device[1] and args[1].dim():
            self._copy(args[1], {"non_blocking": (*args, False)[2]}, args[0].device)
            return args[0]
        return func(*args, **kwargs)

    def _copy(self, source: torch.Tensor, kwargs: dict[str, Any], to: torch.device) -> torch.Tensor:
        self.copies += to == DEVICE
        if to != DEVICE:
            self._record("host copy")
        elif source.untyped_storage().data_ptr() not in self._pinned:
            self._record("pageable copy")
        elif not kwargs.get("non_blocking"):
            self._record("blocking copy")
        return torch.empty_like(source, device=to, dtype=kwargs.get("dtype"))

    def _record(self, kind: str) -> None:
        calls = [
            f"{Path(frame.filename).relative_to(ROOT / 'resolute')}, {frame.name}"
            for frame in traceback.extract_stack()
            if frame.filename.startswith(_PACKAGES)
        ]
        self.events.append(f"{kind}: {calls[-1] if calls else 'elsewhere'}")


def _has_mask(args: Any) -> bool:
    return args[0].device == DEVICE and any(index is not None and index.dtype == torch.bool for index in args[1])
