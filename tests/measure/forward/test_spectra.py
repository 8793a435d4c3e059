"""Spectra of products against the dense products."""

import pytest
import torch

from ctrans.measure.forward.spectra import Spectra
from ctrans.measure.walk import walk
from tests.helpers import small_model, tokens


def spectra(model):
    found = Spectra()
    walk(model, tokens(), None, [found])
    return found.figures()


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_heads": 1}, {"ffn": "swiglu"}, {"ffn": "moe", "experts": 3}, {"ffn_width": 4}],
)
def test_spectra_are_those_of_the_dense_products(changes):
    model = small_model("pre", depth=2, **changes)
    found = spectra(model)
    attention, ffn = model.depth.sublayers[2].field, model.depth.sublayers[3].field
    dense = {}
    for h, head in enumerate(attention.head_matrices()):
        dense[2, "QK", h], dense[2, "OV", h] = head.query.T @ head.key, head.out @ head.value
    matrices = list(ffn.matrices())
    ups, downs = (
        [each.weight for each in matrices if each.role == role] for role in ("up", "down")
    )
    for part, (up, down) in enumerate(zip(ups, downs, strict=True)):
        dense[3, "W_2 W_1", part] = down @ up
    own = {(each.segment, each.product, each.part): each for each in found if each.segment >= 2}
    assert own.keys() == dense.keys()
    for key, product in dense.items():
        rank = len(own[key].singular)
        singular, real, imaginary = (
            torch.tensor(each, dtype=torch.float64)
            for each in (own[key].singular, own[key].real, own[key].imaginary)
        )
        assert torch.allclose(singular, torch.linalg.svdvals(product)[:rank], atol=1e-10)
        # sums of powers do not depend on the order of the eigenvalues
        for power in (1, 2, 3):
            traced = torch.linalg.matrix_power(product, power).trace()
            assert torch.allclose(
                torch.complex(real, imaginary).pow(power).sum().real, traced, atol=1e-8
            )


def test_attention_without_heads_to_show_has_none():
    assert {each.kind for each in spectra(small_model("pre", sinks=True))} == {"ffn"}
