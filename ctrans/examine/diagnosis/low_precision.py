"""What weights, activations, gradients and updates would lose in a format of low precision, from
one pass in float32.

>>> with low_precision(model, "bf16,e4m3:tensor") as step:
...     loss_of(model(x), y).backward()
...     optimizer.step()
>>> print(step.diagnoses()["bf16"])
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from ctrans.examine.diagnosis.diagnose import Diagnosis
from ctrans.examine.diagnosis.matrix_norms import chunks
from ctrans.examine.diagnosis.number_formats import FORMATS, Format, format_of
from ctrans.examine.diagnosis.weights_only import parts_of
from ctrans.interop.checkpoint_weights import WeightReaders
from ctrans.interop.weight_names import place_and_block
from ctrans.measure.findings import OURS, Check, Checks, Reading, Readings
from ctrans.measure.measures import MEASURES, Measure, checks_of

ROUNDED = ("rounding error", "entries that overflow", "entries that become zero")
"""The quantities of every tensor."""
SAMPLE = 2**16
"""Entries of a weight whose updates are compared; drawn with a seed where there are more."""
_SCALE = (
    "Give the tensor a scale, or each block of it (e4m3:tensor, e4m3:128); scale the loss for"
    " gradients; or keep it in bf16."
)

MEASURES.add(
    "InFormats",
    {
        "entries that overflow": Measure(
            formula=(
                "share of the entries other than 0 that round to more than the format's largest"
                " number"
            ),
            scope="weight",
            checks={
                "overflow": Check(
                    severity="broken",
                    source="a format has no such number",
                    impact=(
                        "They become inf or nan, or the largest number where the cast saturates."
                    ),
                    remediation=_SCALE,
                    high=0.0,
                    near=None,
                )
            },
        ),
        "rounding error": Measure(
            formula="|fl(x) - x|/|x| of a tensor, without entries that overflow",
            scope="weight",
            checks={
                "range too small": Check(
                    severity="serious",
                    source=(
                        "where no entry is subnormal or becomes 0 it is at most 2^-p: 0.0625 in"
                        " E4M3, 0.125 in E5M2, less in others"
                    ),
                    impact=(
                        "The tensor loses more than the digits that the format lacks: its small"
                        " entries are rounded to few values, or to 0."
                    ),
                    remediation=_SCALE,
                    high=0.125,
                    near=None,
                )
            },
        ),
        "entries that become zero": Measure(
            formula="share of the entries other than 0 that round to 0",
            scope="weight",
            checks={
                "entries become zero": Check(
                    severity="note",
                    source=(
                        f"{OURS}. Micikevicius et al. 2018 (arXiv 1710.03740) lost a training to"
                        " gradients that became 0"
                    ),
                    impact="Small entries have no effect. A tensor's size may hardly change by it.",
                    remediation=_SCALE,
                    high=0.1,
                    near=None,
                )
            },
        ),
        "lost updates": Measure(
            formula=(
                "share of the updates other than 0 that do not change a weight stored in the"
                " format, fl(w + dw) = w"
            ),
            scope="weight",
            checks={
                "updates lost": Check(
                    severity="serious",
                    source=(
                        f"{OURS}. In benchmarks/precision.py a mean share of 0.38 cost less than"
                        " seeds do, and one of 0.51 cost 0.18 nats"
                    ),
                    impact=(
                        "These weights stand still until an update is large enough. A small"
                        " learning rate makes it worse."
                    ),
                    remediation=(
                        "Keep the weights of the optimiser in float32, as mixed precision does, or"
                        " round stochastically."
                    ),
                    requires="a step of an optimiser",
                    high=0.5,
                    near=None,
                )
            },
        ),
    },
    topic="precision",
)
PRECISION_CHECKS = checks_of("precision")
"""The checks of a format by name."""


class PrecisionDiagnosis(Diagnosis):
    """Findings and readings of tensors in a format; `segment` of a reading is its block."""

    checks: ClassVar[Checks] = PRECISION_CHECKS


class InFormats:
    """What tensors would lose in formats, named with commas between them."""

    def __init__(self, formats: str) -> None:
        self.formats = {name: format_of(name) for name in formats.replace(" ", "").split(",")}
        self.sums: dict[Any, Any] = defaultdict(int)
        self.readings: dict[str, Readings] = {name: defaultdict(list) for name in self.formats}

    def add(self, place: str, block: int | None, tensor: Tensor) -> None:
        """Counts the entries of a tensor; of one at the same place together with those before."""
        numbers = _numbers(tensor)
        if not numbers.numel():
            return
        for name, form in self.formats.items():
            self.sums[name, place, block] += _sums(numbers, form)

    def diagnoses(self) -> dict[str, PrecisionDiagnosis]:
        """The diagnosis by format."""
        for (name, place, block), sums in self.sums.items():
            entries, over, nonzero, normal, missed, size = sums.tolist()
            counts = (over, entries - nonzero, nonzero - normal)
            shares = [count / (entries or 1) for count in counts]
            error = math.sqrt(missed / (size or 1))
            template = (
                "relative error {:.2g}; of the entries other than 0 {:.2%} overflow, {:.2%} become"
                " 0, {:.2%} are subnormal"
            )
            figure = template.format(error, *shares)
            for quantity, value in zip(ROUNDED, (error, *shares), strict=False):
                self.readings[name][quantity].append(Reading(value, place, figure, block))
        self.sums.clear()
        return {
            name: PrecisionDiagnosis(PRECISION_CHECKS.judge(readings), readings, {})
            for name, readings in self.readings.items()
        }


def weights_in(
    formats: str, weights: WeightReaders, progress: Callable[[int], None]
) -> dict[str, PrecisionDiagnosis]:
    """What weights would lose, by format. One tensor is in memory at a time. Raises ConfigError for
    an unknown format.
    """
    losses = InFormats(formats)
    for name, reader in weights.items():
        for part_name, part in parts_of(name, reader()):
            losses.add(*place_and_block(f"the weight {part_name}", part_name), part)
        progress(1)
    return losses.diagnoses()


@contextlib.contextmanager
def low_precision(model: nn.Module, formats: str = ",".join(FORMATS)) -> Iterator[InFormats]:
    """Inside, it measures a step of your training in float32: weights before it, outputs of all
    modules, the gradients of both, and the optimiser's updates. It changes none of them.

    An update dw of a weight w that the format has is lost if |dw| < ulp(w)/4, and kept if |dw| >
    ulp(w)/2, where ulp(w) is the distance to the next number above |w|. Between them it is lost
    unless |w| is a power of 2 above the smallest normal number and becomes smaller. Of a large
    weight it takes a sample of about `SAMPLE` updates. Formats with scales have no updates.

    `formats` are names of `FORMATS`, with :tensor or :N for scales. What a module does not return,
    such as attention scores, is not seen. Raises ConfigError for other formats.
    """
    step = InFormats(formats)
    handles = list[Any]()

    def measure(what: str, name: str, tensor: Tensor) -> None:
        step.add(*place_and_block(f"{what} {name}", name), tensor)

    def see(name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        for output in tree_leaves(outputs):
            if isinstance(output, Tensor):
                measure("the output of", name, output)
                if output.requires_grad:
                    handles.append(
                        output.register_hook(
                            partial(measure, "the gradient of the output of", name)
                        )
                    )

    weights = {name: weight for name, weight in model.named_parameters() if not is_lazy(weight)}
    before = {name: _sample(weight) for name, weight in weights.items()}
    try:
        for name, weight in weights.items():
            measure("the weight", name, weight)
            if weight.requires_grad:
                handles.append(weight.register_hook(partial(measure, "the gradient of", name)))
        for name, module in model.named_modules():
            handles.append(module.register_forward_hook(partial(see, name or "the model")))
        yield step
    finally:
        for handle in handles:
            handle.remove()
    for name, weight in weights.items():
        old = before[name]
        new = _sample(weight)
        for format_name, form in step.formats.items():
            if form.block is not None or old.shape != new.shape:
                continue
            low = form.rounded(old)
            real = (new != old) & low.isfinite()
            lost = form.rounded(low + new - old)[real] == low[real]
            if len(lost):
                location, block = place_and_block(f"the update of {name}", name)
                share = float(lost.double().mean())
                figure = f"{share:.2%} of {len(lost)} updates do not change the weight"
                reading = Reading(share, location, figure, block)
                step.readings[format_name]["lost updates"].append(reading)


def _numbers(tensor: Tensor) -> Tensor:
    """The entries of this process; none of integers and complex numbers, and of numbers that are
    not at hand.
    """
    local: Tensor = getattr(tensor, "to_local", lambda: tensor)().detach()
    if local.is_floating_point() and local.layout == torch.strided and not local.is_meta:
        return local
    return torch.empty(0)


def _sample(weight: Tensor) -> Tensor:
    numbers = _numbers(weight)
    return _finite(numbers.reshape(-1)[:: numbers.numel() // SAMPLE | 1]).cpu()


def _finite(chunk: Tensor) -> Tensor:
    """The chunk in float64, with 0 for entries that are not finite."""
    return chunk.double().nan_to_num(0.0, 0.0, 0.0)


def _sums(numbers: Tensor, form: Format) -> Tensor:
    """How many finite entries are not 0, overflow, stay other than 0, and become normal, and the
    sums of squares of errors and entries, without those that overflow.
    """
    if numbers.dim() > 1:
        rows = numbers.reshape(-1, numbers.shape[-1])
    else:
        rows = numbers
    if form.block == 0:
        peaks = [_finite(chunk).abs().max() for chunk in chunks(rows)]
    else:
        peaks = [torch.zeros(())]
    sums = torch.zeros(6, dtype=torch.float64)
    for chunk in chunks(rows):
        x, scale = form.scaled(_finite(chunk), max(peaks))
        near = form.rounded(x / scale)
        over = near.isinf()
        errors = (near * scale - x).masked_fill(over, 0)
        entries = x.masked_fill(over, 0)
        parts = [
            x != 0,
            over,
            near != 0,
            near.abs() >= 2.0**form.least,
            errors.square(),
            entries.square(),
        ]
        sums += torch.stack([part.sum().double().cpu() for part in parts])
    return sums
