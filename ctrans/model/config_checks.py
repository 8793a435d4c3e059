"""Choices of an architecture that do not go together. Each check names the choice and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctrans.dynamics.norm import WITHOUT_GAINS
from ctrans.dynamics.placement import placements_in
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.model.parametrisation import PARAMETRISATIONS, STANDARD
from solvers import ConfigError

if TYPE_CHECKING:
    from ctrans.model.config import GPTConfig

FREE = "free"
"""The `depth_weights` of a model whose blocks have their own weights."""


def check_parallel_blocks(config: GPTConfig) -> None:
    """Raises ConfigError for parallel blocks with two placements."""
    if not config.parallel_blocks:
        return
    for pair in config.placements:
        if pair.attention != pair.ffn:
            raise ConfigError(
                f"placement {pair.attention.name}/{pair.ffn.name} needs two sublayers, and a "
                "parallel block has one: give one placement, or leave out parallel_blocks"
            )


def check_branch_norms(config: GPTConfig) -> None:
    """Raises ConfigError for branch norms that the blocks, norm or placement do not allow."""
    if not config.branch_norms:
        return
    if not config.parallel_blocks:
        raise ConfigError(
            "branch_norms = True has no meaning for blocks of two sublayers: leave it out, or"
            " choose parallel_blocks"
        )
    if config.norm not in WITHOUT_GAINS:
        raise ConfigError(
            f"branch_norms = True needs a norm with a gain for each channel, and {config.norm!r}"
            f" has none: choose norm {', '.join(WITHOUT_GAINS)}"
        )
    for placement in placements_in(config.placement):
        if not placement.input_norm:
            raise ConfigError(
                f"branch_norms = True with placement {placement.name!r}, which has no input"
                " norm: leave it out, or choose pre"
            )


def check_depth_weights(config: GPTConfig) -> None:
    """Raises ConfigError for knots of free weights, and for a residual that needs free weights."""
    if config.depth_weights == FREE:
        if config.knots is not None:
            raise ConfigError(
                f"knots = {config.knots} has no meaning for free weights: leave it out, or choose"
                f" depth_weights {', '.join(sorted(BASES))}"
            )
        return
    residual = RESIDUALS[config.residual]
    if residual.counts_blocks:
        raise ConfigError(
            f"residual {config.residual!r} depends on the number of blocks, and weights as"
            f" functions of depth do not: choose depth_weights {FREE}"
        )
    if residual.unit_weights:
        raise ConfigError(
            f"residual {config.residual!r} puts every matrix on a sphere by itself: choose"
            f" depth_weights {FREE}"
        )


def check_parametrisation(config: GPTConfig) -> None:
    """Raises ConfigError for a base width or depth of the standard parametrisation, and for a model
    that another one has no rules for.
    """
    if config.parametrisation == STANDARD:
        for name in ("base_width", "base_depth"):
            base = getattr(config, name)
            if base is not None:
                with_base = ", ".join(sorted(PARAMETRISATIONS.keys() - {STANDARD}))
                raise ConfigError(
                    f"{name} = {base} has no meaning for parametrisation {STANDARD}: leave it"
                    f" out, or choose {with_base}"
                )
        return
    if config.is_stack:
        without_rules = "stack_steps"
    elif RESIDUALS[config.residual].unit_weights:
        without_rules = f"residual {config.residual!r}"
    else:
        return
    raise ConfigError(
        f"parametrisation {config.parametrisation!r} has no rules for {without_rules}: choose"
        f" {STANDARD}"
    )
