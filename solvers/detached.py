"""A solve without a graph that is differentiable all the same: its backward pass is somebody's function.

The solve runs under no_grad. What the fields depend on besides the state is found while they are evaluated, so that they may
be any closures, and becomes an input of one autograd node: every parameter gets its gradient where autograd, and a distributed
wrapper that listens there, expects it. What cannot be seen that way, as inside a scripted function, is noticed on the way back
and raises SolveError.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from solvers.errors import ConfigError, SolveError

Function = TypeVar("Function", bound=Callable[..., Any])
Grads = list[Tensor | None]
Captured = dict[int, list[Tensor]]
"""What each segment's maps depend on besides the state, by the segment's place."""


class Capture(TorchFunctionMode):
    """Notes every tensor that a torch function is given, that requires a gradient and that was not made meanwhile.

    Under no_grad nothing computed requires one, so these are the tensors that came from outside: parameters, mostly. A field
    that differentiates something itself makes tensors that do, which are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self._made = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note(args)
        if kwargs:
            self._note(kwargs.values())
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in self.found:
                self._made[tensor] = None
        return result

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                if value.requires_grad and not (self._made and value in self._made) and not is_functorch_wrapped_tensor(value):
                    self.found[id(value)] = value
            elif isinstance(value, (tuple, list)):
                self._note(value)

    def take(self) -> list[Tensor]:
        """What was found since the last call."""
        found, self.found = list(self.found.values()), {}
        return found


class Substitute(TorchFunctionMode):
    """Gives every torch function the aliases of certain tensors in place of these."""

    def __init__(self, aliases: dict[int, Tensor]):
        super().__init__()
        self._aliases = aliases

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._aliases.get(id(value), value)
        if type(value) in (tuple, list):
            return type(value)(self._swap(item) for item in value)
        return {key: self._swap(item) for key, item in value.items()} if isinstance(value, dict) else value


class Backward:
    """One backward pass: gathers the gradients of captured tensors while `pull` takes cotangents through maps.

    A captured tensor that was itself computed is replaced by an alias without history: the pass ends at it, and what it was
    computed from gets its share once, from autograd.
    """

    def __init__(self, captured: Captured, tensors: Sequence[Tensor]):
        self.captured, self.tensors = captured, tensors
        self.gradients: Grads = [None] * len(tensors)
        self._place = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._aliases = {id(t): t.detach().requires_grad_() for t in tensors if not t.is_leaf}
        self._substitute = Substitute(self._aliases) if self._aliases else contextlib.nullcontext()
        self._seen: set[int] = set()

    def pull(self, k: int, function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """y = function(x) in segment k and (dy/dx)' c, with the captured tensors' share added up on the way."""
        y, gradient, parts = self.vjp(k, function, x, cotangent)
        for tensor, part in zip(self.captured[k], parts, strict=True):
            self.add(tensor, part)
        return y, gradient

    def vjp(
        self, k: int, function: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor
    ) -> tuple[Tensor, Tensor, Sequence[Tensor | None]]:
        """y = function(x), (dy/dx)' c, and (dy/dz)' c for each tensor z captured in segment k (None where y ignores it)."""
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


def check_seen(y: Tensor, inputs: Sequence[Tensor], k: int) -> None:
    """Raises SolveError where y depends on a leaf that is none of the inputs: its gradient would silently be missing."""
    known = {id(tensor) for tensor in inputs}
    nodes, met = [y.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in met:
            continue
        met.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise SolveError(
                f"segment {k} depends on a tensor of shape {tuple(leaf.shape)} in a way that cannot be seen from outside (a scripted "
                "or custom function): use gradient='checkpoint'"
            )
        nodes.extend(before for before, _ in node.next_functions)


Pass = Callable[[Backward, Sequence[Tensor], Grads], Tensor]
"""(backward, kept tensors, gradients of the outputs) -> gradient of the initial state."""


def attach(
    outputs: Sequence[Tensor], keep: Sequence[Tensor], x0: Tensor, captured: Captured, backward: Pass
) -> tuple[Tensor, ...]:
    """The outputs of a solve from x0 under no_grad, with `backward` as their derivative.

    `keep` are the tensors that the backward pass needs, the parameters apart. The pass runs under the autocast of the solve. It
    raises SolveError where a parameter was changed in place meanwhile.
    """
    tensors = list({id(tensor): tensor for found in captured.values() for tensor in found}.values())
    if not (x0.requires_grad or tensors):
        return tuple(outputs)
    job = _Job(list(outputs), list(keep), autocast_state(x0.device.type), captured, backward)
    return _Attached.apply(job, x0, *tensors)


class _Job:
    """What travels to the autograd node; the tensors leave it on the way, lest outputs and node hold each other."""

    def __init__(self, outputs: list[Tensor], keep: list[Tensor], autocast: dict[str, Any], captured: Captured, backward: Pass):
        self.outputs, self.keep, self.autocast, self.captured, self.backward = outputs, keep, autocast, captured, backward


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: _Job, x0: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs, keep, job.outputs, job.keep = tuple(job.outputs), job.keep, [], []
        ctx.save_for_backward(*keep)
        ctx.job, ctx.tensors = job, tensors
        ctx.versions = [tensor._version for tensor in tensors]
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        job = ctx.job
        for tensor, version in zip(ctx.tensors, ctx.versions, strict=True):
            if tensor._version != version:
                raise SolveError(
                    f"a tensor of shape {tuple(tensor.shape)} that the solve depends on was changed in place before its gradient was "
                    "taken: take the gradient first"
                )
        state = Backward(job.captured, ctx.tensors)
        with torch.autocast(**job.autocast), torch.no_grad():
            start = job.backward(state, [tensor.detach() for tensor in ctx.saved_tensors], list(gradients))
        return None, start, *state.gradients


def autocast_state(device: str) -> dict[str, Any]:
    """The arguments that make the present autocast again, without its cache: that would keep weights cast without a graph."""
    return {
        "device_type": device,
        "dtype": torch.get_autocast_dtype(device),
        "enabled": torch.is_autocast_enabled(device),
        "cache_enabled": False,
    }


@contextlib.contextmanager
def without_graph(device: torch.device) -> Iterator[Capture]:
    """No gradients, autocast as it is but without its cache, and captured what comes from outside.

    Raises ConfigError where random numbers were drawn: the way back could not draw them again.
    """
    before = _random_state(device)
    with torch.no_grad(), torch.autocast(**autocast_state(device.type)), Capture() as capture:
        yield capture
    if not torch.equal(before, _random_state(device)):
        raise ConfigError(
            "a field draws random numbers (dropout?), which this gradient would have to draw again: use gradient='checkpoint', or "
            "turn them off"
        )


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def untraced(function: Function) -> Function:
    """The function, into which a compiler does not look; what looks for captured tensors cannot be traced.

    `torch.compiler.disable` as a decorator would import the compiler, two seconds, with the package.
    """

    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return (torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function)(*args)

    return cast(Function, wrapper)
