"""Readings from the weights alone: zero matrices, non-finite entries, gains of norms outside the
depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn

from ctrans.base.broken_entries import broken_entries
from ctrans.dynamics.depth import Depth
from ctrans.examine.diagnosis.matrix_norms import largest_entry, spectral_norm_of, unit_of
from ctrans.examine.diagnosis.norm_instruments import smallest_gain
from ctrans.examine.diagnosis.reading import place_of
from ctrans.examine.diagnosis.untrained import (
    BLOCK_QUANTITY,
    WEIGHT_QUANTITY,
    Excess,
    excess_of,
    untrained_blocks,
    untrained_weights,
)
from ctrans.interop.model_adapter import ModelAdapter
from ctrans.interop.weight_names import BLOCK
from ctrans.measure.findings import Reading, Readings
from solvers.run import finite

OFFERS = (
    "entries that are not finite",
    "largest entry of a matrix",
    "largest gain of a norm",
    "gain outside the depth",
    "blocks with equal matrices",
    BLOCK_QUANTITY,
    WEIGHT_QUANTITY,
)
SMALLEST = 16
"""The smaller side of a matrix whose singular values say something."""
FEWEST_ENTRIES = 16
"""Smaller matrices may be equal by chance, or by design."""


@torch.no_grad()
def weight_readings(model: nn.Module, depth: Depth) -> Readings:
    """Readings of the quantities in `OFFERS`, placed by the weight's name and its sublayer.

    For a stack of matrices, such as experts, the matrix with the smallest largest entry counts.
    """
    readings: Readings = {quantity: [] for quantity in OFFERS}
    is_stack = _stacks_of_vectors(model)
    places = {
        id(weight): k for k, part in enumerate(depth.sublayers) for weight in part.parameters()
    }
    for name, weight in own_parameters(model):
        k = places.get(id(weight))
        if k is None:
            location = f"the weight {name}"
        else:
            location = f"{place_of(depth, k)}: the weight {name}"
        bad = int((~weight.isfinite()).sum())
        if bad:
            figure = f"{bad} of {weight.numel()} entries of the weight {name} are inf or nan"
            readings["entries that are not finite"].append(Reading(float(bad), location, figure, k))
        is_in_memory = not weight.is_meta and weight.numel() > 1
        if weight.dim() in (2, 3) and is_in_memory and not is_stack(name, weight):
            of_matrices = weight.detach().abs().amax((-2, -1))
            largest = float(of_matrices.min())
            which = ""
            if weight.dim() == 3:
                which = f"[{int(of_matrices.argmin())}]"
            if largest:
                figure = f"largest entry {largest:.2g}"
            else:
                figure = "every entry is 0, so its output is 0"
            readings["largest entry of a matrix"].append(
                Reading(largest, location + which, figure, k)
            )
    for name, buffer in opened(model).named_buffers():
        bad = broken_entries(buffer)
        if bad:
            figure = f"{bad} of {buffer.numel()} entries of the buffer {name} are inf or nan"
            readings["entries that are not finite"].append(
                Reading(float(bad), f"the buffer {name}", figure)
            )
    readings["blocks with equal matrices"] = _equal_matrices(model)
    excesses = _excesses(model)
    readings[BLOCK_QUANTITY] = untrained_blocks(excesses)
    readings[WEIGHT_QUANTITY] = untrained_weights(excesses)
    sublayer = depth.sublayers[0]
    norm = sublayer.input_norm or sublayer.output_norm or sublayer.state_norm
    if norm is None:
        norms_outside = []
    else:
        norms_outside = list(_norms_outside(opened(model), depth, norm.width))
    for name, gains in norms_outside:
        largest = float(gains.abs().max())
        readings["largest gain of a norm"].append(
            Reading(largest, name, f"its largest |gamma| is {largest:.2g}")
        )
        if largest:
            share, figure = smallest_gain(gains)
            readings["gain outside the depth"].append(Reading(share, name, figure))
    return {quantity: several for quantity, several in readings.items() if several}


def _stacks_of_vectors(model: nn.Module) -> Callable[[str, Tensor], bool]:
    """Whether a parameter of that name has several axes and is no matrix: the offsets or gains of
    all blocks, or of all experts.
    """
    known: Collection[int] = ()
    for part in (model, getattr(model, "model", None)):
        adapter = getattr(part, "adapter", None)
        if isinstance(adapter, ModelAdapter):
            known = adapter.stacked_vectors()

    def is_stack(name: str, weight: Tensor) -> bool:
        last = name.rpartition(".")[2]
        return id(weight) in known or last.endswith(("bias", "biases"))

    return is_stack


def _equal_matrices(model: nn.Module) -> list[Reading]:
    """For each matrix of several blocks, in how many it has the entries of an earlier block's, bit
    for bit. Matrices of equal rows do not count, nor do weights that blocks share.
    """
    by_role: dict[str, dict[str, Tensor]] = {}
    for name, weight in own_parameters(model):
        in_a_block = BLOCK.search(name)
        if in_a_block and weight.dim() > 1 and not weight.is_meta:
            role = f"{name[: in_a_block.start(1)]}*{name[in_a_block.end(1) :]}"
            by_role.setdefault(role, {})[name] = weight.detach()
    readings = []
    for role, weights in by_role.items():
        if len(weights) < 2:
            continue
        copies = [
            (name, other)
            for k, (name, weight) in enumerate(weights.items())
            for other, earlier in list(weights.items())[:k]
            if _are_copies(weight, earlier)
        ]
        first = dict(reversed(copies))  # each with the first that it equals
        figure = f"{len(first)} of {len(weights)} have the entries of an earlier block"
        place = f"the weight {role}"
        if first:
            name, other = next(iter(first.items()))
            figure += f", such as {name} those of {other}"
            place = f"the weight {name}"
        readings.append(Reading(float(len(first)), place, figure))
    return readings


def _excesses(model: nn.Module) -> dict[str, Excess]:
    """How far each matrix in memory is from what independent draws reach, by name."""
    excesses = {}
    is_stack = _stacks_of_vectors(model)
    for name, weight in own_parameters(model):
        if is_stack(name, weight):
            continue
        if weight.dim() != 2 or weight.is_meta or min(weight.shape) < SMALLEST:
            continue
        if not weight.is_floating_point():  # codes of a quantised matrix
            continue
        largest = largest_entry(weight)
        if largest and math.isfinite(largest):
            unit = unit_of(largest)
            norm = spectral_norm_of(weight, unit) * unit
            excesses[name] = excess_of(weight, norm, largest)
    return excesses


def _are_copies(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices have equal entries, and their rows differ from one another: a recipe may
    set all rows to the same numbers, as Mamba's does.
    """
    if one.shape != other.shape or one.numel() < FEWEST_ENTRIES or one.dtype != other.dtype:
        return False
    corner = (0,) * one.dim()
    if one[corner] != other[corner]:  # fast
        return False
    if len(one) > 1:
        differs = one != one[:1]
    else:
        differs = one != one[corner]
    return torch.equal(one, other) and bool(differs.any())


def _norms_outside(model: nn.Module, depth: Depth, width: int) -> Iterator[tuple[str, Tensor]]:
    """The gains, by name, of each norm outside the sublayers, of any library.

    A module counts as a norm if all its parameters are vectors of the token's width, and if it maps
    a large state and twice that state to the same output. Its gains come from a token of signs s,
    half of them -1, and its opposite: for an even width (N(s) - N(-s))/2 = gamma s, up to eps.
    """
    inside = set(depth.modules())
    signs = torch.ones(width)
    signs[1::2] = -1
    for name, part in model.named_modules():
        weights = list(part.parameters())
        if part in inside or not weights or any(weight.shape != (width,) for weight in weights):
            continue
        s = 1e3 * signs.to(weights[0]).view(1, 1, width)
        try:
            gains = (part(s) - part(-s)).flatten().double() / 2
            twice = (part(2 * s) - part(-2 * s)).flatten().double() / 2
        except Exception:  # foreign code may raise any error for this input
            continue
        if torch.allclose(gains, twice, rtol=1e-2, atol=0) and finite(gains):
            yield name, gains


def own_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters by their names in the user's model."""
    yield from opened(model).named_parameters()


def opened(model: nn.Module) -> nn.Module:
    """The user's own module, inside the wrappers that have a `Depth`."""
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module) and isinstance(getattr(model, "depth", None), Depth):
        return opened(inner)
    return model
