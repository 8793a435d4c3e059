"""How maps scale with their weights: the exact degrees that THEORY.md has by map."""

import pytest
import torch

from ctrans import GPTConfig
from ctrans.dynamics.fields import FIELDS

X = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
C = 3.0

DEGREES = [
    ("attention", "softmax", {}, {"value": 1, "out": 1, "query": None, "key": None}),
    (
        "attention",
        "softmax",
        {"qk_norm": "rms", "positions": "rotary"},
        {"value": 1, "out": 1, "query": 0, "key": 0},
    ),
    ("attention", "softmax", {"qk_norm": "l2"}, {"query": 0, "key": 0}),
    ("attention", "softmax", {"gated_output": True}, {"value": 1, "out": 1, "gate": None}),
    ("attention", "linear", {}, {"value": 1, "out": 1, "query": None, "key": None}),
    ("attention", "differential", {}, {"value": 1, "out": 1, "query": None}),
    ("ffn", "mlp", {"activation": "relu"}, {"up": 1, "down": 1}),
    ("ffn", "mlp", {"activation": "relu2"}, {"up": 2, "down": 1}),
    ("ffn", "mlp", {"activation": "gelu"}, {"up": None, "down": 1}),
    ("ffn", "reglu", {}, {"gate": 1, "up": 1, "down": 1}),
    ("ffn", "swiglu", {}, {"gate": None, "up": 1, "down": 1}),
]


@pytest.mark.parametrize(("kind", "name", "changes", "degrees"), DEGREES)
def test_f_is_homogeneous_in_a_matrix_of_the_degree_that_is_said(kind, name, changes, degrees):
    """f with W times c is c^degree f; None says that no degree holds."""
    torch.manual_seed(1)
    config = GPTConfig(width=16, heads=4, bias=False, eps=0.0, **{kind: name}, **changes)
    field = FIELDS[kind][name](config).double().requires_grad_(False)
    plain = field(X)
    for matrix in field.matrices():
        if matrix.role not in degrees:
            continue
        matrix.weight.mul_(C)
        scaled = field(X)
        matrix.weight.div_(C)
        degree = degrees[matrix.role]
        if degree is None:
            assert not any(torch.allclose(scaled, C**d * plain, rtol=1e-3) for d in (0, 1, 2)), (
                matrix.role
            )
        else:
            assert torch.allclose(scaled, C**degree * plain, rtol=1e-9, atol=1e-12), matrix.role
