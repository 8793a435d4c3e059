"""Modules of a model that act one after the other as one map, and the linear maps inside of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ctrans.fields import Matrix, Role
from ctrans.fields.scaled_linear import ScaledLinear
from ctrans.interop.recorded_calls import first_tensor, watched
from solvers import ConfigError


@runtime_checkable
class TransposedLinear(Protocol):
    """A linear map that keeps its weight as (in, out): GPT-2's `Conv1D`."""

    nx: int
    nf: int


class ModuleChain(nn.Module):
    """f(x) = stage_k(.. stage_1(x, **context)), the first output of stages that return several
    (attention with its weights).

    Once `find_last` has seen it act, `ending` is the path of its last linear map, f(x) =
    output_projection(pre_projection(x)), or None. Where a scale by channel stands behind that
    (LayerScale), f(x) = s * (W features(x) + b), `behind` is the path of s, and `output_projection`
    is a `ScaledLinear`.
    """

    def __init__(self, stages: Sequence[nn.Module], ending: str | None = None, behind: str | None = None):
        super().__init__()
        self.stages = nn.ModuleList(stages)
        self.ending, self.behind = ending, behind

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        first, *others = self.stages
        y: Tensor = first_tensor(first(x, **context))
        for stage in others:
            y = first_tensor(stage(y))
        # experts may return their tokens in a row
        return y.view(x.shape) if y.numel() == x.numel() and y.dim() == 2 else y

    @property
    def output_projection(self) -> nn.Linear | ScaledLinear:
        """The linear map that acts last, sharing the model's weight. Raises ConfigError where
        something else does.
        """
        linear: Any = self.get_submodule(self._ending())
        linear = _as_linear(linear) if isinstance(linear, TransposedLinear) else linear
        return linear if self.behind is None else ScaledLinear(linear, numbers_at(self, self.behind))

    def pre_projection(self, x: Tensor, **context: Any) -> Tensor:
        """What the last linear map is applied to. Raises ConfigError as `last` does."""
        with watched({self._ending(): self.get_submodule(self._ending())}) as seen:
            self(x, **context)
        return seen[-1].x

    def find_last(self, x: Tensor, **context: Any) -> None:
        """Runs f once, without dropout, to see which linear map gives its output, and which scale
        stands behind it.
        """
        with watched(self.linear_maps()) as seen:
            output = self(x, **context)
        if not seen:
            return
        path, y = seen[-1].path, seen[-1].y
        if torch.equal(y, output):
            self.ending = path
        elif y.shape == output.shape:
            self.behind = next((name for name, s in self._scales(y.shape[-1]) if torch.equal(s.to(y) * y, output)), None)
            self.ending = None if self.behind is None else path

    def _scales(self, width: int) -> Iterator[tuple[str, Tensor]]:
        """What may stand behind its last linear map: numbers, one for all channels or one for each."""
        for name, value in (*self.named_parameters(), *self.named_buffers()):
            if value.is_floating_point() and value.shape in ((), (1,), (width,)):
                yield name, value

    def linear_maps(self) -> dict[str, nn.Module]:
        """Every linear map inside, by its path."""
        return {path: part for path, part in self.named_modules() if is_linear(part)}

    def _ending(self) -> str:
        if self.ending is None:
            names = " then ".join(type(stage).__name__ for stage in self.stages)
            raise ConfigError(
                f"{names} does not end in one linear map, as experts and gates after it do not: it has no last weights"
            )
        return self.ending


BYTES = (torch.int8, torch.uint8)
"""As what quantised weights are kept."""


def has_matrix(module: nn.Module) -> bool:
    """Whether it has a matrix of its own: a parameter, or one that is kept as bytes in a buffer."""
    kept = any(buffer.dim() > 1 and buffer.dtype in BYTES for buffer in module.buffers(recurse=False))
    return kept or any(weight.dim() > 1 for weight in module.parameters(recurse=False))


def numbers_at(module: nn.Module, path: str) -> Tensor:
    """The parameter or buffer at that path."""
    owner, _, name = path.rpartition(".")
    numbers: Tensor = getattr(module.get_submodule(owner), name)
    return numbers


def is_linear(module: nn.Module) -> bool:
    """Whether it computes W x + b by a weight of its own."""
    return isinstance(module, (nn.Linear, TransposedLinear))


@dataclasses.dataclass(frozen=True)
class Projection:
    """W x + b with W the rows `start` .. `stop` of the linear map at `path`: all of it, or the part
    of a map that several share.

    Of a map in `parts` equal parts, as where each head has its queries, keys and values side by
    side, they are those rows of every part, one part below the other. Where a scale s stands behind
    the map, at the path `behind`, they are s * W and s * b. It says where the weights are and holds
    none; `chain` is the map in which they are.
    """

    path: str
    start: int
    stop: int
    parts: int = 1
    behind: str | None = None

    @property
    def rows(self) -> int:
        """How many rows W has."""
        return self.parts * (self.stop - self.start)

    def weight(self, chain: nn.Module) -> Float[Tensor, "out in"]:
        """W: a view of the module's own weight; a copy, through which gradients pass, where it is
        of several parts or scaled.
        """
        module: Any = chain.get_submodule(self.path)
        whole: Tensor = module.weight
        rows = self._rows_of(whole.T if isinstance(module, TransposedLinear) else whole)
        return rows if self.behind is None else numbers_at(chain, self.behind).to(rows).reshape(-1, 1) * rows

    def matrix(self, chain: nn.Module, role: Role) -> Matrix:
        """W as the map shows it."""
        own: Any = chain.get_submodule(self.path)
        return Matrix(self.weight(chain), role, own.weight if self.parts > 1 or self.behind is not None else None)

    def bias(self, chain: nn.Module) -> Float[Tensor, " out"] | None:
        """b, likewise, or None."""
        bias: Tensor | None = getattr(chain.get_submodule(self.path), "bias", None)
        rows = None if bias is None else self._rows_of(bias)
        return rows if rows is None or self.behind is None else numbers_at(chain, self.behind).to(rows) * rows

    def _rows_of(self, whole: Tensor) -> Tensor:
        if self.parts == 1:
            return whole[self.start : self.stop]
        parts: Tensor = whole.unflatten(0, (self.parts, -1))[:, self.start : self.stop]
        return parts.flatten(0, 1)

    def cut(self, sizes: Sequence[int], parts: int = 1) -> list[Projection]:
        """All rows of its map, cut into those sizes; the rows of each of so many equal parts
        likewise.
        """
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [Projection(self.path, end - size, end, parts) for size, end in zip(sizes, ends, strict=True)]


def _as_linear(module: Any) -> nn.Linear:
    """The same map as torch has it: its weight and bias are views, so that what changes one changes
    both.
    """
    linear = nn.Linear(module.nx, module.nf, bias=False, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T, requires_grad=module.weight.requires_grad)
    linear.bias = nn.Parameter(module.bias.detach(), requires_grad=module.bias.requires_grad)
    return linear
