"""Perturbations of inputs: substituted tokens, noise, the worst small direction, another text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ctrans.base.option import POSITIVE
from ctrans.base.shapes import SequenceRows
from ctrans.dynamics.depth import Depth
from ctrans.measure.backward.sensitivity import TOLERANCE, StepGraphs
from ctrans.measure.backward.singular_values import Singular, compose, leading_singular
from ctrans.measure.walk import Model, walk_depth
from solvers import ConfigError, unknown

SIZE = 0.05
"""Default size of a perturbation: the share of substituted tokens, or its length relative to the
input's.
"""
AT_ONCE = 2**18
"""Entries of hidden states that `worst_directions` linearises together: about 1.5 GB for GPT-2's
depth.
"""


def worst_directions(
    depth: Depth, x0: SequenceRows, *, tolerance: float = TOLERANCE
) -> Iterator[Singular]:
    """The leading singular triplet of J_{0:D} of each sequence, in batches of at most `AT_ONCE`
    entries.

    Raises SolveError if a state is not finite, ConfigError if weights are made on demand, because
    it needs all weights at once.
    """
    if depth.streamed:
        raise ConfigError(
            "the worst direction needs all weights at once, and these are made on demand: choose"
            " noise or substitution"
        )
    for part in x0.split(max(1, AT_ONCE // x0[0].numel())):
        graphs = StepGraphs()
        walk_depth(depth, part, [graphs])
        steps = graphs.finite_steps("there is no worst direction")
        yield leading_singular(compose(steps), each=True, tolerance=tolerance)


def adversarial_direction(
    depth: Depth, x0: SequenceRows, *, tolerance: float = TOLERANCE
) -> SequenceRows:
    """The unit right singular vector of J_{0:D} of each sequence: the small perturbation of X_0
    that changes X_D most.

    Errors as `worst_directions`.
    """
    directions = worst_directions(depth, x0, tolerance=tolerance)
    return torch.cat([singular.right.squeeze(-3) for singular in directions])


PERTURBATIONS = ("substitution", "noise", "adversarial", "text")
"""Names of the perturbations."""


@torch.no_grad()
def perturbed(
    model: Model,
    tokens: Tensor,
    perturbation: str,
    *,
    size: float = SIZE,
    other: Tensor | None = None,
    generator: torch.Generator | None = None,
    worst: Callable[[], SequenceRows] | None = None,
) -> SequenceRows:
    """X_0 of the sequences perturbed.

    - `perturbation`: "substitution" replaces a share of each sequence's tokens; "noise" adds
      Gaussian noise to X_0; "adversarial" moves X_0 in the top singular direction of each
      sequence's J_{0:D}; "text" takes other sequences
    - `size`: the share of tokens, or the length of what is added relative to X_0
    - `other`: the sequences of "text", as many and as long as `tokens`
    - `generator`: draws the substitutes and the noise
    - `worst()`: returns the directions of "adversarial" if they are known already

    Raises ConfigError for an unknown perturbation, a size that is not positive, or another text of
    a different shape.
    """
    if perturbation not in PERTURBATIONS:
        raise unknown("perturbation", perturbation, PERTURBATIONS)
    POSITIVE.check("size", float(size), hint=f", such as {SIZE}")
    generator = generator or torch.Generator().manual_seed(0)
    if perturbation == "text":
        if other is None or other.shape != tokens.shape:
            shape: tuple[int, ...] | None = None
            if other is not None:
                shape = tuple(other.shape)
            raise ConfigError(
                f"the other text has shape {shape}: give as many tokens as the first,"
                f" {tuple(tokens.shape)}"
            )
        return model.embed(other).detach()
    if perturbation == "substitution":
        return model.embed(_substituted(tokens, size, generator)).detach()
    x = model.embed(tokens).detach()
    length = size * float(x.square().mean().sqrt())  # of one entry
    if perturbation == "noise":
        return x + length * torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device)
    # a step in the worst direction is as long as the noise is on average
    if worst is None:
        directions = adversarial_direction(model.depth, x)
    else:
        directions = worst()
    return x + length * math.sqrt(x[0].numel()) * directions


def _substituted(tokens: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Replaces a share of each sequence's tokens, at least one, by tokens drawn from the whole
    batch.
    """
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ConfigError(
            f"substitution needs token ids (batch, tokens), and the input is {tuple(tokens.shape)}:"
            " choose noise"
        )
    count = min(max(1, round(size * tokens.shape[1])), tokens.shape[1])
    where = torch.rand(tokens.shape, generator=generator).argsort(-1)[:, :count].to(tokens.device)
    drawn = torch.randint(tokens.numel(), where.shape, generator=generator).to(tokens.device)
    return tokens.scatter(-1, where, tokens.flatten()[drawn])
