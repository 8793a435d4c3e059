"""Any module whose forward pass is a residual stream, x_{k+1} = x_k + f_k(x_k), read from the
operations of one pass. It need not have modules for its blocks, attention, FFN or norms.

Where f_k is no known part, it is the module itself: it runs on its example, with x in place of its
own k-th state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks

from ctrans.base.as_found import as_found
from ctrans.base.printable import one_line
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.block_calls import tensors_in
from ctrans.interop.block_run import mixes_tokens
from ctrans.interop.block_structure import MIX, Structure
from ctrans.interop.example_inputs import rows_chosen_by
from ctrans.interop.find_blocks import blocks_named
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.graph_parts import MIXES, PartsReader, Samples, check_step, structures_of
from ctrans.interop.model_adapter import OUTPUTS, REMEMBERED, ModelAdapter, name_in
from ctrans.interop.named_modules import (
    check_head,
    check_names,
    first_state,
    last_state,
    steps_of_blocks,
)
from ctrans.interop.operations import Graph
from ctrans.interop.probe_weights import random_states
from ctrans.interop.replay import NotReplayedError
from ctrans.interop.residual_stream import FEWEST, StreamPart, notes_of, steps_of_the_stream
from ctrans.interop.scripted import why_scripted
from ctrans.interop.stream_map import StreamMap
from ctrans.interop.stream_passes import StreamPasses
from ctrans.interop.tolerances import coarsest, has_pull, same_where_finite
from ctrans.interop.whole_modules import whole_modules
from ctrans.measure.attention.attention_calls import unseen
from solvers import ConfigError

WITHOUT_DERIVATIVES = "its forward turns derivatives off, as by torch.no_grad: it has no costates"


class StreamAdapter(StreamPasses):
    """A module around the states of its residual stream. `because` says why it is read so.
    Errors as `ModuleAdapter`.
    """

    def _find(self) -> None:
        self._numbers = {}
        self.whole = whole_modules(self.model)
        blocks: Sequence[nn.Module] = ()
        if self.anatomy.blocks is not None:
            blocks = blocks_named(self.model, self.anatomy.blocks)
        with torch.no_grad():
            graph, output, around = self._recorded(self.example, blocks)
        main = self.tensor(output)
        if main is None:
            raise ConfigError(
                "none of its outputs is a tensor: wrap it in a module that returns one"
            )
        self._graph = graph
        self._graphs: dict[tuple[Any, ...], Graph] = {}
        self._read: list[tuple[Sublayer, float]] | None = None
        self._tried: set[tuple[Any, ...]] = set()
        sink = graph.number(main)
        self._reader = PartsReader(self, graph)
        if blocks:
            steps = steps_of_blocks(self.anatomy.blocks, graph, around, self._reader.is_norm)
        else:
            steps = steps_of_the_stream(graph, sink, self._reader.is_norm)
        if len(steps) < FEWEST:
            raise ConfigError(
                "no sums x + f(x) of its first argument follow one another up to its output, as"
                " where several streams are mixed. If those of one list of blocks do, name it:"
                " blocks="
            )
        self._keep(steps)
        self._find_state_axes([graph.operations[n].shape for n in self._states])
        self._find_output_axes()
        if not blocks:
            self._keep(self._steps_of_the_users(output))
        first, last = self._states[0], self._states[-1]
        beside_the_stream = graph.after(1, last) | graph.after(first, last)
        self.apart = {
            i
            for i, x in enumerate(tensors_in(output))
            if x is not main and graph.number(x) in beside_the_stream
        }
        self.because = ""
        notes = [*notes_of(graph, sink, self.steps), why_scripted(self.model)]
        if isinstance(output, Mapping) and name_in(output) not in OUTPUTS and len(output) > 1:
            notes.append(f"of its outputs, {name_in(output)!r} is looked at")
        self.notes = tuple(filter(None, notes))

    def _steps_of_the_users(self, output: Any) -> Sequence[StreamPart]:
        """Its parts between the state that the user's `embed` gives and the one from which `head`
        makes the output.
        """
        if self.own_embed is None and self.own_head is None:
            return self.steps
        with as_found(self.model), torch.no_grad():
            _, states = self.walked(self.example, {})
            first = first_state(states, self.own_embed, self.example)
            last = last_state(states, self.own_head, self.tensor, self.tensor(output))
        return self.steps[first:last]

    def _keep(self, steps: Sequence[StreamPart]) -> None:
        """Makes these its parts."""
        graph = self._graph
        self.steps = list(steps)
        self._states = [steps[0].first, *(step.last for step in steps)]
        self._numbers = {graph.operations[n].site: k for k, n in enumerate(self._states)}
        sums = ((k, step.sum) for k, step in enumerate(steps) if step.sum is not None)
        self._sums = {graph.operations[each.y].site: k for k, each in sums}
        self.weights = [graph.weights(step.first, step.last) for step in steps]
        self._mark_states(graph)

    def stacked_vectors(self) -> set[int]:
        paths = self._graph.stacked_vectors()
        return {id(self.model.get_parameter(path)) for path in paths if path}

    def blocks(self) -> list[nn.Module]:
        return self._blocks

    def block_context(self, block: int, x: Tensor) -> dict[str, Any]:
        return {}

    def _vocabulary(self) -> int:
        return rows_chosen_by(self.example, self._graph) or super()._vocabulary()

    @property
    def sublayers(self) -> list[Sublayer]:
        """Its parts, as they were read."""
        assert self._read is not None, "it has been opened"
        return [sublayer for sublayer, _ in self._read]

    def forget(self) -> None:
        self._graphs.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAdapter:
        adapter = super().__deepcopy__(memo)
        if adapter is not self and isinstance(adapter, StreamAdapter):
            memo[id(self)] = adapter  # its parts hold it
            paths = self.whole.values()
            adapter.whole = {adapter.model.get_submodule(path): path for path in paths}
            adapter._graphs = {}
            adapter._read = copy.deepcopy(self._read, memo)
        return adapter

    def graph_for(self, x: Tensor) -> Graph:
        """The operations of a pass whose states have the shape of x."""
        shape = tuple(x.shape[-3:-1])
        # changed weights may change what maps read beside their state
        key = (shape, x.dtype, x.device, self.versions(), self.padding)
        if key in self._graphs:
            return self._graphs[key]
        like = torch.zeros(*shape, x.shape[-1], dtype=x.dtype, device=x.device)
        with unseen(), torch.no_grad():
            graph, _, _ = self._recorded(self.shaped(like))
            if len(self._graphs) == REMEMBERED:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = graph
            try:
                self._check_at(like)  # which may need graphs of other shapes
            except ConfigError:
                self._graphs.pop(key, None)  # or a second call would use it
                raise
        return graph

    def _check_at(self, like: Tensor) -> None:
        """Raises ConfigError unless the parts compute what the module does for states of that
        shape, which may need other operations than the example: a loop over tokens does.
        """
        shape = like.shape[:-1]
        key = (shape, self.padding)
        if self._read is None or key in self._tried:
            return
        self._tried.add(key)
        with torch.no_grad():
            _, states = self.walked(self.shaped(like), {})
            others = {k: random_states(state) for k, state in enumerate(states[:-1])}
            _, made = self.walked(self.shaped(like), others)
            try:
                for k, (sublayer, length) in enumerate(self._read):
                    check_step(sublayer, length, ((others[k], made[k + 1]),))
            except NotReplayedError as error:
                self._tried.discard(key)
                raise ConfigError(
                    f"{type(self.model).__name__} computes for {shape[0]} sequences of {shape[1]}"
                    " tokens otherwise than for its example, as with a loop over tokens, a number"
                    " that depends on their length, or weights that have changed since it was"
                    " opened: open it again, with inputs of this shape as example="
                ) from error

    def structures(self) -> tuple[list[Structure], Tensor]:
        with torch.no_grad():
            _, states = self.walked(self.example, {})
            first = states[0]
            self.tokens = first.shape[-2]
            self._like = torch.zeros_like(first[0])
            # other states in place of each but the last: what a part makes of its state shows
            others = {k: random_states(state) for k, state in enumerate(states[:-1])}
            output, made = self.walked(self.example, {**others, len(others): states[-1]})
            if self.own_head is None:
                self._check_output_is(output, self.example)
            else:
                check_head(self.own_head, self._outputs, self.tensor, states[-1])
            parts = [
                self._part(k, ((states[k], states[k + 1]), (others[k], made[k + 1])))
                for k in range(len(others))
            ]
            parts = self._with_its_derivatives(parts, others)
        self._read = parts
        check_names(self.model, self.anatomy, self._graph, self.sublayers)
        structures = structures_of(parts)
        self._blocks = [self.model] * len(structures)
        return structures, first

    def _with_its_derivatives(
        self, parts: list[tuple[Sublayer, float]], states: Mapping[int, Tensor]
    ) -> list[tuple[Sublayer, float]]:
        """The parts, with the module itself in place of those whose derivatives are not the
        module's, as where it computes without gradients or has gradients of its own.
        """
        leaves = {k: state.clone().requires_grad_() for k, state in states.items()}
        try:
            # checkpoints compute again without the states that are put in their place
            with torch.enable_grad(), disable_saved_tensors_hooks("checkpoints"):
                _, made = self.walked(self.example, leaves)
                pulls = {k: random_states(made[k + 1]) for k in leaves}
                total = torch.stack([(made[k + 1] * pulls[k]).sum() for k in leaves]).sum()
                if not total.requires_grad:
                    self.notes = (*self.notes, WITHOUT_DERIVATIVES)
                own = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        except FOREIGN_ERRORS:
            return parts  # it has no derivatives, which the analyses say, or has checkpoints
        checked = []
        for k, (sublayer, length) in enumerate(parts):
            step = partial(sublayer.step, dt=length)
            dtype = coarsest(sublayer.parameters())
            if sublayer.kind != "part" and not has_pull(step, states[k], pulls[k], own[k], dtype):
                reason = "its code changes the derivatives, which its operations alone do not show"
                sublayer, length = self._whole_part(k, reason, states[k]), 1.0
            checked.append((sublayer, length))
        return checked

    def _whole_part(self, k: int, reason: str, state: Tensor) -> Sublayer:
        """The k-th part as the module itself, from state to state."""
        field = StreamMap(self, k, self.weights[k], f"{reason}{self.because}")
        field.label = MIX if reason in MIXES else field.label
        field.mixes_tokens = self.tokens > 1 and mixes_tokens(field, state)
        return Sublayer(field, "part")

    def _part(self, k: int, samples: Samples) -> tuple[Sublayer, float]:
        """The k-th part and its length in depth-time; the map from state to state if its operations
        are not read. The samples are states and what the module makes of them.
        """
        try:
            sublayer, length = self._reader.sublayer(self.steps[k], samples[0][0])
            check_step(sublayer, length, samples)
            return sublayer, length
        except FOREIGN_ERRORS as error:
            reason = one_line(error)
        sublayer = self._whole_part(k, reason, samples[0][0])
        check_step(sublayer, 1.0, samples)
        return sublayer, 1.0

    def _check_same(self, tokens: Tensor, states: Mapping[int, Tensor]) -> None:
        """Raises ConfigError unless the example with these states has the output of the tokens."""
        with torch.no_grad():
            output, _ = self.passed(self.shaped(states[0]), states)
            self._check_output_is(output, tokens)

    def _check_output_is(self, output: Any, tokens: Tensor) -> None:
        """Raises ConfigError unless that is the module's output for the tokens."""
        computed = self.tensor(output)
        expected = self.tensor(self.run(tokens))
        agree = (
            computed is not None and expected is not None and same_where_finite(computed, expected)
        )
        if agree:
            return
        why = (
            "does not see these inputs through the states of its residual stream alone: a padding"
            " mask, an earlier state that is added, or another context is known only for its"
            " example, so open it with these inputs as example="
        )
        if self.is_opening:
            why = (
                "reads its input, or an earlier state, again behind the last state of its residual"
                " stream: give a module that ends with the stream"
            )
        raise ConfigError(f"{type(self.model).__name__} {why}")

    def _embedded(self, tokens: Tensor) -> Tensor:
        x = self._start(tokens)
        self._check_same(tokens, {0: x})
        return x

    def _outputs(self, x: Tensor) -> Any:
        output, _ = self.passed(self.shaped(x), {len(self.weights): x})
        return output

    def _start(self, tokens: Tensor) -> Tensor:
        return self.passed(tokens, last=0)[1]
