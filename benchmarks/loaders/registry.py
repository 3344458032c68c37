"""The list of loaders that are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["GPU_LOADERS", "LOADERS", "LoaderEntry"]


@dataclass(frozen=True, kw_only=True)
class LoaderEntry:
    title: str
    module: str  # of benchmarks.loaders
    variant: str = ""
    at_change: str  # what happens when the resolution changes
    has_crops: bool = False  # its adapter also resizes known crops, to compare pixels
    has_rate: bool = True  # False: its rate at one resolution is another entry's


LOADERS = {
    "ours": LoaderEntry(
        title="ours",
        module="ours",
        at_change="same loader",
        has_crops=True,
    ),
    "pillow": LoaderEntry(
        title="torch DataLoader, Pillow",
        module="dataloader",
        variant="pillow",
        at_change="rebuilt",
        has_crops=True,
    ),
    "v2": LoaderEntry(
        title="torch DataLoader, torchvision v2",
        module="dataloader",
        variant="torchvision",
        at_change="rebuilt",
        has_crops=True,
    ),
    "v2-sized": LoaderEntry(
        title="torch DataLoader, torchvision v2, one for all sizes",
        module="dataloader",
        variant="torchvision-sized",
        at_change="same loader",
    ),
    "v2-uint8-sized": LoaderEntry(
        title="torch DataLoader, torchvision v2, one for all sizes, uint8",
        module="dataloader",
        variant="torchvision-uint8-sized",
        at_change="same loader",
    ),
    "simplejpeg-sized": LoaderEntry(
        title="torch DataLoader, simplejpeg and v2, one for all sizes",
        module="dataloader",
        variant="simplejpeg-sized",
        at_change="same loader",
        has_crops=True,
    ),
    "simplejpeg-uint8-sized": LoaderEntry(
        title="torch DataLoader, simplejpeg and v2, one for all sizes, uint8",
        module="dataloader",
        variant="simplejpeg-uint8-sized",
        at_change="same loader",
    ),
    "timm": LoaderEntry(
        title="timm create_loader",
        module="timm",
        at_change="rebuilt",
    ),
    "timm-plain": LoaderEntry(
        title="timm create_loader, without its prefetcher",
        module="timm",
        variant="plain",
        at_change="rebuilt",
    ),
    "timm-scheduled": LoaderEntry(
        title="timm create_loader, input_size_choices",
        module="timm",
        variant="scheduled",
        has_rate=False,
        at_change="next epoch of one loader; all read from the largest images",
    ),
    "webdataset": LoaderEntry(
        title="webdataset WebLoader, torchvision v2",
        module="webdataset",
        at_change="rebuilt",
    ),
    "dali": LoaderEntry(
        title="DALI, stock CPU pipeline",
        module="dali",
        at_change="rebuilt",
        has_crops=True,
    ),
    "ffcv": LoaderEntry(
        title="FFCV, JPEG mode",
        module="ffcv",
        at_change="rebuilt, compiled anew",
        has_crops=True,
    ),
    "ffcv-raw": LoaderEntry(
        title="FFCV, raw mode",
        module="ffcv",
        variant="raw",
        at_change="rebuilt, compiled anew",
    ),
    "ffcv-output-size": LoaderEntry(
        title="FFCV, decoder.output_size",
        module="ffcv",
        variant="output_size",
        has_rate=False,
        at_change="next epoch of one loader; all read from the largest images",
    ),
}

# Those that feed a GPU: float16 batches there, in channels_last memory. A DataLoader and FFCV send uint8, a quarter of
# the bytes, and normalise on the GPU.
GPU_LOADERS = {
    "ours": LOADERS["ours"],
    "ours-gpu": replace(LOADERS["ours"], title="ours, decoding on the GPU", variant="gpu"),
    "v2": replace(LOADERS["v2"], variant="torchvision-uint8"),
    "v2-sized": replace(LOADERS["v2-uint8-sized"], title="the same, one persistent DataLoader", has_rate=False),
    "dali": replace(LOADERS["dali"], title="DALI, stock pipeline, decoding on the GPU", variant="gpu"),
    "ffcv": replace(LOADERS["ffcv"], variant="uint8"),
}
