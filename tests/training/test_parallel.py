"""Several processes, as torchrun starts them, against one; and the parts of that which one process
can show.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrans.model.sums import damage
from ctrans.training import log
from ctrans.training.evaluation import shares
from ctrans.training.parallel import PARALLEL, get_parallel
from ctrans.training.settings import TrainConfig
from solvers import GRADIENTS, ConfigError

# a constant learning rate, so that the number of iterations decides nothing but where a run ends
CONSTANT = ["--learning-rate", "1e-2", "--min-learning-rate", "1e-2", "--warmup", "0"]
TINY = [
    "--depth",
    "2",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "8",
    "--batch",
    "4",
    "--accumulate",
    "2",
    *CONSTANT,
]
EVALUATION = ["--eval-every", "3", "--eval-windows", "7", "--save-every", "100"]
COMPARED = ("loss", "gradient_norm", "validation_loss", "growth", "largest")


def train(processes, *args):
    """The command in that many processes of their own."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        if processes > 1
        else []
    )
    done = subprocess.run(
        [sys.executable, *launch, "-m", "ctrans", "train", *TINY, *EVALUATION, *map(str, args)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done


def differences(first, second):
    """The largest relative difference of each quantity in two logs."""
    logs = [[row for row in log.read(path) if "settings" not in row] for path in (first, second)]
    assert [row["step"] for row in logs[0]] == [row["step"] for row in logs[1]]
    return {
        name: max(
            abs(a[name] - b[name]) / abs(a[name])
            for a, b in zip(*logs, strict=True)
            if name in a.keys() & b.keys()
        )
        for name in COMPARED
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "args",
    [
        ["--parallel", "ddp"],
        ["--parallel", "fsdp"],
        [
            "--parallel",
            "ddp",
            "--placement",
            "post",
            "--method",
            "heun",
            "--gradient",
            "checkpoint",
            "--kinetic",
            "0.1",
        ],
        [
            "--parallel",
            "fsdp",
            "--placement",
            "post",
            "--method",
            "heun",
            "--gradient",
            "checkpoint",
            "--kinetic",
            "0.1",
        ],
        ["--parallel", "ddp", "--method", "heun", "--gradient", "reversible"],
        ["--parallel", "ddp", "--method", "rk4", "--steps", "2", "--gradient", "adjoint"],
        ["--parallel", "fsdp", "--depth-weights", "linear"],
        # each process balances its own tokens, so that this term alone is not one process's
        [
            "--parallel",
            "fsdp",
            "--parallel-blocks",
            "--ffn",
            "moe",
            "--balance",
            "0",
            "--bias-rate",
            "0.01",
        ],
    ],
    ids=" ".join,
)
def test_two_processes_have_the_losses_of_one(args, tmp_path):
    train(1, *args[2:], "--iterations", 6, "--out", tmp_path / "one")
    train(2, *args, "--iterations", 6, "--out", tmp_path / "two")
    assert max(differences(tmp_path / "one", tmp_path / "two").values()) < 1e-5


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_and_kinds_of_processes(tmp_path):
    train(1, "--iterations", 10, "--out", tmp_path / "one")
    stages = [(1, "none"), (2, "fsdp"), (1, "none"), (2, "fsdp"), (2, "ddp")]
    for k, (processes, kind) in enumerate(stages, 1):
        train(
            processes,
            *(["--resume"] if k > 1 else []),
            "--parallel",
            kind,
            "--iterations",
            2 * k,
            "--out",
            tmp_path / "many",
        )
        assert damage(tmp_path / "many" / "last") is None
    assert max(differences(tmp_path / "one", tmp_path / "many").values()) < 1e-5


@pytest.mark.slow
def test_a_killed_process_is_replaced_and_the_run_goes_on_from_its_last_checkpoint(tmp_path):
    sizes = [*TINY, *EVALUATION[:-1], "50", "--iterations", "200"]
    train(1, *sizes, "--out", tmp_path / "one")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    command = [
        *launch,
        "-m",
        "ctrans",
        "train",
        *sizes,
        "--parallel",
        "ddp",
        "--resume",
        "--out",
        tmp_path / "two",
    ]
    process = subprocess.Popen(
        [str(part) for part in command],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    path = tmp_path / "two" / "log.jsonl"
    while process.poll() is None and (not path.exists() or path.read_text().count("\n") < 70):
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert (
        max(differences(tmp_path / "one", tmp_path / "two").values()) < 1e-3
    )  # rounding grows over 200 iterations


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_windows_are_shared_each_once_in_equally_many_rounds(count, size, world):
    rounds = [list(shares(count, size, rank, world)) for rank in range(world)]
    assert sorted(window for mine in rounds for part in mine for window in part) == list(
        range(count)
    )
    assert len({len(mine) for mine in rounds}) == 1
    assert max(len(part) for mine in rounds for part in mine) <= size


@pytest.mark.parametrize("gradient", sorted(GRADIENTS))
def test_fsdp_takes_the_gradients_that_gather_weights_again(gradient):
    config = TrainConfig(gradient=gradient)
    for name in ("none", "ddp"):
        assert get_parallel(name, config) is PARALLEL[name]
    if gradient in ("backprop", "checkpoint"):
        assert get_parallel("fsdp", config) is PARALLEL["fsdp"]
    else:
        with pytest.raises(ConfigError, match=f"gradient '{gradient}'"):
            get_parallel("fsdp", config)


def test_fsdp_has_no_theta():
    with pytest.raises(ConfigError, match="leave out --theta"):
        get_parallel("fsdp", TrainConfig(theta=True))
