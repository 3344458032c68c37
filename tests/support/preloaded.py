"""Modules that the fork server of `tests.support.commands` loads once. None may start a thread or touch a device."""

import nvidia.dali.fn
import safetensors.torch
import torch

import resolute.cli

with resolute.cli.wandb_hidden():
    import timm

import resolute.benchmarks.loader
import resolute.pipeline.loader.loader
import resolute.prep.build
import resolute.prep.commands
import resolute.prep.report.report
import resolute.prep.verify
import resolute.train.devices.distributed
import resolute.train.inference.evaluate
import resolute.train.inference.export
import resolute.train.inference.predict
import resolute.train.lr_find
import resolute.train.planner.plan
import resolute.train.plot_lr
import resolute.train.report.page
import resolute.train.show
import resolute.train.trainer

__all__ = ["nvidia", "resolute", "safetensors", "timm", "torch"]
