"""What the built site adds and leaves out: README's pictures are in it, and nothing is fetched from
a network.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SERVED = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
PICTURES = Path(__file__).parents[2] / "examples" / "pictures"


def on_files(files: Files, config: Any) -> Files:
    """The files of docs, and the pictures that the README shows too."""
    for picture in sorted(PICTURES.glob("*.png")):
        files.append(File.generated(config, f"pictures/{picture.name}", abs_src_path=str(picture)))
    return files


def on_post_page(output: str, page: Any, **kwargs: object) -> str:
    """The page with our script in place of the theme's from a server: searching from files works by
    it.
    """
    return output.replace(
        SERVED, f'<script src="{"../" * page.url.count("/")}assets/search-from-files.js"></script>'
    )
