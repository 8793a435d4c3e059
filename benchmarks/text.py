"""A long English text in tokens, for studies and trainings that need one: three dictionaries of
Debian's, encoded by byte pairs that are learned from them.

    python benchmarks/text.py [--out DIRECTORY] [--vocabulary 8192]        # or: make text

The packages are dict-gcide (Webster's of 1913 with additions, GNU GPL), dict-foldoc (the Free
On-line Dictionary of Computing, GNU FDL) and dict-jargon (the Jargon File, public domain): 47 MB
before cleaning. `apt-get download` fetches them, so the machine is a Debian or Ubuntu. Nothing of
them is part of this project.

It writes nanoGPT's `train.bin` and `val.bin`, for `--bin`, and `text.json` with the floors: the
losses of models that know how often a token comes, and how often it comes behind the last one and
the last two.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int64

PACKAGES = ("dict-gcide", "dict-foldoc", "dict-jargon")
SOURCE_MARK = re.compile(r"^\s*\[[^\]\n]*\]\s*$", re.MULTILINE)
"""A line that only says from which edition an entry is."""
STRETCH = 100_000
"""Characters that stay together: neighbours in a dictionary are of one family of words."""
ONE_IN = 20
"""The share of stretches that are for validation."""
DISCOUNT = 0.75
"""What is taken from each count for what was never seen (Ney, Essen and Kneser, 1994)."""

Ids = Int64[np.ndarray, " tokens"]
Share = Float[np.ndarray, " tokens"]


def fetched(package: str, folder: Path) -> str:
    """The dictionary of a package."""
    subprocess.run(["apt-get", "download", "--quiet", package], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    subprocess.run(["dpkg-deb", "--extract", archive, folder / package], check=True)
    (compressed,) = (folder / package).rglob("*.dict.dz")
    return gzip.decompress(compressed.read_bytes()).decode("utf-8", errors="replace")


def cleaned(text: str) -> str:
    """The text with a line for each paragraph, and without the lines that name an edition."""
    text = SOURCE_MARK.sub("", text)
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def stretches(text: str) -> Iterator[str]:
    """The text in stretches that end with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + STRETCH)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def behind(context: Ids, targets: Ids, size: int) -> tuple[Ids, Ids]:
    """The pairs of a context and its target as numbers, each once, and how often each comes."""
    pairs, counts = np.unique(context * size + targets, return_counts=True)
    return pairs, counts


def counts_of(keys: Ids, counts: Ids, asked: Ids) -> Ids:
    """The counts of the keys that are asked for, 0 for one that is not there."""
    index = np.minimum(np.searchsorted(keys, asked), len(keys) - 1)
    return np.where(keys[index] == asked, counts[index], 0)


def discounted(learned: tuple[Ids, Ids], asked: tuple[Ids, Ids], size: int, lower: Share) -> Share:
    """p(target | context) of the pairs that are asked for, after those that were learned.

    p = max(n_uv - D, 0)/n_u + D m_u/n_u q, where n are counts, m_u is the number of different
    targets behind u, and q is the probability in a shorter context.
    """
    pairs, counts = behind(*learned, size)
    contexts = pairs // size
    first = np.flatnonzero(np.diff(contexts, prepend=-1))
    total = np.add.reduceat(counts, first)
    different = np.diff(np.append(first, len(pairs)))
    context, targets = asked
    n_pair = counts_of(pairs, counts, context * size + targets)
    n = counts_of(contexts[first], total, context)
    m = counts_of(contexts[first], different, context)
    known = n > 0
    n = np.maximum(n, 1)
    share = np.maximum(n_pair - DISCOUNT, 0) / n + DISCOUNT * m / n * lower
    result: Share = np.where(known, share, lower)
    return result


def floors(train: Ids, validation: Ids, size: int) -> dict[str, float]:
    """The losses, in nats a token of the validation split, of tables of the training split."""
    frequencies = (np.bincount(train, minlength=size) + 1) / (len(train) + size)
    targets = validation[2:]
    one = frequencies[targets]
    two = discounted((train[:-1], train[1:]), (validation[1:-1], targets), size, one)
    pair, asked = train[:-2] * size + train[1:-1], validation[:-2] * size + validation[1:-1]
    three = discounted((pair, train[2:]), (asked, targets), size, two)
    names = ("unigram", "bigram", "trigram")
    return {
        name: float(-np.log(p).mean()) for name, p in zip(names, (one, two, three), strict=True)
    }


def main(out: Path, vocabulary: int) -> None:
    from tokenizers import ByteLevelBPETokenizer

    with tempfile.TemporaryDirectory() as folder:
        parts = [cleaned(fetched(package, Path(folder))) for package in PACKAGES]
    pieces = [piece for part in parts for piece in stretches(part)]
    split = {
        "val": [piece for i, piece in enumerate(pieces) if i % ONE_IN == ONE_IN - 1],
        "train": [piece for i, piece in enumerate(pieces) if i % ONE_IN != ONE_IN - 1],
    }
    coder = ByteLevelBPETokenizer()
    coder.train_from_iterator(split["train"], vocab_size=vocabulary, show_progress=False)
    out.mkdir(parents=True, exist_ok=True)
    ids: dict[str, Ids] = {}
    for name, texts in split.items():
        coded = [coding.ids for coding in coder.encode_batch(texts)]
        ids[name] = np.concatenate([np.asarray(each, dtype=np.int64) for each in coded])
        ids[name].astype("<u2").tofile(out / f"{name}.bin")
    size = {name: sum(len(text.encode()) for text in texts) for name, texts in split.items()}
    described = {
        "packages": list(PACKAGES),
        "vocabulary": vocabulary,
        "bytes": size,
        "tokens": {name: len(tokens) for name, tokens in ids.items()},
        "bytes_per_token": size["val"] / len(ids["val"]),
        "nats_per_token": floors(ids["train"], ids["val"], vocabulary),
    }
    (out / "text.json").write_text(json.dumps(described, indent=2) + "\n")
    print(json.dumps(described, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("out/dictionaries"))
    parser.add_argument("--vocabulary", type=int, default=8192)
    arguments = parser.parse_args()
    main(arguments.out, arguments.vocabulary)
