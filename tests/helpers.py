"""What several tests need: every placement and norm with learned-looking gains and offsets, and
states to feed them.
"""

import torch

from ctrans.cli import OLD_COMMANDS
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.backward.parameter_gradients import ParameterGradients
from ctrans.measure.forward.carried import CarriedStates
from ctrans.measure.forward.conservation import DriftByDepth
from ctrans.measure.transport.perturbations import SIZE, perturbed
from ctrans.measure.transport.transport import distances
from ctrans.measure.transport.wasserstein import ORDERS
from ctrans.measure.walk import observe, walk, walk_depth
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
NAMES = list(PLACEMENTS)
FREE = [name for name, placement in PLACEMENTS.items() if not placement.state_norm]
"""Placements without a norm around the state, whose ODE and steps are of one velocity."""


def small_config(placement, **changes):
    settings = {
        "vocab_size": 11,
        "context": 16,
        "depth": 3,
        "width": 16,
        "heads": 2,
        "placement": placement,
        "dt": 0.1,
    }
    return GPTConfig(**{**settings, "initialisation": "xavier", "embedding_std": 1.0, **changes})


def learned(module, scale=0.2, seed=1):
    """The module with every parameter moved at random, as training would: gains off 1, offsets and
    biases off 0.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator).to(parameter))
    return module


def small_model(placement, dtype=torch.float64, scale=0.2, **changes):
    """A model to look at, without gradients."""
    return learned(GPT(small_config(placement, **changes)).to(dtype), scale).requires_grad_(False)


def conservation_drift(depth, states):
    """The conservation law of the depth and its violation along the states; None without one."""
    return observe(depth, states, [DriftByDepth()])[0]


def gradient_norms(model, tokens, targets):
    """`ParameterGradients` of the model's own loss."""
    return walk(model, tokens, targets, [ParameterGradients()])[0]


def carried(depth, starts):
    """`CarriedStates` as a walk of its own."""
    return walk_depth(depth, starts[0][1], [CarriedStates(starts)])[0]


def transport(model, tokens, perturbation, *, size=SIZE, other=None, orders=ORDERS):
    """W_p(mu_0, nu_0) and W_p(mu_D, nu_D), mu the sequences and nu the same perturbed."""
    x = model.embed(tokens).detach()
    y = perturbed(model, tokens, perturbation, size=size, other=other)
    ends = tuple(carried(model.depth, [(1.0, x), (1.0, y)]))
    return distances(model.depth, perturbation, (x, y), ends, orders=orders)


def tokens(batch=2, length=8, vocabulary=11, seed=0):
    return torch.randint(
        0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def old_command_note(name):
    """What a command says on stderr if it has an old name, and "" otherwise."""
    if name not in OLD_COMMANDS:
        return ""
    return f"ctrans: {name} is now a part of {OLD_COMMANDS[name]}\n"
