"""What operations of a pass are known by, and maps that write their output slice by slice."""

import pytest
import torch
import torch.nn.functional as F

from ctrans import open_model
from ctrans.interop.operations import Graph, Operations
from ctrans.interop.writes import places_in, put_into, taken_from
from tests.interop.test_read_by_operations import LAYERS, TOKENS, WIDTH, MethodOfTheBlock, made


@pytest.mark.parametrize(
    "view_of",
    [
        lambda base: base[:, 2:5],
        lambda base: base.transpose(0, 1)[1::2],
        lambda base: base[1].view(2, 3),
        lambda base: base[..., 3],
    ],
)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_write_through_a_view_and_its_derivatives(view_of, order):
    draw = torch.Generator().manual_seed(0)
    storage = torch.randn(4, 6, dtype=torch.float64, generator=draw).permute(order)
    if storage.shape != (4, 6):
        storage = torch.randn(6, 4, dtype=torch.float64, generator=draw).t()
    base = storage.detach().requires_grad_()
    view = view_of(storage)
    written = torch.randn(view.shape, dtype=torch.float64, generator=draw).requires_grad_()
    places = places_in(storage, view)

    def by_torch(base, written):
        whole = base.clone(memory_format=torch.preserve_format)
        view_of(whole).copy_(written)
        return whole

    expected = by_torch(base, written)
    found = put_into(base, written, places)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(base.shape, dtype=torch.float64, generator=draw)
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), (base, written)),
        torch.autograd.grad((expected * weights).sum(), (base, written)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(taken_from(base, places, view.shape), view)


class InSlices(MethodOfTheBlock):
    """Keys are written into a new tensor in two halves, as with positions in one of them."""

    def attend(self, i, x):
        q, k, v = self.qkv[i](x).chunk(3, -1)
        keys = k.new_empty(k.shape)
        half = WIDTH // 2
        keys[..., :half].copy_(k[..., :half])
        keys[..., half:].copy_(torch.sin(k[..., half:]))
        return self.out[i](F.scaled_dot_product_attention(q, keys, v, is_causal=True))


def test_a_tensor_that_is_filled_slice_by_slice_is_read():
    opened = open_model(made(InSlices), example=TOKENS)
    kinds = [sublayer.kind for sublayer in opened.depth.sublayers]
    assert kinds == ["attention", "ffn"] * LAYERS


class WithBuiltins(MethodOfTheBlock):
    """Its code calls functions of Python, which Python carries out otherwise once it knows them."""

    def attend(self, i, x):
        return super().attend(i, x) + abs(self.out[i].bias) * 0.1


def test_an_operation_has_the_same_place_in_each_pass():
    model = made(WithBuiltins)
    sites = []
    for _ in range(12):
        graph = Graph(model)
        with torch.no_grad(), Operations(graph.met, {}):
            model(TOKENS)
        sites.append([operation.site for operation in graph.operations])
    assert all(each == sites[0] for each in sites)
