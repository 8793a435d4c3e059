"""Any module whose forward pass is a residual stream, x_{k+1} = x_k + f_k(x_k), whatever f_k is made
of. Blocks, attention and FFN need not be known.

The map f_k is the module itself: it runs on its example, with x in place of its own k-th state.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.interop.block_calls import Seen
from ctrans.interop.block_parts import mixes_tokens
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.module_adapter import ModuleAdapter
from ctrans.interop.operations import Graph, Operations, Place
from ctrans.interop.probe_weights import random_states
from ctrans.interop.recognise import Structure
from ctrans.interop.tolerances import difference, tolerance
from ctrans.sublayer import Sublayer
from solvers import ConfigError

FEWEST = 2
"""The fewest sums that make a stream."""
NONE: Mapping[int, Tensor] = MappingProxyType({})


class StreamMap(nn.Module):
    """f_k(x) = x_{k+1} - x, where x takes the place of the k-th state. `weights` are those that the
    module reads between these states.
    """

    said, scale_path = "any part between two sums x + f(x)", None

    def __init__(self, adapter: StreamAdapter, k: int, weights: Sequence[nn.Parameter]):
        super().__init__()
        self.adapter, self.k, self.weights = adapter, k, nn.ParameterList(weights)

    @property
    def stages(self) -> tuple[nn.Module, ...]:
        """Itself: its parts are not known."""
        return (self,)

    @property
    def why_not(self) -> str:
        """Why it exposes nothing more."""
        return f"it is read by its sums alone ({self.adapter.because})"

    def forward(self, x: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch tokens width"]:
        flat = x.reshape(-1, *x.shape[-2:])
        _, after = self.adapter.passed(self.adapter.shaped(flat), {self.k: flat}, self.k + 1)
        return (after - flat).reshape(x.shape)


class StreamAdapter(ModuleAdapter):
    """A module around the states of its residual stream. `because` says why its blocks are not
    read. Errors as `ModuleAdapter`.
    """

    because = ""

    def _find(self) -> None:
        graph = Graph()
        with torch.no_grad():
            main = self.tensor(self._run(self.example, graph.met))
        if main is None:
            raise ConfigError("its output has no known tensor")
        sink, source = graph.number(main), 1  # 0 is the example, 1 its copy
        states = graph.stream(source, sink)
        if len(states) <= FEWEST:  # the input may be the context of a stream that begins with weights, such as latents
            states = max((graph.stream(leaf, sink) for leaf in graph.leaves()), key=len)
        if len(states) <= FEWEST:
            raise ConfigError("no sums x + f(x) follow one another such that the output depends on each of them alone")
        self._places = {graph.places[n]: k for k, n in enumerate(states)}
        self.weights = [graph.weights(*ends) for ends in pairwise(states)]
        raw: Any = graph.shapes[states[0]]
        known = Counter(len(weight) for weight in self.model.parameters() if weight.dim() == 1)
        self._width = max((len(raw) - 1, 1), key=lambda axis: known[raw[axis]])
        example = self.example
        for self.tokens_first, self._batch in product((False, True), (0, 1)):
            self.example = example.transpose(0, 1) if self.tokens_first else example
            self._copies, rest = divmod(raw[self._batch], len(self.example))
            if self._batch != self._width and not rest and self._is_alone():
                return
        raise ConfigError(f"no axis of its states {tuple(raw)} counts the sequences of its example {tuple(example.shape)}")

    def _is_alone(self) -> bool:
        """Whether the last state of each sequence but the first is the same for another first one."""
        rows = self.example if len(self.example) > 1 else self._as_many(self.example, 2)
        changed = torch.cat([rows[:1].flip(-1), rows[1:]])
        with torch.no_grad():
            before, after = (self.passed(each, last=len(self.weights))[1] for each in (rows, changed))
        return torch.equal(before[1:], after[1:])

    def _run(self, tokens: Tensor, met: Callable[[Place, str, Any, Any], Any]) -> Any:
        with Operations(met):
            return self.run(tokens.clone())

    def passed(self, tokens: Tensor, given: Mapping[int, Tensor] = NONE, last: int | None = None) -> tuple[Any, Tensor]:
        """The output and state number `last` of a forward pass, which ends there if it is given.
        The states at `given` are replaced.
        """
        found = tokens

        def met(place: Place, name: str, inputs: Any, output: Any) -> Any:
            nonlocal found
            k = self._places.get(place)
            if k is None:
                return output
            order = [self._batch, *(a for a in range(output.dim()) if a not in (self._batch, self._width)), self._width]
            turned = output.permute(order)
            if k in given:
                return given[k].reshape(turned.shape).permute([order.index(axis) for axis in range(len(order))])
            if k == last:
                found = turned.reshape(len(turned) // self._copies, -1, turned.shape[-1])
                raise Seen
            return output

        output = None
        with contextlib.suppress(Seen):
            output = self._run(tokens, met)
            if last is not None:
                raise ConfigError(f"{type(self.model).__name__} does not always compute state {last} of its residual stream")
        return output, found

    def blocks(self) -> list[nn.Module]:
        return [self.model] * len(self.weights)

    def structures(self) -> tuple[list[Structure], Tensor]:
        x = self.passed(self.example, last=0)[1]
        self.tokens, self._like = x.shape[-2], torch.zeros_like(x[0])
        whole = self.tensor(self.run(self.example))
        found: list[Structure] = []
        for k, weights in enumerate(self.weights):
            own = self.passed(self.example, last=k)[1]
            output = self.tensor(self.passed(self.example, {0: random_states(x), k: own})[0])
            if whole is None or output is None or not difference(output, whole) <= tolerance(whole.dtype):
                raise ConfigError(f"its output does not depend on state {k} of its residual stream alone")
            field = StreamMap(self, k, weights)
            kind: Any = "mixer" if x.shape[1] > 1 and mixes_tokens(field, own) else "ffn"
            found.append(Structure((Sublayer(field, kind),), (1.0,), {}, None))
        return found, x

    def embed(self, tokens: Tensor) -> Tensor:
        axes = self.example.dim() - 1
        lead = tokens.shape[: tokens.dim() - axes]
        flat = tokens.reshape(-1, *tokens.shape[tokens.dim() - axes :])
        x = self.passed(flat, last=0)[1]
        with torch.no_grad():
            output, expected = (
                self.tensor(each) for each in (self.passed(self.shaped(x), {0: x})[0], self.run(flat))
            )
        if output is None or expected is None or not difference(output, expected) <= tolerance(x.dtype):
            raise ConfigError(
                f"{type(self.model).__name__} reads these inputs beside its residual stream, as for a padding mask or another "
                "context, which is known only for its example: open it with these inputs as example="
            )
        return x.reshape(*lead, *x.shape[1:])

    def outputs(self, x: Tensor) -> Any:
        return self.passed(self.shaped(x), {len(self.weights): x})[0]

    def check(self, depth: Depth) -> None:
        self._check_output(depth, self.example)

    def _first_state(self, tokens: Tensor) -> Tensor | None:
        try:
            with torch.no_grad():
                return self.passed(tokens, last=0)[1]
        except FOREIGN_ERRORS:
            return None
