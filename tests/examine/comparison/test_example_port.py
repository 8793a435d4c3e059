"""`examples/port.py`: what its picture in README says."""

import pytest
import torch

import ctrans
from ctrans.model.checkpoint import load
from examples import port


@pytest.mark.cases(1)
def test_the_fault_of_the_port_is_told_from_its_rounding(tmp_path):
    port.main(tmp_path)
    ids = torch.randint(256, (1, 33), generator=torch.Generator().manual_seed(0))

    found = ctrans.compare(load(tmp_path / "model"), load(tmp_path / "port"), ids)

    assert [part.name for part in found.changed] == ["block 4, attention"]
    assert "transposed" in found.explanations[0].words
