import math

import pytest
import torch

from ctrans.dynamics.placement import PLACEMENTS
from ctrans.dynamics.weights.functions_of_depth import BASES
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.initialisation import INITIALISATIONS, initialise
from solvers import ConfigError
from tests.helpers import small_config, small_model

ROLES = ("query", "key", "value", "out", "up", "down")
# variances as the papers state them: a function of fan-in and fan-out, and what each matrix is
# multiplied by (N blocks)
XAVIER = lambda a, b: 2 / (a + b)  # noqa: E731
RULES = {
    "gpt2": (lambda a, b: 0.02**2, {"out": lambda n: 1 / (2 * n), "down": lambda n: 1 / (2 * n)}),
    "normal": (lambda a, b: 0.02**2, {}),
    "xavier": (XAVIER, {}),
    "he": (lambda a, b: 2 / a, {}),
    "lecun": (lambda a, b: 1 / a, {}),
    "large": (lambda a, b: 10 / a, {}),
    "small": (lambda a, b: 1 / (10 * a), {}),
    "deepnorm": (
        XAVIER,
        {role: lambda n: 1 / math.sqrt(8 * n) for role in ("value", "out", "up", "down")},
    ),
    "path_length": (
        XAVIER,
        {**{r: lambda n: n**-0.5 for r in ROLES[:4]}, **{r: lambda n: 1 / n for r in ROLES[4:]}},
    ),
    "xiong": (XAVIER, {"query": lambda n: 0.0, "key": lambda n: 0.0}),
}


def matrices(model, block=0):
    fields = [model.depth.sublayers[2 * block + k].field for k in (0, 1)]
    return {matrix.role: matrix.weight for field in fields for matrix in field.matrices()}


def spectral(weight):
    return float(torch.linalg.matrix_norm(weight.detach().double(), 2))


@pytest.mark.parametrize("name", sorted(INITIALISATIONS))
@pytest.mark.parametrize("depth", [2, 5])
def test_initialisations_have_the_variances_that_they_are_named_for(name, depth):
    width, hidden = 96, 384
    variance, factors = RULES[name]
    model = GPT(GPTConfig(width=width, heads=4, depth=depth, initialisation=name)).requires_grad_(
        False
    )
    shapes = {
        **dict.fromkeys(ROLES[:4], (width, width)),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    for role, weight in matrices(model, depth - 1).items():
        expected = variance(*shapes[role]) * factors.get(role, lambda n: 1.0)(depth)
        assert float(weight.var()) == pytest.approx(expected, rel=0.06)
        assert abs(float(weight.mean())) <= 4 * math.sqrt(expected / weight.numel())
    assert float(model.depth.sublayers[0].field.qkv.bias.abs().max()) == 0


def test_the_roles_are_the_maps_matrices_in_the_order_of_the_product():
    model = small_model("pre")
    weights = matrices(model)
    assert list(weights) == list(ROLES)
    attention, ffn = (model.depth.sublayers[k].field for k in (0, 1))
    assert all(
        torch.equal(a, weights[r])
        for a, r in zip(attention.qkv.weight.chunk(3), ROLES, strict=False)
    )
    assert weights["out"].data_ptr() == attention.output_projection.weight.data_ptr()
    assert weights["down"].data_ptr() == ffn.output_projection.weight.data_ptr()
    assert [m.role for f in (attention, ffn) for m in f.matrices() if m.last] == ["out", "down"]


def test_path_length_makes_each_paths_product_of_norms_one_over_n():
    """Emadi, theorem 6.2: G = |W_O||W_Q||W_K||W_V| = O(1/N), and |W_2||W_1| too; here exactly, as
    the draws are the same.
    """
    products = []
    for depth in (1, 4, 16):
        w = {
            r: spectral(m)
            for r, m in matrices(
                GPT(small_config("pre", depth=depth, initialisation="path_length"))
            ).items()
        }
        products.append(
            (depth * w["query"] * w["key"] * w["value"] * w["out"], depth * w["up"] * w["down"])
        )
    for product in products[1:]:
        assert product == pytest.approx(products[0], rel=1e-5)


def test_deepnorm_leaves_the_size_of_the_whole_models_update_independent_of_depth():
    """DeepNet, section 4: sum over 2N sublayers of (v^2 + w^2)/alpha^2 is O(1), v and w the scales
    of the two matrices: here 1.
    """
    sums = []
    for depth in (2, 8, 32):
        config = small_config("deepnorm", depth=depth, initialisation="deepnorm")
        xavier = matrices(GPT(small_config("deepnorm", depth=depth)))
        beta = {
            role: spectral(w) / spectral(xavier[role]) for role, w in matrices(GPT(config)).items()
        }
        assert beta["query"] == beta["key"] == pytest.approx(1, rel=1e-6)
        assert beta["up"] == pytest.approx(beta["value"], rel=1e-5)
        sums.append(
            2
            * depth
            * (beta["value"] ** 2 + beta["out"] ** 2)
            * config.gain_of(PLACEMENTS["deepnorm"]) ** 2
        )
    assert sums == pytest.approx([1, 1, 1], rel=1e-5)


@pytest.mark.cases(3)
@pytest.mark.parametrize("basis", sorted(BASES))
@pytest.mark.parametrize("name", ["gpt2", "xavier", "deepnorm", "path_length"])
def test_functions_of_depth_have_the_rules_variance_at_their_knots(name, basis):
    width, depth, knots = 96, 6, 4
    variance, factors = RULES[name]
    model = GPT(
        GPTConfig(width=width, depth=depth, initialisation=name, depth_weights=basis, knots=knots)
    ).requires_grad_(False)
    attention, ffn = (model.depth.sublayers[k] for k in (0, 1))
    for s in BASES[basis].knots(knots):
        for linear in (attention.field.qkv, attention.field.out, ffn.field.up, ffn.field.down):
            linear.parametrizations.weight[0].move(s)
        for role, weight in matrices(model).items():
            shape = (weight.shape[1], weight.shape[0])
            assert float(weight.var()) == pytest.approx(
                variance(*shape) * factors.get(role, lambda n: 1.0)(depth), rel=0.06
            )
    for sublayer in model.depth.sublayers:
        assert torch.allclose(sublayer.input_norm.weight, torch.ones(width), atol=1e-6)
        assert float(sublayer.field.output_projection.bias.abs().max()) == 0


def test_weights_that_cannot_be_drawn_are_refused():
    generator = torch.Generator()
    with pytest.raises(ConfigError, match="functions of depth"):
        initialise(
            GPT(small_config("pre", depth_weights="linear")).depth.sublayers,
            "xavier",
            generator,
            blocks=2,
        )
    sublayer = small_model("pre").depth.sublayers[0]
    sublayer.field = torch.nn.Identity()
    with pytest.raises(ConfigError, match="type Identity"):
        initialise([sublayer], "xavier", generator, blocks=1)
