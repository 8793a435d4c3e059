"""Checkpoints: whole or not there, whatever happens while they are written; damage is always
seen.
"""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctrans.model.checkpoint import CONFIG_DIGEST
from ctrans.model.sums import SUMS, damage
from ctrans.training import log
from ctrans.training import run_directory as module
from ctrans.training.run_directory import LOCK, RunDirectory
from solvers import ConfigError

FILES = {"config.json": b"{}", "model.safetensors": bytes(range(100)), "train.json": b"state"}


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


def write(directory):
    for name, content in FILES.items():
        (directory / name).write_bytes(content)


def save(store, step, write, *, best, good):
    with store.saving(step, best=best, good=good) as directory:
        write(directory)


def filled(directory, *steps, best=None, good=0):
    store = RunDirectory(directory)
    for step in steps:
        save(store, step, write, best=best, good=good)
    return store


def test_last_and_best_lead_to_their_steps_and_only_the_newest_others_stay(tmp_path):
    store = filled(tmp_path, 1, 2, 3, 4, 5, best=1)
    assert os.readlink(tmp_path / "last") == "checkpoints/step-00000005"
    assert os.readlink(tmp_path / "best") == "checkpoints/step-00000001"
    assert store.steps() == [1, 4, 5]
    assert damage(tmp_path / "last") is None
    assert (tmp_path / "last" / "train.json").read_bytes() == b"state"


@pytest.mark.parametrize("name", ["notes.txt", ".DS_Store", "mine.json", "folder/config.json"])
def test_a_file_that_nothing_reads_is_no_damage(name, tmp_path):
    store = filled(tmp_path, 1, 2)
    path = store.step_directory(2) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("of a user")
    assert damage(tmp_path / "last") is None
    assert store.verified_last().resolve() == store.step_directory(2)


@pytest.mark.parametrize("name", ["adapter.safetensors", "monitor.json", "alarm.json"])
def test_a_file_of_another_checkpoint_is_named_and_no_older_step_is_advised(name, tmp_path):
    store = filled(tmp_path, 1, 2)
    (store.step_directory(2) / name).write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not of this checkpoint.*move it away$"):
        store.verified_last()


def test_sums_without_a_file_of_every_checkpoint_are_damaged(tmp_path):
    store = filled(tmp_path, 1, 2)
    sums_file = store.step_directory(2) / SUMS
    lines = sums_file.read_text().splitlines(keepends=True)
    for left_out in range(len(lines)):
        sums_file.write_text("".join(lines[:left_out] + lines[left_out + 1 :]))
        with pytest.raises(ConfigError, match=rf"{SUMS}' is damaged: it does not list.*step 1"):
            store.verified_last()


@pytest.mark.parametrize("steps", [(), (1,)])
def test_a_full_disk_says_to_resume_only_a_run_with_a_checkpoint(steps, tmp_path):
    store = filled(tmp_path, *steps)

    def fail(directory):
        raise OSError(errno.ENOSPC, "No space left on device")

    advice = "go on with --resume" if steps else "start again"
    with pytest.raises(ConfigError, match=f"free some space, then {advice}$"):
        save(store, 2, fail, best=None, good=0)


class Killed(BaseException):
    """The process ends here: nothing catches it, as nothing catches signal 9."""


def operations(monkeypatch, directory, step):
    """How many calls that change the disk saving makes, and a way to be killed just before the n-th
    of them.
    """
    count, limit = 0, None

    def counted(function):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if limit is not None and count > limit:
                raise Killed
            return function(*args, **kwargs)

        return call

    for name in (
        "rename",
        "replace",
        "fsync",
        "symlink",
        "unlink",
        "rmdir",
        "mkdir",
        "chmod",
        "open",
    ):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    filled(directory, step, best=step)
    total = count

    def killed_after(n, store, step):
        nonlocal count, limit
        count, limit = 0, n
        try:
            save(store, step, write, best=step, good=0)
        except Killed:
            pass
        finally:
            limit = None

    return total, killed_after


@pytest.mark.slow
def test_killed_before_any_operation_a_save_leaves_a_whole_last_and_can_be_repeated(
    tmp_path, monkeypatch
):
    total, killed_after = operations(monkeypatch, tmp_path / "count", 1)
    assert total > 10
    seen = set()
    for n in range(2 * total):
        store = filled(tmp_path / str(n), 1, 2, 3, best=2)
        killed_after(n, store, 4)
        last = int(store.verified_last().resolve().name.removeprefix("step-"))
        seen.add(last)
        store.settle(last, best=last if last == 4 else 2, good=0)
        if last == 3:
            save(store, 4, write, best=4, good=0)
        assert damage(tmp_path / str(n) / "last") is None
        assert damage(tmp_path / str(n) / "best") is None
        assert store.steps() == [3, 4]
    assert seen == {3, 4}


class PowerLoss:
    """What a disk may have when the power fails: of each file what was flushed, of each directory
    any state since it was flushed.

    Directories and files are known by their inodes, since a flushed file stays flushed under a new
    name.
    """

    def __init__(self, place):
        self.place, self.contents, self.listings, self.links = place, {}, {}, set()

    def flush(self, handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        inode = path.stat().st_ino
        if path.is_dir():
            self.listings[inode] = [self.names(path)]
        else:
            self.contents[inode] = path.read_bytes()

    def names(self, directory):
        return {
            each.name: os.readlink(each) if each.is_symlink() else each.stat().st_ino
            for each in directory.iterdir()
        }

    def check(self):
        """Each link of the run that may be on the disk leads to a whole checkpoint there."""
        for directory in (
            self.place,
            *(path for path in self.place.rglob("*") if path.is_dir() and not path.is_symlink()),
        ):
            states, now = (
                self.listings.setdefault(directory.stat().st_ino, [{}]),
                self.names(directory),
            )
            states.extend([now] if now not in states else [])
        for run in self.listings[self.place.stat().st_ino]:
            for name in {"last", "best"} & run.keys():
                generation, step = run[name].split("/")
                for steps in self.listings[run[generation]]:
                    self.check_whole(self.listings[steps[step]])
                self.links.add((name, step))

    def check_whole(self, states):
        for files in states:
            kept = {name: self.contents[inode] for name, inode in files.items()}
            assert kept.pop(SUMS).split()[1::2] == [name.encode() for name in sorted(FILES)]
            assert kept == FILES


def test_a_power_loss_at_any_operation_leaves_links_to_whole_checkpoints(tmp_path, monkeypatch):
    run = tmp_path / "run"
    run.mkdir()
    disk = PowerLoss(run)

    def checked(function):
        def call(*args, **kwargs):
            disk.check()
            return function(*args, **kwargs)

        return call

    for name in ("rename", "replace", "symlink", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, checked(getattr(os, name)))
    monkeypatch.setattr(os, "fsync", checked(disk.flush))
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (5, 5)):
        save(RunDirectory(run), step, write, best=best, good=0)
        disk.check()
    assert disk.links >= {("last", f"step-0000000{step}") for step in range(1, 6)} | {
        ("best", "step-00000001")
    }


@pytest.mark.slow
@given(name=st.sampled_from([*FILES, "SHA256SUMS"]), data=st.data())
def test_any_flipped_bit_or_cut_is_seen_and_another_checkpoint_named(name, data, tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    store = filled(directory, 1, 2)
    path = store.step_directory(2) / name
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, 8 * len(content) - 1))
    if data.draw(st.booleans()):
        content[place // 8] ^= 1 << place % 8
    else:
        del content[place // 8 :]
    path.write_bytes(content)
    with pytest.raises(
        ConfigError,
        match=r"last.*; to go on from step 1: ln -sfn checkpoints/step-00000001 .*/last",
    ):
        store.verified_last()


def test_a_missing_file_is_named_and_without_a_good_checkpoint_that_is_said(tmp_path):
    store = filled(tmp_path, 1)
    (store.step_directory(1) / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model.safetensors' is missing; no other checkpoint"):
        store.verified_last()


def test_a_full_disk_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    store = filled(tmp_path, 7)

    def full(directory):
        write(directory)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        ConfigError,
        match=r"cannot save step 8 .*No space left on device; the checkpoint of step 7 is intact",
    ):
        save(store, 8, full, best=None, good=0)
    assert store.verified_last().resolve() == store.step_directory(7)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_what_a_user_keeps_beside_the_checkpoints_is_left_alone(tmp_path):
    (tmp_path / "checkpoints" / "step-by-step").mkdir(parents=True)
    old = filled(tmp_path, 1, 2, 3, 4)
    new = old.beside()
    assert (new.exists, old.exists) == (False, True)
    save(new, 7, write, best=7, good=7)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-by-step"]
    assert RunDirectory(tmp_path).steps() == [7]


def test_files_that_a_user_puts_into_a_checkpoint_stay_when_it_is_removed(tmp_path):
    store = filled(tmp_path, 1)
    exported = store.step_directory(1) / "exported" / "model.onnx"
    exported.parent.mkdir()
    exported.write_bytes(b"mine")
    for step in (2, 3, 4):
        save(store, step, write, best=None, good=0)
    assert store.steps() == [3, 4]
    others = tmp_path / "checkpoints" / "step-00000001-others"
    files = [path.relative_to(others) for path in others.rglob("*") if path.is_file()]
    assert [str(path) for path in files] == ["exported/model.onnx"]
    assert (others / "exported/model.onnx").read_bytes() == b"mine"


def contents(directory):
    """All that is below the directory, links not followed."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_whatever_a_user_puts_into_a_checkpoint_stays_when_it_is_removed(tmp_path):
    store = filled(tmp_path, 1)
    checkpoint = store.step_directory(1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("mine")
    (checkpoint / "empty").mkdir()
    (checkpoint / "folder" / "deep").mkdir(parents=True)
    (checkpoint / "folder" / SUMS).write_text("mine")
    (checkpoint / "folder" / "deep" / ".hidden").write_text("mine")
    (checkpoint / "alarm.json").write_text("mine")
    (checkpoint / "to a directory").symlink_to(elsewhere)
    (checkpoint / "to nothing").symlink_to("nothing")
    os.mkfifo(checkpoint / "pipe")
    theirs = set(contents(checkpoint)) - {*FILES, SUMS}
    save(store, 2, write, best=None, good=0)
    save(store, 3, write, best=None, good=0)
    (checkpoint / "alarm.json").rename(tmp_path / "alarm.json")  # it would keep the checkpoint
    theirs.remove("alarm.json")
    save(store, 4, write, best=None, good=0)
    assert store.steps() == [3, 4]
    others = tmp_path / "checkpoints" / "step-00000001-others"
    assert set(contents(others)) == theirs
    assert (elsewhere / "file").read_text() == "mine"


def test_directories_of_users_with_names_of_checkpoints_stay_and_are_none(tmp_path):
    store = filled(tmp_path, 1)
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-00000002", ".step-00000003", "step-00000005"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "mine.txt").write_text("mine")
    (checkpoints / "step-00000000").symlink_to(tmp_path)
    copy = checkpoints / "step-00000004"
    shutil.copytree(store.step_directory(1), copy)
    (copy / "train.json").write_text('{"progress": {"step": 1}}')
    before = contents(checkpoints)
    assert store.steps() == [1]
    store.prune(1, set())
    assert contents(checkpoints) == before
    for step in (3, 5):
        save(store, step, write, best=None, good=0)
    assert store.steps() == [3, 5]
    assert (checkpoints / "step-00000002" / "mine.txt").is_file()
    assert (checkpoints / "step-00000003-others" / "mine.txt").is_file()
    assert (checkpoints / "step-00000005-others" / "mine.txt").is_file()
    assert copy.is_dir()


def test_checkpoints_of_another_program_are_none_and_stay(tmp_path):
    store = filled(tmp_path, 1)
    foreign = store.step_directory(2)
    foreign.mkdir()
    content = safetensors.torch.save({"weight": torch.zeros(1)}, {"format": "pt"})
    (foreign / "model.safetensors").write_bytes(content)
    (foreign / "config.json").write_text('{"model_type": "llama"}')
    (foreign / "train.json").write_text('{"lr": 1e-3}')
    before = contents(foreign)
    assert store.steps() == [1]
    save(store.beside(), 3, write, best=3, good=3)
    assert contents(foreign) == before


@pytest.mark.parametrize("whole", ["SHA256SUMS", "model.safetensors", "train.json"])
def test_a_damaged_checkpoint_is_still_of_its_run_by_any_whole_file_that_names_it(whole, tmp_path):
    store = filled(tmp_path, 1)
    checkpoint = store.step_directory(1)
    content = {
        "SHA256SUMS": (checkpoint / SUMS).read_bytes(),
        "train.json": b'{"progress": {"step": 1}}',
        "model.safetensors": safetensors.torch.save(
            {"weight": torch.zeros(1)}, {CONFIG_DIGEST: "that of the configuration"}
        ),
    }
    for name in content:
        (checkpoint / name).write_bytes(content[name] if name == whole else b"damaged")
    assert store.steps() == [1]
    save(store.beside(), 3, write, best=3, good=3)
    assert not checkpoint.exists()


def test_an_unfinished_checkpoint_goes_and_what_a_user_put_into_it_stays(tmp_path):
    store = filled(tmp_path, 1)
    unfinished = store.temporary(2)
    for name in ("config.json", ".model.safetensors.1234", "optimiser/.metadata"):
        (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).write_text("")
    (unfinished / "mine.txt").write_text("mine")
    store.temporary(3).mkdir()
    store.prune(1, set())
    assert contents(tmp_path / "checkpoints") == [
        "step-00000001",
        *sorted(f"step-00000001/{name}" for name in (*FILES, SUMS)),
        "step-00000002-others",
        "step-00000002-others/mine.txt",
    ]


def test_hidden_files_of_users_beside_a_run_stay(tmp_path):
    names = [".last", ".best", ".backup.log.jsonl", ".2025-run.monitor.jsonl"]
    for name in names:
        (tmp_path / name).write_text("mine")
    store = filled(tmp_path, 1, 2)
    save(store.beside(), 1, write, best=1, good=1)
    log.bring_back(tmp_path, "checkpoints-2")
    assert [(tmp_path / name).read_text() for name in names] == ["mine"] * 4
    hidden = {path.name for path in tmp_path.glob(".*")}
    assert hidden == set(names), "nothing else is left"


@pytest.mark.parametrize("name", [*log.RECORDS, *log.RESULTS])
def test_files_of_users_with_the_names_of_what_a_run_sets_aside_stay(name, tmp_path):
    paths = [tmp_path / f".{generation}.{name}" for generation in log.GENERATIONS]
    for path in paths:
        path.write_text("mine")
    log.set_aside(tmp_path, *log.GENERATIONS)
    log.bring_back(tmp_path, log.GENERATIONS[0])
    assert [path.read_text() for path in paths] == ["mine", "mine"]
    assert not (tmp_path / name).exists()


def test_a_users_file_and_the_log_that_takes_its_name_are_both_kept(tmp_path):
    """A picture too, whose name is a run's only beside the run's result."""
    first, second = log.GENERATIONS
    picture = log.RESULTS[1]
    contents_of_run = {
        log.LOG: '{"step": 0, "run": "this", "validation_loss": 5.0}\n',
        log.MONITOR: '{"header": {"model": "", "places": []}}\n',
        log.RESULT: '{"command": "train"}',
        picture: "picture",
    }
    for name, content in contents_of_run.items():
        (tmp_path / name).write_text(content)
        (tmp_path / f".{first}.{name}").write_text("mine")
    log.set_aside(tmp_path, first, second)
    for name in contents_of_run:
        assert (tmp_path / f"{first}.{name}-others").read_text() == "mine"
        assert not (tmp_path / name).exists()
    # of the new run, which is killed
    (tmp_path / log.LOG).write_text('{"step": 0, "run": "that", "validation_loss": 5.0}\n')
    log.set_aside(tmp_path, first, second)
    log.bring_back(tmp_path, first)
    for name, content in contents_of_run.items():
        assert (tmp_path / name).read_text() == content


def test_sums_are_in_the_format_of_sha256sum(tmp_path):
    filled(tmp_path, 1)
    lines = (tmp_path / "last" / module.SUMS).read_text().splitlines()
    assert [line[64:] for line in lines] == [f"  {name}" for name in sorted(FILES)]


def test_a_last_that_leads_nowhere_is_still_a_run(tmp_path):
    store = filled(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-00000002").rename(tmp_path / "elsewhere")
    assert store.exists
    with pytest.raises(ConfigError, match="to go on from step 1"):
        store.verified_last()


@pytest.mark.parametrize("form", ["missing", "a copy", "a file"])
def test_without_its_link_a_run_is_still_one_and_the_advice_mends_it(form, tmp_path):
    store = filled(tmp_path / "a run", 1, 2)
    last = store.directory / "last"
    last.unlink()
    if form == "a copy":
        shutil.copytree(store.step_directory(2), last)
    if form == "a file":
        last.write_text("mine")
    assert store.exists
    with pytest.raises(ConfigError, match="to go on from step 2: ") as error:
        store.verified_last()
    subprocess.run(str(error.value).partition("step 2: ")[2], shell=True, check=True)
    assert store.verified_last().resolve() == store.step_directory(2)
    assert store.steps() == [1, 2]


def test_the_first_checkpoint_of_a_run_needs_no_link_to_be_gone_on_from(tmp_path):
    store = filled(tmp_path, 0)
    (tmp_path / "last").unlink()
    assert store.verified_last() == store.step_directory(0)


@pytest.mark.parametrize("place", ["absolute", "relative"])
def test_a_last_that_leads_to_another_run_is_named_and_the_advice_mends_it(place, tmp_path):
    filled(tmp_path / "other", 1, 2)
    store = filled(tmp_path / "run", 1, 2)
    last = tmp_path / "run" / "last"
    last.unlink()
    target = tmp_path / "other" / "checkpoints" / "step-00000002"
    last.symlink_to(target if place == "absolute" else os.path.relpath(target, last.parent))
    with pytest.raises(ConfigError, match=r"last' leads to .*other.*no checkpoint of this") as told:
        store.verified_last()
    subprocess.run(str(told.value).partition("step 2: ")[2], shell=True, check=True)
    assert store.verified_last().resolve() == store.step_directory(2)


def test_an_absolute_last_within_the_run_is_the_same(tmp_path):
    store = filled(tmp_path, 1, 2)
    (tmp_path / "last").unlink()
    (tmp_path / "last").symlink_to(store.step_directory(2).absolute())
    assert store.verified_last().resolve() == store.step_directory(2)


def test_a_directory_without_a_run_is_named_on_resume(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no run in .*tpyo' to resume"):
        RunDirectory(tmp_path / "tpyo").verified_last()


def test_overwriting_removes_copies_of_checkpoints_and_nothing_that_a_user_made(tmp_path):
    store = filled(tmp_path, 1, 2, best=1)
    (tmp_path / "best").unlink()
    (tmp_path / "best").write_text("mine")
    with pytest.raises(ConfigError, match="best' was not made by a run: move it away"):
        store.beside()
    assert (store.steps(), (tmp_path / "best").read_text()) == ([1, 2], "mine")
    (tmp_path / "best").unlink()
    shutil.copytree(store.step_directory(1), tmp_path / "best")
    save(store.beside(), 5, write, best=5, good=5)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints-2", "last", "best"}
    assert (tmp_path / "best").is_symlink()


@pytest.mark.slow
def test_killed_before_any_operation_a_run_that_overwrites_leaves_one_that_is_whole(
    tmp_path, monkeypatch
):
    total, killed_after = operations(monkeypatch, tmp_path / "count", 0)
    seen = set()
    for n in range(3 * total):
        filled(tmp_path / str(n), 1, 2, 3, best=2)
        killed_after(n, RunDirectory(tmp_path / str(n)).beside(), 0)
        store = RunDirectory(tmp_path / str(n))
        last = int(store.verified_last().resolve().name.removeprefix("step-"))
        seen.add(last)
        store.settle(last, best={0: 0, 3: 2}[last], good=last)  # as --resume does
        assert damage(store.directory / "last") is damage(store.directory / "best") is None
        assert store.steps() == {0: [0], 3: [2, 3]}[last]
        assert len(list(store.directory.glob("checkpoints*"))) == 1
        if last == 3:
            save(store.beside(), 0, write, best=0, good=0)
            assert RunDirectory(store.directory).steps() == [0]
    assert seen == {0, 3}


@pytest.mark.slow
@given(
    steps=st.lists(st.integers(1, 30), unique=True, min_size=1, max_size=6).map(sorted),
    good=st.integers(0, 30),
)
def test_the_newest_checkpoint_up_to_the_last_good_evaluation_is_kept_and_gone_back_to(
    steps, good, tmp_path_factory
):
    directory = tmp_path_factory.mktemp("run")
    store = filled(directory, *steps, good=good)
    expected = max((step for step in steps if step <= good), default=steps[-1])
    store.go_back(good)
    assert (directory / "last").resolve() == store.step_directory(expected)
    assert damage(directory / "last") is None


def test_best_never_leads_to_an_absent_checkpoint(tmp_path):
    store = filled(tmp_path, 1, 2, 3, best=3)
    store.settle(2, best=1, good=0)
    assert os.readlink(tmp_path / "best") == "checkpoints/step-00000002"


def test_a_second_run_in_the_same_directory_is_refused_until_the_first_ends(tmp_path):
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    with (
        first.locked(),
        pytest.raises(ConfigError, match="another process is training in"),
        second.locked(),
    ):
        pass
    with second.locked():
        pass


def moved_away(directory):
    directory.rename(directory.with_name("moved"))


def moved_away_and_replaced(directory):
    moved_away(directory)
    filled(directory, 7)
    (directory / LOCK).touch()


def removed(directory):
    shutil.rmtree(directory)


def without_its_lock(directory):
    (directory / LOCK).unlink()


def locked_by_another(directory):
    (directory / LOCK).unlink()
    (directory / LOCK).touch()


AWAY = [moved_away, moved_away_and_replaced, removed, without_its_lock, locked_by_another]


def content(directory):
    """The files below a directory with their bytes, and its links."""
    paths = [path for path in directory.rglob("*") if path.is_symlink() or path.is_file()]
    return {path: os.readlink(path) if path.is_symlink() else path.read_bytes() for path in paths}


@pytest.mark.parametrize("make", AWAY)
@pytest.mark.parametrize(
    "write",
    [
        lambda store: save(store, 3, lambda directory: None, best=1, good=0),
        lambda store: store.settle(2, best=1, good=0),
        lambda store: store.go_back(1),
        lambda store: store.check_ours(),
    ],
    ids=["save", "settle", "go back", "check"],
)
def test_a_run_writes_nothing_where_its_directory_is_no_more(make, write, tmp_path):
    directory = tmp_path / "run"
    filled(directory, 1, 2)
    with RunDirectory(directory).locked() as store:
        make(directory)
        before = content(tmp_path)
        with pytest.raises(
            ConfigError, match=r"run' is no longer the directory .* go on with --res"
        ):
            write(store)
        assert content(tmp_path) == before


@pytest.mark.parametrize("make", AWAY)
def test_a_checkpoint_that_is_being_written_is_not_put_into_another_run(make, tmp_path):
    directory = tmp_path / "run"
    filled(directory, 1, 2)
    after = {}

    def write(temporary):
        make(directory)
        after.update(content(tmp_path))

    with (
        RunDirectory(directory).locked() as store,
        pytest.raises(ConfigError, match="is no longer the directory"),
    ):
        save(store, 3, write, best=1, good=0)
    assert content(tmp_path) == after


def test_a_directory_that_another_name_leads_to_is_still_the_same(tmp_path):
    directory = tmp_path / "run"
    filled(directory, 1)
    with RunDirectory(directory).locked() as store:
        moved_away(directory)
        directory.symlink_to("moved")
        save(store, 2, write, best=1, good=0)
    assert RunDirectory(tmp_path / "moved").steps() == [1, 2]


def test_a_link_that_cannot_be_replaced_is_one_sentence_and_leaves_no_litter(tmp_path):
    store = filled(tmp_path, 1)
    (tmp_path / "last").unlink()
    (tmp_path / "last").mkdir()
    with pytest.raises(
        ConfigError, match=r"cannot write to directory .*the checkpoint of step 1 is intact"
    ):
        store.go_back(1)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "last", "best"}


def test_a_lock_that_is_a_directory_is_named(tmp_path):
    (tmp_path / LOCK).mkdir()
    with pytest.raises(ConfigError, match=r"it is a directory.*: move it away$"):
        RunDirectory(tmp_path).locked().__enter__()


def test_a_lock_that_is_a_pipe_is_named_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / LOCK)
    with pytest.raises(ConfigError, match="it is a pipe"), RunDirectory(tmp_path).locked():
        pass
    assert os.listdir(tmp_path) == [LOCK]
