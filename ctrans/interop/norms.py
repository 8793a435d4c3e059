"""Norms of other libraries as geometry: adapters that hold the model's own module and know its
formula.

The formula is found from what the module computes, not from its name. A copy of the module gets
random weights and is run on states of several sizes. Let y(x) = (N(x) - N(-x))/2 and beta = (N(x) +
N(-x))/2. The module is a norm if y_i = f (s + w_i) (C x)_i/sigma(x). Here w is one of its weights,
C is the centring or the identity, and sigma^2 = mean((C x)^2) + eps or sigma = sqrt(mean((C x)^2))
+ eps. The smallest states determine eps, the largest f.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.shapes import PerChannel, Vectors
from ctrans.dynamics.fields import BranchGains
from ctrans.dynamics.norm import SphereNorm, check_norm
from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from ctrans.interop.tolerances import likely_number, unit

EPS_NAMES = ("eps", "variance_epsilon")
"""Attributes under which norms keep eps."""
UNSAID_EPS = 1e-5
"""eps of modules without such an attribute: what nanoGPT passes to torch's layer_norm."""
SIZES = (1e3, 1e-4, 1.0, 1.0, 1e-2, 1e-3)
"""Sizes of the states on which a module is run. The first two determine its numbers; the others
check them.
"""
EXACT = 2e-9
"""Largest relative error of a module that computes in float64 throughout. One that rounds to
float32 internally has a larger error.
"""
SHORT = 1e-4
"""Relative distance within which a fitted number is replaced by one of the module's numbers, or by
one with few digits.
"""
NEARER = 4.0
"""How many times nearer eps beside the deviation must fit than eps in the variance."""


@dataclass(frozen=True)
class Form:
    """The formula of a norm: whether it centres, gamma = factor (shift + gain), and eps, in sigma^2
    or added to sigma.

    `gain` and `offset` name the module's weights, None if it has none, as "n1[2]" if the gain is a
    row of a weight that holds those of all blocks. Gemma's gain is 1 + weight.
    A norm that divides by the standard deviation with d - 1 has factor sqrt((d - 1)/d). `added` is
    the eps that is added to sigma.
    """

    centred: bool
    shift: float
    eps: float
    gain: str | None = "weight"
    offset: str | None = "bias"
    factor: float = 1.0
    added: float = 0.0

    @property
    def described_gain(self) -> str:
        """gamma in words, such as 0.9843 weight."""
        factor = f"{self.factor:.4g}"
        if self.gain is None:
            return factor
        gain = self.gain
        if self.shift:
            gain = f"{self.shift:g} + {gain}"
        if factor == "1":
            return gain
        if self.shift:
            gain = f"({gain})"
        return f"{factor} {gain}"


class UnitGains(SphereNorm):
    """z = x_hat: gamma = 1, beta = 0."""

    def __init__(self, width: int, eps: float, *, centred: bool, added: float = 0.0):
        super().__init__()
        self.width, self.eps = check_norm(width, eps)
        self.centred = centred
        self.added = added
        self.shift = 0.0
        self.register_buffer("one", torch.ones(width), persistent=False)

    @property
    def gamma(self) -> PerChannel:
        return self.get_buffer("one")

    def forward(self, x: Vectors) -> Vectors:
        return self.standardize(x)


class AdaptedNorm(SphereNorm):
    """z = factor (shift + gain) * x_hat + offset, computed by another library's module, whose
    parameters it shares.

    `stretch` is a in N(a x), a > 0, as a block computes that multiplies its state (DeepNorm). With
    eps/a^2 in place of eps it is the same norm of x.
    """

    module: Any  # of any library

    def __init__(
        self,
        module: nn.Module,
        form: Form,
        width: int | None = None,
        *,
        exact: bool = False,
        stretch: float = 1.0,
    ):
        super().__init__()
        self.module = module
        self.form = form
        self.shift = form.shift
        self.exact = exact
        self.stretch = stretch
        if form.added:
            eps = form.eps / stretch
        else:
            eps = form.eps / stretch**2
        self.width, self.eps = check_norm(width or _width(module) or 0, eps)
        self.centred = form.centred
        self.added = form.added
        if self._weight(form.gain) is None:
            self.register_buffer("one", torch.ones(self.width), persistent=False)

    def _weight(self, name: str | None) -> Tensor | None:
        """The module's weight of that name."""
        if name is None:
            return None
        name, _, row = name.rstrip("]").partition("[")
        weight: Tensor | None = getattr(self.module, name, None)
        if weight is None or not row:
            return weight
        return weight[tuple(int(place) for place in row.split(", "))]

    @property
    def gamma(self) -> PerChannel:
        form = self.form
        weight = self._weight(form.gain)
        if weight is None:
            gain = self.get_buffer("one")
        elif form.shift != 0:
            gain = form.shift + weight
        else:
            gain = weight
        if form.factor != 1:
            gain = form.factor * gain
        if weight is None:
            return gain
        return gain.flatten().expand(self.width)

    @property
    def beta(self) -> PerChannel:
        bias = self._weight(self.form.offset)
        if bias is None:
            return torch.zeros_like(self.gamma)
        return bias.flatten().expand(self.width)

    def forward(self, x: Vectors) -> Vectors:
        # Many modules round to float32 internally, which computations in float64 must not.
        if self.exact or x.dtype != torch.float64:
            if self.stretch != 1:
                x = self.stretch * x
            z: Vectors = self.module(x)
            return z
        return self.gamma * self.standardize(x) + self.beta

    def to_dtype(self, dtype: torch.dtype) -> None:
        """Makes gains of 1 numbers of that dtype, where the module has no weights that say it."""
        if self._weight(self.form.gain) is None:
            self.one = self.get_buffer("one").to(dtype)

    def stretched(self, stretch: float) -> AdaptedNorm:
        """N(a x), with the same module."""
        return AdaptedNorm(
            self.module, self.form, self.width, exact=self.exact, stretch=stretch * self.stretch
        )


class WithoutGain(UnitGains):
    """x_hat of another library's norm, for attention and FFN in parallel with one norm each
    (GPT-NeoX, Falcon).

    Then X <- X + attention(N_1 X) + ffn(N_2 X) has x_hat as the input norm of both. Gains and
    offsets belong to the maps: N_i X = gamma_i x_hat + beta_i.
    """

    def __init__(self, norm: AdaptedNorm):
        super().__init__(norm.width, norm.eps, centred=norm.centred, added=norm.added)
        self.to(norm.gamma.detach())
        self.module = norm.module


class GainsOf(BranchGains):
    """The gain and offset of a norm of the model, shared with it."""

    def __init__(self, norm: AdaptedNorm):
        super().__init__()
        self.norm = norm

    @property
    def gamma(self) -> PerChannel:
        return self.norm.gamma

    @property
    def beta(self) -> PerChannel:
        return self.norm.beta


def as_norm(module: nn.Module, width: int | None = None) -> AdaptedNorm | None:
    """The module as a `Norm` of tokens of that width, or None if it does not compute gamma * x_hat
    + beta on states of all sizes. Without `width`, the module's weights or `normalized_shape`
    determine it.
    """
    width = width or _width(module)
    if width is None or width < 2:
        return None
    # operations may read a row of a weight that holds the gains of all blocks
    has_rows = hasattr(module, "graph")
    for weight in module.parameters():
        is_row_of = has_rows and weight.dim() > 1 and weight.shape[-1] == width
        if not is_row_of and not _is_vector(weight, width):
            return None
    with torch.no_grad():
        return _probed(module, width) or _by_attributes(module)


def _is_vector(weight: Tensor, width: int) -> bool:
    """Whether it is one number, or one for each channel."""
    return (
        weight.is_floating_point()
        and weight.numel() in (1, width)
        and max(weight.shape, default=1) == weight.numel()
    )


def _counts(weight: Tensor, channels: int, width: int) -> bool:
    """Whether that axis of a weight counts as many channels; its first axis if it has fewer."""
    return weight.shape[max(channels, -weight.dim())] == width


def _width(module: nn.Module) -> int | None:
    """The width that the module's weights or `normalized_shape` imply; None if they imply none."""
    sizes = [weight.numel() for weight in module.parameters(recurse=False) if weight.dim() >= 1]
    shape = getattr(module, "normalized_shape", None)
    if sizes:
        return max(sizes)
    if isinstance(shape, tuple) and len(shape) == 1:
        return int(shape[0])
    return None


def _probed(module: nn.Module, width: int) -> AdaptedNorm | None:
    """The norm that a copy with random weights computes; None if it is no norm or cannot be
    copied.
    """
    generator = torch.Generator().manual_seed(0)
    try:
        trial = copy.deepcopy(module).cpu().double()
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    weights: dict[str, Tensor] = dict(trial.named_parameters(recurse=False))
    if any(weight.is_meta for weight in weights.values()):
        return None
    if len(weights) < len(list(trial.parameters())):
        return None
    for weight in weights.values():
        weight.copy_(0.5 + torch.rand(weight.shape, generator=generator, dtype=torch.float64))
    x = torch.randn(len(SIZES), 1, width, generator=generator, dtype=torch.float64)
    # a non-zero mean shows whether the module centres
    x = (x + 0.3) * x.new_tensor(SIZES).view(-1, 1, 1)
    try:
        plus = trial(x)
        minus = trial(-x)
        if not isinstance(plus, Tensor) or plus.shape != x.shape or not plus.is_floating_point():
            return None
    except FOREIGN_ERRORS:
        return None
    channels = getattr(module, "channels", -1)
    others = [weight for weight in weights.values() if weight.numel() != 1]
    if not all(_counts(weight, channels, width) for weight in others):
        return None  # a column beside a row, as of a low-rank adapter, is no gain of the channels
    odd = (plus.double() - minus) / 2
    even = (plus.double() + minus) / 2
    weights |= _rows_of(weights)
    vectors = {
        name: weight.flatten() for name, weight in weights.items() if _is_vector(weight, width)
    }
    offsets = [name for name, weight in vectors.items() if _close(even, weight.expand_as(even))]
    if offsets:
        offset = offsets[0]
    elif _close(even, torch.zeros_like(even)):
        offset = None
    else:
        return None
    gains: list[str | None] = [name for name in vectors if name != offset] or [None]
    for gain, shift, centred in product(gains, (0.0, 1.0), (True, False)):
        if gain is None:
            w = x.new_ones(())
        else:
            w = shift + vectors[gain]
        if centred:
            r = x - x.mean(-1, keepdim=True)
        else:
            r = x
        factors = (odd * r * w).sum(-1) / (r * w).square().sum(-1)  # f/sigma of each state
        if not _close(factors.unsqueeze(-1) * r * w, odd):
            continue
        mean_square = r.square().mean(-1).flatten()
        form = _fitted(
            trial, factors.flatten(), mean_square, Form(centred, shift, 0.0, gain, offset)
        )
        if form is None or not _holds_at_other_weights(trial, form, x, generator):
            continue
        miss = (_sigma(form, mean_square) * factors.flatten() / form.factor - 1).abs()
        exact = bool(miss[mean_square > 0.1].max() <= EXACT)
        form = _in_its_dtype(module, trial, x[1:2], r[1:2] * w, form)
        norm = AdaptedNorm(module, form, width, exact=exact)
        like = next(module.parameters(), None)
        if like is None:
            return norm
        return norm.to(like.device)
    return None


def _holds_at_other_weights(
    trial: nn.Module, form: Form, x: Tensor, generator: torch.Generator
) -> bool:
    """Whether the form gives what the copy computes at other weights, of either sign. It does not
    if a weight is part of the factor or of eps, or if the gain is a function of its weight, such as
    weight/|weight|. The copy has its weights again afterwards.
    """
    before = [(weight, weight.clone()) for weight in trial.parameters()]
    try:
        for weight, value in before:
            other = 0.5 + torch.rand(value.shape, generator=generator, dtype=torch.float64)
            signs = torch.rand(value.shape, generator=generator).round() * 2 - 1
            weight.copy_(other * signs)
        computed = trial(x)
        width = x.shape[-1]
        return _close(computed.double(), AdaptedNorm(trial, form, width)(x))
    except FOREIGN_ERRORS:
        return False
    finally:
        for weight, value in before:
            weight.copy_(value)


def _rows_of(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The rows of weights that hold those of several norms, by names such as n1[2] and g[0, 1]."""
    rows = {}
    for name, weight in weights.items():
        if weight.dim() > 1 and weight.numel() > max(weight.shape):
            for place in product(*map(range, weight.shape[:-1])):
                rows[f"{name}[{', '.join(map(str, place))}]"] = weight[place]
    return rows


def _in_its_dtype(
    module: nn.Module, trial: nn.Module, x: Tensor, scaled: Tensor, form: Form
) -> Form:
    """The form with the eps of the module's own dtype: torch's RMSNorm uses the dtype's rounding if
    no eps is given.
    """
    like = next(module.parameters(), None)
    # a norm without weights may state its dtype, as operations do
    dtype = getattr(module, "dtype", None) if like is None else like.dtype
    if not isinstance(dtype, torch.dtype) or dtype == torch.float64 or form.added:
        return form
    low = trial.to(dtype)
    y = (low(x.to(dtype)) - low(-x.to(dtype))).double() / 2
    square = form.factor**2 * float(scaled.square().sum() / (y * scaled).sum()) ** 2
    if form.centred:
        centred = x - x.mean(-1, keepdim=True)
    else:
        centred = x
    eps = square - float(centred.square().mean())
    rounding = torch.finfo(dtype).eps
    if form.eps < 1e-3 * rounding and abs(eps - rounding) < 0.1 * rounding:
        return replace(form, eps=rounding)
    return form


def _fitted(trial: nn.Module, factors: Tensor, mean_square: Tensor, form: Form) -> Form | None:
    """The form with a factor f and an eps that give f/sigma of each state, if such numbers
    exist.
    """
    if not factors[:2].all():
        return None  # it maps a state to 0
    found: tuple[float, Form] | None = None
    for power in (2, 1):  # sigma^2 = m + eps, or sigma = sqrt(m) + eps
        high, low = (1 / float(factors[i]) ** power for i in (0, 1))
        m_high, m_low = (float(mean_square[i]) ** (power / 2) for i in (0, 1))
        slope = (high - low) / (m_high - m_low)  # 1/f^power
        if not slope > 0:
            continue
        factor = slope ** (-1 / power)
        eps = low / slope - m_low
        if eps > m_high:
            continue  # it scales states of all sizes alike: an elementwise map and no norm
        attributes = [abs(value) for value in vars(trial).values() if isinstance(value, float)]
        if eps > 1e-6 * m_low:
            eps = likely_number(eps, attributes, SHORT, digits=3)
        else:
            eps = 0.0
        if abs(factor - 1) <= 1e-6:
            factor = 1.0
        if power == 2:
            fitted = replace(form, factor=factor, eps=eps, added=0.0)
        else:
            fitted = replace(form, factor=factor, eps=0.0, added=eps)
        miss = float((_sigma(fitted, mean_square) * factors / factor - 1).abs().max())
        # of a small eps both forms are near, and the states between show which one it is
        if miss <= 64 * unit(torch.float32) and (found is None or miss < found[0] / NEARER):
            found = (miss, fitted)
    return None if found is None else found[1]


def _sigma(form: Form, mean_square: Tensor) -> Tensor:
    return (mean_square + form.eps).sqrt() + form.added


def _close(computed: Tensor, expected: Tensor) -> bool:
    size = 1e-9 + expected.abs().amax(-1, keepdim=True)
    return bool(((computed - expected).abs() <= 64 * unit(torch.float32) * size).all())


def _by_attributes(module: nn.Module) -> AdaptedNorm | None:
    """The norm of a module that keeps its numbers under the usual names. The module is run as it
    is, because its kernel may need its device.
    """
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([[1.0], [1.0], [1e-2], [1e-3]])
    x = torch.randn(4, len(weight), generator=generator) * sizes
    x = (x + 0.3 * x.abs().amax(-1, keepdim=True)).to(weight)
    try:
        z = module(x)
    except FOREIGN_ERRORS:
        return None
    if not isinstance(z, Tensor) or z.shape != x.shape:
        return None
    eps = _stated_eps(module)
    norms = [
        AdaptedNorm(module, Form(centred, shift, eps))
        for centred, shift in product((True, False), (0.0, 1.0))
    ]
    misses = []
    for norm in norms:
        difference = (z - norm.gamma * norm.standardize(x) - norm.beta).abs()
        misses.append(float((difference / (1 + z.abs())).max()))
    # the nearest, since in low precision or with small gains several are near
    smallest = min(misses)
    if smallest <= 64 * unit(z.dtype):
        return norms[misses.index(smallest)]
    return None


def named_norms(module: nn.Module) -> str:
    """The names of the norms inside of a module, as one text; "" if there is none."""
    parts = module.named_modules()
    return ", ".join(path.rpartition(".")[2] for path, part in parts if as_norm(part) is not None)


def _stated_eps(module: nn.Module) -> float:
    """The eps that the module keeps under a usual name."""
    for name in EPS_NAMES:
        eps = getattr(module, name, None)
        if isinstance(eps, float):
            return eps
    return UNSAID_EPS
