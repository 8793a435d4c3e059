"""The gain of mixing by depth: the largest singular value of M_k ... M_0, with streams mixed freely
or doubly stochastically.

The example moves each mixing matrix a little away from its initial value, at random, as training
would. The gain of free products grows like a power of the depth, for states and costates alike. The
gain of products of doubly stochastic matrices stays at 1.

python examples/hyper_connections.py [PICTURE.png]
"""

import sys

import torch

from ctrans import GPT, GPTConfig
from ctrans.measure.forward.mixing import mixing_gains

BLOCKS, MOVED = 64, (0.03, 0.1, 0.3)


def gains(residual, moved):
    model = GPT(GPTConfig(depth=BLOCKS, width=16, heads=2, placement="pre", residual=residual))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for sublayer in model.depth.sublayers:
            sublayer.residual.mix.add_(
                moved * torch.randn(sublayer.residual.mix.shape, generator=generator)
            )
    return mixing_gains(model.depth)


found = {
    (residual, moved): gains(residual, moved)
    for residual in ("hyper_connections", "mhc")
    for moved in MOVED
}
places = (0, 15, 31, 63, 127)
print(f"{'segments':>32}" + "".join(f"{k + 1:>10}" for k in places))
for (residual, moved), values in found.items():
    print(f"{residual:>18}, moved by {moved:<4g}" + "".join(f"{values[k]:>10.3g}" for k in places))

if len(sys.argv) > 1:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
    for (residual, moved), values in found.items():
        axes.semilogy(
            range(1, len(values) + 1),
            values,
            "--" if residual == "mhc" else "-",
            label=f"{residual}, moved by {moved:g}",
        )
    axes.set(xlabel="segments", ylabel="largest singular value of the product of mixing matrices")
    axes.legend()
    figure.savefig(sys.argv[1])
