"""The list of loaders that are compared, and how each processes an image."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPU_LOADERS", "LOADERS", "LoaderEntry"]


@dataclass(frozen=True, kw_only=True)
class LoaderEntry:
    """`resize`: how it shrinks an image; `has_crops`: its adapter also shows that, on known crops."""

    title: str
    module: str  # of benchmarks.loaders
    variant: str = ""
    at_change: str  # what happens when the resolution changes
    resize: str
    has_crops: bool = False
    has_rate: bool = True  # False: its rate at one resolution is another entry's


LOADERS = {
    "ours": LoaderEntry(
        title="ours",
        module="ours",
        at_change="same loader",
        resize="bilinear, antialiased, in our graph",
        has_crops=True,
    ),
    "pillow": LoaderEntry(
        title="torch DataLoader, Pillow",
        module="dataloader",
        at_change="rebuilt",
        resize="Pillow bilinear, antialiased: the reference",
        has_crops=True,
    ),
    "v2": LoaderEntry(
        title="torch DataLoader, torchvision v2",
        module="dataloader",
        variant="v2",
        at_change="rebuilt",
        resize="torch's uint8 bilinear, antialiased",
        has_crops=True,
    ),
    "v2-sized": LoaderEntry(
        title="torch DataLoader, torchvision v2, sampler of (sample, size)",
        module="dataloader",
        variant="v2-sized",
        at_change="same loader",
        resize="as v2",
        has_rate=False,
    ),
    "timm": LoaderEntry(
        title="timm create_loader",
        module="timm",
        at_change="rebuilt",
        resize="Pillow bilinear, antialiased, as the reference",
    ),
    "timm-plain": LoaderEntry(
        title="timm create_loader, without its prefetcher",
        module="timm",
        variant="plain",
        at_change="rebuilt",
        resize="as timm",
    ),
    "timm-scheduled": LoaderEntry(
        title="timm create_loader, input_size_choices",
        module="timm",
        variant="scheduled",
        has_rate=False,
        at_change="next epoch of one loader; all read from the largest images",
        resize="as timm",
    ),
    "webdataset": LoaderEntry(
        title="webdataset WebLoader, torchvision v2",
        module="webdataset",
        at_change="rebuilt",
        resize="as v2",
    ),
    "dali": LoaderEntry(
        title="DALI, stock CPU pipeline",
        module="dali",
        at_change="rebuilt",
        resize="DALI triangular, antialiased",
        has_crops=True,
    ),
    "ffcv": LoaderEntry(
        title="FFCV, JPEG mode",
        module="ffcv",
        at_change="rebuilt, compiled anew",
        resize="OpenCV INTER_AREA; decoded with libjpeg-turbo's fast, less exact DCT",
        has_crops=True,
    ),
    "ffcv-raw": LoaderEntry(
        title="FFCV, raw mode",
        module="ffcv",
        variant="raw",
        at_change="rebuilt, compiled anew",
        resize="as FFCV; no JPEG is decoded",
    ),
    "ffcv-output-size": LoaderEntry(
        title="FFCV, decoder.output_size",
        module="ffcv",
        variant="output_size",
        has_rate=False,
        at_change="next epoch of one loader; all read from the largest images",
        resize="as FFCV",
    ),
}

# Those that feed a GPU: float16 batches there, in channels_last memory. A DataLoader and FFCV send uint8, a quarter of
# the bytes, and normalise on the GPU.
GPU_LOADERS = {
    "ours": LoaderEntry(title="ours", module="ours", at_change="same loader", resize="bilinear, antialiased"),
    "ours-gpu": LoaderEntry(
        title="ours, decoding on the GPU",
        module="ours",
        variant="gpu",
        at_change="same loader",
        resize="bilinear, antialiased",
    ),
    "v2": LoaderEntry(
        title="torch DataLoader, torchvision v2",
        module="dataloader",
        variant="v2-uint8",
        at_change="rebuilt",
        resize="torch's uint8 bilinear, antialiased",
    ),
    "v2-sized": LoaderEntry(
        title="the same, one persistent DataLoader",
        module="dataloader",
        variant="v2-uint8-sized",
        at_change="same loader",
        resize="as v2",
        has_rate=False,
    ),
    "dali": LoaderEntry(
        title="DALI, stock pipeline, decoding on the GPU",
        module="dali",
        variant="gpu",
        at_change="rebuilt",
        resize="DALI triangular, antialiased",
    ),
    "ffcv": LoaderEntry(
        title="FFCV, JPEG mode",
        module="ffcv",
        variant="uint8",
        at_change="rebuilt, compiled anew",
        resize="OpenCV INTER_AREA",
    ),
}
