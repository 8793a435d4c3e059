"""Makes a solve without a graph differentiable in stretches: each is one autograd node with its own
backward function.

The passes run from the last stretch to the first. After each one autograd adds the parameters'
gradients where they belong and frees them. So the memory holds the gradients of one stretch at a
time.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor

from solvers.capture import (
    Capture,
    Captured,
    Substitute,
    aside,
    autocast_state,
    check_seen,
    check_unchanged,
    saved_by,
)
from solvers.errors import ConfigError, SolveError
from solvers.kept import Kept, Unused
from solvers.run import Run
from solvers.segment import Map
from solvers.solution import Solution
from solvers.transforms import differentiable_once, is_batched

Grads = list[Tensor | None]


class Backward:
    """One backward pass: `pull` takes cotangents through maps and adds up the gradients of captured
    tensors.

    A captured tensor that was computed is replaced by an alias without history. So the pass ends at
    it, and autograd passes its gradient on once.
    """

    def __init__(self, captured: Captured, tensors: Sequence[Tensor], kept: Kept):
        self.captured = captured
        self.tensors = tensors
        self.kept = kept
        self.gradients: Grads = [None] * len(tensors)
        self._index = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._aliases = {
            id(tensor): tensor.detach().requires_grad_() for tensor in tensors if not tensor.is_leaf
        }
        self._substitute: AbstractContextManager[object] = contextlib.nullcontext()
        if self._aliases:
            self._substitute = Substitute(self._aliases)
        self._seen: set[int] = set()
        # by a segment's number: the captured tensors that had no gradient so far, and the first and
        # the last of the evaluations that gave them none
        self._without: dict[int, list[Tensor]] = {k: list(captured[k]) for k in captured}
        self._evaluations: dict[int, list[tuple[Map, Tensor]]] = {}

    def check_used_again(self) -> None:
        """Raises SolveError if a field does not use a captured tensor in the backward pass.

        The field keeps what it computed from it without a graph, so its gradient would be missing.
        """
        for k, tensors in self._without.items():
            if not tensors or k not in self._evaluations:
                continue
            with torch.no_grad(), Capture() as capture:
                for function, x in self._evaluations[k]:
                    function(x)
            for tensor in tensors:
                if id(tensor) not in capture.found:
                    raise SolveError(
                        f"segment {k} used a tensor of shape {tuple(tensor.shape)} in the forward"
                        " pass, and does not use it in the backward pass: its field keeps what it"
                        " computed from it (torch.nn.utils.parametrize.cached?). Compute it each"
                        " time, or before the solve, or use gradient='backprop'"
                    )

    def _note_gradients(
        self, k: int, function: Map, x: Tensor, parts: Sequence[Tensor | None]
    ) -> None:
        if not self._without[k]:
            return
        with_gradient = {
            id(tensor)
            for tensor, part in zip(self.captured[k], parts, strict=True)
            if part is not None
        }
        without = [tensor for tensor in self._without[k] if id(tensor) not in with_gradient]
        self._without[k] = without
        if without:
            self._evaluations[k] = [*self._evaluations.get(k, [])[:1], (function, x.detach())]

    def pull(
        self, k: int, function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """y = function(x) in segment k and (dy/dx)' c. Adds up the gradients of the captured
        tensors.
        """
        y, gradient, parts = self.vjp(k, function, x, cotangent)
        for tensor, part in zip(self.captured[k], parts, strict=True):
            self.add(tensor, part)
        return y, gradient

    def vjp(
        self, k: int, function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """y = function(x), (dy/dx)' c, and (dy/dz)' c for each tensor z captured in segment k (None
        if y does not depend on it).
        """
        unused: AbstractContextManager[object] = contextlib.nullcontext()
        if self.kept and k not in self._seen:
            unused = Unused(self.kept, k)
        with torch.enable_grad(), self._substitute, unused:
            x = x.detach().requires_grad_()
            y = function(x)
        inputs = (x, *(self._aliases.get(id(tensor), tensor) for tensor in self.captured[k]))
        if not y.requires_grad:
            without = [None] * len(self.captured[k])
            self._note_gradients(k, function, x, without)
            return y, torch.zeros_like(x), without
        if k not in self._seen:
            self._seen.add(k)
            check_seen(y, inputs, k)
        gradient, *parts = torch.autograd.grad(y, inputs, cotangent.to(y.dtype), allow_unused=True)
        self._note_gradients(k, function, x, parts)
        if gradient is None:
            gradient = torch.zeros_like(x)
        return y.detach(), gradient, parts

    def add(self, tensor: Tensor, part: Tensor | None) -> None:
        """Adds to the gradient of a captured tensor."""
        if part is None:
            return
        i = self._index[id(tensor)]
        so_far = self.gradients[i]
        if so_far is None:
            self.gradients[i] = part.clone()  # it may be the cotangent
        else:
            so_far.add_(part)


PullThrough = Callable[[Sequence[Tensor], Grads], Grads]
"""(stored tensors, gradients of a node's outputs) -> gradients of its inputs."""
Arrival = tuple[float, int, Tensor | None]
"""Of a state saved inside a stretch: its time, the accepted steps before it, and its gradient."""
Pass = Callable[[Backward, Sequence[Tensor], Sequence[Arrival], Sequence[Tensor]], Sequence[Tensor]]
"""(backward, stored tensors, gradients of the states inside, and of the links after) -> gradients
of the links before.
"""


class Chain:
    """The autograd nodes of a solve, one for each stretch in order, and a last one that returns the
    states.

    `links` are the tensors by which a stretch depends on the previous one; their number is
    constant. In `baton` a pass leaves what the next one needs besides gradients, such as the state.
    The last node puts there what it stored. It always runs first, because every state that the user
    gets comes from it. `run` holds the states that the solve saves. `kept` is what `watched`
    segments found.
    """

    def __init__(self, links: Sequence[Tensor], run: Run):
        self.links = list(links)
        self.baton: list[Sequence[Any]] = [()]
        self.kept = Kept()
        self._run = run
        # differentiable, in place of those saved after the initial one
        self._states: list[Tensor] = []
        # all gradients depend on the first links and the captured tensors
        self._roots = list(links)
        self._autocast = autocast_state(links[0].device.type)

    def add(
        self, links: Sequence[Tensor], stored: Sequence[Tensor], captured: Captured, backward: Pass
    ) -> None:
        """Makes the stretch that ends in `links` a node. They become the chain's links.

        `stored` are the tensors that the pass needs, apart from the parameters. The pass runs under
        the autocast of the solve. It raises SolveError if a parameter was changed in place
        meanwhile.
        """
        inside = self._run.saved[len(self._states) + 1 :]
        at_end = bool(inside) and inside[-1].x is links[0]
        if at_end:
            inside.pop()
        unique: dict[int, Tensor] = {}
        for tensors_of_segment in captured.values():
            for tensor in tensors_of_segment:
                unique[id(tensor)] = tensor
        tensors = list(unique.values())
        count = len(self.links)
        moments = [(saved.time, saved.steps) for saved in inside]  # holds no state

        def pull(stored: Sequence[Tensor], gradients: Grads) -> Grads:
            for tensor, version in zip(tensors, versions, strict=True):
                check_unchanged(tensor, version)
            state = Backward(captured, tensors, self.kept)
            arrivals = [
                (time, steps, gradient)
                for (time, steps), gradient in zip(moments, gradients[:-count], strict=True)
            ]
            # the node after this one, at last that of `end`, gives a gradient to each link
            after = cast(list[Tensor], gradients[-count:])
            before = backward(state, stored, arrivals, after)
            state.check_used_again()
            return [*before, *state.gradients]

        self._roots += tensors
        with aside():  # a version that is read here would be captured for the next stretch
            versions = [tensor._version for tensor in tensors]
            outputs = self._node(
                [*(saved.x for saved in inside), *links], stored, [*self.links, *tensors], pull
            )
        self.links = outputs[-count:]
        self._states += outputs[:-count]
        if at_end:
            self._states.append(self.links[0])

    def end(self, solution: Solution, x0: Tensor, stored: Sequence[Tensor]) -> Solution:
        """The solution with differentiable states; `stored` is the baton of the first pass."""
        baton = self.baton
        count = len(self.links)
        # with "ends" the last state is saved after the last stretch
        if self._run.save == "ends":
            before = self._states
        else:
            before = self._states[:-1]

        def pull(stored: Sequence[Tensor], gradients: Grads) -> Grads:
            baton[0] = stored
            *inside, last = gradients
            # never None: the passes run in order even for the gradient of a state inside
            if last is None:
                last = torch.zeros_like(stored[0])
            second_links = [torch.zeros_like(link) for link in stored[1:count]]
            return [last, *second_links, *inside]

        outputs = self._node(
            [tensor.detach() for tensor in (*before, self.links[0])],
            stored,
            [*self.links, *before],
            pull,
        )
        self._run.saved = []
        return dataclasses.replace(solution, x1=outputs[-1], states=(x0, *outputs))

    def _node(
        self,
        outputs: Sequence[Tensor],
        stored: Sequence[Tensor],
        inputs: Sequence[Tensor],
        pull: PullThrough,
    ) -> list[Tensor]:
        if not any(tensor.requires_grad for tensor in inputs):
            return list(outputs)
        # aliases: autograd marks a node's outputs, and the solve continues without a graph
        with torch.enable_grad():
            aliases = [tensor.detach() for tensor in outputs]
            return list(_Node.apply(aliases, stored, self._autocast, pull, self._roots, *inputs))  # type: ignore[no-untyped-call]  # torch gives it no types


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        outputs: Sequence[Tensor],
        stored: Sequence[Tensor],
        autocast: dict[str, Any],
        pull: PullThrough,
        roots: Sequence[Tensor],
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*stored)
        ctx.autocast = autocast
        ctx.pull = pull
        ctx.roots = roots
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(gradient is not None and is_batched(gradient) for gradient in gradients):
            raise ConfigError(
                "is_grads_batched is for gradients that are taken operation by operation: take one"
                " gradient at a time, or use gradient='backprop'"
            )
        stored = [tensor.detach() for tensor in saved_by(ctx)]
        with torch.autocast(**ctx.autocast), torch.no_grad():
            of_inputs = ctx.pull(stored, list(gradients))
        if torch.is_grad_enabled():
            of_inputs = differentiable_once(ctx.roots, of_inputs)
        # none for outputs, stored, autocast, pull and roots
        return (None, None, None, None, None, *of_inputs)
