"""Gauges against the same quantities computed anew from the model's states."""

import math

import pytest
import torch
from torch import nn

from ctrans import GPT, ConfigError, GPTConfig
from ctrans.dynamics.placement import PLACEMENTS
from ctrans.measure.reductions import growth_exponent
from ctrans.measure.walk import Instrument, States, walk
from ctrans.training.monitor import GAUGES, Monitor
from ctrans.training.monitor.scores import largest_score, row_entropy, scores_seen
from ctrans.training.monitor.sites import sites_of
from tests.training.monitor.test_bits import Plain, hugging_face


class Costates(Instrument):
    def begin(self, depth, x0):
        self.found = {}

    def backward(self, at):
        self.found[at.k] = float(at.before.norm())

    def figures(self):
        return [self.found[k] for k in sorted(self.found)]


def gpt(placement="peri", **options):
    made = GPTConfig(
        vocab_size=40, context=8, depth=3, width=16, heads=2, placement=placement, dt=0.5, **options
    )
    return GPT(made, seed=2).double()


def tokens(count=3, length=8):
    return torch.randint(40, (count, length + 1), generator=torch.Generator().manual_seed(0))


def reported(model, loss, **opening):
    monitor = Monitor(model, every=1, **opening)
    value = loss()
    value.backward()
    monitor.step(value, torch.optim.SGD(model.parameters(), lr=0.1))
    monitor.close()
    return monitor.past.reports[-1][1]


@pytest.mark.cases(6)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_states_velocities_and_costates_are_those_of_a_walk(placement):
    model, text = gpt(placement), tokens()
    figures = reported(model, lambda: model(text[:, :-1], text[:, 1:])[1])
    states, costates = walk(model, text[:, :-1], text[:, 1:], [States(), Costates()])
    velocities = [part(x) for part, x in zip(model.depth.sublayers, states, strict=False)]
    expected = {
        "rms": [x.square().mean().sqrt() for x in states],
        "mean_abs": [x.abs().mean() for x in states],
        "largest": [x.abs().max() for x in states],
        "peak": [x.abs().max() / x.abs().median() for x in states],
        "velocity": [v.square().mean().sqrt() for v in velocities],
        "step_share": [0.5 * v.norm() / x.norm() for v, x in zip(velocities, states, strict=False)],
        "costate": costates,
        "gradient": [
            math.hypot(*(float(p.grad.norm()) for p in part.parameters()))
            for part in model.depth.sublayers
        ],
    }
    for name, values in expected.items():
        found = figures[name][: len(values)]
        assert found == pytest.approx([float(value) for value in values], rel=2e-6), name
    assert figures["gradient_norm"] == pytest.approx(
        math.hypot(*(float(p.grad.norm()) for p in model.parameters()))
    )
    z = model(text[:, :-1])[0].logsumexp(-1)
    assert figures["log_z"] == pytest.approx(float(z.mean()), rel=1e-5)


def test_the_largest_logit_is_that_of_all_tokens_and_log_z_of_the_first_256():
    """Also where the training does not call the model as a whole, as that of ctrans. The last
    sequence has the largest logits.
    """
    config = GPTConfig(vocab_size=40, context=128, depth=1, width=16, heads=2, tied=False)
    model = GPT(config, seed=2)
    text = tokens(3, 128)
    text = text[model(text[:, :-1])[0].abs().amax((1, 2)).argsort()]

    def through_parts():
        logits = model.head(model.depth(model.embed(text[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    whole = reported(model, lambda: model(text[:, :-1], text[:, 1:])[1])
    in_parts = reported(model, through_parts)
    logits = model(text[:, :-1])[0].detach().flatten(0, 1)
    assert logits.abs().max() > logits[:256].abs().max()
    for figures in (whole, in_parts):
        assert figures["largest_logit"] == pytest.approx(float(logits.abs().max()), rel=1e-5)
        assert figures["log_z"] == pytest.approx(float(logits[:256].logsumexp(-1).mean()), rel=1e-5)
    assert "256 tokens" in GAUGES["log_z"].formula
    assert "first micro-batch" in GAUGES["largest_logit"].formula


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"positions": "rotary", "kv_heads": 1}, {"window": 3}]
)
def test_scores_are_the_attentions_own(options):
    """Against the rows: log a_ij - log a_il = s_ij - s_il, so that largest scores follow where a
    row's smallest is known.
    """
    model, text = gpt(**options), tokens(1)
    for part in model.depth.sublayers[::2]:
        part.field.qkv.weight.data *= 30
    figures = reported(model, lambda: model(text[:, :-1], text[:, 1:])[1])
    states = walk(model, text[:, :-1], instruments=[States()])[0]
    entropies = []
    for part, x in list(zip(model.depth.sublayers, states, strict=False))[::2]:
        rows = part.field.rows(part.input_norm(x))[0]
        visible = (rows > 0).sum(-1)
        share = torch.special.entr(rows).sum(-1)[:, 1:] / visible[:, 1:].log()
        entropies.extend(share.mean(-1).tolist())
        q, k, _ = part.field.queries_keys_values(part.input_norm(x))
        scores = (q @ part.field._for_each_head(k).mT)[0] * part.field._scale
        if options.get("softcap"):
            scores = 5.0 * torch.tanh(scores / 5.0)
        largest = scores.masked_fill(rows == 0, 0.0).abs().amax((-2, -1))
        start = len(entropies) - 2
        assert figures["logit"][start : start + 2] == pytest.approx(largest.tolist(), rel=1e-5)
    assert figures["entropy"] == pytest.approx(entropies, rel=1e-4, abs=1e-6)


def test_the_figures_of_a_pass_are_the_first_micro_batchs_and_scores_its_first_sequences():
    """As their rows in the table of measures say."""
    model, text = gpt(), tokens(4)

    def loss(batches):
        for batch in batches:
            value = model(batch[:, :-1], batch[:, 1:])[1]
            if batch is not batches[-1]:
                value.backward()
        return value

    accumulated = reported(model, lambda: loss([text[:2], text[2:3], text[3:]]))
    for names, part in (
        (("rms", "velocity", "step_share", "costate"), text[:2]),
        (("logit", "entropy", "ahead"), text[:1]),
    ):
        alone = reported(model, lambda batch=part: loss([batch]))
        for name in names:
            assert accumulated[name] == pytest.approx(alone[name], rel=1e-6, nan_ok=True), name
            words = GAUGES[name].formula
            assert ("first sequence" in words) == (name in ("logit", "entropy", "ahead"))
    assert "first micro-batch" in GAUGES["step_share"].formula


@pytest.mark.slow
def test_the_scores_of_torchs_own_attention_are_seen_and_those_of_an_eager_one():
    text = torch.randint(32, (2, 8))
    plain = Plain()
    figures = reported(plain, lambda: plain(text, text)[1], example=text)
    assert len(figures["logit"]) == 4
    fused, eager = hugging_face(), hugging_face()
    eager.load_state_dict(fused.state_dict())
    eager.set_attn_implementation("eager")
    for model in (fused, eager):
        model.config.resid_pdrop = 0.0
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    found = [
        reported(model, lambda m=model: m(input_ids=text, labels=text).loss)
        for model in (fused, eager)
    ]
    assert found[0]["logit"] == pytest.approx(found[1]["logit"], rel=1e-4)
    assert found[0]["entropy"] == pytest.approx(found[1]["entropy"], rel=1e-4)


def test_an_update_is_that_of_one_step_whatever_the_optimiser():
    model, text = gpt(), tokens()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    monitor = Monitor(model, every=3)
    before, ratios = None, {}
    for step in range(1, 7):
        loss = model(text[:, :-1], text[:, 1:])[1]
        loss.backward()
        monitor.step(loss, optimiser)
        if step in (3, 6):
            ratios[step] = [_ratio(part, before) for part in model.depth.sublayers]
        before = {id(p): p.detach().clone() for p in model.parameters()}
        optimiser.step()
        optimiser.zero_grad()
    for step, figures in monitor.past.reports:
        if step in ratios:
            assert figures["update"] == pytest.approx(ratios[step], rel=1e-5)


def _ratio(part, before):
    changed = math.hypot(*(float((p - before[id(p)]).norm()) for p in part.parameters()))
    return changed / math.hypot(*(float(before[id(p)].norm()) for p in part.parameters()))


def test_adams_surprise_is_one_for_equal_gradients_and_bounded():
    model = gpt()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.99))
    monitor = Monitor(model, every=1)
    for factor in (1.0, 1.0, 1000.0):
        for p in model.parameters():
            p.grad = torch.full_like(p, factor)
        monitor.step(0.0, optimiser)
        optimiser.step()
    found = [
        figures["adam_gradient_ratio"][0]
        for _, figures in monitor.past.reports
        if "adam_gradient_ratio" in figures
    ]
    assert found[0] == pytest.approx(1.0, rel=1e-5)
    # the third of three squares, of which the last is 1e6 times the others: nu = (1 - b) g^2/(1 -
    # b^3) but for 2e-6
    assert found[1] == pytest.approx(math.sqrt((1 - 0.99**3) / 0.01), rel=1e-4)


def test_a_velocity_behind_an_output_norm_stays_within_its_bound():
    model, text = gpt("peri"), tokens()
    for part in model.depth.sublayers:
        part.output_norm.weight.data *= 3
    figures = reported(model, lambda: model(text[:, :-1], text[:, 1:])[1])
    assert all(0.5 < share <= 1 for share in figures["bound_share"])


def test_a_layer_that_is_frozen_on_purpose_has_no_gradient_and_is_told_as_frozen():
    model, text = gpt(), tokens()
    model.depth.sublayers[2].requires_grad_(False)
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    monitor = Monitor(model, every=1, clip=1.0)
    for _ in range(4):
        loss = model(text[:, :-1], text[:, 1:])[1]
        loss.backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
        monitor.step(loss, optimiser)
        optimiser.step()
        optimiser.zero_grad()
    figures = monitor.past.reports[-1][1]
    assert [math.isnan(value) for value in figures["gradient"]] == [k == 2 for k in range(6)]
    assert figures["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    told = {(alarm.check, alarm.place) for alarm in monitor.alarms}
    assert ("frozen layer", "block 1, attention") in told
    assert ("dead layer", "block 1, attention") not in told, monitor.alarms


def test_a_depth_that_is_frozen_whole_is_reported_and_the_norm_is_that_of_what_trains():
    model, text = gpt(), tokens()
    model.depth.requires_grad_(False)
    figures = reported(model, lambda: model(text[:, :-1], text[:, 1:])[1], clip=1.0)
    assert "gradient" not in figures
    norm = math.hypot(*(float(p.grad.norm()) for p in model.parameters() if p.grad is not None))
    assert figures["gradient_norm"] == pytest.approx(norm, rel=1e-5)


def test_growth_of_a_power_is_its_exponent():
    assert growth_exponent([k**1.7 for k in range(1, 13)]) == pytest.approx(1.7)
    assert growth_exponent([1.0]) is None


def test_every_figure_has_an_entry_that_says_what_it_is():
    model, text = gpt(), tokens()
    figures = reported(model, lambda: model(text[:, :-1], text[:, 1:])[1])
    assert figures.keys() <= GAUGES.keys()


def test_hooks_are_there_on_reporting_steps_and_for_the_batch_before_and_gone_at_the_end():
    model, text = gpt(), tokens()
    monitor = Monitor(model, every=4)

    def hooks():
        return sum(
            len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules()
        )

    seen = []
    for _ in range(7):
        seen.append(hooks())
        monitor.step(model(text[:, :-1], text[:, 1:])[1], None)
    assert [count > 3 for count in seen] == [True, False, False, True, False, False, False]
    # of the batch: the root's two, and one of the embedding
    assert [count for count in seen if count <= 3] == [0, 3, 0, 0, 3]
    assert hooks() > 3
    monitor.close()
    assert hooks() == 0


def test_evaluations_between_are_not_taken_for_the_training():
    model, text = gpt(), tokens()
    monitor = Monitor(model, every=1)
    with torch.no_grad():
        model(text[:, :4])
    model.eval()
    model(text[:1, :2])
    model.train()
    loss = model(text[:, :-1], text[:, 1:])[1]
    loss.backward()
    monitor.step(loss)
    states = walk(model, text[:, :-1], instruments=[States()])[0]
    assert monitor.past.reports[-1][1]["rms"][0] == pytest.approx(
        float(states[0].square().mean().sqrt())
    )


def test_places_of_foreign_models_are_the_users_own_modules():
    model = hugging_face()
    sites = sites_of(model)
    own = set(model.modules())
    assert [site.place for site in sites.by_depth][:2] == ["block 0, attention", "block 0, ffn"]
    assert all(
        site.enter in own and all(way_out.module in own for way_out in site.exits)
        for site in sites.by_depth
    )
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_wrong_requests_are_said():
    with pytest.raises(ConfigError, match="every"):
        Monitor(gpt(), every=0)
    with pytest.raises(ConfigError, match="held"):
        Monitor(gpt(), probe_every=10)
    with pytest.raises(ConfigError, match="attention logits grow"):
        Monitor(gpt(), limits={"attention logit grows": {"limit": 1}})
    with pytest.raises(ConfigError, match="limit"):
        Monitor(gpt(), limits={"loss spike": {"limits": 1}})
    with pytest.raises(ConfigError, match="reaction"):
        Monitor(gpt(), react=["skipp"])


def test_scores_that_are_no_numbers_are_not_told_as_zero():
    scores = torch.tensor([[[1.0, -torch.inf], [torch.nan, 2.0]], [[1.0, -torch.inf], [0.5, 2.0]]])
    largest, share = (largest_score(scores), row_entropy(scores))
    assert torch.isnan(largest).tolist() == torch.isnan(share).tolist() == [True, False]


@pytest.mark.parametrize("fill", [-1e4, -65504.0, -1e9, torch.finfo(torch.float32).min, -math.inf])
def test_what_a_mask_hides_by_a_finite_number_is_hidden(fill):
    """Megatron's, float16's, that of many models, float32's and torch's."""
    scores, seen = torch.randn(1, 2, 6, 6, generator=torch.Generator().manual_seed(0)), []
    later = torch.ones(6, 6).triu(1).bool()
    with scores_seen(lambda scores: seen.append(scores.entries), pytest.fail):
        scores.masked_fill(later, fill).softmax(-1)
    hidden = scores[0].masked_fill(later, -math.inf)
    assert torch.equal(largest_score(seen[0]), largest_score(hidden))
    assert torch.equal(row_entropy(seen[0]), row_entropy(hidden))


@pytest.mark.parametrize("weights", ["free", "constant", "linear"])
def test_the_norm_of_all_gradients_counts_a_weight_that_sublayers_share_once(weights):
    knots = {"free": None, "constant": 1, "linear": 2}[weights]
    model, text = gpt(depth_weights=weights, knots=knots), tokens()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = Monitor(model, every=1, clip=1.0)
    for _ in range(2):
        optimiser.zero_grad()
        loss = model(text[:, :-1], text[:, 1:])[1]
        loss.backward()
        norm = math.hypot(*(float(p.grad.norm()) for p in model.parameters()))
        monitor.step(loss, optimiser)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    assert monitor.past.reports[-1][1]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
