"""Makes docs/gallery.md: each example, with what it prints and draws. One is not run.

`make gallery` runs them all, which takes some minutes. `python docs/_site/gallery.py NAME.py ...`
runs only those.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "pictures"
LEFT_OUT = {
    "compare_at_7b_shape.py": "takes a quarter of an hour of two processors that do nothing else"
}
"""The examples that are not run, and why."""
LONGEST = 60
"""The most lines of an example's output that the page shows."""


OUTPUT = re.compile(r"^## (\S+\.py)\n(.*?)^\?\?\? note \"Its source\"$", re.MULTILINE | re.DOTALL)


def main(names: list[str]) -> None:
    """Runs each example in an empty directory and writes the page. With names it runs only those,
    and keeps the output of the others.
    """
    PICTURES.mkdir(exist_ok=True)
    kept = dict(OUTPUT.findall(PAGE.read_text())) if names else {}
    parts = [
        "# Gallery",
        "",
        (
            "Each example in `examples/`, with what it printed when this page was made (`make"
            " gallery`). One takes too long to run here."
        ),
        "",
    ]
    for path in sorted(EXAMPLES.glob("*.py")):
        parts += [f"## {path.name}"]
        if path.name in kept and path.name not in names:
            parts += [*kept[path.name].rstrip().splitlines(), ""]
        else:
            print(path.name, flush=True)
            parts += ["", f"{(ast.get_docstring(ast.parse(path.read_text())) or '').strip()}", ""]
            parts += (
                [f"Not run here: it {LEFT_OUT[path.name]}.", ""]
                if path.name in LEFT_OUT
                else _run(path)
            )
        parts += source(path)
    PAGE.write_text("\n".join(parts).rstrip() + "\n")


def source(path: Path) -> list[str]:
    """An example's source, folded."""
    code = [f"    {line}".rstrip() for line in path.read_text().splitlines()]
    return ['??? note "Its source"', "", "    ```python", *code, "    ```", ""]


def _run(path: Path) -> list[str]:
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
        lines = done.stdout.rstrip().splitlines()
        shown = (
            lines
            if len(lines) <= LONGEST
            else [*lines[:LONGEST], f"... and {len(lines) - LONGEST} lines more"]
        )
        parts = ["```text", *shown, "```", ""]
        for picture in sorted(Path(place).rglob("*.png")):
            name = picture.name
            if not (EXAMPLES / "pictures" / name).exists():  # which the site has already
                name = f"{path.stem}-{name}"
                shutil.copyfile(picture, PICTURES / name)
            parts += [f"![What {path.name} drew: {picture.stem}](pictures/{name})", ""]
    return parts


if __name__ == "__main__":
    main(sys.argv[1:])
