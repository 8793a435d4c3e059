"""`ctrans hjb-check` and `ctrans control` as users type them."""

import dataclasses
import math
from functools import partial

import pytest

from ctrans.cli import hjb_check
from ctrans.control.control_checks import CHECKS
from tests.cli.test_commands import run, strict

SMALL = [
    "--depth",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "8",
    "--batch",
    "1",
    "--dt",
    "0.1",
]
PICTURE = b"\x89PNG"


@pytest.mark.slow
def test_trainings_stand_beside_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(hjb_check, "degeneracy", partial(hjb_check.degeneracy, steps=1))
    one = ("--norm", "layernorm", "--placement", "peri")
    result = run("hjb-check", *SMALL, *one, "--train", "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "hjb-train.png").read_bytes().startswith(PICTURE)
    assert "sup |v| after 1 and 4 steps" in " ".join(result.stdout.split())
    report = run("report", tmp_path / "hjb-check.json")
    assert "Degeneracy in training" in report.stdout
    quiet = strict(run("hjb-check", *SMALL, *one, "--train", "--json", "-").stdout)
    assert "H in training" in quiet["measured"]["values"]["measure"]
    assert "H in training" in quiet["measured"]["missing"]["pre"]


@pytest.mark.slow
def test_hjb_check_writes_table_json_and_picture(tmp_path):
    result = run("hjb-check", *SMALL, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kept = strict((tmp_path / "hjb-check.json").read_text())
    assert (tmp_path / "hjb-check.png").read_bytes().startswith(PICTURE)
    assert not (tmp_path / "hjb-pde.png").exists()
    for norm in ("layernorm", "rmsnorm"):
        verdicts = {name: check["verdict"] for name, check in kept["checks"][norm].items()}
        assert [
            name for name, verdict in verdicts.items() if verdict == "well-posed for bounded gains"
        ] == ["peri", "output"]
        assert len(verdicts) == 7
        steps = {name: check["step_verdict"] for name, check in kept["checks"][norm].items()}
        assert [name for name, verdict in steps.items() if verdict == "degenerate"] == [
            "none",
            "pre",
        ]
    peri = kept["checks"]["layernorm"]["peri"]
    certificate = peri["segments"][0]["certificate"]
    assert certificate["velocities"]["best"] == pytest.approx(certificate["hamiltonian"], rel=1e-8)
    assert certificate["weights"]["best"] <= certificate["hamiltonian"]
    assert kept["checks"]["layernorm"]["none"]["segments"][0]["certificate"]["hamiltonian"] == "inf"
    answer = " ".join(result.stdout.split())
    assert "gains stay bounded: peri, output. Degenerate: none, pre;" in answer
    verbose = run("hjb-check", *SMALL, "--norm", "layernorm", "--verbose", "--out", tmp_path).stdout
    assert "degenerate" in verbose
    allowed = "f_j = beta + gamma * u_j, |u_j|^2 = 16, 1'u_j = 0"
    assert allowed in kept["measured"]["values"]["words"]
    assert "f_j = beta +" in verbose
    assert "Hamiltonian is infinite" in verbose
    assert {each["check"] for each in kept["findings"]} == {"Hamiltonian is infinite"}
    assert "evidence disagrees (" not in result.stdout, "notes are no evidence against a verdict"
    # 14 models have a row each, and the rest of the page stands on 25 lines
    assert len(result.stdout.splitlines()) <= 39
    assert result.stderr == ""
    assert max(map(len, result.stdout.split("Written")[0].splitlines())) <= 80
    assert "…" not in result.stdout


def test_an_infinite_hamiltonian_is_found_by_a_limit_that_says_so(tmp_path):
    result = run(
        "hjb-check", *SMALL, "--norm", "layernorm", "--placement", "pre", "--out", tmp_path
    )
    finding = strict((tmp_path / "hjb-check.json").read_text())["findings"][0]
    assert (finding["value"], finding["limit"]) == ("inf", "H is infinite")
    assert "limit  H is infinite (Kan et al. 2025" in result.stdout
    check = CHECKS["Hamiltonian is infinite"]
    assert check.fails(math.inf)
    assert not check.fails(54.7), "a finite H is no finding"


def test_the_penalty_needed_is_what_is_proven_and_the_search_is_a_detail(tmp_path):
    result = run(
        "hjb-check", *SMALL, "--norm", "layernorm", "--placement", "pre", "--out", tmp_path
    )
    kept = strict((tmp_path / "hjb-check.json").read_text())
    values = kept["measured"]["values"]
    row = values["measure"].index("penalty needed")
    threshold = kept["checks"]["layernorm"]["pre"]["training_threshold"]
    assert values["value"][row] == threshold["upper"]
    assert float(values["words"][row]) >= threshold["upper"]
    assert f" {values['words'][row]} " in result.stdout
    too_small = values["measure"].index("penalty too small")
    assert values["value"][too_small] == threshold["lower"]


def test_hjb_check_says_for_which_placements_a_remedy_means_nothing():
    result = run(
        "hjb-check",
        "--placement",
        "pre",
        "--placement",
        "peri",
        "--last-map-decay",
        "0.1",
        *SMALL,
        "--json",
        "-",
    )
    kept = strict(result.stdout)
    (row,) = kept["checks"]["rmsnorm"].values()
    assert (result.exit_code, row["placement"], row["verdict"]) == (
        0,
        "pre",
        "well-posed, the rest fixed",
    )
    assert "kinetic apply" in kept["missing"]["peri"]


@pytest.mark.slow
def test_weight_decay_as_trained_is_compared_with_its_threshold(tmp_path):
    small, large = (
        run(
            "hjb-check",
            "--placement",
            "pre",
            "--norm",
            "rmsnorm",
            "--weight-decay",
            decay,
            *SMALL,
            "--out",
            tmp_path,
        )
        for decay in ("0.1", "1e4")
    )
    assert (small.exit_code, large.exit_code) == (0, 0)
    assert "times too small for a finite H" in small.stdout
    assert "weights" in small.stdout
    assert "keeps the matrices from running away" in large.stdout
    assert "biases+gains fixed" in " ".join(large.stdout.split())
    assert "∞" not in large.stdout.partition("How to read it")[0]
    assert "let the value grow like R^3" in " ".join(large.stdout.split())
    (row,) = strict((tmp_path / "hjb-check.json").read_text())["checks"]["rmsnorm"].values()
    assert row["training_threshold"]["lower"] < 1e4 <= row["segments"][0]["weight_decay"]


@pytest.mark.slow
def test_decay_of_gains_makes_peri_well_posed_without_a_condition():
    result = run(
        "hjb-check",
        "--placement",
        "peri",
        "--placement",
        "pre",
        "--gain-decay",
        "0.1",
        *SMALL,
        "--json",
        "-",
    )
    kept = strict(result.stdout)
    assert result.exit_code == 0, result.stderr
    assert [row["verdict"] for rows in kept["checks"].values() for row in rows.values()] == [
        "well-posed"
    ] * 2
    assert "gains could decay" in kept["missing"]["pre"]


def test_a_penalty_that_is_not_known_has_a_reason():
    shared = ["--placement", "pre", "--norm", "rmsnorm", "--depth-weights", "linear"]
    kept = strict(run("hjb-check", *SMALL, *shared, "--json", "-").stdout)
    why = kept["measured"]["missing"]["pre"]["penalty needed"]
    assert "are computed from others, which a loss pays instead" in why


def test_a_table_shows_a_refused_remedy_as_not_applicable(tmp_path):
    wanted = ["--placement", "pre", "--placement", "post", "--norm", "rmsnorm"]
    result = run("hjb-check", *wanted, "--last-map-decay", "0.1", *SMALL, "--out", tmp_path)
    assert result.exit_code == 0
    assert "n/a: placement 'post'" in result.stdout


@pytest.mark.slow
def test_a_kinetic_cost_makes_h_finite_again():
    args = [
        "hjb-check",
        "--placement",
        "none",
        "--placement",
        "post",
        "--norm",
        "layernorm",
        *SMALL,
        "--json",
        "-",
    ]
    without, with_cost = strict(run(*args).stdout), strict(run(*args, "--kinetic", "0.1").stdout)
    for before, after in zip(
        without["checks"]["layernorm"].values(),
        with_cost["checks"]["layernorm"].values(),
        strict=True,
    ):
        assert before["segments"][0]["certificate"]["hamiltonian"] == "inf"
        assert 0 < after["segments"][0]["certificate"]["hamiltonian"] < 1e9


@pytest.mark.slow
def test_evidence_against_a_verdict_exits_1_and_names_the_finding(tmp_path, monkeypatch):
    check_model = hjb_check.check_model

    def with_a_wrong_residual(*args, **kwargs):
        result = check_model(*args, **kwargs)
        first = result.segments[0]
        wrong = dataclasses.replace(
            first, certificate=dataclasses.replace(first.certificate, kkt=1.0)
        )
        return dataclasses.replace(result, segments=(wrong, *result.segments[1:]))

    monkeypatch.setattr(hjb_check, "check_model", with_a_wrong_residual)
    result = run("hjb-check", "--placement", "peri", "--norm", "rmsnorm", *SMALL, "--out", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("ctrans: rmsnorm, peri, segment 0 (attention): does not hold")
    assert "KKT conditions (found: to 1)" in result.stderr
    assert "compare another --seed" in result.stderr.splitlines()[-1]
    assert "(bounded gains)?" in result.stdout
    assert "evidence disagrees (broken)" in result.stdout
    assert result.stdout.startswith("The numerical evidence disagrees with the verdict for peri.")
    assert (
        strict((tmp_path / "hjb-check.json").read_text())["checks"]["rmsnorm"]["peri"]["agrees"]
        is False
    )


@pytest.mark.slow
def test_control_writes_table_json_and_picture(tmp_path):
    result = run("control", "--placement", "pre", "--placement", "peri", *SMALL, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kept = strict((tmp_path / "control.json").read_text())
    assert max(kept["attained"]["pre"]["identity"] + kept["attained"]["peri"]["identity"]) < 1e-12
    kept = kept["placements"]
    assert (tmp_path / "control.png").read_bytes().startswith(PICTURE)
    assert all(gap > 0 for gap in kept["peri"]["gap"])
    assert kept["pre"]["gap"] == kept["pre"]["hamiltonian"] == ["inf", "inf"]
    assert max(kept["pre"]["drift"] + kept["peri"]["drift"]) < 1e-6
    assert "The maximum principle" in result.stdout
    assert max(map(len, result.stdout.split("Written")[0].splitlines())) <= 80


@pytest.mark.slow
def test_a_tighter_tolerance_drifts_less():
    loose, tight = (
        strict(run("control", *SMALL, "--dt", "1", "--rtol", rtol, "--json", "-").stdout)[
            "placements"
        ]["peri"]["drift"]
        for rtol in ("1e-3", "1e-9")
    )
    assert max(tight) < max(loose)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hjb-check", "control"])
def test_json_to_stdout_is_alone_there(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(name, "--placement", "peri", *SMALL, "--json", "-")
    assert strict(result.stdout)["command"] == name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["hjb-check", "--placement", "perri"], "did you mean 'peri'"),
        (["hjb-check", "--norm", "rms"], "did you mean 'rmsnorm'"),
        (["hjb-check", "--weight-decay", "0"], "weight_decay = 0.0"),
        (["hjb-check", "--kinetic", "-1"], "kinetic = -1.0"),
        (["hjb-check", "--kinetic", "nan"], "kinetic = nan"),
        (["hjb-check", "--kinetic", "inf"], "kinetic = inf"),
        (["hjb-check", "--kinetic", "much"], "'much' is not a valid float"),
        (["hjb-check", "--kinetic", "1", "--last-map-decay", "1"], "two running costs"),
        (["hjb-check", "--placement", "peri", "--last-map-decay", "1"], "kinetic apply"),
        (
            ["hjb-check", "--placement", "pre", "--gain-decay", "1"],
            "no output norm whose gains could decay",
        ),
        (
            ["hjb-check", "--placement", "peri", "--kinetic", "1", "--gain-decay", "1"],
            "two running costs",
        ),
        (
            [
                "hjb-check",
                "--placement",
                "post",
                "--placement",
                "deepnorm",
                "--last-map-decay",
                "1",
            ],
            "tangent space",
        ),
        (["hjb-check", "--pde", "--json", "-"], "add --out DIRECTORY"),
        (["hjb-check", "--text", "x"], "at least two tokens"),
        (["hjb-check", "--text", "ab", "--file", "x"], "choose one of"),
        (["hjb-check", "--file", "/does/not/exist"], "cannot read '/does/not/exist'"),
        (["hjb-check", "--batch", "0"], "batch = 0"),
        (["hjb-check", "--context", "0"], "context = 0"),
        (["hjb-check", "--depth", "0"], "depth = 0"),
        (["hjb-check", "--dt", "nan"], "dt = nan"),
        (["hjb-check", "--heads", "3"], "width 128 is not divisible by heads 3"),
        (["hjb-check", "--dtype", "bfloat16", *SMALL], "bfloat16"),
        (["hjb-check", "--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["hjb-check", "--out", "/proc/nothing"], "cannot write to directory '/proc/nothing'"),
        (["control", "--placement", "perri"], "did you mean 'peri'"),
        (["control", "--norm", "rms"], "did you mean 'rmsnorm'"),
        (["control", "--rtol", "0", *SMALL], "rtol = 0.0"),
        (["control", "--atol", "nan", *SMALL], "atol = nan"),
        (["control", "--dtype", "bfloat16", *SMALL], "bfloat16"),
        (["control", "--text", ""], "at least two tokens"),
        (["control", "--batch", "-1"], "batch = -1"),
        (["control", "--device", "gpu"], "device 'gpu' is not available"),
        (
            ["control", "--json", "/proc/nothing/x.json", *SMALL],
            "there is no directory '/proc/nothing'",
        ),
    ],
)
def test_a_mistake_is_one_line_with_exit_code_2_and_nothing_written(
    args, words, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("ctrans: ")
    assert words in result.stderr
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []
