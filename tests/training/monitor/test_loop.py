"""What a monitor reads of a loop: targets from the gradient at the logits, batches from the ids,
the optimiser's groups. Each alarm beside a training without the fault.
"""

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ctrans.training.monitor import ALARMS, Monitor
from ctrans.training.monitor.loop_measures import LOOP
from ctrans.training.monitor.loop_reader import ANOTHER_LOSS, FEW_CLASSES, NOT_BACK, THE_TARGETS
from ctrans.training.monitor.target_gradient import exchanged_targets, target_rows
from tests.interop.test_wrong_models import Model

CLASSES = 11
OF_THE_LOOP = {name for name, check in ALARMS.items() if check.quantity in LOOP}


def labelled(count=40, classes=CLASSES, spread=2.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(count, classes, generator=generator)).to(dtype)
    targets = torch.randint(classes, (count,), generator=generator)
    return logits.requires_grad_(), targets


def read(logits, loss):
    loss.backward()
    return target_rows(logits.detach(), logits.grad)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-3])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("classes", [11, 5000])
def test_targets_and_weights_are_those_of_the_loss(classes, smoothing, z_loss, sign):
    logits, targets = labelled(classes=classes)
    targets[::5] = -100
    counted = targets >= 0
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    loss = loss + z_loss * logits[counted].logsumexp(-1).square().mean()
    rows = read(logits, sign * loss)
    assert torch.equal(rows.is_counted, counted)
    assert torch.equal(rows.target[counted], targets[counted])
    assert torch.allclose(rows.weight[counted] * counted.sum(), torch.tensor(float(sign)).double())
    share = rows.smoothing[counted].nanmedian()
    assert float(share) == pytest.approx(smoothing, abs=1e-3)
    each = F.cross_entropy(logits.detach(), targets, reduction="none")
    assert torch.allclose(rows.loss[counted], each[counted])


def test_each_row_has_its_own_weight():
    logits, targets = labelled()
    weights = torch.rand(CLASSES, dtype=torch.float64) + 0.5
    rows = read(logits, F.cross_entropy(logits, targets, weight=weights, reduction="sum"))
    assert torch.allclose(rows.weight, weights[targets])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_reads_the_same_targets(dtype):
    logits, targets = labelled(classes=300, dtype=dtype)
    rows = read(logits, F.cross_entropy(logits.float(), targets))
    assert torch.equal(rows.target, targets)
    assert float(rows.weight.sum()) == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y: (z - F.one_hot(y, CLASSES)).square().mean(),
        lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, CLASSES).double()),
        lambda z, y: F.cross_entropy(z.softmax(-1), y),
        lambda z, y: F.multi_margin_loss(z, y),
        lambda z, y: F.cross_entropy(
            z, (0.7 * F.one_hot(y, CLASSES) + 0.3 * F.one_hot(y.flip(0), CLASSES)).double()
        ),
    ],
    ids=["squares", "binary", "softmax twice", "margin", "mixed targets"],
)
def test_another_loss_is_not_read_as_a_cross_entropy(loss):
    logits, targets = labelled()
    rows = read(logits, loss(logits, targets))
    assert rows.weight.isnan().float().mean() > 0.8


def test_exchanged_targets_are_all_permutations():
    logits, targets = labelled(count=8)
    rows = read(logits, F.cross_entropy(logits, targets))
    found, deviations = exchanged_targets(logits.detach(), rows)
    orders = torch.tensor(list(itertools.permutations(range(8))))
    log_p = logits.detach().log_softmax(-1)
    losses = -log_p[torch.arange(8), targets[orders]].mean(1)
    own = -log_p[torch.arange(8), targets].mean()
    assert float(found) == pytest.approx(float(own))
    wanted = (own - losses.mean()) / losses.std(unbiased=False)
    assert float(deviations) == pytest.approx(float(wanted))


def chain(generator, sequences=8, tokens=25):
    """Sequences in which most tokens follow from the one before."""
    x = torch.randint(CLASSES, (sequences, tokens), generator=generator)
    x = torch.where(x > 5, x, (x * x) // 3)  # tokens differ in how often they come
    for t in range(tokens - 1):
        follows = torch.rand(sequences, generator=generator) < 0.7
        x[:, t + 1] = torch.where(follows, (3 * x[:, t] + 1) % CLASSES, x[:, t + 1])
    return x


def trained(
    *,
    steps=24,
    every=4,
    passes=1,
    batch=None,
    inputs=lambda x: x[:, :-1],
    targets=lambda x: x[:, 1:],
    loss=lambda one, passes: one / passes,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), 3e-3),
    dtype=None,
    start=0,
    memory=None,
    smoothing=0.0,
    **options,
):
    """The monitor of a training, with the fault that an argument plants."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = Model()
    if dtype is not None:
        model = model.to(dtype)
    stepping = optimizer(model)
    example = inputs(chain(torch.Generator()))
    monitor = Monitor(model, every=every, example=example, start=start, memory=memory, **options)
    for step in range(start, start + steps):
        for _ in range(passes):
            x = chain(generator) if batch is None else batch(step, generator)
            logits = model(inputs(x))
            one = F.cross_entropy(
                logits.flatten(0, 1), targets(x).flatten(), label_smoothing=smoothing
            )
            loss(one, passes).backward()
        monitor.step(one, stepping)
        stepping.step()
        stepping.zero_grad()
    monitor.close()
    return monitor


def said(monitor):
    return {alarm.check for alarm in monitor.alarms} & OF_THE_LOOP


def shuffled(x):
    y = x[:, 1:].flatten()
    return y[torch.randperm(len(y), generator=torch.Generator().manual_seed(int(x.sum())))]


def padded(step, generator):
    x = chain(generator)
    x[:, 12:] = 0
    return x


def uneven(step, generator):
    """Half of the tokens are the same."""
    x = chain(generator)
    return torch.where(x > 5, 0, x)


def other_tokens(step, generator):
    x = chain(generator)
    if step > 60:
        return torch.where(x > 5, 0, x)
    return x


def half(model):
    return torch.optim.AdamW([p for name, p in model.named_parameters() if ".1." in name], 3e-3)


FAULTS = {
    "loss is raised": {"loss": lambda one, passes: -one},
    "accumulation is not divided": {"passes": 3, "loss": lambda one, passes: one},
    "targets are not the next tokens": {"targets": lambda x: x[:, :-1]},
    "padding is predicted": {"batch": padded},
    "same batch again": {"batch": lambda step, generator: chain(torch.Generator())},
    "one token fills the batch": {
        "batch": lambda step, generator: torch.zeros(8, 25, dtype=torch.long)
    },
    "tokens unlike those before": {"batch": other_tokens, "steps": 84},
    "weights in no group": {"optimizer": half},
    "steps are lost to rounding": {
        "dtype": torch.bfloat16,
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), 1e-5),
    },
    "gains decay": {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=3.0),
        "steps": 120,
    },
    "weights are forgotten": {
        "optimizer": lambda model: torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 10.0},
                {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
            ],
            3e-3,
        ),
    },
    "targets are smoothed away": {"smoothing": 0.9},
    "targets unrelated to inputs": {
        "batch": uneven,
        "targets": shuffled,
        "steps": 280,
        "every": 20,
    },
    "no better than guessing": {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), 1e-7),
        "steps": 220,
        "every": 20,
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loop_is_named(fault):
    assert fault in said(trained(**FAULTS[fault]))


@pytest.mark.parametrize(
    "loop",
    [
        {},
        {"passes": 3},
        {"every": 1},
        {"steps": 220, "every": 20},
        {"scale": lambda: 1.0},
        {"dtype": torch.bfloat16},
        {"optimizer": lambda model: torch.optim.SGD(model.parameters(), 0.1)},
        {"optimizer": lambda model: torch.optim.Adafactor(model.parameters())},
    ],
    ids=["plain", "passes", "every", "long", "scale", "bfloat16", "sgd", "adafactor"],
)
def test_a_loop_that_is_well_is_not_named(loop):
    monitor = trained(**loop)
    assert said(monitor) == set()
    _, figures = monitor.past.reports[-1]
    assert figures["target_weight"] == pytest.approx(1.0, rel=1e-2)
    assert figures["target_ahead"] == 1.0


def watched(model, losses, *, steps=12, optimizer=None, example=None, every=2):
    """The monitor of a loop whose step goes back through each of `losses(model, x)` in turn."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    stepping = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    monitor = Monitor(model, every=every, example=chain(generator)[:, :-1])
    for _ in range(steps):
        x = chain(generator)
        loss = torch.zeros(())
        for loss in losses(model, x):
            loss.backward(retain_graph=True)
        monitor.step(float(loss), stepping)
        stepping.step()
        stepping.zero_grad()
    monitor.close()
    return monitor


def per_token(model, x):
    return F.cross_entropy(model(x[:, :-1]).transpose(1, 2), x[:, 1:], reduction="none")


def policy_gradient(model, x):
    """Rewards are at most 0, so each weight is below 0, and they differ."""
    reward = -torch.rand(len(x), 1, generator=torch.Generator().manual_seed(1))
    yield (reward * per_token(model, x)).mean()


def preferences(model, x):
    """Chosen and rejected answers in two passes."""
    yield per_token(model, x[:4]).mean()
    yield -3 * per_token(model, x[4:]).mean()


def in_chunks(model, x):
    """Goes back through a third of the logits at a time."""
    logits = model(x[:, :-1]).flatten(0, 1)
    for part, y in zip(logits.chunk(3), x[:, 1:].flatten().chunk(3), strict=True):
        yield F.cross_entropy(part, y, reduction="sum") / len(logits)


def twice(model, x):
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    yield loss
    yield loss


@pytest.mark.parametrize("losses", [policy_gradient, preferences, in_chunks])
def test_a_loss_of_another_kind_is_no_fault(losses):
    monitor = watched(Model(), losses)
    assert said(monitor) == set()
    if losses is in_chunks:
        _, figures = monitor.past.reports[-1]
        assert figures["target_weight"] == pytest.approx(1.0, rel=1e-4)
        assert figures["backward_passes"] == 3


def test_going_back_twice_counts_the_targets_twice():
    monitor = watched(Model(), twice)
    assert said(monitor) == {"accumulation is not divided"}
    assert monitor.past.reports[-1][1]["target_weight"] == pytest.approx(2.0, rel=1e-4)


def test_padding_that_is_masked_does_not_fill_a_batch():
    def long_padding(step, generator):
        x = chain(generator, tokens=125)
        x[:, 5:] = 0
        return x

    def counted(x):
        return torch.where(torch.arange(124) < 4, x[:, 1:], -100)

    assert said(trained(batch=long_padding, targets=counted)) == set()


def test_runs_of_one_token_in_a_text_are_no_padding():
    def tables(step, generator):
        """Lines of words and rules of a table, cut anywhere: many cuts end in a rule."""
        line = torch.cat([chain(generator, tokens=25)[0], torch.full((40,), 3)])
        text = line.repeat(9)
        starts = torch.randint(len(text) - 25, (8,), generator=generator)
        return torch.stack([text[start : start + 25] for start in starts.tolist()])

    monitor = trained(batch=tables, steps=80)
    shares = [figures["padding_counted"] for _, figures in monitor.past.reports]
    assert "padding is predicted" not in said(monitor), shares


def test_a_head_that_is_trained_alone_leaves_no_block_out():
    model = Model()
    head = [p for name, p in model.named_parameters() if name.startswith(("head", "out"))]
    assert head
    monitor = watched(
        model,
        lambda model, x: [per_token(model, x).mean()],
        optimizer=torch.optim.AdamW(head, 1e-3),
    )
    assert "weights in no group" not in said(monitor)


def test_weights_of_integers_cost_no_report():
    model = Model()
    model.table_of_codes = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    monitor = watched(model, lambda model, x: [per_token(model, x).mean()])
    assert len(monitor.past.reports) == 7


def test_copies_in_float32_lose_no_step():
    """An optimizer that steps copies of the weights in float32, and copies them back."""
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    copies = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(copies, 1e-5)
    monitor = Monitor(model, every=2, example=chain(generator)[:, :-1])
    for _ in range(12):
        x = chain(generator)
        per_token(model, x).mean().backward()
        monitor.step(None, optimizer)
        for copy, p in zip(copies, model.parameters(), strict=True):
            copy.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            for copy, p in zip(copies, model.parameters(), strict=True):
                p.copy_(copy)
        model.zero_grad()
    monitor.close()
    assert "steps are lost to rounding" not in said(monitor)


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        (lambda model, x: [model(x).square().mean()], ANOTHER_LOSS),
        (lambda model, x: [per_token(model, x).mean().detach().requires_grad_()], NOT_BACK),
        (lambda model, x: [model(x).mul_(0.5).mean()], NOT_BACK),
    ],
    ids=["squares", "detached", "in place"],
)
def test_what_cannot_be_read_says_why(losses, reason):
    monitor = watched(Model(), losses)
    assert monitor.gauges.missing["the targets"] == reason
    assert "target_weight" not in monitor.past.reports[-1][1]


def test_a_table_of_positions_beside_that_of_tokens_is_not_read_for_it():
    """It has as many rows, and is called behind it."""
    model = Model()
    model.positions = nn.Embedding(CLASSES, 8)
    with_positions = model.forward
    places = torch.arange(24) % CLASSES
    model.forward = lambda ids: with_positions(ids) + 0 * model.positions(places).mean()
    monitor = watched(model, lambda model, x: [per_token(model, x).mean()])
    assert monitor.past.reports[-1][1]["target_ahead"] == 1.0
    assert said(monitor) == set()


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_few_classes_say_nothing_of_their_loss(classes):
    model = Model()
    model.head = nn.Linear(model.head.in_features, classes)
    losses = [lambda model, x: [F.cross_entropy(model(x).flatten(0, 1), x.flatten() % classes)]]
    monitor = watched(model, *losses)
    assert monitor.gauges.missing == {THE_TARGETS: FEW_CLASSES}
    assert said(monitor) == set()


class OfClasses(nn.Module):
    """What a DiT is: numbers in, and the embedding of a class for each image."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(CLASSES, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x, label):
        x = x + self.table(label)[:, None]
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_an_embedding_of_one_id_for_each_sequence_is_read():
    model = OfClasses()
    batch = {"x": torch.randn(4, 3, 8), "label": torch.arange(4)}
    monitor = Monitor(model, example=batch, every=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(**batch).square().mean().backward()
        monitor.step(None, optimizer)
        optimizer.step()
    monitor.close()
    assert monitor.past.reports[-1][1]["same_batch"] == 1.0


def test_a_decoder_has_its_own_ids():
    transformers = pytest.importorskip("transformers")
    config = transformers.BartConfig(
        vocab_size=CLASSES,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=32,
        pad_token_id=1,
        decoder_start_token_id=2,
    )
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor(model, every=2)
    for _ in range(6):
        x = chain(generator)
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        monitor.step(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert monitor.past.reports[-1][1]["target_ahead"] == 1.0
    assert "targets are not the next tokens" not in said(monitor)


def test_two_optimizers_that_share_the_weights_leave_none_out():
    torch.manual_seed(0)
    model = Model()
    names = dict(model.named_parameters())
    first = torch.optim.AdamW([p for name, p in names.items() if ".1." in name], 1e-3)
    second = torch.optim.AdamW([p for name, p in names.items() if ".1." not in name], 1e-3)
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor(model, every=2, example=chain(generator)[:, :-1])
    for _ in range(12):
        x = chain(generator)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        monitor.step(loss, first)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    monitor.close()
    assert said(monitor) == set()


def test_passes_of_unequal_length_count_their_targets_unequally():
    def of_one_pass(one, passes):
        return one / passes

    lengths = itertools.cycle([25, 7])
    monitor = trained(
        passes=2,
        batch=lambda step, generator: chain(generator, tokens=next(lengths)),
        loss=of_one_pass,
    )
    assert said(monitor) == {"targets count unequally"}
    assert monitor.past.reports[-1][1]["target_unevenness"] == pytest.approx(24 / 6, rel=1e-4)


def test_a_scaled_loss_has_the_weight_of_the_loss():
    monitor = trained(loss=lambda one, passes: 1024.0 * one, scale=lambda: 1024.0)
    assert monitor.past.reports[-1][1]["target_weight"] == pytest.approx(1.0, rel=1e-4)


def test_an_optimizer_that_is_new_in_a_resumed_run_is_named():
    monitor = trained(steps=40)
    memory = json.loads(json.dumps(monitor.memory()))
    forgotten = trained(steps=12, start=40, memory=memory)
    assert said(forgotten) == {"optimizer forgot its past"}
    assert said(trained(steps=12, start=40)) == {"optimizer forgot its past"}


def test_a_resumed_run_compares_its_batches_with_those_before():
    monitor = trained(steps=8)
    memory = json.loads(json.dumps(monitor.memory()))
    loop = Monitor(Model(), every=4, start=8, memory=memory).gauges.loop
    assert loop.memory() == monitor.gauges.loop.memory()
    assert loop.memory()["batch"][0] == 8


class ClassifierOfRows(nn.Module):
    """Of two-dimensional logits, and no tokens."""

    def __init__(self):
        super().__init__()
        self.inner = Model()

    def forward(self, x):
        return self.inner(x).mean(1)


def test_a_classifier_has_targets_and_no_distance_to_them():
    torch.manual_seed(0)
    model = ClassifierOfRows()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor(model, every=2, example=chain(generator))
    for _ in range(8):
        x = chain(generator, sequences=16)
        loss = F.cross_entropy(model(x), x[:, 0])
        loss.backward()
        monitor.step(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    _, figures = monitor.past.reports[-1]
    assert figures["target_weight"] == pytest.approx(1.0, rel=1e-4)
    assert "target_ahead" not in figures
    assert math.isfinite(figures["exchanged_targets"])
    monitor.close()


@pytest.mark.parametrize(("shifted_before", "ahead"), [(False, 1.0), (True, 2.0)])
def test_labels_that_a_library_shifts_itself_are_read_behind_its_shift(shifted_before, ahead):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=CLASSES, n_positions=32, n_embd=16, n_layer=2, n_head=2
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    monitor = Monitor(model, every=2)
    for _ in range(8):
        x = chain(generator)
        labels = x
        if shifted_before:
            labels = torch.cat([x[:, 1:], torch.full((8, 1), -100)], 1)
        loss = model(input_ids=x, labels=labels).loss
        loss.backward()
        monitor.step(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert monitor.past.reports[-1][1]["target_ahead"] == ahead
    assert said(monitor) == ({"targets are not the next tokens"} if shifted_before else set())
