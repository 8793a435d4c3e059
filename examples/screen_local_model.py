"""Screen models from local directories before you train them: a GPT-2 and a Gemma, in one table.

The example first makes and saves two tiny random models with a tokenizer, so that it runs anywhere.
You can give local directories that save_pretrained() wrote instead. Nothing is downloaded.

    python examples/screen_local_model.py [DIRECTORY ...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import tokenizers
import torch
import transformers
from rich.console import Console

from ctrans.base.json_values import plain
from ctrans.examine.screened import as_object
from ctrans.examine.screening.screen import EFFORTS, Screening, screen
from ctrans.interop import open_model
from ctrans.model.text import default_text, windows
from ctrans.report.contents import page_of
from ctrans.report.terminal import show

VOCABULARY, LENGTH, SEQUENCES = 512, 24, 2


def screened(directory: str | Path) -> Screening:
    """Opens the model, reads text with its tokenizer, makes pairs of tokens and targets, and
    screens.
    """
    opened = open_model(directory, torch.float32)
    print(opened.described)
    tokeniser = opened.tokeniser()
    text = windows(tokeniser.encode(default_text()), SEQUENCES, LENGTH + 1)
    tokens, targets = opened.pairs(text, tokeniser.mask)
    return screen(opened.model, tokens, targets, EFFORTS["quick"])


def save_examples(root: Path) -> list[Path]:
    """A random GPT-2 and a random Gemma 3 of one small shape, each with a byte-level tokenizer."""
    shape = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    gemma = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    torch.set_num_threads(1)  # one thread is fastest for models of this size
    torch.manual_seed(0)
    transformers.utils.logging.disable_progress_bar()
    models = {
        "gpt2": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**shape, n_embd=64, n_layer=4, n_head=4)
        ),
        "gemma": transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(**shape, **gemma, intermediate_size=128)
        ),
    }
    words = tokenizers.ByteLevelBPETokenizer()
    words.train_from_iterator(
        [default_text()[:50_000].decode(errors="ignore")],
        vocab_size=VOCABULARY,
        show_progress=False,
    )
    for name, model in models.items():
        model.save_pretrained(root / name)
        words.save(str(root / name / "tokenizer.json"))
    return [root / name for name in models]


with tempfile.TemporaryDirectory() as scratch:
    directories = [Path(name) for name in sys.argv[1:]] or save_examples(Path(scratch))
    result = as_object({directory.name: screened(directory) for directory in directories})
    show(page_of({"screen": plain({"command": "screen", **result})}), Console())
