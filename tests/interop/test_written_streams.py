"""A residual stream is read as the same one, however its sums, and what stands between them, are
written.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.dynamics.fields import HasReferenceKernel
from ctrans.interop import open_model
from tests.interop.test_ways_of_writing import HEADS, WIDTH, Model, ids


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
