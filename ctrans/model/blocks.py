"""The blocks of a configuration: their maps and sublayers with drawn weights, and the depth of
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ctrans.dynamics.depth import Depth, Sublayers
from ctrans.dynamics.fields import FIELDS, Kind, OwnGains, ParallelMaps
from ctrans.dynamics.norm import NORMS, WITHOUT_GAINS, Norm, make_norm
from ctrans.dynamics.placement import BlockPlacement, Placement
from ctrans.dynamics.residual import RESIDUALS
from ctrans.dynamics.sublayer import Sublayer
from ctrans.dynamics.weights.functions_of_depth import blocks_through
from ctrans.dynamics.weights.on_demand import Piece, Shelf, put_on_demand, skeletons
from ctrans.model.config import GPTConfig
from ctrans.model.config_checks import FREE
from ctrans.model.initialisation import initialise
from ctrans.model.stack import stacked
from ctrans.model.unit_weights import put_on_spheres
from solvers import ConfigError


def make_input_norm(config: GPTConfig) -> Norm:
    """A new norm in front of a map, without gains if the map has its own."""
    if config.branch_norms:
        return NORMS[WITHOUT_GAINS[config.norm]](config.width, config.eps)
    return make_norm(config)


def make_sublayer(config: GPTConfig, kind: Kind, placement: Placement, number: int) -> Sublayer:
    """A new sublayer of this kind with the placement's norms around its map; `number` counts from
    0.
    """
    return Sublayer(
        make_map(config, kind),
        kind,
        input_norm=make_input_norm(config) if placement.input_norm else None,
        output_norm=make_norm(config) if placement.output_norm else None,
        state_norm=make_norm(config) if placement.state_norm else None,
        gain=config.gain_of(placement),
        residual=RESIDUALS[config.residual].make(config, number),
        placement=placement,
    )


def make_block(config: GPTConfig, placements: BlockPlacement, block: int = 0) -> Sublayers:
    """The sublayers of a block: one of each kind, or one with both maps in parallel."""
    if config.parallel_blocks:
        return Sublayers([make_sublayer(config, "parallel", placements.attention, block)])
    attention = make_sublayer(config, "attention", placements.attention, 2 * block)
    ffn = make_sublayer(config, "ffn", placements.ffn, 2 * block + 1)
    return Sublayers([attention, ffn])


def make_map(config: GPTConfig, kind: Kind) -> nn.Module:
    """A new map of this kind, with weights not yet drawn."""
    if kind == "parallel":
        gains = (_branch_gains(config), _branch_gains(config))
        return ParallelMaps(make_map(config, "attention"), make_map(config, "ffn"), gains)
    return FIELDS[kind][getattr(config, kind)](config)


def _branch_gains(config: GPTConfig) -> OwnGains | None:
    """The gains of a map in parallel, and the offset if there is one, of the norm in front of
    both.
    """
    if not config.branch_norms:
        return None
    has_offset: bool = getattr(NORMS[config.norm], "has_offset", False)
    return OwnGains(config.width, bias=config.bias and has_offset)


def make_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """The configuration's blocks with drawn weights, either free or at the knots of functions of
    depth.

    Raises ConfigError for placements that differ by block if the weights are functions of depth.
    """
    if config.depth_weights == FREE:
        sublayers = _make_blocks(config, config.placements)
        draw(sublayers, config, generator)
    else:
        sublayers = _blocks_through_knots(config, generator)
    if not config.is_stack:
        return Depth(sublayers, config.step_length, per_block=config.per_block)
    blocks = Depth(sublayers, 1.0, per_block=config.per_block)
    # the final norm ends the velocity
    norm = make_norm(config) if config.placements[-1].ffn.final_norm else None
    return stacked(blocks, config.segments, config.step_length, norm)


def _make_blocks(config: GPTConfig, placements: Sequence[BlockPlacement]) -> list[Sublayer]:
    """The sublayers of blocks with these placements, with weights not yet drawn."""
    sublayers: list[Sublayer] = []
    for number, of_block in enumerate(placements):
        sublayers.extend(make_block(config, of_block, number))
    return sublayers


def _blocks_through_knots(config: GPTConfig, generator: torch.Generator) -> list[Sublayer]:
    """The sublayers of all blocks, whose weights are functions of depth through drawn knots."""
    if "+" in config.placement:
        raise ConfigError(
            "weights that are functions of depth need one placement for all blocks, not"
            f" {config.placement!r}"
        )
    placements = config.placements[0]
    knots = [
        make_block(config, placements, number) for number in range(config.sets_of_block_weights)
    ]
    draw([sublayer for knot in knots for sublayer in knot], config, generator)
    blocks = blocks_through(knots, config.depth_weights, config.depth, generator)
    return [sublayer for block in blocks for sublayer in block]


def draw(sublayers: Sequence[Sublayer], config: GPTConfig, generator: torch.Generator) -> None:
    """Draws the matrices of the sublayers by the configuration's initialisation, on their spheres
    if its residual requires it.
    """
    power = config.rules.drawn
    if power is None:
        initialise(sublayers, config.initialisation, generator, blocks=config.depth)
    else:
        initialise(
            sublayers,
            config.initialisation,
            generator,
            blocks=config.depth / config.times_deeper,
            wider=config.times_wider,
            power=power,
        )
    if RESIDUALS[config.residual].unit_weights:
        put_on_spheres(sublayers)


def drawn_depth(config: GPTConfig, generator: torch.Generator) -> Depth:
    """`make_depth` with weights on demand. Raises ConfigError for weights that are functions of
    depth and for a stack.
    """
    if config.depth_weights != FREE:
        raise ConfigError(
            f"depth_weights = {config.depth_weights!r} cannot be on demand, only free weights can:"
            " leave out on_demand (--stream)"
        )
    if config.is_stack:
        raise ConfigError(
            "a stack needs all its weights at once: leave out on_demand (--stream) or stack_steps"
        )
    draws = _Draws(config, generator)
    shelf = Shelf()
    with skeletons():
        sublayers = _make_blocks(config, config.placements)
    for k, sublayer in enumerate(sublayers):
        piece = Piece(f"segment {k}", partial(draws.weights, k))
        put_on_demand(sublayer.field, piece, shelf)
    return Depth(sublayers, config.step_length, per_block=config.per_block)


class _Draws:
    """Draws the weights of each map from the generator's state at which `make_depth` draws them.

    `states[k]` is the state before map k. To reach a later map, all maps before it are drawn.
    """

    def __init__(self, config: GPTConfig, generator: torch.Generator):
        self.config = config
        self.states = [generator.get_state()]

    def weights(self, k: int) -> dict[str, Tensor]:
        while len(self.states) <= k:
            self._draw(len(self.states) - 1)
        return self._draw(k)

    def _draw(self, k: int) -> dict[str, Tensor]:
        generator = torch.Generator()
        generator.set_state(self.states[k])
        block, position = divmod(k, self.config.per_block)
        with skeletons():
            sublayer = make_block(self.config, self.config.placements[block])[position]
        sublayer.field.to_empty(device="cpu")
        draw([sublayer], self.config, generator)
        if k + 1 == len(self.states):
            self.states.append(generator.get_state())
        parameters = sublayer.field.named_parameters()
        return {name: parameter.detach() for name, parameter in parameters}
