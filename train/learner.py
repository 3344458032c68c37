"""`Learner`: the training and validation steps, and all mutable training state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from resolute import cuda
from resolute.errors import ResoluteError
from resolute.pipeline.loader.batch import Batch
from resolute.train.devices.distributed import Ranks, running_statistics
from resolute.train.devices.hardware import bf16_is_emulated
from resolute.train.loss.distillation import build_teacher, distilled
from resolute.train.loss.losses import build_loss, check_smoothing
from resolute.train.model.build import build_model, compile_network, set_tf32, share_graph
from resolute.train.model.ema import WeightAverage
from resolute.train.model.freeze import Freezer
from resolute.train.model.norms import batch_norms, statistics_kept
from resolute.train.model.outputs import CLASSES, Outputs
from resolute.train.model.regularization import Regularizer, with_largest_strengths
from resolute.train.optim.optimizer import Lookahead, build_gradient_steps, build_optimizer
from resolute.train.optim.schedule import Rates
from resolute.train.recipe.schema import Precision, Recipe
from resolute.train.recipe.sections import smoothing_of

from .step_graphs import StepGraphs, check_cuda_graphs
from .validation import BatchScores, score_batch

__all__ = ["Learner", "autocast", "autocast_dtype", "eval_logits", "image_dtype", "in_layout", "micro_batches"]


class Learner:
    """Network, EMA, optimizer, schedule and gradient scaler of a run; `state_dict` is what a checkpoint stores."""

    def __init__(
        self,
        recipe: Recipe,
        *,
        classes: int,
        total_steps: int,
        device: torch.device,
        head: Outputs = CLASSES,
        ranks: Ranks | None = None,
        epoch_steps: Sequence[int] = (),
        epoch_samples: Sequence[int] = (),
        class_weights: NDArray[np.float32] | None = None,
    ) -> None:
        """`classes`: number of outputs of the network; `head`: what they mean. `epoch_steps`, `epoch_samples`:
        optimizer steps and training samples of each epoch, for schedules that depend on stages, epochs or samples.
        `class_weights` (C,): see that function. Raises `ResoluteError` for settings that the device or model does not
        support."""
        dtype = autocast_dtype(recipe.precision, device)
        if dtype is torch.float16 and device.type != "cuda":
            raise ResoluteError(
                f"precision.amp: got fp16 on {device.type}, expected auto, bf16 or off; change the recipe"
            )
        set_tf32(recipe.precision.tf32, device)
        torch.manual_seed(recipe.seed)
        self.recipe, self.device, self.ranks = recipe, device, ranks or Ranks()
        layout, built = recipe.precision.channels_last, with_largest_strengths(recipe)
        self.network = build_model(
            built.model,
            classes=classes,
            channels_last=layout,
            device=device,
            ranks=self.ranks.world_size,
            names=head.target.names,
            resolutions=recipe.resolutions,
        )
        mean_steps = [total_steps / recipe.total_epochs] * recipe.total_epochs
        self.ema = (
            WeightAverage(recipe.ema, self.network, epoch_steps=[*(epoch_steps or mean_steps)])
            if recipe.ema.on
            else None
        )
        self.teacher = build_teacher(
            recipe.distill,
            recipe.data,
            classes=classes,
            names=head.target.names,
            channels_last=layout,
            device=device,
            resolutions={res for stage in recipe.stages for res in stage.resolutions},
        )
        self.head = head
        check_smoothing(recipe, head)
        weights = None if class_weights is None else torch.from_numpy(class_weights).to(device)
        self.loss = build_loss(recipe.loss, head, weights=weights, device=device)
        self._checkpointed_norms = batch_norms(self.network) if recipe.model.grad_checkpointing else []
        self.optimizer = build_optimizer(built.optim, self.network)
        self._prepare_gradients = build_gradient_steps(recipe.optim, self.network)
        self.freezer = Freezer(recipe.stages, self.network, self.optimizer)
        self.regularizer = Regularizer(recipe, self.network, self.optimizer)
        self.rates = Rates(
            recipe.schedule,
            recipe.optim,
            recipe.stages,
            total_steps=total_steps,
            epoch_steps=epoch_steps,
            epoch_samples=epoch_samples,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
        self._network_is_at: tuple[int, bool] | None = None  # stage and mode
        self._optimizer_is_at: int | None = None  # stage
        self._wrapped: nn.Module | None = None  # the network, averaging gradients over the ranks; None: to be wrapped
        self._smoothing = 0.0
        self.graphs: StepGraphs | None = None
        if recipe.precision.cuda_graphs:
            check_cuda_graphs(recipe, device=device, world_size=self.ranks.world_size)
            self.graphs = StepGraphs(self.network, self.forward_backward)
        if recipe.precision.compile:
            compile_network(self.network, device)

    @property
    def image_dtype(self) -> torch.dtype:
        return image_dtype(self.recipe.precision, self.device)

    def autocast(self) -> AbstractContextManager[object]:
        return autocast(self.recipe.precision, self.device)

    def train_step(self, batch: Batch) -> tuple[torch.Tensor, float]:
        """Run one optimizer step; returns this rank's part of the mean loss and the learning rate (no sync)."""
        spec = batch.spec
        if self._optimizer_is_at != spec.stage:
            self._optimizer_is_at = spec.stage
            self.freezer.apply_to_optimizer(spec.stage)
            self.regularizer.apply_to_optimizer(spec.stage)
        lr = self.rates.apply(self.optimizer, spec.step, stage=spec.stage, res=spec.res)
        self.ranks.seed(self.recipe.seed, spec.step)
        self.enter(spec.stage)
        loss = self.forward_backward(batch) if self.graphs is None else self.graphs(batch)
        if self._prepare_gradients is not None:
            self.scaler.unscale_(self.optimizer)
            self._prepare_gradients()
        self.scaler.step(self.optimizer)  # sync: with fp16 and an optimizer without a fused kernel alone
        if spec.last and isinstance(self.optimizer, Lookahead):
            self.optimizer.sync_lookahead()  # so that the slow weights are validated and kept
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.ema is not None:
            self.ema.update(spec)
        return loss, lr

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Compute the gradients; returns this rank's part of the global mean loss, a scalar on the device (no sync)."""
        self.enter(batch.spec.stage)
        if self._wrapped is None:
            self._wrapped = self.ranks.wrap(self.network)
        network, parts, losses = self._wrapped, self._micro_batches(batch), []
        for number, (images, targets, partner_labels, lam) in enumerate(parts, 1):
            if self.recipe.precision.compile:
                share_graph(images)
            with self.autocast(), self.ranks.sync_gradients(network, last=number == len(parts)):
                outputs = network(images)
                teacher_outputs = self.teacher(images) if self.teacher is not None else None
            each = self.loss(outputs, targets, partner_labels, lam, smoothing=self._smoothing)
            if teacher_outputs is not None:
                each = distilled(each, outputs, teacher_outputs, self.recipe.distill)
            loss = each.sum() / batch.spec.global_size
            losses.append(loss.detach())
            # why world_size: DistributedDataParallel averages the ranks' gradients, their sum is needed
            scaled = self.scaler.scale(loss * self.ranks.world_size if self.ranks.world_size > 1 else loss)
            with statistics_kept(self._checkpointed_norms):
                scaled.backward()
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def enter(self, stage: int, *, training: bool = True) -> None:
        """Prepare the network for batches of `stage`: which layers train, drop rates, mode, label smoothing."""
        if self._network_is_at == (stage, training) and self.network.training == training:
            return
        self._network_is_at = (stage, training)
        self.freezer.apply_to_network(stage)
        self.regularizer.apply_to_network(stage)
        self._smoothing = smoothing_of(self.recipe.in_stage(stage).loss)
        self.network.train(training)
        self._wrapped = None  # why: the wrapper holds the list of the trained parameters

    @property
    def stages_by_graph(self) -> list[list[int]]:
        """Lists of stages that train the same parameters and, if the network is compiled, have the same drop rates.

        The largest first, as `warmup.shapes`.
        """
        lists: dict[tuple[Any, ...], list[int]] = {}
        for number, stages in enumerate(self.freezer.stages_by_set):
            for stage in stages:
                rates = self.regularizer.rates(stage) if self.recipe.precision.compile else ()
                lists.setdefault((number, rates), []).append(stage)

        def order(entry: tuple[tuple[Any, ...], list[int]]) -> tuple[int, int]:
            return entry[0][0], -max(self.recipe.stages[stage].max_res for stage in entry[1])

        return [stages for _, stages in sorted(lists.items(), key=order)]

    @property
    def momentum(self) -> float:
        """SGD's momentum or the first beta, as last set by the schedule."""
        group = self.optimizer.param_groups[0]
        return float(group["momentum"] if "momentum" in group else group["betas"][0])  # no sync: Python numbers

    @torch.inference_mode()
    def eval_step(self, batch: Batch) -> BatchScores:
        """The scores of the batch with the weights "raw" and, with EMA, "ema", on the device (no sync)."""
        if self.network.training:
            if self.ema is not None:
                self.ema.copy_counts()
            self.ranks.average_statistics(*self._averaged)
        self.enter(batch.spec.stage, training=False)
        return score_batch(self.head, self.eval_outputs(batch.images), batch.targets)

    def eval_outputs(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """The outputs of the networks "raw" and, with EMA, "ema" for a validation batch's images."""
        networks = {"raw": self.network} | ({"ema": self.ema.module} if self.ema is not None else {})
        return {
            name: eval_logits(network, images, self.recipe.precision, flip=self.recipe.eval.flip)
            for name, network in networks.items()
        }

    def _micro_batches(self, batch: Batch) -> list[tuple[torch.Tensor, ...]]:
        # why: only classes have labels of the partners
        partners = batch.partner_labels if batch.targets.dim() == 1 else batch.lam
        tensors = (in_layout(batch.images, self.recipe.precision), batch.targets, partners, batch.lam)
        if self.recipe.optim.grad_accum_steps == 1:
            return [tensors]
        return [*zip(*(micro_batches(tensor, self.recipe) for tensor in tensors), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        if self.ema is not None:
            self.ema.copy_counts()
        return {
            "model": self.network.state_dict(),
            "ema": None if self.ema is None else self.ema.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "freezer": self.freezer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": cuda.rng_state(self.device) if self.device.type == "cuda" else None,
        }

    @property
    def _averaged(self) -> list[nn.Module]:
        """The networks whose batch norm statistics are averaged over the ranks."""
        return [self.network, *([self.ema.module] if self.ema is not None else [])]

    def statistics(self) -> list[dict[str, torch.Tensor]]:
        """This rank's batch norm statistics, on the CPU; between validations, each rank has its own."""
        return [
            {name: value.cpu() for name, value in running_statistics(network).items()} for network in self._averaged
        ]

    def load_statistics(self, of_ranks: list[list[dict[str, torch.Tensor]]]) -> None:
        """Load this rank's part of all ranks' `statistics`, or if they were another number, the mean of all."""
        ranks, mean = self.ranks, len(of_ranks) != self.ranks.world_size
        for number, network in enumerate(self._averaged):
            each = [statistics[number] for statistics in of_ranks]
            for name, value in running_statistics(network).items():
                value.copy_(torch.stack([own[name] for own in each]).mean(0) if mean else each[ranks.rank][name])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.network.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.module.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.freezer.load_state_dict(state["freezer"])
        self._optimizer_is_at = None  # why: the loaded optimizer may have the weight decay of another stage
        if state["scaler"]:  # empty without fp16, with which a run may be resumed on another device
            self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None and self.device.type == "cuda":
            cuda.set_rng_state(state["cuda_rng"], self.device)


def micro_batches(tensor: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, ...]:
    """The parts of a step's `tensor` for `optim.grad_accum_steps`, at most that many.

    With `norm = "sync"`, which communicates in each forward pass, ranks with one sample more have as many parts.
    """
    count = recipe.optim.grad_accum_steps
    return tensor.tensor_split(min(count, len(tensor))) if recipe.model.norm == "sync" else tensor.chunk(count)


def image_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """dtype of the input images: float16 on a GPU with autocast, which would convert them anyway, else float32."""
    return torch.float16 if device.type == "cuda" and precision.amp != "off" else torch.float32


def autocast_dtype(precision: Precision, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on `device`; None: off."""
    amp = precision.amp
    if amp == "auto":
        amp = "bf16" if not bf16_is_emulated(device) else "fp16" if device.type == "cuda" else "off"
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "off": None}[amp]


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    dtype = autocast_dtype(precision, device)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def in_layout(images: torch.Tensor, precision: Precision) -> torch.Tensor:
    """The images in the recipe's memory format; the loader's are channels_last, so only NCHW needs a copy."""
    return images if precision.channels_last else images.contiguous()


@torch.inference_mode()
def eval_logits(network: nn.Module, images: torch.Tensor, precision: Precision, *, flip: bool) -> torch.Tensor:
    """Outputs (N, C or D) float32 of images (N, 3, res, res); with `flip`, the mean of image and mirror image."""
    views = [in_layout(images, precision), *([in_layout(images.flip(3), precision)] if flip else [])]
    for view in views if precision.compile else ():
        share_graph(view)
    with autocast(precision, images.device):
        logits = [network(view).float() for view in views]
        return (logits[0] + logits[1]) / 2 if flip else logits[0]
