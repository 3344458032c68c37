"""What the fork server of `tests.support.commands` loads once. No module here may start a thread or touch a device."""

import matplotlib.figure
import nvidia.dali.fn
import safetensors.torch
import timm
import torch

import benchmarks.loader
import pipeline.loader.loader
import prep.prepare
import prep.report.report
import prep.verify
import train.distributed
import train.inference.evaluate
import train.inference.export
import train.inference.predict
import train.planner.plan
import train.plot_lr
import train.report.html
import train.show
import train.trainer

__all__ = ["benchmarks", "matplotlib", "nvidia", "pipeline", "prep", "safetensors", "timm", "torch", "train"]
