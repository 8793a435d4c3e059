"""Modules that the user names: the list of blocks, and the attention and FFN of a block.

The parts of a module are read from its operations, and need no names. A list of blocks says which
of them count. Names of attention and FFN are compared with what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from ctrans.dynamics.fields import Kind
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.anatomy import Anatomy, parts_of
from ctrans.interop.block_calls import bind, tensors_in
from ctrans.interop.find_blocks import blocks_at, blocks_named, module_lists
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.operations import Graph
from ctrans.interop.probe_weights import random_states
from ctrans.interop.residual_stream import FEWEST, StreamPart, steps_of_the_stream
from ctrans.interop.tolerances import same_where_finite
from solvers import ConfigError

KINDS: dict[str, Kind] = {"attention": "attention", "ffn": "ffn"}
"""What each named part does, by the option that names it."""
SIZES = (1e-2, 1.0, 1e2)
"""Sizes of last states at which a user's head= is compared with the module."""


@contextmanager
def states_around(blocks: Sequence[nn.Module], graph: Graph) -> Iterator[list[int]]:
    """Inside, a pass whose operations the graph gets notes the numbers of two of them: the one that
    makes the state of the first block, and the one that makes what the last block returns.
    """
    around: list[int] = []

    def before(block: nn.Module, args: Any, kwargs: Any) -> None:
        state = bind(type(block), args, kwargs).x
        if not around and isinstance(state, Tensor):
            around.append(graph.number(state))

    def behind(block: nn.Module, args: Any, output: Any) -> None:
        states = [x for x in tensors_in(output) if x.is_floating_point() and x.dim() > 1]
        if around and states:
            around[1:] = [graph.number(states[0])]

    with ExitStack() as hooks:
        if blocks:
            begin = blocks[0].register_forward_pre_hook(before, with_kwargs=True)
            end = blocks[-1].register_forward_hook(behind)
            hooks.callback(begin.remove)
            hooks.callback(end.remove)
        yield around


def steps_of_blocks(
    path: str | None, graph: Graph, around: Sequence[int], is_norm: Callable[[int, int], bool]
) -> list[StreamPart]:
    """The parts of the blocks at that path, from the state that the first one gets to the one that
    the last one returns.
    """
    if len(around) < 2:
        raise ConfigError(
            f"blocks=: {path!r} is no list of blocks that a forward pass calls with a state and"
            " that return one: leave it out, or name another list"
        )
    first, last = around
    steps = steps_of_the_stream(graph, last, is_norm, first)
    if len(steps) < FEWEST:
        raise ConfigError(
            f"blocks=: in {path!r} no sums x + f(x) follow one another: leave it out, or name"
            " another list"
        )
    return steps


def first_state(
    states: Sequence[Tensor], embed: Callable[[Tensor], Tensor] | None, example: Tensor
) -> int:
    """The number of the state that the user's embed= gives; 0 if the module computes another one,
    and without embed=. Raises ConfigError if it is no state.
    """
    if embed is None:
        return 0
    given = embed(example)
    for k, state in enumerate(states[:-FEWEST]):
        if state.shape == given.shape and same_where_finite(given, state):
            return k
    if given.shape == states[0].shape:
        return 0
    raise ConfigError(
        f"embed= gives {tuple(given.shape)} for the example, and states are"
        f" {tuple(states[0].shape)}: give (batch, tokens, width)"
    )


def last_state(
    states: Sequence[Tensor],
    head: Callable[[Tensor], Any] | None,
    tensor: Callable[[Any], Tensor | None],
    expected: Tensor | None,
) -> int:
    """The number of the last state from which the user's head= makes the module's output; of the
    last one if it makes another output, and without head=.
    """
    last = len(states) - 1
    if head is None:
        return last
    for k in range(last, FEWEST - 1, -1):
        try:
            computed = tensor(head(states[k]))
        except FOREIGN_ERRORS:
            continue
        if computed is None or expected is None or computed.shape != expected.shape:
            continue
        if same_where_finite(computed, expected):
            return k
    return last


def check_head(
    head: Callable[[Tensor], Any],
    outputs: Callable[[Tensor], Any],
    tensor: Callable[[Any], Tensor | None],
    last: Tensor,
) -> None:
    """Raises ConfigError if the user's head= makes an output like the module's of its last state,
    of a small or of a large one, with other numbers. An output of another shape is the user's
    choice.
    """
    for x in (last, *(size * random_states(last) for size in SIZES)):
        computed, expected = tensor(head(x)), tensor(outputs(x))
        if computed is None or expected is None or computed.shape != expected.shape:
            return
        if not same_where_finite(computed, expected):
            raise ConfigError(
                "head= makes another output of the last state than the module, by up to"
                f" {float((computed - expected).abs().max()):.2g}: behind its last sum the module"
                " may change the state first, such as by a norm, a factor or a limit. Let head= do"
                " all that follows the last sum, or leave it out"
            )


def check_names(
    model: nn.Module, anatomy: Anatomy, graph: Graph, sublayers: Sequence[Sublayer]
) -> None:
    """Raises ConfigError for a name of attention or FFN that no block has, and for one whose
    weights are those of the other kind.
    """
    named = {"attention": anatomy.attention, "ffn": anatomy.ffn}
    given = {option: _paths(paths) for option, paths in named.items() if paths is not None}
    if not given:
        return
    block = _block_with(model, anatomy, given)
    weights = {
        option: {id(weight) for path in paths for weight in block.get_submodule(path).parameters()}
        for option, paths in given.items()
    }
    fields = {
        id(branch.field): (kind, branch.field)
        for sublayer in sublayers
        for kind, branch in sublayer.branches.items()
    }
    maps = {
        kind: [list(field.parameters()) for found, field in fields.values() if found == kind]
        for kind in KINDS.values()
    }
    wrong = [
        option
        for option, kind in KINDS.items()
        if option in weights
        and not _has_one_of(weights[option], maps[kind])
        and _has_one_of(weights[option], maps[_other(kind)])
    ]
    if not wrong:
        return
    name = type(block).__name__
    if len(wrong) > 1:
        attention, ffn = (_in_words(given[option]) for option in KINDS)
        raise ConfigError(
            f"attention= and ffn= are swapped: in {name} {ffn} mixes tokens and {attention} does"
            f" not; give attention={ffn}, ffn={attention}"
        )
    (option,) = wrong
    if option == "ffn":
        raise ConfigError(
            f"ffn=: {_in_words(given[option])} of {name} mixes tokens, as attention does: pass it"
            " as attention=, and as ffn= the module that acts on each token alone, or leave both"
            " out"
        )
    advice = "leave it out"
    inside = {id(weight) for weight in block.parameters()}
    for of_map in maps["attention"]:
        if of_map and all(id(weight) in inside for weight in of_map):
            prefix = next(path for path, part in model.named_modules() if part is block)
            path = graph.path_around(of_map).removeprefix(f"{prefix}.")
            advice = f"but {path} does: give attention={path!r}, or leave it out"
            break
    raise ConfigError(f"attention=: {_in_words(given[option])} of {name} mixes no tokens, {advice}")


def _paths(named: str | Sequence[str]) -> tuple[str, ...]:
    if isinstance(named, str):
        return (named,)
    return tuple(named)


def _in_words(paths: Sequence[str]) -> str:
    return " then ".join(map(repr, paths))


def _other(kind: Kind) -> Kind:
    return "ffn" if kind == "attention" else "attention"


def _has_one_of(weights: set[int], maps: Sequence[Sequence[nn.Parameter]]) -> bool:
    """Whether a matrix of one of the maps is one of the weights with these ids."""
    return any(weight.dim() > 1 and id(weight) in weights for of_map in maps for weight in of_map)


def _block_with(model: nn.Module, anatomy: Anatomy, given: dict[str, tuple[str, ...]]) -> nn.Module:
    """The first block of a list that has all the named parts. Raises ConfigError if there is
    none.
    """
    if anatomy.blocks is None:
        lists = [blocks_at(model, path) for path in module_lists(model)]
    else:
        lists = [blocks_named(model, anatomy.blocks)]
    candidates = [blocks[0] for blocks in lists] or [model]
    paths = {path for of_part in given.values() for path in of_part}
    for block in candidates:
        if paths <= dict(block.named_modules()).keys():
            return block
    largest = max(candidates, key=lambda block: sum(1 for _ in block.modules()))
    for option, of_part in given.items():
        missing = [path for path in of_part if path not in dict(largest.named_modules())]
        if missing:
            name = "FFN" if option == "ffn" else option
            raise ConfigError(
                f"no {name} found in {type(largest).__name__}, which has {parts_of(largest)}: it"
                f" has nothing at {missing[0]!r}"
            )
    raise AssertionError("a block without all the parts lacks one")
