"""What the fork server of `tests.commands` loads once. No module here may start a thread or touch a device."""

import nvidia.dali.fn
import timm
import torch

import benchmarks.loader
import pipeline.loader
import prep.build
import prep.verify
import train.evaluate
import train.predict
import train.run

__all__ = ["benchmarks", "nvidia", "pipeline", "prep", "timm", "torch", "train"]
