"""Every check is planted into a healthy model and has to be found where it was put; what is
measured has an oracle of its own.
"""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from ctrans.base.json_values import plain
from ctrans.cli import main
from ctrans.control.costate import ZERO_GRADIENT, costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.examine.diagnosed import missing as missing_of
from ctrans.examine.diagnosis.diagnose import SearchRequest, diagnose, merged, readings_in
from ctrans.examine.diagnosis.diagnostic_checks import CHECKS
from ctrans.examine.diagnosis.weight_readings import weight_readings
from ctrans.examine.screening.screen import screen
from ctrans.interop import open_model
from ctrans.measure.findings import SEVERITIES, Check
from ctrans.measure.measures import MEASURES, Measure
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from ctrans.report.contents import page_of
from docs._site.tables import MEANING_OF_SEVERITY, severities_table
from solvers import ConfigError
from tests.helpers import NAMES, small_model

TINY = 4.8e-33


def healthy(placement="peri", **changes):
    settings = {
        "vocab_size": 11,
        "context": 12,
        "depth": 3,
        "width": 16,
        "heads": 2,
        "dt": 0.5,
        "initialisation": "xavier",
    }
    config = GPTConfig(**{**settings, "embedding_std": 0.2, "placement": placement, **changes})
    return GPT(config).double().requires_grad_(False)


def text(seed=0):
    windows = torch.randint(0, 11, (2, 13), generator=torch.Generator().manual_seed(seed))
    return windows[:, :-1], windows[:, 1:]


def unmasked():
    """A user's module of torch's own blocks, without a causal mask."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    parts = torch.nn.Embedding(11, 16), body, torch.nn.Linear(16, 11)
    return open_model(torch.nn.Sequential(*parts).double())


def gain(placement, attribute, segment, channel, value):
    model = healthy(placement)
    getattr(model.depth.sublayers[segment], attribute).weight[channel] = value
    return model


def scaled(placement, change, **changes):
    model = healthy(placement, **changes)
    change(model)
    return model


def _of_all(rows):
    def change(model):
        rows(model.token_embedding.weight, model.position_embedding.weight)

    return change


def copied_block(model):
    """The second block gets the weights of the third."""
    for k in (2, 3):
        model.depth.sublayers[k].load_state_dict(model.depth.sublayers[k + 2].state_dict())


def exchanged_queries(model):
    """Sure of its predictions, with queries and values of the second block exchanged."""
    model.final_norm.weight.mul_(20)
    qkv = model.depth.sublayers[2].field.qkv.weight
    queries, keys, values = qkv.clone().chunk(3)
    qkv.copy_(torch.cat([values, keys, queries]))


def trained_gains(model):
    generator = torch.Generator().manual_seed(0)
    for part in model.depth.sublayers:
        weight = part.input_norm.weight
        weight.add_(0.1 * torch.randn(weight.shape, generator=generator))


class Shared(nn.Module):
    """Logits of a matrix that embeds too, with nothing in between: token 0 is to say token 1, whose
    row is twice as long.
    """

    def __init__(self):
        super().__init__()
        self.depth = healthy("none", width=4).depth
        for part in self.depth.sublayers:
            for weight in part.parameters():
                weight.zero_()
        first = torch.tensor([1.0, 0.5, -0.3, 0.2], dtype=torch.float64)
        self.matrix = nn.Parameter(torch.stack([first, 2 * first, -first]), requires_grad=False)

    def embed(self, tokens):
        return self.matrix[tokens]

    def head(self, x):
        return x @ self.matrix.T


def zero_block(model, block, factor=0.0):
    for part in model.depth.sublayers[2 * block : 2 * block + 2]:
        part.field.output_projection.weight.mul_(factor)
        part.field.output_projection.bias.mul_(factor)


def zero_head(model, block):
    head = next(iter(model.depth.sublayers[2 * block].field.head_matrices()))
    head.value.zero_()


def dead_units(model, segment, count=None):
    """The first units, or all, are off whatever they read: GELU at -100."""
    up, _ = model.depth.sublayers[segment].field.matrices()
    bias = next(
        p
        for name, p in model.depth.sublayers[segment].field.named_parameters()
        if p.shape == up.weight.shape[:1]
    )
    bias[:count].fill_(-100.0)


def noisy(field):
    field.register_forward_hook(lambda module, given, output: output + torch.randn_like(output))


def silence(model):
    """A channel that is 300 before the norm, and whose gain is nearly 0."""
    model.depth.sublayers[3].field.output_projection.bias[5] = 300.0
    model.depth.sublayers[3].state_norm.weight[5] = 1e-9


def mislead(model):
    """The last sublayer adds what raises the loss most for a small step."""
    tokens, targets = text()
    x = model.depth(model.embed(tokens)).requires_grad_()
    (up,) = torch.autograd.grad(model.loss(model.head(x), tokens, targets), x)
    model.unembedding = None
    model.final_norm.weight.mul_(8)
    model.depth.sublayers[5].field.output_projection.bias.add_(
        up.mean((0, 1)) * 3 / up.mean((0, 1)).norm()
    )


def one_block_as_drawn(model):
    """All blocks but one get a direction that is larger than random ones, as by a training."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "sublayers." in name and int(name.split(".")[2]) // 2 != 1:
            row = torch.ones(weight.shape[1])
            column = torch.ones(len(weight))
            direction = torch.outer(column, row) / (row.norm() * column.norm())
            weight.add_(3 * torch.linalg.matrix_norm(weight, 2) * direction)


PLANTED = {
    "not finite": (
        lambda: scaled(
            "pre", lambda m: m.depth.sublayers[1].field.output_projection.weight.fill_(math.nan)
        ),
        "sublayers.1",
    ),
    "reads future tokens": (
        lambda: scaled("pre", lambda m: setattr(m.depth.sublayers[2].field, "causal", False)),
        "block 1, attention (segment 2)",
    ),
    "tokens read both ways": (unmasked, "the depth"),
    "dead gain around the state": (
        lambda: gain("post", "state_norm", 3, 5, TINY),
        "block 1, FFN (segment 3)",
    ),
    "dead gain of an output norm": (
        lambda: gain("peri", "output_norm", 2, 5, 0.0),
        "block 1, attention (segment 2)",
    ),
    "dead gain of an input norm": (
        lambda: gain("pre", "input_norm", 2, 5, -1e-7),
        "block 1, attention (segment 2)",
    ),
    "dead gain outside the depth": (
        lambda: scaled("pre", lambda m: m.final_norm.weight[4:5].fill_(1e-9)),
        "final_norm",
    ),
    "dead norm": (
        lambda: scaled("peri", lambda m: m.depth.sublayers[5].output_norm.weight.mul_(1e-9)),
        "(segment 5)",
    ),
    "sensitivity too large": (
        lambda: scaled("pre", _of_all(lambda e, p: (e.mul_(1e-6), p.mul_(1e-6))), eps=1e-20),
        "(segment 0)",
    ),
    "sensitivity near zero": (lambda: scaled("pre", lambda m: zero_block(m, 1, 1e-8)), "block 1"),
    "zero weight": (
        lambda: scaled("pre", lambda m: zero_block(m, 1)),
        "block 1, FFN (segment 3): the weight depth.",
    ),
    "heads of zeros": (
        lambda: scaled("pre", lambda m: zero_head(m, 1)),
        "block 1, attention (segment 2)",
    ),
    "gain too large": (
        lambda: gain("pre", "input_norm", 2, 5, 100.0),
        "block 1, attention (segment 2), the input norm",
    ),
    "eps dominates the norm": (
        lambda: scaled("pre", lambda m: setattr(m.depth.sublayers[3].input_norm, "eps", 1e4)),
        "block 1, FFN (segment 3), the input norm",
    ),
    "embedding dominates the depth": (
        lambda: scaled("pre", _of_all(lambda e, p: (e.mul_(1e3), p.mul_(1e3)))),
        "the embedding",
    ),
    "positions dominate the text": (
        lambda: scaled("pre", _of_all(lambda e, p: p.mul_(300))),
        "the embedding",
    ),
    "sublayer output too large": (
        lambda: scaled(
            "pre", lambda m: m.depth.sublayers[3].field.output_projection.weight.mul_(300)
        ),
        "block 1, FFN",
    ),
    "sublayer output too small": (
        lambda: scaled(
            "pre", lambda m: m.depth.sublayers[3].field.output_projection.weight.div_(300)
        ),
        "block 1, FFN",
    ),
    "dead sublayer": (
        lambda: scaled("pre", lambda m: dead_units(m, 3)),
        "block 1, FFN (segment 3)",
    ),
    "saturated heads": (
        lambda: scaled(
            "pre", lambda m: m.depth.sublayers[2].field.matrices().__next__()[0].mul_(1e6)
        ),
        "block 1",
    ),
    "most heads saturated": (
        lambda: scaled(
            "pre",
            lambda m: [part.field.qkv.weight[:32].mul_(1e3) for part in m.depth.sublayers[::2]],
        ),
        "all attention",
    ),
    "massive activation": (
        lambda: scaled("pre", _of_all(lambda e, p: p[7, 3].fill_(-1e4))),
        "the embedded text",
    ),
    "rank collapse": (
        lambda: scaled("none", _of_all(lambda e, p: (e.copy_(e[:1].expand_as(e)), p.zero_()))),
        "the embedded text",
    ),
    "not the same twice": (
        lambda: scaled("pre", lambda m: noisy(m.depth.sublayers[3].field)),
        "block 1, FFN (segment 3)",
    ),
    "silenced outlier channel": (
        lambda: scaled("post", silence),
        "block 1, FFN (segment 3), the norm around the state",
    ),
    "dead units": (
        lambda: scaled("pre", lambda m: dead_units(m, 3, 58)),
        "block 1, FFN (segment 3)",
    ),
    "scores of another scale": (
        lambda: scaled("pre", lambda m: m.depth.sublayers[2].field.qkv.weight[:16].mul_(1e-3)),
        "block 1, attention (segment 2)",
    ),
    "sublayer raises the loss": (lambda: scaled("pre", mislead), "block 2, FFN (segment 5)"),
    "unused block": (
        lambda: scaled("pre", lambda m: zero_block(m, 1, 1e-6)),
        "block 1 (segments 2 to 3)",
    ),
    "weight decay below threshold": (lambda: healthy("pre"), "(segment"),
    "output gains too large": (
        lambda: scaled("peri", lambda m: m.depth.sublayers[1].output_norm.weight.mul_(50)),
        "block 0, FFN",
    ),
    "logits drift": (
        lambda: scaled(
            "pre",
            lambda m: (
                m.token_embedding.weight[:, 0].fill_(5.0),
                m.final_norm.bias[:1].fill_(20.0),
            ),
        ),
        "the head",
    ),
    "worse than guessing": (lambda: scaled("post", _of_all(lambda e, p: e.mul_(30))), "the head"),
    "an edit lowers the loss": (lambda: scaled("pre", exchanged_queries), "depth.sublayers.2"),
    "blocks with equal weights": (
        lambda: scaled("pre", copied_block),
        "the weight depth.sublayers.4.field.qkv.weight",
    ),
    "block untrained": (lambda: scaled("pre", one_block_as_drawn), "block 1"),
    "weight untrained": (lambda: scaled("pre", one_block_as_drawn), "block 1: the weight"),
    "targets are not predicted": (lambda: scaled("pre", trained_gains), "the head"),
    "worse than counting": (
        lambda: scaled("pre", lambda m: (trained_gains(m), m.final_norm.weight.mul_(20))),
        "the head",
    ),
    "tied gradients oppose": (Shared, "the tied matrix matrix"),
}
"""By check: a model that has it, and words of the place where it is."""


def found(name, **options):
    model, _ = PLANTED[name]
    tokens, targets = text()
    if name == "tied gradients oppose":
        tokens, targets = torch.zeros_like(tokens), torch.ones_like(targets)
    if name == "worse than counting":  # most of them are what it says, with logits too large
        targets = torch.where(torch.arange(tokens.shape[1]) % 4 != 1, tokens, targets)
    if name == "tokens read both ways":
        targets = torch.where(torch.arange(tokens.shape[1]) % 3 == 1, tokens, -1)
    if name == "an edit lowers the loss":  # what the model predicts without the fault
        tokens = torch.randint(0, 11, (8, 12), generator=torch.Generator().manual_seed(0))
        targets = scaled("pre", lambda m: m.final_norm.weight.mul_(20))(tokens)[0].argmax(-1)
        options["search"] = SearchRequest(30)
    return diagnose(model(), tokens, targets, weight_decay=1e-6, **options)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", NAMES)
def test_a_healthy_model_says_so(placement):
    diagnosis = diagnose(healthy(placement), *text())
    assert diagnosis.healthy, diagnosis.findings
    assert len(diagnosis.examined) >= 8
    assert all(
        each.figure == each.figure.strip()
        for readings in diagnosis.readings.values()
        for each in readings
    )


def test_every_check_of_the_table_is_planted():
    assert PLANTED.keys() == CHECKS.keys()
    assert all(check.severity in SEVERITIES for check in CHECKS.values())
    assert all(
        check.source and check.impact and check.remediation and check.limit
        for check in CHECKS.values()
    )


@pytest.mark.cases(13)
@pytest.mark.parametrize("name", CHECKS)
def test_what_is_planted_is_found_at_its_place(name):
    findings = {finding.check: finding for finding in found(name).findings}
    assert name in findings
    finding = findings[name]
    assert any(PLANTED[name][1] in reading.place for reading in finding.readings), finding.readings


def test_who_fills_in_hidden_tokens_may_read_what_comes_after():
    model, (tokens, targets) = PLANTED["reads future tokens"][0](), text()
    hidden = torch.where(torch.arange(tokens.shape[1]) % 3 == 1, tokens, -1)
    for wanted in (hidden, targets.flip(-1)):
        diagnosis = diagnose(model, tokens, wanted)
        assert "reads future tokens" in diagnosis.unexamined
    (reading,) = diagnose(healthy("pre"), tokens, targets).readings["change by a later token"]
    assert reading.value == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_reading_ahead_is_the_jacobians_upper_triangle(placement):
    """The segment that is named is the first whose Jacobian by X_0 couples a token to a later
    one.
    """
    model, (tokens, targets) = healthy(placement), text()
    model.depth.sublayers[2].field.causal = False
    x0, first = model.embed(tokens)[:1], []
    for k in range(len(model.depth.sublayers)):
        jacobian = torch.autograd.functional.jacobian(lambda x, k=k: walked(model, x, k + 1), x0)
        coupled = jacobian.square().sum((0, 2, 3, 5))  # [row's token, column's token]
        first += [k] if coupled.triu(1).any() else []
    (reading,) = diagnose(model, tokens, targets).readings["change by a later token"]
    assert reading.segment == first[0] == 2


def walked(model, x, count):
    for sublayer, h in zip(model.depth.sublayers[:count], model.depth.lengths, strict=False):
        x = sublayer.step(x, h)
    return x


def test_the_dead_gain_comes_first_with_its_channel_and_figure():
    diagnosis = found("dead gain around the state")
    first = diagnosis.findings[0]
    assert first.check == "dead gain around the state"
    assert "|gamma| = 4.8e-33 in channel 5" in first.figure
    assert "the norm around the state" in first.place
    assert "gamma[5] = 4.8e-33" in diagnosis.missing["sensitivities"], "the ODE divides by the gain"
    larger = diagnose(gain("post", "state_norm", 3, 5, 1e-9), *text()).findings
    assert [s.check for s in larger] == ["dead gain around the state", "sensitivity too large"]


@pytest.mark.slow
def test_the_massive_entry_is_named_by_channel_and_token():
    worst = next(
        s for s in found("massive activation").findings if s.check == "massive activation"
    ).worst
    assert "channel 3 of token 7" in worst.figure


def test_a_state_that_is_not_finite_is_named_before_anything_else():
    findings = found("not finite").findings
    assert findings[0].check == "not finite"
    assert any("block 0, FFN (segment 1)" in reading.place for reading in findings[0].readings)


def test_findings_are_sorted_by_severity_then_by_how_far_outside():
    model = gain("post", "state_norm", 3, 5, TINY)
    model.depth.sublayers[1].state_norm.weight[2] = 1e-5
    findings = diagnose(model, *text()).findings
    assert [SEVERITIES.index(s.severity) for s in findings] == sorted(
        SEVERITIES.index(s.severity) for s in findings
    )
    assert [reading.segment for reading in findings[0].readings] == [3, 1]


def test_entropy_is_that_of_the_softmax_written_out():
    model = healthy("pre")
    tokens, targets = text()
    sublayer = model.depth.sublayers[0]
    u, heads = sublayer.input_norm(model.embed(tokens)), list(sublayer.field.head_matrices())
    entropies = []
    for head in heads:
        scores = (
            (u @ head.query.T + head.query_offset)
            @ (u @ head.key.T).mT
            / math.sqrt(len(head.query))
        )
        rows = scores.masked_fill(torch.ones(12, 12).triu(1).bool(), -math.inf).softmax(-1)
        entropies.append(-(rows * rows.clamp_min(1e-300).log()).sum(-1)[:, 1:].mean())
    reading = diagnose(model, tokens, targets).readings["least entropy of a head"][0]
    assert reading.value == pytest.approx(float(min(entropies)), rel=1e-12)


@pytest.mark.cases(1)
@pytest.mark.parametrize("placement", ["pre", "post"])
def test_what_a_block_does_is_the_difference_to_the_state_without_it(placement):
    model, (tokens, targets) = healthy(placement), text()
    readings, x = diagnose(model, tokens, targets).readings["block moves"], model.embed(tokens)
    for block, reading in enumerate(readings):
        y = x
        for part in model.depth.sublayers[2 * block : 2 * block + 2]:
            x = part.step(x, 0.5)
            y = y if part.state_norm is None else part.state_norm(y)
        shares = sorted(
            float((a - b).norm() / a.norm())
            for a, b in zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)
        )
        assert shares[11] - 1e-12 <= reading.value <= shares[12] + 1e-12


def test_the_cosine_of_tied_gradients_is_that_of_two_matrices_of_their_own():
    model, (tokens, targets) = healthy("pre"), text()
    embedding, head = (model.token_embedding.weight.clone().requires_grad_() for _ in range(2))
    x = model.depth(embedding[tokens] + model.position_embedding.weight[: tokens.shape[1]])
    loss = F.cross_entropy(F.linear(model.final_norm(x), head).flatten(0, 1), targets.flatten())
    through, last = torch.autograd.grad(loss, [embedding, head])
    rows = tokens.unique()
    wanted = float(F.cosine_similarity(through[rows].flatten(), last[rows].flatten(), dim=0))
    (reading,) = diagnose(model, tokens, targets).readings["cosine of tied gradients"]
    assert reading.value == pytest.approx(wanted, rel=1e-9)


def test_without_a_loss_the_rest_is_looked_at_and_what_needs_one_is_named():
    diagnosis = diagnose(gain("post", "state_norm", 3, 5, 1e-9), text()[0])
    assert diagnosis.findings[0].check == "dead gain around the state"
    assert set(diagnosis.missing) == {
        "logits and loss",
        "loss",
        "costates",
        "loss of less",
        "tied weights",
        "what tokens read",
    }
    assert "no targets were given" in diagnosis.missing["costates"]


@pytest.mark.slow
def test_several_texts_give_how_often_it_was_seen_and_how_it_varies():
    model = scaled("post", _of_all(lambda e, p: e.mul_(30)))
    several = [diagnose(model, *text(seed)) for seed in range(3)]
    finding = next(s for s in merged(several).findings if s.check == "worse than guessing")
    each = [d.readings["loss over guessing"][0].value for d in several]
    assert finding.values == each
    assert (finding.seen, finding.texts) == (sum(value > 1 for value in each), 3)
    assert finding.deviation == pytest.approx(float(torch.tensor(each).std()), rel=1e-6)
    assert merged([diagnose(healthy(), *text(seed)) for seed in range(2)]).healthy


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_a_decay_that_is_none_is_refused(wrong):
    with pytest.raises(ConfigError, match="weight_decay"):
        diagnose(healthy(), *text(), weight_decay=wrong)


def test_a_norm_of_another_library_outside_of_the_depth_is_read_by_what_it_computes():
    class OneAboveRMSNorm(
        nn.Module
    ):  # as Gemma's: the gain is 1 + weight, so that a weight of 0 is alive and one of -1 dead
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, dtype=torch.float64))
            self.weight.data[9] = -1

        def forward(self, x):
            return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    model = healthy("pre")
    model.final_norm = OneAboveRMSNorm()
    (finding,) = diagnose(model, *text()).findings
    assert (finding.check, "channel 9;" in finding.figure) == ("dead gain outside the depth", True)


def test_a_check_that_nothing_measures_is_refused():
    check = Check(
        severity="note", source="ours", impact="it is.", remediation="leave it.", high=0.0
    )
    with pytest.raises(ConfigError, match="nothing computes the measure 'mine'"):
        MEASURES["mine"] = Measure(formula="it", checks={"nobody's": check})
    assert "nobody's" not in CHECKS
    assert all(check.quantity in MEASURES for check in CHECKS.values())


@pytest.mark.untyped
@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ("stat", "unknown scope 'stat'"),
        ("head", "nothing hands a head to the function"),
        ("run", "nothing hands a run to the function"),
        ("state", "a diagnosis computes functions that have a limit"),
    ],
)
def test_a_measure_of_what_nobody_hands_over_is_refused(scope, words):
    with pytest.raises(ConfigError, match=words):
        MEASURES["mine"] = Measure(formula="it", scope=scope, compute=torch.amax)
    assert "mine" not in MEASURES


def test_measures_added_at_once_are_looked_at_too():
    with pytest.raises(ConfigError, match="give a Measure"):
        MEASURES.update({"mine": 3})
    assert "mine" not in MEASURES


def of_states(monkeypatch, name, compute):
    """A measure of states, beyond whose limit every number larger than 0 is."""
    check = Check(
        severity="note", source="ours", impact="it is.", remediation="leave it.", high=0.0
    )
    measure = Measure(formula="it", scope="state", compute=compute, checks={name: check})
    monkeypatch.setitem(MEASURES, name, measure)


def test_a_measure_of_several_numbers_is_named_and_stops_no_other(monkeypatch):
    of_states(monkeypatch, "several", torch.abs)
    of_states(monkeypatch, "largest", torch.amax)
    diagnosis = diagnose(healthy("pre"), *text())
    assert "'several' gave a tensor" in diagnosis.missing["several"]
    assert "largest" in [finding.check for finding in diagnosis.findings]
    assert not {"several", "largest"} & {*diagnosis.examined} - {"largest"}


def test_a_figure_that_is_not_a_number_is_not_examined(monkeypatch):
    of_states(monkeypatch, "nothing", lambda x: math.nan)
    diagnosis = diagnose(healthy("pre"), *text())
    assert "nothing" in diagnosis.unexamined
    assert missing_of(diagnosis)["nothing"].startswith("it is not a number")


@pytest.mark.parametrize("count", [7, 9, 15])
def test_dead_gains_are_found_however_many_there_are(count):
    model = healthy("pre")
    model.depth.sublayers[2].input_norm.weight[:count] = 0
    findings = {finding.check: finding for finding in diagnose(model, *text()).findings}
    assert "|gamma| = 0 in channel 0" in findings["dead gain of an input norm"].figure


def test_reasons_are_those_that_hold():
    model = healthy("pre")
    model.token_embedding.weight[:] = math.nan
    missing = missing_of(diagnose(model, *text()))
    assert "finite" in missing["heads"]
    assert "finite" in missing["sensitivity"]


def test_a_text_of_one_token_says_that_heads_have_nothing_to_show():
    tokens, targets = text()
    assert "one token" in diagnose(healthy("pre"), tokens[:, :1], targets[:, :1]).missing["heads"]


def test_what_is_infinite_is_close_to_no_limit():
    assert not any(
        check.close(value) for check in CHECKS.values() for value in (math.inf, -math.inf, math.nan)
    )


def test_one_expert_of_zeros_in_a_stack_is_named():
    class Stacked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = torch.nn.Parameter(torch.ones(3, 4, 4))

    model = small_model("pre")
    stack = Stacked()
    with torch.no_grad():
        stack.experts[2].zero_()
    model.beside = stack
    (found,) = [
        each
        for each in weight_readings(model, model.depth)["largest entry of a matrix"]
        if "experts" in each.place
    ]
    assert found.value == 0
    assert "beside.experts[2]" in found.place


def test_the_page_has_every_finding_by_its_severity():
    """`python -m docs._site.tables` writes it."""
    assert {check.severity for check in CHECKS.values()} == set(MEANING_OF_SEVERITY)
    assert severities_table(CHECKS) in Path("docs/commands/diagnose.md").read_text()


def test_every_limit_is_shown_with_who_set_it():
    shown = " ".join(CliRunner().invoke(main, ["diagnose", "--help-all"]).output.split())
    for name, check in CHECKS.items():
        line = f"{name} ({check.severity}): {check.description}: {check.limit} ({check.source})"
        assert line.replace(" ", "") in shown.replace(" ", "")
        assert check.source


def test_what_was_not_examined_says_what_it_takes():
    said = " ".join(str(diagnose(healthy("pre"), *text())).split())
    assert (
        "not examined, so neither found nor ruled out: dead gain around the state (needs a norm"
        " around the residual sum)" in said
    )
    assert "weight decay below threshold (needs --weight-decay" in said


@pytest.mark.slow
def test_a_head_of_zeros_is_said_wherever_its_costate_shows():
    """dL/dX = 0: there H(0) = 0, no gap, and no ratio of responses that are all 0."""
    model = healthy("pre", tied=False)
    model.unembedding.weight.zero_()
    x, y = text()
    found = maximum_principle(model.depth, costate(model, x, y))
    assert found.hamiltonian == found.gap == [0.0] * 6
    page = page_of(
        {"control": plain({"command": "control", "placements": {"pre": found}, "attained": {}})}
    )
    assert [answer.text for answer in page.answers] == [f"{ZERO_GRADIENT}."]
    screening = screen(model, x, y, "quick")
    assert math.isnan(screening.steps["updates"].quantities["Adam, spread"])
    assert "Adam, spread" not in screening.flags
    assert "head of zeros" in screening.steps["updates"].notes[0]
    assert ZERO_GRADIENT in screening.steps["well-posedness"].notes[0]


def test_a_quiet_sublayer_makes_no_loud_one_of_its_neighbour_at_an_end():
    model = small_model("pre", depth=5)
    with torch.no_grad():
        for parameter in (
            each
            for k in (2, 3)
            for each in model.depth.sublayers[k].field.output_projection.parameters()
        ):
            parameter.mul_(0.01)
    findings = {finding.check: finding for finding in diagnose(model, *text()).findings}
    assert "sublayer output too large" not in findings
    assert {reading.segment for reading in findings["sublayer output too small"].readings} == {2, 3}


def test_an_empty_list_of_diagnoses_is_named():
    with pytest.raises(ConfigError, match=r"diagnoses = .*give"):
        merged([])


WRONG_TARGETS = {
    "fewer": lambda y: y[:, 1:],
    "flat": lambda y: y.flatten(),
    "negative": lambda y: y - 99,
    "none": lambda y: y * 0 - 1,
    "beyond the vocabulary": lambda y: y + 99,
    "floats": lambda y: y.float(),
    "a list": lambda y: y.tolist(),
    "meta": lambda y: y.to("meta"),
}


@pytest.mark.parametrize("name", WRONG_TARGETS)
def test_wrong_targets_are_an_error_and_not_a_missing_loss(name):
    tokens, targets = text()
    with pytest.raises(ConfigError, match="target"):
        diagnose(healthy(), tokens, WRONG_TARGETS[name](targets))


@pytest.mark.parametrize(
    "model",
    [{}, {"readings": 3}, {"readings": {"a": [1]}}, {"readings": {"a": [{"b": 1}]}}, "x", None],
)
def test_an_object_that_is_no_diagnosis_has_no_readings(model):
    with pytest.raises(ConfigError, match="model = "):
        readings_in(model)
