"""Whoever looks at a model leaves it as it was found: `tests.guests` says what that is, and asserts
it in all other tests too.
"""

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ctrans
from ctrans.base.as_found import as_found, keep_as_found
from ctrans.control.costate import costate
from ctrans.control.maximum_principle import maximum_principle
from ctrans.control.model_check import check_model
from ctrans.interop import Imported, continuize, from_transformers
from ctrans.interop.families import small_model as small_family
from ctrans.measure.walk import observe, states_of, walk
from solvers import ConfigError
from tests.guests import left_as_found, state_of
from tests.helpers import gradient_norms, small_model
from tests.interop.plain_modules import LanguageModel, ids

TOKENS, TARGETS = ids(tokens=9)[:, :-1], ids(tokens=9)[:, 1:]


class Habits(LanguageModel):
    """What foreign code may do in a forward pass: draws, counts, remembers, hooks."""

    def __init__(self):
        super().__init__()
        self.drop, self.history, self.by_shape = nn.Dropout(0.3), [], {}
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.stack[0].register_buffer("seen", torch.zeros(3))

    def forward(self, idx):
        torch.rand(3), np.random.rand(3), random.random()
        self.calls += 1
        self.table = torch.ones(2) * self.calls
        self.history.append(idx.shape)
        self.by_shape[idx.shape] = idx
        self.last, self.stack[0].seen[1] = idx, self.calls
        return super().forward(idx)


def guest(kind=Habits):
    """A model in the middle of its training: gradients, frozen weights, parts in evaluation mode, a
    map of zeros, hooks of all kinds.
    """
    torch.manual_seed(0)
    model = kind()
    F.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS.flatten()).backward()
    model.stack[1].ln_a.requires_grad_(False)
    model.stack[2].eval()
    nn.init.zeros_(model.stack[1].shrink.weight)
    block = model.stack[0]
    block.register_forward_pre_hook(lambda module, args: None)
    block.register_forward_hook(lambda module, args, output: None)
    block.register_full_backward_pre_hook(lambda module, gradient: None)
    block.register_full_backward_hook(lambda module, before, after: None)
    block.register_state_dict_pre_hook(lambda module, prefix, kept: None)
    block.grow.weight.register_hook(lambda gradient: gradient)
    block.grow.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return model


def watched(model):
    with ctrans.Monitor(model, every=1, probe_every=1, held=(TOKENS, TARGETS)) as monitor:
        with as_found(None):  # the training's own random numbers
            loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS.flatten())
        monitor.step(loss, torch.optim.AdamW(model.parameters()))


def refused(model):
    with pytest.raises(ConfigError):
        continuize(model, 77, method="rk4")


LOOKS = {
    "open_model": ctrans.open_model,
    "another dtype": lambda model: ctrans.open_model(model, torch.float64).trajectory(TOKENS),
    "diagnose": lambda model: ctrans.diagnose(model, TOKENS, TARGETS, loss="next"),
    "screen": lambda model: ctrans.screen(model, TOKENS, TARGETS, "quick", loss="next"),
    "simulate": lambda model: ctrans.simulate(model, TOKENS, method="rk4"),
    "costate": lambda model: costate(ctrans.open_model(model), TOKENS, TARGETS),
    "check_model": lambda model: check_model(
        ctrans.open_model(model), TOKENS, TARGETS, thorough=True
    ),
    "maximum_principle": lambda model: (
        opened := ctrans.open_model(model),
        maximum_principle(opened.depth, costate(opened, TOKENS, TARGETS), measure="cosine"),
    ),
    "walk": lambda model: walk(ctrans.open_model(model), TOKENS, TARGETS, []),
    "gradients of weights": lambda model: gradient_norms(ctrans.open_model(model), TOKENS, TARGETS),
    "states": lambda model: (
        opened := ctrans.open_model(model),
        observe(opened.depth, states_of(opened.depth, opened.embed(TOKENS)), []),
    ),
    "the opened model itself": lambda model: (
        opened := ctrans.open_model(model),
        opened(TOKENS, TARGETS),
        opened.head(opened.trajectory(TOKENS, method="rk4").x1),
        [part.field(opened.embed(TOKENS)) for part in opened.depth.sublayers],
        opened.longest(64),
    ),
    "continuize, refused": refused,
}
"""What looks at a model. The monitor is apart, because its step has a pass of the training's."""


@pytest.mark.parametrize("look", LOOKS)
def test_a_look_leaves_the_model_as_it_was_found(look):
    model = guest()
    with left_as_found(model):
        LOOKS[look](model)
    with left_as_found(model), torch.no_grad():
        LOOKS[look](model)


@pytest.mark.cases(3)
@pytest.mark.parametrize("look", [look for look in LOOKS if look != "continuize, refused"])
def test_a_look_that_fails_leaves_the_model_as_it_was_found(look, monkeypatch):
    """The model raises at its first pass, and in the middle of the passes of a look that
    succeeds.
    """
    model, count = guest(), [0]
    forward = FailingBlock.forward_of(type(model.stack[0].mix), count)
    monkeypatch.setattr(type(model.stack[0].mix), "forward", forward)
    count[0] = -(10**9)
    LOOKS[look](model)
    passes = count[0] + 10**9
    for last in (1, passes // 2, passes):
        count[0] = -last
        with left_as_found(model), pytest.raises((ConfigError, FailingBlock.Broken)):
            LOOKS[look](model)


class FailingBlock:
    """A forward that raises when its count reaches 0."""

    class Broken(BaseException):
        """No `except Exception` stops it, as with Ctrl-C."""

    @classmethod
    def forward_of(cls, kind, count):
        own = kind.forward

        def forward(self, x):
            count[0] += 1
            if count[0] == 0:
                raise cls.Broken
            return own(self, x)

        return forward


def test_a_refused_module_is_left_as_it_was_found():
    for model, options in (
        (guest(), {"blocks": "nowhere"}),
        (guest(), {"loss": "none such"}),
        (nn.Linear(2, 2), {}),
    ):
        with left_as_found(model), pytest.raises(ConfigError):
            ctrans.open_model(model, **options)
    for placement in ("pre", "peri"):
        model = small_model(placement).requires_grad_().train()
        with left_as_found(model), pytest.raises(ConfigError):
            ctrans.open_model(model)


@pytest.mark.slow
def test_threads_find_the_same_and_leave_the_model_as_it_was_found():
    model = guest()
    alone = str(ctrans.diagnose(copy.deepcopy(model), TOKENS, TARGETS, loss="next"))
    with left_as_found(model), ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: str(ctrans.diagnose(model, TOKENS, TARGETS, loss="next")), range(4))
        )
    assert found == [alone] * 4


def test_threads_that_measure_different_models_do_not_mix_up_random_numbers():
    """The second starts inside of the first and ends after it."""
    models, inside, ended = [guest(), guest()], threading.Event(), []

    def second():
        inside.wait()
        with as_found(models[1]):
            ended.append(torch.rand(2))

    thread = threading.Thread(target=second)
    with left_as_found(models[0]), left_as_found(models[1]):
        thread.start()
        with as_found(models[0]):
            torch.rand(5)
            inside.set()
            thread.join(0.2)
        thread.join()
    assert len(ended) == 1


def test_monitor_leaves_the_model_as_it_was_found():
    model = guest(LanguageModel)
    with left_as_found(model):
        watched(model)


def step(model, optimizer, between=lambda: None):
    loss = F.cross_entropy(model(TOKENS).flatten(0, 1), TARGETS.flatten())
    between()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


QUICK = ("open_model", "diagnose", "gradients of weights", "the opened model itself")


@pytest.mark.parametrize("place", ["between steps", "between forward and backward"])
def test_a_model_that_was_looked_at_trains_to_the_same_bits(place):
    losses = []
    for looked_at in (False, True):
        model = guest()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        torch.manual_seed(1)

        def look(model=model, looked_at=looked_at):
            for name in QUICK if looked_at else ():
                LOOKS[name](model)

        if place == "between steps":
            look()
        losses.append(
            [
                step(model, optimizer, look if place != "between steps" else lambda: None)
                for _ in range(2)
            ]
        )
        losses[-1] += [float(weight.detach().double().sum()) for weight in model.parameters()]
    assert losses[0] == losses[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize("gradient", ["backprop", "checkpoint", "adjoint"])
def test_an_opened_model_computes_without_dropout_and_without_gradients_of_weights(gradient):
    """As a twin in evaluation mode whose weights need none, whatever the module's mode, also where
    a backward pass computes again.
    """
    model = guest()
    twin, found = copy.deepcopy(model).eval().requires_grad_(False), []
    for each in (model, twin):
        with left_as_found(each):
            opened = ctrans.open_model(each)
            x = opened.embed(TOKENS)
            assert not x.requires_grad
            x.requires_grad_()
            y = ctrans.dynamics.scheme.trajectory(
                opened.depth, x, method="rk4", gradient=gradient
            ).x1
            z, rows = opened.depth(x), opened.depth.sublayers[0].field.rows(x)
            loss = (
                F.cross_entropy(opened.head(y).flatten(0, 1), TARGETS.flatten())
                + opened(TOKENS, TARGETS)[1]
            )
            (loss + z.square().mean() + rows.square().sum()).backward()
            found.append([part.detach() for part in (x, y, z, rows, x.grad)])
    assert all(map(torch.equal, *found))
    assert not opened.depth(opened.embed(TOKENS)).requires_grad


def test_another_dtype_is_that_of_a_copy():
    model = guest()
    opened = ctrans.open_model(model, torch.float64)
    assert opened.embed(TOKENS).dtype == torch.float64
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    same = ctrans.open_model(model, torch.float32)
    assert {id(weight) for weight in same.depth.parameters()} <= {
        id(weight) for weight in model.parameters()
    }


def test_an_imported_model_is_still_one_to_differentiate():
    """`from_transformers` gives the model as it is; what `open_model` makes of it has the same
    weights and leaves it as it was.
    """
    imported = from_transformers(small_family("gpt2").train().requires_grad_())
    assert isinstance(imported, Imported)
    tokens = TOKENS % 16
    with left_as_found(imported):
        opened = ctrans.open_model(imported)
        assert not opened.depth(opened.embed(tokens)).requires_grad
        ctrans.diagnose(opened, tokens, tokens)
    assert imported.depth(imported.embed(tokens)).requires_grad
    assert {id(weight) for weight in opened.parameters()} >= {
        id(weight) for weight in imported.model.parameters()
    }


def test_the_assertion_sees_every_kind_of_change():
    changes = {
        "mode": lambda m: m.stack[0].mix.eval(),
        "requires_grad": lambda m: m.out.bias.requires_grad_(False),
        "gradient": lambda m: m.out.bias.grad.add_(1),
        "another gradient": lambda m: setattr(m.out.bias, "grad", m.out.bias.grad.clone()),
        "weight": lambda m: m.out.bias.data.add_(1),
        "version": lambda m: m.out.bias.detach().add_(0),
        "dtype": lambda m: m.out.double(),
        "buffer": lambda m: m.calls.add_(1),
        "another buffer": lambda m: setattr(m, "calls", m.calls.clone()),
        "hook": lambda m: m.stack[0].register_forward_hook(print),
        "hook of a weight": lambda m: m.out.bias.register_hook(print),
        "attribute": lambda m: setattr(m, "seen", 1),
        "attribute gone": lambda m: delattr(m, "last"),
        "list": lambda m: m.history.append(1),
        "dict": lambda m: m.by_shape.clear(),
        "torch": lambda m: torch.rand(1),
        "python": lambda m: random.random(),
        "numpy": lambda m: np.random.rand(),
    }
    for name, change in changes.items():
        model = guest()
        with pytest.raises(AssertionError, match="changed by a measurement"), left_as_found(model):
            change(model)
        assert state_of(model)[0], name


class Unruly(nn.Module):
    """Changes that torch does not count, or that come and go."""

    def __init__(self):
        super().__init__()
        self.weight, self.generator = (
            nn.Parameter(torch.ones(2), requires_grad=False),
            torch.Generator(),
        )
        self.register_buffer("uses", torch.zeros(2))
        self.register_buffer("wide", torch.zeros(1).expand(3))

    def forward(self, x):
        self.uses.data += 1
        self.wide[:1] += 1
        self.weight.requires_grad = True
        torch.rand(1, generator=self.generator)
        return x


def test_changes_that_torch_does_not_count_are_undone():
    module = Unruly()
    state = module.generator.get_state()
    with as_found(module):
        module(TOKENS)
    assert (module.uses.tolist(), module.wide.tolist(), module.weight.requires_grad) == (
        [0, 0],
        [0, 0, 0],
        False,
    )
    assert torch.equal(module.generator.get_state(), state)


def test_a_lazy_module_that_gets_its_weights_inside_works_afterwards():
    module = nn.Sequential(nn.LazyLinear(2))
    with as_found(module):
        inside = module(torch.ones(1, 3))
    assert torch.equal(module(torch.ones(1, 3)), inside)


def test_the_end_waits_for_a_computation_of_another_thread():
    """Else the module would train again in the middle of it: dropout would draw zeros."""
    begun, go = threading.Event(), threading.Event()

    class Slow(nn.Dropout):
        def forward(self, x):
            begun.set()
            go.wait(5)
            return super().forward(x)

    theirs = Slow(0.9)
    ours = keep_as_found(nn.Sequential(theirs), theirs)
    with ThreadPoolExecutor(2) as pool:
        with as_found(ours):
            other = pool.submit(ours, torch.ones(1000))
            assert begun.wait(5)
            pool.submit(lambda: (threading.Event().wait(0.2), go.set()))
        assert theirs.training, "the measurement has ended"
        assert bool((other.result() == 1).all())


def test_what_has_no_modules_may_have_that_name():
    with as_found(type("Listed", (), {"modules": ["a"]})()):
        pass
