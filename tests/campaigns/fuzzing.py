"""Coverage-guided fuzzing of the parsers in `fuzz.TARGETS`: `make fuzz MINUTES=60`, or `python -m
tests.campaigns.fuzzing --only config`.

Each target has a process of its own, driven by atheris (libFuzzer). It begins with the target's
corpus: inputs that together reach all lines reached so far. Afterwards the corpus has what is new.
Counts are printed and kept in benchmarks/results. The exit code is 1 after a fault.
"""

import argparse
import contextlib
import copy
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORPORA = Path(__file__).parent / "corpora"
LONGEST = 20_000
"""Most bytes of an input that is kept, unless it is a seed."""
ODD = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        -0.0,
        1e308,
        1e-320,
        float("nan"),
        float("inf"),
        10**9,
        2**53,
        2**63,
        10**30,
        -(10**30),
    ),
    *(
        "",
        "x",
        "nan",
        "inf",
        "0",
        "1e3",
        "a b",
        "\x1b[2J\x07",
        "\u202e\ud800",
        "<img src=x onerror=alert(1)>",
    ),
    *("\"'`</script>", "../x", "/x"),
    *(
        [],
        [[]],
        [0],
        ["x"],
        [None],
        {},
        {"x": 0},
        {"": ""},
        [1.5, "x"],
        "n" * 300,
        "[red]x[/red]",
        "$\\frac$",
        "a\nb",
        "é",
    ),
]
"""Values that are put in the place of others."""


def corpus(name):
    """The kept inputs of a target, or its seeds if it has none."""
    from tests.campaigns.fuzz import TARGETS

    path = CORPORA / f"{name}.json.z"
    if not path.exists():
        return TARGETS[name].seeds()
    return [text.encode("latin-1") for text in json.loads(zlib.decompress(path.read_bytes()))]


def keep_corpus(name, inputs):
    """Keeps them as a list of texts, one character for each byte, packed."""
    CORPORA.mkdir(exist_ok=True)
    text = json.dumps([data.decode("latin-1") for data in inputs])
    (CORPORA / f"{name}.json.z").write_bytes(zlib.compress(text.encode(), 9))


def unpacked(data, form):
    """The value that the bytes hold, and how it becomes bytes again; ValueError for bytes that hold
    none.
    """
    if form == "json":
        return json.loads(data), lambda value: json.dumps(value).encode()
    if form == "lines":
        lines = [json.loads(line) for line in data.splitlines()]
        return lines, lambda value: b"".join(
            json.dumps(each).encode() + b"\n"
            for each in (value if isinstance(value, list) else [value])
        )
    if form == "header":
        end = 8 + int.from_bytes(data[:8], "little")

        def whole(value):
            text = json.dumps(value).encode()
            return len(text).to_bytes(8, "little") + text + data[end:]

        return json.loads(data[8:end]), whole
    raise ValueError(form)


def places(value):
    """Where an entry may be changed: containers and keys."""
    entries = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, entry in entries:
        yield value, key
        yield from places(entry)


def odd_value(draw):
    """One of them, which may be changed further."""
    return copy.deepcopy(draw.choice(ODD))


def changed(value, draw):
    """The value with one entry replaced, removed, repeated, moved or wrapped."""
    found = list(places(value))
    if not found:
        return odd_value(draw)
    held, key = draw.choice(found)
    other, from_key = draw.choice(found)
    kind = draw.randrange(9)
    if kind < 4:
        held[key] = odd_value(draw)
    elif kind == 4:
        del held[key]
    elif kind == 5:
        held[key] = json.loads(json.dumps(other[from_key]))
    elif kind == 6 and isinstance(held, dict):
        held[draw.choice([str(from_key), "x", "\x1b[2J", ""])] = held.pop(key)
    elif kind == 7:
        held[key] = draw.choice([[held[key]], {"x": held[key]}, [held[key]] * 3, str(held[key])])
    elif isinstance(held[key], (int, float)) and not isinstance(held[key], bool):
        held[key] = draw.choice([-1, 1, held[key]]) * held[key] + draw.choice([0, 1, -1, 0.5])
    else:
        held[key] = odd_value(draw)
    return value


WORD = re.compile(rb"[\w.+-]+|\"[^\"]*\"|[\[\]={}\n,:/*]")


def mutated(data, form, draw, plainly):
    """Changed bytes: by what they hold, by their words, or by `plainly(data)`."""
    kind = draw.random()
    if kind < 0.15 or form == "bytes":
        return plainly(data)
    if form != "text" and kind < 0.9:
        with contextlib.suppress(ValueError, RecursionError, OverflowError):
            value, packed = unpacked(data, form)
            for _ in range(draw.choice([1, 1, 1, 2, 4])):
                value = changed(value, draw)
            return packed(value)
    for _ in range(draw.choice([1, 1, 2, 3])):
        words = list(WORD.finditer(data))
        if not words:
            return plainly(data)
        word, other = draw.choice(words), draw.choice(words)[0]
        odd = draw.choice([other, other, b"", word[0] * 2, json.dumps(draw.choice(ODD)).encode()])
        data = data[: word.start()] + odd + data[word.end() :]
    return data


def flipped(draw):
    """A plain change without atheris: one byte, or a cut."""

    def plainly(data):
        if not data:
            return bytes([draw.randrange(256)])
        at = draw.randrange(len(data))
        return draw.choice(
            [
                data[:at],
                data[:at] + bytes([draw.randrange(256)]) + data[at + 1 :],
                data[:at] + data[at // 2 :],
            ]
        )

    return plainly


def lines_reached(name, inputs, place):
    """For each input the lines of ctrans that its reading reaches."""
    from tests.campaigns.fuzz import fault_of

    reached = set()

    def of_function(frame, event, argument):
        if f"{os.sep}ctrans{os.sep}" not in (path := frame.f_code.co_filename):
            return None
        before = frame.f_lineno

        def of_line(frame, event, argument):
            nonlocal before
            if event == "line":
                reached.add((path, before, frame.f_lineno))
                before = frame.f_lineno
            return of_line

        return of_line

    for data in inputs:
        reached.clear()
        sys.settrace(of_function)
        try:
            fault_of(name, data, place)
        finally:
            sys.settrace(None)
        yield frozenset(reached)


def least(name, inputs, place):
    """The inputs that reach lines which shorter ones do not; and how many pairs of lines all
    reach.
    """
    kept, met = [], set()
    inputs = sorted(set(inputs), key=lambda data: (len(data), data))
    for data, reached in zip(inputs, lines_reached(name, inputs, place), strict=True):
        if reached - met:
            kept.append(data)
            met |= reached
    return kept, len(met)


def drive(name, seconds, seed, place):
    """The process of one target: atheris drives it. It notes counts and faults in `place`."""
    import atheris

    with atheris.instrument_imports(include=["ctrans", "solvers", "tomllib"]):
        from tests.campaigns.fuzz import TARGETS, fault_of
    held, faults, count, told = place / "held", set(), 0, 0.0
    form = TARGETS[name].form
    (place / "here").mkdir(exist_ok=True)
    os.chdir(place / "here")

    def one(data):
        nonlocal count, told
        fault = fault_of(name, data, place / "here")
        count += 1
        if fault is not None and fault not in faults:
            faults.add(fault)
            with (place / "found.jsonl").open("a") as file:
                file.write(json.dumps([fault, data.decode("latin-1")]) + "\n")
        if time.monotonic() - told > 1:
            told = time.monotonic()
            (place / f"count-{os.getpid()}").write_text(f"{count} {time.process_time():.0f}")

    def mutate(data, most, seed):
        return mutated(data, form, random.Random(seed), lambda data: atheris.Mutate(data, most))[
            :most
        ]

    longest = max([LONGEST, *(path.stat().st_size for path in held.iterdir())])
    flags = [
        f"-max_total_time={seconds}",
        f"-seed={seed}",
        "-timeout=60",
        "-rss_limit_mb=3000",
        f"-max_len={longest}",
    ]
    flags += ["-report_slow_units=600", f"-artifact_prefix={place}/died-"]
    atheris.Setup([sys.argv[0], *flags, str(held)], one, custom_mutator=mutate)
    atheris.Fuzz()


def fuzz(name, seconds, seed):
    """Fuzzes a target for that time: a line with the counts, and faults with their inputs."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "held").mkdir()
        begun = corpus(name)
        for i, data in enumerate(begun):
            (place / "held" / f"begun-{i}").write_bytes(data)
        end, covered = time.monotonic() + seconds, 0
        while time.monotonic() < end - 1 or not list(
            place.glob("count-*")
        ):  # a process that dies is begun anew
            rest = max(2, round(end - time.monotonic()))
            args = [f"--drive={place}", f"--only={name}", f"--seconds={rest}", f"--seed={seed}"]
            command = [sys.executable, "-m", "tests.campaigns.fuzzing", *args]
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, check=False, errors="replace"
            )
            covered = max([covered, *map(int, re.findall(r"cov: (\d+)", done.stderr))])
            seed += 1
            if not list(place.glob("count-*")):
                raise RuntimeError(done.stderr[-3000:])
        counts = [path.read_text().split() for path in place.glob("count-*")]
        executions, processor = (
            sum(int(count) for count, _ in counts),
            sum(float(used) for _, used in counts),
        )
        told = (
            (place / "found.jsonl").read_text().splitlines()
            if (place / "found.jsonl").exists()
            else []
        )
        faults = dict(map(json.loads, told))
        found = [data.encode("latin-1") for data in faults.values()]
        faults |= {
            f"the process died: {path.name}": path.read_bytes().decode("latin-1")
            for path in place.glob("died-*")
        }
        (place / "again").mkdir()
        short = [
            data
            for path in (place / "held").iterdir()
            if len(data := path.read_bytes()) <= LONGEST or data in begun
        ]
        kept, reached = least(name, short, place / "again")
        keep_corpus(
            name, sorted({*kept, *found}, key=len)
        )  # so that the replay fails until a fault is mended
        said = (
            f"{name}: {executions} readings in {processor:.0f} s, coverage {covered}, {reached}"
            f" steps of lines by {len(kept)} inputs"
        )
        return said, processor, executions, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="for all targets together")
    parser.add_argument("--only", action="append", help="one target; repeatable")
    parser.add_argument("--seed", type=int, default=int(time.time()) // 86400)
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        return drive(options.only[0], options.seconds, options.seed, options.drive)
    from benchmarks.record import keep
    from tests.campaigns.fuzz import TARGETS

    names = options.only or list(TARGETS)
    lines, faults, executions, processor = [], {}, 0, 0.0
    for name in names:
        said, used, count, found = fuzz(name, options.minutes * 60 / len(names), options.seed)
        lines.append(f"{said}; {len(found)} faults")
        executions, processor = executions + count, processor + used
        faults |= {f"{name}: {fault}": data for fault, data in found.items()}
        print(
            lines[-1],
            *(f"  {fault}\n    {data[:300]!r}" for fault, data in found.items()),
            sep="\n",
            flush=True,
        )
    whole = (
        f"seed {options.seed}: {executions} readings of {len(names)} parsers in"
        f" {processor / 60:.0f} minutes of processor time"
    )
    said = [f"{fault}: {data[:300]!r}" for fault, data in faults.items()]
    keep(
        "fuzz" if options.only is None else f"fuzz-{'-'.join(names)}",
        [whole, "", *lines, "", *said],
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
