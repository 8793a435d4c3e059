"""Any module whose forward pass is a residual stream, x_{k+1} = x_k + f_k(x_k), whatever f_k is
made of. Blocks, attention and FFN need not be known.

The map f_k is the module itself: it runs on its example, with x in place of its own k-th state.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import count, pairwise, product
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ctrans.base.as_found import as_found
from ctrans.base.shapes import TokenRows
from ctrans.dynamics.depth import Depth
from ctrans.dynamics.scheme import whole_graph
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.attention_in_model import reference_kernel
from ctrans.interop.block_calls import Seen, tensors_in
from ctrans.interop.block_run import mixes_tokens
from ctrans.interop.block_structure import Structure
from ctrans.interop.module_adapter import ModuleAdapter
from ctrans.interop.operations import CallSite, Graph, Operations
from ctrans.interop.probe_weights import random_states
from ctrans.interop.tolerances import same_where_finite
from solvers import ConfigError

FEWEST = 2
"""The fewest sums that make a stream."""


class StreamMap(nn.Module):
    """f_k(x) = x_{k+1} - x, where x takes the place of the k-th state. `weights` are those that the
    module reads between these states.
    """

    label = "sum"
    scale_path = None
    use_reference_kernel = False

    def __init__(self, adapter: StreamAdapter, k: int, weights: Sequence[nn.Parameter]):
        super().__init__()
        self.adapter = adapter
        self.k = k
        self.weights = nn.ParameterList(weights)
        self.mixes_tokens = True
        self.stages = (self,)
        self.why_not = adapter.because

    def forward(self, x: TokenRows) -> TokenRows:
        flat = x.reshape(-1, *x.shape[-2:])
        with reference_kernel(self):
            _, after = self.adapter.passed(self.adapter.shaped(flat), {self.k: flat}, self.k + 1)
        return (after - flat).reshape(x.shape)


class StreamAdapter(ModuleAdapter):
    """A module around the states of its residual stream. `because` says why it is read so.
    Errors as `ModuleAdapter`.
    """

    def _find(self) -> None:
        graph = Graph()
        with torch.no_grad():
            output = self._run(self.example, Operations(graph.met))
        main = self.tensor(output)
        if main is None:
            raise ConfigError(
                "none of its outputs is called logits: wrap it in a module that returns one tensor"
            )
        operations = graph.operations
        sink = graph.number(main)
        states = graph.stream(1, sink)  # 0 is the example, 1 its copy
        near = graph.after(1)
        streams = [
            graph.stream(n, sink)
            for n, operation in enumerate(operations)
            if operation.site is None
        ]
        streams = [stream for stream in streams if len(stream) > FEWEST and stream[-1] in near]
        # the input may also be read elsewhere, or be the context of a stream that begins with
        # weights, such as latents
        for starts_near in (True, False):
            longer = [
                stream
                for stream in streams
                if set(states) < set(stream) and (stream[0] in near) is starts_near
            ]
            states = max(longer, key=len, default=states)
        if len(states) <= FEWEST:
            raise ConfigError(
                "no sums x + f(x) of its first argument follow one another such that the output"
                " depends on each of them alone"
            )
        beside_the_stream = graph.after(1, states[-1]) | graph.after(states[0], states[-1])
        self.apart = {
            i
            for i, x in enumerate(tensors_in(output))
            if x is not main and graph.number(x) in beside_the_stream
        }
        self._numbers = {operations[n].site: k for k, n in enumerate(states)}
        self.weights = [graph.weights(*ends) for ends in pairwise(states)]
        self.because = ""
        parts_with_more = [ends for ends in pairwise(states) if not graph.is_sum(*ends)]
        if parts_with_more:
            self.because += (
                f"{len(parts_with_more)} of {len(self.weights)} parts do more than add f(x), such"
                " as a norm of the state; "
            )
        inner = graph.inner_sums(states, sink)
        if inner:
            self.because += (
                f"at least {inner} of its sums x + f(x), inside these parts or beside them, are not"
                " examined by themselves; "
            )
        shape: Any = operations[states[0]].shape
        self._find_state_axes(shape)

    def _find_state_axes(self, shape: Sequence[int]) -> None:
        """Finds which axes of its states, of this shape, count sequences and channels, and puts
        sequences first in the example.
        """
        lengths = Counter(len(weight) for weight in self.model.parameters() if weight.dim() == 1)
        self._width = max((len(shape) - 1, 1), key=lambda axis: lengths[shape[axis]])
        example = self.example
        for self.tokens_first, self._batch in product((False, True), (0, 1)):
            if self.tokens_first:
                self.example = example.transpose(0, 1)
            else:
                self.example = example
            self._copies, remainder = divmod(shape[self._batch], len(self.example))
            if self._batch != self._width and remainder == 0 and self._is_alone():
                return
        raise ConfigError(
            f"no axis of its states {tuple(shape)} counts the sequences of its example"
            f" {tuple(example.shape)}"
        )

    def _is_alone(self) -> bool:
        """Whether the last state of each sequence but the first is the same for another first
        one.
        """
        if len(self.example) > 1:
            rows = self.example
        else:
            rows = self._as_many(self.example, 2)
        changed = torch.cat([rows[:1].flip(-1), rows[1:]])
        last = len(self.weights)
        with torch.no_grad():
            _, before = self.passed(rows, last=last)
            _, after = self.passed(changed, last=last)
        return torch.equal(before[1:], after[1:])

    def _run(self, tokens: Tensor, mode: Operations) -> Any:
        with as_found(self.model), whole_graph(), mode:
            return self.run(tokens.clone())

    def states(self, look: Callable[[int, Tensor], Tensor]) -> Operations:
        """A mode of forward passes in which state k is look(k, x) in place of the module's own
        x.
        """

        def met(site: CallSite, name: str, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):
                numbers = count()

                def met_part(part: Any) -> Any:
                    if isinstance(part, Tensor):
                        return met((*site, next(numbers)), name, inputs, part)
                    return part

                return tree_map(met_part, output)
            k = self._numbers.get(site)
            if k is None:
                return output
            return look(k, output)

        return Operations(met)

    def _turned(self, x: Tensor) -> Tensor:
        return x.movedim((self._batch, self._width), (0, -1))

    def rows(self, x: Tensor) -> Float[Tensor, "batch tokens width"]:
        """A state of the module, sequences first."""
        turned = self._turned(x)
        return turned.reshape(len(turned) // self._copies, -1, turned.shape[-1])

    def passed(
        self,
        tokens: Tensor,
        states: Mapping[int, Tensor] = MappingProxyType({}),
        last: int | None = None,
    ) -> tuple[Any, Tensor]:
        """The output and state number `last` of a forward pass, which ends there if it is given.
        These `states` are replaced.
        """
        last_state = tokens

        def look(k: int, x: Tensor) -> Tensor:
            nonlocal last_state
            if k == last:
                last_state = self.rows(x)
                raise Seen
            if k not in states:
                return x
            state = states[k].reshape(self._turned(x).shape)
            # a copy, which the module may change in place
            return state.movedim((0, -1), (self._batch, self._width)).clone()

        with contextlib.suppress(Seen):
            output = self._run(tokens, self.states(look))
            if last is None:
                return output, last_state
            raise ConfigError(
                f"{type(self.model).__name__} does not always compute state {last} of its residual"
                " stream"
            )
        return None, last_state

    def blocks(self) -> list[nn.Module]:
        return [self.model] * len(self.weights)

    def structures(self) -> tuple[list[Structure], Tensor]:
        first = self._start(self.example)
        self.tokens = first.shape[-2]
        self._like = torch.zeros_like(first[0])
        structures: list[Structure] = []
        for k, weights in enumerate(self.weights):
            _, state = self.passed(self.example, last=k)
            self._check_same(self.example, {0: random_states(first), k: state})
            field = StreamMap(self, k, weights)
            field.mixes_tokens = self.tokens > 1 and mixes_tokens(field, state)
            sublayer = Sublayer(field, "part")
            structures.append(Structure((sublayer,), (1.0,), {}, None))
        return structures, first

    def _check_same(self, tokens: Tensor, states: Mapping[int, Tensor]) -> None:
        """Raises ConfigError unless the example with these states has the output of the tokens."""
        with torch.no_grad():
            output, _ = self.passed(self.shaped(states[0]), states)
            computed = self.tensor(output)
            expected = self.tensor(self.run(tokens))
        agree = (
            computed is not None and expected is not None and same_where_finite(computed, expected)
        )
        if not agree:
            raise ConfigError(
                f"{type(self.model).__name__} does not see these inputs through the states of its"
                " residual stream alone: a padding mask or another context is known only for its"
                " example, so open it with these inputs as example="
            )

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self._start(tokens)
        self._check_same(tokens, {0: x})
        return x

    def outputs(self, x: Tensor) -> Any:
        output, _ = self.passed(self.shaped(x), {len(self.weights): x})
        return output

    def check(self, depth: Depth) -> None:
        self._check_output(depth, self.example)

    def _start(self, tokens: Tensor) -> Tensor:
        _, first = self.passed(tokens, last=0)
        return first
