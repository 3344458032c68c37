"""The registry of peers and how each processes an image."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PEERS", "Peer"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """`resample` says how it shrinks; a peer that is `driven` also shows it, on fixed windows."""

    title: str
    module: str  # of benchmarks.peers
    variant: str = ""
    at_change: str  # what happens when the resolution changes
    resample: str
    driven: bool = False
    rates: bool = True  # False: its rate at one resolution is another entry's
    versions: tuple[str, ...] = ()


PEERS = {
    "ours": Peer(
        title="ours", module="ours", at_change="goes on", resample="bilinear, antialiased, in our graph", driven=True,
    ),
    "pillow": Peer(
        title="torch DataLoader, Pillow", module="dataloader", at_change="rebuilt",
        resample="Pillow bilinear, antialiased: the reference", driven=True,
        versions=("torch", "torchvision", "pillow"),
    ),
    "v2": Peer(
        title="torch DataLoader, torchvision v2", module="dataloader", variant="v2", at_change="rebuilt",
        resample="torch's uint8 bilinear, antialiased", driven=True, versions=("torch", "torchvision"),
    ),
    "timm": Peer(
        title="timm create_loader", module="with_timm", at_change="rebuilt",
        resample="Pillow bilinear, antialiased, as the reference", versions=("timm", "pillow"),
    ),
    "timm-scheduled": Peer(
        title="timm create_loader, input_size_choices", module="with_timm", variant="scheduled", rates=False,
        at_change="next epoch of one loader; all read from the largest images",
        resample="as timm", versions=("timm", "pillow"),
    ),
    "webdataset": Peer(
        title="webdataset WebLoader, Pillow", module="with_webdataset", at_change="rebuilt",
        resample="Pillow bilinear, antialiased, as the reference", versions=("webdataset", "pillow"),
    ),
    "dali": Peer(
        title="DALI, stock CPU pipeline", module="with_dali", at_change="rebuilt",
        resample="DALI triangular, antialiased", driven=True, versions=("nvidia-dali-cuda130", "nvidia-dali-cuda120"),
    ),
    "ffcv": Peer(
        title="FFCV, JPEG mode", module="with_ffcv", at_change="rebuilt, compiled anew",
        resample="OpenCV INTER_AREA; decoded with libjpeg-turbo's fast, less exact DCT", driven=True,
    ),
    "ffcv-output-size": Peer(
        title="FFCV, decoder.output_size", module="with_ffcv", variant="output_size", rates=False,
        at_change="next epoch of one loader; all read from the largest images", resample="as FFCV",
    ),
}  # fmt: skip
