import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ctrans.dynamics.fields import ACTIVATIONS
from ctrans.dynamics.fields.attention import check_temperature, qk_norm_name
from ctrans.dynamics.norm import NORMS
from ctrans.dynamics.norm.norm import DividingNorm
from ctrans.dynamics.placement import PLACEMENTS, spell
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.model.initialisation import INITIALISATIONS
from ctrans.model.size import check_buildable, number_of_weights
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from solvers import METHODS, ConfigError, SolveError, Status
from tests import typecheck
from tests.helpers import (
    DEVICES,
    NAMES,
    learned,
    small_config,
    small_model,
    tokens,
)
from tests.model import plain_gpt


def configured(**changes):
    """A configuration as users make it, whose fields' types nobody checked before."""
    config = object.__new__(GPTConfig)
    for key, value in {**dataclasses.asdict(small_config("peri")), **changes}.items():
        object.__setattr__(config, key, value)
    config.__post_init__()
    return config


every = pytest.mark.parametrize("name", NAMES)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("dt", [1.0, 0.1])
def test_pre_ln_agrees_with_a_plain_gpt_that_shares_its_weights(dtype, tolerance, dt):
    model = learned(
        GPT(
            GPTConfig(vocab_size=50, context=32, depth=4, width=32, heads=4, placement="pre", dt=dt)
        ).to(dtype),
        0.02,
    )
    ids, targets = tokens(3, 20, 50), tokens(3, 20, 50, seed=1)
    weights = model.state_dict()
    got, loss = model(ids, targets)
    expected = plain_gpt.logits(weights, ids, 4, 4, dt)
    assert float((got - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))
    assert float(loss) == pytest.approx(
        float(plain_gpt.loss(weights, ids, targets, 4, 4, dt)), rel=10 * tolerance
    )


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_the_trajectory_of_euler_ends_at_the_discrete_models_hidden_state(name, dtype, device):
    model, ids = small_model(name, dtype).to(device), tokens().to(device)
    solution = model.trajectory(ids)
    assert len(solution.states) == 2 * model.config.depth + 1
    assert solution.times == model.depth.times
    assert torch.equal(solution.x1, model.depth(model.embed(ids)))
    assert torch.equal(model.head(solution.x1), model(ids)[0])


@every
@pytest.mark.parametrize("norm", sorted(NORMS))
def test_every_placement_and_norm_can_be_trained(name, norm):
    model = GPT(small_config(name, norm=norm))
    model(tokens(), tokens(seed=1))[1].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@every
def test_no_token_sees_a_later_one(name):
    model, ids = small_model(name), tokens(1, 8)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 11
    assert torch.equal(model(ids)[0][:, :5], model(changed)[0][:, :5])
    assert not torch.equal(model(ids)[0][:, 5:], model(changed)[0][:, 5:])


def test_deepnorm_is_norm_of_alpha_x_plus_f_with_eps_scaled():
    alpha, eps = 2.5, 1e-3
    model = small_model("deepnorm", alpha=alpha, eps=eps / alpha**2, dt=1.0)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    for sublayer in model.depth.sublayers:
        norm = sublayer.state_norm
        expected = torch.nn.functional.layer_norm(
            alpha * x + sublayer.field(x), (16,), norm.weight, norm.bias, eps
        )
        assert torch.allclose(sublayer.step(x, 1.0), expected, atol=1e-13)


def test_the_same_seed_gives_the_same_bits_and_leaves_the_global_generator_free_to_differ():
    torch.manual_seed(5)
    first = GPT(small_config("peri"), seed=3).state_dict()
    torch.manual_seed(6)
    second = GPT(small_config("peri"), seed=3).state_dict()
    other = GPT(small_config("peri"), seed=4).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(first["token_embedding.weight"], other["token_embedding.weight"])


def test_the_parameter_count_is_the_number_of_matrix_entries():
    config = small_config("peri")
    model = GPT(config)
    assert number_of_weights(config) == sum(p.numel() for p in model.parameters() if p.dim() == 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": "perri"}, "did you mean 'peri'"),
        ({"norm": "layer_norm"}, "did you mean 'layernorm'"),
        ({"activation": "geluu"}, "did you mean 'gelu'"),
        ({"initialisation": "xaver"}, "did you mean 'xavier'"),
        ({"dt": 0.0}, "dt = 0.0"),
        ({"dt": -1.0}, "dt = -1.0"),
        ({"dt": math.nan}, "dt = nan"),
        ({"dt": math.inf}, "dt = inf"),
        ({"depth": 0}, "depth = 0"),
        ({"width": -4}, "width = -4"),
        ({"heads": 0}, "heads = 0"),
        ({"context": 0}, "context = 0"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"ffn_width": 0}, "ffn_width = 0"),
        ({"width": 10, "heads": 3}, "width 10 is not divisible by heads 3"),
        ({"temperature": 0.0}, "temperature = 0.0"),
        ({"eps": -1e-5}, "eps = -1e-05"),
        ({"alpha": 2.0}, "has no meaning for placement 'peri'"),
        ({"width": 4_000_000, "heads": 1}, "GB and this machine has"),
        ({"norm": {}}, "unknown norm"),
        ({"causal": "yes"}, "causal = 'yes'"),
        ({"dt": 1e308}, "dt = 1e[+]308: give a positive residual scale of at most 1e37"),
    ],
)
def test_configurations_that_make_no_sense_are_named(changes, words):
    with pytest.raises(ConfigError, match=words):
        GPT(configured(**changes))


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(3).numpy()])
def test_a_temperature_that_has_no_comparison_with_the_default_is_named(value):
    with pytest.raises(ConfigError, match=r"temperature = an? (tensor|array)"):
        configured(temperature=value)


@pytest.mark.parametrize(
    "value", [torch.nn.Linear.__new__(torch.nn.Linear), "x" * 10**6, torch.ones(2, 2)]
)
@pytest.mark.parametrize("give", [lambda value: configured(bias=value), spell, qk_norm_name])
def test_a_value_whose_repr_fails_or_is_long_is_named_on_one_line(give, value):
    with pytest.raises(ConfigError) as error:
        give(value)
    assert re.fullmatch(".{,300}", str(error.value))


@pytest.mark.parametrize("seed", [-1, 10**20, 1.5, "x"])
def test_a_seed_that_is_none_is_named(seed):
    with pytest.raises(ConfigError, match="seed = "):
        check_buildable(small_config("peri"), seed)


@pytest.mark.parametrize(
    "ids", [[1, 2], torch.ones(2), torch.tensor(1), torch.ones(2, dtype=torch.bool)]
)
def test_what_are_no_tokens_is_named(ids):
    with pytest.raises(ConfigError, match="the tokens are"):
        small_model("peri").embed(ids)


def test_targets_that_do_not_fit_are_named():
    model, ids = small_model("peri"), tokens()
    with pytest.raises(ConfigError, match="one target per token"):
        model(ids, ids[:1])
    with pytest.raises(ConfigError, match="targets run from -7"):
        model(ids, torch.full_like(ids, -7))
    with pytest.raises(ConfigError, match="all 16 targets are -1 or -100"):
        model(ids, torch.full_like(ids, -100))


def test_logits_and_states_that_do_not_fit_are_named():
    model, ids = small_model("peri"), tokens()
    logits = model(ids)[0]
    with pytest.raises(ConfigError, match="logits = None"):
        model.loss(None, ids, ids)
    with pytest.raises(ConfigError, match="tokens = None"):
        model.loss(logits, None, ids)
    with pytest.raises(ConfigError, match="give one row per target"):
        model.loss(logits[:, 1:], ids, ids)
    for x in (None, 1.0, torch.tensor(1.0)):
        with pytest.raises(ConfigError, match=r"x = .*: give states of width 16"):
            model.head(x)


def test_a_configuration_cannot_be_changed_into_a_wrong_one():
    config = small_config("peri")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dt = -1
    with pytest.raises(ConfigError):
        dataclasses.replace(config, dt=-1)


def test_tokens_that_do_not_fit_are_named():
    model = small_model("peri")
    with pytest.raises(ConfigError, match="17 tokens exceed the context of 16"):
        model(tokens(1, 17))
    with pytest.raises(ConfigError, match="tokens run from 11 to 11, the vocabulary from 0 to 10"):
        model(torch.tensor([[11]]))


POSSIBLE = {
    "depth": 2,
    "width": 8,
    "heads": 2,
    "context": 12,
    "placement": "peri",
    "norm": "layernorm",
    "activation": "gelu",
    "dt": 0.5,
    "eps": 1e-5,
    "initialisation": "gpt2",
    "method": "rk4",
    "steps": 2,
    "rtol": None,
    "length": 5,
}


FAILURES = [
    each.value
    for each in (Status.NON_FINITE, Status.STEP_UNDERFLOW, Status.TOO_MANY_STEPS, Status.NOT_SOLVED)
]
"""How an integration may fail, in the words that its error begins with."""


@pytest.mark.slow
@given(
    depth=st.integers(-1, 3),
    width=st.integers(-1, 24) | st.just(10**9),
    heads=st.integers(-1, 5),
    context=st.integers(-1, 12),
    placement=st.sampled_from([*PLACEMENTS, "pree"]),
    norm=st.sampled_from([*NORMS, "batchnorm"]),
    activation=st.sampled_from([*ACTIVATIONS, "erf"]),
    dt=st.floats(),
    eps=st.floats(),
    initialisation=st.sampled_from([*INITIALISATIONS, "zeros"]),
    method=st.sampled_from([*METHODS, "leapfrog"]),
    steps=st.integers(0, 3),
    rtol=st.none() | st.floats(),
    length=st.integers(0, 14),
)
@settings(max_examples=250)
@example(**POSSIBLE)
@example(**{**POSSIBLE, "method": "tsit5", "rtol": 1e-3})
def test_a_request_is_refused_exactly_where_it_cannot_be(method, steps, rtol, length, **config):
    c, tokens_given = SimpleNamespace(**config), max(length, 1)
    sizes = (
        min(c.depth, c.width, c.heads, c.context) >= 1
        and c.width < 10**9
        and c.width % max(c.heads, 1) == 0
    )
    names = (
        c.placement in PLACEMENTS
        and c.norm in NORMS
        and c.activation in ACTIVATIONS
        and c.initialisation in INITIALISATIONS
    )
    numbers = 0 < c.dt < math.inf and 2 * c.depth * c.dt < math.inf and 0 <= c.eps < math.inf
    adaptive = method in METHODS and METHODS[method].adaptive
    resolved = rtol is None or 4 * torch.finfo(torch.float64).eps <= rtol < math.inf
    solver = method in METHODS and (
        steps == 1 and resolved if adaptive else steps >= 1 and rtol is None
    )
    around = names and PLACEMENTS[c.placement].state_norm
    # the ODE behind a norm around the state is on the norm's image, a surface
    model = (
        not around or issubclass(NORMS[c.norm], DividingNorm) or (method == "euler" and steps == 1)
    )
    possible = sizes and names and numbers and solver and model and tokens_given <= c.context

    def request():
        model = GPT(GPTConfig(vocab_size=7, **config)).double()
        return model.trajectory(tokens(1, tokens_given, 7), method=method, steps=steps, rtol=rtol)

    if not possible:
        with pytest.raises(ConfigError):
            request()
        return
    # what can overflow, or ask for too small a step; short steps behind a norm cannot, nor adaptive
    # ones of a moderate tolerance
    moderate = (
        METHODS[method].order >= 5 and rtol is not None and 1e-4 <= rtol <= 1e-2 and c.eps >= 1e-5
    )
    may_fail = c.dt > 0.5 or not moderate if adaptive else c.dt > 1 or c.eps == 0
    may_fail |= (
        around and c.width == 1
    )  # a centred norm's image is a point there, and has no tangent
    try:
        solution = request()
    except SolveError as error:
        if may_fail and re.match(f"({'|'.join(FAILURES)}) in segment \\d+ at t = ", str(error)):
            return
        raise
    assert len(solution.states) == 2 * config["depth"] + 1
    assert torch.isfinite(solution.x1).all()


@pytest.mark.parametrize("count", [0, 8])
def test_targets_without_one_to_predict_are_refused_and_not_nan(count):
    model, x = GPT(small_config("peri")), tokens()[:, :count]
    with pytest.raises(ConfigError, match=f"all {2 * count} targets are -1"):
        model(x, torch.full_like(x, -1))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, 1e39, 1e-40, True])
def test_temperatures_that_scores_cannot_be_divided_by_are_refused(temperature):
    with pytest.raises(ConfigError, match="temperature = "):
        configured(temperature=temperature).__post_init__()
    with pytest.raises(ConfigError, match="temperature = "):
        check_temperature(temperature)


@pytest.mark.parametrize("temperature", [1e-12, 1e30])
def test_the_largest_and_smallest_temperatures_give_numbers(temperature):
    model = GPT(small_config("peri", temperature=temperature))
    loss = model(tokens(), tokens())[1]
    loss.backward()
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.cases(1)
@pytest.mark.parametrize("of", ["model", "objective"])
def test_it_compiles_to_one_graph(of):
    """A break by a check, or by a fraction in torch 2.11, made a step on a GPU a third slower."""
    typecheck.allow(False)  # jaxtyping's checks cannot be compiled
    model = GPT(small_config("peri"))
    module, batch = (
        (model, (tokens(),))
        if of == "model"
        else (Objective(model, TrainConfig()), (tokens(), tokens()))
    )
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*batch)[0], module(*batch)[0])


@pytest.mark.slow
def test_compiled_on_the_cpu_it_refuses_unknown_tokens():
    typecheck.allow(False)
    torch._dynamo.reset()
    compiled = torch.compile(GPT(small_config("peri")), backend="eager")
    with pytest.raises(IndexError, match="out of range"):
        compiled(tokens() + 100)
