"""Decides whether two photos show the same picture: aligns them, then compares their detail.

Both photos are thumbnails of `CELLS` x `CELLS` mean lumas, whatever their shape. One is laid over the other by an
affine map, which begins at the parts whose hashes were alike and is refined on ever finer grids. Where both overlap,
the mean of the surroundings is subtracted, which leaves the detail, and the score is the correlation of both details:
1 for the same picture in other bytes, hardly ever more than 0.8 for two pictures of the same thing.

Places are in units of half a side from the centre: -1 to 1 in both directions. The arithmetic is in float64 and in a
fixed order, so that a score is the same on every machine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from resolute.pipeline.jit import compiled

from .descriptor import GRID, PARTS, area_means, central_part

__all__ = ["CELLS", "score", "thumbnail"]

CELLS = 96  # per side of a thumbnail
# Cells per side of the grid of each step, its iterations, and the correlation below which two photos are too different.
_STEPS = ((12, 4, 0.5), (24, 6, 0.75), (48, 5, 0.0))
_FINEST = 48
_SAMPLES = 3  # samples per cell of that grid and direction, of the thumbnail that is laid over the other
_NEAR_CELLS = 3  # surroundings: so many cells in each direction
_MIN_OVERLAP = 0.4  # of the area
_STRIP = 8  # a strip at one side, this part of the overlap, may differ: a bar, or a line of text
_PARAMETERS = 6  # of a map (x, y) -> (p0 + p1 x + p2 y, p3 + p4 x + p5 y)
_MAX_STEP = 0.15  # of a parameter in one iteration
_SCALES, _MAX_SHEAR = (0.5, 1.6), 0.3  # of an acceptable map
_DAMPING = 1e-3
_OUTLIER = 0.5  # squared difference, in standard deviations, from which a cell counts less: it is covered by something


def thumbnail(jpeg: bytes) -> NDArray[np.int16]:
    """(CELLS, CELLS) mean luma of a stored JPEG in 16ths of a level, 0 to 4080."""
    return area_means(simplejpeg.decode_jpeg(jpeg, "GRAY"), CELLS).astype(np.int16)


def score(
    asking: NDArray[np.int16],
    found: NDArray[np.int16],
    *,
    part: int,
    same_part: bool,
    mirrored: bool,
    width: int,
    height: int,
) -> float:
    """How much two thumbnails look like the same picture, 0 to 1; 0 if they cannot be aligned.

    `part`, `same_part` and `mirrored` are as in CANDIDATE; `width` and `height` (px) are those of the asking photo.
    """
    cuts = PARTS[part] if part < len(PARTS) else np.array(central_part(width, height))
    left, right, top, bottom = (2.0 * cuts / GRID).tolist()
    region = np.array([left - 1, 1 - right, top - 1, 1 - bottom])
    if same_part:
        start = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    else:  # the part of the asking photo lies on the whole of the other
        across, down = 2 - left - right, 2 - top - bottom
        start = np.array([(right - left) / across, 2 / across, 0.0, (bottom - top) / down, 0.0, 2 / down])
        region = np.array([-1.0, 1.0, -1.0, 1.0])
    other = np.ascontiguousarray(found[:, ::-1]) if mirrored else found
    return float(_score(asking, other, start, region))


@compiled
def _coarser(thumb: Any, cells: int) -> Any:
    """(cells, cells) float64: means of the blocks of a thumbnail."""
    block = len(thumb) // cells
    out = np.empty((cells, cells))
    for y in range(cells):
        for x in range(cells):
            total = np.int64(0)
            for j in range(block):
                for i in range(block):
                    total += np.int64(thumb[y * block + j, x * block + i])
            out[y, x] = total / (block * block)
    return out


@compiled
def _sample(image: Any, u: float, v: float) -> float:
    """The value of a square image at a place (u, v), between cells by bilinear interpolation."""
    cells = len(image)
    x = min(max((u + 1) * cells / 2 - 0.5, 0.0), cells - 1.001)
    y = min(max((v + 1) * cells / 2 - 0.5, 0.0), cells - 1.001)
    i, j = int(x), int(y)
    x, y = x - i, y - j
    upper = image[j, i] * (1 - x) + image[j, i + 1] * x
    lower = image[j + 1, i] * (1 - x) + image[j + 1, i + 1] * x
    return upper * (1 - y) + lower * y


@compiled
def _lay_over(image: Any, p: Any, cells: int, samples: int) -> Any:
    """(cells, cells) float64: `image` under the map `p`; each cell is the mean of `samples` x `samples` samples."""
    out = np.empty((cells, cells))
    fine = cells * samples
    for y in range(cells):
        for x in range(cells):
            total = 0.0
            for j in range(samples):
                v = (2 * (y * samples + j) + 1) / fine - 1
                for i in range(samples):
                    u = (2 * (x * samples + i) + 1) / fine - 1
                    total += _sample(image, p[0] + p[1] * u + p[2] * v, p[3] + p[4] * u + p[5] * v)
            out[y, x] = total / (samples * samples)
    return out


@compiled
def _solve(matrix: Any, right: Any) -> bool:
    """Solve matrix @ x = right in place, x in `right`, by elimination; whether there is a solution.

    why not NumPy's: its sums depend on the machine.
    """
    n = len(right)
    for k in range(n):
        if abs(matrix[k, k]) < 1e-12:
            return False
        for i in range(k + 1, n):
            factor = matrix[i, k] / matrix[k, k]
            for j in range(k, n):
                matrix[i, j] -= factor * matrix[k, j]
            right[i] -= factor * right[k]
    for k in range(n - 1, -1, -1):
        for j in range(k + 1, n):
            right[k] -= matrix[k, j] * right[j]
        right[k] /= matrix[k, k]
    return True


@compiled
def _moments(a: Any, b: Any, weights: Any) -> Any:
    """Weighted means and standard deviations of two images, and their correlation; the latter is -1 if one is flat."""
    total, sum_a, sum_b, sum_aa, sum_bb, sum_ab = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for y in range(a.shape[0]):
        for x in range(a.shape[1]):
            w, u, v = weights[y, x], a[y, x], b[y, x]
            total += w
            sum_a += w * u
            sum_b += w * v
            sum_aa += w * u * u
            sum_bb += w * v * v
            sum_ab += w * u * v
    if total <= 0:
        return 0.0, 0.0, 1.0, 1.0, -1.0
    mean_a, mean_b = sum_a / total, sum_b / total
    variance_a, variance_b = sum_aa / total - mean_a * mean_a, sum_bb / total - mean_b * mean_b
    if variance_a <= 1e-9 or variance_b <= 1e-9:
        return mean_a, mean_b, 1.0, 1.0, -1.0
    dev_a, dev_b = np.sqrt(variance_a), np.sqrt(variance_b)
    return mean_a, mean_b, dev_a, dev_b, (sum_ab / total - mean_a * mean_b) / (dev_a * dev_b)


@compiled
def _inside(p: Any, region: Any, u: float, v: float) -> bool:
    """Whether a place lies in the `region` (left, right, top, bottom) and, under the map `p`, in the other image."""
    if u < region[0] or u > region[1] or v < region[2] or v > region[3]:
        return False
    return abs(p[0] + p[1] * u + p[2] * v) <= 1.0 and abs(p[3] + p[4] * u + p[5] * v) <= 1.0


@compiled
def _align(a: Any, b: Any, p: Any, region: Any, iterations: int) -> float:
    """Refine the map `p` that lays `b` over `a` by the Gauss-Newton method; returns the correlation that is reached.

    Brightness and contrast do not count. Cells that differ much, which something may cover, count less (Geman and
    McClure's weights).
    """
    cells = len(a)
    matrix, right, slope = np.empty((_PARAMETERS, _PARAMETERS)), np.empty(_PARAMETERS), np.empty(_PARAMETERS)
    trust, weights = np.ones((cells, cells)), np.empty((cells, cells))
    best, best_p = -1.0, p.copy()
    for iteration in range(iterations + 1):
        laid = _lay_over(b, p, cells, 1)
        overlap = 0
        for y in range(cells):
            for x in range(cells):
                is_inside = _inside(p, region, (2 * x + 1) / cells - 1, (2 * y + 1) / cells - 1)
                weights[y, x] = trust[y, x] if is_inside else 0.0
                overlap += is_inside
        mean_a, mean_b, dev_a, dev_b, correlation = _moments(a, laid, weights)
        if overlap < _MIN_OVERLAP * cells * cells or correlation <= best:
            break
        is_done = correlation < best + 1e-4 or iteration == iterations
        best = correlation
        best_p[:] = p
        if is_done:
            break
        matrix[:] = 0.0
        right[:] = 0.0
        for y in range(cells):
            v, above, below = (2 * y + 1) / cells - 1, max(y - 1, 0), min(y + 1, cells - 1)
            for x in range(cells):
                if weights[y, x] == 0.0:
                    continue
                u, before, after = (2 * x + 1) / cells - 1, max(x - 1, 0), min(x + 1, cells - 1)
                difference = (a[y, x] - mean_a) / dev_a - (laid[y, x] - mean_b) / dev_b
                trust[y, x] = (_OUTLIER / (_OUTLIER + difference * difference)) ** 2
                across = (laid[y, after] - laid[y, before]) * cells / (2 * (after - before) * dev_b * p[1])
                down = (laid[below, x] - laid[above, x]) * cells / (2 * (below - above) * dev_b * p[5])
                slope[0], slope[1], slope[2] = across, across * u, across * v
                slope[3], slope[4], slope[5] = down, down * u, down * v
                for i in range(_PARAMETERS):
                    weighted = trust[y, x] * slope[i]
                    right[i] += weighted * difference
                    for j in range(i, _PARAMETERS):
                        matrix[i, j] += weighted * slope[j]
        trace = 0.0
        for i in range(_PARAMETERS):
            trace += matrix[i, i]
        for i in range(_PARAMETERS):
            matrix[i, i] += _DAMPING * trace / _PARAMETERS
            for j in range(i):
                matrix[i, j] = matrix[j, i]
        if not _solve(matrix, right):
            break
        largest = 0.0
        for i in range(_PARAMETERS):
            largest = max(largest, abs(right[i]))
        shorter = min(1.0, _MAX_STEP / max(largest, 1e-12))
        for i in range(_PARAMETERS):
            p[i] += shorter * right[i]
        if min(p[1], p[5]) < _SCALES[0] or max(p[1], p[5]) > _SCALES[1] or max(abs(p[2]), abs(p[4])) > _MAX_SHEAR:
            break
    p[:] = best_p
    return best


@compiled
def _overlap(p: Any, region: Any, cells: int) -> Any:
    """(top, bottom, left, right): a rectangle of cells in the `region` that lie in the other image, under the map."""
    left, right = int(np.ceil((region[0] + 1) * cells / 2)), int((region[1] + 1) * cells / 2)
    top, bottom = int(np.ceil((region[2] + 1) * cells / 2)), int((region[3] + 1) * cells / 2)
    limit = 1.0 - 0.9 / cells
    while right - left > 8 and bottom - top > 8:
        farthest, side = limit, -1  # the corner that lies farthest outside, and beyond which side
        for y in (top, bottom - 1):
            v = (2 * y + 1) / cells - 1
            for x in (left, right - 1):
                u = (2 * x + 1) / cells - 1
                across, down = p[0] + p[1] * u + p[2] * v, p[3] + p[4] * u + p[5] * v
                if -across > farthest:
                    farthest, side = -across, 0
                if across > farthest:
                    farthest, side = across, 1
                if -down > farthest:
                    farthest, side = -down, 2
                if down > farthest:
                    farthest, side = down, 3
        if side < 0:
            break
        left, right = left + (side == 0), right - (side == 1)
        top, bottom = top + (side == 2), bottom - (side == 3)
    return top, bottom, left, right


@compiled
def _detail(image: Any) -> Any:
    """An image minus the mean of the surroundings of each cell."""
    rows, columns = image.shape
    sums = np.zeros((rows + 1, columns + 1))
    for y in range(rows):
        total = 0.0
        for x in range(columns):
            total += image[y, x]
            sums[y + 1, x + 1] = sums[y, x + 1] + total
    out = np.empty((rows, columns))
    for y in range(rows):
        top, bottom = max(0, y - _NEAR_CELLS), min(rows, y + _NEAR_CELLS + 1)
        for x in range(columns):
            left, right = max(0, x - _NEAR_CELLS), min(columns, x + _NEAR_CELLS + 1)
            around = sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]
            out[y, x] = image[y, x] - around / ((bottom - top) * (right - left))
    return out


@compiled
def _clipped(detail: Any) -> Any:
    """Detail limited to its mean size, so that a few strong edges, such as an outline, do not decide alone."""
    total = 0.0
    for y in range(detail.shape[0]):
        for x in range(detail.shape[1]):
            total += abs(detail[y, x])
    limit = total / detail.size
    out = np.empty(detail.shape)
    for y in range(detail.shape[0]):
        for x in range(detail.shape[1]):
            out[y, x] = min(max(detail[y, x], -limit), limit)
    return out


@compiled
def _agreement(a: Any, b: Any) -> float:
    """The smaller of the correlations of two details as they are and clipped."""
    weights = np.ones(a.shape)
    as_is = _moments(a, b, weights)[4]
    clipped = _moments(_clipped(a), _clipped(b), weights)[4]
    return min(as_is, clipped)


@compiled
def _score(asking: Any, found: Any, p: Any, region: Any) -> float:
    """As `score`, from the map `p` on, within a `region` of the asking photo; changes `p`."""
    for cells, iterations, least in _STEPS:
        a = _coarser(asking, cells)
        if _align(a, _coarser(found, cells), p, region, iterations) < least:
            return 0.0
    top, bottom, left, right = _overlap(p, region, _FINEST)
    if (bottom - top) * (right - left) < _MIN_OVERLAP * _FINEST * _FINEST:
        return 0.0
    laid = _lay_over(found, p, _FINEST, _SAMPLES)
    a = _detail(_coarser(asking, _FINEST)[top:bottom, left:right])
    b = _detail(laid[top:bottom, left:right])
    strip_y, strip_x = (bottom - top) // _STRIP, (right - left) // _STRIP
    best = _agreement(a, b)
    best = max(best, _agreement(a[strip_y:], b[strip_y:]), _agreement(a[:-strip_y], b[:-strip_y]))
    best = max(best, _agreement(a[:, strip_x:], b[:, strip_x:]), _agreement(a[:, :-strip_x], b[:, :-strip_x]))
    return max(0.0, best)
