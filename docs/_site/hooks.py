"""What the built site adds and leaves out: README's pictures and the examples are in it, its
navigation is shown on a window of 1200 pixels, and nothing is fetched from a network.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SERVED = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
EXAMPLES = Path(__file__).parents[2] / "examples"
WIDE = {"76.25em": "70em", "76.234375em": "69.984375em"}
"""Widths from which the theme shows its navigation without a button, and ours."""


def on_files(files: Files, config: Any) -> Files:
    """The files of docs, the pictures that the README shows too, and the examples' sources."""
    for picture in sorted((EXAMPLES / "pictures").glob("*.png")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    for source in sorted(EXAMPLES.glob("*.py")):
        files.append(File.generated(config, f"examples/{source.name}", abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: object) -> str:
    """The gallery's links to examples/ beside docs/, as links to the site's copies."""
    if page.file.src_uri != "gallery.md":
        return markdown
    return markdown.replace("(../examples/pictures/", "(pictures/").replace(
        "(../examples/", "(examples/"
    )


def on_post_build(config: Any) -> None:
    """The theme's navigation, also on narrower windows."""
    assets = Path(config["site_dir"]) / "assets"
    for path in [*assets.rglob("*.min.css"), *assets.rglob("bundle.*.min.js")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(
            re.sub("|".join(map(re.escape, WIDE)), lambda match: WIDE[match[0]], text),
            encoding="utf-8",
        )


def on_post_page(output: str, page: Any, **kwargs: object) -> str:
    """The page with our script in place of the theme's from a server: searching from files works by
    it.
    """
    return output.replace(
        SERVED, f'<script src="{"../" * page.url.count("/")}assets/search-from-files.js"></script>'
    )
