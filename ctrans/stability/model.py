"""What a model is to the instruments that also say what it is: a `Model` with a description of its architecture."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ctrans.control.costate import Model
from solvers import Solution


@runtime_checkable
class Described(Protocol):
    """An architecture in words and numbers: our `GPTConfig`, or what was recognised in another library's model.

    `placement` is a name of `PLACEMENTS`, or several where sublayers differ; `norm` likewise. `initialisation` is None where nobody
    knows how the weights were drawn.
    """

    @property
    def placement(self) -> str: ...

    @property
    def norm(self) -> str: ...

    @property
    def dt(self) -> float: ...

    @property
    def width(self) -> int: ...

    @property
    def initialisation(self) -> str | None: ...


@runtime_checkable
class DescribedModel(Model, Protocol):
    """X_0 = embed(tokens), a depth, logits = head(X_T), the trajectory between, and `config`. GPT and Imported are such models."""

    @property
    def config(self) -> Described: ...

    def trajectory(self, tokens: Tensor, **options: Any) -> Solution: ...
