"""More than one machine, tried on one: a study on two Ray nodes, and a training sharded over
processes. Both are killed and resumed.

python benchmarks/scale.py [study] [train] [plan]     # all; the study needs ray: pip install 'ctrans[ray]'

The times of the sharded training calibrate a model of its cost:

    step(P) = C/min(P, cores) + 3 (P - 1)/P bytes/bandwidth(P) + 3 units latency(P)

C is the step of one process, `bytes` are those of the weights, and `units` the parts that FSDP
gathers at a time. It gathers each one for the forward and again for the backward pass, and then
scatters its gradients. Latency and bandwidth are those of gloo's gathers alone.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# in place of this file's own folder, as in the other benchmarks
ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

from ctrans.base.threads import wait_passively

wait_passively()

import torch

from benchmarks.record import keep
from ctrans import GPT, GPTConfig
from ctrans.study.database import FILE, open_store
from ctrans.training import log
from solvers import ConfigError

STUDY = """
learning_rates = [1e-3, 3e-3, 1e-2]
seeds = [0, 1]
[base]
depth = 2
width = 32
heads = 2
context = 32
iterations = 60
eval_windows = 8
[vary]
placement = ["pre", "peri"]
"""
RUNS, FIRST_KILL, SECOND_KILL = 12, 3, 6
SHAPE: dict[str, int] = {"depth": 6, "width": 256, "heads": 8, "context": 128}
BATCH, ITERATIONS, KILLED_AT, WORLDS = 8, 24, 12, (1, 2, 4)
SIZES = (1 << 12, 1 << 24)
"""Bytes of the gathers that show latency and bandwidth."""
GATHERS = """
import sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
world = dist.get_world_size()
for size in map(int, sys.argv[1:]):
    part = torch.zeros(size // 4 // world)
    whole = torch.zeros(size // 4 // world * world)
    times = []
    for _ in range(12):
        dist.barrier()
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, part)
        times.append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(sorted(times)[6])
dist.destroy_process_group()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def ctrans(*words: object) -> list[str]:
    return [sys.executable, "-m", "ctrans", *map(str, words)]


def finished(directory: Path) -> dict[str, tuple[float | None, ...]]:
    """The losses of each run that ended, by its key; empty without a store."""
    if not (directory / FILE).exists():
        return {}
    with open_store(directory, write=False) as store:
        runs = store.runs()
    assert len({run.key for run in runs}) == len(runs), "a run stands there twice"
    return {run.key: tuple(run.losses) for run in runs}


def until(process: subprocess.Popen[bytes], directory: Path, count: int) -> None:
    """Waits for so many runs."""
    while process.poll() is None and len(finished(directory)) < count:
        time.sleep(0.2)
    if process.poll() is not None:
        sys.exit(f"the study ended with {process.returncode} before {count} runs")


def study() -> list[str]:
    """On two nodes of two processors each. The client is killed, and after its resumption a
    node.
    """
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "widths.toml"
        path.write_text(STUDY)
        start = time.perf_counter()
        subprocess.run(
            ctrans("study", path, "--workers", 1, "--out", Path(place) / "one"),
            env=environment(),
            check=True,
            capture_output=True,
        )
        alone, one = time.perf_counter() - start, finished(Path(place) / "one")
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=2, include_dashboard=False)
            other = cluster.add_node(num_cpus=2)
            cluster.wait_for_nodes()
            out = Path(place) / "ray"
            command = ctrans("study", path, "--ray", cluster.address, "--out", out)
            start = time.perf_counter()
            client = subprocess.Popen(
                command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            until(client, out, FIRST_KILL)
            client.kill()
            client.wait()
            kept = finished(out)
            client = subprocess.Popen(
                command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            until(client, out, SECOND_KILL)
            cluster.remove_node(other, allow_graceful=False)
            _, said = client.communicate()
            seconds = time.perf_counter() - start
        finally:
            cluster.shutdown()
        if client.returncode:
            sys.exit(f"the study ended with {client.returncode}: {said.decode()}")
        found = finished(out)
    assert len(one) == RUNS
    assert found.keys() == one.keys()
    assert kept.items() <= found.items()
    same = sum(found[key] == one[key] for key in one)
    return [
        (
            f"Study: {RUNS} runs with one worker {alone:.0f} s; by Ray on two nodes of two"
            f" processors {seconds:.0f} s, with the client killed after {len(kept)} runs and a node"
            f" after {SECOND_KILL}."
        ),
        (
            f"Each run stands there once, those of before the kill unchanged; of {same} of {RUNS}"
            " runs all validation losses have the bits of one worker's."
        ),
    ]


def training(world: int, out: Path, iterations: int, *more: object) -> list[str]:
    """The command of a training in so many processes."""
    launch = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        if world > 1
        else []
    )
    size = [word for name, value in SHAPE.items() for word in (f"--{name}", value)]
    course = [
        "--batch",
        BATCH,
        "--iterations",
        iterations,
        "--warmup",
        0,
        "--min-learning-rate",
        1e-3,
        "--save-every",
        4,
    ]
    course += [
        "--eval-every",
        1000,
        "--eval-windows",
        8,
        "--parallel",
        "fsdp" if world > 1 else "none",
    ]
    words = ["-m", "ctrans", "train", *size, *course, "--out", out, *more]
    return [sys.executable, *launch, *map(str, words)]


def losses(out: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in log.read(out) if "loss" in row}


def step_seconds(out: Path) -> float:
    """The median, without the first steps."""
    rates = [row["tokens_per_second"] for row in log.read(out) if "tokens_per_second" in row]
    return BATCH * SHAPE["context"] / statistics.median(rates[4:])


def gathers(world: int, directory: Path) -> tuple[float, float]:
    """Latency in seconds, and bytes a second that a process receives, of gloo's gathers."""
    script = directory / "gathers.py"
    script.write_text(GATHERS)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(world),
        str(script),
    ]
    done = subprocess.run(
        [*launch, *map(str, SIZES)], env=environment(), check=True, capture_output=True, text=True
    )
    small, large = map(float, done.stdout.split())
    return small, SIZES[1] * (world - 1) / world / (large - small)


def train() -> list[str]:
    """By FSDP over gloo; the largest world is killed and resumed."""
    model = GPT(GPTConfig(**SHAPE))
    size, units = (
        4 * sum(weight.numel() for weight in model.parameters()),
        len(list(model.depth.sublayers)) + 1,
    )
    lines = [
        f"Training: {SHAPE['depth']} blocks of width {SHAPE['width']}, {size / 2**20:.1f} MiB of"
        f" weights in {units} units, FSDP over gloo"
    ]
    cores, seconds = os.cpu_count() or 1, dict[int, float]()
    with tempfile.TemporaryDirectory() as place:
        for world in WORLDS:
            out = Path(place) / str(world)
            subprocess.run(
                training(world, out, ITERATIONS), env=environment(), check=True, capture_output=True
            )
            seconds[world] = step_seconds(out)
            line = f"  {world} processes: {seconds[world]:.3f} s a step"
            if world > 1:
                latency, bandwidth = gathers(world, Path(place))
                expected = (
                    seconds[1] / min(world, cores)
                    + 3 * (world - 1) / world * size / bandwidth
                    + 3 * units * latency
                )
                gap = max(
                    abs(a - b)
                    for a, b in zip(
                        losses(out).values(), losses(Path(place) / "1").values(), strict=True
                    )
                )
                line += (
                    f", by the model {expected:.3f} s (latency {1e3 * latency:.2f} ms,"
                    f" {bandwidth / 1e9:.2f} GB/s); losses of {ITERATIONS} steps within {gap:.0e}"
                    " of one process"
                )
            lines.append(line)
        lines.append(killed_and_resumed(Path(place)))
    return lines


def killed_and_resumed(place: Path) -> str:
    """All processes get SIGKILL in the middle."""
    world, out = WORLDS[-1], place / "killed"
    process = subprocess.Popen(
        training(world, out, ITERATIONS),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    while process.poll() is None and not (
        out.exists() and max(losses_so_far(out), default=0) >= KILLED_AT
    ):
        time.sleep(0.1)
    # torchrun gives each process a session of its own
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for number in (process.pid, *map(int, children)):
        os.kill(number, signal.SIGKILL)
    process.wait()
    at = max(losses(out))
    subprocess.run(
        training(world, out, ITERATIONS, "--resume"),
        env=environment(),
        check=True,
        capture_output=True,
    )
    whole, again = losses(place / str(world)), losses(out)
    assert whole.keys() == again.keys()
    gap = max(abs(whole[step] - again[step]) for step in whole)
    return (
        f"  {world} processes killed at step {at} and resumed: losses within {gap:.0e} of those"
        " without a kill"
    )


def losses_so_far(out: Path) -> Sequence[int]:
    try:
        return list(losses(out))
    except ConfigError:  # the log has no line yet, or half a one
        return []


def plan() -> list[str]:
    """The formula on paper: nobody ran this. Seconds of computation and exchange, and tokens a
    second if all of it overlaps or nothing.
    """
    world, weights, rate, bandwidth = 64, 6.74e9, 0.4 * 989e12, 50e9
    exchange = 3 * (world - 1) / world * 2 * weights / bandwidth
    lines = [
        f"On paper: {world} GPUs of {rate / 1e12:.0f} TFLOP/s, {bandwidth / 1e9:.0f} GB/s each,"
        f" {weights:.3g} weights in bfloat16;"
    ]
    lines.append(
        f"weights, gradients and Adam's state in float32: {16 * weights / world / 1e9:.1f} GB a GPU"
    )
    for tokens in (4096, 8192, 16384, 32768):
        compute = 6 * weights * tokens / rate
        rates = [
            world * tokens / seconds for seconds in (max(compute, exchange), compute + exchange)
        ]
        lines.append(
            f"  {tokens} tokens: {compute:.2f} s, {exchange:.2f} s; {rates[0]:.3g} to"
            f" {rates[1]:.3g} tokens/s"
        )
    return lines


PARTS: dict[str, Any] = {"study": study, "train": train, "plan": plan}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        sys.exit(f"{unknown[0]!r} is no part: give {' or '.join(PARTS)}")
    lines = [
        f"One machine of {os.cpu_count()} processors, {torch.get_num_threads()} threads here and"
        " one in each process."
    ]
    for name in wanted:
        lines += PARTS[name]()
    keep("scale" if len(wanted) == len(PARTS) else f"scale-{wanted[0]}", lines)


if __name__ == "__main__":
    main()
