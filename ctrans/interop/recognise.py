"""Which norms surround attention and FFN of a foreign block: read from what the block computes, not from names.

The block is run once and its norms noted in the order in which they act. That order leaves a few ways to put them into the
equation X <- N_state(X + N_out f(N_in X)) of attention and then of the FFN; the one that gives the block's output is its structure.
So do blocks of one map: attention and FFN at once, whose map is their sum, or a mixer of tokens alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import chain, combinations, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.fields import Kind, ParallelMaps
from ctrans.interop.anatomy import Anatomy, fields
from ctrans.interop.block_calls import Call, Running, StateForm
from ctrans.interop.block_parts import Parts, check_roles, named_parts, seen_parts
from ctrans.interop.foreign_errors import FOREIGN_ERRORS, named_error
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm, FreeNorm, GainsOf, WithoutGain, as_norm
from ctrans.interop.recorded_calls import watched
from ctrans.interop.residual_scale import ScaledOutput, fitted_scale
from ctrans.interop.tolerances import tolerance, unit
from ctrans.ode_block import in_context
from ctrans.sublayer import Sublayer
from solvers import ConfigError

ROLES = ("input_norm", "output_norm", "state_norm")
"""What a norm can be to a sublayer, in the order in which they act."""
Roles = dict[str, Any]
"""The norms of a sublayer by role."""


@dataclasses.dataclass(frozen=True)
class Structure:
    """A block as sublayers whose fields are its own modules, to be called with the context of a forward pass.

    They are attention and FFN; or one: of kind parallel the sum of the two (`ParallelMaps`), of kind attention a map alone in its block.
    `lengths` are the numbers s in X + s f(N X), for how much depth-time each acts: 1 but for blocks that scale what they add.
    `context` is what attention is given besides the state, as seen, and `called` the block's own module that is. `own_calls` says
    whether that is called as it was seen to be, or with what the block is.
    """

    sublayers: tuple[Sublayer, ...]
    lengths: tuple[float, ...]
    context: dict[str, Any] = dataclasses.field(default_factory=dict)
    called: nn.Module | None = None
    own_calls: bool = False

    @property
    def placement(self) -> str:
        """The placement's name; the two names, as "pre/output", where attention and FFN differ."""
        return "/".join(dict.fromkeys(_placement(part) for part in self.sublayers))

    @property
    def chains(self) -> tuple[ModuleChain, ...]:
        """The modules of its attention and of its FFN, where it has one."""
        return tuple(branch.field for part in self.sublayers for branch in part.branches.values())

    def depth(self, dt: float = 1.0) -> Depth:
        """The block alone; the block itself at dt = 1."""
        return depth_of([self], dt)


def depth_of(structures: Sequence[Structure], dt: float) -> Depth:
    """All blocks one after the other, dt times as long as they are: with one length, that is the step, and dt times it."""
    lengths = [length for structure in structures for length in structure.lengths]
    parts = [part for structure in structures for part in structure.sublayers]
    each = {len(structure.sublayers) for structure in structures}
    if len(each) > 1:
        raise ConfigError("some blocks are attention and then an FFN, and others one map: only blocks of one kind are known")
    if len(set(lengths)) == 1:
        return Depth(parts, dt * lengths[0] if lengths[0] != 1 else dt, per_block=each.pop())
    return Depth(parts, dt, spans=[Fraction(length) for length in lengths], per_block=each.pop())


def recognise(block: nn.Module, call: Call, anatomy: Anatomy, form: StateForm | None = None) -> Structure:
    """The structure that reproduces the block in the context of that call; the model is to be in eval mode.

    Where a `form` says how the block hands on its state, its parts are seen in what it does (`seen_parts`); otherwise it returns the
    state, and its parts go by the names that are known, the FFN by what it does if it has none. Raises ConfigError that lists what
    acts where if no structure does (cross-attention, streams of states).
    """
    if "flow" in vars(block):
        raise ConfigError(f"a {type(block).__name__} is an ODE already: call discretize(model) first")
    running = Running(block, call, StateForm() if form is None else form)
    x = _telling_state(running)
    check_roles(running, x, anatomy)
    named = named_parts(block, anatomy, call.context) if form is None else None
    parts = seen_parts(running, x, anatomy, own_calls=form is not None) if named is None else named
    return _fitting(block, running, x, parts)


def recognise_by_any(block: nn.Module, call: Call, anatomy: Anatomy, form: StateForm) -> Structure:
    """`recognise` by known names, for a block that hands on its state in that form; by what it does otherwise.

    Raises ConfigError as `recognise`, of the names where both fail.
    """
    x = _telling_state(running := Running(block, call, form))
    check_roles(running, x, anatomy)
    named = named_parts(block, anatomy, call.context)
    try:
        parts = named if named is not None else seen_parts(running, x, anatomy, own_calls=False)
        return _fitting(block, running, x, parts)
    except FOREIGN_ERRORS as first:
        try:
            return _fitting(block, running, x, seen_parts(running, x, anatomy, own_calls=True))
        except FOREIGN_ERRORS as second:
            error = first if isinstance(first, ConfigError) else second
            if isinstance(error, ConfigError):
                raise error from None
            raise ConfigError(f"a {type(block).__name__} cannot be run alone on another state ({named_error(error)})") from None


def _fitting(block: nn.Module, running: Running, x: Tensor, parts: Parts) -> Structure:
    """The structure of those parts that gives the block's output at x."""
    acting = _order(parts, running, x)
    expected = running(x)
    of_block: dict[str, Any] = {"context": parts.context, "called": parts.attention.own[0], "own_calls": parts.own_calls}
    structures = [
        Structure(sublayers, (1.0,) * len(sublayers), **of_block) for sublayers in _candidates(parts, acting, _parallel(acting))
    ]
    misses = _by_miss(structures, x, expected)
    if misses and misses[0][0] <= tolerance(x.dtype):
        return misses[0][1]
    scaled = [s for structure in structures if (s := _scaled(structure, block, acting, x, expected)) is not None]
    scaled_misses = _by_miss(scaled, x, expected)
    if scaled_misses and scaled_misses[0][0] <= tolerance(x.dtype):
        return scaled_misses[0][1]
    for order in _with_free_norms(acting, x):
        free = [Structure(s, (1.0,) * len(s), **of_block) for s in _candidates(parts, order, _parallel(acting))]
        free_misses = _by_miss(free, x, expected)
        if free_misses and free_misses[0][0] <= 64 * unit(x.dtype):  # so near that eps is the right one
            return free_misses[0][1]
    unknown = [entry.name for entry in acting if entry.role is None]
    if unknown:
        raise ConfigError(
            f"{type(block).__name__}: {', '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} neither attention nor FFN, and no norm "
            f"gamma * x/sqrt(mean(x^2) + eps) + beta, centred or not: in the block act, in this order, "
            f"{', '.join(entry.name for entry in acting)}; where it belongs to attention or FFN, name them with it: "
            'attention=("attn", "its.path")'
        )
    nearest = "; ".join(f"{structure.placement!r} is off by {miss:.1g} times its output" for miss, structure in misses[:2])
    raise ConfigError(
        f"{type(block).__name__} is no attention and FFN, one after the other or at once, with norms in any known placement and each "
        "added to the state (is a sum x + f(x) missing?): in it act, in this order, "
        f"{', '.join(entry.name for entry in acting)}{'; ' if nearest else ''}{nearest}"
    )


def alike(first: nn.Module, structure: Structure, block: nn.Module, anatomy: Anatomy) -> Structure:
    """The structure of a block of the same make as one whose structure is known, without running it."""
    paths, parts = {part: path for path, part in first.named_modules()}, dict(block.named_modules())

    def same(sublayer: Sublayer, field: ModuleChain) -> Sublayer:
        norms = {role: norm for role in ROLES if (norm := getattr(sublayer, role)) is not None}
        own: Roles = {
            role: AdaptedNorm(parts[paths[norm.module]], norm.form, norm.width, norm.exact) for role, norm in norms.items()
        }
        field.ending, field.behind = sublayer.field.ending, sublayer.field.behind
        return Sublayer(field, sublayer.kind, **own)

    if len(structure.sublayers) != 2 or structure.own_calls:
        raise ConfigError(f"blocks as {type(block).__name__} are not read on demand: load the model whole")
    pairs = zip(structure.sublayers, fields(block, anatomy), strict=True)
    return dataclasses.replace(structure, sublayers=tuple(same(*pair) for pair in pairs))


def make_of(block: nn.Module) -> tuple[object, ...]:
    """What a block is built of: every module's path and class, its settings, and its buffers that are numbers."""
    return tuple((path, type(part), _settings(part)) for path, part in block.named_modules())


PLAIN = (bool, int, float, str)
NUMBERS = ("layer_idx", "layer_id", "layer_number", "block_idx")
"""How libraries call a block's number, which says nothing of what it computes."""


def _settings(part: nn.Module) -> tuple[tuple[str, object], ...]:
    found: dict[str, object] = {
        name: value for name, value in vars(part).items() if isinstance(value, PLAIN) and name not in NUMBERS
    }
    found |= {name: float(buffer) for name, buffer in part.named_buffers(recurse=False) if buffer.numel() == 1}
    return tuple(sorted(found.items()))


def _telling_state(running: Running) -> Tensor:
    """A random state as small as the block's increments, on which a block that barely acts differs from any other."""
    block, call = running.block, running.call
    x = torch.randn(call.x.shape, generator=torch.Generator().manual_seed(0)).to(call.x)
    y = running(x)
    if not isinstance(y, Tensor):
        raise ConfigError(
            f"{type(block).__name__} returns a {type(y).__name__}: only blocks that return the state alone are known"
        )
    scale = float((y - x).norm() / x.norm())
    if math.isnan(scale):
        bad = next((name for name, weight in block.named_parameters() if not weight.isfinite().all()), "a weight on demand")
        raise ConfigError(f"{type(block).__name__} has weights that are not finite, such as {bad}: is the file damaged?")
    if scale == 0:
        zeros = [name for name, weight in block.named_parameters() if weight.numel() == 1 and not bool(weight.any())]
        gate = (
            f"its number {zeros[0]} is 0, as ReZero begins: set it to what it is after a step"
            if zeros
            else ("are its weights those of a trained or initialised model?")
        )
        raise ConfigError(f"{type(block).__name__} leaves every state as it is, from which its structure cannot be read: {gate}")
    if not scale < math.inf:
        raise ConfigError(
            f"{type(block).__name__} changes a state by {scale:g} times its size, from which its structure cannot be read: "
            "are its weights those of a trained or initialised model?"
        )
    return scale * x


def _output(structure: Structure, x: Tensor) -> Tensor:
    output: Tensor = in_context(structure.depth(), structure.context)(x)
    return output


def _by_miss(structures: Sequence[Structure], x: Tensor, expected: Tensor) -> list[tuple[float, Structure]]:
    """The structures with how far their output is from the block's, the nearest first."""
    misses = [(float((_output(each, x) - expected).norm() / expected.norm()), each) for each in structures]
    return sorted(misses, key=lambda miss: miss[0])


class _Acting(NamedTuple):
    """What acts in a block, and on which state: a norm, a map of that kind, or, where None, anything else."""

    name: str
    role: AdaptedNorm | FreeNorm | Kind | None
    x: Tensor


def _order(parts: Parts, running: Running, x: Tensor) -> list[_Acting]:
    """What acts in the block outside attention and FFN, and these, in order."""
    kinds: dict[nn.Module, Kind] = {parts.attention.own[0]: "attention"}
    inside = parts.attention.inside
    if parts.ffn is not None:
        kinds[parts.ffn.own[0]] = "ffn"
        inside |= parts.ffn.inside
    order: list[_Acting] = []
    roles: dict[str, AdaptedNorm | Kind | None] = {}
    watching: dict[str, nn.Module] = {}
    for name, part in running.block.named_modules():
        if part in kinds:
            roles[name] = kinds[part]
        elif part not in inside and next(part.children(), None) is None and _may_act(part, x.shape[-1]):
            roles[name] = as_norm(part, x.shape[-1])
        else:
            continue
        watching[name] = part
    with watched(watching) as acts:
        running(x)
    for act in acts:
        state = (
            running.form.turned(act.x)
            if act.x.dim() == x.dim()
            else act.x.reshape(x.shape)
            if act.x.numel() == x.numel()
            else act.x
        )
        order.append(_Acting(f"{act.path} ({type(act.module).__name__})", roles[act.path], state))
    return order


def _may_act(part: nn.Module, width: int) -> bool:
    """Whether a part does more than an activation or a dropout: it has weights, or is a norm without."""
    return next(part.parameters(), None) is not None or as_norm(part, width) is not None


def _parallel(acting: Sequence[_Acting]) -> bool:
    """Whether the FFN does not act on what attention gave: both act on one state, or their norms do."""
    states = {entry.role: entry.x for entry in acting if isinstance(entry.role, str)}
    if len(states) < 2:
        return False
    if torch.equal(states["attention"], states["ffn"]):
        return True
    first, *others = acting
    return any(isinstance(each.role, AdaptedNorm) and torch.equal(each.x, first.x) for each in others)


def _candidates(parts: Parts, acting: Sequence[_Acting], parallel: bool) -> Iterator[tuple[Sublayer, ...]]:
    """The sublayers that a block of those parts may be, by the order in which things act."""
    roles = [entry.role for entry in acting]
    if None in roles:
        return
    if parts.ffn is None:
        for (own,) in _assignments(roles, "attention"):
            yield (Sublayer(parts.attention.chain, "attention", **own),)
        return
    for first, second in _assignments(roles, "attention", "ffn"):
        yield Sublayer(parts.attention.chain, "attention", **first), Sublayer(parts.ffn.chain, "ffn", **second)
    if parallel:
        norms = [role for role in roles if isinstance(role, AdaptedNorm)]
        if len(norms) <= 1:
            roles_of_both: Roles = dict(zip(ROLES, norms, strict=False))
            yield (Sublayer(ParallelMaps(parts.attention.chain, parts.ffn.chain), "parallel", **roles_of_both),)
        elif len(norms) == 2 and len({(norm.centred, norm.eps, norm.added) for norm in norms}) == 1:
            for one, other in (norms, norms[::-1]):
                both = ParallelMaps(parts.attention.chain, parts.ffn.chain, (GainsOf(one), GainsOf(other)))
                yield (Sublayer(both, "parallel", input_norm=WithoutGain(one)),)


def _scaled(structure: Structure, block: nn.Module, acting: Sequence[_Acting], x: Tensor, output: Tensor) -> Structure | None:
    """The structure with numbers s that make X + s f(N X) of what acted on what; None where no numbers do."""
    around = in_context(structure.depth(), structure.context)
    seen: dict[object, Tensor] = {entry.role: entry.x for entry in acting}
    starts = [part.kind if part.input_norm is None else part.input_norm for part in structure.sublayers]
    state, lengths, parts = x, [], []
    for i, (part, own) in enumerate(zip(around.sublayers, structure.sublayers, strict=True)):
        after = output if i == len(starts) - 1 else seen[starts[i + 1]]
        whole = seen[own.state_norm] if own.state_norm is not None else after
        scale = fitted_scale(block, whole - state, part(state))
        if scale is None:
            return None
        if isinstance(scale, float) and scale > 0:
            lengths.append(scale)
        else:
            if own.output_norm is not None or not isinstance(own.field, ModuleChain):
                return None  # what a norm puts out is no map's last stage
            own = own.with_field(ModuleChain([*own.field.stages, ScaledOutput(scale)]))
            lengths.append(1.0)
        parts.append(own)
        state = after
    return dataclasses.replace(structure, sublayers=tuple(parts), lengths=tuple(lengths))


FREE_EPS = (torch.finfo(torch.float32).eps, 1e-5, 1e-6, 1e-8, torch.finfo(torch.float64).eps)
"""What functions of norms are called with; the first and the last are what torch's rms_norm takes unasked."""


def _with_free_norms(acting: Sequence[_Acting], x: Tensor) -> Iterator[list[_Acting]]:
    """The order with norms that the block computes by a function, before its maps and behind them: no module shows them."""
    maps = [i for i, entry in enumerate(acting) if isinstance(entry.role, str)]
    gaps = [*maps, *maps[1:], len(acting)]  # between the two, one behind the first and one before the second
    chosen_gaps = dict.fromkeys(tuple(sorted(c)) for n in range(1, len(gaps) + 1) for c in combinations(gaps, n))
    epsilons = dict.fromkeys((torch.finfo(x.dtype).eps, *FREE_EPS))
    for eps, centred in product(epsilons, (False, True)):
        for chosen in chosen_gaps:
            order = list(acting)
            for place in reversed(chosen):
                norm = FreeNorm(x.shape[-1], eps, centred).to(x)
                order.insert(place, _Acting("a function", norm, x.new_empty(0)))
            yield order


def _assignments(acting: Sequence[AdaptedNorm | FreeNorm | Kind | None], *kinds: Kind) -> Iterator[tuple[Roles, ...]]:
    """Every way to give the norms their roles around maps of these kinds that keeps the order in which they act."""
    if any(acting.count(kind) != 1 for kind in kinds):
        return
    ends = [acting.index(kind) for kind in kinds]
    if ends != sorted(ends):
        return
    stretches = [acting[start + 1 : end] for start, end in zip([-1, *ends], [*ends, len(acting)], strict=True)]
    places = [(i, role) for i in range(len(kinds)) for role in ROLES]
    # before the first map only its input norm acts; between two, what is behind the one and before the other
    cuts = [0, *range(1, len(places), len(ROLES)), len(places)]
    free = [combinations(places[start:end], len(part)) for part, (start, end) in zip(stretches, pairwise(cuts), strict=True)]
    for chosen in product(*free):
        roles: tuple[Roles, ...] = tuple({} for _ in kinds)
        for (sublayer, role), norm in zip(chain(*chosen), chain(*stretches), strict=True):
            roles[sublayer][role] = norm
        yield roles


def _placement(sublayer: Sublayer) -> str:
    """The placement's name, or the norms' where no placement has them, as with norms that nothing but a foreign block has."""
    try:
        return sublayer.placement.name
    except ConfigError:
        return "+".join(role for role in ROLES if getattr(sublayer, role) is not None)
