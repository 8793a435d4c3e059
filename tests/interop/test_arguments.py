"""Arguments of a forward pass beside its tokens."""

import torch
import torch.nn.functional as F

from ctrans import open_model
from tests.interop.test_read_by_operations import (
    LAYERS,
    TOKENS,
    WIDTH,
    MethodOfTheBlock,
    made,
)


class Remembering(MethodOfTheBlock):
    """Attention sees a memory (layers, tokens, sequences, width) before its tokens."""

    def forward(self, ids, memory):
        x = self.table(ids)
        for i in range(LAYERS):
            u = torch.cat([memory[i].transpose(0, 1), self.n1[i](x)], 1)
            q, k, v = self.qkv[i](u).chunk(3, -1)
            scores = q[:, -x.shape[1] :] @ k.transpose(1, 2) / WIDTH**0.5
            x = x + self.out[i](scores.softmax(-1) @ v)
            x = x + self.down[i](F.gelu(self.up[i](self.n2[i](x))))
        return self.final(x) @ self.table.weight.T


def test_an_argument_may_count_sequences_on_any_axis():
    memory = torch.randn(LAYERS, 5, len(TOKENS), WIDTH, generator=torch.Generator().manual_seed(1))
    model = made(Remembering)
    opened = open_model(model, example={"ids": TOKENS, "memory": memory})
    assert opened.model.depth.per_block == 2
    with torch.no_grad():
        (found, _), expected = opened.model(TOKENS), model(TOKENS, memory)
    torch.testing.assert_close(found, expected)
