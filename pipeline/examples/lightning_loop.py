"""Training with Lightning's `Trainer` and its checkpoints.

    python -m resolute.pipeline.examples.lightning_loop SHARDS --res 128,160 --checkpoint folder

Each epoch of Lightning is a training phase of the plan and its validation, both read from one loader, so a stage change
rebuilds nothing. Run it again after an interruption: it continues after the last complete epoch.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from resolute import Loader, cuda
from resolute.console import run_main

from .start import ResumingOptions, command, open_plan
from .timm_loop import PairLoader


class Classifier(LightningModule):
    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self.loader, self.plan, self.classes, self.correct = loader, loader.plan, len(loader.plan.shards.classes), 0
        self.epochs = {epoch.number: epoch for epoch in loader.epochs()}
        self.network = resnet18(num_classes=self.classes).to(memory_format=torch.channels_last)

    def train_dataloader(self) -> PairLoader:
        return PairLoader(self.epochs[self.current_epoch].train, self.classes)

    def val_dataloader(self) -> PairLoader:
        return PairLoader(self.epochs[self.current_epoch].val, self.classes)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(self.network(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.correct += int((self.network(batch[0]).argmax(1) == batch[1]).sum())

    def on_validation_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch}: top-1 {self.correct / len(self.plan.shards.splits['val']):.2%}")
        self.correct = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-5)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.plan.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["loader"] = self.loader.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loader.load_state_dict(checkpoint["loader"])


def train(options: ResumingOptions) -> dict[str, torch.Tensor]:
    """Train; returns the network's state dict."""
    torch.manual_seed(0)
    plan, device, last = open_plan(options), cuda.resolve_device(options.device), options.checkpoint / "last.ckpt"
    saving = ModelCheckpoint(options.checkpoint, "last", save_on_train_epoch_end=True, enable_version_counter=False)
    trainer = Trainer(
        accelerator=device.type,
        devices=1,
        max_epochs=options.stop or plan.phases[-1].epoch + 1,
        callbacks=[saving],
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with Loader(plan, device=device) as loader:
        model = Classifier(loader)
        trainer.fit(model, ckpt_path=last if last.exists() else None)
    return dict(model.network.state_dict())


main = command("lightning_loop", train, ResumingOptions, __doc__)

if __name__ == "__main__":
    run_main(main)
