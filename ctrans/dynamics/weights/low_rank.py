"""Low-rank updates of trained weights: each linear map W becomes W + B A, and only A and B are
trained.

B starts at 0, so that the model is then bit for bit the one without updates. Vectors (gains,
offsets, biases) and all parts outside the depth (embeddings, the final norm, the head) stay fixed
(Hu et al., *LoRA*, arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ctrans.base.shapes import WeightMatrix
from solvers import ConfigError

Changed = TypeVar("Changed", bound=nn.Module)


class LowRank(nn.Module):
    """W -> W + B A. A is (r, in) with entries of variance 1/in, so that A x has entries of the size
    of x's. B is (out, r) and starts at zero. r is at most either dimension of W.
    """

    def __init__(self, a: Float[Tensor, "rank in"], b: Float[Tensor, "out rank"]):
        super().__init__()
        self.a = nn.Parameter(a)
        self.b = nn.Parameter(b)

    @classmethod
    def drawn(cls, weight: Tensor, rank: int, generator: torch.Generator) -> LowRank:
        """A new update of this weight."""
        rows, columns = weight.shape
        rank = min(rank, rows, columns)
        a = torch.empty(rank, columns).normal_(0.0, columns**-0.5, generator=generator)
        return cls(a.to(weight), weight.new_zeros(rows, rank))

    def forward(self, weight: WeightMatrix) -> WeightMatrix:
        # like merged weights, which are rounded only when they are used
        with torch.autocast(weight.device.type, enabled=False):
            return torch.addmm(weight, self.b, self.a)


def adapt(module: nn.Module, maps: Iterable[nn.Module], rank: int, *, seed: int = 0) -> None:
    """Freezes the module in place, and gives each `nn.Linear` in `maps`, which are parts of it, an
    update of this rank.

    Raises ConfigError for a rank below 1 or above all dimensions, for maps without a linear map,
    and for weights that are functions of depth or have updates already.
    """
    linear = _linear_parts(maps)
    if not linear:
        raise ConfigError(
            f"low_rank = {rank}: the model has no linear maps in its depth: leave it out to train"
            " all weights"
        )
    if any(parametrize.is_parametrized(part) for part in linear):
        raise ConfigError(
            f"low_rank = {rank}: the weights are already functions of depth or have updates: leave"
            " it out to train all of them"
        )
    largest_rank = max(min(part.weight.shape) for part in linear)
    if not 1 <= rank <= largest_rank:
        raise ConfigError(
            f"low_rank = {rank}: give 1 to {largest_rank}, the largest rank of a map here, or leave"
            " it out"
        )
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(requires_grad=False)
    for part in linear:
        update = LowRank.drawn(part.weight, rank, generator)
        parametrize.register_parametrization(part, "weight", update)


def _linear_parts(maps: Iterable[nn.Module]) -> list[nn.Linear]:
    """The linear maps within the modules, each once, in order."""
    by_identity = {}
    for module in maps:
        for part in module.modules():
            if isinstance(part, nn.Linear):
                by_identity[id(part)] = part
    return list(by_identity.values())


def updated(
    module: nn.Module, *, all_names: bool = False
) -> Iterator[tuple[str, nn.Module, LowRank]]:
    """The linear maps with an update: path, map and update of each. With `all_names` a shared map
    comes once for each of its paths.
    """
    for path, part in module.named_modules(remove_duplicate=not all_names):
        if isinstance(part, nn.Linear) and parametrize.is_parametrized(part, "weight"):
            update = part.parametrizations["weight"][0]  # type: ignore[index]  # a ModuleDict of ModuleLists
            if isinstance(update, LowRank):
                yield path, part, update


def factors(module: nn.Module) -> dict[str, Tensor]:
    """A and B of each update, as PATH.a and PATH.b of the linear map at that path."""
    return {
        f"{path}.{name}": value
        for path, _, update in updated(module)
        for name, value in update.named_parameters()
    }


def update_like(module: Changed, tensors: Mapping[str, Tensor], source: object) -> Changed:
    """Freezes the module in place and gives it the updates with these `factors`. Raises ConfigError
    with `source` for factors that do not fit.
    """
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, factor = name.rpartition(".")
        pairs.setdefault(path, {})[factor] = tensor
    parts = dict(module.named_modules())
    module.requires_grad_(requires_grad=False)
    for path, pair in sorted(pairs.items()):
        part = parts.get(path)
        if not isinstance(part, nn.Linear) or not _fits(part, pair):
            raise ConfigError(
                f"{str(source)!r} does not fit its base: its {', '.join(sorted(pair))} of {path!r}"
                " are not A and B of a linear map there"
            )
        parametrize.register_parametrization(part, "weight", LowRank(pair["a"], pair["b"]))
    return module


def _fits(part: nn.Linear, pair: Mapping[str, Tensor]) -> bool:
    """Whether the pair is A (r, in) and B (out, r) for this map, in its dtype."""
    if pair.keys() != {"a", "b"}:
        return False
    a = pair["a"]
    b = pair["b"]
    dtype = part.weight.dtype
    if a.dim() != 2 or b.dim() != 2 or a.dtype != dtype or b.dtype != dtype:
        return False
    rank = len(a)
    return a.shape == (rank, part.in_features) and b.shape == (part.out_features, rank)


def merge_updates(module: Changed) -> Changed:
    """Merges the updates in place: plain weights W + B A, all trainable.

    Do not use it on a copy of a module that is still in use: torch keeps parametrisations in a
    class that both share.
    """
    for _, part, _ in list(updated(module)):
        parametrize.remove_parametrizations(part, "weight")
    return module.requires_grad_(requires_grad=True)


def before_updates(module: nn.Module) -> dict[str, Tensor]:
    """All weights without the updates, under the names of a model without updates."""
    weights: dict[str, Tensor] = module.state_dict()
    for path, _, _ in updated(module, all_names=True):
        beginning = f"{path}.parametrizations.weight."
        original = weights[f"{beginning}original"]
        weights = {name: value for name, value in weights.items() if not name.startswith(beginning)}
        weights[f"{path}.weight"] = original
    return weights
