"""The inverse discrete cosine transform of two blocks at once: the accurate integer one of libjpeg, bit for bit.

Source: jidctint.c of libjpeg (Loeffler, Ligtenberg and Moschytz, ICASSP 1989), with the 16-bit sums of libjpeg-turbo's
SIMD code.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from resolute.pipeline.jit import intrinsic

from .vectors import I16, I64, WORDS16, WORDS32, Vectors, chosen, filled, pointer

__all__ = ["LARGEST", "few_side_by_side", "few_split", "side_by_side", "split"]


def _fixed(x: float) -> int:
    return int(x * 8192 + 0.5)


_F0298, _F0390, _F0541, _F0765 = _fixed(0.298631336), _fixed(0.390180644), _fixed(0.541196100), _fixed(0.765366865)
_F0899, _F1175, _F1501, _F1847 = _fixed(0.899976223), _fixed(1.175875602), _fixed(1.501321110), _fixed(1.847759065)
_F1961, _F2053, _F2562, _F3072 = _fixed(1.961570560), _fixed(2.053119869), _fixed(2.562915447), _fixed(3.072711026)
# Of a coefficient of the first row times its quantisation: beyond, the result depends on which of libjpeg-turbo's code
# is used, as some of it skips sums of zeros. No encoder writes such.
LARGEST = 8191
_PASS1, _PASS2 = 11, 18  # bits by which the results are divided


def _transform(v: Vectors, d: list[Any], shift: int) -> list[Any]:
    """One pass: eight vectors of int16, of which each element is transformed with the same one of the others."""
    b = v.b

    def each(function: Any, *parts: list[Any]) -> list[Any]:
        return [function(*values) for values in zip(*parts, strict=True)]

    def scaled(x: Any) -> list[Any]:
        """x times 8192, int32."""
        zero = filled(WORDS16, 0)
        halves = (v.unpack(zero, x, 16, high=high) for high in (False, True))
        wide = ir.VectorType(ir.IntType(32), 8)
        return [b.ashr(b.bitcast(half, wide), filled(wide, 3)) for half in halves]

    pairs26 = v.pairs(d[2], d[6])
    t3, t2 = v.products(pairs26, _F0541 + _F0765, _F0541), v.products(pairs26, _F0541, _F0541 - _F1847)
    t0, t1 = scaled(b.add(d[0], d[4])), scaled(b.sub(d[0], d[4]))
    even = [each(b.add, t0, t3), each(b.add, t1, t2), each(b.sub, t1, t2), each(b.sub, t0, t3)]
    pairs34 = v.pairs(b.add(d[7], d[3]), b.add(d[5], d[1]))
    z3, z4 = v.products(pairs34, _F1175 - _F1961, _F1175), v.products(pairs34, _F1175, _F1175 - _F0390)
    pairs71, pairs53 = v.pairs(d[7], d[1]), v.pairs(d[5], d[3])
    odd = [
        each(b.add, v.products(pairs71, -_F0899, _F1501 - _F0899), z4),
        each(b.add, v.products(pairs53, -_F2562, _F3072 - _F2562), z3),
        each(b.add, v.products(pairs53, _F2053 - _F2562, -_F2562), z4),
        each(b.add, v.products(pairs71, _F0298 - _F0899, -_F0899), z3),
    ]
    first = [v.shifted(each(b.add, *both), shift) for both in zip(even, odd, strict=True)]
    last = [v.shifted(each(b.sub, *both), shift) for both in zip(even, odd, strict=True)]
    return first + last[::-1]


def _transposed(v: Vectors, rows: list[Any]) -> list[Any]:
    """Eight vectors of which each lane is a row of a block: likewise, its columns."""

    def both(x: Any, y: Any) -> tuple[Any, Any]:
        return v.unpack(x, y, 16, high=False), v.unpack(x, y, 16, high=True)

    ends = [both(rows[i], rows[i + 4]) for i in range(4)]
    out: list[Any] = []
    for half in (0, 1):
        even = both(ends[0][half], ends[2][half])
        odd = both(ends[1][half], ends[3][half])
        for e, o in zip(even, odd, strict=True):
            out += both(e, o)
    return out


def _rows(v: Vectors, rows: list[Any], quants: list[Any], *, few: bool) -> list[Any]:
    """The samples of two blocks: four vectors of 32 uint8, of each rows 2k and 2k + 1 of the first, then of the second.

    `rows` are those of the coefficients, eight of both blocks; with `few`, the first four rows and columns.
    """
    b, zero = v.b, filled(WORDS16, 0)
    d = [b.mul(row, quant) for row, quant in zip(rows, quants, strict=True)] + [zero] * (8 - len(rows))
    d = _transposed(v, _transform(v, d, _PASS1))
    if few:
        d = d[:4] + [zero] * 4
    d = _transform(v, d, _PASS2)
    centred = [v.signed_bytes(d[i], d[i + 4]) for i in range(4)]
    samples = [b.xor(x, filled(x.type, -128)) for x in centred]
    u, w = ([v.unpack(samples[i], samples[i + 2], 8, high=high) for high in (False, True)] for i in (0, 1))
    low, high = ([v.unpack(u[i], w[i], 8, high=which) for which in (False, True)] for i in (0, 1))
    return [v.unpack(low[n // 2], high[n // 2], 32, high=bool(n % 2)) for n in range(4)]


def _idct(*, few: bool, is_split: bool) -> Any:
    """idct(blocks, quants, to, other, stride): transform a pair of blocks; returns 0 if none exceeds `LARGEST`.

    All are addresses: of the coefficients and of the quantisation tables, as `memory.py` says, and of where the samples
    of the first block go, eight rows of eight; those of the second follow on the right, or go to `other` if `is_split`.
    With `few`, all coefficients but the first ten in zigzag order are 0.
    """

    @intrinsic
    def idct(_: Any, blocks: Any, quants: Any, to: Any, other: Any, stride: Any) -> Any:
        def code(context: Any, b: ir.IRBuilder, sig: Any, args: Any) -> Any:
            rows, factors = (
                [b.load(pointer(b, args[n], 32 * row, WORDS16), align=2) for row in range(4 if few else 8)]
                for n in (0, 1)
            )
            product = b.mul(b.sext(rows[0], WORDS32), b.sext(factors[0], WORDS32))
            beyond = b.icmp_unsigned(">", b.add(product, filled(WORDS32, LARGEST)), filled(WORDS32, 2 * LARGEST))
            halves = ir.VectorType(I64, 4)
            for k, samples in enumerate(_rows(Vectors(b), rows, factors, few=few)):
                eights = b.bitcast(samples, halves)
                for n in (0, 1):
                    down = b.mul(args[4], ir.Constant(I64, 2 * k + n))
                    if is_split:
                        for block in (0, 1):
                            eight = b.extract_element(eights, ir.Constant(ir.IntType(32), n + 2 * block))
                            b.store(eight, pointer(b, args[2 + block], down, I64), align=1)
                    else:
                        row = b.shuffle_vector(eights, eights, chosen([n, n + 2]))
                        b.store(row, pointer(b, args[2], down, row.type), align=1)
            return b.zext(b.bitcast(beyond, I16), I64)

        return types.int64(*[types.int64] * 5), code

    return idct


side_by_side, few_side_by_side = _idct(few=False, is_split=False), _idct(few=True, is_split=False)
split, few_split = _idct(few=False, is_split=True), _idct(few=True, is_split=True)
