"""Compare a Llama-like, a Gemma-like and an OLMo-like architecture of one shape, at initial weights
that never fit into memory.

The shape is that of Llama 2 7B: 32 blocks of width 4096, 27 GB of weights in float32. ctrans draws
the weights of each sublayer when it uses them, and drops them afterwards. So half a gigabyte is
enough. The three models differ in where their norms stand: before attention and FFN (pre), on both
sides (peri), or behind (output). For each model, the example prints how hidden states grow, how the
loss's gradient P = dL/dX grows on its way back, and how sensitive the sublayers of the last block
are. Two processors need five minutes for each. Fewer blocks take less.

    python examples/compare_at_7b_shape.py [BLOCKS]
"""

from __future__ import annotations

import sys
import time

import matplotlib.pyplot as plt

from ctrans.control import costate
from ctrans.interop import PRESETS, from_architecture
from ctrans.measure.backward.sensitivity import sublayer_sensitivity
from ctrans.model.text import default_text, to_tokens
from ctrans.report.placement_style import colour, marker

TOKENS = 32
SHAPE = PRESETS["llama-7b"]
FAMILIES = {
    "Llama-like": SHAPE,
    "Gemma-like": {**SHAPE, "model_type": "gemma2", "head_dim": 128, "query_pre_attn_scalar": 128},
    "OLMo-like": {**SHAPE, "model_type": "olmo2", "eos_token_id": 2},
}

blocks = int(sys.argv[1]) if len(sys.argv) > 1 else SHAPE["num_hidden_layers"]
text = to_tokens(default_text(), batch=1, length=TOKENS + 1)
tokens, targets = text[:, :-1], text[:, 1:]
figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, settings in FAMILIES.items():
    start = time.perf_counter()
    model = from_architecture(settings, blocks=blocks, on_demand=True)
    found = costate(model, tokens, targets)
    sizes = [float(x.square().mean().sqrt()) for x in found.states]
    gradients = [float(p.norm()) for p in found.costates]
    last = list(zip(model.depth.sublayers, found.states, strict=False))[-model.depth.per_block :]
    sensitive = {
        sublayer.kind: sublayer_sensitivity(sublayer, x, tolerance=0.01).value
        for sublayer, x in last
    }
    print(
        f"{name}, {model.config.placement}: rms {sizes[0]:.3g} to {sizes[-1]:.3g}, |P|"
        f" {gradients[-1]:.3g} at the end and {gradients[0]:.3g} at the start,"
        f" {', '.join(f'|dv/dX| of the last {kind} {value:.3g}' for kind, value in sensitive.items())}"
        f" ({time.perf_counter() - start:.0f} s)"
    )
    look = {
        "color": colour(model.config.placement),
        "marker": marker(model.config.placement),
        "markersize": 4,
    }
    axes[0].plot(found.times, sizes, label=f"{name} ({model.config.placement})", **look)
    axes[1].plot(found.times, [p / gradients[-1] for p in gradients], **look)
for axis, title, unit in zip(
    axes,
    ("hidden states", "gradients"),
    ("root mean square of X", "|dL/dX|, 1 at the end"),
    strict=True,
):
    axis.set(xlabel="depth-time t", ylabel=unit, title=title, yscale="log")
    axis.grid(alpha=0.25)
axes[0].legend()
figure.savefig("compare_at_7b_shape.png", dpi=150)
print(
    f"{blocks} blocks, {TOKENS} tokens, loss at the start about log of the vocabulary. Picture:"
    " compare_at_7b_shape.png"
)
