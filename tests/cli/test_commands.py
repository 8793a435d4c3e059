"""Commands as users type them: what they print and write, and the one line that each mistake
gets.
"""

import json
import os
import shutil
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from ctrans.cli import COMMANDS, OLD_COMMANDS, main
from ctrans.model.checkpoint import save
from ctrans.model.config import GPTConfig
from ctrans.model.gpt import GPT
from tests.helpers import learned

QUICK = ["--depth", "2", "--width", "16", "--heads", "2", "--context", "12", "--batch", "2"]


def run(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args], prog_name="ctrans")


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_help_names_every_command_without_importing_torch():
    code = """
import sys
from ctrans.cli import main
try:
    main(["--help"])
finally:
    own = {"ctrans." + name for name in ("cli.plugins", "cli.failures", "option")}
    assert not {"torch", "rich", "matplotlib", "click.shell_completion", "difflib", *own} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_given_a_completion_script(shell):
    if shutil.which(shell) is None and shell == "bash":  # click asks it for its version
        pytest.skip("no bash here")
    assert "_ctrans_completion" in completed(_CTRANS_COMPLETE=f"{shell}_source")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ctrans si", ["simulate"]),
        ("ctrans --v", ["--version"]),
        ("ctrans ", list(COMMANDS)),
        ("ctrans x", []),
    ],
)
def test_commands_are_completed_without_importing_torch(typed, offered):
    said = completed(
        _CTRANS_COMPLETE="bash_complete", COMP_WORDS=typed, COMP_CWORD="1"
    ).splitlines()
    assert [line.removeprefix("plain,") for line in said if line] == [*offered, "no torch"]


@pytest.mark.slow
def test_what_few_commands_need_is_not_imported_by_all(tmp_path):
    """jax takes as long as a third of torch, the compiler twice as long. scipy takes a quarter, and
    the least transport of a default run needs it.
    """
    (tmp_path / "jax.py").touch()
    code = f"""
import contextlib, sys, ctrans.cli
with contextlib.suppress(SystemExit):
    ctrans.cli.main(["simulate", *{QUICK}, "--out", "out"])
own = {{"ctrans." + name for name in ("monitor", "study", "training.loop", "stability.diagnosis", "verify")}}
print(own & set(sys.modules))
import ctrans.cli.train, ctrans.cli.diagnose
few = {{"jax", "torchdiffeq", "matplotlib.pyplot", "torch._dynamo", "transformers", "mpld3", "jinja2"}}
print(few & set(sys.modules))
"""
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=path,
        cwd=tmp_path,
    )
    assert (tmp_path / "out" / "simulate.png").exists()
    assert done.stdout.splitlines()[-2:] == ["set()", "set()"], done.stdout


@pytest.mark.slow
def test_placements_are_completed():
    asked = {
        "_CTRANS_COMPLETE": "bash_complete",
        "COMP_WORDS": "ctrans simulate --placement pe",
        "COMP_CWORD": "3",
    }
    said = CliRunner().invoke(main, prog_name="ctrans", env=asked).stdout
    assert "plain,peri" in said.splitlines()


def completed(**environment):
    """What the command says to a shell that asks, and "no torch" where that was not imported."""
    code = """
import sys
from ctrans.cli import main
try:
    main(prog_name="ctrans")
finally:
    print("" if "torch" in sys.modules else "no torch")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_explains_itself(name):
    result = run(name, "--help")
    assert result.exit_code == 0
    assert "--json" in result.output


@pytest.mark.parametrize("name", sorted({*COMMANDS, *OLD_COMMANDS}))
def test_help_is_short_and_help_all_names_every_option(name):
    def shown(flag):
        result = CliRunner().invoke(main, [name, flag], env={"COLUMNS": "80"})
        assert result.exit_code == 0
        return result.output

    command = main.get_command(click.Context(main), name)
    options = {option.name: option for option in command.params if isinstance(option, click.Option)}
    assert command.common <= options.keys()
    brief = shown("--help")
    whole = shown("--help-all")
    assert len(brief.splitlines()) <= 80
    for option in options.values():
        assert all(flag in whole.split() or f"{flag}," in whole.split() for flag in option.opts)
    for option in command.common or options:
        assert options[option].opts[0] in brief
    if command.common:
        assert f"--help-all shows all {len(options)} options." in brief
    else:
        assert brief == whole


@pytest.mark.slow
def test_simulate_writes_table_json_and_picture(tmp_path):
    result = run("simulate", "--placement", "all", "--dt", "0.1", *QUICK, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    kept = strict((tmp_path / "simulate.json").read_text())
    assert len(kept["placements"]) == 7
    assert len(kept["placements"]["peri"]["mean_abs"]) == 5
    assert kept["options"]["dt"] == 0.1
    assert (tmp_path / "simulate.png").read_bytes().startswith(b"\x89PNG")
    assert result.stdout.startswith(
        "Through the depth the hidden states change in size by a factor of"
    )
    of_one = run("simulate", *QUICK, "--placement", "peri", "--out", tmp_path).stdout
    assert "With one Euler step per sublayer the Transformer's last state differs" in " ".join(
        of_one.split()
    )
    assert result.stderr == ""


@pytest.mark.slow
def test_the_json_goes_into_a_pipe_which_stays(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    result = run("simulate", *QUICK, "--json", tmp_path / "pipe", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert strict(os.read(reader, 10**6).decode())["command"] == "simulate"
    assert (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_a_picture_that_fails_loses_no_result(tmp_path, monkeypatch):
    def failing(page):
        raise OSError("no space for a picture")

    monkeypatch.setattr("ctrans.cli.ending.pictures", failing)
    result = run("simulate", *QUICK, "--placement", "peri", "--out", tmp_path)
    assert (result.exit_code, result.stderr) == (2, "ctrans: no space for a picture\n")
    assert strict((tmp_path / "simulate.json").read_text())["command"] == "simulate"


def test_json_to_stdout_is_alone_there_and_writes_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("simulate", *QUICK, "--json", "-")
    assert strict(result.stdout)["command"] == "simulate"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_json_to_a_file_is_the_same_object(tmp_path):
    run("simulate", *QUICK, "--json", tmp_path / "a.json", "--out", tmp_path)
    assert (tmp_path / "a.json").read_text() == (tmp_path / "simulate.json").read_text()


@pytest.mark.slow
def test_a_name_is_printed_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(
        "simulate", "--depth", 1, "--width", 16, "--context", 8, "--out", "a[b]c:smile:[/]"
    )
    assert "Written: a[b]c:smile:[/]/simulate.json" in result.stdout, result.stdout
    assert (tmp_path / "a[b]c:smile:[" / "]" / "simulate.json").is_file()


def test_json_may_go_to_the_directory_that_out_makes(tmp_path):
    made = tmp_path / "new" / "er"
    assert run("simulate", *QUICK, "--out", made, "--json", made / "a.json").exit_code == 0
    assert (made / "a.json").read_text() == (made / "simulate.json").read_text()


@pytest.mark.slow
def test_one_block_is_no_blocks(tmp_path):
    assert (
        "1 block, width 16"
        in run("simulate", *QUICK, "--depth", 1, "--placement", "pre", "--out", tmp_path).stdout
    )


def test_the_same_seed_gives_the_same_figures():
    first, second = (
        strict(run("simulate", *QUICK, "--seed", 3, "--json", "-").stdout) for _ in range(2)
    )
    for result in (first, second):
        result["placements"]["peri"].pop("seconds")
    assert first == second


def test_a_method_and_a_users_bytes(tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)))
    result = run(
        "simulate", *QUICK, "--file", path, "--method", "tsit5", "--rtol", "1e-5", "--json", "-"
    )
    peri = strict(result.stdout)["placements"]["peri"]
    assert peri["distance"][-1] < 1e-4 < peri["discrete_distance"][-1]


@pytest.mark.slow
def test_a_state_that_overflows_exits_1_says_where_and_keeps_what_it_had(tmp_path):
    args = [
        "simulate",
        "--placement",
        "none",
        "--placement",
        "peri",
        *QUICK,
        "--depth",
        "6",
        "--dt",
        "1e37",
        "--init",
        "large",
    ]
    args += ["--no-reference", "--out", tmp_path]
    result = run(*args)
    assert result.exit_code == 1
    assert "ctrans: none: the state became non-finite in segment" in result.stderr
    assert "Traceback" not in result.output
    kept = strict((tmp_path / "simulate.json").read_text())["placements"]["none"]
    assert kept["status"] == "non_finite"
    assert 1 <= len(kept["mean_abs"]) < 13


def test_a_state_of_zeros_is_no_error():
    peri = strict(
        run(
            "simulate", *QUICK, "--placement", "pre", "--embedding-std", "1e-50", "--json", "-"
        ).stdout
    )["placements"]["pre"]
    assert peri["used"][0] == "nan"


@pytest.mark.slow
def test_a_method_above_the_bound_of_the_exact_solution_is_said_to_be(tmp_path):
    args = [
        "simulate",
        *QUICK,
        "--placement",
        "post",
        "--method",
        "midpoint",
        "--init",
        "large",
        "--out",
        tmp_path,
    ]
    assert "exceeds the bound of the exact solution" in " ".join(run(*args).stdout.split())


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["simulate", "hjb-check", "control"])
def test_a_saved_model_is_looked_at_in_place_of_a_seeded_one(name, tmp_path):
    config = GPTConfig(
        depth=1,
        width=16,
        heads=2,
        context=12,
        placement="output",
        norm="rmsnorm",
        initialisation="xavier",
    )
    save(learned(GPT(config, seed=5)), tmp_path)
    result = strict(run(name, "--checkpoint", tmp_path, "--context", 8, "--json", "-").stdout)
    assert result["options"]["width"] == 16
    assert result["options"]["context"] == 8
    assert result["options"]["norm"] == "rmsnorm"
    assert "output" in json.dumps(
        result["placements"] if name != "hjb-check" else result["checks"]["rmsnorm"]
    )
    refused = run(name, "--checkpoint", tmp_path, "--placement", "peri", "--width", 32)
    assert (
        refused.exit_code,
        "--checkpoint brings its own placements and width" in refused.stderr,
    ) == (2, True)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    broken = run(name, "--checkpoint", tmp_path, "--json", "-")
    assert (broken.exit_code, "no complete safetensors file" in broken.stderr) == (2, True)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["simulte"], "No such command 'simulte': did you mean 'simulate'?"),
        (["families", "gpt2"], "ctrans families was removed: use the table in docs"),
        (["rate"], "ctrans rate was removed: use ctrans study FILE.toml"),
        (["xyz"], "No such command 'xyz'. There are simulate, hjb-check, "),
        (["simulate", "--placment", "peri"], "No such option"),
        (["simulate", "--placement", "perri"], "did you mean 'peri'"),
        (["simulate", "--norm", "rms"], "did you mean 'rmsnorm'"),
        (["simulate", "--init", "kaiming"], "unknown initialisation 'kaiming'"),
        (["simulate", "--method", "rk5"], "did you mean 'rk4'"),
        (["simulate", "--dtype", "float16"], "did you mean 'bfloat16'"),
        (["simulate", "--dt", "0"], "dt = 0.0"),
        (["simulate", "--dt", "nan"], "dt = nan"),
        (["simulate", "--dt", "-1"], "dt = -1.0"),
        (["simulate", "--dt", "inf"], "dt = inf"),
        (["simulate", "--dt", "abc"], "'abc' is not a valid float"),
        (["simulate", "--depth", "0"], "depth = 0"),
        (["simulate", "--width", "-2"], "width = -2"),
        (["simulate", "--heads", "3"], "width 128 is not divisible by heads 3"),
        (["simulate", "--context", "0"], "context = 0"),
        (["simulate", "--batch", "0"], "batch = 0"),
        (["simulate", "--method", "tsit5", "--rtol", "nan"], "rtol = nan"),
        (["simulate", "--method", "tsit5", "--rtol", "0"], "rtol = 0.0"),
        (["simulate", "--method", "tsit5", "--steps", "3"], "takes no --steps"),
        (["simulate", "--method", "rk4", "--rtol", "1e-3"], "takes no rtol"),
        (
            ["simulate", "--method", "tsit5", "--rtol", "1e-9", "--dtype", "float32"],
            "float32 resolves",
        ),
        (["simulate", "--steps", "0"], "steps = 0"),
        (["simulate", "--seed", "99999999999999999999"], "seed = 9999"),
        (
            ["simulate", "--dt", "1e308"],
            "dt = 1e+308: give a positive residual scale of at most 1e37",
        ),
        (["simulate", "--text", "x"], "at least two tokens"),
        (["simulate", "--text", ""], "at least two tokens"),
        (["simulate", "--text", "ab", "--file", "x"], "choose one of"),
        (["simulate", "--file", "/does/not/exist"], "cannot read '/does/not/exist'"),
        (["simulate", "--file", "/"], "cannot read '/'"),
        (["simulate", "--device", "cuda:99"], "device 'cuda:99' is not available"),
        (["simulate", "--device", "gpu"], "device 'gpu' is not available"),
        (["simulate", "--out", "/proc/nothing"], "cannot write to directory '/proc/nothing'"),
        (
            ["simulate", "--json", "/does/not/exist/x.json"],
            "--json '/does/not/exist/x.json': there is no directory '/does/not/exist'",
        ),
        (["simulate", "--json", "new/x.json"], "there is no directory 'new'; make it"),
        (
            ["simulate", "--json", "/proc"],
            "--json '/proc' is a directory: give a file in it, as '/proc/simulate.json'",
        ),
        (["simulate", "--json", "/proc/x.json"], "cannot write to directory '/proc'"),
        (
            ["simulate", "--checkpoint", "nodir"],
            "there is no checkpoint 'nodir' that can be read: give one that ctrans saved",
        ),
        (
            ["simulate", "--checkpoint", "/proc/sys"],
            "'/proc/sys' holds no model of ctrans: give one that",
        ),
        (["generate", "--checkpoint", "nodir"], "there is no checkpoint 'nodir'"),
        (["simulate", "--method", "foo"], "midpoint, rk4, torchdiffeq:NAME ("),
        (["simulate", "--width", "40000000", "--heads", "1"], "GB and this machine has"),
        (["convergence", "--method", "torchdiffeq:dopri5"], "only runs with adaptive steps"),
        (["convergence", "--limit", "width"], "unknown limit 'width'"),
        (
            ["convergence", "--limit", "depth", "--method", "rk4"],
            "rk4: the limit depth has methods of its own",
        ),
        (["convergence", "--norm", "batch"], "unknown norm 'batch'"),
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


def test_an_empty_file_is_named(tmp_path):
    (tmp_path / "empty").touch()
    result = run("simulate", "--file", tmp_path / "empty", "--out", tmp_path / "out")
    assert (result.exit_code, "0 tokens" in result.stderr) == (2, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_convergence_measures_and_writes(tmp_path):
    result = run(
        "convergence",
        "--method",
        "heun",
        "--placement",
        "peri",
        "--limit",
        "substeps",
        "--out",
        tmp_path,
    )
    assert result.exit_code == 0, result.output
    (row,) = strict((tmp_path / "convergence.json").read_text())["results"]
    assert row["order"] == pytest.approx(2, abs=0.05)
    assert (tmp_path / "convergence.png").exists()
    assert "2.00" in result.stdout


@pytest.mark.slow
def test_no_number_is_cut_off_where_nothing_bounds_the_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    small = ["--depth", "1", "--width", "16", "--heads", "2", "--context", "8", "--batch", "1"]
    result = run("simulate", "--method", "tsit5", "--rtol", "1e-6", *small, "--json", "/dev/null")
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
