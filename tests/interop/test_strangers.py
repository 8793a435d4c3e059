"""24 models as strangers write them: their states and velocities are those that hooks by hand see,
and instruments run on them.
"""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F

import ctrans
from ctrans.base.as_found import as_found
from ctrans.measure.forward.weight_scaling import times
from ctrans.training.monitor.gauges import Gauges
from ctrans.training.monitor.loop_reader import ANOTHER_LOSS, FEW_CLASSES, NO_LOGITS, THE_TARGETS
from ctrans.training.monitor.sites import sites_of
from examples import unlike_models as unlike
from examples.unlike_models import UNLIKE, ids, numbers
from solvers import ConfigError
from tests.interop import strangers


def words(output, targets):
    output = (
        output["logits"]
        if isinstance(output, dict)
        else output[0]
        if isinstance(output, tuple)
        else output
    )
    return F.cross_entropy(output.flatten(0, -2), targets.flatten(), ignore_index=-100)


def sound():
    return {"mel": numbers(3, 8, 20), "tokens": ids(3, 9)}, ids(3, 9)


def table():
    return {"num": numbers(3, 4), "cat": ids(3, 2) % 5}, numbers(3, 1)


def frames():
    return {"feats": numbers(3, 12, 8), "lengths": torch.tensor([12, 8, 5])}, ids(3, 12)


def batch():
    return {"input_ids": ids(3, 9)}, ids(3, 9)


STRANGERS = {
    **UNLIKE,
    "Whisper": (strangers.MiniWhisper, sound, words),
    "Swin": (strangers.Swin, unlike.pictures, unlike.classified),
    "RWKV": (strangers.RWKV, unlike.labels, words),
    "experts and dicts": (strangers.MoELM, batch, words),
    "attention in the block": (strangers.AttrGPT, unlike.labels, None),
    "lists of lists": (strangers.Lucid, unlike.pictures, unlike.classified),
    "FT-Transformer": (strangers.FTT, table, unlike.squared),
    "two streams": (strangers.TwoStream, unlike.paths, lambda output, _: output.square().mean()),
    "Conformer": (strangers.Conformer, frames, words),
}
PLACEMENTS = {
    "blocks in an nn.ModuleDict": "pre",
    "PatchTST": "post",
    "the decoder of nn.Transformer": "post",
    "DiT": "pre",
    "recurrence and attention": "pre",
    "ConvNeXt": "none",
    "MLP-Mixer": "pre",
    "one block in a loop": "pre",
    "CLIP": "pre",
    "Perceiver": "pre",
    "gated attention units": "pre",
    "lists without blocks": "pre",
    "a padding mask, tokens first": "post",
    "a residual MLP on tables": "pre",
    "U-ViT": "pre, unknown",
    "Whisper": "pre",
    "Swin": "pre",
    "RWKV": "pre",
    "experts and dicts": "pre",
    "attention in the block": "pre",
    "lists of lists": "pre",
    "FT-Transformer": "pre",
    "two streams": "pre, mix",
    "Conformer": "pre/pre_post",
}
"""By model, the placement; unknown where states are mixed by other sums than x + f(x)."""
INPUTS = {
    "blocks in an nn.ModuleDict": r"layers\.l\d",
    "PatchTST": r"enc\.layers\.\d",
    "the decoder of nn.Transformer": r"t\.decoder\.layers\.\d",
    "DiT": r"blocks\.\d",
    "recurrence and attention": r"layers\.\d",
    "ConvNeXt": r"body\.\d",
    "MLP-Mixer": r"mix\.\d",
    "one block in a loop": "layer",
    "CLIP": r"visual\.\d",
    "Perceiver": r"blk\.[1-9]",
    "gated attention units": r"body\.\d",
    "lists without blocks": r"norms\.\d",
    "a padding mask, tokens first": r"enc\.layers\.\d",
    "a residual MLP on tables": r"blocks\.\d",
    "U-ViT": r"down\.0|up\.1",
    "Whisper": r"enc\.\d",
    "Swin": r"stages\.0\.\d",
    "RWKV": r"blocks\.\d",
    "experts and dicts": r"h\.\d",
    "attention in the block": r"block\d",
    "lists of lists": r"layers\.\d\.\d",
    "FT-Transformer": r"layers\.\d",
    "two streams": r"blocks\.\d",
    "Conformer": r"layers\.\d",
}
"""By model, modules whose inputs are states."""
TURNED = {
    "PatchTST": lambda x: x.reshape(3, -1, x.shape[-1]),
    "ConvNeXt": lambda x: x.flatten(2).mT,
    "a padding mask, tokens first": lambda x: x.transpose(0, 1),
    "a residual MLP on tables": lambda x: x.unsqueeze(1),
    "Swin": lambda x: x.flatten(1, 2),
}
"""By model, how its own states become (batch, tokens, width)."""
AS_ONE = ("experts and dicts", "FT-Transformer")
"""Models whose one argument is a mapping."""


def opened_of(name, device="cpu"):
    make, example, loss = STRANGERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make().double().to(device)
    inputs, targets = example()

    def double(x):
        return (x.double() if x.is_floating_point() else x).to(device)

    inputs = (
        {key: double(value) for key, value in inputs.items()}
        if isinstance(inputs, dict)
        else double(inputs)
    )
    main = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs
    return (
        module,
        ctrans.open_model(module, example=inputs, loss=loss),
        inputs,
        main,
        double(targets),
    )


def seen(name, module, inputs):
    """What hooks by hand see: the inputs of the modules, and what the module returns."""
    found, pattern = [], INPUTS[name]
    parts = [part for path, part in module.named_modules() if re.fullmatch(pattern, path)]
    handles = [
        part.register_forward_pre_hook(lambda _, given: found.append(given[0].clone()))
        for part in parts
    ]
    with as_found(module), torch.no_grad():
        output = (
            module(**inputs) if isinstance(inputs, dict) and name not in AS_ONE else module(inputs)
        )
    for handle in handles:
        handle.remove()
    output = (
        output["logits"]
        if isinstance(output, dict)
        else output[0]
        if isinstance(output, tuple)
        else output
    )
    return [TURNED.get(name, lambda x: x)(x) for x in found], output


def near(x, y):
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-10, atol=1e-11)


def test_there_are_24_of_them():
    assert len(STRANGERS) == len(INPUTS) == len(PLACEMENTS) == 24


@pytest.mark.parametrize("name", STRANGERS)
def test_states_velocities_and_output_are_the_modules_own(name):
    module, opened, inputs, main, _ = opened_of(name)
    expected, output = seen(name, module, inputs)
    with torch.no_grad():
        states = opened.trajectory(main).states
        assert not any(x.requires_grad for x in states)
        for i, own in enumerate(expected):
            assert any(near(x, own) for x in states), (name, i)
        for k, (part, length) in enumerate(
            zip(opened.depth.sublayers, opened.depth.lengths, strict=True)
        ):
            assert near(part.step(states[k], length), states[k + 1])
        found = opened.head(states[-1])
    assert near(found, output)
    assert opened.config.placement == PLACEMENTS[name]


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", STRANGERS)
def test_the_gradient_of_the_loss_is_the_modules(name):
    """dL/dX_0 along the depth is that of the module, by a difference of its output along the
    gradient.
    """
    _, opened, _, main, targets = opened_of(name)
    loss = opened.terminal_loss or (lambda x, t: words(opened.head(x), t))
    x = opened.embed(main).detach().requires_grad_()
    (p,) = torch.autograd.grad(loss(opened.depth(x), targets), x)
    assert near(ctrans.costate(opened, main, targets).costates[0], p)
    step = 1e-5 * p / p.norm()
    with torch.no_grad():
        rise = (
            loss(opened.depth(x + step), targets) - loss(opened.depth(x - step), targets)
        ) / 2e-5
    assert math.isclose(float(rise), float(p.norm()), rel_tol=1e-5)


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", STRANGERS)
def test_a_diagnosis_names_what_needs_known_parts(name):
    _, opened, _, main, targets = opened_of(name)
    found = ctrans.diagnose(opened, main, targets)
    assert {"costates", "sensitivities"}.isdisjoint(found.missing)


def test_a_context_is_known_for_the_example_alone():
    """Perceiver: each block reads the input, beside its latents."""
    _, opened, _, main, _ = opened_of("Perceiver")
    assert near(opened.embed(main)[0], opened.embed(main)[1])
    with pytest.raises(ConfigError, match="open it with these inputs as example="):
        opened.embed(main + 1)


def backward(name, module, inputs, targets):
    output = module(**inputs) if isinstance(inputs, dict) and name not in AS_ONE else module(inputs)
    (STRANGERS[name][2] or words)(output, targets).backward()


def trained(name, module, inputs, targets, watch):
    """The weights after three steps."""
    torch.manual_seed(1)
    optimiser = torch.optim.AdamW(module.train().parameters(), lr=1e-3)
    monitor = ctrans.Monitor(module, every=2, example=inputs) if watch else None
    missing = {}
    for _ in range(3):
        optimiser.zero_grad()
        backward(name, module, inputs, targets)
        if watch:
            monitor.step(None, optimiser)
            missing |= monitor.gauges.missing
        optimiser.step()
    if watch:
        assert missing == ({THE_TARGETS: UNREAD[name]} if name in UNREAD else {})
    return module.state_dict()


UNREAD = {
    "PatchTST": FEW_CLASSES,
    "DiT": ANOTHER_LOSS,
    "CLIP": FEW_CLASSES,
    "Perceiver": FEW_CLASSES,
    "a padding mask, tokens first": FEW_CLASSES,
    "a residual MLP on tables": NO_LOGITS,
    "U-ViT": ANOTHER_LOSS,
    "FT-Transformer": FEW_CLASSES,
    "two streams": FEW_CLASSES,
}
"""By model, why a monitor does not read its targets."""
HEADS = {
    "the decoder of nn.Transformer": [4, 4, 0, 4, 4, 0],
    "recurrence and attention": [0, 4, 0, 0, 4, 0],
    "MLP-Mixer": [0],
    "attention in the block": [4, 0, 4, 0, 4, 0],
    "Conformer": 3 * [0, 4, 0, 0],
}
"""By model, the heads of each part whose scores are seen."""


def root_mean_squares(tensors):
    return pytest.approx([float(each.square().mean().sqrt()) for each in tensors])


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", STRANGERS)
def test_a_monitor_sees_the_states_velocities_and_costates_and_changes_no_bit(name):
    module, opened, inputs, main, targets = opened_of(name)
    with torch.no_grad():
        states = opened.trajectory(main).states
        moves = [
            (y - x) / h if part.state_norm is None else part(x)  # the raw one, before the norm
            for part, x, y, h in zip(
                opened.depth.sublayers, states, states[1:], opened.depth.lengths, strict=False
            )
        ]
    x = states[0].detach().clone().requires_grad_()
    (STRANGERS[name][2] or words)(opened.head(opened.depth(x)), targets).backward()
    gauges = Gauges(sites_of(module, example=inputs))
    gauges.arm(looking=True)
    backward(name, module.eval(), inputs, targets)
    figures = gauges.read(None)
    assert figures["rms"] == root_mean_squares(states)
    assert figures["velocity"] == root_mean_squares(moves)
    assert figures["costate"][0] == pytest.approx(float(x.grad.norm()))
    assert (gauges.heads or [0])[: len(HEADS.get(name, ()))] == HEADS.get(name, [])
    twin = copy.deepcopy(module)
    expected = trained(name, twin, inputs, targets, watch=False)
    found = trained(name, module, inputs, targets, watch=True)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.map = torch.nn.Linear(16, 16)

    def forward(self, x):
        return self.map(x.tanh())


class Skipping(torch.nn.Module):
    """Sums in place; `left_out` is a block that one pass leaves out."""

    left_out = None

    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(11, 16), torch.nn.Linear(16, 11)
        self.parts = torch.nn.ModuleList(Part() for _ in range(3))

    def forward(self, tokens, again=False):
        if again:
            with torch.device("meta"):
                self(tokens)
                assert torch.zeros(1).is_meta
        x = self.table(tokens)
        for i, part in enumerate(self.parts):
            if i != self.left_out:
                x += part(x)
        return self.head(x)


def test_a_monitor_of_sums_in_place_and_of_a_pass_that_leaves_one_out():
    module, tokens = Skipping(), ids(4, 6) % 11
    gauges = Gauges(sites_of(module, example=tokens))

    def figures():
        module.zero_grad()
        gauges.arm()
        module(tokens).square().sum().backward()
        return gauges.read(None)

    whole = figures()
    x, states = module.table(tokens), []
    for part in module.parts:
        states.append(x)
        x = x + part(x)
    gradients = torch.autograd.grad(module.head(x).square().sum(), [*states, x])
    assert whole["costate"][:-1] == pytest.approx(
        [float(p.norm()) for p in gradients[:-1]], rel=1e-4
    )
    assert whole["rms"] == root_mean_squares([*states, x])
    module.left_out = 1
    assert "rms" not in figures()
    assert "left out a sum" in gauges.missing["states"]
    module.left_out = None
    again = figures()
    del again["unlike_before"]  # the first report has no tokens to compare with
    assert again == whole
    gauges.arm()
    module(tokens, again=True)
    assert not torch.overrides._get_current_function_mode_stack()


def test_a_part_compiled_after_the_monitor_runs_and_its_batch_is_watched():
    module, tokens = Skipping(), ids(4, 6) % 11
    monitor = ctrans.Monitor(module, every=1, example=tokens)
    monitor.gauges.disarm()
    module.parts[0].compile(backend="eager", fullgraph=True)
    for _ in range(2):
        monitor._arm_for(1)
        loss = module(tokens).square().sum()
        loss.backward()
        monitor.step(loss, batch=tokens)
        assert len(monitor.past.reports[-1][1]["rms"]) == 4


class Decoder(torch.nn.Module):
    """torch's own, with norms behind its sums: the weights times any number leave the last state's
    size.
    """

    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.table, self.core, self.head = (
            torch.nn.Embedding(11, 16),
            torch.nn.TransformerDecoder(layer, 2),
            torch.nn.Linear(16, 11),
        )

    def forward(self, tokens, memory):
        return self.head(self.core(self.table(tokens), memory))


def with_larger_maps(module, tokens, memory, c):
    """The state behind each part of torch's decoder, whose maps are times c."""
    x = module.table(tokens)
    for layer in copy.deepcopy(module.core).layers:
        with torch.no_grad():
            for last in (layer.self_attn.out_proj, layer.multihead_attn.out_proj, layer.linear2):
                last.weight *= c
                last.bias *= c
        x = layer.norm1(x + layer.self_attn(x, x, x)[0])
        yield x
        x = layer.norm2(x + layer.multihead_attn(x, memory, memory)[0])
        yield x
        x = layer.norm3(x + layer.linear2(layer.linear1(x).relu()))
        yield x


@pytest.mark.slow
def test_larger_weights_of_a_model_read_by_its_operations():
    torch.manual_seed(0)
    module = Decoder().eval()
    tokens = ids(4, 6) % 11
    memory = numbers(4, 3, 16).float()
    opened = ctrans.open_model(module, example={"tokens": tokens, "memory": memory}, loss=words)
    screened = ctrans.screen(opened, tokens, tokens, "quick").steps["forward"]
    assert abs(screened.quantities["|x| in weights"]) < 0.1
    for c in (1.0, 10.0, 1000.0):
        x = opened.embed(tokens).detach()
        wanted = with_larger_maps(module, tokens, memory, c)
        for sublayer, h, y in zip(
            opened.depth.sublayers, opened.depth.lengths, wanted, strict=True
        ):
            x = times(sublayer, c).step(x, h)
            assert torch.allclose(x, y.to(x), rtol=1e-5, atol=1e-5)
