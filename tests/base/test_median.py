"""The median of a tensor is that of numpy, whatever the number of entries."""

import math

import numpy as np
import pytest
import torch

from ctrans.base.median import median_of
from ctrans.training.monitor.report_callbacks import summarised


@pytest.mark.parametrize("count", [1, 2, 3, 4, 9, 10])
def test_it_is_numpys(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count))
    assert median_of(values) == pytest.approx(float(np.median(values.double().numpy())))
    assert summarised({"rms": values.tolist()})["rms/median"] == pytest.approx(median_of(values))


def test_broken_and_infinite_entries():
    assert math.isnan(median_of(torch.empty(0)))
    assert math.isnan(median_of(torch.tensor([1.0, math.nan, 2.0])))
    assert median_of(torch.tensor([1.0, math.inf, math.inf])) == math.inf
    assert median_of(torch.full((2,), 1e308, dtype=torch.float64)) == 1e308
