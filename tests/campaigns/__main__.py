"""The whole of all campaigns: `make campaign`, or `python -m tests.campaigns --seed 1 --share 0.1` for a part of it.

Its counts are printed and kept in benchmarks/results. What a campaign finds makes the exit code 1.
"""

import argparse
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.record import keep
from solvers import ConfigError, SolveError
from tests.campaigns import broken_disk, damaged, hostile, kills, wrong_calls, wrong_requests
from tests.campaigns.harness import BYTES, SECONDS, ask

REQUESTS, CALLS, FLIPS, KILLS, OVERWRITING = 5_000, 5_000, 1_000, 400, 100
"""How much of each is the whole; of the hostile files it is all."""


def of_kills(place, share, seed):
    """Kills of runs that begin or go on, and of runs that overwrite another."""
    draws = random.Random(seed)
    whole, other = place / "whole", place / "other"
    (place / "text").write_bytes(damaged.TEXT)
    undisturbed = [kills.in_a_copy(kills.beginning(place, k)) for k, place in enumerate((whole, other))]
    assert [code for code, _ in undisturbed] == [0, 0], "runs that nobody kills end well"
    seconds = min(seconds for _, seconds in undisturbed)
    new, old = kills.bits(whole), kills.bits(other)
    count, runs, faults = kills.killed_and_resumed(place, new, round(KILLS * share), draws, seconds)
    over, overwritten, more = kills.killed_while_overwriting(place, old, new, round(OVERWRITING * share), draws, seconds)
    at, others = kills.killed_at_operations(place, old, new, share, draws)
    said = f"{count} kills at random moments of {runs} runs, {over} of {overwritten} runs that overwrite another, {at} at file operations"
    return f"{said}: whole at each, and bit-identical at the end", [*faults, *more, *others]


def of_broken_disk(place, share, seed):
    """Errors of the disk at file operations of commands."""
    operations, failed, faults = broken_disk.faulty(place, share, random.Random(seed))
    return f"{failed} of {operations} file operations failed: said in a line, nothing lost, gone on with to the same bits", faults


def of_damage(place, share, seed):
    """Flipped bits, files of other runs, links."""
    draws = random.Random(seed)
    first = damaged.make_run(place / "first")
    faults, counts = [], Counter()
    others = {"seed": {"seed": 1}, "method": {"method": "rk4"}, "iterations": {"iterations": 4}}
    for name, changes in others.items():
        for what, accepted in damaged.exchanges(first, damaged.make_run(place / name, **changes)):
            counts["exchanges of files between runs of another seed, method or step"] += 1
            faults += [f"{what} of another {name}: read by {accepted}"] if accepted else []
    for what, accepted in damaged.flips(first, round(FLIPS * share), draws):
        counts["flipped bits in a checkpoint's files"] += 1
        faults += [f"{what}: read by {accepted}"] if accepted else []
    for what, accepted in damaged.links(first):
        counts["links that lead elsewhere"] += 1
        faults += [f"{what}: read by {accepted}"] if accepted else []
    return f"{', '.join(f'{count} {what}' for what, count in counts.items())}: all seen by every reader", faults


def of_hostile_files(place, share, seed):
    """Every hostile file, by the request that reads it."""
    names, faults, longest = list(hostile.HOSTILE), [], 0.0
    random.Random(seed).shuffle(names)
    for name in names[: round(len(names) * share)]:
        answer = ask(hostile.made_in(name, place / "it"), refused=name not in hostile.MAY_BE_READ)
        longest = max(longest, answer.seconds)
        run = [str(path) for path in (place / "it").rglob("was_run")]
        faults += [f"{name}: {answer.said}"] if answer.faults else []
        faults += [f"{name}: its code was run"] if run else []
    return f"{round(len(names) * share)} hostile files: refused, the longest after {longest:.0f} s", faults


def of_requests(place, share, seed):
    """Wrong requests of every command."""
    faults, codes, longest = [], Counter(), 0.0

    def check(args):
        nonlocal longest
        answer = ask(args)
        codes[answer.code] += 1
        longest = max(longest, answer.seconds)
        faults.extend([answer.said] if answer.faults else [])

    wrong_requests.campaign(round(REQUESTS * share), seed, check)
    said = f"{codes[2]} refused, {codes[1]} failed, {codes[0]} answered, the longest after {longest:.0f} s"
    return f"{codes.total()} wrong requests: {said}", faults


def of_calls(place, share, seed):
    """Wrong calls of the Python API."""
    faults, came = [], Counter()

    def check(name, arguments, error):
        wrong = error is not None and not isinstance(error, (ConfigError, SolveError))
        came["answered" if error is None else "refused"] += 1
        faults.extend([f"{name}({str(arguments)[:300]}): {type(error).__name__}: {str(error)[:300]}"] if wrong else [])

    wrong_calls.campaign(round(CALLS * share), seed, check)
    return f"{came.total()} wrong calls of the Python API: {came['refused']} refused, {came['answered']} answered", faults


CAMPAIGNS = (of_kills, of_damage, of_broken_disk, of_calls, of_hostile_files, of_requests)
"""In this order: the copies of this process that are killed must not find one that has differentiated."""


def carry_out(campaign, seed, share):
    """What a campaign says, and what it found, in a directory of its own."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)  # where what a request writes goes
        try:
            return campaign(Path(place), share, seed)
        finally:
            os.chdir(before)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="new each day by default; it is kept with the counts")
    parser.add_argument("--share", type=float, default=1.0, help="how much of the whole")
    parser.add_argument(
        "--only", choices=[campaign.__name__.removeprefix("of_") for campaign in CAMPAIGNS], help="one of them alone"
    )
    options = parser.parse_args()
    seed = int(time.time()) // 86400 if options.seed is None else options.seed
    warnings.simplefilter("ignore")
    lines, found = [f"seed {seed}, {options.share:.0%} of the whole", ""], []
    for campaign in CAMPAIGNS:
        if options.only not in (None, campaign.__name__.removeprefix("of_")):
            continue
        started = time.monotonic()
        said, faults = carry_out(campaign, seed, options.share)
        lines += [f"{said} ({time.monotonic() - started:.0f} s); {len(faults)} faults"]
        found += faults
        print(lines[-1], *faults, sep="\n", flush=True)
    most = max(resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    lines += [
        "",
        f"nothing took more than {SECONDS} s, and this process at most {most / 1e9:.2f} GB of {BYTES / 1e9:.2f}",
        *found,
    ]
    keep("campaign" if options.only is None else f"campaign-{options.only}", lines)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
