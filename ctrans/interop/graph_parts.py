"""The parts of a residual stream, read from the operations of a forward pass: norms, attention and
FFN, however the model's code is divided into modules.

Between two states x and y is a sum, y = x + s_1 f_1(x) + s_2 f_2(x) .., with a norm around it or
not. Each f is N_out m(N_in x). A norm is found by what its operations compute (see `norms`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import Kind
from ctrans.dynamics.residual import KeptShare
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.attention_function import FUNCTION, why_whole
from ctrans.interop.averages import averages_among
from ctrans.interop.block_run import mixes_tokens, reach_from_the_first
from ctrans.interop.block_structure import Structure, period_of
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import AdaptedNorm, as_norm
from ctrans.interop.operation_names import MASKS, MOVES, NORM, PRODUCTS, SUMS
from ctrans.interop.operations import Graph, Operation
from ctrans.interop.parallel_terms import MapOfTerm, in_parallel
from ctrans.interop.replay import NotReplayedError, Replayed
from ctrans.interop.residual_scale import ScaledOutput, keeping
from ctrans.interop.residual_stream import StreamPart
from ctrans.interop.residual_sums import PASSED_ON, SCALINGS, Scaled, Sum, reshaped, summands
from ctrans.interop.stream_map import MapOfOperations, MapOfPass, NumberOfWeights
from ctrans.interop.tolerances import same_where_finite
from solvers import ConfigError

if TYPE_CHECKING:
    from ctrans.interop.stream_adapter import StreamAdapter

WITHOUT_ROWS = "operations without rows"
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
UNSEEN = (
    "code that torch does not show makes a tensor in it, as scripted code or torch.vmap does,"
    " so that ctrans cannot follow it"
)
MASKED = "it sets tokens to a number where a mask hides them"
AFFINE = (
    "it multiplies the state by numbers and adds what its parts do not change: an earlier state,"
    " which derivatives hold fixed, coordinates, or a vector"
)
MIXES = (AFFINE, MASKED)
"""Why a part only multiplies the state by numbers, and adds what does not depend on it."""
Samples = Sequence[tuple[Tensor, Tensor]]
"""States before a part of a model, and behind it."""


@dataclasses.dataclass(frozen=True)
class Term:
    """s * N_out m(N_in x), a term of a sum.

    - `start`: the operation that makes N_in x, or x
    - `end`: the one that makes the output of m
    - `scale`: s, a number or a parameter of one or for each channel
    - `offset`: what makes an offset that is added to the output of m, None if there is none
    """

    start: int
    end: int
    input_norm: AdaptedNorm | None
    output_norm: AdaptedNorm | None
    scale: float | nn.Parameter
    offset: int | None = None


def _scale_of(scaled: Scaled) -> float | nn.Parameter:
    """What multiplies a term: a number that a weight may be now, or a parameter with a number for
    each channel. Raises NotReplayedError for several that are no numbers.
    """
    numbers = [float(scale) for scale in scaled.scales if scale.numel() == 1]
    if len(numbers) == len(scaled.scales):
        product = scaled.factor * math.prod(numbers)
        is_parameter = len(numbers) == 1 and isinstance(scaled.scales[0], nn.Parameter)
        if product > 0 or not is_parameter or scaled.factor != 1:
            return product
    if len(scaled.scales) > 1 or scaled.factor != 1:
        raise NotReplayedError("it scales its map several times")
    (scale,) = scaled.scales
    assert isinstance(scale, nn.Parameter), "other weights are numbers"
    return scale


NORMALISERS = (
    NORM,
    "mean",
    "var",
    "var_mean",
    "std",
    "std_mean",
    "norm",
    "vector_norm",
    "linalg_norm",
    "linalg_vector_norm",
    "normalize",
    "layer_norm",
    "rms_norm",
    "group_norm",
    "instance_norm",
)
"""Operations that norms consist of."""


def of_tokens(norm: AdaptedNorm | None) -> AdaptedNorm | None:
    """The norm, if it acts on each token alone, also on tokens of unequal sizes and on those with
    one large channel.
    """
    if norm is None:
        return None
    like = norm.gamma
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, norm.width, generator=generator, dtype=torch.float64)
    x = x * torch.tensor([0.1, 1.0, 3.0, 1.0, 30.0], dtype=torch.float64)[:, None]
    x[:, 3, 0] = 100.0
    x = x.to(like)
    try:
        with torch.no_grad():
            computed = norm.module(norm.stretch * x)
            expected = norm.gamma * norm.standardize(x) + norm.beta
    except FOREIGN_ERRORS:
        return None
    if not expected.any() or not same_where_finite(computed, expected):
        return None
    return norm


class PartsReader:
    """Reads the sublayers between the states of a graph. Raises NotReplayedError for a part that is
    none.
    """

    def __init__(self, adapter: StreamAdapter, graph: Graph):
        self.adapter = adapter
        self.graph = graph
        products = [n for n in range(len(graph.operations)) if self._multiplies(n)]
        self._matrices = set(map(id, graph.read_by(products, -1)))
        """The weights that products read, by their ids; others are tables or vectors."""

    def is_norm(self, first: int, last: int) -> bool:
        """Whether operation `last` is a norm of the one before it."""
        return self.norm(first, last, may_turn=True) is not None

    def norm(self, first: int, last: int, *, may_turn: bool = False) -> AdaptedNorm | None:
        """The norm that makes the tensor `last` of the tensor `first`; None if there is none. A
        state behind it may turn its first two axes.
        """
        graph = self.graph
        shape = graph.operations[last].shape
        given = graph.operations[first].shape
        if shape is None or given is None or shape.numel() != given.numel():
            return None
        if given != shape:
            first = reshaped(graph, first)[-1]
        inner = self._unmoved(last)
        module: Any = graph.operations[inner].function
        own = graph.operations[first].shape
        is_turned = own is not None and len(own) == 3 and shape == (own[1], own[0], own[2])
        keeps_its_axes = inner == last or own == shape or (is_turned and may_turn)
        if not keeps_its_axes:
            return None
        if graph.operations[inner].name == NORM:
            if self._unmoved(graph.operations[inner].reads[0]) == self._unmoved(first):
                return of_tokens(as_norm(module))
            return None
        if graph.operations[first].shape != shape:
            return None
        try:
            for axis in range(-1, -len(shape), -1):
                norm = of_tokens(as_norm(Replayed(graph, first, last, axis), shape[axis]))
                if norm is not None:
                    return norm
        except NotReplayedError:
            return None
        return None

    def _unmoved(self, n: int) -> int:
        """The operation whose output n only gives another order of axes, or another shape."""
        operation = self.graph.operations[n]
        while operation.name in MOVES and self.graph.operations[operation.reads[0]].site:
            n = operation.reads[0]
            operation = self.graph.operations[n]
        return n

    def sublayer(self, step: StreamPart, state: Tensor) -> tuple[Sublayer, float]:
        """The sublayer of that step, and its length in depth-time; `state` has values of its first
        state.
        """
        if step.sum is None:
            raise NotReplayedError(self._why_no_sum(step))
        self._check_decisions(step)
        state_norm = None
        if step.sum.y not in reshaped(self.graph, step.last):
            state_norm = self.norm(step.sum.y, step.last, may_turn=True)
        sublayer, length = self._of_sum(step.sum, state, state_norm)
        if step.sum.share == 1:
            return sublayer, length
        if state_norm is None:
            weights = tuple(NumberOfWeights(self.graph, each) for each in step.sum.made_by)
            sublayer.residual = KeptShare(state.shape[-1], step.sum.factor, weights)
            return sublayer, length
        return keeping(sublayer, state_norm, step.sum.share), length

    def _inside_part(self, step: StreamPart) -> set[int]:
        return self.graph.after(step.first) & self.graph.before(step.last) - {step.first}

    def _why_no_sum(self, step: StreamPart) -> str:
        names = {self.graph.operations[n].name for n in self._inside_part(step)}
        if self._reads_unseen(step):
            return UNSEEN
        if self._is_affine(step):
            return AFFINE
        if step.is_gated:
            return (
                "it is a gated sum a x + f(x), whose gate, or factor that is no positive number, is"
                " not read"
            )
        if "batch_norm" in names and names <= {"batch_norm", *MOVES}:
            return "it is a batch norm: a scale and an offset of each channel"
        if set(MASKS) & names and names <= {*MASKS, *MOVES}:
            return MASKED
        return "it is no single sum x + f(x): it mixes states, or later parts read its states"

    def _reads_unseen(self, step: StreamPart) -> bool:
        """Whether a part reads a tensor like the state which code made that torch does not show, or
        what is made of several such.
        """
        size = (self.graph.operations[step.first].shape or torch.Size()).numel()
        read = {m for n in self._inside_part(step) for m in self.graph.operations[n].reads}
        if self.graph.hides_operations:
            read = {n for m in read for n in self.graph.before(m) - self.graph.before(step.first)}
        unknown = [self.graph.operations[m] for m in read - {0, step.first}]
        sizes = [
            (each.shape or torch.Size()).numel()
            for each in unknown
            if each.site is None and not each.path
        ]
        if self.graph.hides_operations:
            return any(each and not each % size for each in sizes)
        return size in sizes

    def _is_affine(self, step: StreamPart) -> bool:
        """Whether a part multiplies the state by numbers, and adds what it does not depend on."""
        inside = self._inside_part(step)
        of_entries = (*SUMS, *SCALINGS, *PASSED_ON)
        return all(
            self.graph.operations[n].name in of_entries
            and len({step.first, *inside} & set(self.graph.operations[n].reads)) == 1
            for n in inside
        )

    def _check_decisions(self, step: StreamPart) -> None:
        """Raises NotReplayedError if the model's code decides by the values of the state, of its
        norm or of the sum, outside of the maps.
        """
        assert step.sum is not None
        of_state = self.graph.after(step.first)
        in_maps = set[int]()
        for term in step.sum.terms:
            through, _ = self.graph.bottlenecks(step.sum.x, term.number)
            products = [m for m in of_state if m != step.first and self._multiplies(m)]
            begins = max((m for m in through if m <= min(products)), default=step.first)
            in_maps |= self.graph.after(begins) - {step.first}
        for n in self.graph.decisions:
            if n in of_state and n <= step.last and (n not in in_maps or n > step.sum.y):
                raise NotReplayedError("its code decides by the values of the state what it does")

    def _of_sum(
        self, sum_: Sum, state: Tensor, state_norm: AdaptedNorm | None
    ) -> tuple[Sublayer, float]:
        terms = list(sum_.terms)
        if len(terms) == 1:
            terms = summands(self.graph, terms[0])
        is_one = len(sum_.terms) == 1
        if len(terms) > 1 and state_norm is None and sum_.offset is None:
            try:
                maps = [self._map_of(self._term(sum_.x, each), state) for each in terms]
                return in_parallel(maps, may_be_one=is_one)
            except NotReplayedError:
                if not is_one:
                    raise
        if not is_one:
            raise NotReplayedError(f"its sum has {len(sum_.terms) + 1} terms")
        term = self._term(sum_.x, sum_.terms[0])
        if sum_.offset is not None:
            if term.output_norm is not None or term.scale != 1:
                raise NotReplayedError("it adds an offset behind its norm or scale")
            term = dataclasses.replace(term, offset=sum_.offset)
        return self._alone(term, state, state_norm)

    def _term(self, x: int, scaled: Scaled) -> Term:
        """The term of a sum whose state is x."""
        n = scaled.number
        scale = _scale_of(scaled)
        through, _ = self.graph.bottlenecks(x, n)
        inside = self.graph.after(x) & self.graph.before(n)
        products = [m for m in sorted(inside) if m != x and self._multiplies(m)]
        if not products:
            raise NotReplayedError("its map has no product of matrices")
        input_norm = None
        start = x
        for end in reversed([m for m in through if x < m < products[0]]):
            input_norm = self.norm(x, end)
            if input_norm is not None:
                start = end
                break
        output_norm = None
        end = n
        for begin in [m for m in through if products[-1] <= m < n]:
            output_norm = self.norm(begin, n)
            if output_norm is not None:
                end = self._moved(begin, through, n)
                break
        self._check_norms(inside, products, x if input_norm is None else None, n, output_norm)
        return Term(start, end, input_norm, output_norm, scale)

    def _moved(self, begin: int, through: Sequence[int], n: int) -> int:
        """The last of these operations that gives the tensor `begin` in another order or shape and
        of which n is a norm: the map puts tokens in their order, as those of windows.
        """
        moved = [
            m
            for m in through
            if begin < m < n
            and self._unmoved(m) == self._unmoved(begin)
            and self.norm(m, n) is not None
        ]
        return max(moved, default=begin)

    def _check_norms(
        self,
        inside: set[int],
        products: Sequence[int],
        x: int | None,
        n: int,
        output_norm: AdaptedNorm | None,
    ) -> None:
        """Raises NotReplayedError where operations of a norm act before the first product or behind
        the last, and no norm of tokens was found there. `x` is the state, None behind its norm.
        """
        for m in inside:
            before = x is not None and x < m < products[0]
            behind = output_norm is None and products[-1] < m <= n
            if (before or behind) and self.graph.operations[m].name in NORMALISERS:
                raise NotReplayedError(
                    "it normalises, and not as gamma * x/sqrt(mean(x^2) + eps) + beta of each"
                    " token, with one gamma for all that reads it"
                )

    def _multiplies(self, n: int) -> bool:
        return any(word in self.graph.operations[n].name for word in PRODUCTS)

    def _alone(
        self, term: Term, state: Tensor, state_norm: AdaptedNorm | None
    ) -> tuple[Sublayer, float]:
        """The sublayer with one map."""
        kind, chain, length = self._map(term, state)
        sublayer = Sublayer(
            chain,
            kind,
            input_norm=term.input_norm,
            output_norm=term.output_norm,
            state_norm=state_norm,
        )
        return sublayer, length

    def _map_of(self, term: Term, state: Tensor) -> MapOfTerm:
        """The map of a term that acts in parallel with others."""
        if term.output_norm is not None:
            raise NotReplayedError("a map in parallel has a norm of its output")
        return MapOfTerm(term, *self._map(term, state))

    def _map(self, term: Term, state: Tensor) -> tuple[Kind, ModuleChain, float]:
        """The map of a term: its kind, the map, and its length in depth-time."""
        first: MapOfOperations | MapOfPass
        try:
            first = MapOfOperations(self.adapter, self.graph, term.start, term.end, term.offset)
        except NotReplayedError:
            first = MapOfPass(self.adapter, self.graph, term.start, term.end)
        first.label = self._label(term)
        stages: list[nn.Module] = [first]
        length = 1.0
        if isinstance(term.scale, float) and term.scale > 0:
            length = term.scale
        elif term.output_norm is None:
            stages.append(ScaledOutput(term.scale))
        else:
            raise NotReplayedError("it scales the output of a norm by channel")
        chain = ModuleChain(stages)
        x = state
        if term.input_norm is not None:
            x = term.input_norm(state)
        if len(x) == x.shape[-2]:  # as many sequences as tokens hide the order of axes
            with contextlib.suppress(ConfigError):
                chain.find_output_projection(torch.cat([x, x[:1]]))
        else:
            chain.find_output_projection(x)
        averages = averages_among(self.graph, self._inside(term))
        if not averages and not (x.shape[-2] > 1 and mixes_tokens(chain, x)):
            return "ffn", chain, length
        first.mixing = self._mixing(term, chain, x)
        first.averages_with_rows = any(not average.changes for average in averages)
        if averages and not first.averages_with_rows:
            first.changed_by = ", ".join(dict.fromkeys(averages[0].changes))
        return "attention", chain, length

    def _label(self, term: Term) -> str:
        """The class of the smallest module of the model that has the map's own weights and no
        matrix of another map.
        """
        inside = sorted(self._inside(term) - {term.start})
        weights = self.graph.read_by(inside, term.start)
        uses = Counter(id(weight) for part in self.adapter.weights for weight in part)
        own = [weight for weight in weights if uses[id(weight)] < 2]
        holder = self.adapter.model.get_submodule(self.graph.path_around(own or weights))
        others = (set(uses) & self._matrices) - set(map(id, weights))
        is_shared = any(weight.dim() > 1 and id(weight) in others for weight in holder.parameters())
        if is_shared or holder is self.adapter.model or isinstance(holder, CONTAINERS):
            return MapOfOperations.label
        return type(holder).__name__

    def _inside(self, term: Term) -> set[int]:
        return self.graph.after(term.start) & self.graph.before(term.end)

    def _mixing(self, term: Term, chain: ModuleChain, x: Tensor) -> str:
        """What mixes tokens in a map if no rows do: a convolution if the map reaches no further
        than its kernels do, as a state space behind a convolution would.
        """
        operations = [self.graph.operations[n] for n in self._inside(term)]
        for each in operations:
            if each.name == FUNCTION.__name__:
                return f"torch's attention {why_whole((each.args, each.kwargs))}"
        convolutions = [each for each in operations if "conv" in each.name]
        if not convolutions:
            return WITHOUT_ROWS
        if reach_from_the_first(chain, x) <= sum(map(self._reach, convolutions)) < x.shape[1] - 1:
            return "a convolution"
        return f"{WITHOUT_ROWS}, a convolution among them"

    def _reach(self, convolution: Operation) -> int:
        """From how many tokens before and behind a token the convolution may read."""
        weight = self.graph.operations[convolution.reads[1]].shape
        sizes = convolution.shape
        if weight is None or sizes is None:
            return 0
        dilation = [*convolution.args, *[1] * 6][5]
        dilation = convolution.kwargs.get("dilation", dilation)
        if isinstance(dilation, int):
            dilation = [dilation] * len(weight[2:])
        reach, tokens = 0, 1
        for kernel, step, size in reversed([*zip(weight[2:], dilation, sizes[2:], strict=False)]):
            reach += (kernel - 1) * step * tokens
            tokens *= size
        return reach


def check_step(sublayer: Sublayer, length: float, samples: Samples) -> None:
    """Raises NotReplayedError unless the sublayer makes of each state what the model does."""
    for state, expected in samples:
        if not same_where_finite(sublayer.step(state, length), expected):
            raise NotReplayedError("its operations alone compute something else")


def structures_of(parts: Sequence[tuple[Sublayer, float]]) -> list[Structure]:
    """The parts as blocks, where these follow one another in a pattern."""
    per_block = period_of([sublayer.kind for sublayer, _ in parts])
    structures = []
    for i in range(0, len(parts), per_block):
        sublayers, lengths = zip(*parts[i : i + per_block], strict=True)
        structures.append(Structure(sublayers, lengths, {}))
    return structures
