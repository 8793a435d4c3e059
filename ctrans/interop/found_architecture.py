"""What was recognised in a foreign model, in words."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from ctrans.dynamics.depth import Depth
from ctrans.dynamics.fields import Kind
from ctrans.dynamics.residual import KeptShare
from ctrans.dynamics.sublayer import Sublayer
from ctrans.interop.attention_in_model import AttentionWithValues, mixing_without_rows
from ctrans.interop.block_structure import ROLES, UNKNOWN, Structure, unit_of
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.module_chain import is_linear
from ctrans.interop.norms import AdaptedNorm, WithoutGain
from ctrans.interop.residual_scale import ScaledOutput

NAMES: dict[Kind, str] = {"attention": "attention", "ffn": "FFN", "part": "part"}
"""How maps are called, by kind."""
POSITION_SCORES = " (positions add a number to its scores)"
MANY_GAINS = 3
"""Of so many gains, the first and the last one are named."""
MOST_LENGTHS = 6
"""How many lengths of segments are printed."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """What was recognised in a model; `str` gives it in one line.

    - `placement`: the placement's name, or several where sublayers differ
    - `norm`: "layernorm" or "rmsnorm", by what the norms compute; `norms` describes each
    - `context`: the longest sequence, None if the model does not state it
    - `dt`: the length of a segment in depth-time, how much the model adds of each map. Where
      sublayers differ, `lengths` are the distinct lengths and `dt` is their unit
    - `unit`: "block", or "part" where its parts are not seen as blocks
    - `parallel`: whether attention and FFN of a block act in parallel, as one map
    - `initialisation`: None, because a model does not record how its weights were drawn
    - `unread`: what could not be read of its attention and FFN, which limits some instruments
    """

    model: str
    family: str
    placement: str
    norm: str
    norms: tuple[str, ...]
    attention: str
    ffn: str
    blocks: int
    width: int
    context: int | None
    dt: float
    lengths: tuple[float, ...] = (1.0,)
    parallel: bool = False
    unit: str = "block"
    initialisation: None = None
    unread: tuple[str, ...] = ()

    def __str__(self) -> str:
        unit = self.unit
        if self.blocks != 1:
            unit += "s"
        if self.parallel:
            parallel = " in parallel, one segment for both"
        else:
            parallel = ""
        description = (
            f"{self.model} ({self.family}): {self.blocks} {unit} of width {self.width},"
            f" placement {self.placement}{self._lengths()}, attention {self.attention},"
            f" FFN {self.ffn}{parallel}, norms {', '.join(self.norms) or 'none'}"
        )
        return "; ".join([description, *self.unread])

    def _lengths(self) -> str:
        """The lengths of the segments, unless all are 1."""
        if self.lengths == (1.0,):
            return ""
        lengths = [f"{length:g}" for length in self.lengths[:MOST_LENGTHS]]
        if len(self.lengths) > MOST_LENGTHS:
            lengths.append("..")
        return f", dt = {', '.join(lengths)}"


def architecture_of(
    adapter: ModelAdapter, structures: list[Structure], width: int, depth: Depth
) -> Architecture:
    """What was recognised, in words."""
    sublayers = [sublayer for structure in structures for sublayer in structure.sublayers]
    norms = []
    for sublayer in sublayers:
        for role in ROLES:
            norm = getattr(sublayer, role)
            if norm is not None and norm not in norms:
                norms.append(norm)
    maps = [
        (NAMES[kind], branch.field)
        for sublayer in sublayers
        for kind, branch in sublayer.branches.items()
    ]
    labels: dict[str, dict[str, None]] = {}
    for name, chain in maps:
        label = mixing_without_rows(chain) or "+".join(map(_label, chain.stages))
        if isinstance(chain, AttentionWithValues) and chain.reading.position_scores:
            label += POSITION_SCORES
        labels.setdefault(name, {})[label] = None
    stages = {name: ", ".join(of_kind) for name, of_kind in labels.items()}
    if any(structure.placement == UNKNOWN for structure in structures):
        none = UNKNOWN
        norm_descriptions = {*_described(norms), UNKNOWN}
    else:
        none = "none"
        norm_descriptions = set(_described(norms))
    # by channel, or by a number that is no length
    scaled = [
        name
        for name, chain in maps
        if chain.scale_path is not None or isinstance(chain.stages[-1], ScaledOutput)
    ]
    notes = [
        f"the model scales the output of its {name}: the scale is folded into the last weights of"
        " that map"
        for name in dict.fromkeys(scaled)
    ]
    shares = dict.fromkeys(
        f"{sublayer.residual.share:.4g}"
        for sublayer in sublayers
        if isinstance(sublayer.residual, KeptShare)
    )
    if shares:
        kept = [isinstance(sublayer.residual, KeptShare) for sublayer in sublayers]
        which = "its sums" if all(kept) else "some of its sums"
        notes.append(f"{which} are a x + f(x), of which a is {', '.join(shares)}")
    matrices = [each for each in map(_matrices_of, sublayers) if each]
    if len(set(matrices)) < len(matrices):
        notes.append("some of its parts use the weights of earlier ones again")
    counts = Counter((name, chain.why_not) for name, chain in maps if chain.why_not)
    of_name = Counter(name for name, _ in maps)
    unread = []
    for (name, why_not), count in counts.items():
        which = name if count == of_name[name] else f"{name}, {count} of {of_name[name]}"
        unread.append(f"{which}: {why_not}")
    norm_kinds = {_kind(norm) for norm in norms}
    return Architecture(
        model=type(adapter.model).__name__,
        family=adapter.family,
        placement=", ".join(dict.fromkeys(structure.placement for structure in structures)),
        norm="/".join(sorted(norm_kinds)) or none,
        norms=tuple(sorted(norm_descriptions)),
        attention=stages.get("attention", none),
        ffn=stages.get("FFN", none),
        blocks=len(structures),
        width=width,
        context=adapter.context,
        dt=depth.dt,
        lengths=tuple(dict.fromkeys(depth.lengths)),
        parallel=sublayers[0].kind == "parallel",
        unit=unit_of(structures, depth),
        unread=(*notes, *adapter.notes, *unread),
    )


def _matrices_of(sublayer: Sublayer) -> frozenset[int]:
    """The weights of its linear maps by their ids, without slices of larger ones."""
    weights = [part._parameters.get("weight") for part in sublayer.modules() if is_linear(part)]
    return frozenset(id(weight) for weight in weights if weight is not None)


def _label(stage: nn.Module) -> str:
    """The name of a stage: the class of the model's module, or the name of the function that it
    stands for.
    """
    label: str = getattr(stage, "label", type(stage).__name__)
    return label


def _kind(norm: AdaptedNorm | WithoutGain) -> str:
    if norm.centred:
        return "layernorm"
    return "rmsnorm"


def _described(norms: Sequence[AdaptedNorm | WithoutGain]) -> Iterator[str]:
    """The norms in words. Of several that differ in the names of their gains alone, as written in
    one long function, the first and the last name.
    """
    gains: dict[tuple[str, str], dict[str, None]] = {}
    for norm in norms:
        kind = "centred" if norm.centred else "not centred"
        eps = f"eps = {norm.eps:g}"
        if isinstance(norm, WithoutGain):
            gain = "one for each map"
        else:
            form = norm.form
            eps = f"eps = {form.eps:g}"
            gain = form.described_gain
            if form.added:
                eps = f"eps = {form.added:g} added to the deviation"
        gains.setdefault((f"{_label(norm.module)} ({kind}", eps), {})[gain] = None
    for (label, eps), names in gains.items():
        listed = list(names)
        if len(listed) >= MANY_GAINS:
            listed = [f"{listed[0]} .. {listed[-1]}"]
        yield from (f"{label}, gamma = {gain}, {eps})" for gain in listed)
