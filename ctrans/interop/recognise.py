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
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Kind, ParallelMaps
from ctrans.dynamics.ode_block import in_context
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.block_calls import Call, Running, StateForm
from ctrans.interop.block_parts import BlockRun, Parts, check_roles, named_parts, run_of, seen_parts
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.module_chain import ModuleChain, is_leaf
from ctrans.interop.norms import AdaptedNorm, FreeNorm, GainsOf, WithoutGain, as_norm
from ctrans.interop.probe_weights import random_states
from ctrans.interop.residual_scale import ScaledOutput, fitted_scale
from ctrans.interop.tolerances import difference, tolerance, unit
from solvers import ConfigError

ROLES = ("input_norm", "output_norm", "state_norm")
"""The roles of a norm in a sublayer, in the order in which they act."""
UNKNOWN = "unknown"
"""What is said of the placement and the norms of a part."""
Roles = dict[str, Any]
"""The norms of a sublayer by role."""


@dataclass(frozen=True)
class Structure:
    """A block as sublayers whose fields are the block's own modules.

    - `sublayers`: attention and FFN; or one sublayer: of kind parallel with their sum
      (`ParallelMaps`), or of kind attention with the only map
    - `lengths`: s in X + s f(N X), the depth-time of each sublayer. It is 1 unless the block scales
      what it adds
    - `context`: the recorded keyword arguments of the attention
    - `called`: the block's module that the attention's recorded call belongs to; None where
      attention gets the arguments of the block itself
    """

    sublayers: tuple[Sublayer, ...]
    lengths: tuple[float, ...]
    context: dict[str, Any]
    called: nn.Module | None

    @property
    def placement(self) -> str:
        """The placement's name, or two names such as "pre/output" where attention and FFN
        differ.
        """
        return "/".join(dict.fromkeys(_placement(part) for part in self.sublayers))

    @property
    def chains(self) -> tuple[Any, ...]:
        """Its attention, and its FFN if it has one: `ModuleChain`s, or the maps read from them."""
        return tuple(branch.field for part in self.sublayers for branch in part.branches.values())

    def depth(self, dt: float = 1.0) -> Depth:
        """The block alone; at dt = 1 it computes what the block computes."""
        return depth_of([self], dt)


def depth_of(structures: Sequence[Structure], dt: float) -> Depth:
    """All blocks in sequence, each segment dt times as long as in the model. If all lengths are
    equal, dt times that length is the step.
    """
    lengths = [length for structure in structures for length in structure.lengths]
    parts = [part for structure in structures for part in structure.sublayers]
    each = {len(structure.sublayers) for structure in structures}
    if len(each) > 1:
        raise ConfigError(
            "some blocks have an attention and an FFN and others have one map: all blocks must be"
            " of one kind"
        )
    if len(set(lengths)) == 1:
        return Depth(parts, dt * lengths[0] if lengths[0] != 1 else dt, per_block=each.pop())
    return Depth(parts, dt, spans=[Fraction(length) for length in lengths], per_block=each.pop())


def recognise(
    block: nn.Module,
    call: Call,
    anatomy: Anatomy,
    form: StateForm,
    own_calls: Sequence[bool] = (False,),
) -> Structure:
    """The structure that reproduces the block in the context of that call. The model must be in
    eval mode.

    `form` says how the block returns its state. `own_calls` lists the ways to find its parts; the
    first that succeeds is used:

    - False: by known names, or by what the modules do where no name is known. Attention is called
      with the block's own arguments
    - True: by what the modules do. Attention is called as the block called it

    Raises ConfigError, listing the modules in the order in which they act, if no structure fits
    (cross-attention, several streams of states).
    """
    if "flow" in vars(block):
        raise ConfigError(
            f"a {type(block).__name__} is already an ODE: call discretize(model) first"
        )
    failures: list[Exception] = []
    try:
        running = Running(block, call, form)
        run = run_of(running, _informative_state(running))
        check_roles(run, anatomy)
        for own in own_calls:
            try:
                if own:
                    named = None
                else:
                    named = named_parts(run, anatomy)
                parts = named or seen_parts(run, anatomy, own_calls=own)
                structure = _fitting(run, parts)
                for i, field in enumerate(structure.chains):
                    field.find_output_projection(call.x, **({} if i else structure.context))
                return structure
            except FOREIGN_ERRORS as error:
                failures.append(error)
        raise next((each for each in failures if isinstance(each, ConfigError)), failures[-1])
    except ConfigError:
        raise
    except FOREIGN_ERRORS as error:
        raise ConfigError(
            f"a {type(block).__name__} does not run alone on another state ({named_error(error)})"
        ) from None


def _fitting(run: BlockRun, parts: Parts) -> Structure:
    """The structure with these parts that gives the block's output at x."""
    x = run.x
    kind = run.kind
    order = _order(run, parts)

    def fit(
        structures: Iterable[Structure], close: float
    ) -> tuple[Structure | None, list[tuple[float, Structure]]]:
        """The nearest of the structures if it is that close, and all with how far their output is
        from the block's, nearest first.
        """
        misses = [
            (difference(in_context(each.depth(), each.context)(x), run.y), each)
            for each in structures
        ]
        misses.sort(key=lambda miss: miss[0])
        return (misses[0][1] if misses and misses[0][0] <= close else None), misses

    structures = list(_candidates(parts, order))
    found, misses = fit(structures, tolerance(x.dtype))
    if found is None:
        scaled = (_scaled(structure, run, order) for structure in structures)
        found, _ = fit(filter(None, scaled), tolerance(x.dtype))
    for more in _with_free_norms(order, x) if found is None else ():
        found, _ = fit(
            _candidates(parts, more), 64 * unit(x.dtype)
        )  # tight enough to tell values of eps apart
        if found is not None:
            break
    if found is not None:
        return found
    names = ", ".join(step.name for step in order)
    unknown = [step.name for step in order if step.role is None]
    if unknown:
        raise ConfigError(
            f"{kind}: {', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} not part of"
            " attention or FFN, and no norm gamma * x/sqrt(mean(x^2) + eps) + beta, centred or"
            f" not. The modules act in this order: {names}. If it belongs to attention or FFN, name"
            ' both paths: attention=("attn", "its.path")'
        )
    nearest = "; ".join(
        f"{structure.placement!r} is off by {miss:.1g} times its output"
        for miss, structure in misses[:2]
    )
    raise ConfigError(
        f"{kind} is not an attention and an FFN, in sequence or in parallel, with norms in a known"
        " placement and each added to the state (is a sum x + f(x) missing?). Its modules act in"
        f" this order: {names}{'; ' if nearest else ''}{nearest}"
    )


def alike(first: nn.Module, structure: Structure, block: nn.Module, anatomy: Anatomy) -> Structure:
    """The structure of a block built like `first`, whose structure is known. The block is not
    run.
    """
    paths = {part: path for path, part in first.named_modules()}
    parts = dict(block.named_modules())

    def same(sublayer: Sublayer, field: ModuleChain) -> Sublayer:
        norms = {role: norm for role in ROLES if (norm := getattr(sublayer, role)) is not None}
        own: Roles = {
            role: AdaptedNorm(parts[paths[norm.module]], norm.form, norm.width, norm.exact)
            for role, norm in norms.items()
        }
        field.output_path = sublayer.field.output_path
        field.scale_path = sublayer.field.scale_path
        return Sublayer(field, sublayer.kind, **own)

    if len(structure.sublayers) != 2 or structure.called is not None:
        raise ConfigError(
            f"blocks of class {type(block).__name__} cannot be read on demand: load the whole model"
        )
    pairs = zip(structure.sublayers, fields(block, anatomy), strict=True)
    return replace(structure, sublayers=tuple(same(*pair) for pair in pairs))


def make_of(block: nn.Module) -> tuple[object, ...]:
    """The build of a block: the path and class of each module, its settings and its scalar
    buffers.
    """
    return tuple((path, type(part), _settings(part)) for path, part in block.named_modules())


PLAIN = (bool, int, float, str)
NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")
"""Names under which libraries keep a block's index, which does not change what it computes."""


def _settings(part: nn.Module) -> tuple[tuple[str, object], ...]:
    found: dict[str, object] = {
        name: value
        for name, value in vars(part).items()
        if isinstance(value, PLAIN) and name not in NUMBERS
    }
    found |= {
        name: float(buffer)
        for name, buffer in part.named_buffers(recurse=False)
        if buffer.numel() == 1
    }
    return tuple(sorted(found.items()))


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
        bad = next(
            (name for name, weight in block.named_parameters() if not weight.isfinite().all()),
            "a weight on demand",
        )
        raise ConfigError(
            f"{kind} has weights that are not finite, such as {bad}: is the file damaged?"
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
    role: AdaptedNorm | FreeNorm | Kind | None
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
            if (
                norm is not None or next(part.parameters(), None) is not None
            ):  # others are activations and dropouts
                roles[part] = norm
    order = []
    for call in run.calls:
        if call.module in roles:
            flat = call.x.dim() != x.dim() and call.x.numel() == x.numel()
            if flat:
                state = call.x.reshape(x.shape)
            elif call.x.dim() == x.dim():
                state = run.running.form.turned(call.x)
            else:
                state = call.x
            order.append(
                _BlockStep(f"{call.path} ({type(call.module).__name__})", roles[call.module], state)
            )
    return order


def _parallel(order: Sequence[_BlockStep]) -> bool:
    """Whether attention and FFN act in parallel: both, or their norms, act on the same state."""
    states = {step.role: step.x for step in order if isinstance(step.role, str)}
    if len(states) < 2:
        return False
    if torch.equal(states["attention"], states["ffn"]):
        return True
    first, *others = order
    return any(
        isinstance(each.role, AdaptedNorm) and torch.equal(each.x, first.x) for each in others
    )


def _candidates(parts: Parts, order: Sequence[_BlockStep]) -> Iterator[Structure]:
    """The structures that a block of these parts may have, given the order in which its modules
    act.
    """
    roles = [step.role for step in order]
    attention = parts.attention.chain
    if parts.ffn is None:
        ffn = None
    else:
        ffn = parts.ffn.chain
    if None in roles:
        return

    def structure(*sublayers: Sublayer) -> Structure:
        return Structure(sublayers, (1.0,) * len(sublayers), parts.context, parts.called)

    if ffn is None:
        for (own,) in _assignments(roles, "attention"):
            yield structure(Sublayer(attention, "attention", **own))
        return
    for first, second in _assignments(roles, "attention", "ffn"):
        yield structure(Sublayer(attention, "attention", **first), Sublayer(ffn, "ffn", **second))
    if _parallel(order):
        norms = [role for role in roles if isinstance(role, AdaptedNorm)]
        if len(norms) <= 1:
            roles_of_both: Roles = dict(zip(ROLES, norms, strict=False))
            yield structure(Sublayer(ParallelMaps(attention, ffn), "parallel", **roles_of_both))
        elif len(norms) == 2 and len({(norm.centred, norm.eps, norm.added) for norm in norms}) == 1:
            for one, other in (norms, norms[::-1]):
                both = ParallelMaps(attention, ffn, (GainsOf(one), GainsOf(other)))
                yield structure(Sublayer(both, "parallel", input_norm=WithoutGain(one)))


def _scaled(structure: Structure, run: BlockRun, order: Sequence[_BlockStep]) -> Structure | None:
    """The structure with fitted scales s in X + s f(N X); None if no scale fits."""
    around = in_context(structure.depth(), structure.context)
    seen: dict[object, Tensor] = {step.role: step.x for step in order}
    starts = [
        part.kind if part.input_norm is None else part.input_norm for part in structure.sublayers
    ]
    afters = [*(seen[start] for start in starts[1:]), run.y]
    state = run.x
    lengths = []
    parts = []
    for part, own, after in zip(around.sublayers, structure.sublayers, afters, strict=True):
        if own.state_norm is not None:
            whole = seen[own.state_norm]
        else:
            whole = after
        scale = fitted_scale(run.block, whole - state, part(state))
        if scale is None:
            return None
        if isinstance(scale, float) and scale > 0:
            lengths.append(scale)
        else:
            if own.output_norm is not None or not isinstance(own.field, ModuleChain):
                return None  # the output of a norm is not the last stage of a map
            own = own.with_field(ModuleChain([*own.field.stages, ScaledOutput(scale)]))
            lengths.append(1.0)
        parts.append(own)
        state = after
    return replace(structure, sublayers=tuple(parts), lengths=tuple(lengths))


FREE_EPS = (torch.finfo(torch.float32).eps, 1e-5, 1e-6, 1e-8, torch.finfo(torch.float64).eps)
"""Values of eps in functional norms. The first and last are the defaults of torch's rms_norm."""


def _with_free_norms(steps: Sequence[_BlockStep], x: Tensor) -> Iterator[list[_BlockStep]]:
    """The order with functional norms inserted before and after the maps. A block may compute these
    without a module.
    """
    maps = [i for i, step in enumerate(steps) if isinstance(step.role, str)]
    gaps = [
        *maps,
        *maps[1:],
        len(steps),
    ]  # two norms fit between the maps: after the first and before the second
    chosen_gaps = dict.fromkeys(
        tuple(sorted(c)) for n in range(1, len(gaps) + 1) for c in combinations(gaps, n)
    )
    epsilons = dict.fromkeys((torch.finfo(x.dtype).eps, *FREE_EPS))
    for eps, centred in product(epsilons, (False, True)):
        for chosen in chosen_gaps:
            order = list(steps)
            for place in reversed(chosen):
                norm = FreeNorm(x.shape[-1], eps, centred).to(x)
                order.insert(place, _BlockStep("a function", norm, x.new_empty(0)))
            yield order


def _assignments(
    acting: Sequence[AdaptedNorm | FreeNorm | Kind | None], *kinds: Kind
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
    places = [(i, role) for i in range(len(kinds)) for role in ROLES]
    # Only its input norm acts before the first map. Between two maps: the output and state norms of
    # the first, then the input norm of the second.
    cuts = [0, *range(1, len(places), len(ROLES)), len(places)]
    free = [
        combinations(places[start:end], len(part))
        for part, (start, end) in zip(stretches, pairwise(cuts), strict=True)
    ]
    for chosen in product(*free):
        roles: tuple[Roles, ...] = tuple({} for _ in kinds)
        for (sublayer, role), norm in zip(chain(*chosen), chain(*stretches), strict=True):
            roles[sublayer][role] = norm
        yield roles


def _placement(sublayer: Sublayer) -> str:
    """The placement's name, or the names of the norms' roles where no placement has this
    combination.
    """
    if sublayer.kind == "part":
        return UNKNOWN
    try:
        return sublayer.placement.name
    except ConfigError:
        return "+".join(role for role in ROLES if getattr(sublayer, role) is not None)
