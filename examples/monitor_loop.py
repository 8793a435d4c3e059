"""Watch a training loop of your own: `python examples/monitor_loop.py`, then `ctrans watch
out/loop`.

The model is any nn.Module, here built from one of torch's own layers. It does not say where its
blocks are. ctrans finds them in a forward pass.
"""

import os
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ctrans.model.text import default_text
from ctrans.training.monitor import Monitor

STEPS = int(os.environ.get("STEPS", "300"))


class Model(nn.Module):
    def __init__(self, width=64, context=32):
        super().__init__()
        self.embedding, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        later = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.body(x, mask=later))


def main(out="out/loop"):
    torch.manual_seed(0)
    model = Model()
    text = torch.frombuffer(bytearray(default_text()), dtype=torch.uint8).long()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, every=10, out=out, total=STEPS, react=["skip"]) as monitor:
        for step in range(STEPS):
            rows = torch.stack(
                [text[p : p + 33] for p in torch.randint(len(text) - 33, (8,)).tolist()]
            )
            loss = cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            if step == 2 * STEPS // 3:
                loss = loss * float("nan")  # a corrupted batch
            loss.backward()
            for alarm in monitor.step(loss, optimiser):
                print(alarm)
            optimiser.step()
            optimiser.zero_grad()
    print(f"loss {loss.item():.2f}; steps left out: {monitor.reactions.skipped}; its log: {out}")


if __name__ == "__main__":
    main(*sys.argv[1:])
