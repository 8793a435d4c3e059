"""Updates of low rank: at first the same model, then W + B A and nothing else, and on disk no other
base.
"""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from ctrans.dynamics.weights.low_rank import (
    adapt,
    before_updates,
    factors,
    merge_updates,
    update_like,
    updated,
)
from ctrans.model.checkpoint import ADAPTER, BASE, WEIGHTS, load, save
from ctrans.model.gpt import GPT
from solvers import ConfigError
from tests.cases import RESIDUAL_CASES, VARIANTS
from tests.helpers import learned, small_config, tokens

CASES = {
    **{name: ("pre", {"heads": 4, **changes}) for name, changes in VARIANTS.items()},
    **{name: case for name, case in RESIDUAL_CASES.items() if case[1]["residual"] != "ngpt"},
    "stack": ("pre", {"stack_steps": 2}),
}
every = pytest.mark.parametrize(("placement", "changes"), CASES.values(), ids=CASES)
RANK = 3


def trained(placement="pre", seed=3, **changes):
    return learned(GPT(small_config(placement, **changes)).double(), 0.1, seed)


def with_updates(model, rank=RANK, scale=0.0):
    """The model with updates, of which B is off 0 where they have a scale."""
    adapt(model, [part.field for part in model.depth.sublayers], rank)
    with torch.no_grad():
        for value in factors(model).values():
            value.add_(
                scale
                * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(value))).to(
                    value
                )
            )
    return model


@every
def test_fresh_updates_change_no_bit_and_get_all_gradients(placement, changes):
    model = trained(placement, **changes)
    before = model(tokens())[0].detach()
    matrices = {id(part) for part in model.depth.modules() if isinstance(part, nn.Linear)}
    with_updates(model)
    assert len(list(updated(model))) == len(matrices)
    logits, loss = model(tokens(), tokens(seed=1))
    assert torch.equal(logits, before)
    loss.backward()
    with_gradient = {name for name, value in model.named_parameters() if value.grad is not None}
    given = {name for name, value in model.named_parameters() if value.requires_grad}
    assert (
        with_gradient
        <= given
        == {name for name in given if name.endswith((".weight.0.a", ".weight.0.b"))}
    )
    reached = [update.b.grad for _, _, update in updated(model)]
    assert (
        sum(grad is not None and bool(grad.any()) for grad in reached) >= len(matrices) // 2
    )  # experts may have had no token


@every
def test_they_are_the_weights_plus_b_a_merged_or_not(placement, changes):
    model = with_updates(trained(placement, **changes), scale=0.3)
    weights = before_updates(model)
    for path, _, update in updated(model, all_names=True):
        weights[f"{path}.weight"] = weights[f"{path}.weight"] + torch.einsum(
            "or,ri->oi", update.b, update.a
        )
    plain = GPT(model.config).double()
    assert set(weights) == set(plain.state_dict())
    expected = functional_call(plain, weights, (tokens(),), tie_weights=False)[0].detach()
    found = model(tokens())[0].detach()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
    merged = merge_updates(model)
    assert not list(updated(merged))
    assert set(merged.state_dict()) == set(plain.state_dict())
    torch.testing.assert_close(
        merged(tokens())[0], found, rtol=0, atol=1e-12 * float(found.abs().max())
    )


def test_a_step_moves_a_weight_by_a_matrix_of_that_rank_and_no_more():
    model = trained()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    with_updates(model, rank=2)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for seed in range(4):
        model(tokens(), tokens(seed=seed))[1].backward()
        optimiser.step()
    moved = {name: value - first[name] for name, value in merge_updates(model).state_dict().items()}
    of_maps = {
        f"{path}.weight" for path, part in model.named_modules() if isinstance(part, nn.Linear)
    }
    assert all(torch.linalg.matrix_rank(moved[name]) == 2 for name in of_maps)
    assert not any(value.any() for name, value in moved.items() if name not in of_maps)


def test_saved_they_are_small_beside_one_base_and_read_back_to_the_bit(tmp_path):
    model = with_updates(trained(width=32), rank=1, scale=0.3)
    save(model, tmp_path / "a")
    found = model(tokens())[0]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [ADAPTER, "config.json"]
    assert (
        4 * (tmp_path / "a" / ADAPTER).stat().st_size < (tmp_path / BASE / WEIGHTS).stat().st_size
    )
    assert torch.equal(load(tmp_path / "a", merge=False)(tokens())[0], found)
    merged = load(tmp_path / "a")
    assert torch.equal(merged(tokens())[0], found)
    assert all(p.requires_grad for p in merged.parameters())
    with torch.no_grad():
        next(iter(factors(model).values())).add_(1)
    save(model, tmp_path / "b")  # of the same base
    assert torch.equal(load(tmp_path / "b", merge=False)(tokens())[0], model(tokens())[0])


def test_another_base_is_refused(tmp_path):
    model = with_updates(trained(), scale=0.3)
    save(model, tmp_path / "a")
    with pytest.raises(ConfigError, match="has other weights than those that this model updates"):
        save(with_updates(trained(seed=4)), tmp_path / "b")
    (tmp_path / BASE).rename(tmp_path / "aside")
    with pytest.raises(ConfigError, match=f"updates weights that are not in .*{BASE}"):
        load(tmp_path / "a")
    save(trained(seed=4), tmp_path / BASE)
    with pytest.raises(ConfigError, match="updates other weights than those"):
        load(tmp_path / "a")
    save(GPT(small_config("pre", depth=2)).double(), tmp_path / BASE)
    with pytest.raises(ConfigError, match="updates other weights than those"):
        load(tmp_path / "a")


def test_an_adapter_that_does_not_fit_is_refused_in_a_line(tmp_path):
    model = with_updates(trained())
    save(model, tmp_path / "a")
    a, b = (f"depth.sublayers.0.field.out.{name}" for name in "ab")
    whole = {name: value.detach() for name, value in factors(model).items()}
    assert {a, b} <= whole.keys()
    for wrong in (
        {f"{a[:-1]}c": whole[a]},
        {**whole, f"{a[:-1]}c": whole[a]},
        {a: whole[a]},
        {a: torch.tensor(1.0).to(whole[a]), b: torch.tensor(1.0).to(whole[a])},
        {a: whole[a].half(), b: whole[b].half()},
        {a: whole[b], b: whole[a]},
        {"a": whole[a], "b": whole[b]},
        {"nowhere.a": whole[a], "nowhere.b": whole[b]},
    ):
        with pytest.raises(ConfigError, match="does not fit its base"):
            update_like(trained(), wrong, "adapter.safetensors")
    assert torch.equal(update_like(trained(), whole, "")(tokens())[0], model(tokens())[0])


@pytest.mark.slow
def test_what_cannot_be_updated_is_refused():
    with pytest.raises(ConfigError, match="low_rank = 17: give 1 to 16"):
        with_updates(trained(), rank=17)
    with pytest.raises(ConfigError, match="already functions"):
        with_updates(with_updates(trained()))
    with pytest.raises(ConfigError, match="already functions"):
        with_updates(trained(depth_weights="linear", knots=2))
    with pytest.raises(ConfigError, match="no linear maps"):
        adapt(nn.Identity(), [nn.Identity()], 1)
