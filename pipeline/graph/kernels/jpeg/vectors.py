"""LLVM vector code that the transform and the conversion of colours share.

With `AVX2`, the instructions of x86 that LLVM does not find by itself are asked for by name; elsewhere, and if numba
compiles for another CPU, general code gives the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm
import numba
from llvmlite import ir

__all__ = ["AVX2", "BYTES32", "I8", "I16", "I32", "I64", "WORDS16", "WORDS32", "Vectors", "chosen", "filled", "pointer"]

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
BYTES32, WORDS16, WORDS32 = ir.VectorType(I8, 32), ir.VectorType(I16, 16), ir.VectorType(I32, 16)
_WORDS8 = ir.VectorType(I32, 8)
# why not if a CPU is named: numba then compiles for that one
AVX2 = vars(numba.config)["CPU_NAME"] is None and bool(llvm.get_host_cpu_features().get("avx2"))


def chosen(numbers: Iterable[int]) -> Any:
    """The constant with which a shuffle picks these elements."""
    indices = [*numbers]
    return ir.Constant(ir.VectorType(I32, len(indices)), indices)


def filled(kind: ir.VectorType, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def pointer(b: ir.IRBuilder, address: Any, offset: int | Any, kind: Any) -> Any:
    """A pointer to a value of `kind` at an address plus `offset` bytes."""
    offset = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    return b.inttoptr(b.add(address, offset), kind.as_pointer())


class Vectors:
    """Instructions on vectors of 256 bits, of which each half, a lane, is treated alike."""

    def __init__(self, b: ir.IRBuilder, *, avx2: bool = AVX2) -> None:
        self.b, self._avx2 = b, avx2

    def _call(self, name: str, result: ir.VectorType, *values: Any) -> Any:
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [value.type for value in values]), name)
        return self.b.call(function, values)

    def unpack(self, x: Any, y: Any, bits: int, *, high: bool) -> Any:
        """Interleave elements of `bits` of the low or high halves of the lanes of two vectors."""
        kind, count = ir.VectorType(ir.IntType(bits), 256 // bits), 128 // bits
        first = count // 2 if high else 0
        order = [lane * count + first + i + 2 * count * n for lane in (0, 1) for i in range(count // 2) for n in (0, 1)]
        out = self.b.shuffle_vector(self.b.bitcast(x, kind), self.b.bitcast(y, kind), chosen(order))
        return self.b.bitcast(out, x.type)

    def pairs(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Interleave the int16 of two vectors; returns those of the low and of the high halves."""
        return self.unpack(x, y, 16, high=False), self.unpack(x, y, 16, high=True)

    def products(self, pairs: tuple[Any, Any], first: int, second: int) -> list[Any]:
        """Of each pair of int16, first times the one plus second times the other, int32."""
        b = self.b
        factors = [first, second] * 8
        if self._avx2:
            constant = ir.Constant(WORDS16, factors)
            return [self._call("llvm.x86.avx2.pmadd.wd", _WORDS8, pair, constant) for pair in pairs]
        out = []
        for pair in pairs:
            product = b.mul(b.sext(pair, WORDS32), ir.Constant(WORDS32, factors))
            even, odd = (b.shuffle_vector(product, product, chosen(range(n, 16, 2))) for n in (0, 1))
            out.append(b.add(even, odd))
        return out

    def clamped(self, x: Any, low: int, high: int) -> Any:
        b = self.b
        x = b.select(b.icmp_signed("<", x, filled(x.type, low)), filled(x.type, low), x)
        return b.select(b.icmp_signed(">", x, filled(x.type, high)), filled(x.type, high), x)

    def shifted(self, parts: list[Any], shift: int) -> Any:
        """int16 of int32 of the low and high halves, divided by 2^shift, rounded, and limited."""
        b = self.b
        low, high = (b.ashr(b.add(x, filled(x.type, 1 << (shift - 1))), filled(x.type, shift)) for x in parts)
        if self._avx2:
            return self._call("llvm.x86.avx2.packssdw", WORDS16, low, high)
        both = b.shuffle_vector(low, high, chosen([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]))
        return b.trunc(self.clamped(both, -32768, 32767), WORDS16)

    def _in_lanes(self, x: Any, y: Any) -> Any:
        """The 16 values of each of two vectors, those of x first in each lane."""
        order = chosen([*range(8), *range(16, 24), *range(8, 16), *range(24, 32)])
        return self.b.shuffle_vector(x, y, order)

    def signed_bytes(self, x: Any, y: Any) -> Any:
        """int8 of two vectors of int16, limited; those of x first in each lane."""
        if self._avx2:
            return self._call("llvm.x86.avx2.packsswb", BYTES32, x, y)
        return self.b.trunc(self.clamped(self._in_lanes(x, y), -128, 127), BYTES32)

    def bytes(self, x: Any, y: Any) -> Any:
        """uint8 of two vectors of int16, limited; those of x first in each lane."""
        if self._avx2:
            return self._call("llvm.x86.avx2.packuswb", BYTES32, x, y)
        return self.b.trunc(self.clamped(self._in_lanes(x, y), 0, 255), BYTES32)
