"""A cell for several values of a measure shows the worst of them, never whichever comes last."""

import pytest
import torch

from ctrans.examine.diagnosed import measured
from ctrans.examine.diagnosis.weights_only import weight_diagnosis
from ctrans.measure.measured import Measured, Value
from ctrans.report.sections import digits
from ctrans.report.view import view

VALUES = {"first": (278.0, 1.0), "last": (1.0, 278.0)}


def tables(table, title):
    chapters = [chapter for chapter in view(table, "a") if chapter.title == title]
    return [part for chapter in chapters for part in chapter.parts if hasattr(part, "rows")]


def texts(table, title):
    return [cell.text for part in tables(table, title) for row in part.rows for cell in row]


@pytest.mark.parametrize("where", VALUES)
def test_a_model_with_several_values_shows_the_largest_with_its_place(where):
    values = [
        Value("a", "a measure of a plugin", value, place=f"weight {k}")
        for k, value in enumerate(VALUES[where])
    ]
    place = f"weight {VALUES[where].index(278.0)}"
    assert texts(Measured(tuple(values)), "Summary") == ["a", f"278 (largest of 2, {place})"]


@pytest.mark.parametrize("order", [(1e-9, 1.0), (1.0, 1e-9)])
def test_a_depth_with_several_values_shows_the_one_outside_its_limits(order):
    values = [Value("a", "largest gain of a norm", value, depth=0) for value in order]
    assert "1.0e-09 (worst of 2)" in texts(Measured(tuple(values)), "Figures by depth")


def test_spectral_norms_stand_in_the_table_by_place_alone():
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"layers.{k}.up.weight": torch.randn(16, 16, generator=generator) * 1000 ** (1 - k)
        for k in range(2)
    }
    readers = {name: lambda weight=weight: weight for name, weight in weights.items()}
    table = measured({"a": weight_diagnosis(readers)}, {})
    assert not tables(table, "Summary")
    largest = torch.linalg.matrix_norm(weights["layers.0.up.weight"], 2).item()
    assert digits(largest) in texts(table, "By place")
