"""A model of `transformers` around its blocks. Its inputs and outputs have known names, and it
accepts embeddings in place of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctrans.dynamics.weights.on_demand import has_weights_on_demand
from ctrans.interop.block_calls import Call, intercepted, recorded, recorded_until
from ctrans.interop.example_inputs import example_of, main_input, reads_tokens, stand_in
from ctrans.interop.find_blocks import block_list_by_calls, block_list_by_name, form_of_blocks
from ctrans.interop.model_adapter import ModelAdapter
from solvers import ConfigError


class TransformersAdapter(ModelAdapter):
    """A model of `transformers`. The parts of its blocks are found by name, or by what they do."""

    own_calls = (False, True)

    def predicts(self) -> bool:
        return self.model.get_output_embeddings() is not None

    def block_calls(self) -> list[Call]:
        self._find_blocks()
        calls = recorded(self.blocks(), self._run, self.form)
        config = self.model.config
        self.family = config.model_type
        self.context = getattr(config, "max_position_embeddings", None)
        if reads_tokens(self.model):
            self.vocabulary = self.model.get_input_embeddings().num_embeddings
        else:
            self.vocabulary = 0
        self.row = next(iter(example_of(self.model).values()))[0]
        return calls

    def _run(self) -> Any:
        return self.model(**example_of(self.model))

    def _find_blocks(self) -> None:
        """Finds the blocks by known names, or by how they act in sequence on one state; and how
        they return the state.
        """
        try:
            self.blocks_path = block_list_by_name(self.model, self.anatomy)
        except ConfigError as by_name:
            if self.anatomy.blocks is not None:
                raise
            try:
                self.blocks_path, self.form = block_list_by_calls(self.model, self._run, None)
            except ConfigError:
                raise by_name from None
            return
        if not has_weights_on_demand(self.model):
            form = form_of_blocks(self._run, self.blocks())
            if isinstance(form, str):
                raise ConfigError(
                    f"the blocks of {type(self.model).__name__} do not act in sequence: {form}"
                )
            self.form = form

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
