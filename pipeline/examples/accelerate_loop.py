"""Multi-process training with Hugging Face Accelerate and its checkpoints.

    accelerate launch --num_processes 8 -m resolute.pipeline.examples.accelerate_loop SHARDS --checkpoint run

The loader must not be passed to `Accelerator.prepare`, since it splits each batch over ranks itself; it is registered
for checkpointing instead.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from resolute import Loader
from resolute.console import run_main

from .start import ResumingOptions, command, open_plan


def train(options: ResumingOptions) -> dict[str, torch.Tensor]:
    """Train; returns the model's state dict."""
    accelerator = Accelerator()
    torch.manual_seed(0)
    plan = open_plan(options)
    classes, samples = len(plan.shards.classes), len(plan.shards.splits["val"])
    # why group norm: with batch norm, results would depend on the number of processes
    model = resnet18(num_classes=classes, norm_layer=partial(nn.GroupNorm, 8)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=plan.total_steps)
    # why the schedule is not prepared: Accelerate would step it once per process, but the plan counts global steps
    model, optimizer = accelerator.prepare(model, optimizer)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    with Loader(plan, device=accelerator.device, rank=rank, world_size=world_size) as loader:
        accelerator.register_for_checkpointing(loader, schedule)
        if checkpoints := sorted(options.checkpoint.glob("epoch-*")):
            accelerator.load_state(str(checkpoints[-1]))
        for epoch in loader.epochs():
            model.train()
            for batch in epoch.train:
                with accelerator.autocast():
                    targets = batch.soft_targets(classes, smoothing=0.1)
                    losses = cross_entropy(model(batch.images), targets, reduction="sum")
                # why: gradients are averaged over processes, whose local batch sizes may differ by a sample or two
                accelerator.backward(losses * world_size / batch.spec.global_size)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            model.eval()
            correct = torch.zeros((), dtype=torch.int64, device=accelerator.device)
            with torch.inference_mode():
                for batch in epoch.val:
                    correct += (model(batch.images).argmax(1) == batch.labels).sum()
            total = int(accelerator.reduce(correct))
            accelerator.print(f"epoch {epoch.number} {epoch.res} px: top-1 {total / samples:.2%}")
            save(accelerator, options.checkpoint, epoch.number)
            if epoch.number + 1 == options.stop:
                break
    accelerator.end_training()
    return dict(accelerator.unwrap_model(model).state_dict())


def save(accelerator: Accelerator, folder: Path, epoch: int) -> None:
    """Write the checkpoint `folder`/epoch-N, then delete earlier ones, so that a killed run keeps the last."""
    part, earlier = folder / "part", sorted(folder.glob("epoch-*"))
    if accelerator.is_main_process:
        shutil.rmtree(part, ignore_errors=True)  # of a run that was killed while it wrote
    accelerator.wait_for_everyone()
    accelerator.save_state(str(part))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        part.rename(folder / f"epoch-{epoch:04}")
        for checkpoint in earlier:
            shutil.rmtree(checkpoint)
    accelerator.wait_for_everyone()


main = command("accelerate_loop", train, ResumingOptions, __doc__)

if __name__ == "__main__":
    run_main(main)
