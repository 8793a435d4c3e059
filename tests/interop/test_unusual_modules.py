"""A third stranger's models: each is opened in one line, its states are its own as hooks see them,
and instruments run on it.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import ctrans
from ctrans.base.as_found import as_found
from solvers import ConfigError
from tests.interop import unusual_modules as unusual
from tests.interop.unusual_modules import VOCABULARY, TiedGPT, wrapped

TOKENS = torch.randint(0, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(1))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


GAMES = {
    "states": numbers(3, 4, 4),
    "actions": torch.arange(12).view(3, 4) % 6,
    "returns": numbers(3, 4, 1),
    "timesteps": torch.arange(4).expand(3, -1),
}
BATCH = {"input_ids": TOKENS, "mask": torch.ones(3, 9, dtype=torch.int64)}
MODELS = {
    "perceiver": (unusual.PerceiverEncoder, numbers(3, 20, 3), False),
    "decision transformer": (unusual.DecisionTransformer, GAMES, True),
    "speech": (unusual.SpeechClassifier, numbers(3, 200), False),
    "edges": (
        unusual.EdgeTransformer,
        {"nodes": numbers(3, 5, 3), "edges": numbers(3, 5, 5, 2)},
        False,
    ),
    "tied by F.linear": (TiedGPT, None, True),
    "stochastic depth": (lambda: TiedGPT(unusual.StochasticBlock), None, True),
    "skipped blocks": (lambda: TiedGPT(unusual.SkippingBlock), None, True),
    "dicts": (unusual.DictGPT, None, True),
    "a batch": (unusual.BatchGPT, BATCH, True),
    "a batch by its name": (unusual.BatchGPT, {"batch": BATCH}, True),
    "bfloat16": (lambda: TiedGPT().bfloat16(), None, True),
    "compiled": (lambda: torch.compile(TiedGPT(), backend="eager"), None, True),
    "parallel": (lambda: nn.DataParallel(TiedGPT()), None, True),
    "adapters": (lambda: wrapped(TiedGPT(), unusual.LoRA), None, True),
    "weight norms": (lambda: wrapped(TiedGPT(), parametrizations.weight_norm), None, True),
    "spectral norms": (lambda: wrapped(TiedGPT(), parametrizations.spectral_norm), None, True),
    "bytes": (lambda: wrapped(TiedGPT(), unusual.Int8Linear), None, True),
}


def made(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name][0]().eval()


def own_states(module, example):
    """What the module's blocks put out, seen by hooks, and its output."""
    module = getattr(module, "_orig_mod", getattr(module, "module", module))
    names = ("tower", "layers", "body", "blocks")
    blocks = next(part for name, part in module.named_modules() if name in names)
    seen = []
    handles = [
        b.register_forward_hook(
            lambda _, __, y: seen.append(y["hidden"] if isinstance(y, dict) else y)
        )
        for b in blocks
    ]
    with (
        as_found(module),
        torch.no_grad(),
    ):  # torch's kernels round otherwise for weights that need gradients
        as_one = isinstance(module, unusual.BatchGPT)
        output = (
            module(**example)
            if isinstance(example, dict) and not as_one
            else module(TOKENS if example is None else example)
        )
    for handle in handles:
        handle.remove()
    return seen, output["logits"] if isinstance(output, dict) else output


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", MODELS)
def test_states_and_output_are_the_modules_own(name):
    module, (_, example, causal) = made(name), MODELS[name]
    opened = ctrans.open_model(module, example=example)
    plain = BATCH if name.startswith("a batch") else example
    main = (
        TOKENS
        if plain is None
        else next(iter(plain.values()))
        if isinstance(plain, dict)
        else plain
    )
    expected, output = own_states(module, plain)
    with torch.no_grad():
        states = opened.trajectory(main).states
        before = 1 if name == "perceiver" else 0  # its latents read the input first
        assert len(states) == before + 2 * len(expected) + 1
        states = states[before:]
        if before:  # torch rounds otherwise for its expanded queries than for states like them
            for own, state in zip(expected, states[2::2], strict=True):
                torch.testing.assert_close(state, own, rtol=0, atol=1e-6)
            expected = [states[0]]
            for block in module.tower:
                expected.append(block(expected[-1]))
            expected = expected[1:]
        for own, state in zip(expected, states[2::2], strict=True):
            assert torch.equal(own, state)
        # the sum of a mean over tokens depends on the order of the state's numbers in memory
        assert torch.allclose(opened.head(states[-1]), output, rtol=1e-6, atol=1e-6)
    placement = "none, pre" if before else "pre"
    assert (opened.causal, opened.model.config.placement) == (causal, placement)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "bfloat16"])
def test_a_diagnosis_of_it_runs(name):
    example = MODELS[name][1]
    opened = ctrans.open_model(made(name), example=example)
    plain = BATCH if name.startswith("a batch") else example
    main = (
        TOKENS
        if plain is None
        else next(iter(plain.values()))
        if isinstance(plain, dict)
        else plain
    )
    found = ctrans.diagnose(opened, main, torch.zeros_like(main) if opened.vocabulary else main)
    assert "costates" not in found.missing
    assert {finding.severity for finding in found.findings} <= {"note", "serious"}


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["weight norms", "spectral norms"])
def test_weights_that_torch_computes_at_each_use_hide_no_block(name):
    module = made(name)
    opened = ctrans.open_model(module)
    expected, _ = own_states(module, None)
    assert all(map(torch.equal, opened.trajectory(TOKENS).states[2::2], expected))
    assert "attention Attend, FFN Sequential" in opened.described
    first, last = module.blocks[0].think[0], module.blocks[0].think[2]
    for matrix, own in zip(opened.depth.sublayers[1].field.matrices(), (first, last), strict=True):
        assert torch.equal(matrix.weight, own.weight)
        assert not isinstance(own.weight, nn.Parameter)
    assert len(ctrans.Monitor(module).sites.by_depth) == 2 * len(module.blocks)


def test_what_makes_a_weight_is_no_block():
    module = made("weight norms")
    module.ln = nn.Sequential(
        *(parametrizations.weight_norm(nn.Linear(unusual.WIDTH, unusual.WIDTH)) for _ in range(2))
    )
    assert ctrans.open_model(module).config.placement == "pre"
    with pytest.raises(ConfigError) as refused:
        ctrans.open_model(module, blocks="absent")
    assert ".parametrizations" not in str(refused.value)


def test_an_adapters_own_gradient_is_the_modules():
    """The costate passes the frozen weight and the adapter both."""
    module = made("adapters").double()
    opened = ctrans.open_model(module)
    x = opened.embed(TOKENS)
    with torch.enable_grad():
        start = x.clone().requires_grad_()
        opened.depth(start).square().sum().backward()
        again = x.clone().requires_grad_()
        y = again
        for block in module.blocks:
            y = block(y)
        y.square().sum().backward()
    assert torch.allclose(start.grad, again.grad, rtol=1e-12)


def partly_compiled():
    model = TiedGPT()
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    return model


def quantised():
    return torch.ao.quantization.quantize_dynamic(TiedGPT().eval(), {nn.Linear})


@pytest.mark.cases(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (partly_compiled, "blocks.1 is compiled: open the model first"),
        (quantised, r"blocks\.0\.mix\.q is quantised by torch.ao and has no derivatives"),
    ],
)
def test_what_cannot_be_read_is_a_line(make, words):
    with pytest.raises(ConfigError, match=words):
        ctrans.open_model(make())
