"""A solve without a graph made differentiable in stretches: each is one autograd node, whose
backward pass is somebody's function.

Stretch by stretch, from the last to the first, the parameters' gradients go to autograd, which adds
them up where they belong and frees them; so no more than one stretch's gradients are held at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from solvers.capture import Captured, Substitute, autocast_state, check_seen
from solvers.errors import SolveError
from solvers.run import Run, Saved
from solvers.transforms import differentiable_once

Grads = list[Tensor | None]


class Backward:
    """One backward pass: gathers the gradients of captured tensors while `pull` takes cotangents
    through maps.

    A captured tensor that was itself computed is replaced by an alias without history: the pass
    ends at it, and what it was computed from gets its share once, from autograd.
    """

    def __init__(self, captured: Captured, tensors: Sequence[Tensor]):
        self.captured, self.tensors = captured, tensors
        self.gradients: Grads = [None] * len(tensors)
        self._place = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._aliases = {id(t): t.detach().requires_grad_() for t in tensors if not t.is_leaf}
        self._substitute = Substitute(self._aliases) if self._aliases else contextlib.nullcontext()
        self._seen: set[int] = set()

    def pull(self, k: int, function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """y = function(x) in segment k and (dy/dx)' c, with the captured tensors' share added up on
        the way.
        """
        y, gradient, parts = self.vjp(k, function, x, cotangent)
        for tensor, part in zip(self.captured[k], parts, strict=True):
            self.add(tensor, part)
        return y, gradient

    def vjp(
        self, k: int, function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """y = function(x), (dy/dx)' c, and (dy/dz)' c for each tensor z captured in segment k (None
        where y ignores it).
        """
        with torch.enable_grad(), self._substitute:
            x = x.detach().requires_grad_()
            y = function(x)
        inputs = (x, *(self._aliases.get(id(tensor), tensor) for tensor in self.captured[k]))
        if not y.requires_grad:
            return y, torch.zeros_like(x), [None] * len(self.captured[k])
        if k not in self._seen:
            self._seen.add(k)
            check_seen(y, inputs, k)
        gradient, *parts = torch.autograd.grad(y, inputs, cotangent.to(y.dtype), allow_unused=True)
        return y.detach(), torch.zeros_like(x) if gradient is None else gradient, parts

    def add(self, tensor: Tensor, part: Tensor | None) -> None:
        """Adds to the gradient of a captured tensor."""
        if part is not None:
            place = self._place[id(tensor)]
            so_far = self.gradients[place]
            if so_far is None:
                self.gradients[place] = part.clone()  # it may be the cotangent itself
            else:
                so_far.add_(part)


PullThrough = Callable[[Sequence[Tensor], Grads], Grads]
"""(kept tensors, gradients of a node's outputs) -> gradients of its inputs."""
Pass = Callable[[Backward, Sequence[Tensor], Grads, Sequence[Tensor]], Sequence[Tensor]]
"""(backward, kept tensors, gradients of the states inside, and of the links after) -> gradients of
the links before.
"""


class Found:
    """The states that a solve without a graph saves, exchanged for differentiable ones as its
    stretches are done.
    """

    def __init__(self, run: Run):
        self._run = run
        self._states: list[Tensor] = []
        self._at_end: list[bool] = []

    @property
    def count(self) -> int:
        """How many are exchanged. The initial state is none of them."""
        return len(self._states)

    def take(self, x: Tensor) -> list[Saved]:
        """The states saved since, inside the stretch that ends in x."""
        new = self._run.saved[self.count + 1 :]
        self._at_end = [saved.x is x for saved in new]
        return [saved for saved in new if saved.x is not x]

    def put(self, inside: Sequence[Tensor], end: Tensor) -> None:
        """What stands for the states last taken, and for those that are the stretch's end."""
        rest = iter(inside)
        self._states += [end if at_end else next(rest) for at_end in self._at_end]

    def all(self, last: Tensor) -> list[Tensor]:
        """The states after the initial one; the last one ends the solve."""
        # with "ends" it is saved when everything is done
        return [*(self._states if self._run.save == "ends" else self._states[:-1]), last]


class Chain:
    """The nodes of a solve, in the order of its stretches, with a last one that hands out the
    states.

    `links` are the tensors, the same number throughout, by which a stretch depends on the one
    before. What the passes hand on besides gradients, such as the state they go back from, they
    leave in `baton`; the last node puts there what it kept. Since every state that a user sees
    comes from it, it always runs first and every pass finds the baton.
    """

    def __init__(self, links: Sequence[Tensor]):
        self.links = list(links)
        self.baton: list[Sequence[Any]] = [()]
        self._roots = list(links)  # what all gradients depend on: the first links, and what is captured
        self._autocast = autocast_state(links[0].device.type)

    def add(
        self, inside: Sequence[Tensor], links: Sequence[Tensor], keep: Sequence[Tensor], captured: Captured, backward: Pass
    ) -> list[Tensor]:
        """The states inside a stretch, differentiable; its `links` become the chain's.

        `keep` are the tensors that the pass needs, the parameters apart. It runs under the autocast
        of the solve. It raises SolveError where a parameter was changed in place meanwhile.
        """
        tensors = list({id(tensor): tensor for found in captured.values() for tensor in found}.values())
        count = len(self.links)

        def pull(kept: Sequence[Tensor], gradients: Grads) -> Grads:
            for tensor, version in zip(tensors, versions, strict=True):
                if tensor._version != version:
                    raise SolveError(
                        f"a tensor of shape {tuple(tensor.shape)} that the solve depends on was changed in place before its gradient "
                        "was taken: take the gradient first"
                    )
            state = Backward(captured, tensors)
            after = [torch.zeros(shape, dtype=dtype, device=device) if g is None else g for g in gradients[-count:]]
            return [*backward(state, kept, gradients[:-count], after), *state.gradients]

        self._roots += tensors
        versions = [tensor._version for tensor in tensors]
        shape, dtype, device = links[0].shape, links[0].dtype, links[0].device
        outputs = self._node([*inside, *links], keep, [*self.links, *tensors], pull)
        self.links = outputs[-count:]
        return outputs[:-count]

    def end(self, states: Sequence[Tensor], keep: Sequence[Tensor]) -> list[Tensor]:
        """The states as the user gets them, the last of them the first link; `keep` is the baton of
        the first pass.
        """
        baton, links = self.baton, len(self.links)

        def pull(kept: Sequence[Tensor], gradients: Grads) -> Grads:
            baton[0] = kept
            *before, last = gradients
            # never None: the passes run in turn even for a state in the middle
            return [torch.zeros_like(kept[0]) if last is None else last, *map(torch.zeros_like, kept[1:links]), *before]

        return self._node([tensor.detach() for tensor in states], keep, [*self.links, *states[:-1]], pull)

    def _node(
        self, outputs: Sequence[Tensor], keep: Sequence[Tensor], inputs: Sequence[Tensor], pull: PullThrough
    ) -> list[Tensor]:
        if not any(tensor.requires_grad for tensor in inputs):
            return list(outputs)
        # aliases, since autograd marks what a node gives out, and the solve goes on without a graph
        with torch.enable_grad():
            job = _Job([tensor.detach() for tensor in outputs], list(keep), self._autocast, pull, self._roots)
            return list(cast(tuple[Tensor, ...], _Node.apply(job, *inputs)))  # type: ignore[no-untyped-call]  # torch gives it no types


class _Job:
    """What travels to the autograd node; the tensors leave it on the way, lest outputs and node
    hold each other.
    """

    def __init__(
        self, outputs: list[Tensor], keep: list[Tensor], autocast: dict[str, Any], pull: PullThrough, roots: Sequence[Tensor]
    ):
        self.outputs, self.keep, self.autocast, self.pull, self.roots = outputs, keep, autocast, pull, roots


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs, keep, job.outputs, job.keep = tuple(job.outputs), job.keep, [], []
        ctx.save_for_backward(*keep)
        ctx.job = job
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = [tensor.detach() for tensor in ctx.saved_tensors]
        with torch.autocast(**ctx.job.autocast), torch.no_grad():
            found = ctx.job.pull(kept, list(gradients))
        return None, *(differentiable_once(ctx.job.roots, found) if torch.is_grad_enabled() else found)
