"""Studies whose study.sqlite is damaged, cut, of another schema, on a disk that fails, or used by
two processes; and that are killed.

The command says so in a line, or shows no figure but those of whole runs; and the same command then
does the rest of the study, to the outcomes of one that nobody disturbed. No run is trained here but
those of that one: an engine gives their results again.
"""

import contextlib
import ctypes
import dataclasses
import errno
import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from unittest import mock

from matplotlib.figure import Figure

from ctrans.cli import study as command
from ctrans.study.carry_out import carry_out_study, prospect
from ctrans.study.database import FILE, open_store
from ctrans.study.database_tables import SCHEMA
from ctrans.study.outcomes import Floor, outcomes_of
from ctrans.study.study_file import read_study
from tests.campaigns import kills
from tests.campaigns.damaged import TEXT
from tests.campaigns.harness import Answer, Part, ask
from tests.study.helpers import to_format_1

TOML = """
file = "text"
learning_rates = [1e-3, 1e-2]
[base]
depth = 1
width = 8
heads = 2
context = 8
iterations = 4
eval_every = 2
eval_windows = 2
batch = 2
[vary]
placement = ["pre", "peri"]
"""
OUT = "out"
STUDY = ["study", "mine.toml", "--out", OUT, "--json", "-"]
REPORT = [*STUDY, "--report"]
ODD = [
    None,
    0,
    1,
    -7,
    2**62,
    0.5,
    1e300,
    "",
    "x",
    "1",
    "null",
    "[]",
    "{}",
    '{"a": 1}',
    "[1]",
    b"",
    b"\xff\xfe",
    "\x1b[2J",
    "é" * 9,
]
UNREADABLE = "CAST(x'ff80c3' AS TEXT)"
SCHEMAS = {
    "no runs": "DELETE FROM runs",
    "no entries": "DELETE FROM about",
    "no table of runs": "DROP TABLE runs",
    "no table of entries": "DROP TABLE about",
    "a renamed table": "ALTER TABLE runs RENAME TO rums",
    "a renamed column": "ALTER TABLE runs RENAME COLUMN seconds TO second",
    "a column more": "ALTER TABLE runs ADD COLUMN more",
    "no digests": "ALTER TABLE runs DROP COLUMN digest",
    "an index": 'CREATE INDEX it ON runs ("case")',
    "a table more": "CREATE TABLE it (a)",
    "a view instead": "ALTER TABLE runs RENAME TO it; CREATE VIEW runs AS SELECT * FROM it",
    "a trigger that raises": (
        "CREATE TRIGGER it BEFORE INSERT ON runs BEGIN SELECT RAISE(ABORT, 'no'); END; DELETE FROM"
        " runs"
    ),
    "a run twice": "INSERT INTO runs SELECT * FROM runs WHERE rowid = 1",
    "runs exchanged": (
        "UPDATE runs SET curve = (SELECT curve FROM runs AS it WHERE it.rowid = 5 - runs.rowid)"
    ),
    "a later format": "UPDATE about SET value = '3' WHERE name = 'format'",
    "an earlier format": "UPDATE about SET value = '1' WHERE name = 'format'",
    "UTF-16": "PRAGMA encoding = 'UTF-16'; VACUUM",
    "pages of 512 bytes": "PRAGMA page_size = 512; VACUUM",
    "WAL": "PRAGMA journal_mode = WAL",
}
"""Changes of the file by SQL."""
SILENT = {"no runs", "a trigger that raises"}
"""Changes after which runs lack, as in a study that did not end."""
FILES = {
    "empty": b"",
    "text": TEXT,
    "a header alone": b"SQLite format 3\0",
    "zeros": bytes(8192),
}
LIBRARY = Path(__file__).with_name("library_disk.c")
FLIPS, CUTS, TOGETHER = 1_500, 100, 20
"""How much of each is the whole; of odd values, of schemas and of operations of the disk it is all.
"""


class Undisturbed:
    """A study that ended, in a directory `place` that is also the working one: its file, runs and
    outcomes.
    """

    def __init__(self, place, act=lambda act: kills.in_a_copy(act)[0]):
        """`act` trains: in a copy of this process, which then never differentiates itself."""
        self.place, self.directory, self.path = place, place / OUT, place / OUT / FILE
        (place / "text").write_bytes(TEXT)
        (place / "mine.toml").write_text(TOML)
        if not self.path.exists():
            assert act(self._train) in (0, None)
        self.whole = self.path.read_bytes()
        with open_store(self.directory, write=False) as store:
            self.runs = store.runs()
        assert len(self.runs) == 4
        sizes = range(len(self.runs) + 1)
        self.parts = [
            list(part) for size in sizes for part in itertools.combinations(self.runs, size)
        ]
        self.placed(self.whole)
        to_format_1(self.path)
        self.old = self.path.read_bytes()
        self.trained, self.pause = 0, 0.0

    def _train(self):
        study = read_study(self.place / "mine.toml")

        def here(jobs):
            for job in jobs:
                yield job, job.carry_out()

        with open_store(self.directory) as store:
            assert carry_out_study(prospect(study, store), store, here)

    def engine(self, workers, ray):
        """Gives the results that there were, and notes how many were stored."""

        def known(jobs):
            given = {
                (each.run.case, each.run.training.learning_rate): each.result for each in self.runs
            }
            for job in jobs:
                time.sleep(self.pause)
                yield job, [given[run.case, run.training.learning_rate] for run in job.runs]
                self.trained += len(job.runs)
                (self.place / "stored").write_text(str(self.trained))

        return known

    def changed(self, script):
        """The file of the study after a script of SQL."""
        self.placed(self.whole)
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            connection.executescript(script)
        return self.path.read_bytes()

    def dumped(self):
        """All values of the file."""
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            connection.text_factory = bytes
            return [
                connection.execute(f"SELECT *, rowid FROM {table}").fetchall() for table in SCHEMA
            ]

    def placed(self, content):
        """The study's directory has this file and nothing else."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir()
        if content is not None:
            self.path.write_bytes(content)

    def ask(self, args):
        """The answer, with the engine that trains nothing, and without pictures."""
        with (
            mock.patch.object(command, "engine", self.engine),
            mock.patch.object(Figure, "savefig", mock.Mock()),
        ):
            answer = ask(args)
        named = [
            line
            for line in answer.error.splitlines()
            if line.startswith(f"ctrans: {FILE} is damaged: ")
        ]
        if answer.code == 2 and len(named) + 1 == answer.error.count(
            "\n"
        ):  # one line for each damaged row, and one for the end
            answer.faults = [fault for fault in answer.faults if fault != "more than a line"]
        return answer

    def wrong(self, *, silent=False, figures=True, stored=0):
        """What is wrong with the study as it lies there, in words, and how it was taken: "whole",
        "repaired" or "refused".

        `silent`: runs may lack without a word. `figures`: whether damage can be seen, which in
        format 1 it mostly cannot. `stored`: so many runs have to be there.
        """
        alone, faults = [path.name for path in self.directory.glob(f"{FILE}*")] == [FILE], []
        before = self.path.read_bytes() if alone else b""
        report = self.ask(REPORT)
        faults += [f"--report: {report.said}"] if report.faults else []
        left = self.shown(report, faults, figures) if report.code == 0 else []
        if (
            report.code == 0
            and len(left) < len(self.runs)
            and "damaged" not in report.error
            and not silent
        ):
            faults.append(f"--report leaves {len(self.runs) - len(left)} runs out without a word")
        if stored and len(left) < stored:
            faults.append(f"{stored} runs were stored, and --report has {len(left)}: {report.said}")
        if alone and self.path.read_bytes() != before:
            faults.append("--report changed the file")
        self.trained = 0
        again = self.ask(STUDY)
        faults += [f"the same command: {again.said}"] if again.faults else []
        if again.code == 2:
            return faults, "refused"
        if not figures:
            return faults, "read"
        if report.code == 0 and self.trained != len(self.runs) - len(left):
            faults.append(
                f"{self.trained} runs were repeated, and {len(self.runs) - len(left)} were left out"
            )
        repeated, last = self.trained, self.ask(REPORT)
        if last.code != 0 or last.error or len(self.shown(last, faults, figures)) != len(self.runs):
            faults.append(f"the study did not end, or not for good: {again.said}, {last.said}")
        with contextlib.closing(sqlite3.connect(self.path)) as connection:
            if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                faults.append("the repaired file is damaged")
        return faults, "repaired" if repeated or report.error else "whole"

    def shown(self, answer, faults, figures=True):
        """The runs whose outcomes an answer shows, or its object."""
        if isinstance(answer, Answer) and answer.code != 0:
            return []
        found = json.loads(answer.out) if isinstance(answer, Answer) else answer
        rule = found["stable_rule"] or {}
        floor = (
            Floor(rule["depthless_loss"], rule["guess_loss"])
            if rule.get("depthless_loss") is not None
            else None
        )
        for part in self.parts:
            if len(part) == found["done"] and (
                outcomes_of(part, floor) == found["outcomes"] or not figures
            ):
                return part
        faults.append(f"figures of no runs that there were: {str(found['outcomes'])[:2000]}")
        return []


def flipped(content, draws):
    """The content with one flipped bit, of any byte or of those with which a page begins; and where
    it is.
    """
    place = draws.randrange(len(content))
    if draws.random() < 0.3:
        place = place // 4096 * 4096 + draws.randrange(120)
    bit = draws.randrange(8)
    return (
        content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :],
        f"bit {bit} of byte {place}",
    )


def odd_values(study):
    """Scripts that give a column of one row an odd value, by name."""
    made = {}
    for table, row in (("about", 2), ("runs", 1), ("runs", 3)):
        with contextlib.closing(sqlite3.connect(":memory:")) as connection:
            connection.execute(SCHEMA[table])
            names = [each[1] for each in connection.execute(f"PRAGMA table_info({table})")]
            literals = [
                connection.execute("SELECT quote(?)", (value,)).fetchone()[0] for value in ODD
            ]
        for name, literal in itertools.product(names, [*literals, UNREADABLE]):
            made[f"{table}.{name} = {literal} in row {row}"] = (
                f'UPDATE {table} SET "{name}" = {literal} WHERE rowid = {row}'
            )
    return made


def damages(study, part):
    """Damaged files, each with its name and how `wrong` takes it: bits that are flipped, ends cut
    off, odd values, other schemas.
    """
    draws, scripts = part.random, odd_values(study)
    for _ in range(part.of(FLIPS)):
        content, where = flipped(study.whole, draws)
        yield where, content, {}
    for _ in range(part.of(FLIPS // 5)):
        content, where = flipped(study.old, draws)
        yield f"format 1, {where}", content, {"silent": True, "figures": False}
    for _ in range(part.of(CUTS)):
        size = draws.choice(
            [draws.randrange(len(study.whole)), draws.randrange(len(study.whole) // 512) * 512]
        )
        yield f"cut at {size} bytes", study.whole[:size], {"silent": size == 0}
    for name in part.among(scripts):
        yield name, study.changed(scripts[name]), {}
    for name in part.among(SCHEMAS):
        yield name, study.changed(SCHEMAS[name]), {"silent": name in SILENT}
    for name in part.among(FILES):
        yield name, FILES[name], {"silent": name == "empty"}


def answering(study, args, name):
    """A request by a copy of this process, which writes how it ended into a file next to the
    study.
    """
    answer = study.ask(args)
    (study.place / name).write_text(
        json.dumps([answer.code, answer.said if answer.faults else "", answer.out])
    )


def together(study, count):
    """Two processes with the same command at once, so many times, and reports meanwhile: their
    number, and the faults.
    """
    faults, reports, study.pause = [], 0, 0.05
    for _ in range(count):
        study.placed(None)
        names = ["answer-0", "answer-1"]
        copies = [_begun(partial(answering, study, STUDY, name)) for name in names]
        while copies := [copy for copy in copies if os.waitpid(copy, os.WNOHANG) == (0, 0)]:
            report = study.ask(REPORT)
            reports += 1
            faults += [f"--report while two write: {report.said}"] if report.faults else []
            study.shown(report, faults)
        answers = [json.loads((study.place / name).read_text()) for name in names]
        faults += [f"two at once: {said}" for _, said, _ in answers if said]
        if sorted(code for code, *_ in answers) not in ([0, 0], [0, 2]):
            faults.append(f"two at once ended in {answers}")
        found, how = study.wrong()
        faults += [f"after two at once, {fault}" for fault in found] + [
            "after two at once, runs lack"
        ] * (how != "whole")
    study.pause = 0.0
    return reports, faults


def _begun(act):
    with warnings.catch_warnings(action="ignore"):
        process = os.fork()
    if not process:
        try:
            act()
        finally:
            os._exit(0)
    return process


def on_a_broken_disk(study, library, part):
    """Kills and errors at the file operations of Python and SQLite: operations, kills, errors, and
    the faults.
    """
    disk = ctypes.CDLL(str(library))
    disk.arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    begins = {
        "a new study": (STUDY, None, 0),
        "the rest of a study": (STUDY, study.changed("DELETE FROM runs WHERE rowid > 2"), 2),
        "the rest of a damaged study": (
            STUDY,
            study.changed("UPDATE runs SET curve = 'x' WHERE rowid IN (1, 4)"),
            2,
        ),
        "a study of format 1": (STUDY, study.old, 4),
        "a report": (REPORT, study.whole, 4),
    }
    counts, faults, draws = Counter(), [], part.random
    for what, (args, content, begun) in begins.items():
        study.placed(content)
        code, _ = kills.in_a_copy(partial(_on_disk, study, disk, args, 0, 0, False))
        assert code == 0
        operations = int((study.place / "count").read_text())
        for number in sorted(part.among(range(1, operations + 1))):
            for error in (0, draws.choice([errno.EIO, errno.ENOSPC])):
                lasting = error != 0 and draws.random() < 0.5
                which = (
                    f"{what}, {os.strerror(error) if error else 'killed'} at operation"
                    f" {number}{' and after it' * lasting}"
                )
                study.placed(content)
                (study.place / "stored").write_text("0")
                code, _ = kills.in_a_copy(
                    partial(_on_disk, study, disk, args, number, error, lasting)
                )
                counts[f"{'errors' if error else 'kills'} at file operations"] += 1
                if error and code == 0:
                    ended, said, out = json.loads((study.place / "answer").read_text())
                    faults += [f"{which}: {said}"] if said else []
                    if ended == 0 and len(study.shown(json.loads(out), faults)) != len(study.runs):
                        faults.append(f"{which}: it ended well without all runs")
                elif code is not None:
                    faults.append(f"{which}: exit code {code}")
                found, _ = study.wrong(
                    silent=True, stored=begun + int((study.place / "stored").read_text())
                )
                faults += [f"{which}: {fault}" for fault in found]
    return counts, faults


def _on_disk(study, disk, args, number, error, lasting):
    study.trained = 0
    disk.arm(os.fsencode(study.directory), number, error, lasting)
    answering(study, args, "answer")
    count = disk.counted()
    disk.arm(b"", 0, 0, 0)
    (study.place / "count").write_text(str(count))


def campaign(place, part):
    """What was done, counted, and the faults, in words."""
    study, counts, faults = Undisturbed(place), Counter(), []
    for name, content, kind in damages(study, part):
        study.placed(content)
        found, how = study.wrong(**kind)
        counts[f"damaged study files {how}"] += 1
        faults += [f"{name}: {fault}" for fault in found]
    counts["reports while two processes write"], more = together(study, part.of(TOGETHER))
    if shutil.which("cc") is None or not sys.platform.startswith("linux"):
        return counts, [*faults, *more]
    done, others = on_a_disk_of_its_own(study, part)
    return counts + Counter(done), [*faults, *more, *others]


def on_a_disk_of_its_own(study, part):
    """`on_a_broken_disk` in a process whose operations go through `LIBRARY`."""
    library = study.place / "disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, LIBRARY, "-ldl"], check=True)
    study.placed(study.whole)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.campaigns.studies",
            library,
            json.dumps(dataclasses.asdict(part)),
        ],
        capture_output=True,
        text=True,
        check=True,
        cwd=study.place,
        env={**os.environ, "PYTHONPATH": root, "LD_PRELOAD": library},
    )
    return json.loads(done.stdout)


if __name__ == "__main__":
    print(
        json.dumps(
            on_a_broken_disk(Undisturbed(Path.cwd()), sys.argv[1], Part(**json.loads(sys.argv[2])))
        )
    )
