"""Maps that act in parallel in one sum: x + attention(N x) + FFN(N x), or several attentions or
several FFNs, with one norm or a norm each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ctrans.dynamics.fields import Branch, Kind, ParallelMaps
from ctrans.dynamics.norm import Norm
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.module_chain import ModuleChain
from ctrans.interop.norms import GainsOf, WithoutGain
from ctrans.interop.replay import NotReplayedError

if TYPE_CHECKING:
    from ctrans.interop.graph_parts import Term


class MapOfTerm(NamedTuple):
    """The map of a term of a sum, and its length in depth-time."""

    term: Term
    kind: Kind
    chain: ModuleChain
    length: float


class SummedMaps(nn.Module):
    """f(u) = sum_i c_i f_i(A_i u), of maps whose norms may differ in gain and offset."""

    mixing = ""
    averages_with_rows = False

    def __init__(self, branches: Sequence[Branch], factors: Sequence[float]):
        super().__init__()
        self.fields = nn.ModuleList(branch.field for branch in branches)
        self.gains = nn.ModuleList(branch.gains or nn.Identity() for branch in branches)
        self.factors = tuple(factors)
        self.label = " + ".join(branch.field.stages[0].label for branch in branches)

    def forward(self, u: Tensor) -> Tensor:
        y = torch.zeros_like(u)
        for factor, field, gains in zip(self.factors, self.fields, self.gains, strict=True):
            y = y + factor * field(gains(u))
        return y


def in_parallel(maps: Sequence[MapOfTerm], *, may_be_one: bool) -> tuple[Sublayer, float]:
    """The sublayer with these maps. Raises NotReplayedError if it is none, and if the maps may be
    one map that is a sum in the model's code (`may_be_one`), such as experts.
    """
    norm, gains = _shared_norm(maps)
    branches = {each.kind: Branch(each.chain, own) for each, own in zip(maps, gains, strict=True)}
    length = maps[0].length
    if set(branches) == {"attention", "ffn"} and len(maps) == 2:
        if maps[1].length != length:
            raise NotReplayedError("its two maps in parallel have different scales")
        attention, ffn = branches["attention"], branches["ffn"]
        field = ParallelMaps(attention.field, ffn.field, (attention.gains, ffn.gains))
        return Sublayer(field, "parallel", input_norm=norm), length
    if may_be_one and len({each.term.start for each in maps}) == 1:
        raise NotReplayedError("its maps in parallel are no attention and FFN")
    several = [Branch(each.chain, own) for each, own in zip(maps, gains, strict=True)]
    chain = ModuleChain([SummedMaps(several, [each.length / length for each in maps])])
    kind: Kind = "attention" if "attention" in branches else "ffn"
    return Sublayer(chain, kind, input_norm=norm), length


def _shared_norm(maps: Sequence[MapOfTerm]) -> tuple[Norm | None, list[GainsOf | None]]:
    """The norm of the state that all maps read, and what each does with it: with a norm each, x_hat
    and the gains of that norm.
    """
    without: list[GainsOf | None] = [None] * len(maps)
    norms = [each.term.input_norm for each in maps if each.term.input_norm is not None]
    if len({each.term.start for each in maps}) == 1:
        return maps[0].term.input_norm, without
    kinds = {(norm.centred, norm.eps, norm.added, norm.stretch) for norm in norms}
    if len(norms) < len(maps) or len(kinds) > 1:
        raise NotReplayedError("its maps in parallel have norms that differ")
    return WithoutGain(norms[0]), [GainsOf(norm) for norm in norms]
