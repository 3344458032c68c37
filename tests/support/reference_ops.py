"""Slow, simple oracles of the augmentations: one image at a time, with Pillow and torchvision."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms import functional as tv1
from torchvision.transforms.v2 import functional as tv

from resolute.pipeline.plan import autoaugment as p
from resolute.pipeline.plan.plan import BatchSpec

Pixels = NDArray[np.uint8]


def operation(image: Pixels, kind: int, values: NDArray[np.float32]) -> Pixels:
    """One operation on an image (height, width, 3)."""
    photo, factor = Image.fromarray(image), float(values[0])
    tensor = torch.from_numpy(image.copy()).permute(2, 0, 1)
    if kind == p.AFFINE:
        numbers = [float(v) for v in values]
        got = photo.transform(photo.size, Image.Transform.AFFINE, numbers, Image.Resampling.BILINEAR)
    elif kind == p.BRIGHTNESS:
        got = tv.adjust_brightness(photo, factor)
    elif kind == p.SATURATION:
        got = tv.adjust_saturation(photo, factor)
    elif kind == p.CONTRAST:
        got = tv.adjust_contrast(photo, factor)
    elif kind == p.SHARPNESS:
        got = tv.adjust_sharpness(photo, factor)
    elif kind == p.POINT:
        return np.asarray(tv.solarize(photo, factor)) & np.uint8(values[1])
    elif kind == p.AUTOCONTRAST:
        got = tv.autocontrast(photo)
    elif kind == p.EQUALIZE:
        got = tv.equalize(photo)
    elif kind == p.BLUR:
        size = 2 * math.ceil(3 * factor) + 1
        return tv.gaussian_blur(tensor, [size, size], [factor, factor]).permute(1, 2, 0).numpy()
    elif kind == p.HUE:  # why: Pillow's HSV has 256 hues, torchvision's tensors any
        return tv.adjust_hue(tensor, (factor / 6 + 0.5) % 1 - 0.5).permute(1, 2, 0).numpy()
    else:
        assert kind == p.NONE
        return image
    return np.asarray(got)


def row(name: str, magnitude: float, res: int) -> tuple[int, list[float]]:
    """Kind and values of a policy's operation, its matrix by torchvision."""
    centre, matrix = [res * 0.5, res * 0.5], tv1._get_inverse_affine_matrix
    degrees = math.degrees(math.atan(magnitude))
    match name:
        case "ShearX":
            return p.AFFINE, matrix([0, 0], 0, [0, 0], 1, [degrees, 0])
        case "ShearY":
            return p.AFFINE, matrix([0, 0], 0, [0, 0], 1, [0, degrees])
        case "TranslateX" | "TranslateY":
            # why: torchvision's float32 linspace has 15.999999 where 16 is meant, and cuts that to 15 px
            px = int(round(magnitude, 4))
            return p.AFFINE, matrix(centre, 0, [px, 0] if name[-1] == "X" else [0, px], 1, [0, 0])
        case "Rotate":
            return p.AFFINE, matrix(centre, -magnitude, [0, 0], 1, [0, 0])
        case "Posterize":
            return p.POINT, [256, sum(128 >> bit for bit in range(int(magnitude))), 0, 0, 0, 0]
        case "Solarize":
            return p.POINT, [255 * magnitude, 255, 0, 0, 0, 0]
        case "Invert":
            return p.POINT, [0, 255, 0, 0, 0, 0]
        case "Identity" | "AutoContrast" | "Equalize":
            return {"I": p.NONE, "A": p.AUTOCONTRAST, "E": p.EQUALIZE}[name[0]], [0.0] * 6
    kinds = {"Brightness": p.BRIGHTNESS, "Color": p.SATURATION, "Contrast": p.CONTRAST, "Sharpness": p.SHARPNESS}
    return kinds[name], [1 + magnitude, 0, 0, 0, 0, 0]


def sample(image: Pixels, spec: BatchSpec, i: int, mean: tuple[float, ...]) -> Pixels:
    """All augmentations of a sample except flips and noise, applied to its resized image."""
    row = spec.rows[i]
    for kind, values in zip(row["kinds"], row["values"], strict=True):
        image = operation(image, int(kind), values)
    image, (x, y, w, h) = image.copy(), row["erase"].tolist()
    image[y : y + h, x : x + w] = [round(255 * m) for m in mean]
    return image


def erased_box(
    u: NDArray[np.float64], res: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, ...]:
    """Random erasing as in torchvision's get_params, from the uniforms `u`, (25,): x, y, w, h."""
    for attempt in range(10):
        target = res * res * (area[0] + (area[1] - area[0]) * u[5 + attempt])
        aspect = math.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * u[15 + attempt])
        h, w = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if h < res and w < res:
            return int(u[1] * (res - w + 1)), int(u[2] * (res - h + 1)), w, h
    return 0, 0, 0, 0
