"""Draws the pictures of README and site anew, each by the command that anybody can type: `make
pictures`, or NAME ... for some.

python docs/_site/pictures.py [NAME ...]

All take some minutes on two cores, but for `text`.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "examples" / "pictures"
PICTURES = {
    "simulate": ("-m ctrans simulate --placement all --dt 0.1 --out it", "it/simulate.png"),
    "screen": (
        "-m ctrans screen --compare placement=none,pre,peri,post --quick --out it",
        "it/screen.png",
    ),
    "hjb-check": (
        "-m ctrans hjb-check --depth 4 --width 64 --context 32 --out it",
        "it/hjb-check.png",
    ),
    "hjb-train": (
        "-m ctrans hjb-check --placement pre --placement peri --norm layernorm --depth 1 --width 16"
        " --heads 2 --context 16 --train --out it",
        "it/hjb-train.png",
    ),
    "hjb-pde": (
        "-m ctrans hjb-check --placement peri --norm rmsnorm --depth 1 --pde --out it",
        "it/hjb-pde.png",
    ),
    "figure": (f"{ROOT}/examples/figure.py --out it.png", "it.png"),
    "before-failure": (f"{ROOT}/benchmarks/before_failure.py picture it.png", "it.png"),
    "optimal_path": (f"{ROOT}/examples/optimal_path.py --out it.png", "it.png"),
    "monitor": (f"{ROOT}/examples/monitor_trainer.py it; -m ctrans watch it", "it/watch.png"),
    "clinic": (
        "-m benchmarks.clinic --half second-sealed --report --picture it.png",
        "it.png",
    ),
    "steer_points": (f"{ROOT}/examples/steer_points.py --out it.png", "it.png"),
    "compare": (
        f"{ROOT}/examples/port.py it; -m ctrans compare it/model it/port --dtype float32 --out it",
        "it/compare.png",
    ),
    "continuous": ("-m benchmarks.continuous --report --out it.png", "it.png"),
    "xiong-warmup": ("-m ctrans study xiong-warmup --out it", "it/study.png"),
    "emadi-temperature": ("-m ctrans study emadi-temperature --out it", "it/study.png"),
    "kan-figure-1": ("-m ctrans study kan-figure-1 --out it", "it/study.png"),
    # needs `make text`, and four processor hours
    "text": (f"-m ctrans study text --bin {ROOT}/out/dictionaries --out it", "it/study.png"),
    "kan-table-1": ("-m ctrans study kan-table-1 --out it", "it/study.png"),
    "kan-table-2": ("-m ctrans study kan-table-2 --out it", "it/study.png"),
    "kim-initial-variance": ("-m ctrans study kim-initial-variance --out it", "it/study.png"),
    "kim-learning-rate": ("-m ctrans study kim-learning-rate --out it", "it/study.png"),
    "depth": ("-m ctrans study depth --out it", "it/study.png"),
    "kim-growth": ("-m ctrans study kim-growth --out it", "it/study.png"),
    "loss": ("-m ctrans train --iterations 300 --eval-every 20 --out it", "it/loss.png"),
}
"""By name: what Python is asked, and where the picture is then."""


def main(names: list[str]) -> None:
    """Those pictures, or all of them."""
    unknown = set(names) - set(PICTURES)
    if unknown:
        raise SystemExit(
            f"no such picture: {', '.join(sorted(unknown))}; there are {', '.join(PICTURES)}"
        )
    for name in names or PICTURES:
        commands, made = PICTURES[name]
        print(f"{name}: {commands}", flush=True)
        with tempfile.TemporaryDirectory() as place:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
            for command in commands.split(";"):
                subprocess.run(
                    [sys.executable, *shlex.split(command)],
                    cwd=place,
                    env=environment,
                    check=True,
                    stdout=sys.stderr,
                )
            shutil.copyfile(Path(place) / made, KEPT / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
