"""Makes docs/gallery.md: the examples with a picture or an output to look at, and a list of the
others.

`make gallery` runs those whose output is shown, which takes some minutes. `python
docs/_site/gallery.py NAME.py ...` runs only those, and keeps the output of the others.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = {
    "figure.py": "figure",
    "steer_points.py": "steer_points",
    "optimal_path.py": "optimal_path",
    "monitor_trainer.py": "monitor",
}
"""The examples whose picture is shown, with its name in examples/pictures (`make pictures`)."""
OUTPUTS = {
    "largest_rate.py": 20,
    "simulate.py": 20,
    "hyper_connections.py": 20,
    "kinetic_cost.py": 20,
    "ode_block_in_gpt2.py": 20,
    "thermostat.py": 20,
    "new_method.py": 20,
    "screen_local_model.py": 15,
}
"""The examples whose output is shown, with the most lines of it."""
WIDEST = 120
"""The most characters of a shown line."""
PARAGRAPHS = 3
"""The most paragraphs of an example's docstring that the page shows."""
OUTPUT = re.compile(r"^## (\S+\.py)\n(?:(?!^## ).)*?^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main(names: list[str]) -> None:
    """Runs the examples whose output is shown, each in an empty directory, and writes the page.
    With names it runs only those.
    """
    kept = dict(OUTPUT.findall(PAGE.read_text())) if names else {}
    parts = [
        "# Gallery",
        "",
        "Pictures and outputs of programs in `examples/`. Run any of them.",
        "",
    ]
    shown = {
        name: [f"![What {name} draws](../examples/pictures/{picture}.png)"]
        for name, picture in PICTURES.items()
    }
    for name, most in OUTPUTS.items():
        output = kept[name] if name in kept and name not in names else run(EXAMPLES / name, most)
        shown[name] = ["```text", output.rstrip("\n"), "```"]
    for name, lines in shown.items():
        path = EXAMPLES / name
        parts += [*heading(path), "", *lines, "", *about(path), ""]
    parts += ["## Others", "", *others()]
    PAGE.write_text("\n".join(parts).rstrip() + "\n")


def heading(path: Path) -> list[str]:
    """The heading of an example that is shown, and what it does."""
    return [f"## {path.name}", "", docstring(path)[0]]


def about(path: Path) -> list[str]:
    """More of its docstring, and a link to its source."""
    more = [part for text in docstring(path)[1:PARAGRAPHS] for part in (text, "")]
    return [*more, f"Source: {source(path)}"]


def others() -> list[str]:
    """A line for each example that the page does not show."""
    return [
        f"- {source(path)}: {docstring(path)[0]}"
        for path in sorted(EXAMPLES.glob("*.py"))
        if path.name not in {*PICTURES, *OUTPUTS}
    ]


def docstring(path: Path) -> list[str]:
    """The paragraphs of an example's docstring without its command. Items of a list keep their
    lines.
    """
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraphs = [
        text for text in text.split("\n\n") if not text.strip().startswith("python examples/")
    ]
    return [re.sub(r"\n(?!- )\s*", " ", text) for text in paragraphs]


def source(path: Path) -> str:
    """A link to an example's source, from this page in the repository; the site has it elsewhere."""
    return f"[`{path.name}`](../examples/{path.name})"


def run(path: Path, most: int) -> str:
    """The first lines that an example prints."""
    print(path.name, flush=True)
    with tempfile.TemporaryDirectory() as place:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "100",
        }
        done = subprocess.run(
            [sys.executable, str(path)],
            cwd=place,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{path.name} failed:\n{done.stderr}")
    lines = [
        line if len(line) <= WIDEST else f"{line[: WIDEST - 3]}..."
        for line in done.stdout.rstrip().splitlines()
    ]
    if len(lines) > most:
        lines = [*lines[:most], f"... and {len(lines) - most} lines more"]
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
