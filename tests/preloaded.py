"""What the fork server of `tests.commands` loads once. No module here may start a thread or touch a device."""

import matplotlib.figure
import nvidia.dali.fn
import safetensors.torch
import timm
import torch

import benchmarks.loader
import pipeline.loader
import pipeline.show
import prep.build
import prep.report
import prep.verify
import train.before
import train.draw_lr
import train.evaluate
import train.export
import train.page
import train.predict
import train.ranks
import train.run

__all__ = ["benchmarks", "matplotlib", "nvidia", "pipeline", "prep", "safetensors", "timm", "torch", "train"]
