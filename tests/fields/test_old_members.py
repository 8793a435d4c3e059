"""Maps and norms that were written for the version before: their members work by the old names, with a warning."""

import pytest
import torch
from torch import nn

from ctrans.fields import HasOutputProjection, HasReferenceKernel, check_map, reference_kernels
from ctrans.norm import RMSNorm


class OldMap(nn.Module):
    """As CONTRIBUTING.md of the version before showed it."""

    def __init__(self):
        super().__init__()
        self.up, self.last, self.plain = nn.Linear(8, 16), nn.Linear(16, 8), False

    def features(self, x):
        return self.up(x).tanh()

    def forward(self, x):
        return self.last(self.features(x))


def test_a_map_with_old_members_has_the_protocols():
    field, x = OldMap(), torch.randn(2, 3, 8)
    names = set(field.state_dict())
    with pytest.warns(DeprecationWarning, match="OldMap.last is now output_projection"):
        assert isinstance(field, HasOutputProjection)
    assert field.output_projection is field.last
    assert torch.equal(field.output_projection(field.pre_projection(x)), field(x))
    with pytest.warns(DeprecationWarning, match="OldMap.plain is now use_reference_kernel"):
        assert isinstance(field, HasReferenceKernel)
    with reference_kernels(field):
        assert field.plain
    assert not field.plain
    assert set(field.state_dict()) == names
    check_map(field, "ffn", 8)


def test_a_map_without_them_has_none_of_the_protocols():
    assert not isinstance(nn.Linear(8, 8), HasOutputProjection)
    assert not isinstance(nn.Linear(8, 8), HasReferenceKernel)


def test_a_norm_with_old_methods_is_a_norm():
    with pytest.warns(DeprecationWarning, match="Old.residual is now constraint_violation"):

        class Old(RMSNorm):
            def residual(self, z):
                return 0 * z[..., 0] + 3

    z = torch.randn(5, 8)
    assert Old(8).constraint_violation(z).tolist() == [3.0] * 5


def test_the_old_methods_of_a_norm_warn():
    norm, z = RMSNorm(8), torch.randn(5, 8)
    with pytest.warns(DeprecationWarning, match="RMSNorm.residual is now constraint_violation"):
        assert torch.equal(norm.residual(z), norm.constraint_violation(z))
