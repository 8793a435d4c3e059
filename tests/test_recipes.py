"""The recipes of CONTRIBUTING.md, each done from outside the package: one entry in one table, and
everything knows it.

Every class below is what somebody would write who adds it; every test shows what picks it up
without being told.
"""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from ctrans import GPT, GPTConfig
from ctrans.cli import main
from ctrans.dynamics.fields import ATTENTIONS, FFNS, Matrix, reference_kernels
from ctrans.dynamics.norm import NORMS, SphereNorm, SquashNorm
from ctrans.dynamics.placement import PLACEMENTS, Placement
from ctrans.dynamics.residual import RESIDUALS, Residual, ResidualEntry
from ctrans.examine.diagnosis.weights_only import change
from ctrans.examine.screening.case import StepPlan, StepVerdict
from ctrans.examine.screening.screen import STEPS, ScreeningStep, screen
from ctrans.measure.backward.sensitivity import sublayer_sensitivity
from ctrans.measure.findings import Check, Reading
from ctrans.measure.measured import along_depth
from ctrans.measure.measures import MEASURES, Measure
from ctrans.measure.walk import Instrument, walk
from ctrans.model.orders import substep_convergence
from ctrans.study.finished import Finished
from ctrans.study.measures import WINDOWS
from ctrans.study.presets.claim import Contrast
from ctrans.study.training import RunResult, train_run
from ctrans.training import trained
from ctrans.training.data import from_text
from ctrans.training.monitor import Monitor, read_log
from ctrans.training.monitor.past_checks import beyond
from solvers import METHODS, ConfigError, RungeKutta, solve, tableau
from tests.study.helpers import small

ROOT = Path(__file__).parents[1]
TEXT = torch.randint(0, 11, (2, 9), generator=torch.Generator().manual_seed(0))


def model_with(**changes):
    settings = {
        "vocab_size": 11,
        "context": 16,
        "depth": 2,
        "width": 16,
        "heads": 2,
        "initialisation": "xavier",
        "dt": 0.5,
    }
    return (
        GPT(GPTConfig(**{**settings, "embedding_std": 1.0, **changes}))
        .double()
        .requires_grad_(False)
    )


def command(*arguments):
    """The JSON of a command on a small model."""
    small = [
        "--depth",
        "2",
        "--width",
        "16",
        "--heads",
        "2",
        "--context",
        "8",
        "--batch",
        "1",
        "--json",
        "-",
    ]
    result = CliRunner().invoke(main, [*arguments, *small])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def check_enrolled(model):
    """What every map, norm and placement has to satisfy, by oracles that know nothing of it."""
    x0 = model.embed(TEXT)
    depth = model.depth
    assert torch.equal(solve(depth.segments(), x0, method="euler", steps=1).x1, depth(x0))
    later = TEXT.clone()
    later[:, -1] = (later[:, -1] + 1) % 11
    assert torch.equal(model(later)[0][:, :-1], model(TEXT)[0][:, :-1])
    sublayer, x = depth.sublayers[0], x0[:1, :3]
    with reference_kernels(sublayer):
        dense = torch.autograd.functional.jacobian(sublayer.velocity, x).reshape(
            x.numel(), x.numel()
        )
    assert sublayer_sensitivity(sublayer, x).value == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=2e-3
    )
    screening = screen(model, TEXT[:, :-1], TEXT[:, 1:], "quick")
    assert screening.steps["forward"].result.rms[-1] == pytest.approx(
        float(depth(x0[:, :-1]).square().mean().sqrt())
    )
    return screening


RUNNING_MEAN, MEAN_OVER_SIZE = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
)
"""The recipes of an attention and of a measure, as they stand there."""


@pytest.mark.slow
def test_a_new_attention_is_one_entry(monkeypatch):
    monkeypatch.setitem(
        ATTENTIONS, "mean", None
    )  # what it is, is put back; the recipe's own line makes the entry
    recipe = types.ModuleType("my_attention")
    exec(RUNNING_MEAN, vars(recipe))
    model = model_with(attention="mean", placement="pre")
    screening = check_enrolled(model)
    assert screening.steps["forward"].result.used <= 1
    assert "does not expose" in screening.missing["attention"]
    assert set(screening.steps["backward"].result.gradients.sublayers[0].matrices) == {"W_V", "W_O"}
    found = command("simulate", "--attention", "mean", "--placement", "pre", "--no-reference")
    assert found["placements"]["pre"]["bounds"] is not None


class SquaredReLU(nn.Module):
    """f(x) = W_2 max(W_1 x, 0)^2, which no affine function of |x| bounds: it does not say
    `bound`.
    """

    def __init__(self, settings):
        super().__init__()
        self.up = nn.Linear(settings.width, settings.hidden_width, bias=settings.bias)
        self.down = nn.Linear(settings.hidden_width, settings.width, bias=settings.bias)

    def pre_projection(self, x):
        return self.up(x).relu().square()

    @property
    def output_projection(self):
        return self.down

    def forward(self, x):
        return self.down(self.pre_projection(x))

    def matrices(self):
        yield Matrix(self.up.weight, "up")
        yield Matrix(self.down.weight, "down")


@pytest.mark.slow
def test_a_new_ffn_is_one_entry(monkeypatch):
    monkeypatch.setitem(FFNS, "squared-relu", SquaredReLU)
    screening = check_enrolled(model_with(ffn="squared-relu", placement="pre"))
    assert "SquaredReLU has no method bound" in screening.steps["forward"].missing["bound"]
    assert (
        check_enrolled(model_with(ffn="squared-relu", placement="peri"))
        .steps["forward"]
        .result.used
        <= 1
    )
    assert (
        command("simulate", "--ffn", "squared-relu", "--no-reference")["placements"]["peri"][
            "status"
        ]
        == "success"
    )


@pytest.mark.slow
def test_a_new_placement_is_one_entry(monkeypatch):
    entry = Placement(
        "pre_deep",
        input_norm=True,
        output_norm=False,
        state_norm=False,
        residual_gain=True,
        velocity="f(N_in X)/alpha",
        step="X + dt v",
        seen_in="nowhere",
        colour="C7",
        marker="h",
    )
    monkeypatch.setitem(PLACEMENTS, entry.name, entry)
    model = model_with(placement="pre_deep")
    check_enrolled(model)
    assert {sublayer.placement.name for sublayer in model.depth.sublayers} == {"pre_deep"}
    assert model.depth.sublayers[0].gain == pytest.approx((2 * 2) ** -0.25)
    assert list(command("simulate", "--placement", "all", "--no-reference")["placements"]) == list(
        PLACEMENTS
    )
    assert substep_convergence("rk4", "pre_deep").order == pytest.approx(4, abs=0.15)


class Half(Residual):
    """dX/dt = v/2."""

    def forward(self, v, x):
        return v / 2

    def pull(self, p):
        return p / 2

    largest = 0.5


@pytest.mark.slow
def test_a_new_residual_is_one_entry(monkeypatch):
    monkeypatch.setitem(
        RESIDUALS, "half", ResidualEntry(lambda config, k: Half(), "dX/dt = v/2", "nowhere")
    )
    model = model_with(residual="half", placement="peri")
    check_enrolled(model)
    assert {sublayer.largest_gain for sublayer in model.depth.sublayers} == {0.5}
    found = command("hjb-check", "--placement", "peri", "--norm", "rmsnorm", "--residual", "half")[
        "checks"
    ]["rmsnorm"]["peri"]
    assert found["agrees"]
    assert (
        command("simulate", "--residual", "half", "--no-reference")["placements"]["peri"]["status"]
        == "success"
    )


class UnitGain(SphereNorm):
    """z = sqrt(d) x/|x|: RMSNorm without gain, whose image is the sphere of radius sqrt(d)."""

    centred = False

    def __init__(self, width, eps=1e-5, bias=False):
        super().__init__()
        self.width, self.eps = width, eps
        self.register_buffer("ones", torch.ones(width))

    @property
    def gamma(self):
        return self.ones

    @property
    def beta(self):
        return torch.zeros_like(self.ones)

    def forward(self, x):
        return self.standardize(x)


@pytest.mark.slow
def test_a_new_norm_is_one_entry(monkeypatch):
    monkeypatch.setitem(NORMS, "sphere", UnitGain)
    screening = check_enrolled(model_with(norm="sphere", placement="peri"))
    assert screening.steps["well-posedness"].verdict == "well-posed"
    norm, p = UnitGain(16).double(), torch.randn(5, 16, dtype=torch.float64)
    assert torch.allclose(norm.support(p), 4 * p.norm(dim=-1))
    assert command("hjb-check", "--norm", "sphere", "--placement", "peri")["checks"]["sphere"][
        "peri"
    ]["agrees"]


class SoftSign(SquashNorm):
    """z = gamma * y/(1 + abs(y)) + beta, y = alpha x: squashing whose H is approached like 1/r
    alone.
    """

    @staticmethod
    def phi(x):
        return x / (1 + x.abs())

    @staticmethod
    def derivative(x):
        return 1 / (1 + x.abs()).square()

    @staticmethod
    def inverse(u):
        return u / (1 - u.abs())


@pytest.mark.slow
def test_a_new_squashing_is_its_function_slope_and_inverse(monkeypatch):
    monkeypatch.setitem(NORMS, "softsign", SoftSign)
    screening = check_enrolled(model_with(norm="softsign", placement="peri"))
    assert screening.steps["well-posedness"].verdict == "well-posed for bounded gains"
    norm, x = SoftSign(16).double(), torch.randn(5, 16, dtype=torch.float64)
    assert torch.allclose(norm.preimage(norm.standardize(x)), x)
    assert float(norm.shortfall(x, 1000.0).max() / norm.support(x).max()) == pytest.approx(
        1 / (1 + 0.5 * 1000 / 4), rel=1e-12
    )


class Similarity(Instrument):
    """The mean cosine between tokens of a sequence at the end of the depth: 1 where they have
    become one (rank collapse).
    """

    def forward(self, at):
        self.x = at.y

    def figures(self):
        unit = nn.functional.normalize(self.x, dim=-1)
        tokens = unit.shape[-2]
        return float(((unit.sum(-2).square().sum(-1) - tokens) / (tokens * (tokens - 1))).mean())


def plan_similarity(case):
    similarity = Similarity()

    def conclude():
        value = similarity.figures()
        verdict = "collapsed" if value > 0.9 else "apart"
        return StepVerdict(
            verdict,
            f"cos = {value:.2f}",
            "tokens end this close to each other",
            {"cosine": value},
            result=value,
        )

    return StepPlan({"text": [similarity]}, conclude)


@pytest.mark.slow
def test_a_new_instrument_with_a_verdict_is_one_class_and_one_entry(monkeypatch):
    model = model_with(placement="pre")
    (value,) = walk(model, TEXT, instruments=[Similarity()])
    x = model.depth(model.embed(TEXT))
    cosines = nn.functional.cosine_similarity(x.unsqueeze(-2), x.unsqueeze(-3), dim=-1)
    pairs = [
        float(cosines[b, i, j]) for b in range(2) for i in range(9) for j in range(9) if i != j
    ]
    assert value == pytest.approx(sum(pairs) / len(pairs))
    alike = Check(
        severity="note",
        source="ours",
        impact="It is.",
        remediation="Leave it.",
        high=-1.0,
        verdict="collapse",
        topics=("screening",),
    )
    with pytest.raises(ConfigError, match="nothing computes the measure 'cosine'"):
        MEASURES["cosine"] = Measure(formula="mean cosine of two tokens")
    cosine = Measure(formula="mean cosine of two tokens", decimals=1, measured_by="similarity")
    monkeypatch.setitem(MEASURES, "cosine", cosine)
    step = ScreeningStep("do tokens collapse?", plan_similarity, ("cosine",))
    monkeypatch.setitem(STEPS, "similarity", step)
    screening = screen(model, TEXT[:, :-1], TEXT[:, 1:], "quick")
    assert screening.steps["similarity"].verdict == "apart"
    assert screening.steps["similarity"].flags == {}
    limited = dataclasses.replace(cosine, checks={"tokens alike": alike})
    monkeypatch.setitem(MEASURES, "cosine", limited)
    assert screening.steps["similarity"].flags == {"cosine": "collapse"}
    (found,) = [each for each in screening.findings if each.check == "tokens alike"]
    assert (found.place, found.topic) == ("step similarity", "screening")
    shown = command("screen", "--placement", "pre", "--quick")
    (screening,) = shown["models"].values()
    assert math.isfinite(screening["steps"]["similarity"]["result"])


@pytest.mark.slow
def test_a_new_solver_is_one_entry(monkeypatch):
    ralston = RungeKutta(tableau(order=3, a=[[], ["1/2"], [0, "3/4"]], b=["2/9", "1/3", "4/9"]))
    monkeypatch.setitem(METHODS, "ralston3", ralston)
    assert substep_convergence("ralston3", "peri").order == pytest.approx(3, abs=0.15)
    found = command("simulate", "--method", "ralston3", "--steps", "2", "--no-reference")
    assert found["placements"]["peri"]["evaluations"] == 4 * 2 * 3


class Longest(Instrument):
    """The longest token of the last state."""

    def forward(self, at):
        self.length, self.k = float(at.y.norm(dim=-1).max()), at.k

    def figures(self):
        return {
            "longest": [
                Reading(self.length, "the end", f"a token is {self.length:.3g} long", self.k)
            ]
        }


@pytest.mark.slow
def test_a_new_measure_with_a_limit_is_one_entry(monkeypatch):
    monkeypatch.setitem(MEASURES, "mean over size", MEASURES["mean_abs"])  # put back at the end
    exec(MEAN_OVER_SIZE, vars(types.ModuleType("my_measure")))
    found = command("diagnose", "--placement", "pre")
    findings = found["measured"]["findings"]["pre"]
    assert [each["limit"] for each in findings if each["check"] == "mean dominates"] == [
        "above 0.3"
    ]
    assert found["measured"]["values"]["measure"].count("mean over size") == 5
    assert MEAN_OVER_SIZE in (ROOT / "docs" / "howto" / "extend.md").read_text()


def test_a_new_finding_is_an_instrument_and_a_check(monkeypatch):
    long = Check(
        severity="note",
        source="ours",
        impact="It is long.",
        remediation="Make it shorter.",
        high=0.0,
    )
    longest = Measure(formula="the longest token", compute=Longest, checks={"too long": long})
    monkeypatch.setitem(MEASURES, "longest", longest)
    findings = command("diagnose")["placements"]["peri"]["findings"]
    assert [each["remediation"] for each in findings if each["check"] == "too long"] == [
        "Make it shorter."
    ]


class Sizes(Instrument):
    """|X_k| at the end of each segment."""

    def begin(self, depth, x0):
        self.sizes = []

    def forward(self, at):
        self.sizes.append(float(at.y.norm()))

    def figures(self):
        return SizesStep(self.sizes)


@dataclasses.dataclass(frozen=True)
class SizesStep:
    sizes: list[float]

    def values(self, model):
        yield from along_depth(model, "size of a state", self.sizes, start=1)


def plan_sizes(case):
    sizes = Sizes()
    return StepPlan(
        {"text": [sizes]}, lambda: StepVerdict("seen", "", "all", result=sizes.figures())
    )


def only_step(monkeypatch, name, plan):
    """Makes it the only step of the screening."""
    for other in [*STEPS]:
        monkeypatch.delitem(STEPS, other)
    monkeypatch.setitem(STEPS, name, ScreeningStep("how large are the states?", plan))
    verdict = Measure(formula="how large are the states?", measured_by=name)
    monkeypatch.setitem(MEASURES, f"verdict: {name}", verdict)


def test_the_figures_by_depth_of_a_new_step_are_rows_of_the_table(monkeypatch):
    measure = Measure(formula="|X_k|", scope="state", measured_by="sizes")
    monkeypatch.setitem(MEASURES, "size of a state", measure)
    only_step(monkeypatch, "sizes", plan_sizes)
    found = command("screen", "--placement", "pre", "--quick")
    (model,) = found["models"].values()
    columns = found["measured"]["values"]
    rows = [
        (depth, value)
        for measure, depth, value in zip(
            columns["measure"], columns["depth"], columns["value"], strict=True
        )
        if measure == "size of a state"
    ]
    sizes = model["steps"]["sizes"]["result"]["sizes"]
    assert rows == [*enumerate(sizes, 1)]
    assert len(sizes) == 4


def test_a_step_may_have_a_mapping_as_its_result_whose_values_are_no_rows(monkeypatch):
    verdict = StepVerdict("seen", "", "all", result={"size": 1.0})
    only_step(monkeypatch, "mapping", lambda case: StepPlan({}, lambda: verdict))
    found = command("screen", "--placement", "pre", "--quick")
    (model,) = found["models"].values()
    assert model["steps"]["mapping"]["result"] == {"size": 1.0}


@pytest.mark.slow
def test_a_figure_that_a_study_keeps_of_its_runs_is_one_entry(monkeypatch):
    weights = Measure(
        formula="the sum of |W|^2 over all weights W",
        compute=lambda model, tokens, targets: {
            "squares": sum(float(weight.square().sum()) for weight in model.parameters()),
            "tokens": tokens.numel(),
        },
        studied=True,
    )
    with pytest.raises(ConfigError, match="attention, last gradient, massive"):
        small(measure=["weight"])
    with pytest.raises(ConfigError, match=r"compute=FUNCTION.*studied=True"):
        MEASURES["weights"] = weights.compute
    monkeypatch.setitem(MEASURES, "weights", weights)
    (run, *_) = small(measure=["weights"]).runs()
    result = train_run(run, from_text(b"to be or not to be, " * 40, run.model.context))
    before, after = (result.trained[when]["weights"] for when in ("before", "after"))
    model = GPT(run.model, seed=run.training.seed)
    assert before["squares"] == sum(float(each.square().sum()) for each in model.parameters())
    assert after["squares"] != before["squares"]
    assert after["tokens"] == WINDOWS * run.model.context


def test_a_figure_of_a_run_that_a_preset_compares_is_one_entry(monkeypatch):
    rate = Measure(formula="the rate", compute=lambda run: run.run.training.learning_rate)
    monkeypatch.setitem(MEASURES, "run: rate", rate)
    contrast = Contrast("it is positive", {"placement": "pre"}, figure="rate")
    result = RunResult("finished", "", [], 1.0, {})
    runs = [Finished("", run, result, "", "") for run in small().runs()]
    assert contrast.by_seed(runs) == {0: pytest.approx((1e-3 + 1e-2) / 2)}


def test_a_figure_that_a_result_has_already_is_one_entry(monkeypatch):
    late = Measure(formula="how late it is", measured_by="ctrans train", key="lateness")
    monkeypatch.setitem(MEASURES, "late", late)
    (value,) = trained.measured({"": {"ending": "finished", "step": 1, "lateness": 3}}).of("late")
    assert value.value == 3.0


def test_a_change_between_two_checkpoints_is_one_entry(monkeypatch):
    less = Measure(
        formula="how much less",
        scope="weight",
        compares=("size",),
        compute=lambda before, after: before.value - after.value,
    )
    monkeypatch.setitem(MEASURES, "less", less)
    before, after = ([Reading(size, "here", f"it is {size}")] for size in (3.0, 1.0))
    (reading,) = change({"size": before}, {"size": after}).readings["less"]
    assert (reading.value, reading.figure) == (2.0, "before, it is 3.0; now, it is 1.0")


def test_a_new_gauge_is_one_entry_in_the_log_and_for_an_alarm(monkeypatch, tmp_path):
    tall = Check(
        severity="note",
        source="ours",
        impact="It is tall.",
        remediation="Make it smaller.",
        limits={"limit": -9.0},
        rule=beyond("tallest"),
    )
    formulas = {
        "tallest": ("largest entry of a state, with its sign", "state", lambda x: x.max()),
        "moved": ("mean entry of a velocity", "sublayer", lambda r: r.mean()),
        "span": ("scores that are read", "head", lambda s: s.isfinite().float().sum((-2, -1))),
        "twice": ("twice the loss", "run", lambda figures: 2 * figures["loss"]),
        "wrong": ("what cannot be", "state", lambda x: 1 / 0),
    }
    for name, (formula, scope, compute) in formulas.items():
        checks = {"too tall": tall} if name == "tallest" else {}
        measure = Measure(formula=formula, scope=scope, compute=compute, live=True, checks=checks)
        monkeypatch.setitem(MEASURES, name, measure)
    model = GPT(GPTConfig(vocab_size=11, context=16, depth=2, width=16, heads=2))
    states = []
    model.depth.sublayers[1].register_forward_pre_hook(
        lambda _, args: states.append(args[0].detach().max())
    )
    with Monitor(model, every=1, out=tmp_path) as monitor:
        loss = model(TEXT[:, :-1], TEXT[:, 1:])[1]
        loss.backward()
        alarms = monitor.step(loss)
    (report,) = read_log(tmp_path).reports
    assert report.figures["tallest"][1] == pytest.approx(float(states[0]), rel=0.01)
    assert report.figures["twice"] == pytest.approx(2 * float(loss), rel=1e-5)
    assert (
        len(report.figures["tallest"]),
        len(report.figures["moved"]),
        len(report.figures["span"]),
    ) == (5, 4, 4)
    assert "ZeroDivisionError" in report.missing["the gauge wrong"]
    assert "wrong" not in report.figures
    assert [each.remediation for each in alarms if each.check == "too tall"] == ["Make it smaller."]


MINE = """
from ctrans.dynamics.placement import PLACEMENTS, Placement
from ctrans.examine.diagnosis.weights_only import change
from ctrans.examine.screening.case import StepPlan, StepVerdict
from ctrans.examine.screening.screen import STEPS, ScreeningStep
from ctrans.measure.walk import Instrument
from solvers import METHODS, RungeKutta, tableau


class Length(Instrument):
    def forward(self, at):
        self.found = float(at.y.norm())

    def figures(self):
        return self.found


def plan(case):
    length = Length()
    return StepPlan({"text": [length]}, lambda: StepVerdict("seen", "", "it has a length", {}, result=length.figures()))


PLACEMENTS["mine"] = Placement(
    "mine",
    input_norm=True,
    output_norm=True,
    state_norm=False,
    residual_gain=True,
    velocity="N_out f(N_in X)/alpha",
    step="X + dt v",
    seen_in="nowhere",
)
METHODS["ralston"] = RungeKutta(tableau(order=2, a=[[], ["2/3"]], b=["1/4", "3/4"]))
STEPS["length"] = ScreeningStep("how long is the last state?", plan)
"""


def typed(*arguments, cwd):
    """The command as a user types it, in a process of its own, from a directory that is not the
    project's.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "500"}
    command = [sys.executable, "-m", "ctrans", *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_plugin_is_known_to_every_command_and_its_help(tmp_path):
    (tmp_path / "my_attention.py").write_text(RUNNING_MEAN)
    (tmp_path / "mine.py").write_text(MINE)
    plugins = [
        "--plugin",
        "my_attention.py",
        "--plugin",
        "mine",
    ]  # a file, and a module that is here
    helped = typed(*plugins, "simulate", "--help-all", cwd=tmp_path)
    assert f"One of {', '.join(ATTENTIONS)}, mean." in helped.stdout
    assert "deepnorm, mine." in helped.stdout
    small = [
        "--depth",
        "1",
        "--width",
        "8",
        "--heads",
        "1",
        "--context",
        "6",
        "--batch",
        "1",
        "--json",
        "-",
    ]
    chosen = ["--placement", "mine", "--attention", "mean"]
    done = typed(
        *plugins,
        "simulate",
        *chosen,
        "--method",
        "ralston",
        "--steps",
        "1",
        "--no-reference",
        *small,
        cwd=tmp_path,
    )
    found = json.loads(done.stdout)
    assert found["placements"]["mine"]["evaluations"] == 4
    assert found["environment"]["plugins"] == ["my_attention.py", "mine"]
    screened = json.loads(
        typed(*plugins, "screen", *chosen, "--quick", *small, cwd=tmp_path).stdout
    )
    (screening,) = screened["models"].values()
    assert screening["steps"]["length"]["verdict"] == "seen"
    checked = subprocess.run(
        [sys.executable, "my_attention.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert checked.returncode == 0


@pytest.mark.slow
def test_no_file_is_run_that_is_not_named(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    done = typed("simulate", "--placement", "mine", cwd=tmp_path)
    assert (done.returncode, "unknown placement 'mine'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plugin", "x.py", "simulate"], "there is no file 'x.py'"),
        (
            ["--plugin", "no_such_module", "simulate"],
            "there is no module 'no_such_module': give the name",
        ),
        (["--plugin", "bad.py", "simulate"], "bad.py, line 2: ZeroDivisionError: division by zero"),
        (
            ["simulate", "--plugin", "bad.py"],
            "Give it before the command: ctrans --plugin FILE COMMAND",
        ),
    ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("x = 1\n1 / 0\n")
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert words in result.stderr
