"""Training in timm's style, `for epoch: for input, target in loader`.

    python -m resolute.pipeline.examples.timm_loop SHARDS --res 128,160

`PairLoader` provides the loader interface of timm's `train_one_epoch` and `validate`. Training batches are already
mixed, so the loss takes soft targets and timm's own mixup stays off.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, accuracy

from resolute import Loader, cuda
from resolute.console import run_main
from resolute.pipeline.loader.epochs import EpochBatches

from .start import Options, command, open_plan


@dataclass
class PairLoader:
    """A training epoch or a validation as a loader of (images, targets) on the device; iterate once."""

    batches: EpochBatches
    classes: int
    mixup_enabled: bool = False  # read by timm's train.py

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for batch in self.batches:
            is_train = batch.spec.split == "train"
            yield batch.images, batch.soft_targets(self.classes, smoothing=0.1) if is_train else batch.labels


def train(options: Options) -> AverageMeter:
    """Train; returns the top-1 accuracy in percent of the last validation."""
    device = cuda.resolve_device(options.device)
    plan = open_plan(options)
    classes = len(plan.shards.classes)
    model = timm.create_model("resnet18", num_classes=classes).to(device).to(memory_format=torch.channels_last)
    ema = ModelEmaV3(model, decay=0.99, use_warmup=True)
    optimizer = create_optimizer_v2(model, opt="sgd", lr=0.1, momentum=0.9, weight_decay=5e-5)
    schedule = CosineLRScheduler(optimizer, t_initial=plan.total_steps, t_in_epochs=False)
    loss_fn = SoftTargetCrossEntropy()
    with Loader(plan, device=device) as loader:
        step = 0
        for epoch in loader.epochs():
            for images, target in PairLoader(epoch.train, classes):
                loss = loss_fn(model(images), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                ema.update(model, step=step)
                schedule.step_update(step)
            top1 = AverageMeter()
            for images, target in PairLoader(epoch.val, classes):
                with torch.inference_mode():
                    top1.update(accuracy(ema.module(images), target)[0].item(), len(target))
            print(f"epoch {epoch.number} {epoch.res} px: top-1 {top1.avg:.2f} % of {top1.count}")
    return top1


main = command("timm_loop", train, Options, __doc__)

if __name__ == "__main__":
    run_main(main)
