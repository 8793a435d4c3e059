"""Checks of a new map at random states: its shape, and that the properties that it states hold."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ctrans.base.option import Count, Seed
from ctrans.dynamics.fields.around import AroundMap
from ctrans.dynamics.fields.protocols import (
    ExposesHeads,
    ExposesRows,
    ExposesWeights,
    HasBound,
    HasLipschitz,
    HasOutputProjection,
    Kind,
    SupportsTokenSubset,
    mixes_tokens,
)
from solvers import ConfigError, shown

SIZES = (0.1, 1.0, 10.0)
"""Standard deviations of the entries of the test states."""
BATCH = 2
TOKENS = 5


@torch.no_grad()
def check_map(field: nn.Module, kind: Kind, width: Count, *, seed: Seed = 0) -> None:
    """Raises ConfigError with the map, the fault and the fix, unless at random states of that width

    - f(x) is a tensor of x's shape, the same at each call, and independent for each sequence
    - f mixes tokens only if it states so: an attention, or a map whose `mixes_tokens` is true
    - its stated properties hold: f(x) = output_projection(pre_projection(x)); its outputs at single
      tokens; matrices that are its own parameters; its bound and its Lipschitz constant; rows of
      probabilities that sum to 1

    The test can find faults, but cannot prove a map correct. It uses the present weights, and the
    dtype of the parameters.

    >>> check_map(RunningMean(GPTConfig(width=16)), "attention", 16)
    """
    weight: Tensor = next(field.parameters(), torch.zeros(()))
    generator = torch.Generator().manual_seed(int(seed))
    for size in SIZES:
        x = (size * torch.randn(BATCH, TOKENS, width, generator=generator)).to(weight)
        try:
            y = check_shape(field, kind, x, field(x))
        except RuntimeError as error:  # of torch, for another width or type
            raise _refusal(
                field,
                kind,
                f"fails at states {tuple(x.shape)}: {error}",
                f"give a map of width {width}",
            ) from error
        for fault, fix in _faults(field, kind, x, y):
            raise _refusal(field, kind, fault, fix)


def check_shape(field: nn.Module, kind: Kind, x: Tensor, y: object) -> Tensor:
    """The output y of a map. Raises ConfigError, with the map and the shapes, unless y is a tensor
    of x's shape.
    """
    if not isinstance(y, Tensor):
        output = f"a {type(y).__name__}"
    elif y.is_nested:  # it raises where its shape is asked for
        output = shown(y)
    elif y.shape == x.shape:
        return y
    else:
        output = f"{tuple(y.shape)}"
    raise _refusal(
        field,
        kind,
        f"gave {output} for states {tuple(x.shape)}",
        "a map returns one tensor of its input's shape",
    )


Faults = Iterator[tuple[str, str]]
"""What is wrong with a map, and the fix."""


def _faults(field: nn.Module, kind: Kind, x: Tensor, y: Tensor) -> Faults:
    """What is wrong with y = f(x) and with the stated properties of the map."""
    if not torch.equal(field(x), y):
        fix = "leave dropout out, or put the map into eval mode"
        yield "gave two values for the same states, so it draws at random", fix
    if not _close(field(x[:1]), y[:1]):
        yield "made one sequence depend on another of the batch", "act on each sequence alone"
    if not mixes_tokens(field, kind):
        yield from _mixed_tokens(field, kind, x, y)
    yield from _false_statements(field, x, y)


def _mixed_tokens(field: nn.Module, kind: Kind, x: Tensor, y: Tensor) -> Faults:
    for token in range(x.shape[-2]):
        changed = x.clone()
        changed[:, token] = -changed[:, token] + 1
        unchanged_tokens = [k for k in range(x.shape[-2]) if k != token]
        if not _close(field(changed)[:, unchanged_tokens], y[:, unchanged_tokens]):
            if kind == "attention":
                contradiction = "says that it does not"
            else:
                contradiction = "a map of an FFN is taken to act on each token alone"
            yield "mixes tokens", f"{contradiction}: give it `mixes_tokens = True`"


def _false_statements(field: nn.Module, x: Tensor, y: Tensor) -> Faults:
    if isinstance(field, HasOutputProjection) and not _close(
        field.output_projection(field.pre_projection(x)), y
    ):
        fix = "let `pre_projection` give what that map acts on, or leave both out"
        yield "is not output_projection(pre_projection(x))", fix
    if isinstance(field, SupportsTokenSubset):
        chosen = torch.arange(len(x), device=x.device) + 1
        if not _close(field.at_tokens(x, chosen), y[chosen - 1, chosen]):
            yield "gives other tokens by `at_tokens` than f(x) has", "fix it, or leave it out"
    if isinstance(field, ExposesWeights):
        storages = {parameter.untyped_storage().data_ptr() for parameter in field.parameters()}
        for matrix in field.matrices():
            if matrix.weight.untyped_storage().data_ptr() not in storages:
                fix = "yield its parameters, or views of them, so that they can be drawn in place"
                yield f"yields a matrix of role {matrix.role!r} that is none of its parameters", fix
    longest_input = float(x.norm(dim=-1).max())
    slack = 1 + math.sqrt(torch.finfo(x.dtype).eps)
    if isinstance(field, HasBound):
        longest_output = float(y.norm(dim=-1).max())
        bound = field.bound().at(longest_input)
        if not longest_output <= slack * bound:  # a NaN is a fault too
            fault = f"gave a token of length {longest_output:.4g}, above its bound {bound:.4g}"
            yield fault, "fix `bound`, or leave it out"
    if isinstance(field, HasLipschitz):
        generator = torch.Generator().manual_seed(0)
        shares = torch.rand(x.shape[:-1], generator=generator).to(x).unsqueeze(-1)
        nearby = x * (1 - shares / 8)
        moved = float((field(nearby) - y).norm(dim=-1).max())
        step = float((nearby - x).norm(dim=-1).max())
        if not moved <= slack * field.lipschitz(longest_input) * step:
            fault = (
                f"moved a token by {moved:.4g} for a step of {step:.4g}, above its Lipschitz"
                " constant"
            )
            yield fault, "fix `lipschitz`, or leave it out"
    if isinstance(field, ExposesRows):
        rows = field.probabilities(x)
        # a map that shows its heads reads the tokens of its state, and another may read others
        others = x.shape[-2] if isinstance(field, ExposesHeads) else rows.shape[-1]
        shape = (*x.shape[:-2], field.heads, x.shape[-2], others)
        if rows.shape != shape or not _close(rows.sum(-1), torch.ones_like(rows[..., 0])):
            fault = f"gave probabilities of shape {tuple(rows.shape)}, or rows that do not sum to 1"
            yield fault, f"give rows of probabilities of shape {shape}"


def _close(a: Tensor, b: Tensor) -> bool:
    error = float((a - b).abs().max())
    precision = torch.finfo(b.dtype)
    size = max(float(b.abs().max()), precision.tiny)
    return error <= math.sqrt(precision.eps) * size


def _refusal(field: nn.Module, kind: Kind, fault: str, fix: str) -> ConfigError:
    while isinstance(field, AroundMap):
        field = field.field
    return ConfigError(f"the {kind} map {type(field).__name__} {fault}: {fix}")
