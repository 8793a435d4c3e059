"""Norms that people write by hand: what they compute says what they are, and states stay the
module's own to the bit.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.control.sets_by_norm import reachable
from ctrans.interop.norms import Form, as_norm
from tests.interop.plain_modules import (
    MADE_NORMS,
    WIDTH,
    LanguageModel,
    MadeNorm,
    PreBlock,
    ids,
    with_norms,
)


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", MADE_NORMS)
def test_a_norm_written_by_hand_is_opened_and_states_are_equal_to_the_bit(kind):
    model = with_norms(kind)
    opened = ctrans.open_model(model, example=ids())
    assert opened.config.placement == "pre"
    with torch.no_grad():
        assert torch.equal(opened.head(opened.depth(opened.embed(ids(seed=3)))), model(ids(seed=3)))


@pytest.mark.parametrize("kind", MADE_NORMS)
def test_gain_offset_centring_and_eps_are_what_the_module_computes(kind):
    torch.manual_seed(1)
    module = MadeNorm(WIDTH, kind).double()
    for weight in module.parameters():
        nn.init.normal_(weight)
    norm = as_norm(module, WIDTH)
    assert norm.centred == (kind in ("annotated", "layer norm, inline"))
    for size in (1e4, 1.0, 1e-3, 1e-6):  # fresh states, where eps counts and where it does not
        x = size * torch.randn(3, 5, WIDTH, dtype=torch.float64)
        formula = norm.gamma * norm.standardize(x) + norm.beta
        assert torch.allclose(formula, module(x), rtol=1e-7, atol=1e-9)
        assert torch.equal(norm(x), module(x))
    x = torch.randn(WIDTH, dtype=torch.float64)
    jacobian = torch.func.jacrev(module)(x)
    assert torch.allclose(norm.jacobian(x), jacobian, rtol=1e-8, atol=1e-9)


def annotated(eps):
    torch.manual_seed(1)
    module = MadeNorm(WIDTH, "annotated").double()
    module.eps = eps
    for weight in module.parameters():
        nn.init.normal_(weight)
    return module.requires_grad_(False)


def test_eps_beside_the_deviation_keeps_a_norm_off_its_image_and_defined_at_zero():
    """The Transformer of the annotated paper: H is approached and never attained, at the rate that
    inputs of a length show.
    """
    module = annotated(1e-2)
    norm = as_norm(module, WIDTH)
    assert (norm.attained, norm.reaches_inside, norm.undefined_at_zero) == (False, True, False)
    zero = torch.zeros(WIDTH, dtype=torch.float64)
    assert torch.equal(module(zero), module.b_2)
    near = 1e-12 * torch.eye(WIDTH, dtype=torch.float64)[norm.gamma.abs().argmax()]
    flat = torch.linalg.matrix_norm(torch.func.jacrev(module)(near), 2)
    assert 0.9 * norm.steepest < float(flat) <= norm.steepest * (1 + 1e-9)
    p = torch.randn(5, WIDTH, dtype=torch.float64)
    w = norm.gamma * p - (norm.gamma * p).mean(-1, keepdim=True)
    for radius in (0.0, 0.1, 10.0):
        best = (p * module(radius * w / w.norm(dim=-1, keepdim=True))).sum(-1)
        assert torch.allclose(
            norm.shortfall(p, radius), norm.support(p) - best, rtol=1e-9, atol=1e-12
        )
    u = 0.3 * w / w.norm(dim=-1, keepdim=True) * WIDTH**0.5
    assert torch.allclose(module(norm.preimage(u)), norm.beta + norm.gamma * u, atol=1e-12)
    assert torch.allclose(
        reachable(norm).chart(p).velocity(u), norm.beta + norm.gamma * u, atol=1e-12
    )
    assert norm.with_eps(0.0).attained


class TwoNorms(nn.Module):
    """X + attention(N_1 X) + ffn(N_2 X)."""

    def __init__(self, eps):
        super().__init__()
        self.one, self.two, self.inner = annotated(eps), annotated(eps), PreBlock(1.0).double()
        nn.init.normal_(self.two.a_2)

    def forward(self, x):
        return (
            x
            + self.inner.mix(self.one(x))
            + self.inner.shrink(F.gelu(self.inner.grow(self.two(x))))
        )


def test_two_norms_with_eps_beside_the_deviation_give_the_modules_states():
    torch.manual_seed(0)
    model = LanguageModel().double()
    model.stack = nn.ModuleList([TwoNorms(1e-2), TwoNorms(1e-2)])
    opened = ctrans.open_model(model.eval())
    states = opened.trajectory(ids()).states
    x = model.tok(ids()) + model.pos(torch.arange(ids().shape[1]))
    for block, state in zip(model.stack, states[1:], strict=True):
        x = block(x)
        assert torch.allclose(x, state, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "module",
    [
        nn.GELU(),
        nn.Tanh(),
        nn.Identity(),
        nn.Softmax(-1),
        nn.PReLU(WIDTH),
        nn.BatchNorm1d(WIDTH).eval(),
        nn.Linear(WIDTH, WIDTH),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_is_no_norm_is_not_taken_for_one(module):
    assert as_norm(module, WIDTH) is None


def mean_square(x):
    return x.square().mean(-1, keepdim=True)


NOT_OF_ONE_GAIN = {
    "a learned eps": lambda m, x: m.weight * x * (mean_square(x) + m.number.exp()).rsqrt(),
    "a number beside the gain": lambda m, x: (
        m.number * m.weight * x * (mean_square(x) + 1e-5).rsqrt()
    ),
    "a squashed number": lambda m, x: (
        m.number.sigmoid() * (1 + m.weight) * x * (mean_square(x) + 1e-5).rsqrt()
    ),
    "gains over their length": lambda m, x: (
        m.weight / m.weight.norm() * x * (mean_square(x) + 1e-5).rsqrt()
    ),
    "sizes of gains": lambda m, x: m.weight.abs() * x * (mean_square(x) + 1e-5).rsqrt(),
}


@pytest.mark.parametrize("name", NOT_OF_ONE_GAIN)
def test_a_norm_whose_numbers_are_weights_is_read_at_these_or_not_at_all(name):
    """A factor or an eps that other weights make is none of this module's."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-0.4, 1.3, WIDTH))
            self.number = nn.Parameter(torch.tensor(-3.0))

        def forward(self, x):
            return NOT_OF_ONE_GAIN[name](self, x)

    module = Own().double()
    norm = as_norm(module, WIDTH)
    x = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    if norm is not None:
        torch.testing.assert_close(norm.gamma * norm.standardize(x) + norm.beta, module(x))


def test_a_dead_norm_is_known_by_what_it_would_compute_with_other_gains():
    module = MadeNorm(WIDTH, "g, inline")
    module.g.data.zero_()
    norm = as_norm(module)
    assert (norm.centred, norm.eps) == (False, 1e-6)
    assert not norm.gamma.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_eps_that_torch_takes_unasked_is_that_of_the_type(dtype):
    norm = as_norm(nn.RMSNorm(WIDTH, dtype=dtype))
    assert norm.eps <= torch.finfo(dtype).eps


class Functional(PreBlock):
    """Norms as functions in the block's own forward."""

    def __init__(self, where):
        super().__init__(1.0)
        del self.ln_a, self.ln_b
        self.where = where

    def forward(self, x):
        def norm(state):
            return F.rms_norm(state, (WIDTH,))

        def ffn(state):
            return self.shrink(F.gelu(self.grow(state)))

        if self.where == "pre":
            x = x + self.mix(norm(x))
            return x + ffn(norm(x))
        if self.where == "peri":
            x = x + norm(self.mix(norm(x)))
            return x + norm(ffn(norm(x)))
        x = norm(x + self.mix(x))
        return norm(x + ffn(x))


@pytest.mark.cases(1)
@pytest.mark.parametrize("where", ["pre", "peri", "post"])
def test_norms_that_a_block_computes_itself_are_found(where):
    torch.manual_seed(0)
    model = LanguageModel()
    model.stack = nn.ModuleList([Functional(where) for _ in range(2)])
    opened = ctrans.open_model(model.eval(), example=ids())
    assert opened.config.placement == where
    with torch.no_grad():
        assert torch.allclose(
            opened.head(opened.depth(opened.embed(ids(seed=3)))), model(ids(seed=3)), atol=1e-6
        )


class Squash(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return torch.tanh(x) * self.g


def test_a_map_before_attention_that_is_no_norm_belongs_to_attention():
    model = LanguageModel().eval()
    for block in model.stack:
        block.ln_a = Squash()
    opened = ctrans.open_model(model, example=ids())
    assert opened.config.placement == "none/pre"
    assert "1 linear map before the last is not queries" in opened.described


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("dtype", "gain", "added"),
    [(torch.bfloat16, 1.0, 1.0), (torch.bfloat16, 0.05, 0.0), (torch.float32, 1e-5, 0.0)],
)
def test_a_norm_that_cannot_be_copied_is_the_nearest_form(centred, dtype, gain, added):
    """In low precision, and with small gains, several forms are within the tolerance."""

    class Fused(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = (
                nn.Parameter((gain * (1 + 0.1 * torch.arange(16))).to(dtype)),
                1e-6,
            )

        def __deepcopy__(self, memo):
            raise RuntimeError("a kernel of this device")

        def forward(self, x):
            wide = x.float() - (x.float().mean(-1, keepdim=True) if centred else 0.0)
            wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            return (wide * (self.weight.float() + added)).to(x)

    with torch.no_grad():
        found = as_norm(Fused(), 16)
    assert found is not None
    assert found.centred == centred
    assert torch.equal(found.gamma.float(), (found.module.weight + added).float())


class ByFormula(nn.Module):
    """gain * divided(x) + offset."""

    def __init__(self, divided):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.offset = nn.Parameter(torch.zeros(WIDTH))
        self.divided = divided

    def forward(self, x):
        return self.gain * self.divided(x) + self.offset


def size(x):
    return x.square().mean(-1, keepdim=True)


@pytest.mark.parametrize(
    ("eps", "rounds"), [(1e-6, False), (1e-8, False), (1e-9, False), (1e-6, True), (1e-8, True)]
)
def test_a_small_eps_is_known_beside_the_deviation_and_in_the_variance(eps, rounds):
    def computed(x):
        return x.float() if rounds else x

    beside = as_norm(ByFormula(lambda x: computed(x) / (size(computed(x)).sqrt() + eps)))
    assert beside.eps == 0
    assert math.isclose(beside.added, eps, rel_tol=1e-2)
    inside = as_norm(ByFormula(lambda x: computed(x) / (size(computed(x)) + eps**1.5).sqrt()))
    assert inside.added == 0
    assert math.isclose(inside.eps, eps**1.5, rel_tol=1e-2)


DESCRIBED = {
    "gamma = gain": lambda x: x / (size(x) + 1e-5).sqrt(),
    "gamma = 0.9843 gain": lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True),
    "gamma = 0.1768 gain": lambda x: x / x.norm(dim=-1, keepdim=True),
}


@pytest.mark.parametrize("gain", DESCRIBED)
def test_a_description_has_the_factor_of_the_gain(gain):
    assert WIDTH == 32  # sqrt(31/32) = 0.9843, 1/sqrt(32) = 0.1768
    norm = as_norm(ByFormula(DESCRIBED[gain]))
    assert f"gamma = {norm.form.described_gain}" == gain
    assert torch.allclose(norm.gamma, norm.form.factor * torch.ones(WIDTH))


@pytest.mark.parametrize(
    ("shift", "gain", "factor", "described"),
    [(0.0, None, 1.0, "1"), (0.0, None, 0.25, "0.25"), (1.0, "w", 0.5, "0.5 (1 + w)")],
)
def test_a_gain_in_words(shift, gain, factor, described):
    assert Form(False, shift, 0.0, gain, factor=factor).described_gain == described


def test_an_opened_model_says_the_factor_of_its_gains():
    model = LanguageModel()
    for block in model.stack:
        block.ln_a = ByFormula(DESCRIBED["gamma = 0.9843 gain"])
    described = ctrans.open_model(model.eval(), example=ids()).described
    assert "gamma = 0.9843 gain" in described
