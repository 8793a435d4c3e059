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
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.attention_in_model import reference_kernel
from ctrans.interop.block_calls import Seen, tensors_in
from ctrans.interop.block_parts import mixes_tokens
from ctrans.interop.module_adapter import ModuleAdapter
from ctrans.interop.operations import CallSite, Graph, Operations
from ctrans.interop.probe_weights import random_states
from ctrans.interop.recognise import Structure
from ctrans.interop.tolerances import difference, tolerance
from solvers import ConfigError

FEWEST = 2
"""The fewest sums that make a stream."""


class StreamMap(nn.Module):
    """f_k(x) = x_{k+1} - x, where x takes the place of the k-th state. `weights` are those that the
    module reads between these states.
    """

    said, scale_path, use_reference_kernel = "sum", None, False

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
        leaves = [graph.stream(n, sink) for n, each in enumerate(operations) if each.place is None]
        leaves = [each for each in leaves if len(each) > FEWEST and each[-1] in near]
        # the input may also be read elsewhere, or be the context of a stream that begins with
        # weights, such as latents
        for starts_near in (True, False):
            longer = [
                each for each in leaves if {*states} < {*each} and (each[0] in near) is starts_near
            ]
            states = max(longer, key=len, default=states)
        if len(states) <= FEWEST:
            raise ConfigError(
                "no sums x + f(x) of its first argument follow one another such that the output"
                " depends on each of them alone"
            )
        around = graph.after(1, states[-1]) | graph.after(states[0], states[-1])
        self.apart = {
            i
            for i, x in enumerate(tensors_in(output))
            if x is not main and graph.number(x) in around
        }
        self._places = {operations[n].place: k for k, n in enumerate(states)}
        self.weights = [graph.weights(*ends) for ends in pairwise(states)]
        more = sum(not graph.is_sum(*ends) for ends in pairwise(states))
        if more:
            self.because = (
                f"{more} of {len(self.weights)} parts do more than add f(x), such as a norm of the"
                " state; "
            )
        else:
            self.because = ""
        raw: Any = operations[states[0]].shape
        if inner := graph.inner_sums(states, sink):
            self.because += (
                f"at least {inner} of its sums x + f(x), inside these parts or beside them, are not"
                " examined by themselves; "
            )
        known = Counter(len(weight) for weight in self.model.parameters() if weight.dim() == 1)
        self._width = max((len(raw) - 1, 1), key=lambda axis: known[raw[axis]])
        example = self.example
        for self.tokens_first, self._batch in product((False, True), (0, 1)):
            if self.tokens_first:
                self.example = example.transpose(0, 1)
            else:
                self.example = example
            self._copies, rest = divmod(raw[self._batch], len(self.example))
            if self._batch != self._width and not rest and self._is_alone():
                return
        raise ConfigError(
            f"no axis of its states {tuple(raw)} counts the sequences of its example"
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
        with torch.no_grad():
            before, after = (
                self.passed(each, last=len(self.weights))[1] for each in (rows, changed)
            )
        return torch.equal(before[1:], after[1:])

    def _run(self, tokens: Tensor, mode: Operations) -> Any:
        with as_found(self.model), mode:
            return self.run(tokens.clone())

    def states(self, look: Callable[[int, Tensor], Tensor]) -> Operations:
        """A mode of forward passes in which state k is look(k, x) in place of the module's own
        x.
        """

        def met(place: CallSite, name: str, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor):
                i = count()
                return tree_map(
                    lambda x: (
                        met((*place, next(i)), name, inputs, x) if isinstance(x, Tensor) else x
                    ),
                    output,
                )
            k = self._places.get(place)
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
        given: Mapping[int, Tensor] = MappingProxyType({}),
        last: int | None = None,
    ) -> tuple[Any, Tensor]:
        """The output and state number `last` of a forward pass, which ends there if it is given.
        The states at `given` are replaced.
        """
        found = tokens

        def look(k: int, x: Tensor) -> Tensor:
            nonlocal found
            if k == last:
                found = self.rows(x)
                raise Seen
            if k not in given:
                return x
            # a copy, which the module may change in place
            return (
                given[k]
                .reshape(self._turned(x).shape)
                .movedim((0, -1), (self._batch, self._width))
                .clone()
            )

        with contextlib.suppress(Seen):
            output = self._run(tokens, self.states(look))
            if last is None:
                return output, found
            raise ConfigError(
                f"{type(self.model).__name__} does not always compute state {last} of its residual"
                " stream"
            )
        return None, found

    def blocks(self) -> list[nn.Module]:
        return [self.model] * len(self.weights)

    def structures(self) -> tuple[list[Structure], Tensor]:
        x = self.passed(self.example, last=0)[1]
        self.tokens = x.shape[-2]
        self._like = torch.zeros_like(x[0])
        found: list[Structure] = []
        for k, weights in enumerate(self.weights):
            own = self.passed(self.example, last=k)[1]
            self._check_same(self.example, {0: random_states(x), k: own})
            field = StreamMap(self, k, weights)
            field.mixes_tokens = self.tokens > 1 and mixes_tokens(field, own)
            found.append(Structure((Sublayer(field, "part"),), (1.0,), {}, None))
        return found, x

    def _check_same(self, tokens: Tensor, given: Mapping[int, Tensor]) -> None:
        """Raises ConfigError unless the example with these states has the output of the tokens."""
        with torch.no_grad():
            found = self.tensor(self.passed(self.shaped(given[0]), given)[0])
            expected = self.tensor(self.run(tokens))
        if (
            found is None
            or expected is None
            or not difference(found, expected) <= tolerance(expected.dtype)
        ):
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
        return self.passed(self.shaped(x), {len(self.weights): x})[0]

    def check(self, depth: Depth) -> None:
        self._check_output(depth, self.example)

    def _start(self, tokens: Tensor) -> Tensor:
        return self.passed(tokens, last=0)[1]
