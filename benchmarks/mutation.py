"""Mutation test: changes one operator or number of the code and runs the tests that reach it. A
mutant that no test notices survives.

    pip install cosmic-ray "parso<0.8.5" pytest-cov     # parso 0.8.5 to 0.8.7 break cosmic-ray 8.7
    python benchmarks/mutation.py cover                 # which quick test reaches which line, in some ten minutes
    python benchmarks/mutation.py run --out benchmarks/results/mutation.txt

`run` draws `--each` mutants for each part of the code: places uniformly at random, then one
mutation of the place. It tries each with the quick tests that reach its line, quickest first, in
copies of the checkout. Lines that run at import have no test of their own. For these it runs the
tests of the part. Annotations, and lines that no quick test reaches, are counted apart.
"""

from __future__ import annotations

import ast
import collections
import concurrent.futures
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "norm": ("ctrans/dynamics/norm", ["tests/dynamics/test_norm.py", "tests/theory"]),
    "control": ("ctrans/control", ["tests/control", "tests/theory"]),
    "solvers": ("solvers", ["tests/solvers", "tests/convergence"]),
    "monitor": ("ctrans/training/monitor", ["tests/training/monitor"]),
    "checks": ("ctrans/measure/*/*_checks.py", ["tests/measure", "tests/test_recipes.py"]),
}
"""For each part: its files, and the tests of what it does when it is imported."""
NOT_MUTATED = ("__init__.py",)
MOST_TESTS = 400
TIMEOUT = 300.0


def files_of(part: str) -> list[Path]:
    pattern = PARTS[part][0]
    found = ROOT.glob(pattern) if "*" in pattern else (ROOT / pattern).rglob("*.py")
    return sorted(path for path in found if not any(word in str(path) for word in NOT_MUTATED))


def annotated(tree: ast.AST) -> set[tuple[int, int]]:
    """Positions (line, column) inside annotations."""
    inside = set()
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            for each in ast.walk(part) if part is not None else ():
                if hasattr(each, "lineno"):
                    inside |= {
                        (line, column)
                        for line in (each.lineno,)
                        for column in range(each.col_offset, each.end_col_offset + 1)
                    }
    return inside


def mutants(path: Path) -> Iterator[tuple[int, int, str, int]]:
    """(line, column, operator, occurrence) of every mutation of the file, annotations left out."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    tree, skipped = get_ast_from_path(path), annotated(ast.parse(path.read_text()))
    for name in operator_names():
        if get_operator(name).arguments() or "NoOp" in name or "VariableInserter" in name:
            continue
        operator, occurrence = get_operator(name)(), 0
        for node in ast_nodes(tree):
            for start, _ in operator.mutation_positions(node):
                if start not in skipped:
                    yield *start, name, occurrence
                occurrence += 1


def mutated(path: Path, name: str, occurrence: int) -> str:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    code = mutate_code(path.read_text(), get_operator(name)(), occurrence)
    assert isinstance(code, str)
    return code


def reached(coverage_file: Path) -> dict[str, dict[int, list[str]]]:
    """For each file and line, the tests that ran it."""
    from coverage import CoverageData

    data = CoverageData(str(coverage_file))
    data.read()
    found = {}
    for path in data.measured_files():
        lines = {
            line: sorted({context.split("|")[0] for context in contexts if context})
            for line, contexts in data.contexts_by_lineno(path).items()
        }
        found[os.path.relpath(path, ROOT)] = lines
    return found


def tried(copy: Path, path: str, code: str, tests: Sequence[str], python: str) -> tuple[str, str]:
    """("killed", by which test) or ("survived", "")."""
    target = copy / path
    before = target.read_text()
    target.write_text(code)
    try:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
            listed.write("\n".join(tests))
            listed.flush()
            command = [
                python,
                "-m",
                "pytest",
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-n0",
                "-m",
                "not slow",
                f"@{listed.name}",
            ]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(copy),
                "PYTHONDONTWRITEBYTECODE": "1",
            }
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT
            )
    except subprocess.TimeoutExpired:
        return "killed", "it does not end"
    finally:
        target.write_text(before)
    if done.returncode == 0:
        return "survived", ""
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "killed", failed[0][:160] if failed else f"pytest ended with {done.returncode}"


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.option(
    "--python", default=sys.executable, help="The Python that has the project's packages."
)
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path("out/mutation"), show_default=True
)
def cover(python: str, data: Path) -> None:
    """Record which quick test reaches which line."""
    data.mkdir(parents=True, exist_ok=True)
    sources = [
        f"--cov={name}"
        for name in (
            "ctrans/dynamics/norm",
            "ctrans/control",
            "solvers",
            "ctrans/training/monitor",
            "ctrans/measure",
        )
    ]
    command = [
        python,
        "-m",
        "pytest",
        "-n",
        "2",
        "--dist",
        "worksteal",
        "-m",
        "not slow",
        "-q",
        "--durations=0",
        "--cov-context=test",
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "COVERAGE_FILE": str((data / "coverage").absolute()),
    }
    with (data / "durations.txt").open("w") as out:
        subprocess.run(
            [*command, *sources, "--cov-report="],
            cwd=ROOT,
            env=environment,
            stdout=out,
            check=False,
        )


@main.command()
@click.option("--each", default=60, show_default=True, help="Mutants of each part.")
@click.option("--seed", default=0, show_default=True)
@click.option("--part", "parts", multiple=True, type=click.Choice(list(PARTS)), default=list(PARTS))
@click.option("--workers", default=2, show_default=True)
@click.option(
    "--python", default=sys.executable, help="The Python that has the project's packages."
)
@click.option(
    "--data", type=click.Path(path_type=Path), default=Path("out/mutation"), show_default=True
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def run(
    each: int, seed: int, parts: Sequence[str], workers: int, python: str, data: Path, out: Path
) -> None:
    """Try mutants, and list the survivors."""
    tests_of = reached(data / "coverage")
    seconds: dict[str, float] = collections.defaultdict(float)
    for line in (data / "durations.txt").read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[0].endswith("s") and words[1] in ("call", "setup"):
            seconds[words[2]] += float(words[0][:-1])
    drawn = random.Random(seed)
    chosen = []
    for part in parts:
        places: dict[tuple[str, int, int], list[tuple[str, int]]] = collections.defaultdict(list)
        for path in files_of(part):
            for line, column, name, occurrence in mutants(path):
                places[str(path.relative_to(ROOT)), line, column].append((name, occurrence))
        chosen += [
            (part, *place, *drawn.choice(places[place]))
            for place in drawn.sample(sorted(places), min(each, len(places)))
        ]
    folder = Path(tempfile.mkdtemp(prefix="mutation-"))
    copies = [folder / str(i) for i in range(workers)]
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for copy in copies:
        for name in filter(None, tracked):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
    results: list[dict[str, object]] = []
    started = time.monotonic()

    def work(copy: Path, mine: Sequence[tuple[str, str, int, int, str, int]]) -> None:
        for part, path, line, _, name, occurrence in mine:
            code = mutated(ROOT / path, name, occurrence)
            tests = tests_of.get(path, {}).get(line, [])
            tests = sorted(tests, key=lambda test: seconds[test])[:MOST_TESTS]
            at_import = not tests and line in tests_of.get(path, {})
            if tests or at_import:
                outcome, by = tried(copy, path, code, tests or PARTS[part][1], python)
            else:
                outcome, by = "not reached", ""
            text = (ROOT / path).read_text().splitlines()[line - 1].strip()
            after = code.splitlines()[line - 1].strip()
            results.append(
                {
                    "part": part,
                    "path": path,
                    "line": line,
                    "operator": name,
                    "outcome": outcome,
                    "by": by,
                }
            )
            results[-1] |= {"before": text, "after": after, "tests": len(tests)}
            (data / "results.json").write_text(json.dumps(results, indent=1))
            print(
                f"{len(results)}/{len(chosen)} {time.monotonic() - started:.0f} s {outcome}:"
                f" {path}:{line} {after}",
                flush=True,
            )

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for future in [
            pool.submit(work, copy, chosen[i::workers]) for i, copy in enumerate(copies)
        ]:
            future.result()
    shutil.rmtree(folder)
    lines = [f"python benchmarks/mutation.py run --each {each} --seed {seed}", ""]
    lines.append(
        f"{'part':10}{'mutants':>9}{'killed':>9}{'survived':>10}{'not reached':>13}{'killed share':>14}"
    )
    for part in [*parts, "all"]:
        mine = [result for result in results if part in (result["part"], "all")]
        count = collections.Counter(result["outcome"] for result in mine)
        share = count["killed"] / max(1, len(mine))
        lines.append(
            f"{part:10}{len(mine):9}{count['killed']:9}{count['survived']:10}{count['not reached']:13}{share:14.0%}"
        )
    lines += ["", "Survivors, and mutants that no quick test reaches:"]
    lines += [
        f"{result['outcome']}: {result['path']}:{result['line']} ({result['tests']} tests)\n   "
        f" {result['before']}\n    {result['after']}"
        for result in results
        if result["outcome"] != "killed"
    ]
    out.write_text("\n".join(lines) + "\n")
    click.echo(out.read_text())


if __name__ == "__main__":
    main()
