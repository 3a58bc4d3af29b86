"""Train with Lightning's Trainer and its DDPStrategy; print the sum of the parameters."""

import sys

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: list, _: int) -> torch.Tensor:
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


torch.manual_seed(0)
model, data = Regression(), torch.utils.data.TensorDataset(torch.randn(16, 4))
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=sys.argv[1]), max_epochs=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2))
total = sum(float(p.detach().double().abs().sum()) for p in model.parameters())
if trainer.global_rank == 0:
    print(f"RESULT {trainer.world_size} {dist.get_world_size()} {trainer.callback_metrics['loss']:.5f} {total:.5f}")
