"""Trainings that copy their targets, hardly move, or move a part: each alarm beside a training
without the fault.
"""

import math

import pytest
import torch

from ctrans import GPT, GPTConfig
from ctrans.measure.reductions import SAMPLE
from ctrans.training.monitor import Monitor
from ctrans.training.monitor.past import Past
from ctrans.training.monitor.past_checks import leak, slow
from ctrans.training.monitor.scores import row_entropy, scores_seen, weight_ahead
from ctrans.training.monitor.updates import Updates


def trained(
    *,
    steps=60,
    causal=True,
    shift=1,
    hide=False,
    eps=1e-8,
    frozen=(),
    kind=torch.optim.AdamW,
    seed=0,
    every=5,
    ahead=1,
):
    """A GPT of three blocks on random tokens; with `hide`, one that fills in hidden tokens. Weights
    outside of the depth have `ahead` times the learning rate.
    """
    model = GPT(
        GPTConfig(
            vocab_size=13, context=12, depth=3, width=32, heads=2, placement="pre", causal=causal
        ),
        seed=seed,
    )
    for name, weight in model.named_parameters():
        weight.requires_grad_(not any(part in name for part in frozen))
    options = {"eps": eps} if kind is torch.optim.AdamW else {}
    inside, outside = (
        [
            p
            for name, p in model.named_parameters()
            if p.requires_grad and ("sublayers" in name) == own
        ]
        for own in (True, False)
    )
    optimiser = kind(
        [{"params": inside}, {"params": outside, "lr": ahead * 1e-2}], lr=1e-2, **options
    )
    monitor, draws = Monitor(model, every=every), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randint(0, 12, (32, 13), generator=draws)
        tokens, targets = rows[:, :-1], rows[:, shift:][:, :12]
        if hide:
            hidden = torch.rand(tokens.shape, generator=draws) < 0.3
            tokens, targets = torch.where(hidden, 12, tokens), torch.where(hidden, tokens, -1)
        loss = model(tokens, targets)[1]
        loss.backward()
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
    monitor.close()
    return monitor, model, tokens


class Plain(torch.nn.Module):
    """Read by its sums."""

    def __init__(self):
        super().__init__()
        self.table, self.head = torch.nn.Embedding(13, 16), torch.nn.Linear(16, 13)
        self.maps = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, tokens, targets=None):
        x = self.table(tokens)
        for part in self.maps:
            x = x + part(x).tanh()
        logits = self.head(x)
        return logits, (
            None
            if targets is None
            else torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )


def checks(monitor):
    return {alarm.check for alarm in monitor.alarms}


@pytest.mark.slow
def test_labels_that_are_not_shifted_are_told_and_shifted_ones_are_not():
    assert "targets leak" in checks(trained(shift=0, steps=30)[0])
    assert "targets leak" not in checks(trained(steps=30)[0])


@pytest.mark.parametrize("module", [None, "transformer"])
def test_gradients_that_are_not_reset_are_told_and_those_of_several_passes_are_not(module):
    def alarms(reset, passes=1):
        torch.manual_seed(0)
        options = {"vocab_size": 13, "context": 12, "depth": 2, "width": 16, "heads": 2}
        model = GPT(GPTConfig(**options)) if module is None else Plain()
        optimiser, monitor = torch.optim.SGD(model.parameters(), lr=1e-3), Monitor(model, every=2)
        for _ in range(9):
            for _ in range(passes):
                tokens = torch.randint(0, 13, (4, 12))
                loss = model(tokens, tokens)[1]
                if reset == "before backward" and passes == 1:
                    optimiser.zero_grad(set_to_none=False)
                loss.backward()
            monitor.step(loss, optimiser)
            optimiser.step()
            if reset == "after the step":
                optimiser.zero_grad()
        return checks(monitor)

    assert "gradients are not reset" in alarms("never")
    for reset, passes in (("before backward", 1), ("after the step", 1), ("after the step", 3)):
        assert "gradients are not reset" not in alarms(reset, passes)


def test_a_gradient_that_frozen_weights_keep_is_not_told():
    model = GPT(GPTConfig(vocab_size=13, context=12, depth=2, width=16, heads=2))
    monitor = Monitor(model, every=2)
    for step in range(9):
        free = [p for p in model.parameters() if p.requires_grad]
        torch.optim.SGD(free).zero_grad()
        tokens = torch.randint(0, 13, (4, 12))
        loss = model(tokens, tokens)[1]
        loss.backward()
        monitor.step(loss)
        if step == 2:
            model.depth.sublayers[0].requires_grad_(False)
    assert any(p.grad is not None for p in model.depth.sublayers[0].parameters())
    assert "gradients are not reset" not in checks(monitor)


@pytest.mark.slow
def test_a_missing_mask_is_told_once_the_model_uses_it():
    monitor, model, tokens = trained(causal=False, steps=120)
    with torch.no_grad():
        right = float((model(tokens)[0][:, :-1].argmax(-1) == tokens[:, 1:]).float().mean())
    assert right > 0.3, "the training has learned to read the next token"
    assert "targets leak" in checks(monitor)


@pytest.mark.slow
def test_a_model_that_fills_in_hidden_tokens_leaks_nothing():
    assert "targets leak" not in checks(trained(causal=False, hide=True, steps=40)[0])


def test_the_shares_are_those_of_the_largest_logits():
    monitor, model, tokens = trained(steps=1, every=1)
    fresh, tokens = GPT(model.config, seed=0), tokens[: SAMPLE // 12]
    likeliest = fresh(tokens)[0].argmax(-1)
    figures = monitor.past.reports[-1][1]
    assert figures["copied"] == pytest.approx(float((likeliest == tokens).float().mean()))
    assert figures["foreseen"] == pytest.approx(
        float((likeliest[:, :-1] == tokens[:, 1:]).float().mean())
    )


def test_the_weight_on_later_tokens_is_the_upper_triangle_of_the_softmax():
    scores = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(weight_ahead(scores, 6), scores.softmax(-1).triu(1).sum(-1).mean(-1))
    hidden = scores.masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
    assert torch.equal(weight_ahead(hidden, 6), torch.zeros(2))
    # a row of padding reads nothing
    padded = scores.clone()
    padded[:, 0] = -torch.inf
    expected = padded[:, 1:].softmax(-1).triu(2).sum(-1).mean(-1)
    assert torch.allclose(weight_ahead(padded, 6), expected)
    assert torch.equal(weight_ahead(torch.full((2, 3, 3), -torch.inf), 3), torch.zeros(2))


def mask_with_others(tokens, others, first, ahead=0):
    """Which keys each token sees: `others` that are no tokens of the sequence, at one end, and
    tokens up to `ahead` after its own.
    """
    causal = torch.ones(tokens, tokens).tril(ahead).bool()
    seen_by_all = torch.ones(tokens, others).bool()
    return torch.cat([seen_by_all, causal] if first == "others" else [causal, seen_by_all], 1)


@pytest.mark.parametrize("tokens", [6, 100])
@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize("first", ["tokens", "others"])
def test_sinks_memory_keys_and_a_cache_are_no_later_tokens(tokens, others, first):
    """A sink is the last column, memory keys are at either end, and a cache is in front. Of 100
    tokens, 64 rows are looked at.
    """
    scores = torch.randn(1, 2, tokens, tokens + others, generator=torch.Generator().manual_seed(0))

    def ahead(mask):
        seen = []
        with scores_seen(seen.append, pytest.fail):
            scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return weight_ahead(*seen[0])

    assert torch.equal(ahead(mask_with_others(tokens, others, first)), torch.zeros(2))
    assert ahead(mask_with_others(tokens, others, first, ahead=4)).isnan().all()
    assert ahead(torch.ones(tokens, tokens + others).bool()).isnan().all()


def test_fewer_keys_than_tokens_are_not_the_tokens():
    assert weight_ahead(torch.zeros(2, 6, 4), 6).isnan().all()


def test_a_sink_is_a_visible_key_of_the_entropy():
    scores = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    scores = scores.masked_fill(~mask_with_others(5, 1, "tokens"), -torch.inf)
    for head, share in zip(scores, row_entropy(scores), strict=True):
        shares = []
        for row in head:
            keys = row[row > -torch.inf].softmax(0)
            shares.append(-float((keys * keys.log()).sum()) / math.log(len(keys)))
        assert float(share) == pytest.approx(sum(shares) / 5, rel=1e-5)


def test_a_gpt_with_sinks_reads_no_later_token():
    model = GPT(
        GPTConfig(vocab_size=13, context=12, depth=2, width=16, heads=2, sinks=True), seed=0
    )
    monitor = Monitor(model, every=1)
    tokens = torch.randint(0, 13, (4, 12))
    loss = model(tokens, tokens)[1]
    loss.backward()
    monitor.step(loss)
    assert monitor.past.reports[-1][1]["ahead"] == [0.0] * 4


@pytest.mark.parametrize(
    ("ahead", "gauge"),
    [
        ([0.0, 0.0], "copied"),
        ([math.nan, 0.0], None),
        ([math.nan, math.nan], None),
        ([math.nan, 0.3], "foreseen"),
    ],
)
def test_a_model_leaks_only_where_it_is_known_which_tokens_it_reads(ahead, gauge):
    past = Past(["attention"], [2], 13)
    shares = {"copied": {"copied": 1.0, "foreseen": 0.2}}.get(
        gauge, {"copied": 0.95, "foreseen": 1.0 if gauge else 0.9}
    )
    for step in range(3):
        past.losses.append((step, 0.05))
        past.add(step, {"ahead": ahead, **shares})
    limits = {"limit": 0.9, "margin": 0.04, "reads": 1e-3, "reports": 3}
    seen = leak(past, limits)
    assert (seen is None) == (gauge is None)
    if gauge is not None:
        assert seen.value == shares[gauge]


@pytest.mark.slow
def test_an_adam_that_divides_by_its_eps_hardly_moves_and_is_told():
    assert "updates near zero" in checks(trained(eps=1.0, steps=20)[0])
    assert "updates near zero" not in checks(trained(steps=20)[0])
    assert "updates near zero" not in checks(trained(kind=torch.optim.SGD, steps=20)[0])


def test_a_weight_hardly_moves_by_the_rate_of_its_own_group():
    monitor, _, _ = trained(ahead=300, steps=20)
    figures = monitor.past.reports[-1][1]
    assert figures["learning_rate"] == pytest.approx(3.0)
    assert figures["rate_share"] == pytest.approx([1 / 300] * 6, rel=0.05)
    assert max(figures["update"]) / figures["learning_rate"] < 0.05, (
        "by the largest rate it would be told"
    )
    assert "updates near zero" not in checks(monitor)
    assert "updates near zero" in checks(trained(ahead=1 / 300, eps=1.0, steps=20)[0])


@pytest.mark.parametrize(("moved", "share"), [(0.2, None), (1.3, None), (0.97, 0.01)])
def test_a_step_is_near_zero_only_where_the_decay_is_all_of_it(moved, share):
    """Updates over the rate, where 3 is expected and the decay is 1: a smaller update than the
    decay is a step against it.
    """
    past = Past(["ffn"], [0], 0)
    for step in range(3):
        figures = {
            "learning_rate": 0.1,
            "update": [0.1 * moved],
            "rate_share": [3.0],
            "decay_share": [1.0],
        }
        past.add(step, {**figures, "adam_gradient_ratio": [1.0]})
    seen = slow(past, {"limit": 0.05, "reports": 3})
    assert seen is None if share is None else seen.value == pytest.approx(share)


def test_weights_that_have_grown_do_not_make_a_step_of_the_rate_near_zero():
    group, updates = [torch.nn.Parameter(torch.full((8, 8), 50.0))], Updates()
    updates.remember([group, []])
    optimiser = torch.optim.AdamW(group, lr=1e-2)
    with torch.no_grad():
        group[0] -= 1e-2
    figures = updates.figures([group, []], optimiser)
    assert float(figures["update", 0]) / 1e-2 == pytest.approx(1 / 50, rel=1e-3)
    assert float(figures["update", 0] / figures["rate_share", 0]) / 1e-2 == pytest.approx(
        1, rel=1e-3
    )


@pytest.mark.slow
def test_matrices_that_stand_still_are_told_although_the_norm_before_them_moves():
    monitor, _, _ = trained(frozen=("sublayers.3.field",), steps=20)
    assert [alarm.place for alarm in monitor.alarms if alarm.check == "frozen layer"] == [
        "block 1, ffn"
    ]
    assert monitor.past.reports[-1][1]["unmoved"][3] == 1
    assert monitor.past.reports[-1][1]["update"][3] > 0
    assert "frozen layer" not in checks(trained(steps=20)[0])
