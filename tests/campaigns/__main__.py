"""The whole of all campaigns: `make campaign`, or `python -m tests.campaigns --seed 1 --share 0.1`
for a part of it.

Its counts are printed and kept in benchmarks/results. What a campaign finds makes the exit code 1.
One that is stopped goes on where it was: what each part found is a line of a file in out/campaigns.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.record import keep
from solvers import ConfigError, SolveError
from tests.campaigns import (
    broken_disk,
    damaged,
    hostile,
    kills,
    lives,
    mutated,
    odd_calls,
    studies,
    wrong_calls,
    wrong_requests,
)
from tests.campaigns.harness import BYTES, SECONDS, Part, apart, ask_apart, draw_all

REQUESTS, CALLS, ODD_CALLS, MUTATED, FLIPS, KILLS, OVERWRITING = (
    10_000,
    10_000,
    10_000,
    2_000,
    1_000,
    400,
    100,
)
"""How much of each is the whole; of the hostile files, and of the operations at which a run is
killed, it is all.
"""
STATE = Path("out/campaigns")
TELL = 5
"""Seconds from one line of progress to the next."""
done, most = Counter(), Counter()
"""What the part that is being carried out has done, and the most seconds and bytes that a request
took.
"""


def check(answer):
    """The faults of an answer, which is counted."""
    done[{0: "answered", 1: "failed", 2: "refused"}.get(answer.code, "ended otherwise")] += 1
    most["seconds"] = max(most["seconds"], round(answer.seconds, 1))
    most["bytes"] = max(most["bytes"], answer.held)
    return [answer.said] if answer.faults else []


def of_kills(place, part):
    """Kills of runs that begin or go on, and of runs that overwrite another: whole at each, and
    bit-identical at the end.
    """
    draws = part.random
    whole, other = place / "whole", place / "other"
    (place / "text").write_bytes(damaged.TEXT)
    undisturbed = [
        kills.in_a_copy(kills.beginning(place, k)) for k, place in enumerate((whole, other))
    ]
    assert [code for code, _ in undisturbed] == [0, 0], "runs that nobody kills end well"
    seconds = min(seconds for _, seconds in undisturbed)
    new, old = kills.bits(whole), kills.bits(other)
    done["kills at random moments"], done["runs"], faults = kills.killed_and_resumed(
        place, new, part.of(KILLS), draws, seconds
    )
    over, runs, more = kills.killed_while_overwriting(
        place, old, new, part.of(OVERWRITING), draws, seconds
    )
    at, others = kills.killed_at_operations(place, old, new, part)
    done.update(
        {
            "kills of runs that overwrite another": over,
            "runs that overwrite another": runs,
            "kills at file operations": at,
        }
    )
    return [*faults, *more, *others]


def of_broken_disk(place, part):
    """File operations that failed: said in a line, nothing lost, gone on with to the same bits."""
    done["file operations that failed"], faults = broken_disk.faulty(place, part)
    return faults


def of_studies(place, part):
    """Study files that are damaged, cut or used by two processes, kills and errors: no wrong
    figure, and every study ends.
    """
    counts, faults = studies.campaign(place, part)
    done.update(counts)
    return faults


def of_damage(place, part):
    """Flipped bits, files of other runs, links: all seen by every reader."""
    first = damaged.make_run(place / "first")
    others = {"seed": {"seed": 1}, "method": {"method": "rk4"}, "iterations": {"iterations": 4}}
    found = [
        (
            "flipped bits in a checkpoint's files",
            "",
            damaged.flips(first, part.of(FLIPS), part.random),
        )
    ]
    if part.number == 0:
        exchanged = "exchanges of files between runs of another seed, method or step"
        for name, changes in others.items():
            found += [
                (
                    exchanged,
                    f" of another {name}",
                    damaged.exchanges(first, damaged.make_run(place / name, **changes)),
                )
            ]
        found += [("links that lead elsewhere", "", damaged.links(first))]
    faults = []
    for kind, of, each in found:
        for what, accepted in each:
            done[kind] += 1
            faults += [f"{what}{of}: read by {accepted}"] if accepted else []
    return faults


def of_hostile_files(place, part):
    """Hostile files, by the request that reads each."""
    faults = []
    for names in batches(part.among(hostile.HOSTILE)):
        requests = [hostile.made_in(name, place / str(k)) for k, name in enumerate(names)]
        for k, (name, answer) in enumerate(zip(names, ask_apart(requests), strict=True)):
            if answer.code == 0 and name not in hostile.MAY_BE_READ:
                answer.faults.append("not refused")
            faults += [f"{name}: {fault}" for fault in check(answer)]
            faults += (
                [f"{name}: its code was run"] if list((place / str(k)).rglob("was_run")) else []
            )
    return faults


def of_mutated_files(place, part):
    """Files of every kind, each damaged in one way: a line or an answer, and pages with no tag or
    attribute of the data's.
    """
    faults = []
    for cases in batches(part.among(mutated.drawn(MUTATED, part.seed))):
        made = [mutated.made_in(case, part.seed, place / str(k)) for k, case in enumerate(cases)]
        for k, ((_, what), answer) in enumerate(
            zip(made, ask_apart([args for args, _ in made]), strict=True)
        ):
            answer.faults += mutated.faults_of_pages(place / str(k))
            faults += [f"{what}: {fault}" for fault in check(answer)]
            shutil.rmtree(place / str(k))
    return faults


def of_requests(place, part):
    """Wrong requests of every command."""
    requests = []
    wrong_requests.campaign(part.of(REQUESTS), part.drawn, requests.append)
    return [
        fault
        for batch in batches(requests)
        for answer in ask_apart(batch)
        for fault in check(answer)
    ]


def batches(things, size=50):
    """So many at once, as one copy of this process carries them out."""
    return [things[k : k + size] for k in range(0, len(things), size)]


def of_calls(place, part):
    """Wrong calls of the Python API."""
    faults = []

    def came(name, arguments, error):
        wrong = error is not None and not isinstance(error, (ConfigError, SolveError))
        done["answered" if error is None else "refused"] += 1
        faults.extend(
            [f"{name}({str(arguments)[:300]}): {type(error).__name__}: {str(error)[:300]}"]
            if wrong
            else []
        )

    wrong_calls.campaign(part.of(CALLS), part.drawn, came)
    return faults


def of_lives(place, part):
    """Commands in strange environments, and trainings that get signals: a line at most, the right
    exit code, and gone on with.
    """
    counts, faults = lives.lived(place, part)
    done.update(counts)
    return faults


def of_odd_calls(place, part):
    """Calls of every public function and class with odd values, generated from the signatures."""
    calls, faults = [], []
    draw_all(part.of(ODD_CALLS), part.drawn, odd_calls.calls(), calls.append)
    for batch in batches(calls):
        acts = [partial(odd_calls.measured, *call) for call in batch]
        for call, (answer, how, _) in zip(batch, apart(acts), strict=True):
            if answer is None:
                answer = "ended otherwise", [f"{odd_calls.said(*call)}: {how}"], SECONDS, 0
            end, found, seconds, held = answer
            done[end] += 1
            most["seconds"], most["bytes"] = (
                max(most["seconds"], round(seconds, 1)),
                max(most["bytes"], held),
            )
            faults += found
    return faults


CAMPAIGNS = {
    "kills": (of_kills, 8),
    "studies": (of_studies, 8),
    "damage": (of_damage, 2),
    "broken_disk": (of_broken_disk, 6),
    "hostile_files": (of_hostile_files, 8),
    "mutated_files": (of_mutated_files, 20),
    "requests": (of_requests, 40),
    "calls": (of_calls, 10),
    "lives": (of_lives, 10),
    "odd_calls": (of_odd_calls, 20),
}
"""Each by its name, with its number of parts: a function of a directory and a `Part` that counts in
`done` what it does, and returns the faults in words. In this order: the copies of this process that
are killed must not find one that has differentiated.
"""


def carry_out(name, part):
    """What one part of a campaign did and found, in a directory of its own."""
    before, started = Path.cwd(), time.monotonic()
    done.clear(), most.clear()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # where what a request writes goes
        try:
            faults = CAMPAIGNS[name][0](Path(place), part)
        finally:
            os.chdir(before)
    seconds = time.monotonic() - started
    return {
        "campaign": name,
        "part": part.number,
        "done": dict(done),
        "most": dict(most),
        "seconds": seconds,
        "faults": faults,
    }


@contextmanager
def telling(name, part, found):
    """A line of progress every few seconds, whatever the part is at."""
    started = time.monotonic()

    def tell(*_):
        said = ", ".join(f"{count} {what}" for what, count in done.items()) or "begun"
        line = (
            f"{name}, part {part.number + 1} of {part.parts}: {said}; {found} faults before,"
            f" {time.monotonic() - started:.0f} s"
        )
        os.write(2, f"{line}\n".encode())  # print may be interrupted by itself

    signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, TELL, TELL)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def read(path):
    """The parts that are done; a line that was cut off by a stop is none."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def append(path, row):
    """One line more, durable, in one write, on a line of its own also after one that was cut
    off.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        os.write(handle, f"\n{json.dumps(row)}\n".encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def unfinished(share):
    """The seed of a campaign of this share that was stopped, None where there is none."""
    paths = sorted(STATE.glob(f"*-{share:g}.jsonl"), key=lambda path: path.stat().st_mtime)
    return int(paths[-1].name.partition("-")[0]) if paths else None


def summary(name, rows):
    """A campaign in a line, from its parts."""
    counts, longest, held = Counter(), 0, 0
    for row in rows:
        counts.update(row["done"])
        longest, held = (
            max(longest, row["most"].get("seconds", 0)),
            max(held, row["most"].get("bytes", 0)),
        )
    took = f", the longest {longest:g} s, the largest {held / 1e9:.2f} GB" if longest else ""
    counted = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    faults = sum(len(row["faults"]) for row in rows)
    what, seconds = CAMPAIGNS[name][0].__doc__.rstrip("."), sum(row["seconds"] for row in rows)
    return f"{name} ({what}): {counted}{took} ({seconds:.0f} s); {faults} faults"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="by default that of one that was stopped, or a new one each day",
    )
    parser.add_argument("--share", type=float, default=1.0, help="how much of the whole")
    parser.add_argument(
        "--only",
        choices=list(CAMPAIGNS),
        action="append",
        help="one of them alone; it may be repeated",
    )
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else unfinished(options.share)
    seed = int(time.time()) // 86400 if seed is None else seed
    path = STATE / f"{seed}-{options.share:g}.jsonl"
    path = path.absolute()
    warnings.simplefilter("ignore")
    lines, found = [f"seed {seed}, {options.share:.0%} of the whole", ""], []
    names = [name for name in CAMPAIGNS if options.only is None or name in options.only]
    for name in names:
        for number in range(CAMPAIGNS[name][1]):
            if any((row["campaign"], row["part"]) == (name, number) for row in read(path)):
                continue
            part = Part(seed, options.share, number, CAMPAIGNS[name][1])
            with telling(name, part, len(found)):
                row = carry_out(name, part)
            append(path, row)
            print(*row["faults"], sep="\n", end="\n" if row["faults"] else "", flush=True)
        rows = [row for row in read(path) if row["campaign"] == name]
        lines.append(summary(name, rows))
        found += [fault for row in rows for fault in row["faults"]]
        print(lines[-1], flush=True)
    lines += [
        "",
        f"no request took more than {SECONDS} s or {BYTES / 1e9:.2f} GB, but for what follows",
        *found,
    ]
    keep("campaign" if options.only is None else f"campaign-{'-'.join(names)}", lines)
    left = [row for row in read(path) if row["campaign"] not in names]
    path.unlink()  # the next one begins anew
    for row in left:
        append(path, row)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
