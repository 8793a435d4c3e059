"""A model of `transformers` around its blocks. Its inputs and outputs have known names, and it
accepts embeddings in place of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ctrans.base.as_found import as_found
from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.anatomy import Anatomy
from ctrans.interop.attention_rows import IMPLEMENTATION
from ctrans.interop.block_calls import (
    Call,
    StateForm,
    intercepted,
    recorded,
    recorded_until,
)
from ctrans.interop.block_structure import Structure, alike, make_of
from ctrans.interop.example_inputs import example_of, main_input, reads_tokens, stand_in
from ctrans.interop.find_blocks import block_list_by_name, blocks_at, form_of_blocks
from ctrans.interop.model_adapter import REMEMBERED, ModelAdapter, context_of, tensor_in
from ctrans.interop.recognise import recognise
from ctrans.interop.recorded_calls import without_fast_path
from solvers import ConfigError


class TransformersAdapter(ModelAdapter):
    """A model of `transformers` whose blocks and their parts have usual names, or given ones."""

    takes_padding = True
    blocks_path: str

    def __init__(self, model: nn.Module, anatomy: Anatomy):
        super().__init__(model, anatomy)
        self.form = StateForm()
        self._contexts: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def predicts(self) -> bool:
        return self.model.get_output_embeddings() is not None

    def block_calls(self) -> list[Call]:
        """The call that the model makes of each block for the example."""
        self._find_blocks()
        return recorded(self.blocks(), self._run, self.form)

    def _calls_and_state(self) -> tuple[list[Call], Tensor]:
        """The call that the model makes of each block, and the first state of the example. But for
        weights on demand the calls are those for states of two sequences, as `block_context` gives.
        """
        first = self._find_blocks()
        if first is None:
            calls = recorded(self.blocks(), self._run, self.form)
            first = calls[0].x
        else:
            states = first
            if len(first) == 1:
                states = torch.cat([first, first])
            calls = recorded(self.blocks(), lambda: self.run_like(states), self.form)
            self._keep(states, [call.context for call in calls])
        config = self.model.config
        self.family = config.model_type
        self.context = context_of(config)
        if reads_tokens(self.model):
            self.vocabulary = self.model.get_input_embeddings().num_embeddings
        else:
            self.vocabulary = 0
        self.row = next(iter(example_of(self.model).values()))[0]
        return calls, first

    def _run(self) -> Any:
        return self.model(**example_of(self.model))

    def _find_blocks(self) -> Tensor | None:
        """Finds the blocks by name, and how they return the state. Returns the first state of the
        example; None for weights on demand, where the form of others is taken.
        """
        self.blocks_path = block_list_by_name(self.model, self.anatomy)
        if has_weights_on_demand(self.model):
            return None
        found = form_of_blocks(self._run, self.blocks())
        if isinstance(found, str):
            raise ConfigError(
                f"the blocks of {type(self.model).__name__} do not act in sequence: {found}"
            )
        self.form, first = found
        return self.form.turned(first)

    def run(self, tokens: Tensor) -> Any:
        return self.model(**{main_input(self.model): tokens}, **self.padding_for(tokens))

    def run_like(self, x: Tensor) -> object:
        like = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        return self.model(**stand_in(self.model, like), **self.padding_for(like))

    def embed(self, tokens: Tensor) -> Tensor:
        lead = tokens.shape[:-1]
        has_token_ids = reads_tokens(self.model)
        if has_token_ids:
            tokens = tokens.reshape(-1, tokens.shape[-1])
        inputs = {main_input(self.model): tokens, **self.padding_for(tokens)}
        calls = recorded_until(self.blocks(), 0, lambda: self.model(**inputs), self.form)
        x = calls[0].x
        if has_token_ids:
            return x.reshape(*lead, *x.shape[-2:])
        return x

    def outputs(self, x: Tensor) -> Any:
        def instead(i: int, call: Call) -> Tensor:
            if i == 0:
                return x
            return call.x

        with intercepted(self.blocks(), instead, self.form):
            return self.model(
                **stand_in(self.model, x.detach()), **self.padding_for(x), return_dict=True
            )

    def blocks(self) -> list[nn.Module]:
        """The blocks that the model has now."""
        return blocks_at(self.model, self.blocks_path)

    def tensor(self, output: Any) -> Tensor | None:
        tensor = tensor_in(output)
        if tensor is not None and tensor.dim() > 1:
            return self.form.turned(tensor)
        return tensor

    def structures(self) -> tuple[list[Structure], Tensor]:
        """The structure of each block, and the state (batch, tokens, width) of the example before
        the first block.
        """
        structures: list[Structure] = []
        recognised: dict[object, tuple[nn.Module, Structure]] = {}
        with without_fast_path():
            calls, first = self._calls_and_state()
            # running a block on demand is slow: only the first of each build
            every_block = not has_weights_on_demand(self.model)
            for i, (block, call) in enumerate(zip(self.blocks(), calls, strict=True)):
                key: object
                if every_block:
                    key = i
                else:
                    key = make_of(block)
                if key in recognised:
                    structures.append(alike(*recognised[key], block, self.anatomy))
                    continue
                try:
                    structure = recognise(block, call, self.anatomy, self.form)
                except ConfigError as error:
                    if i == 0:
                        raise error from None
                    raise ConfigError(
                        f"block {i} differs from the blocks before it: {error}"
                    ) from None
                structures.append(structure)
                recognised[key] = block, structure
        self.tokens = first.shape[-2]
        self._like = torch.zeros_like(first[0])
        return structures, first

    def block_context(self, block: int, x: Tensor) -> dict[str, Any]:
        """What the model gives that block besides its state x (batch, tokens, width), such as masks
        and rotary embeddings: keyword arguments of its attention.
        """
        if self._key(x) not in self._contexts:
            self._keep(x, self._contexts_for(x))
        return self._contexts[self._key(x)][block]

    def _key(self, x: Tensor) -> tuple[Any, ...]:
        # kernels get different masks
        kernel = getattr(getattr(self.model, "config", None), IMPLEMENTATION, None)
        return x.shape, x.dtype, x.device, kernel, self.padding

    def _keep(self, x: Tensor, contexts: list[dict[str, Any]]) -> None:
        """Keeps what the model gives its blocks for states like x."""
        if len(self._contexts) == REMEMBERED:
            oldest = next(iter(self._contexts))
            del self._contexts[oldest]
        self._contexts[self._key(x)] = contexts

    def forget(self) -> None:
        """Clears the cache of contexts; call it after the weights change."""
        self._contexts.clear()

    def _contexts_for(self, x: Tensor) -> list[dict[str, Any]]:
        blocks = self.blocks()
        with as_found(self.model), torch.no_grad():
            calls = recorded_until(blocks, len(blocks) - 1, lambda: self.run_like(x), self.form)
        return [call.context for call in calls]

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelAdapter:
        adapter = super().__deepcopy__(memo)
        if adapter is not self and isinstance(adapter, TransformersAdapter):
            adapter._contexts = {}
        return adapter
