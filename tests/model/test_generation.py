import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from ctrans.dynamics.scheme import Scheme
from ctrans.model.generation import Sampling, generate, sample, stream
from ctrans.model.gpt import GPT
from ctrans.training.objective import Objective
from ctrans.training.settings import TrainConfig
from solvers import ConfigError, SolveError, solve
from tests.helpers import DEVICES, NAMES, learned, small_config, small_model, tokens

PROMPT = tokens(1, 5)[0]


def model_at(name="peri", **changes):
    """A model of single precision and unlike logits, so that draws can differ."""
    return learned(GPT(small_config(name, **changes)), 0.3).requires_grad_(False)


MODEL = model_at(depth=1)


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", NAMES)
def test_temperature_zero_takes_the_likeliest_token_of_the_whole_model(name):
    """The oracle runs the model's own forward pass on everything so far, cut to the context."""
    model = small_model(name)
    made, text = generate(model, PROMPT, 20, temperature=0.0), PROMPT
    for token in made:
        logits = model(text[-model.config.context :])[0]
        assert int(token) == int(logits[-1].argmax())
        text = torch.cat([text, token[None]])
    assert len(text) > model.config.context


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["pre", "peri", "post"])
def test_an_integrated_model_takes_the_likeliest_token_at_the_end_of_its_ode(name):
    """The oracle is another method, to six digits; the discrete model is a thousand times further
    off.
    """
    model = small_model(name, dt=0.5)
    scheme, text = Scheme("rk4", 16), PROMPT
    for token in generate(model, PROMPT, 2, temperature=0.0, scheme=scheme):
        exact = solve(model.depth.segments(continuous=True), model.embed(text), method="tsit5").x1
        ours, discrete = (
            how.last_state(model.depth, model.embed(text)) for how in (scheme, Scheme())
        )
        assert (ours - exact).abs().max() < 1e-3 * (discrete - exact).abs().max()
        assert int(token) == int(model.head(exact)[-1].argmax())
        text = torch.cat([text, token[None]])


@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "reversible", "adjoint"])
@pytest.mark.parametrize(
    ("method", "steps", "rtol"),
    [("euler", 1, None), ("euler", 2, None), ("rk4", 2, None), ("tsit5", 1, 1e-3)],
)
def test_the_state_at_the_end_is_the_one_that_the_objective_evaluates(
    gradient, method, steps, rtol
):
    model, text = small_model("peri"), tokens(2, 9)
    objective = Objective(
        model, TrainConfig(method=method, steps=steps, rtol=rtol, gradient=gradient)
    ).eval()
    with torch.no_grad():
        x = Scheme(method, steps, rtol, gradient=gradient).last_state(
            model.depth, model.embed(text[:, :-1])
        )
        loss = torch.nn.functional.cross_entropy(
            model.head(x).flatten(0, -2), text[:, 1:].flatten()
        )
        assert torch.equal(loss, objective(text[:, :-1], text[:, 1:]).cross_entropy)


@given(st.integers(0, 2**63 - 1), st.floats(0.1, 3), st.sampled_from([None, 1, 4, 11]))
@settings(max_examples=15)
def test_the_same_seed_gives_the_same_text_whatever_else_is_drawn(seed, temperature, top_k):
    model = MODEL
    first = generate(model, PROMPT, 4, temperature=temperature, top_k=top_k, seed=seed)
    torch.rand(1)
    assert torch.equal(
        generate(model, PROMPT, 4, temperature=temperature, top_k=top_k, seed=seed), first
    )


def test_other_seeds_give_other_texts():
    texts = {
        tuple(generate(model_at(), PROMPT, 12, temperature=2.0, seed=seed).tolist())
        for seed in range(8)
    }
    assert len(texts) == 8


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (2.0, 3), (1.0, 1)])
def test_tokens_are_drawn_with_the_probabilities_of_the_scaled_softmax_of_the_likeliest(
    temperature, top_k
):
    logits = torch.tensor([0.3, -1.0, 2.0, 1.0, -math.inf, 1.5], dtype=torch.float64)
    weights = [math.exp(float(z) / temperature) for z in logits]
    kept = sorted(range(6), key=lambda i: -weights[i])[:top_k]
    expected = torch.tensor([weights[i] if i in kept else 0.0 for i in range(6)]).double()
    draws = sample(
        logits.expand(40_000, 6), Sampling(temperature, top_k), torch.Generator().manual_seed(0)
    )
    frequencies = torch.bincount(draws, minlength=6) / len(draws)
    assert torch.allclose(
        frequencies.double(), expected / expected.sum(), atol=4 * 0.5 / math.sqrt(len(draws))
    )
    assert float(frequencies[expected == 0].sum()) == 0


@pytest.mark.parametrize("temperature", [1e-300, 1e-9])
def test_a_temperature_near_zero_is_greedy(temperature):
    logits = torch.randn(7, 11, dtype=torch.float64)
    draws = sample(logits, Sampling(temperature), torch.Generator())
    assert torch.equal(draws, sample(logits, Sampling(0.0), torch.Generator()))


def test_a_stream_makes_the_same_tokens_one_by_one_and_leaves_gradients_on_in_between():
    model = model_at().requires_grad_()
    made = []
    for token in stream(model, PROMPT, 6, Sampling(seed=3)):
        assert torch.is_grad_enabled()
        assert not token.requires_grad
        made.append(token)
    assert torch.equal(torch.stack(made), generate(model, PROMPT, 6, seed=3))


def test_a_batch_of_prompts_is_continued_row_by_row():
    model, prompts = small_model("pre"), tokens(3, 5)
    made = generate(model, prompts, 7, temperature=0.0)
    assert made.shape == (3, 7)
    for prompt, row in zip(prompts, made, strict=True):
        assert torch.equal(generate(model, prompt, 7, temperature=0.0), row)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_device_and_dtype_generates(device, dtype):
    model = small_model("peri", dtype).to(device)
    assert generate(model, PROMPT.to(device), 3).device.type == "cpu"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 0}, "tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": math.nan}, "temperature = nan"),
        ({"temperature": math.inf}, "temperature = inf"),
        ({"top_k": 0}, "top_k = 0"),
        ({"top_k": 12}, "top_k = 12 of a vocabulary of 11"),
        ({"seed": -1}, "seed = -1"),
        ({"prompt": torch.tensor([], dtype=torch.int64)}, "prompt is empty"),
        ({"prompt": torch.tensor([11])}, "the vocabulary from 0 to 10"),
    ],
)
def test_a_request_that_cannot_be_is_refused_before_anything_is_made(changes, words):
    drawn = {key: value for key, value in changes.items() if key not in ("prompt", "count")}
    asked = {
        "prompt": PROMPT,
        "count": 3,
        **{key: value for key, value in changes.items() if key not in drawn},
    }
    with pytest.raises(ConfigError, match=words):
        stream(small_model("peri"), **asked, sampling=Sampling(**drawn))


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({"method": "rk44"}, "did you mean 'rk4'"),
        ({"steps": 0}, "steps = 0"),
        ({"method": "tsit5", "rtol": -1.0}, "rtol = -1.0"),
        ({"method": "heun", "gradient": "adjont"}, "did you mean 'adjoint'"),
    ],
)
def test_a_scheme_that_cannot_be_is_refused_when_it_is_made(scheme, words):
    with pytest.raises(ConfigError, match=words):
        Scheme(**scheme)


def test_a_model_whose_tokens_see_later_ones_cannot_continue_a_text():
    with pytest.raises(ConfigError, match="causal"):
        generate(small_model("peri", causal=False), PROMPT, 3)


def test_diverged_weights_end_with_an_explanation():
    model = small_model("pre")
    model.depth.sublayers[3].field.output_projection.weight.fill_(torch.nan)
    with pytest.raises(SolveError, match="after 0 tokens are not finite"):
        generate(model, PROMPT, 3)


def test_a_state_that_no_step_reaches_ends_with_an_explanation():
    model = small_model("pre")
    model.depth.sublayers[3].field.output_projection.weight.fill_(torch.nan)
    with pytest.raises(SolveError, match="non-finite in segment 3"):
        generate(model, PROMPT, 3, scheme=Scheme("rk4", 2))


def test_a_top_k_of_the_whole_vocabulary_is_none():
    Sampling(top_k=11).check(11)
    model = model_at()
    assert torch.equal(generate(model, PROMPT, 8, top_k=11), generate(model, PROMPT, 8))
