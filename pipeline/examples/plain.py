"""A plain PyTorch loop that trains in stages, validates on every sample and resumes after an interruption.

    python -m resolute.pipeline.examples.plain SHARDS --res 128,160 --checkpoint run.pt --device cuda

Run it again after an interruption: it continues after the last complete epoch and, on a CPU, ends with bit-identical
weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from resolute import Loader, cuda
from resolute.console import run_main
from resolute.files import output_file

from .start import ResumingOptions, command, open_plan


def train(options: ResumingOptions) -> dict[str, torch.Tensor]:
    """Train; returns the model's state dict."""
    device = cuda.resolve_device(options.device)
    torch.manual_seed(0)
    plan = open_plan(options)
    classes, samples = len(plan.shards.classes), len(plan.shards.splits["val"])

    model = resnet18(num_classes=classes).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=plan.total_steps)
    with Loader(plan, device=device) as loader:
        checkpointed: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
        if options.checkpoint.exists():
            for name, state in torch.load(options.checkpoint, map_location=device).items():
                checkpointed[name].load_state_dict(state)
        for epoch in loader.epochs():
            model.train()
            for batch in epoch.train:
                loss = cross_entropy(model(batch.images), batch.soft_targets(classes, smoothing=0.1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
            model.eval()
            with torch.inference_mode():  # every validation sample is seen exactly once
                correct = sum(int((model(batch.images).argmax(1) == batch.labels).sum()) for batch in epoch.val)
            print(f"epoch {epoch.number} {epoch.res} px: top-1 {correct / samples:.2%}")
            with output_file(options.checkpoint) as file:  # why: a run that is killed here keeps the last checkpoint
                torch.save({name: value.state_dict() for name, value in checkpointed.items()}, file)
            if epoch.number + 1 == options.stop:
                break
    return dict(model.state_dict())


main = command("plain", train, ResumingOptions, __doc__)

if __name__ == "__main__":
    run_main(main)
