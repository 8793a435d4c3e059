"""Watch a Hugging Face Trainer that is about to diverge: `python examples/monitor_trainer.py`, then
`ctrans watch out/trainer`.

A small GPT-2 learns Python's language documentation, byte by byte, at a learning rate that keeps
rising: (step/240)^3. The monitor reports what grows, where, and when it will pass its limit, long
before the loss rises. Needs transformers and accelerate.
"""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from ctrans.model.text import default_text
from ctrans.training.monitor import TrainerCallback

STEPS = int(os.environ.get("STEPS", "200"))


class Windows(torch.utils.data.Dataset):
    """Stretches of 64 bytes."""

    def __init__(self, length=64):
        self.text, self.length = (
            torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long(),
            length,
        )

    def __len__(self):
        return len(self.text) // self.length

    def __getitem__(self, i):
        window = self.text[i * self.length : (i + 1) * self.length]
        return {"input_ids": window, "labels": window}


def main(out="out/trainer"):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=256, n_positions=64)
    )
    watching = TrainerCallback(every=10)
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    optimiser = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: ((step + 1) / 240) ** 3)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(),
        callbacks=[watching],
        optimizers=(optimiser, rate),
    )
    watching.logs_to(trainer)  # also to W&B and others in report_to; gradient norms before clipping
    trainer.train()
    for alarm in watching.monitor.alarms:
        print(alarm)


if __name__ == "__main__":
    main(*sys.argv[1:])
