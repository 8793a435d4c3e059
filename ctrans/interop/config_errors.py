"""The library's errors for entries of a config, in words of JSON: the file, the entry, its value,
and what is allowed.

The library decides what it accepts. So an entry that one family does not use, such as GPT-2's
`pad_token_id`, is free there, and is named only where the library fails.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from ctrans.interop.foreign_errors import FOREIGN_ERRORS
from solvers import ConfigError

OF_A_TYPE = re.compile(
    r"error for field '(?P<name>\w+)': TypeError: Field '\w+' (?:with value (?P<value>.*?) doesn't"
    r" match any type in \((?P<types>.*?)\)\."
    r"|expected (?P<type>\w+), got \w+ \(value: (?P<one>.*)\))"
)
"""How the library says that an entry is of another type."""
ONE_TYPE = re.compile(r"<class '(?:\w+\.)*(\w+)'>|(?:\w+\.)*(\w+\[\w+\]|\w+)")
"""One of the types in such an error."""
IN_JSON = {
    "int": "a whole number",
    "float": "a number with a decimal point",
    "bool": "true or false",
    "str": "a text",
    "list": "a list",
    "list[str]": "a list of texts",
    "list[int]": "a list of whole numbers",
    "tuple": "a list",
    "dict": "an object",
    "NoneType": "null",
}
"""JSON's words for Python's types."""
HEADS = (
    "num_attention_heads",
    "n_head",
    "n_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
    "attention_heads",
)
"""Config entries with a number of heads."""
WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "embedding_size")
"""Config entries with the width that heads divide."""
BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
"""Config entries with the number of blocks."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Config entries with the number of experts of a mixture."""
EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
)
"""Config entries with the number of experts that each token gets."""


@contextmanager
def explaining_entries(where: str, entries: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the library's errors for the entries of a config become ConfigErrors in words of
    JSON. All its other errors pass.
    """
    try:
        yield
    except ConfigError:
        raise
    except FOREIGN_ERRORS as error:
        problem = _of_a_type(error) or _of_a_fault(error, entries)
        if problem:
            raise ConfigError(f"{where} says {problem}") from None
        raise


def check_groups(where: str, model: nn.Module) -> None:
    """Raises ConfigError if heads share keys in groups of unequal size. The library makes such a
    model, and fails when it runs.

    Families that compute keys from a few latent numbers have no groups, whatever their config says.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if not hasattr(module, "num_key_value_groups") or hasattr(config, "kv_lora_rank"):
            continue
        heads = getattr(config, "num_attention_heads", None)
        groups = getattr(config, "num_key_value_heads", None)
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise ConfigError(
                f"{where} says num_key_value_heads = {groups}: it must divide num_attention_heads ="
                f" {heads}"
            )


def _of_a_type(error: Exception) -> str:
    """The entry and the types that are allowed; "" for another error."""
    found = OF_A_TYPE.search(_words(error))
    if found is None:
        return ""
    if found["type"]:
        types = [found["type"]]
        value = found["one"]
    else:
        types = [of_class or name for of_class, name in ONE_TYPE.findall(found["types"])]
        value = found["value"]
    kinds = dict.fromkeys(IN_JSON.get(kind, "an object") for kind in types)
    return f"{found['name']} = {value[:80]}: it must be {' or '.join(kinds)}"


def _of_a_fault(error: Exception, entries: Mapping[str, Any]) -> str:
    """The entries that do not fit together, by the first row of `FAULTS` that knows them; "" for
    another error.
    """
    message = _words(error)
    for fault in FAULTS:
        found = re.search(fault.message, message)
        if found is not None:
            problem = fault.problem(found, entries)
            if problem:
                return problem
    return ""


def _words(error: Exception) -> str:
    name = ""
    if isinstance(error, KeyError):
        name = "KeyError: "
    return name + " ".join(str(error).split())


def _padding(found: re.Match[str], entries: Mapping[str, Any]) -> str:
    for part in _parts(entries):
        token = part.get("pad_token_id")
        vocabulary = part.get("vocab_size")
        if not isinstance(token, int) or not isinstance(vocabulary, int):
            continue
        if not -vocabulary <= token < vocabulary:
            return (
                f"pad_token_id = {token}: it must be at least 0 and below vocab_size ="
                f" {vocabulary}, or null"
            )
    return ""


def _heads(found: re.Match[str], entries: Mapping[str, Any]) -> str:
    width = int(found["width"])
    heads = int(found["heads"])
    for part in _parts(entries):
        for name in HEADS:
            if part.get(name) == heads:
                divided = _name_of(part, WIDTHS, width, "the width")
                return f"{name} = {heads}: it must divide {divided}"
    return ""


def _chosen_experts(found: re.Match[str], entries: Mapping[str, Any]) -> str:
    for part in _parts(entries):
        experts = next((name for name in EXPERTS if isinstance(part.get(name), int)), None)
        for name in EXPERTS_OF_A_TOKEN:
            chosen = part.get(name)
            if experts is not None and isinstance(chosen, int) and chosen > part[experts]:
                return f"{name} = {chosen}: it must be at most {experts} = {part[experts]}"
    return ""


def _number_of_types(found: re.Match[str], entries: Mapping[str, Any]) -> str:
    blocks = int(found["blocks"])
    name = found["name"]
    for part in _parts(entries):
        types = part.get(name)
        if isinstance(types, list) and len(types) == int(found["types"]):
            return (
                f"{name} = {json.dumps(types)[:80]}, {len(types)} in all: it must have one for each"
                f" block, and {_name_of(part, BLOCKS, blocks, 'the number')}"
            )
    return ""


def _unknown_type(found: re.Match[str], entries: Mapping[str, Any]) -> str:
    allowed = re.findall(r"'(\w+)'", found["allowed"])
    name = found["name"]
    for part in _parts(entries):
        types = part.get(name)
        if not isinstance(types, list):
            continue
        for kind in types:
            if kind in allowed:
                continue
            hint = "it"
            near = difflib.get_close_matches(str(kind), allowed, n=1, cutoff=0.4)
            if near:
                hint = f"did you mean {near[0]!r}? It"
            return (
                f"{name} with {json.dumps(kind)[:80]}: {hint} must be one of {', '.join(allowed)}"
            )
    return ""


def _type_of_others(found: re.Match[str], entries: Mapping[str, Any]) -> str:
    for part in _parts(entries):
        types = part.get("layer_types")
        if isinstance(types, list) and found["type"] in types:
            return (
                f'layer_types with "{found["type"]}": this family has no such blocks, choose others'
            )
    return ""


def _name_of(part: Mapping[str, Any], names: tuple[str, ...], number: int, default: str) -> str:
    """ "name = number" by the name that the config has for this number."""
    named = [name for name in names if part.get(name) == number]
    return f"{[*named, default][0]} = {number}"


def _parts(entries: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The config and its nested parts."""
    yield entries
    for value in entries.values():
        if isinstance(value, Mapping):
            yield from _parts(value)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Entries that do not fit together: a pattern of the library's message, and a function of its
    match and of the config that says the problem, or "" if the config does not have it.
    """

    message: str
    problem: Callable[[re.Match[str], Mapping[str, Any]], str]


FAULTS = (
    Fault("Padding_idx must be within num_embeddings", _padding),
    Fault(
        r"^(?=.*(?:multiple of|divisible by))\D*(?P<width>\d+)\D+(?P<heads>\d+)\D*$",
        _heads,
    ),
    Fault(
        r"`num_hidden_layers` \((?P<blocks>\d+)\) must be equal to the number of"
        r" `(?P<name>\w*layer_types)` \((?P<types>\d+)\)",
        _number_of_types,
    ),
    Fault(r"The `(?P<name>\w*layer_types)` entries must be in \((?P<allowed>.*?)\)", _unknown_type),
    Fault("selected index k out of range", _chosen_experts),
    Fault(r"^KeyError: '(?P<type>\w+)'$", _type_of_others),
)
"""The faults that are explained. One more needs one more entry."""
