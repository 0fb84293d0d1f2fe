"""Lightning's Trainer with DDP, and a callback of rank 0 that takes long after each epoch."""

import os
import tempfile
import time

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(lightning.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss."""
        inputs, wanted = batch
        loss = nn.functional.mse_loss(self.layer(inputs), wanted)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return a plain optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Samples(lightning.Callback):
    """Rank 0 draws pictures of what the model makes of some samples."""

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        """Run after each epoch."""
        if trainer.is_global_zero:
            time.sleep(float(os.environ["PAUSE_S"]))


loader = DataLoader(TensorDataset(torch.ones(32, 4), torch.ones(32, 1)), batch_size=4)
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=2,
        callbacks=[Samples()],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), loader)
    print(f"rank {trainer.global_rank}: done", flush=True)
