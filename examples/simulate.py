"""Simulate from Python: how far is a discrete Transformer from the ODE of which it is an Euler
step, and how does dt change that?

python examples/simulate.py
"""

from ctrans import GPT, GPTConfig
from ctrans.measure.forward.simulation import simulate
from ctrans.model.text import default_text, to_tokens

tokens = to_tokens(default_text(), batch=2, length=64)
print(f"{'dt':>6} {'placement':>10} {'mean |x|':>9} {'bound':>7} {'discrete - ODE':>15}")
for placement in ("pre", "peri"):
    for dt in (1.0, 0.3, 0.1, 0.03):
        config = GPTConfig(
            context=64,
            depth=4,
            width=64,
            placement=placement,
            dt=dt,
            initialisation="xavier",
            embedding_std=1.0,
        )
        result = simulate(GPT(config, seed=0).double(), tokens)
        end = (result.mean_abs[-1], result.bounds.mean_abs[-1], result.discrete_distance[-1])
        print(f"{dt:6} {placement:>10} {end[0]:9.3f} {end[1]:7.2f} {end[2]:15.2e}")
