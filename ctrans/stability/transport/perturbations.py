"""Perturbations of inputs: substituted tokens, noise, the worst small direction, another text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from ctrans.depth import Depth
from ctrans.stability.backward.sensitivity import TOLERANCE, step_linearisations
from ctrans.stability.backward.singular_values import Singular, compose, leading_singular
from ctrans.walk import Model
from solvers import ConfigError, SolveError
from solvers.errors import look_up

SIZE = 0.05
"""Default size of a perturbation: the share of substituted tokens, or its length relative to the
input's.
"""
AT_ONCE = 2**18
"""Entries of hidden states that `worst_directions` linearises together: about 1.5 GB for GPT-2's
depth.
"""


def worst_directions(
    depth: Depth, x0: Float[Tensor, "batch tokens width"], *, tolerance: float = TOLERANCE
) -> Iterator[Singular]:
    """The leading singular triplet of J_{0:D} of each sequence, in batches of at most `AT_ONCE`
    entries.

    Raises SolveError if a state is not finite, ConfigError if weights are made on demand, because
    it needs all weights at once.
    """
    if depth.streamed:
        raise ConfigError(
            "the worst direction needs all weights at once, and these are made on demand: choose noise or substitution"
        )
    for part in x0.split(max(1, AT_ONCE // x0[0].numel())):
        steps = step_linearisations(depth, part)
        known = [step for step in steps if step is not None]
        if len(known) < len(steps):
            raise SolveError(f"the state is not finite at the start of segment {steps.index(None)}: there is no worst direction")
        yield leading_singular(compose(known), each=True, tolerance=tolerance)


def adversarial_direction(
    depth: Depth, x0: Float[Tensor, "batch tokens width"], *, tolerance: float = TOLERANCE
) -> Float[Tensor, "batch tokens width"]:
    """The unit right singular vector of J_{0:D} of each sequence: the small perturbation of X_0
    that changes X_D most.

    Errors as `worst_directions`.
    """
    return torch.cat([each.right.squeeze(-3) for each in worst_directions(depth, x0, tolerance=tolerance)])


@dataclasses.dataclass(frozen=True)
class PerturbedSample:
    """Input of a perturbation: a model with its tokens, the size, and, if given, another text and
    the worst directions.
    """

    model: Model
    tokens: Tensor
    size: float
    other: Tensor | None
    generator: torch.Generator
    worst: Callable[[], Tensor] | None = None

    def embed(self) -> Float[Tensor, "batch tokens width"]:
        return self.model.embed(self.tokens).detach()

    def scale(self) -> float:
        """The size relative to one entry's root mean square."""
        return self.size * float(self.embed().square().mean().sqrt())


def _substitution(sample: PerturbedSample) -> Tensor:
    """Replaces a share of each sequence's tokens, at least one, by tokens drawn from the whole
    batch.
    """
    tokens = sample.tokens
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise ConfigError(f"substitution needs token ids (batch, tokens), and the input is {tuple(tokens.shape)}: choose noise")
    count = min(max(1, round(sample.size * tokens.shape[1])), tokens.shape[1])
    where = torch.rand(tokens.shape, generator=sample.generator).argsort(-1)[:, :count].to(tokens.device)
    drawn = torch.randint(tokens.numel(), where.shape, generator=sample.generator).to(tokens.device)
    return sample.model.embed(tokens.scatter(-1, where, tokens.flatten()[drawn])).detach()


def _noise(sample: PerturbedSample) -> Tensor:
    x = sample.embed()
    return x + sample.scale() * torch.randn(x.shape, generator=sample.generator, dtype=x.dtype).to(x.device)


def _adversary(sample: PerturbedSample) -> Tensor:
    """A step in the worst direction, as long as the noise is on average."""
    x = sample.embed()
    worst = adversarial_direction(sample.model.depth, x) if sample.worst is None else sample.worst()
    return x + sample.scale() * math.sqrt(x[0].numel()) * worst


def _text(sample: PerturbedSample) -> Tensor:
    if sample.other is None or sample.other.shape != sample.tokens.shape:
        shape = None if sample.other is None else tuple(sample.other.shape)
        raise ConfigError(f"the other text has shape {shape}: give as many tokens as the first, {tuple(sample.tokens.shape)}")
    return sample.model.embed(sample.other).detach()


PERTURBATIONS: dict[str, Callable[[PerturbedSample], Tensor]] = {
    "substitution": _substitution,
    "noise": _noise,
    "adversarial": _adversary,
    "text": _text,
}


@torch.no_grad()
def perturbed(
    model: Model,
    tokens: Tensor,
    perturbation: str,
    *,
    size: float = SIZE,
    other: Tensor | None = None,
    generator: torch.Generator | None = None,
    worst: Callable[[], Float[Tensor, "batch tokens width"]] | None = None,
) -> Float[Tensor, "batch tokens width"]:
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
    perturb = look_up("perturbation", perturbation, PERTURBATIONS)
    if not 0 < size < math.inf:
        raise ConfigError(f"size = {size!r}: give a positive finite number, such as {SIZE}")
    return perturb(PerturbedSample(model, tokens, size, other, generator or torch.Generator().manual_seed(0), worst))
