"""A residual stream is read as the same one, however its sums, and what stands between them, are
written.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.dynamics.fields import HasReferenceKernel
from ctrans.interop import open_model
from tests.interop.test_ways_of_writing import HEADS, WIDTH, Model, ids, states_as_read


class Fused(nn.Module):
    """Attention by torch's function. `joined` makes (batch, tokens, width) of its output, whose
    second and third axes are transposed.
    """

    def __init__(self, joined):
        super().__init__()
        self.joined = joined
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(self.joined(y, x.shape))


JOINED = {
    "contiguous, view": lambda y, shape: y.contiguous().view(shape),
    "contiguous, as_strided": lambda y, shape: y.contiguous().as_strided(
        shape, (shape[1] * shape[2], shape[2], 1)
    ),
    "to a memory format": lambda y, shape: y.to(memory_format=torch.contiguous_format).view(shape),
    "view": lambda y, shape: y.view(shape),
}


@pytest.mark.parametrize("way", JOINED)
def test_an_output_that_another_kernel_lays_out_otherwise_is_joined(way):
    """`contiguous` does nothing to the output of the fused kernel."""
    torch.manual_seed(0)
    module = Model(lambda: Fused(JOINED[way])).double().eval()
    model = open_model(module, example=ids()).model
    field = model.depth.sublayers[0].field
    assert isinstance(field, HasReferenceKernel)
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        expected = module.attentions[0](x)
        torch.testing.assert_close(field(x), expected)
        field.use_reference_kernel = True
        torch.testing.assert_close(field(x), expected)


def add_(x, y):
    x.add_(y)
    return x


def out(x, y):
    torch.add(x, y, out=x)
    return x


def new_out(x, y):
    total = torch.empty_like(x)
    torch.add(x, y, out=total)
    return total


def copy_(x, y):
    x.copy_(x + y)
    return x


def set_all(x, y):
    x[:] = x + y
    return x


def set_copy(x, y):
    x[...] = x.clone() + y
    return x


def slice_in_place(x, y):
    x[:] += y
    return x


def clone(x, y):
    return x.clone() + y


def contiguous(x, y):
    return x.contiguous() + y.clone()


class Written(Model):
    """Pre-LN, where `sum_` adds a part's output to the state."""

    def __init__(self, sum_):
        super().__init__(lambda: Fused(JOINED["contiguous, view"]))
        self.sum_ = sum_

    def add(self, x, part, norm):
        return self.sum_(x, part(norm(x)))


@pytest.mark.parametrize(
    "sum_",
    [add_, out, new_out, copy_, set_all, set_copy, slice_in_place, clone, contiguous],
)
def test_a_sum_is_read_however_it_is_written(sum_):
    torch.manual_seed(0)
    module = Written(sum_).double().eval()
    same = Written(torch.add).double().eval()
    same.load_state_dict(module.state_dict())
    opened = open_model(module, example=ids())
    assert opened.model.config.placement == "pre"
    assert not opened.model.config.unread
    with torch.no_grad():
        for state, own in zip(states_as_read(opened.model, ids()), same.states(ids()), strict=True):
            torch.testing.assert_close(state, own)
        torch.testing.assert_close(opened.model.head(state), same(ids()))
    # the code itself has no derivatives where a norm keeps what is then written over
    targets = ids().roll(-1, 1)
    found = ctrans.costate(opened, ids(), targets).costates
    expected = ctrans.costate(open_model(same, example=ids()), ids(), targets).costates
    torch.testing.assert_close(found, expected)


class ClonedAtBlocks(Written):
    def states(self, ids):
        x = self.embedding(ids)
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = x.clone()
            for part, norm in ((attention, self.norms[2 * i]), (ffn, self.norms[2 * i + 1])):
                x = self.add(x, part, norm)
        return [x]


@pytest.mark.parametrize("sum_", [add_, torch.add])
def test_a_copy_of_the_state_is_no_part(sum_):
    module = ClonedAtBlocks(sum_).double().eval()
    model = open_model(module, example=ids()).model
    assert model.config.placement == "pre"
    assert len(model.depth.sublayers) == 4
    assert not model.config.unread


VECTORS = {
    "a row": lambda model, i, x: model.table[i],
    "a module's row": lambda model, i, x: model.steps(torch.tensor(i)),
    "a number": lambda model, i, x: model.table[i, 0],
    "unbound": lambda model, i, x: model.table.unbind()[i],
    "for all tokens": lambda model, i, x: model.table[i].expand_as(x),
}


class Stepped(Written):
    """Each block adds a vector to the state first. `is_behind`: norms are behind the parts."""

    def __init__(self, vector, is_behind):
        super().__init__(torch.add)
        self.vector = vector
        self.is_behind = is_behind
        self.table = nn.Parameter(torch.randn(2, WIDTH))
        self.steps = nn.Embedding(2, WIDTH)

    def add(self, x, part, norm):
        if self.is_behind:
            return x + norm(part(x))
        return x + part(norm(x))

    def states(self, ids):
        x = self.embedding(ids)
        found = []
        for i, (attention, ffn) in enumerate(zip(self.attentions, self.ffns, strict=True)):
            x = x + self.vector(self, i, x)
            found.append(x)
            x = self.add(x, attention, self.norms[2 * i])
            found.append(x)
            x = self.add(x, ffn, self.norms[2 * i + 1])
            found.append(x)
        return found


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_that_is_added_to_the_state_is_no_offset_of_the_part_before_it(name, is_behind):
    torch.manual_seed(0)
    module = Stepped(VECTORS[name], is_behind).double().eval()
    model = open_model(module, example=ids()).model
    kinds = [sublayer.kind for sublayer in model.depth.sublayers]
    assert kinds == ["attention", "ffn", "part", "attention", "ffn"]
    assert model.config.placement == ("output, mix" if is_behind else "pre, mix")
    with torch.no_grad():
        for state, own in zip(states_as_read(model, ids()), module.states(ids()), strict=True):
            torch.testing.assert_close(state, own)
