"""What does one step do? The mutable side of training, and the loop that drives it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from pipeline.errors import ResoluteError
from pipeline.loader import Batch
from pipeline.plan import BatchSpec
from pipeline.recipe import Recipe

from .meters import Meter
from .model import build_ema, build_model
from .optim import OneCycle, build_optimizer, mixed_cross_entropy

__all__ = ["Learner", "run_batches"]


class Learner:
    """Model, average, optimizer and scaler of one run; everything here goes into a checkpoint."""

    def __init__(self, recipe: Recipe, *, classes: int, total_steps: int, device: torch.device) -> None:
        amp = recipe.precision.amp
        if amp == "fp16" and device.type != "cuda":
            raise ResoluteError(
                f"precision.amp: got fp16 on {device.type}, expected bf16 or off there; change the recipe"
            )
        torch.manual_seed(recipe.seed)
        self.recipe, self.device = recipe, device
        self.network = build_model(
            recipe.model, classes=classes, channels_last=recipe.precision.channels_last, device=device
        )
        self.ema = build_ema(recipe.ema, self.network)
        self.optimizer = build_optimizer(recipe.optim, self.network)
        self.cycle = OneCycle(recipe.schedule, recipe.optim, total_steps=total_steps)
        self.scaler = torch.amp.GradScaler(device.type, enabled=amp == "fp16")
        self._amp_dtype = torch.float16 if amp == "fp16" else torch.bfloat16
        self._topk = min(5, classes)

    def autocast(self) -> AbstractContextManager[object]:
        enabled = self.recipe.precision.amp != "off"
        return torch.autocast(self.device.type, dtype=self._amp_dtype, enabled=enabled)

    def train_step(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """One optimizer step; returns the mean loss (a scalar on the device, not awaited) and the learning rate."""
        optim, spec = self.recipe.optim, batch.spec
        lr = self.cycle.apply(self.optimizer, spec.step, lr_scale=self.recipe.stages[spec.stage].lr_scale)
        total = self.gradients(batch)
        if optim.clip_norm:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.network.parameters(), optim.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(self.network, step=spec.step + 1)
        return total, lr

    def gradients(self, batch: Batch) -> torch.Tensor:
        """Forward and backward; returns the mean loss (a scalar on the device, not awaited)."""
        self.network.train()
        total = torch.zeros((), device=self.device)
        for images, labels, partner_labels, lam in self._parts(batch, self.recipe.optim.accumulate):
            with self.autocast():
                logits = self.network(images)
            losses = mixed_cross_entropy(logits, labels, partner_labels, lam, smoothing=self.recipe.optim.smoothing)
            loss = losses.sum() / len(batch.labels)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        return total

    @torch.inference_mode()
    def eval_step(self, batch: Batch) -> torch.Tensor:
        """Counts (4,) int64 on the device: right in the first place and in the first five, raw and averaged weights."""
        self.network.eval()
        images = self._layout(batch.images)
        counts = []
        for network in (self.network, self.ema.module if self.ema is not None else None):
            if network is None:
                counts += [torch.zeros((), dtype=torch.int64, device=self.device)] * 2
                continue
            with self.autocast():
                logits = network(images)
                if self.recipe.eval.flip:
                    logits = (logits.float() + network(images.flip(3)).float()) / 2
            hits = logits.topk(self._topk, dim=1).indices == batch.labels[:, None]
            counts += [hits[:, 0].sum(), hits.sum()]
        return torch.stack(counts)

    def _parts(self, batch: Batch, count: int) -> Iterable[tuple[torch.Tensor, ...]]:
        tensors = (self._layout(batch.images), batch.labels, batch.partner_labels, batch.lam)
        return zip(*(tensor.chunk(count) for tensor in tensors), strict=True)

    def _layout(self, images: torch.Tensor) -> torch.Tensor:
        """The loader's images are channels_last already; only a recipe that wants NCHW pays for a copy."""
        return images if self.recipe.precision.channels_last else images.contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.network.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if self.device.type == "cuda" else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])


def run_batches(
    batches: Iterable[Batch], learner: Learner, meter: Meter, after: Callable[[BatchSpec], bool]
) -> bool:
    """Drive the run. `after` each batch may save and print; it returns False to stop. True if all batches ran."""
    source = iter(batches)
    while True:
        start = time.perf_counter()
        batch = next(source, None)
        ready = time.perf_counter()
        if batch is None:
            return True
        if batch.spec.split == "train":
            loss, lr = learner.train_step(batch)
            meter.step(batch.spec, loss, lr, wait_s=ready - start, compute_s=time.perf_counter() - ready)
        else:
            counts = learner.eval_step(batch)
            meter.eval_step(batch.spec, counts, elapsed_s=time.perf_counter() - start)
        if not after(batch.spec):
            return False
