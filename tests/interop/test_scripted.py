"""Functions and modules of torch.jit.script in a user's model."""

import pytest
import torch
from torch import Tensor, nn

import ctrans
from ctrans.interop import open_model
from solvers import ConfigError
from tests.interop.test_found_by_strangers import (
    WIDTH,
    Blocks,
    assert_states_are_its_own,
    feed_forward,
    ids,
    made,
)
from tests.interop.test_scaled_sums import CausalAttention


@torch.jit.script
def scaled_sum(y: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    """As diffusion language models write it, for one kernel."""
    return x + scale * y


class OfScriptedSums(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.fields = nn.ModuleList([CausalAttention(), feed_forward()])
        self.scales = nn.ParameterList(torch.rand(WIDTH) for _ in range(2))

    def forward(self, x, states):
        for norm, field, scale in zip(self.norms, self.fields, self.scales, strict=True):
            x = scaled_sum(field(norm(x)), scale, x)
            states.append(x)
        return x


def test_a_scripted_function_is_read_as_it_was_written():
    module = made(OfScriptedSums)
    opened = open_model(module, example=ids(), loss="next")
    assert_states_are_its_own(opened, module, ids(1))
    assert opened.model.config.placement == "pre"
    assert not opened.model.config.unread[2:]  # two say that scales are folded into weights
    assert isinstance(scaled_sum, torch.jit.ScriptFunction)
    call = torch.jit.ScriptFunction.__call__
    ctrans.diagnose(opened, ids(), ids().roll(-1, 1))
    assert torch.jit.ScriptFunction.__call__ is call


class OfScriptedModules(OfScriptedSums):
    def __init__(self):
        super().__init__()
        self.fields = nn.ModuleList(torch.jit.script(feed_forward()) for _ in range(2))


def test_a_scripted_module_is_named():
    with pytest.raises(ConfigError, match=r"blocks\.0\.fields\.0 is scripted by torch\.jit"):
        open_model(made(OfScriptedModules), example=ids())
    with pytest.raises(ConfigError, match=r"it is scripted by torch\.jit"):
        open_model(torch.jit.script(feed_forward()), example=torch.zeros(2, 3, WIDTH))


class ScriptedBeforeTheBlocks(Blocks):
    def __init__(self, block, norm=None):
        super().__init__(block, norm)
        self.embedding = nn.Sequential(self.embedding, torch.jit.script(nn.Tanh()))


def test_a_scripted_module_before_the_blocks_is_named_too():
    torch.manual_seed(0)
    module = ScriptedBeforeTheBlocks(OfScriptedSums).double().eval()
    opened = open_model(module, example=ids(), loss="next")
    assert "embedding.1 is scripted by torch.jit, which hides its operations" in opened.described
