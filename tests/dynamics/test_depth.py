import math
from fractions import Fraction

import pytest
import torch

from ctrans.dynamics.depth import Depth
from solvers import ConfigError, solve
from tests.helpers import NAMES, small_model

every = pytest.mark.parametrize("name", NAMES)


def state(dtype=torch.float64, tokens=6):
    return torch.randn(2, tokens, 16, dtype=dtype, generator=torch.Generator().manual_seed(3))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dt", [1.0, 0.1, 1 / 3])
def test_one_euler_step_per_segment_has_the_bits_of_the_discrete_model(name, dtype, dt):
    depth = small_model(name, dtype, depth=5, dt=dt).depth
    x = state(dtype)
    assert torch.equal(solve(depth.segments(), x, method="euler", steps=1).x1, depth(x))
    by_hand = x
    for sublayer in depth.sublayers:
        by_hand = by_hand + dt * sublayer(by_hand)
        by_hand = by_hand if sublayer.state_norm is None else sublayer.state_norm(by_hand)
    assert torch.equal(by_hand, depth(x))


@every
def test_times_are_multiples_of_dt_and_belong_to_the_index(name):
    depth = small_model(name, dt=0.1).depth
    assert depth.times == tuple(float(k * Fraction(0.1)) for k in range(7))
    assert [float(s.length) for s in depth.segments()] == [0.1] * 6


@every
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_coarsening_undoes_refining_bit_for_bit(name, k):
    depth = small_model(name).depth
    there = depth.refine(k)
    back = there.resample(depth.blocks)
    assert there.blocks == k * depth.blocks
    assert there.times[-1] == pytest.approx(depth.times[-1], rel=1e-15)
    assert back.dt == pytest.approx(depth.dt, rel=1e-15)
    for before, after in zip(depth.parameters(), back.parameters(), strict=True):
        assert torch.equal(before, after)


def test_refining_copies_weights_so_that_the_original_is_not_trained_along():
    depth = small_model("pre").depth
    finer = depth.refine(2)
    before = [p.clone() for p in depth.parameters()]
    with torch.no_grad():
        for p in finer.parameters():
            p.add_(1)
    assert all(torch.equal(a, b) for a, b in zip(before, depth.parameters(), strict=True))


def test_linear_refinement_interpolates_between_block_midpoints():
    depth = small_model("pre", depth=2).depth
    first, second = (depth.sublayers[i].field.out.weight for i in (0, 2))
    finer = depth.refine(4, "linear")
    got = [finer.sublayers[i].field.out.weight for i in range(0, 16, 2)]
    # midpoints of 8 blocks in units of the two coarse midpoints at 1/4 and 3/4
    for weight, share in zip(got, [0, 0, 1 / 8, 3 / 8, 5 / 8, 7 / 8, 1, 1], strict=True):
        assert torch.allclose(weight, (1 - share) * first + share * second, atol=1e-14)


def test_coarsening_averages_constant_weights():
    depth = small_model("pre", depth=4).depth
    merged = depth.resample(2)
    mean = (depth.sublayers[0].field.out.weight + depth.sublayers[2].field.out.weight) / 2
    assert torch.allclose(merged.sublayers[0].field.out.weight, mean, atol=1e-15)
    assert merged.dt == 2 * depth.dt


@pytest.mark.cases(1)
@every
def test_refining_constant_weights_keeps_the_ode_of_shared_blocks(name):
    """With one block, k times the block at dt/k is the same alternating field on a finer clock:
    both tend to the averaged ODE.
    """
    depth = small_model(name, depth=1, dt=0.2, scale=0.0).depth
    x = (
        depth.sublayers[0].state_norm(state())
        if depth.sublayers[0].state_norm is not None
        else state()
    )
    ends = [
        solve(depth.refine(k).segments(continuous=True), x, method="rk4", steps=1).x1
        for k in (8, 16, 32)
    ]
    assert float((ends[1] - ends[0]).norm() / (ends[2] - ends[1]).norm()) == pytest.approx(
        2, rel=0.1
    )


def test_symmetric_blocks_share_the_weights_of_their_halves_and_the_time():
    depth = small_model("peri").depth
    macaron = depth.symmetric()
    assert [s.kind for s in macaron.sublayers] == ["ffn", "attention", "ffn"] * 3
    assert macaron.sublayers[0] is macaron.sublayers[2] is depth.sublayers[1]
    assert macaron.times[-1] == depth.times[-1]
    assert macaron.blocks == 3
    finer = macaron.refine(2)
    assert finer.sublayers[0] is finer.sublayers[2]
    with pytest.raises(ConfigError, match="only a depth of attention-FFN blocks"):
        macaron.symmetric()


@pytest.mark.parametrize("dt", [0, -1.0, math.nan, math.inf, True])
def test_a_dt_that_is_no_positive_number_is_refused(dt):
    with pytest.raises(ConfigError, match="dt = "):
        Depth(list(small_model("pre").depth.sublayers), dt)


def test_requests_that_do_not_fit_the_blocks_are_refused():
    depth = small_model("pre").depth
    with pytest.raises(ConfigError, match="k = 0"):
        depth.refine(0)
    with pytest.raises(ConfigError, match="did you mean 'linear'"):
        depth.refine(2, "linaer")
    with pytest.raises(ConfigError, match="do not make blocks"):
        Depth(list(depth.sublayers)[:3], 0.1)
    with pytest.raises(ConfigError, match="positive spans"):
        Depth(list(depth.sublayers), 0.1, spans=[1])
    for more in (lambda: depth.refine(10**8), lambda: depth.resample(10**8)):
        with pytest.raises(ConfigError, match=r"blocks = .*: give at most 10,000"):
            more()
