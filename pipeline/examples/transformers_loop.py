"""Training with the Trainer of Transformers, which reads one stream, and evaluates and saves after each epoch.

python -m resolute.pipeline.examples.transformers_loop SHARDS --res 128,160 --checkpoint folder
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from resolute import Loader, Plan, cuda
from resolute.console import run_main

from .start import ResumingOptions, command, open_plan


class StagedTrainer(Trainer):
    def __init__(self, loader: Loader, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.loader, self.plan = loader, loader.plan

    def get_train_dataloader(self) -> Any:
        return self

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = {p.first_step: p.first for p in self.plan.phases if p.split == "train"}
        self.loader.load_state_dict({"next_batch": first[self.state.global_step]})  # that of the checkpoint, or 0
        for epoch in self.loader.epochs():
            self.epoch = epoch  # for `evaluate`
            for batch in epoch.train:
                targets = batch.soft_targets(self.model.num_labels, 0.1)
                yield {"pixel_values": batch.images, "targets": targets, "global_size": batch.spec.global_size}

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        losses = cross_entropy(model(pixel_values=inputs["pixel_values"]).logits, inputs["targets"], reduction="sum")
        # why: gradients are averaged over processes, whose local batch sizes may differ by a sample or two
        return losses * self.loader.world_size / inputs["global_size"]

    @torch.inference_mode()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.model.eval()
        correct = torch.zeros((), dtype=torch.int64, device=self.loader.device)
        for batch in self.epoch.val:
            correct += (self.model(pixel_values=batch.images).logits.argmax(1) == batch.labels).sum()
        metrics = {"eval_top1": int(self.accelerator.reduce(correct)) / len(self.plan.shards.splits["val"])}
        self.log(metrics)
        self.control: Any = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class EpochEnds(TrainerCallback):
    def __init__(self, plan: Plan, stop: int | None) -> None:
        self.ends = {p.first_step + p.batches: p.epoch + 1 == stop for p in plan.phases if p.split == "train"}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_evaluate = control.should_save = state.global_step in self.ends
        control.should_training_stop |= self.ends.get(state.global_step, False)


def train(options: ResumingOptions) -> dict[str, torch.Tensor]:
    """Train; returns the model's state dict."""
    torch.manual_seed(0)
    plan, device = open_plan(options), cuda.resolve_device(options.device)
    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    model = ResNetForImageClassification(ResNetConfig(num_labels=len(plan.shards.classes), **sizes))
    settings = TrainingArguments(
        options.checkpoint,
        max_steps=plan.total_steps,
        learning_rate=0.05,
        optim="sgd",
        use_cpu=device.type == "cpu",
        ignore_data_skip=True,
        save_strategy="no",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
    )
    with Loader(plan, device=device) as loader:
        trainer = StagedTrainer(loader, model=model, args=settings, callbacks=[EpochEnds(plan, options.stop)])
        trainer.train(resume_from_checkpoint=options.checkpoint.exists() and get_last_checkpoint(options.checkpoint))
    return dict(model.state_dict())


main = command("transformers_loop", train, ResumingOptions, __doc__)

if __name__ == "__main__":
    run_main(main)
