"""Put ODE blocks into a Hugging Face GPT-2, fine-tune it for a few steps, and take them out again.

The model's own blocks become ODEs in place. Its trainer, its state dict and its masks keep working.
With one Euler step the logits keep their bits. A finer solution of the ODE is another model, to
which training adapts the weights. You can give a local directory that save_pretrained() wrote,
instead of the tiny random model. Nothing is downloaded.

    python examples/ode_block_in_gpt2.py [DIRECTORY]
"""

from __future__ import annotations

import sys

import torch
import transformers
from torch import Tensor, nn

from ctrans.interop import continuize, discretize
from ctrans.model.text import default_text, to_tokens

STEPS, BATCH, LENGTH = 30, 8, 64


def tiny_gpt2() -> nn.Module:
    """A GPT-2 over bytes with random weights."""
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def fine_tune(model: nn.Module, tokens: Tensor) -> None:
    """A few steps of AdamW, as for any model."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    for step in range(STEPS):
        loss = model(tokens, labels=tokens).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 10 == 0 or step == STEPS - 1:
            print(f"step {step:3}: loss {float(loss.detach()):.3f}")
    model.eval()


torch.manual_seed(0)
directory = sys.argv[1] if len(sys.argv) > 1 else None
model = (
    transformers.GPT2LMHeadModel.from_pretrained(directory, local_files_only=True)
    if directory
    else tiny_gpt2()
)
model.eval()
tokens = to_tokens(default_text(), batch=BATCH, length=LENGTH)
names, logits = list(model.state_dict()), model(tokens).logits

continuize(model)
print(f"one Euler step: the logits keep their bits: {torch.equal(model(tokens).logits, logits)}")

middle = range(1, model.config.n_layer - 1)
continuize(discretize(model), middle, method="rk4", gradient="checkpoint")
print(
    f"blocks {middle.start} to {middle.stop - 1} by rk4: logits move by"
    f" {float((model(tokens).logits - logits).detach().abs().max()):.2g}"
)
fine_tune(model, tokens)
print(f"names in the state dict are GPT-2's: {list(model.state_dict()) == names}")

ode = model(tokens, labels=tokens).loss
discrete = discretize(model)(tokens, labels=tokens).loss
print(
    f"loss of the ODE model {float(ode.detach()):.3f}; of its weights in discrete blocks"
    f" {float(discrete.detach()):.3f}"
)
