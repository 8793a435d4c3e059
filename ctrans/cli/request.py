"""What a user asks of a command: one frozen request, made once of click's parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import click
import torch
from click.core import ParameterSource

from ctrans.model.checkpoint import load_config
from solvers import ConfigError
from solvers.errors import look_up

MODEL_OPTIONS = ("checkpoint", "model", "architecture", "python")
"""Options that name a model, in place of a seeded one."""
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What every command is asked.

    - `command`: its name
    - `options`: every option's value by name, in the order in which click has them: what results show
    - `typed`: the names of the options that the user typed, and did not leave at their defaults
    - `json_path`: where the result goes as one JSON object; "-" is stdout
    - `html_path`: where it goes as a page
    - `verbose`: whether formulas and folded chapters are printed too
    """

    command: str
    options: Mapping[str, Any]
    typed: frozenset[str]
    json_path: str | None
    html_path: str | None = None
    verbose: bool = False

    unshown: ClassVar[frozenset[str]] = frozenset({"json_path", "html_path", "verbose"})
    """Options that no result shows."""

    @classmethod
    def read(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """The fields' values, from click's parameters; those of other names are left out."""
        return parameters

    @property
    def quiet(self) -> bool:
        """Whether stdout is for the JSON alone."""
        return self.json_path == "-"

    def shown(self, **resolved: Any) -> dict[str, Any]:
        """The options for JSON, with what became of some of them in their place, or at the end where they were none."""
        values = {name: value for name, value in self.options.items() if name not in self.unshown}
        return {name: _in_words(value) for name, value in (values | resolved).items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrittenRequest(Request):
    """What a command is asked that writes files; `out` is their directory."""

    out: Path | None

    unshown: ClassVar[frozenset[str]] = Request.unshown | {"out"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRequest(WrittenRequest):
    """What a command is asked that looks at models on a text.

    - `placements`, `norms`: as they were typed: "all" stands for a whole table
    - `depth` to `seed`: the seeded models' architecture, as `GPTConfig` has it, and their weights
    - `named`: models as arguments, each a checkpoint of ours or somebody else's model
    - `checkpoint`, `model`, `architecture`, `python`: where a model comes from that is not one of these, arguments among them; `stream`
      is whether weights are made on demand, None where that is left to their size
    - `anatomy`, `loss`, `example`: the file that names the parts of such a model, what its output is compared with, and the function
      that gives what it reads
    - `file`, `text`, `ids`, `images`, `batch`: what it reads
    - `several`: option and value of every model that is named, where these are more than one; the options' own fields are then None
    """

    placements: tuple[str, ...]
    norms: tuple[str, ...]
    depth: int
    width: int
    heads: int
    context: int
    dt: float
    attention: str
    ffn: str
    initialisation: str
    embedding_std: float
    activation: str
    qk_norm: str | bool
    positions: str
    rotary_base: float
    rotary_fraction: float
    kv_heads: int | None
    window: int | None
    softcap: float | None
    sinks: bool
    gated_output: bool
    residual: str
    residual_init: float | None
    streams: int | None
    parallel_blocks: bool
    stack_steps: int | None
    branch_norms: bool
    experts: int
    top_k: int
    shared_experts: int
    router: str
    expert: str
    norm_groups: int | None
    norm_alpha: float | None
    norm_radius: float | None
    seed: int
    named: tuple[Path, ...]
    checkpoint: Path | None
    model: Path | None
    architecture: str | None
    python: str | None
    anatomy: Path | None
    loss: str | None
    example: str | None
    stream: bool | None
    file: Path | None
    text: str | None
    ids: Path | None
    images: Path | None
    batch: int
    dtype: str
    device: str
    several: tuple[tuple[str, Any], ...]

    compares: ClassVar[bool] = False
    """Whether several models may be named."""
    unshown: ClassVar[frozenset[str]] = WrittenRequest.unshown | {"placements", "norms"}

    @classmethod
    def read(cls, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        # most commands take one norm, by an option of that name
        norms = {"norms": (parameters["norm"],)} if "norm" in parameters else {}
        given = [("checkpoint" if is_ours(path) else "model", path) for path in parameters["named"]]
        given += [(option, value) for option in MODEL_OPTIONS for value in _values(parameters[option])]
        several = tuple(given) if len(given) > 1 else ()
        return {**parameters, **norms, "several": several, **dict.fromkeys(MODEL_OPTIONS), **({} if several else dict(given))}


def is_ours(path: Path) -> bool:
    """Whether ctrans saved what is there; of anything else, whoever opens it says what it is."""
    try:
        load_config(path)
        return True
    except ConfigError:
        return False


def _in_words(value: Any) -> Any:
    """Paths, alone or in a tuple, as text."""
    return [_in_words(each) for each in value] if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value


def _values(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


Asked = TypeVar("Asked", bound=Request)


def request_of(kind: type[Asked], context: click.Context) -> Asked:
    """The request of a command that is being called."""
    fields = {field.name for field in dataclasses.fields(kind)}
    values = {name: value for name, value in kind.read(context.params).items() if name in fields}
    typed = [name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    options = MappingProxyType(dict(context.params))
    return kind(command=str(context.command.name), options=options, typed=frozenset(typed), **values)


def takes(kind: type[Asked]) -> Callable[[Callable[[Asked], None]], Callable[..., None]]:
    """Makes a function of one request what click can call with all its options."""

    def decorate(command: Callable[[Asked], None]) -> Callable[..., None]:
        @click.pass_context
        @functools.wraps(command)
        def call(context: click.Context, /, **_: object) -> None:
            command(request_of(kind, context))

        return call

    return decorate


def get_dtype(name: str) -> torch.dtype:
    """The dtype of that name; ConfigError otherwise."""
    return look_up("dtype", name, DTYPES)


def get_device(name: str) -> torch.device:
    """The device of that name; ConfigError where this machine has none such."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (
        RuntimeError,
        AssertionError,
        ImportError,
        ValueError,
        TypeError,
    ):  # each backend that is not there says so in its way
        raise ConfigError(
            f"device {name!r} is not available here: use --device cpu, or install a torch that supports it"
        ) from None
    if device.type == "meta":
        raise ConfigError("device 'meta' holds no numbers: use --device cpu")
    return device
