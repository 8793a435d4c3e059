"""Exponents by input token against the dense Jacobian of the whole depth."""

import math

import pytest
import torch

from ctrans.measure.backward import token_exponents as module
from ctrans.measure.backward.token_exponents import token_exponents
from solvers import ConfigError
from tests.helpers import small_model, tokens


@pytest.mark.cases(2)
@pytest.mark.parametrize("changes", [{}, {"stack_steps": 2}, {"residual": "mhc", "streams": 2}])
def test_they_are_those_of_the_dense_jacobian(changes, monkeypatch):
    monkeypatch.setattr(module, "ENTRIES", 200)  # several batches of rows
    model = small_model("pre", depth=2, width=8, **changes)
    ids = tokens(1, 5)[0]
    for reader in (-1, 2):
        found = token_exponents(model, ids, reader=reader)
        dense = torch.autograd.functional.jacobian(
            lambda x, r=reader: model.depth(x)[0, r], model.embed(ids[None])
        )[:, 0]
        for j, exponent in enumerate(found.exponents):
            size = float(torch.linalg.svdvals(dense[:, j])[0])
            expected = math.log(size) / model.depth.times[-1] if size else -math.inf
            assert exponent == pytest.approx(expected, rel=1e-9)
    assert found.exponents[3:] == [-math.inf, -math.inf]  # nobody reads later tokens
    assert found.tokens == ids.tolist()


def test_a_reader_that_is_no_token_is_refused():
    with pytest.raises(ConfigError, match="reader = 5"):
        token_exponents(small_model("pre", depth=1, width=8), tokens(1, 5)[0], reader=5)
