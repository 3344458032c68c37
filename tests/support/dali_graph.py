"""Checks of a DALI graph for a GPU on a machine without one: operators, devices of inputs, names of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

from nvidia.dali import backend, fn, types

from resolute.pipeline.graph import cpu_nodes

# Messages with which DALI refuses a graph -> the check they belong to
_REFUSALS = {
    r"Named arguments must be on CPU": "argument device",
    r"is stored on incompatible device": "input device",
    r"is not defined for operator|got an unexpected '?\w*'? argument": "argument name",
    r"IsSerializable": "host code",
}
_HOST_CODE = ("Python", "Numba", "DLTensor")
_COMMON = ("device", "preserve_name")  # arguments of all operators, in no schema


def without_compiled_nodes() -> Any:
    """Context manager in which the GPU's graph can be serialised: DALI's own nodes compute the same arguments."""
    return mock.patch.multiple(cpu_nodes, gpu_arguments=_sliced_arguments, decode=_declined)


def _sliced_arguments(rows: Any, jpegs: Any, *, for_decode: bool) -> tuple[Any, ...]:
    tags = fn.cat(rows[4:5], fn.reinterpret(jpegs[-4:], dtype=types.INT32))
    view = fn.cast(rows[5:11], dtype=types.FLOAT)
    shape = fn.cat(rows[2:4], rows[0:1] * 0) if for_decode else rows[2:4]
    return rows[0:2], shape, tags, view[0:2], view[2:4], view[4:6]


def _declined(shaped: Any, rows: Any, jpegs: Any) -> tuple[Any, Any]:
    """In place of the node that decodes: it declines all images that hold a byte that is not 0."""
    return shaped, fn.reductions.max(jpegs) > 0


def graph_faults(define: Callable[[], Any]) -> list[str]:
    """Define a pipeline with `device_id=None`, serialise it and check every operator; one line "check: text" per fault.

    DALI cannot serialise our compiled node, so its own operators take its place.

    definition       DALI refuses the graph for a reason without a check of its own
    argument device  a named argument is on the GPU
    argument name    the operator's schema has no such argument
    input device     the operator's schema does not allow an input on that device
    kernel           DALI has no kernel of the operator for that device
    host copy        a CPU operator reads what a GPU operator writes: the host would wait for the device
    host code        the operator runs a Python or numba function
    output device    the graph's images, its first output, are on the CPU
    """
    try:
        with without_compiled_nodes():
            pipe = define()
        pipe.serialize()
    except Exception as error:  # why so broad: DALI raises whatever its operators raise
        text = " ".join(str(error).split())
        check = next((name for words, name in _REFUSALS.items() if re.search(words, text)), "definition")
        return [f"{check}: {text[-300:]}"]
    faults = [fault for operator in pipe._ops for fault in _operator_faults(operator)]
    return faults + [
        f"output device: {name} is on the {device}" for name, device in pipe._names_and_devices[:1] if device != "gpu"
    ]


def _operator_faults(operator: Any) -> list[str]:
    schema, spec, device = operator._op.schema, operator.spec, operator._op.device
    dali: Any = backend  # why: DALI's stubs lack these functions
    kernels = {"cpu": dali.RegisteredCPUOps, "gpu": dali.RegisteredGPUOps, "mixed": dali.RegisteredMixedOps}
    name, faults = f"{operator.name} ({schema.Name()} on {device})", []
    if schema.Name() not in kernels[device]():
        faults.append(f"kernel: {name} is not among DALI's operators for that device")
    if any(word in schema.Name() for word in _HOST_CODE):
        faults.append(f"host code: {name}")
    for index, source in enumerate(operator.inputs):
        is_argument, got = index >= spec.NumRegularInput(), spec.InputDevice(index)
        expected = "cpu" if is_argument else schema.GetInputDevice(index, got, device) or got
        if got != {"mixed": "cpu"}.get(expected, expected):
            check = "argument device" if is_argument else "input device"
            faults.append(f"{check}: input {index} of {name} is on the {got}")
        if got == "cpu" and source.source is not None and source.source._op.device != "cpu":
            faults.append(f"host copy: input {index} of {name}")
    arguments = re.findall(r"^    (\w+):", str(spec).partition("  Arguments:")[2], re.MULTILINE)
    faults += [
        f"argument name: {argument} of {name}"
        for argument in arguments
        if argument[0] != "_" and argument not in _COMMON and not schema.HasArgument(argument)
    ]
    return faults
