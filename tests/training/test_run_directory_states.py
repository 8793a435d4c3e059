"""A run's directory under any order of what may happen to it: begun, killed, gone on with,
overwritten, damaged, copied, used twice.

Training, checkpoints and logs are the real ones. A kill is an exception that nothing catches, after
which no file operation does anything.
"""

import errno
import functools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ctrans.model.checkpoint import find_model, load
from ctrans.model.config import GPTConfig
from ctrans.model.sums import SUMS, damage
from ctrans.training import log
from ctrans.training.run_directory import RunDirectory
from ctrans.training.settings import TrainConfig
from ctrans.training.train import resume, train
from solvers import ConfigError
from tests.campaigns.damaged import MODEL, TEXT
from tests.campaigns.disk import BrokenDisk, raising

SETTINGS = {
    "batch": 2,
    "iterations": 5,
    "eval_every": 2,
    "save_every": 1,
    "eval_windows": 1,
    "warmup": 1,
}
SEEDS = st.sampled_from([0, 1])
OPERATIONS = 900
"""About as many file operations as a run that overwrites another makes; a kill after them all is
none.
"""
KILLS = st.none() | st.integers(1, OPERATIONS)


class Killed(BaseException):
    """The process ends here."""


def kill(path):
    raise Killed


def begin(place, seed, *, overwrite=False):
    train(
        GPTConfig(**MODEL), TrainConfig(**SETTINGS, seed=seed), TEXT, out=place, overwrite=overwrite
    )


def tensors(checkpoint):
    """What identifies a checkpoint: its step, and the hashes of its tensors."""
    step = json.loads((checkpoint / "train.json").read_text())["progress"]["step"]
    return step, tuple(
        line
        for line in (checkpoint / SUMS).read_text().splitlines()
        if line.endswith(".safetensors")
    )


def rows_of(place):
    """What the log says of each iteration, but for its time."""
    return [(row["step"], row.get("loss"), row.get("validation_loss")) for row in log.read(place)]


@functools.cache
def undisturbed(seed):
    """The checkpoints and the log of a run that nobody disturbs."""
    met = set()
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        settle = RunDirectory.settle

        def noting(store, last, **kwargs):
            met.add(tensors(store.step_directory(last)))
            settle(store, last, **kwargs)

        patch.setattr(RunDirectory, "settle", noting)
        begin(Path(place), seed)
        return met, rows_of(Path(place))


class Life(RuleBasedStateMachine):
    """What may happen to the directory. `seed` is of the run in it, None for none; `log_whole` is
    whether nobody damaged its log.
    """

    @initialize()
    def empty(self):
        self.top = Path(tempfile.mkdtemp())
        self.place, self.seed, self.copies, self.log_whole = self.top / "run", None, 0, True
        undisturbed(0), undisturbed(1)

    def teardown(self):
        shutil.rmtree(self.top)

    @property
    def store(self):
        return RunDirectory(self.place)

    def whole_ones(self):
        """How many checkpoints are whole."""
        return sum(damage(self.store.step_directory(step)) is None for step in self.store.steps())

    def seed_of_last(self):
        """Whose checkpoint `last` is; it is whole."""
        found = tensors(self.store.verified_last())
        (seed,) = [seed for seed in (0, 1) if found in undisturbed(seed)[0]]
        return seed

    def act(self, action, ends, at, error=None):
        """Does it, killed or with an error of the disk at a file operation. It ends in a run of the
        seeds `ends`, or leaves the earlier.
        """
        before = self.seed
        try:
            with BrokenDisk(
                self.place,
                at or 0,
                kill if error is None else raising(error),
                lasting=error is None,
            ):
                action()
            done = True
        except (Killed, ConfigError, OSError):  # commands say both errors in a line
            done = False
            assert at is not None
        self.seed = self.seed_of_last() if self.store.exists else None
        assert self.seed in ends if done else self.seed in {before, *ends}
        if done:
            self.check_end()

    def check_end(self):
        """The run is done, in the bits of an undisturbed one."""
        checkpoints, rows = undisturbed(self.seed)
        assert tensors(self.store.verified_last()) == max(checkpoints)
        assert (
            rows_of(self.place) == rows if self.log_whole else set(rows_of(self.place)) <= set(rows)
        )
        assert sorted(path.name for path in self.place.glob(".*")) == [".lock"], (
            "nothing unfinished stays"
        )
        assert sum((self.place / name).exists() for name in ("checkpoints", "checkpoints-2")) == 1

    @precondition(lambda self: self.seed is None)
    @rule(seed=SEEDS, at=KILLS)
    def begins(self, seed, at):
        self.log_whole = True
        self.act(lambda: begin(self.place, seed), {seed}, at)

    @precondition(lambda self: self.seed is not None)
    @rule(at=KILLS)
    def goes_on(self, at):
        self.act(lambda: resume(self.place, TEXT), {self.seed}, at)

    @precondition(lambda self: self.seed is not None)
    @rule(seed=SEEDS, at=KILLS)
    def is_overwritten(self, seed, at):
        before = self.log_whole
        self.log_whole = True
        self.act(lambda: begin(self.place, seed, overwrite=True), {seed}, at)
        self.log_whole = before or at is None

    @rule(
        seed=SEEDS, at=st.integers(1, OPERATIONS), error=st.sampled_from([errno.EIO, errno.ENOSPC])
    )
    def meets_a_disk_that_fails(self, seed, at, error):
        if self.seed is None:
            self.act(lambda: begin(self.place, seed), {seed}, at, error)
        else:
            self.act(lambda: resume(self.place, TEXT), {self.seed}, at, error)

    @precondition(lambda self: self.seed is not None)
    @rule(
        cut=st.integers(0, 40),
        noise=st.sampled_from(
            [b"", b"\0\xff\n", b'{"step": 1}\n', b'{"step": 99, "loss": "x"}\n[1]\n']
        ),
    )
    def has_its_log_damaged(self, cut, noise):
        path = self.place / log.LOG
        if path.exists():
            whole = path.read_bytes()
            path.write_bytes(whole[: max(0, len(whole) - cut)] + noise)
            self.log_whole = False

    @precondition(lambda self: self.seed is not None and self.whole_ones() > 1)
    @rule(
        name=st.sampled_from(
            ["model.safetensors", "optimiser.safetensors", "train.json", "config.json", SUMS]
        ),
        at=st.integers(0, 10**6),
    )
    def has_its_last_checkpoint_damaged(self, name, at):
        path = self.store.last / name
        whole = bytearray(path.read_bytes())
        whole[at % len(whole)] ^= 1
        path.write_bytes(whole)
        self.follows_the_advice()

    @precondition(lambda self: self.seed is not None)
    @rule(links=st.booleans())
    def is_copied(self, links):
        self.copies += 1
        place = self.top / f"copy-{self.copies}"
        shutil.copytree(self.place, place, symlinks=links)
        self.place = place
        if not links and not self.store.last.is_symlink() and self.store.last.name == "last":
            self.follows_the_advice()

    def follows_the_advice(self):
        """What the refusal says to do makes the run readable again."""
        with pytest.raises(ConfigError, match="to go on from step") as error:
            resume(self.place, TEXT)
        advice = str(error.value).partition("to go on from step ")[2].partition(": ")[2]
        subprocess.run(advice, shell=True, check=True)
        assert self.seed_of_last() == self.seed

    @precondition(lambda self: self.seed is not None)
    @rule(seed=SEEDS)
    def is_used_twice(self, seed):
        with self.store.locked():
            for act in (
                lambda: resume(self.place, TEXT),
                lambda: begin(self.place, seed, overwrite=True),
            ):
                with pytest.raises(ConfigError, match="another process is training"):
                    act()

    @precondition(lambda self: self.seed is not None)
    @rule()
    def is_pruned(self):
        step = int(self.store.verified_last().resolve().name.removeprefix("step-"))
        best = self.place / "best"
        needed = {int(best.resolve().name.removeprefix("step-"))} if best.is_symlink() else set()
        self.store.prune(step, needed)
        assert {step, *needed} <= set(self.store.steps())

    @invariant()
    def is_whole_and_of_one_run(self):
        rows = rows_of(self.place)
        steps = [step for step, _, _ in rows]
        if self.log_whole:
            assert steps == sorted(set(steps)), "the steps of the log increase"
            assert any(set(rows) <= set(undisturbed(seed)[1]) for seed in (0, 1)), (
                "its rows are of one run"
            )
        if self.seed is None:
            return
        assert self.seed_of_last() == self.seed
        for step in self.store.steps():
            checkpoint = self.store.step_directory(step)
            assert (
                damage(checkpoint) is not None or tensors(checkpoint) in undisturbed(self.seed)[0]
            )
        try:
            best = find_model(self.place)
        except ConfigError:  # as it is said: missing, or of the run that was overwritten
            return
        if damage(best) is None:
            assert load(best).config.width == MODEL["width"]
            assert tensors(best) in undisturbed(self.seed)[0]


@pytest.mark.parametrize(
    ("examples", "steps"), [(2, 8), pytest.param(200, 20, marks=pytest.mark.slow)]
)
def test_a_run_stays_whole_whatever_happens_to_its_directory(examples, steps, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    run_state_machine_as_test(
        Life,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
