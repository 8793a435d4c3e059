"""The structure of a foreign block: which norms surround its attention and FFN. It is read from
what the block computes, not from names.

`recognise` runs the block once and records its norms in the order in which they act. This order
leaves a few ways to assign the norms to X <- N_state(X + N_out f(N_in X)) of attention and then of
the FFN. The assignment that reproduces the block's output is its structure. Blocks with one map are
read in the same way: attention and FFN in parallel, whose map is their sum, or a token mixer alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations, pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import Kind, ParallelMaps
from ctrans.dynamics.ode_block import in_context
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.block_calls import Call, Running, StateForm
from ctrans.interop.block_parts import Parts, check_roles, named_parts
from ctrans.interop.block_run import BlockRun, run_of
from ctrans.interop.block_structure import ROLES, Roles, Structure
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.module_chain import ModuleChain, is_leaf
from ctrans.interop.norms import AdaptedNorm, GainsOf, WithoutGain, as_norm
from ctrans.interop.probe_weights import random_states
from ctrans.interop.residual_scale import ScaledOutput, fitted_scale, keeping, kept_share
from ctrans.interop.tolerances import difference, tolerance
from solvers import ConfigError


def recognise(block: nn.Module, call: Call, anatomy: Anatomy, form: StateForm) -> Structure:
    """The structure that reproduces the block in the context of that call. Its parts are found by
    name, and attention gets the block's own arguments. The model must be in eval mode.

    `form` says how the block returns its state. Raises ConfigError, listing the modules in the
    order in which they act, if no structure fits (cross-attention, several streams of states).
    """
    if "flow" in vars(block):
        raise ConfigError(
            f"a {type(block).__name__} is already an ODE: call discretize(model) first"
        )
    try:
        running = Running(block, call, form)
        run = run_of(running, _informative_state(running))
        check_roles(run, anatomy)
        structure = _fitting(run, named_parts(run, anatomy))
        first, *later = structure.chains
        first.find_output_projection(call.x, **structure.context)
        for field in later:
            field.find_output_projection(call.x)
        return structure
    except ConfigError:
        raise
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"a {type(block).__name__} does not run alone on another state ({named_error(error)})"
        ) from None


def _fitting(run: BlockRun, parts: Parts) -> Structure:
    """The structure with these parts that gives the block's output at x."""
    x = run.x
    order = _order(run, parts)
    candidates = list(_candidates(run, parts, order))
    misses = _misses(candidates, run)
    structure = _nearest(misses, tolerance(x.dtype))
    if structure is None:
        scaled = (_scaled(candidate, run, order) for candidate in candidates)
        structure = _nearest(_misses(filter(None, scaled), run), tolerance(x.dtype))
    if structure is None:
        raise _unlike_any(run.kind, order, misses)
    return structure


def _misses(structures: Iterable[Structure], run: BlockRun) -> list[tuple[float, Structure]]:
    """The structures with how far their output is from the block's, nearest first."""
    misses = []
    for structure in structures:
        depth = in_context(structure.depth(), structure.context)
        misses.append((difference(depth(run.x), run.y), structure))
    misses.sort(key=lambda miss: miss[0])
    return misses


def _nearest(misses: Sequence[tuple[float, Structure]], close: float) -> Structure | None:
    """The nearest structure if it is that close."""
    if not misses:
        return None
    miss, structure = misses[0]
    if miss <= close:
        return structure
    return None


def _unlike_any(
    kind: str, order: Sequence[_BlockStep], misses: Sequence[tuple[float, Structure]]
) -> ConfigError:
    """The error for a block that no structure reproduces."""
    names = ", ".join(step.name for step in order)
    unknown = [step.name for step in order if step.role is None]
    if unknown:
        if len(unknown) > 1:
            verb = "are"
        else:
            verb = "is"
        return ConfigError(
            f"{kind}: {', '.join(unknown)} {verb} not part of attention or FFN, and no norm"
            " gamma * x/sqrt(mean(x^2) + eps) + beta, centred or not. The modules act in this"
            f" order: {names}. If it belongs to attention or FFN, name both paths:"
            ' attention=("attn", "its.path")'
        )
    nearest = [
        f"{structure.placement!r} is off by {miss:.1g} times its output"
        for miss, structure in misses[:2]
    ]
    return ConfigError(
        f"{kind} is not an attention and an FFN, in sequence or in parallel, with norms in a known"
        " placement and each added to the state (is a sum x + f(x) missing?). Its modules act in"
        f" this order: {'; '.join([names, *nearest])}"
    )


def _informative_state(running: Running) -> Tensor:
    """A random state about as large as what the block adds to it, so that a block that changes it
    little can be told from others.
    """
    block = running.block
    call = running.call
    kind = type(block).__name__
    x = random_states(call.x)
    y = running(x)
    if not isinstance(y, Tensor):
        raise ConfigError(
            f"{kind} returns a {type(y).__name__}: a block must return the state alone"
        )
    scale = float((y - x).norm() / x.norm())
    if math.isnan(scale):
        broken = [name for name, weight in block.named_parameters() if not weight.isfinite().all()]
        if not broken:
            broken = ["a weight on demand"]
        raise ConfigError(
            f"{kind} has weights that are not finite, such as {broken[0]}: is the file damaged?"
        )
    if 0 < scale < math.inf:
        return scale * x
    hint = "does it have the weights of a trained or initialised model?"
    if scale:
        raise ConfigError(
            f"{kind} changes a state by {scale:g} times its size, so its structure cannot be read:"
            f" {hint}"
        )
    zeros = [
        name
        for name, weight in block.named_parameters()
        if weight.numel() == 1 and not weight.any()
    ]
    if zeros:
        hint = (
            f"its scale {zeros[0]} is 0, the initial value of ReZero: set it to its value after one"
            " training step"
        )
    raise ConfigError(f"{kind} does not change any state, so its structure cannot be read: {hint}")


class _BlockStep(NamedTuple):
    """Something that acts in a block, and the state that it acts on. `role` is a norm, the kind of
    a map, or None for anything else.
    """

    name: str
    role: AdaptedNorm | Kind | None
    x: Tensor


def _order(run: BlockRun, parts: Parts) -> list[_BlockStep]:
    """The maps of the block and what acts outside of them, in order."""
    x = run.x
    maps = [part for part in (parts.attention, parts.ffn) if part is not None]
    kinds: dict[nn.Module, Kind] = dict(
        zip([part.modules[0] for part in maps], ("attention", "ffn"), strict=False)
    )
    inside = {module for part in maps for module in part.inside}
    roles: dict[nn.Module, AdaptedNorm | Kind | None] = {}
    for part in run.block.modules():
        if part in kinds:
            roles[part] = kinds[part]
        elif part not in inside and is_leaf(part):
            norm = as_norm(part, x.shape[-1])
            has_weights = next(part.parameters(), None) is not None
            # what is no norm and has no weights is an activation or a dropout
            if norm is not None or has_weights:
                roles[part] = norm
    order = []
    for call in run.calls:
        if call.module not in roles:
            continue
        if call.x.dim() == x.dim():
            state = run.running.form.turned(call.x)
        elif call.x.numel() == x.numel():
            state = call.x.reshape(x.shape)
        else:
            state = call.x
        name = f"{call.path} ({type(call.module).__name__})"
        order.append(_BlockStep(name, roles[call.module], state))
    return order


def _parallel(order: Sequence[_BlockStep]) -> bool:
    """Whether attention and FFN act in parallel: both, or their norms, act on the same state."""
    states = {step.role: step.x for step in order if isinstance(step.role, str)}
    if len(states) < 2:
        return False
    if torch.equal(states["attention"], states["ffn"]):
        return True
    first, *later = order
    return any(
        isinstance(step.role, AdaptedNorm) and torch.equal(step.x, first.x) for step in later
    )


def _candidates(run: BlockRun, parts: Parts, order: Sequence[_BlockStep]) -> Iterator[Structure]:
    """The structures that a block of these parts may have, given the order in which its modules
    act.
    """
    roles = [step.role for step in order]
    attention = parts.attention.chain
    context = run.running.call.context
    if None in roles:
        return

    def structure(*sublayers: Sublayer) -> Structure:
        return Structure(sublayers, (1.0,) * len(sublayers), context)

    if parts.ffn is None:
        for (norms_of_map,) in _assignments(roles, "attention"):
            yield structure(Sublayer(attention, "attention", **norms_of_map))
        return
    ffn = parts.ffn.chain
    for first, second in _assignments(roles, "attention", "ffn"):
        yield structure(Sublayer(attention, "attention", **first), Sublayer(ffn, "ffn", **second))
    if _parallel(order):
        norms = [role for role in roles if isinstance(role, AdaptedNorm)]
        if len(norms) <= 1:
            roles_of_both: Roles = dict(zip(ROLES, norms, strict=False))
            yield structure(Sublayer(ParallelMaps(attention, ffn), "parallel", **roles_of_both))
        elif len(norms) == 2 and len({(norm.centred, norm.eps, norm.added) for norm in norms}) == 1:
            for attention_norm, ffn_norm in (norms, norms[::-1]):
                gains = (GainsOf(attention_norm), GainsOf(ffn_norm))
                maps = ParallelMaps(attention, ffn, gains)
                input_norm = WithoutGain(attention_norm)
                yield structure(Sublayer(maps, "parallel", input_norm=input_norm))


def _scaled(structure: Structure, run: BlockRun, order: Sequence[_BlockStep]) -> Structure | None:
    """The structure with fitted scales s in X + s f(N X); None if no scale fits."""
    in_block = in_context(structure.depth(), structure.context)
    states: dict[object, Tensor] = {step.role: step.x for step in order}
    ends = []
    for sublayer in structure.sublayers[1:]:
        if sublayer.input_norm is None:
            ends.append(states[sublayer.kind])
        else:
            ends.append(states[sublayer.input_norm])
    ends.append(run.y)
    start = run.x
    lengths = []
    sublayers = []
    for map_in_block, sublayer, end in zip(
        in_block.sublayers, structure.sublayers, ends, strict=True
    ):
        added = map_in_block(start)
        if isinstance(sublayer.state_norm, AdaptedNorm):
            sum_ = states[sublayer.state_norm]
            kept = kept_share(run.block, sum_, start, added)
            if kept != 1:
                sum_ = sum_ / kept
                added = added / kept
                sublayer = keeping(sublayer, sublayer.state_norm, kept)
        elif sublayer.state_norm is not None:
            sum_ = states[sublayer.state_norm]
        else:
            sum_ = end
        scale = fitted_scale(run.block, sum_ - start, added)
        if scale is None:
            return None
        if isinstance(scale, float) and scale > 0:
            lengths.append(scale)
        else:
            if sublayer.output_norm is not None or not isinstance(sublayer.field, ModuleChain):
                return None  # the output of a norm is not the last stage of a map
            field = ModuleChain([*sublayer.field.stages, ScaledOutput(scale)])
            sublayer = sublayer.with_field(field)
            lengths.append(1.0)
        sublayers.append(sublayer)
        start = end
    return replace(structure, sublayers=tuple(sublayers), lengths=tuple(lengths))


def _assignments(
    acting: Sequence[AdaptedNorm | Kind | None], *kinds: Kind
) -> Iterator[tuple[Roles, ...]]:
    """Each way to give the norms roles around maps of these kinds that keeps the order in which
    they act.
    """
    if any(acting.count(kind) != 1 for kind in kinds):
        return
    ends = [acting.index(kind) for kind in kinds]
    if ends != sorted(ends):
        return
    stretches = [
        acting[start + 1 : end]
        for start, end in zip([-1, *ends], [*ends, len(acting)], strict=True)
    ]
    slots = [(i, role) for i in range(len(kinds)) for role in ROLES]
    # Only its input norm acts before the first map. Between two maps: the output and state norms of
    # the first, then the input norm of the second.
    cuts = [0, *range(1, len(slots), len(ROLES)), len(slots)]
    choices = [
        combinations(slots[start:end], len(norms))
        for norms, (start, end) in zip(stretches, pairwise(cuts), strict=True)
    ]
    for chosen_slots in product(*choices):
        roles: tuple[Roles, ...] = tuple({} for _ in kinds)
        for (sublayer, role), norm in zip(chain(*chosen_slots), chain(*stretches), strict=True):
            roles[sublayer][role] = norm
        yield roles
