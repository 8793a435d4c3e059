"""Inputs of an unusual kind are refused by name."""

import pytest

import ctrans
from solvers import ConfigError
from tests.helpers import small_model, tokens


@pytest.mark.parametrize("function", [ctrans.diagnose, ctrans.screen])
@pytest.mark.parametrize("sparse", ["tokens", "targets"])
def test_a_sparse_tensor_is_refused_with_what_to_give(function, sparse):
    model = small_model("peri")
    ids = tokens(2, 8) % model.config.vocab_size
    given = {"tokens": ids, "targets": ids.roll(-1, 1)}
    given[sparse] = given[sparse].to_sparse()
    with pytest.raises(ConfigError, match=rf"the {sparse} are a sparse tensor: give {sparse}.to_d"):
        function(model, given["tokens"], given["targets"])


def test_sublayers_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="sublayers have 1: give objects of Sublayer"):
        ctrans.Depth(iter([1, 2]), 1.0)
