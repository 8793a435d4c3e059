"""Readings of a diagnosis beside the same figures written out."""

import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

import ctrans
from ctrans.examine import diagnosed
from ctrans.examine.diagnosis.diagnose import diagnose
from ctrans.measure import MEASURES, Check, Measure
from ctrans.report.charts import distances
from ctrans.training.monitor import Monitor
from tests.examine.diagnosis.test_diagnose import PLANTED, found, healthy, silence, text


def loss_with(model, segment, share, tokens, targets):
    """The loss if one sublayer's step is `share` times as long."""
    x = model.embed(tokens)
    for k, (part, h) in enumerate(zip(model.depth.sublayers, model.depth.lengths, strict=True)):
        x = part.step(x, h * share if k == segment else h)
    return float(model.loss(model.head(x), tokens, targets))


def states_of(model, tokens):
    """X_0 to X_D."""
    x = model.embed(tokens)
    states = [x]
    for part, h in zip(model.depth.sublayers, model.depth.lengths, strict=True):
        x = part.step(x, h)
        states.append(x)
    return states


def massive(x):
    sizes = sorted(x.abs().flatten().tolist())
    median = statistics.median(sizes)
    return min(sizes[-1] / 100, sizes[-1] / (1000 * median))


def similarity(x):
    cosines = torch.cosine_similarity(x.unsqueeze(1), x.unsqueeze(2), dim=-1)
    count = x.shape[1]
    pairs = [cosines[:, i, j] for i in range(count) for j in range(i)]
    return torch.stack(pairs).mean()


def mean_entry(x):
    return x.mean()


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_a_figure_of_a_state_has_the_number_of_its_state(placement, monkeypatch):
    limit = Check(severity="note", source="", impact="", remediation="", high=1e-3)
    plain = Measure(formula="", scope="state", compute=mean_entry, checks={"mean entry": limit})
    monkeypatch.setitem(MEASURES, "mean entry", plain)
    model, (tokens, targets) = healthy(placement), text()
    table = diagnosed.measured({"model": diagnose(model, tokens, targets)}, {})
    states = states_of(model, tokens)
    by_hand = {
        "massive activation": massive,
        "token similarity": similarity,
        "mean entry": mean_entry,
    }
    for measure, figure in by_hand.items():
        rows = table.of(measure)
        assert [row.depth for row in rows] == [*range(len(states))], measure
        for row in rows:
            expected = float(figure(states[row.depth]))
            assert row.value == pytest.approx(expected, rel=1e-9), (measure, row.depth)
    (plot,) = distances(table)
    (line,) = [line for line in plot.lines if line.model == "mean entry"]
    assert line.x == [*range(len(states) - 1)]
    excess = [limit.excess(float(mean_entry(x))) for x in states[1:]]
    assert line.y == pytest.approx([min(3, max(-3, each)) for each in excess])


@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_the_slope_of_the_loss_is_that_of_a_longer_step(placement):
    model, (tokens, targets) = healthy(placement), text()
    for reading in diagnose(model, tokens, targets).readings["loss of less of a sublayer"]:
        ends = [loss_with(model, reading.segment, 1 + d, tokens, targets) for d in (1e-4, -1e-4)]
        assert reading.value == pytest.approx((ends[0] - ends[1]) / 2e-4, rel=1e-5, abs=1e-8)


def test_what_raises_the_loss_is_found_because_the_loss_falls_without_it():
    model, (tokens, targets) = PLANTED["sublayer raises the loss"][0](), text()
    assert (
        loss_with(model, 5, 0.9, tokens, targets) < loss_with(model, 5, 1.0, tokens, targets) - 0.05
    )


def test_the_spread_of_scores_is_the_deviation_of_the_products_of_queries_and_keys():
    model, (tokens, targets) = healthy("pre"), text()
    spreads, x = [], model.embed(tokens)
    for k, (part, h) in enumerate(zip(model.depth.sublayers, model.depth.lengths, strict=True)):
        if k % 2 == 0:
            u, rows = part.given(x), []
            for head in part.field.head_matrices():
                scores = (
                    (u @ head.query.T + head.query_offset)
                    @ (u @ head.key.T).mT
                    / math.sqrt(len(head.query))
                )
                rows += [
                    scores[b, i, : i + 1].std(correction=0) for i in range(2, 12) for b in range(2)
                ]
            spreads.append(float(np.median(torch.stack(rows).numpy())))
        x = part.step(x, h)
    readings = diagnose(model, tokens, targets).readings["scores over the other layers'"]
    for reading, own in zip(readings, spreads, strict=True):
        others = statistics.median(each for each in spreads if each != own)
        assert reading.value == pytest.approx(own / others, rel=1e-6)


@pytest.mark.parametrize("count", [0, 16, 48])
def test_dead_units_are_counted_where_they_are(count):
    model, (tokens, targets) = healthy("pre"), text()
    model.depth.sublayers[3].field.up.bias[:count] = -100.0
    shares = [
        reading.value
        for reading in diagnose(model, tokens, targets).readings["share of dead units"]
    ]
    assert shares == [0, count / 64, 0]


def test_an_eps_that_dominates_a_norm_around_the_state_is_found():
    model = healthy("post")
    model.depth.sublayers[3].state_norm.eps = 1e4
    checks = {finding.check: finding for finding in diagnose(model, *text()).findings}
    finding = checks["eps dominates the norm"]
    assert finding.place == "block 1, FFN (segment 3), the norm around the state"


def test_a_silenced_outlier_is_a_note_and_its_gain_is_not_called_dead():
    """Setting such a gain to 0 changes nothing; to the median, much: so it is no fault."""
    model, (tokens, targets) = healthy("post"), text()
    silence(model)
    kept = model(tokens)[0]
    names = {
        finding.check: finding.severity for finding in diagnose(model, tokens, targets).findings
    }
    assert names["silenced outlier channel"] == "note"
    assert "dead gain around the state" not in names
    gains = model.depth.sublayers[3].state_norm.weight
    gains[5] = 0.0
    assert float((model(tokens)[0] - kept).norm() / kept.norm()) < 1e-6
    gains[5] = gains.median()
    assert float((model(tokens)[0] - kept).norm() / kept.norm()) > 0.1


def test_a_dead_gain_beside_a_silenced_outlier_is_still_found():
    model, (tokens, targets) = healthy("post"), text()
    silence(model)
    model.depth.sublayers[3].state_norm.weight[7] = 0.0
    finding = next(
        each
        for each in diagnose(model, tokens, targets).findings
        if each.check == "dead gain around the state"
    )
    assert "channel 7" in finding.figure
    assert "channel 5" not in finding.figure


@pytest.mark.slow
def test_a_model_that_is_not_the_same_twice_says_nothing_of_later_tokens():
    diagnosis = found("not the same twice")
    assert "change by a later token" not in diagnosis.readings
    (healthy_reading,) = diagnose(healthy("pre"), *text()).readings["difference of two passes"]
    assert healthy_reading.value == 0


@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_a_measure_of_velocities_is_of_the_raw_ones_as_in_a_training(placement, monkeypatch):
    """Those of Post-LN are no differences of states."""
    model, (tokens, targets) = healthy(placement), text()
    judged = Check(severity="note", source="s", impact="i", remediation="r", high=1e9)
    velocity = MEASURES["velocity"]
    monkeypatch.setitem(
        MEASURES, "velocity", replace(velocity, checks={**velocity.checks, "too long": judged})
    )
    readings = diagnose(model, tokens, targets).readings["velocity"]
    by_hand, x = [], model.embed(tokens)
    for part, h in zip(model.depth.sublayers, model.depth.lengths, strict=True):
        f = part.field(x if part.input_norm is None else part.input_norm(x))
        r = f if part.output_norm is None else part.output_norm(f)
        by_hand.append(float(r.square().mean().sqrt()))
        x = x + h * r
        if placement == "post":
            x = part.state_norm(x)
    assert [reading.value for reading in readings] == pytest.approx(by_hand, rel=1e-12)
    model.requires_grad_(True)
    monitor = Monitor(model, every=1)
    loss = model(tokens, targets)[1]
    loss.backward()
    monitor.step(loss)
    assert monitor.past.reports[-1][1]["velocity"] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize("window", [4, 48])
def test_tokens_behind_a_window_are_hidden_and_do_not_spread_scores(window):
    config = transformers.Gemma3TextConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=window,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0))
    found = ctrans.diagnose(model, tokens, tokens.roll(-1, 1))
    rows = model(tokens, output_attentions=True).attentions
    spreads = []
    for k, of_layer in enumerate(rows):
        reads = 24 if k == 5 else window  # the last layer has no window
        deviations = [
            of_layer[b, h, i, max(0, i + 1 - reads) : i + 1].double().log().std(correction=0)
            for b in range(2)
            for h in range(4)
            for i in range(2, 24)
        ]
        spreads.append(float(np.median(torch.stack(deviations).detach().numpy())))
    readings = found.readings["scores over the other layers'"]
    for reading, own in zip(readings, spreads, strict=True):
        others = statistics.median(each for each in spreads if each != own)
        assert reading.value == pytest.approx(own / others, rel=1e-3)
    assert "scores of another scale" not in [finding.check for finding in found.findings]


@pytest.mark.parametrize(("heads", "batch"), [(1, 1), (1, 2), (2, 1)])
def test_a_saturated_layer_is_found_with_one_head_and_one_text(heads, batch):
    config = ctrans.GPTConfig(width=32, heads=heads, context=32, vocab_size=50, depth=4)
    model = ctrans.GPT(config, seed=0).eval()
    with torch.no_grad():
        model.depth.sublayers[4].field.qkv.weight[:64] *= 500
    tokens = torch.randint(0, 50, (batch, 32), generator=torch.Generator().manual_seed(0))
    found = ctrans.diagnose(model, tokens, tokens.roll(-1, 1))
    scores = [finding for finding in found.findings if finding.check == "scores of another scale"]
    assert [finding.place for finding in scores] == ["block 2, attention (segment 4)"]
