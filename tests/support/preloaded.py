"""Modules that the fork server of `tests.support.commands` loads once. None may start a thread or touch a device."""

import nvidia.dali.fn
import safetensors.torch
import timm
import torch

import benchmarks.loader
import pipeline.loader.loader
import prep.prepare
import prep.report.report
import prep.verify
import train.devices.distributed
import train.inference.evaluate
import train.inference.export
import train.inference.predict
import train.lr_find
import train.planner.plan
import train.plot_lr
import train.report.html
import train.show
import train.trainer

__all__ = ["benchmarks", "nvidia", "pipeline", "prep", "safetensors", "timm", "torch", "train"]
