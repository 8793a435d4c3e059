"""Modules of a model that act in sequence as one map, and the linear maps inside of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ctrans.base.shapes import Vectors, WeightMatrix
from ctrans.dynamics.fields import Matrix, Role
from ctrans.dynamics.fields.ffn_bounds import Affine
from ctrans.dynamics.fields.scaled_linear import ScaledLinear
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.recorded_calls import first_tensor, watched
from solvers import ConfigError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@runtime_checkable
class TransposedLinear(Protocol):
    """A linear map whose weight is (in, out): GPT-2's `Conv1D`."""

    nx: int
    nf: int


def same_rows(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same rows in the same order, however their other axes are
    joined: sequences may be groups of tokens, one after the other. With one sequence its order
    among others is not known.
    """
    if first.shape != second.shape and len(second) < 2:
        return False
    if first.shape[-1:] != second.shape[-1:] or first.numel() != second.numel():
        return False
    return torch.equal(first.flatten(), second.flatten())


class ModuleChain(nn.Module):
    """f(x) = stage_k(.. stage_1(x, **context)). A stage that returns several tensors gives its
    first (attention with its weights).

    After `find_output_projection`, `output_path` is the path of the last linear map, f(x) =
    output_projection(pre_projection(x)), or None. If a scale by channel follows (LayerScale), f(x)
    = s * (W features(x) + b): `scale_path` is the path of s, and `output_projection` is a
    `ScaledLinear`.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        output_path: str | None = None,
        scale_path: str | None = None,
    ):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.output_path = output_path
        self.scale_path = scale_path

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        first, *later = self.stages
        y: Tensor = first_tensor(first(x, **context))
        for stage in later:
            y = first_tensor(stage(y))
        # experts may return the tokens of all sequences along one axis
        if y.numel() == x.numel() and y.dim() == 2:
            return y.view(x.shape)
        return y

    @property
    def output_projection(self) -> nn.Linear | ScaledLinear:
        """The last linear map, which shares the model's weight. Raises ConfigError if f does not
        end in one.
        """
        module: Any = self.get_submodule(self._require_output_path())
        linear: nn.Linear
        if isinstance(module, TransposedLinear):
            linear = _as_linear(module)
        else:
            linear = module
        if self.scale_path is None:
            return linear
        return ScaledLinear(linear, numbers_at(self, self.scale_path))

    def pre_projection(self, x: Tensor, **context: Any) -> Tensor:
        """The input of the last linear map. Raises ConfigError as `output_projection` does."""
        path = self._require_output_path()
        with watched({path: self.get_submodule(path)}) as seen:
            self(x, **context)
        features: Tensor = seen[-1].x
        return features.reshape(*x.shape[:-1], features.shape[-1])

    def find_output_projection(self, x: Tensor, **context: Any) -> None:
        """Runs f once, without dropout, to find the linear map that gives its output, and a scale
        that follows it. One sequence does not show in which order the map sees several, so that two
        are tried where f takes them.
        """
        self._find_output_path(x, **context)
        if self.output_path is None or x.dim() != 3 or len(x) > 1:
            return
        try:
            last = {self.output_path: self.get_submodule(self.output_path)}
            with watched(last, copies=True) as seen:
                output = self(torch.cat([x, x.flip(-1)]), **context)
        except FOREIGN_ERRORS:
            return
        y = seen[-1].y
        if self.scale_path is not None:
            y = numbers_at(self, self.scale_path).to(y) * y
        if not same_rows(y, output):
            self.output_path = None
            self.scale_path = None

    def _find_output_path(self, x: Tensor, **context: Any) -> None:
        # copies, since more may be added to the map's output in its place
        with watched(self.linear_maps(), copies=True) as seen:
            output = self(x, **context)
        if not seen:
            return
        path = seen[-1].path
        y = seen[-1].y
        if same_rows(y, output):
            self.output_path = path
        elif y.shape == output.shape:
            shapes = ((), (1,), y.shape[-1:])  # one number, or one for each channel
            for name, scale in (*self.named_parameters(), *self.named_buffers()):
                is_row = scale.numel() == y.shape[-1] == scale.shape[-1:].numel()  # (1, 1, width)
                if not scale.is_floating_point() or not (scale.shape in shapes or is_row):
                    continue
                if torch.equal(scale.to(y) * y, output):
                    self.output_path = path
                    self.scale_path = name
                    return

    @property
    def ending(self) -> str:
        """What the chain has in place of one linear map at its end, in words."""
        for stage in self.stages:
            if hasattr(stage, "ending"):
                return str(stage.ending)
        return "does not end in one linear map"

    def linear_maps(self) -> dict[str, nn.Module]:
        """All linear maps inside, by path."""
        return {path: part for path, part in self.named_modules() if is_linear(part)}

    def _require_output_path(self) -> str:
        if self.output_path is None:
            names = " then ".join(type(stage).__name__ for stage in self.stages)
            raise ConfigError(f"{names} {self._why_no_output_path()}")
        return self.output_path

    def _why_no_output_path(self) -> str:
        """What the chain has in place of a linear map at its end, in words."""
        for part in self.modules():
            is_attention = isinstance(part, nn.MultiheadAttention)
            if is_attention and (part.add_zero_attn or part.bias_k is not None):
                return (
                    "adds a key of its own to those of the tokens (add_zero_attn or add_bias_kv),"
                    " so its rows are not read"
                )
        last = None
        for part in self.modules():
            if next(part.parameters(recurse=False), None) is not None:
                last = part
        if isinstance(last, CONVOLUTIONS) and not is_linear(last):
            kind = type(last).__name__
            return f"ends in a convolution ({kind}), whose weight is not read as a linear map"
        return (
            "does not end in one linear map (experts, a convolution, or a gate or factor after"
            " it), so it has no output projection"
        )


class MapInModel(ModuleChain):
    """f(x): a map of a model for any leading dimensions of x. The model's modules get states
    (batch, tokens, width).

    `why_not` says why the map exposes nothing more, or is "".
    """

    def __init__(self, chain: ModuleChain, why_not: str = ""):
        super().__init__(list(chain.stages), chain.output_path, chain.scale_path)
        self.why_not = why_not

    def forward(self, x: Vectors, **context: Any) -> Vectors:
        states = x.reshape(-1, *x.shape[-2:])
        return super().forward(states, **context).reshape(x.shape)

    def pre_projection(self, x: Vectors, **context: Any) -> Float[Tensor, "*batch features"]:
        """The input of the last linear map. Raises ConfigError as `output_projection` does."""
        return super().pre_projection(x, **context).reshape(*x.shape[:-1], -1)


BYTES = (torch.int8, torch.uint8)
"""Dtypes of quantised weights."""


def has_matrix(module: nn.Module) -> bool:
    """Whether the module has a matrix of its own: a parameter, parametrised or not, or a buffer of
    quantised weights.
    """
    if isinstance(module, ParametrizationList):  # its matrix is that of the module around it
        return False
    for buffer in module.buffers(recurse=False):
        if buffer.dim() > 1 and buffer.dtype in BYTES:
            return True
    return any(weight.dim() > 1 for weight in module.parameters(recurse=is_leaf(module)))


def is_leaf(module: nn.Module) -> bool:
    """Whether the module has no submodules, except those that make its weights."""
    return all(name == "parametrizations" for name, _ in module.named_children())


def numbers_at(module: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at that path, as one number or a vector of them."""
    owner, _, name = path.rpartition(".")
    numbers: Tensor = getattr(module.get_submodule(owner), name)
    if numbers.dim() > 1:
        return numbers.flatten()
    return numbers


def is_linear(module: nn.Module) -> bool:
    """Whether the module computes W x + b with its own weight."""
    return isinstance(module, (nn.Linear, TransposedLinear))


@dataclasses.dataclass(frozen=True)
class Projection:
    """W x + b, where W is the rows `start` .. `stop` of the linear map at `path`: all of them, or a
    part of a shared map.

    If the map has `parts` equal parts (such as queries, keys and values for each head), W has these
    rows of each part, one part below the other. If a scale s at the path `scale_path` follows the
    map, they are s * W and s * b. A Projection holds only paths; `chain` is the map that has the
    weights.
    """

    path: str
    start: int
    stop: int
    parts: int = 1
    scale_path: str | None = None

    @property
    def rows(self) -> int:
        """The number of rows of W."""
        return self.parts * (self.stop - self.start)

    def weight(self, chain: nn.Module) -> WeightMatrix:
        """W: a view of the module's weight, or a differentiable copy if it has several parts or a
        scale.
        """
        module: Any = chain.get_submodule(self.path)
        weight: Tensor = module.weight
        if isinstance(module, TransposedLinear):
            weight = weight.T
        rows = self._rows_of(weight)
        if self.scale_path is None:
            return rows
        return numbers_at(chain, self.scale_path).to(rows).reshape(-1, 1) * rows

    def matrices(self, chain: nn.Module, role: Role) -> Iterator[Matrix]:
        """W with its role, as a map exposes it."""
        weight = self.weight(chain)
        is_a_copy = self.parts > 1 or self.scale_path is not None
        if not is_a_copy:
            yield Matrix(weight, role, None)
            return
        module: Any = chain.get_submodule(self.path)
        yield Matrix(weight, role, module.weight)

    def bias(self, chain: nn.Module) -> Float[Tensor, " out"] | None:
        """b: a view, or a differentiable copy if it has several parts or a scale; None if the map
        has no bias.
        """
        bias: Tensor | None = getattr(chain.get_submodule(self.path), "bias", None)
        if bias is None:
            return None
        rows = self._rows_of(bias)
        if self.scale_path is None:
            return rows
        return numbers_at(chain, self.scale_path).to(rows) * rows

    def affine(self, chain: nn.Module) -> Affine:
        """W x + b."""
        return Affine(self.weight(chain), self.bias(chain))

    def _rows_of(self, weight: Tensor) -> Tensor:
        if self.parts == 1:
            return weight[self.start : self.stop]
        parts: Tensor = weight.unflatten(0, (self.parts, -1))[:, self.start : self.stop]
        return parts.flatten(0, 1)

    def cut(self, sizes: Sequence[int], parts: int = 1) -> list[Projection]:
        """The rows of the map, cut into these sizes; or the rows of each of `parts` equal parts,
        cut into these sizes.
        """
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [
            Projection(self.path, end - size, end, parts)
            for size, end in zip(sizes, ends, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class JoinedProjections:
    """W x + b, where W has the matrices of several projections, one below the other: those of heads
    with linear maps of their own. As `Projection`, but for `weight` and `bias`, which are copies.
    """

    parts: tuple[Projection, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    def weight(self, chain: nn.Module) -> WeightMatrix:
        return torch.cat([part.weight(chain) for part in self.parts])

    def matrices(self, chain: nn.Module, role: Role) -> Iterator[Matrix]:
        for part in self.parts:
            yield from part.matrices(chain, role)

    def bias(self, chain: nn.Module) -> Float[Tensor, " out"] | None:
        biases = [part.bias(chain) for part in self.parts]
        known = [bias for bias in biases if bias is not None]
        if len(known) < len(biases):
            return None
        return torch.cat(known)


def _as_linear(module: Any) -> nn.Linear:
    """The same map as an `nn.Linear`. Its weight and bias are views, so changes of one change
    both.
    """
    linear = nn.Linear(module.nx, module.nf, bias=False, device="meta")
    linear.weight = nn.Parameter(
        module.weight.detach().T, requires_grad=module.weight.requires_grad
    )
    linear.bias = nn.Parameter(module.bias.detach(), requires_grad=module.bias.requires_grad)
    return linear
