"""Requests that make no sense, drawn from every option of every command: each is refused in a line,
or answered.
"""

import functools
import importlib

import click
from hypothesis import strategies as st

from ctrans.cli import COMMANDS
from tests.campaigns.harness import draw_all

LONG, HUGE = "n" * 300, "9" * 40
ODD = [
    "",
    " ",
    "\udcff",
    "\ud800name",
    LONG,
    "name\nname",
    "a/b",
    "../x",
    "-",
    "\u202e",
    "all",
    "0",
    "nan",
    "[red]",
    "é" * 130,
]
WHOLE = ["0", "-1", "1.5", "x", "", HUGE, "-" + HUGE, "1e3", "nan", "١", "0x10", "9" * 5000]
REAL = ["nan", "inf", "-inf", "0", "-1", "1e39", "1e-320", "1e400", "x", "", "-0.0", HUGE, "1e308"]
PATHS = [
    "/proc/none/x",
    "",
    LONG,
    "a/" + LONG,
    "/proc",
    "/dev/null",
    "/dev/zero",
    "/proc/self/mem",
    "/proc/1/mem",
    "\udcff",
    "é" * 130,
    "/sys/none/x",
]
SMALL = ["--depth", "1", "--width", "8", "--heads", "2", "--context", "4", "--batch", "1"]
QUICK = {
    "simulate": [*SMALL, "--no-reference"],
    "hjb-check": SMALL,
    "screen": [*SMALL, "--quick"],
    "diagnose": SMALL,
    "compare": ["/proc/none/a", "/proc/none/b"],
    "coordinate-check": [
        *SMALL[:2],
        *SMALL[4:8],
        "--widths",
        "8",
        "--widths",
        "16",
        "--updates",
        "1",
    ],
    "verify": ["--cases", "1", "--only", "lemma-1"],
    "train": [*SMALL, "--iterations", "1", "--eval-windows", "1"],
    "generate": ["--tokens", "1", "--checkpoint", "/proc/none"],
    "study": ["kim-growth", "--report", "--out", "/proc/none"],
    "report": ["/proc/none.json"],
    "watch": ["/proc/none", "--once"],
    "export": ["--checkpoint", "/proc/none"],
}
"""What keeps the answer to a request that is right after all short."""
SLOW = {
    "verify",
    "coordinate-check",
    "hjb-check",
    "screen",
    "diagnose",
}
"""Commands whose answers take seconds or minutes: what is drawn for them has nowhere to be written.
"""


@functools.cache
def parameters(command):
    """The options of a command, but for the one that makes a right answer take minutes."""
    found = importlib.import_module(f"ctrans.cli.{command.replace('-', '_')}").command
    return [
        parameter
        for parameter in found.params
        if isinstance(parameter, click.Option) and parameter.name != "compile"
    ]


def values(parameter):
    """What may be typed for that option."""
    if isinstance(parameter.type, click.Path):
        return PATHS
    if isinstance(parameter.type, click.types.IntParamType):
        return WHOLE
    if isinstance(parameter.type, click.types.FloatParamType):
        return REAL
    return [*ODD, "hpu", "privateuseone", "cuda:99", "meta", "dt=1e39", "depth=" + HUGE, *WHOLE[:4]]


@st.composite
def requests(draw):
    """A command, what keeps it small, and one to three options with what nobody should type."""
    command = draw(st.sampled_from(list(COMMANDS)))
    options = parameters(command)
    args = [command, *QUICK[command]]
    for parameter in draw(
        st.lists(st.sampled_from(options), min_size=1, max_size=3, unique_by=lambda p: p.name)
    ):
        flag = draw(st.sampled_from([*parameter.opts, *parameter.secondary_opts]))
        args += [flag] if parameter.is_flag else [flag, draw(st.sampled_from(values(parameter)))]
    if command in SLOW:
        args += [draw(st.sampled_from(["--json=/proc/none/a", "--out=/proc/none"]))]
    return args


def campaign(count, seed, check):
    """So many requests, each given to `check`."""
    draw_all(count, seed, requests(), check)
