"""A small draw of every campaign; `make campaign` is the whole. Each day another draw: the seed is
in the message.
"""

import ast
import random
import subprocess
import sys

import pytest

from ctrans.cli import COMMANDS, OLD_COMMANDS
from ctrans.interop.config_checks import MOST_PARTS
from tests.campaigns import damaged, hostile
from tests.campaigns.harness import ask
from tests.campaigns.wrong_requests import QUICK

SEED = 2026
SECURITY = [
    *(
        "model code, no architectures",
        "model code, own family",
        "our model.safetensors is a pipe",
        "foreign config.json is a pipe",
    ),
    *(
        "index above",
        "absolute index",
        "packed checkpoint of many parts",
        "foreign n_layer = 10^6",
        "pickled weights of ours 2",
    ),
    *(
        "our weights: null metadata",
        "our config nested 100000",
        "foreign n_head = 0",
        "foreign vocab_size = 0",
    ),
]


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", SECURITY)
def test_a_hostile_file_is_refused_and_nothing_of_it_is_run(name, tmp_path):
    args = hostile.made_in(name, tmp_path / "it")
    answer = ask(args, refused=name not in hostile.MAY_BE_READ)
    assert not answer.faults, answer.said
    assert not list(tmp_path.rglob("was_run"))


@pytest.mark.slow
@pytest.mark.parametrize("rule", [hostile.doubling(60)])
def test_a_tokenizer_that_runs_away_is_stopped_with_its_limit(rule, tmp_path, monkeypatch):
    monkeypatch.setattr("ctrans.interop.directory_tokeniser.SECONDS", 2)
    answer = ask([str(arg) for arg in hostile.tokenizer(normalizer=rule)(tmp_path)])
    assert "it needs more than its limit of 2 seconds and 2.1 GB" in answer.error


def test_limits_are_said_with_the_number_that_exceeds_them(tmp_path):
    answer = ask(hostile.made_in("foreign n_layer = 10^6", tmp_path / "it"))
    assert f"n_layer = 1,000,000: the largest allowed number is {MOST_PARTS:,}" in answer.error


@pytest.mark.slow
def test_damaged_checkpoints_are_read_by_nobody(tmp_path):
    first, second = (
        damaged.make_run(tmp_path / "first"),
        damaged.make_run(tmp_path / "second", seed=1),
    )
    draws = random.Random(SEED)
    for what, accepted in [
        *damaged.flips(first, 40, draws),
        *damaged.exchanges(first, second),
        *damaged.links(first),
    ]:
        assert not accepted, f"seed {SEED}: {what} is read by {accepted}"


SHARES = {
    "kills": 0.01,
    "broken_disk": 0.002,
    "hostile_files": 0.05,
    "requests": 0.005,
    "calls": 0.02,
    "odd_calls": 0.02,
}
"""How much of a campaign is a draw of it, in the order in which one process carries them out: kills
come first (`CAMPAIGNS`).
"""


@pytest.mark.parametrize("times", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_draw_of_every_campaign_finds_nothing(times):
    """In a process of its own: copies of it that are killed must find one that has differentiated
    nothing, and users check no types.
    """
    shares = {name: times * share for name, share in SHARES.items()}
    code = (
        "from tests.campaigns import __main__ as c; from tests.campaigns.harness import Part; "
        f"print({{n: c.carry_out(n, Part({SEED}, s))['faults'] for n, s in {shares}.items()}})"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"seed {SEED}: {done.stderr}"
    found = ast.literal_eval(done.stdout.splitlines()[-1])
    assert {name: faults for name, faults in found.items() if faults} == {}, f"seed {SEED}"


def test_every_command_is_among_those_that_wrong_requests_are_made_to():
    assert QUICK.keys() == COMMANDS.keys() | OLD_COMMANDS.keys()
