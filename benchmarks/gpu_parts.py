"""The parts of `benchmarks/gpu.py`, as a table. A new part is one entry of `PARTS`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
CORE = ("torchdiffeq", "jaxtyping", "numpy")
"""What the packages import at once."""
COMMANDS = (*CORE, "scipy", "matplotlib", "click", "rich", "safetensors")
CLOSE = 1e-4
"""How far float32 losses, gradient norms and validation losses of ten iterations may be apart,
relative.
"""
COMPARED = ("loss", "gradient_norm", "validation_loss")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a run of the script was asked for."""

    rehearsal: bool
    nanogpt: Path | None = None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    def words(self) -> list[str]:
        """It as arguments of the script."""
        return ["--rehearse"] * self.rehearsal + (
            [] if self.nanogpt is None else ["--nanogpt", str(self.nanogpt)]
        )


def enrolled_tests(request: Request) -> list[str]:
    """The tests that have the device among their parameters (`tests/helpers.py`), whose names have
    its name therefore.
    """
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if "DEVICES" in path.read_text()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-k",
        request.device,
        "-p",
        "no:cacheprovider",
        "--tb",
        "short",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return done.stdout.splitlines()[-1:]


def four_gradients(request: Request) -> list[str]:
    from benchmarks import gradients

    if request.rehearsal:
        return [*gradients.table(steps=(8,)), *gradients.deep(blocks=4, width=32)]
    return [*gradients.table(steps=(8, 32, 128)), *gradients.deep()]


def training_beside_nanogpt(request: Request) -> list[str]:
    from benchmarks import training

    return training.compare(request.nanogpt, rounds=1 if request.rehearsal else 8)


def parallel_training(request: Request) -> list[str]:
    """One process, then as many as there are devices, replicated and sharded, from the same seed on
    the same batches.
    """
    world = 2 if request.rehearsal else torch.cuda.device_count()
    width, context, batch = (16, 8, 4) if request.rehearsal else (512, 512, 8 * world)
    size = [
        "--depth",
        "4",
        "--width",
        width,
        "--heads",
        "4",
        "--context",
        context,
        "--batch",
        batch,
        "--placement",
        "peri",
    ]
    course = [
        "--iterations",
        10,
        "--warmup",
        0,
        "--eval-every",
        5,
        "--eval-windows",
        2 * batch,
        "--device",
        request.device,
    ]
    ways = {"none": [], "ddp": [world], "fsdp": [world]}
    lines, logs = [], {}
    with tempfile.TemporaryDirectory() as directory:
        for kind, processes in ways.items():
            out = Path(directory) / kind
            launch = (
                ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", *processes]
                if processes
                else []
            )
            words = [
                *launch,
                "-m",
                "ctrans",
                "train",
                *size,
                *course,
                "--parallel",
                kind,
                "--out",
                out,
            ]
            start = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *map(str, words)],
                cwd=ROOT,
                capture_output=True,
                text=True,
                check=False,
            )
            seconds = time.perf_counter() - start
            if done.returncode:
                sys.exit(
                    "\n".join(
                        [
                            *lines,
                            f"--parallel {kind} ended with {done.returncode}",
                            done.stdout,
                            done.stderr,
                        ]
                    )
                )
            logs[kind] = [
                row
                for line in (out / "log.jsonl").read_text().splitlines()
                if "loss" in (row := json.loads(line))
            ]
            apart = differences(logs["none"], logs[kind])
            rate = statistics.median(
                row["tokens_per_second"] for row in logs[kind] if "tokens_per_second" in row
            )
            lines.append(
                f"--parallel {kind:4} {sum(processes) or 1} processes: {seconds:5.1f} s in all,"
                f" {rate:9.0f} tokens/s; apart from one process's, relative:"
                f" {', '.join(f'{name} {value:.1e}' for name, value in apart.items())}"
            )
            if max(apart.values()) > CLOSE:
                sys.exit(
                    "\n".join(
                        [*lines, f"--parallel {kind} is further than {CLOSE:g} from one process"]
                    )
                )
    return lines


def differences(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, float]:
    """The largest relative difference of each quantity of two logs."""
    if [row["step"] for row in first] != [row["step"] for row in second]:
        sys.exit("the logs have other steps")
    pairs = list(zip(first, second, strict=True))
    return {
        name: max(
            abs(a[name] - b[name]) / abs(a[name])
            for a, b in pairs
            if a.get(name) is not None and b.get(name) is not None
        )
        for name in COMPARED
    }


def command(*words: str) -> tuple[dict[str, Any], str]:
    """The JSON of a command of `ctrans` in this process; and in words how long it took, and how
    much of the device it had.
    """
    from ctrans.cli import main

    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        with contextlib.redirect_stdout(io.StringIO()) as said:
            try:
                main([*words, "--json", str(path), "--out", directory], prog_name="ctrans")
            except SystemExit as ended:
                if ended.code:
                    print(said.getvalue(), file=sys.stderr)
                    raise
        result = json.loads(path.read_text())
    seconds = time.perf_counter() - start
    memory = (
        f", at most {torch.cuda.max_memory_allocated() / 2**20:.0f} MiB of the device"
        if torch.cuda.is_available()
        else ""
    )
    return result, f"ctrans {' '.join(words)}: {seconds:.1f} s{memory}"


def screening(request: Request) -> list[str]:
    small = (
        ["--depth", "2", "--width", "16", "--heads", "2", "--tokens", "8", "--batch", "1"]
        if request.rehearsal
        else []
    )
    result, words = command("screen", "--quick", "--device", request.device, *small)
    return [
        words,
        f"Flags: {json.dumps({name: model['flags'] for name, model in result['models'].items()})}",
    ]


def streamed(request: Request) -> list[str]:
    name, depth = ("gpt2", "2") if request.rehearsal else ("llama-7b", "4")
    size = [
        "--architecture",
        name,
        "--depth",
        depth,
        "--tokens",
        "32",
        "--batch",
        "1",
        "--no-reference",
        "--stream",
    ]
    result, words = command("simulate", *size, "--device", request.device)
    return [
        words,
        *(f"{placement}: {found['status']}" for placement, found in result["placements"].items()),
    ]


def monitor_overhead(request: Request) -> list[str]:
    from benchmarks import monitor

    if request.rehearsal:
        return monitor.measured(
            monitor.SIZES["tiny"], "cpu", cycles=2, backend="aot_eager", log_steps=2000
        )
    return monitor.measured(monitor.SIZES["124M"], request.device, cycles=6)


def populations(request: Request) -> list[str]:
    from benchmarks import populations

    cases, rounds = (((2, 1, 8),), 1) if request.rehearsal else (((8, 1, 32), (8, 8, 64)), 3)
    return [populations.line(*case, rounds, request.device) for case in cases]


def foreign(request: Request) -> list[str]:
    """Models written by strangers: what a monitor and a diagnosis see of each on the device, next
    to the same on the CPU.
    """
    import ctrans
    from ctrans.training.monitor.gauges import Gauges
    from ctrans.training.monitor.sites import sites_of
    from tests.interop.test_strangers import STRANGERS, backward, opened_of

    def figures(name: str, device: str) -> dict[str, list[float]]:
        module, opened, inputs, main, targets = opened_of(name, device)
        told = ctrans.diagnose(opened, main, targets).readings
        gauges = Gauges(sites_of(module, example=inputs))
        gauges.arm(looking=True)
        backward(name, module.eval(), inputs, targets)
        found = {
            key: torch.tensor(value).flatten().tolist() for key, value in gauges.read(None).items()
        }
        return {
            **found,
            **{
                key: sorted(reading.value for reading in readings) for key, readings in told.items()
            },
        }

    lines, apart = list[str](), dict[str, float]()
    for name in list(STRANGERS)[: 4 if request.rehearsal else None]:
        try:
            there, here = figures(name, request.device), figures(name, "cpu")
            other = [
                key
                for key in there.keys() | here.keys()
                if len(there.get(key, [])) != len(here.get(key, []))
            ]
            assert not other, "; ".join(
                f"{key}: {there.get(key)} for {here.get(key)}" for key in other
            )
            apart[name] = max(
                abs(a - b) / max(abs(b), 1e-6)
                for key in here
                for a, b in zip(there[key], here[key], strict=True)
            )
        except Exception as error:  # the others are looked at all the same
            lines.append(f"{name}: {type(error).__name__}: {error}")
    worst = max(apart, key=apart.__getitem__)
    lines.append(
        f"{len(apart)} models in float64, figures of the monitor and the diagnosis: those on"
        f" {request.device} differ from the CPU's by at most {apart[worst]:.1e} ({worst}), relative"
    )
    if len(lines) > 1 or apart[worst] > CLOSE:
        sys.exit("\n".join(lines))
    return lines


def beside_peers(request: Request) -> Iterator[str]:
    """Solvers next to torchdiffeq, and to diffrax if it is there: the three shapes of `make
    bench`.
    """
    from benchmarks.bench.solving import solving

    for row in solving(request.device, quick=True):
        yield from bench_lines([row])


def grids(request: Request) -> list[str]:
    """The HJB equation on the device: the values of the CPU, and the time of a short solve."""
    from benchmarks.bench import grids as part
    from benchmarks.hjb import NearestTarget, our_solver, square

    lines = []
    for scheme in ("upwind", "weno5"):
        there, here = (
            our_solver(scheme)(NearestTarget(), square(101, device), 0.25)
            for device in (request.device, "cpu")
        )
        apart = float(abs(there - here).max())
        lines.append(
            f"{scheme}, 101 x 101 to T = 0.25: values on {request.device} and on the CPU differ by"
            f" at most {apart:.1e}"
        )
        if not apart < 1e-12:
            sys.exit("\n".join(lines))
    return [*lines, *bench_lines(part.grids(request.device, quick=True))]


def bench_lines(rows: list[Any]) -> list[str]:
    from benchmarks.bench.report import row_lines

    return [line for row in rows for line in row_lines(dataclasses.asdict(row))]


@dataclasses.dataclass(frozen=True)
class Part:
    """One thing to confirm: the packages it cannot do without, the seconds it may take, and what
    returns its lines.
    """

    name: str
    title: str
    run: Callable[[Request], Iterable[str]]
    seconds: float
    needs: tuple[str, ...] = CORE


PARTS = {
    part.name: part
    for part in (
        Part(
            "tests",
            "what tests/ enrols for the device",
            enrolled_tests,
            56,
            (*COMMANDS, "pytest", "hypothesis"),
        ),
        Part("gradients", "the four gradients", four_gradients, 37, COMMANDS),
        Part(
            "training",
            "compiled bfloat16 training of 124M beside nanoGPT",
            training_beside_nanogpt,
            60,
            COMMANDS,
        ),
        Part("parallel", "DDP and FSDP against one process", parallel_training, 53, COMMANDS),
        Part(
            "monitor",
            "monitor overhead: a watched training of 124M beside the same unwatched",
            monitor_overhead,
            85,
            COMMANDS,
        ),
        Part(
            "foreign",
            "models of strangers, watched and diagnosed",
            foreign,
            64,
            (*COMMANDS, "pytest"),
        ),
        Part("solvers", "solvers beside peers", beside_peers, 85, CORE),
        Part("grids", "the HJB equation on a grid", grids, 48, CORE),
        Part("populations", "many small runs as one", populations, 19, COMMANDS),
        Part("screening", "ctrans screen", screening, 23, COMMANDS),
        Part(
            "streamed",
            "a model whose weights are made on demand",
            streamed,
            41,
            (*COMMANDS, "transformers"),
        ),
    )
}
