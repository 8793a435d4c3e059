"""Watch a Lightning training: `python examples/monitor_lightning.py`, then `ctrans watch
out/lightning`. Needs lightning.
"""

import os
import sys

import torch
from lightning.pytorch import LightningModule, Trainer

from ctrans import GPT, GPTConfig
from ctrans.model.text import default_text
from ctrans.training.monitor import LightningCallback

STEPS = int(os.environ.get("STEPS", "100"))


class Language(LightningModule):
    def __init__(self):
        super().__init__()
        self.model = GPT(GPTConfig(context=32, depth=2, width=32, heads=2, placement="pre"))

    def training_step(self, rows, index):
        return self.model(rows[:, :-1], rows[:, 1:])[1]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)


def main(out="out/lightning"):
    text = torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long()
    windows = text[: len(text) // 33 * 33].reshape(-1, 33)
    loader = torch.utils.data.DataLoader(windows, batch_size=8, shuffle=True)
    watching = LightningCallback(every=10, out=out)
    trainer = Trainer(
        max_steps=STEPS,
        callbacks=[watching],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=out,
    )
    trainer.fit(Language(), loader)
    print(
        f"{len(watching.monitor.past.reports)} reports in {out}; alarms:"
        f" {[str(alarm) for alarm in watching.monitor.alarms]}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
