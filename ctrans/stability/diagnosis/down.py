"""What a diagnosis looks at on the way down: norms' gains, states, heads, what sublayers do, and how sensitive they are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ctrans.depth import Depth
from ctrans.fields import ExposesHeads
from ctrans.norm import Norm
from ctrans.stability.backward.sensitivity import NOT_FINITE, Sensitivity, sublayer_sensitivity
from ctrans.stability.diagnosis.ailments import DEAD
from ctrans.stability.diagnosis.quantities import QUANTITIES
from ctrans.stability.diagnosis.reading import Reading, at_entry, named, place_of
from ctrans.stability.forward.depth_share import token_similarity
from ctrans.walk import Instrument, StepContext
from ctrans.walk.instrument import of_text
from solvers import ConfigError
from solvers.run import finite

NORMS = {
    "state_norm": ("gain around the state", "the norm around the state"),
    "output_norm": ("gain of an output norm", "the output norm"),
    "input_norm": ("gain of an input norm", "the input norm"),
}
"""By a sublayer's attribute: the quantity that its smallest gain is a reading of, and its name."""
MASSIVE, OF_MEDIAN = 100.0, 1000.0
"""Sun et al. 2024 call an entry massive above the first that is the second times the median."""

Readings = dict[str, list[Reading]]


def add(readings: Readings, quantity: str, reading: Reading) -> None:
    """Puts a reading behind those of its quantity that are known."""
    readings.setdefault(quantity, []).append(reading)


def gain_reading(gains: Tensor, place: str, segment: int | None) -> Reading:
    """The smallest |gamma_i| over the median, and the channels that are dead in words."""
    size = gains.detach().abs().double().flatten()
    median = float(size.median())
    share = float(size.min()) / median if median else math.nan
    dead = [int(i) for i in size.argsort() if size[i] < DEAD * median] or [int(size.argmin())]
    each = [f"|gamma| = {float(size[i]):.2g} in channel {i}" for i in dead]
    return Reading(share, place, f"{named(each)}; the norm's median is {median:.2g}", segment)


class GainsByNorm(Instrument):
    """The gains of every norm of every sublayer: the smallest beside the median, the largest, and an output norm's rms."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found = depth, Readings()

    def forward(self, at: StepContext) -> None:
        for attribute, (quantity, name) in NORMS.items():
            norm: Norm | None = getattr(at.sublayer, attribute)
            if norm is None:
                continue
            gains, place = norm.gamma.detach(), f"{place_of(self._depth, at.k)}, {name}"
            largest, rms = float(gains.abs().max()), float(gains.double().square().mean().sqrt())
            add(self._found, quantity, gain_reading(gains, place, at.k))
            add(self._found, "largest gain of a norm", Reading(largest, place, f"its largest |gamma| is {largest:.2g}", at.k))
            median = float(gains.abs().double().median())
            if median:
                said = f"|gamma| = {largest:.3g} in channel {int(gains.abs().argmax())}; the norm's median is {median:.2g}"
                add(self._found, "largest gain over the median", Reading(largest / median, place, said, at.k))
            if attribute == "output_norm":
                add(self._found, "output gain", Reading(rms, place, f"the gains' root mean square is {rms:.3g}", at.k))

    def figures(self) -> Readings:
        return self._found


class StatesByDepth(Instrument):
    """Of X_0 and X at every segment's end: entries that are not finite, massive ones, and how alike tokens are."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found = depth, Readings()
        self._read(x0, "the embedded text", None)

    def forward(self, at: StepContext) -> None:
        self._read(at.y, f"the end of {place_of(self._depth, at.k)}", at.k)

    def _read(self, x: Tensor, place: str, segment: int | None) -> None:
        bad = int((~x.isfinite()).sum())
        what = f"{bad} of {x.numel()} entries of the state"
        add(self._found, "entries that are not finite", Reading(float(bad), place, what, segment))
        if bad:
            return
        size = x.abs() if self.kept is None else torch.where(self.kept.unsqueeze(-1), x.abs(), 0.0)
        size, median = size.flatten(), float(of_text(x, self.kept).abs().median())
        top = int(size.argmax())
        largest = float(size[top])
        times = largest / median if median else math.inf if largest else math.nan
        sequence, token, channel = at_entry(x, top)
        add(
            self._found,
            "massive activation",
            Reading(
                min(largest / MASSIVE, times / OF_MEDIAN),
                place,
                f"|x| = {largest:.3g}, {times:.3g} times the median, in channel {channel} of token {token}, sequence {sequence}",
                segment,
            ),
        )
        likeness = token_similarity(x, self.kept)
        said = f"two tokens of a sequence have a mean cosine of {likeness:.4f}"
        add(self._found, "token similarity", Reading(likeness, place, said, segment))

    def figures(self) -> Readings:
        return self._found


class BlockMoves(Instrument):
    """What a block does to its tokens: |x_end - y_end|/|x_end|, y carried through the block's norms around the state alone."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found = depth, Readings()

    def forward(self, at: StepContext) -> None:
        each = self._depth.per_block
        if at.k % each == 0:
            self._without = at.x
        norm = at.sublayer.state_norm
        self._without = at.sublayer.enter(self._without)
        self._without = self._without if norm is None else norm(self._without)
        if at.k % each == each - 1 and finite(at.y):
            moved = torch.linalg.vector_norm(at.y - self._without, dim=-1) / torch.linalg.vector_norm(at.y, dim=-1)
            share, block = float(moved.double().median()), at.k // each
            said = f"its sublayers make {share:.2g} of the median token at its end"
            add(self._found, "block moves", Reading(share, f"block {block} (segments {at.k - each + 1} to {at.k})", said, at.k))

    def figures(self) -> Readings:
        return self._found


class HeadRows(Instrument):
    """The entropy of each head's rows, in the mean over tokens that read more than one. Attention that does not show rows has none."""

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._depth, self._found, self._tokens = depth, Readings(), x0.shape[-2]

    def forward(self, at: StepContext) -> None:
        attention = at.sublayer.attention
        if attention is None or not isinstance(attention.field, ExposesHeads) or at.x.shape[-2] < 2 or not finite(at.x):
            return
        x = attention.given(at.sublayer.given(at.entered))
        rows = attention.field.probabilities(x).double()
        rows = rows.reshape(-1, *rows.shape[-3:]).movedim(-3, 0)
        counted = torch.ones(rows.shape[1:3], dtype=torch.bool, device=rows.device) if self.kept is None else self.kept
        counted = counted.reshape(rows.shape[1:3])
        if not bool(rows.triu(1).any()):
            # the first token of a causal text reads itself alone
            counted = counted & (counted.cumsum(-1) > 1)
        rows = rows[:, counted]
        if not rows.shape[1]:
            return
        entropy = torch.special.entr(rows).sum(-1).mean(-1)
        likely = rows.topk(2).values
        apart = torch.where(likely[..., 1] > 0, (likely[..., 0] / likely[..., 1]).log(), math.inf).amax(-1)
        order = entropy.argsort()
        saturated = [h for h in order.tolist() if entropy[h] < LEAST_ENTROPY] or order[:1].tolist()
        each = [
            f"head {h}: {float(entropy[h]):.2g} nats, its largest logit above the next by {_apart(float(apart[h]))}"
            for h in saturated
        ]
        size = float(x.detach().double().square().mean().sqrt())
        read = f"; what it reads has a root mean square of {size:.3g}" if size > LARGE_INPUT else ""
        said = f"{named(each)}{read}"
        self._found.setdefault("least entropy of a head", []).append(
            Reading(float(entropy.min()), place_of(self._depth, at.k), said, at.k)
        )

    def figures(self) -> Readings:
        if self._tokens < 2:
            raise ConfigError("each sequence is one token, which reads itself alone")
        return self._found


LARGE_INPUT = 10.0
"""Above it attention's input is named where heads are saturated: its scale may be the cause, and not the weights'."""
_LEAST = QUANTITIES["least entropy"].low
assert _LEAST is not None, "the screening limits it"
LEAST_ENTROPY = _LEAST
"""Heads below are named."""


def _apart(logits: float) -> str:
    return "more than the dtype tells" if math.isinf(logits) else f"up to {logits:.3g}"


class VelocitySensitivities(Instrument):
    """|dv_k/dX|_2 of every sublayer's velocity, and nothing more: one sublayer's graph at a time."""

    def __init__(self, tolerance: float):
        self.tolerance = tolerance

    def begin(self, depth: Depth, x0: Tensor) -> None:
        self._found: list[Sensitivity] = []

    def forward(self, at: StepContext) -> None:
        self._found.append(sublayer_sensitivity(at.sublayer, at.x, tolerance=self.tolerance))

    def figures(self) -> list[Sensitivity]:
        return self._found


def sensitivity_readings(depth: Depth, each: list[Sensitivity]) -> Readings:
    """h |dv/dX| of the sublayers where it is known; inf where the Jacobian overflows at a state that is finite."""
    found: list[Reading] = []
    for k, (h, sensitivity) in enumerate(zip(depth.lengths, each, strict=False)):
        if sensitivity.value is None and sensitivity.note != NOT_FINITE:
            continue
        value = math.inf if sensitivity.value is None else sensitivity.value
        said = f"|dv/dX| = {value:.3g}" + (f", in a step of h = {h:g}" if h != 1 else "")
        found.append(Reading(h * value, place_of(depth, k), said, k))
    return {"sensitivity": found}


@torch.no_grad()
def gains_outside(model: nn.Module, depth: Depth, width: int) -> Readings:
    """The smallest gain beside the median of every norm that is in no sublayer, of whatever library, and the largest.

    A norm is a module whose only parameters are vectors as long as a token and which gives the same for a large state and for twice
    that. Its gains are what it makes of a token of signs s, half of them -1, and of its opposite: for an even width
    (N(s) - N(-s))/2 = gamma s, but for eps.
    """
    inside, found = set(depth.modules()), Readings()
    signs = torch.ones(width)
    signs[1::2] = -1
    for name, part in model.named_modules():
        weights = list(part.parameters())
        if part in inside or not weights or any(weight.shape != (width,) for weight in weights):
            continue
        s = signs.to(weights[0]).view(1, 1, width)
        try:
            gains, twice = ((part(c * s) - part(-c * s)).flatten().double() / 2 for c in (1e3, 2e3))
        except Exception:  # all of them: somebody else's code, given what it was not written for, may raise errors of its own
            continue
        if not torch.allclose(gains, twice, rtol=1e-2, atol=0) or not finite(gains):
            continue
        largest = float(gains.abs().max())
        add(found, "largest gain of a norm", Reading(largest, name, f"its largest |gamma| is {largest:.2g}", None))
        if largest:
            add(found, "gain outside the depth", gain_reading(gains, name, None))
    return found


@torch.no_grad()
def weights_that_are_not_finite(parameters: Iterable[tuple[str, Tensor]], depth: Depth, places: Mapping[int, int]) -> Readings:
    """Every parameter with entries that are not finite, by its name and the segment that it is in."""
    found = Readings()
    for name, weight in parameters:
        bad = int((~weight.isfinite()).sum())
        if bad:
            k = places.get(id(weight))
            said = f"{bad} of {weight.numel()} entries of the weight {name} are inf or nan"
            place = f"the weight {name}" if k is None else f"{place_of(depth, k)}: the weight {name}"
            add(found, "entries that are not finite", Reading(float(bad), place, said, k))
    return found
