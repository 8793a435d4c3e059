"""The forward passes of a module that is read by the sums of its residual stream: which states they
make, and what they make of others in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ctrans.base.as_found import as_found
from ctrans.dynamics.scheme import whole_graph
from ctrans.interop.block_calls import Seen, tensors_in
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.module_adapter import ModuleAdapter
from ctrans.interop.named_modules import states_around
from ctrans.interop.operations import CallSite, Function, Graph, Operations, replaced
from ctrans.interop.state_axes import (
    StateAxes,
    axes_that_fit,
    channels_of,
    turned_among,
    without_axes,
)
from ctrans.interop.tolerances import same
from ctrans.interop.whole_modules import leaving_out_several
from solvers import ConfigError


class StreamPasses(ModuleAdapter):
    """A module whose passes show the states of its residual stream, and take others.

    - `whole`: its modules that are one operation each, by path
    - `axes`: what the axes of its own states count
    - `weights`: those that each part reads
    """

    whole: dict[nn.Module, str]
    axes: StateAxes
    weights: list[list[nn.Parameter]]
    _graph: Graph
    _numbers: dict[Any, int]
    """By the call that makes it, the number of a state."""
    _sums: dict[Any, int]
    """By the call that makes it, the number of the part whose sum it is."""

    def _find_state_axes(self, shapes: Sequence[Any]) -> None:
        """Finds which axes of its states, of these shapes, count sequences and channels, and puts
        sequences first in the example.
        """
        example = self.example
        width = channels_of(self.model, self._graph, shapes[0])
        refused: ConfigError | None = None
        for self.tokens_first in (False, True):
            if self.tokens_first:
                self.example = example.transpose(0, 1)
            for axes in axes_that_fit(
                shapes, width, len(self.example), self._turned_states(shapes)
            ):
                self.axes = axes
                try:
                    if self._is_alone():
                        return
                except ConfigError as error:
                    if not self.tokens_first:  # otherwise it does not run with its axes turned
                        refused = refused or error
        raise refused or without_axes(shapes, example.shape)

    def _turned_states(self, shapes: Sequence[Any]) -> frozenset[int]:
        """The states, of these shapes, whose first two axes are turned, as seen from the first."""
        if shapes[0][0] == shapes[0][1]:  # a pass of one sequence more shows it
            with contextlib.suppress(*FOREIGN_ERRORS), torch.no_grad():
                graph, _, _ = self._recorded(self._as_many(self.example, len(self.example) + 1))
                numbers = [self.number_in(graph, k) for k in range(len(shapes))]
                shapes = [graph.operations[n].shape for n in numbers]
        return turned_among(shapes)

    @property
    def begins_with_its_input(self) -> bool:
        """Whether its first state is its input as it gets it."""
        first = next(site for site, k in self._numbers.items() if k == 0)
        if first is None:
            return True
        is_made_here = isinstance(first[0], CodeType)
        return is_made_here and Path(first[0].co_filename).parent == Path(__file__).parent

    def _is_alone(self) -> bool:
        """Whether the last state of each sequence but the first is the same for another first
        one.
        """
        if len(self.example) > 1:
            rows = self.example
        else:
            rows = self._as_many(self.example, 2)
        other = next((row for row in rows[1:] if not row.equal(rows[0])), rows[0].flip(-1))
        changed = torch.cat([other[None], rows[1:]])
        last = len(self.weights)
        with torch.no_grad():
            _, before = self.passed(rows, last=last)
            _, after = self.passed(changed, last=last)
        return same(before[1:], after[1:])

    def _run(self, tokens: Tensor, mode: Operations) -> Any:
        with as_found(self.model), whole_graph(), mode:
            return self.run(tokens)

    def states(
        self,
        look: Callable[[int, Tensor], Tensor],
        summed: Callable[[int, Tensor], None] | None = None,
    ) -> Operations:
        """A mode of forward passes in which state k is look(k, x) in place of the module's own x.
        summed(k, y) gets the sum of part k, which a norm may follow.
        """

        def met(site: CallSite, function: Function, inputs: Any, output: Any) -> Any:
            k = self._numbers.get(site)
            if summed is not None and site in self._sums and isinstance(output, Tensor):
                summed(self._sums[site], output)
            if k is not None:
                return replaced(function, inputs, output, partial(look, k))
            if isinstance(output, Tensor):
                return output
            numbers = count()

            def met_part(part: Tensor) -> Any:
                return met((*site, next(numbers)), function, inputs, part)

            return tree_map_only(Tensor, met_part, output)

        return Operations(met, self.whole)

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
                last_state = self.axes.rows(x, k)
                raise Seen
            if k not in states:
                return x
            return self.axes.own_state(states[k], x, k)

        with contextlib.suppress(Seen):
            output = self._run(tokens, self.states(look))
            if last is None:
                return output, last_state
            raise ConfigError(
                f"{type(self.model).__name__} does not always compute state {last} of its residual"
                " stream"
            )
        return None, last_state

    def between(self, first: CallSite, reader: CallSite, index: int, x: Tensor) -> Tensor:
        """What the operation at `reader` reads as that tensor of its arguments, in a pass in which
        the one at `first` returns x.
        """
        result = x

        def met(site: CallSite, function: Function, inputs: Any, output: Any) -> Any:
            nonlocal result
            if site == first:
                return replaced(function, inputs, output, partial(self.axes.own_form_like, x))
            if site == reader:
                result = self.axes.rows_like(tensors_in(inputs)[index], x)
                raise Seen
            return output

        with contextlib.suppress(Seen):
            self._run(self.shaped(x), Operations(met, self.whole))
            raise ConfigError(
                f"{type(self.model).__name__} does not always compute the operations that were"
                " seen for its example"
            )
        return result

    def _recorded(
        self, tokens: Tensor, blocks: Sequence[nn.Module] = ()
    ) -> tuple[Graph, Any, Sequence[int]]:
        """The operations of a pass, its output, and the numbers of the states before and behind
        these blocks.
        """
        with as_found(self.model):
            with leaving_out_several(self.whole):
                self.run(tokens)  # it may keep masks or tables that it makes the first time
            graph = Graph(self.model)
            with states_around(blocks, graph) as around:
                output = self._run(tokens, Operations(graph.met, self.whole, apart=True))
        self._mark_states(graph)
        return graph, output, around

    def _mark_states(self, graph: Graph) -> None:
        """Learned queries that are its first state are no weights from there on."""
        first = next((site for site, k in self._numbers.items() if k == 0), None)
        n = None if first is None else graph.numbers.get(first)
        if n is not None and graph.is_of_weights(n):
            graph.as_state(n)

    def recorded(self) -> tuple[Graph, Any]:
        """The operations of a pass of its example, and its output."""
        graph, output, _ = self._recorded(self.example)
        return graph, output

    def number_in(self, graph: Graph, k: int) -> int:
        """The number of state k in another pass; it may be the input, which no call makes."""
        site = next(site for site, number in self._numbers.items() if number == k)
        return 0 if site is None else graph.numbers[site]

    def walked(self, tokens: Tensor, states: Mapping[int, Tensor]) -> tuple[Any, list[Tensor]]:
        """The output of a pass in which these states are replaced, and each state as it was made
        of the one before it.
        """
        made: list[Tensor] = []

        def look(k: int, x: Tensor) -> Tensor:
            made.append(self.axes.rows(x, k).clone())
            if k not in states:
                return x
            return self.axes.own_state(states[k], x, k)

        output = self._run(tokens, self.states(look))
        if len(made) != len(self.weights) + 1:
            raise ConfigError(
                f"{type(self.model).__name__} computes otherwise than for its example: of the"
                f" {len(self.weights) + 1} states of its residual stream it makes {len(made)}, as"
                " code does that looks at the number of tokens, or that runs a part more than once:"
                " give an example= of this shape"
            )
        return output, made
