"""The numbers of an architecture that decide memory and time, without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from fgrpo_train.settings import ConfigError

SHAPES_FILE = Path(__file__).parent / "assets" / "model-shapes.json"
"""Configurations of well-known models, so that a plan needs no network."""


@dataclass(frozen=True)
class ModelShape:
    """A causal language model by its transformers configuration."""

    config: Any

    @classmethod
    def of(cls, path: str) -> ModelShape:
        """Of a local folder, a known model, or a model on the hub.

        Raises: ConfigError if there is no configuration to be had.
        """
        known = json.loads(SHAPES_FILE.read_text())
        if path in known:
            return cls(transformers.AutoConfig.for_model(**known[path]))
        try:
            return cls(transformers.AutoConfig.from_pretrained(path))
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"policy.path: no configuration of {path}: {reason}") from None

    @cached_property
    def num_parameters(self) -> int:
        """Tied ones counted once; the model is built without memory to count them."""
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(self.config)
        return sum(parameter.numel() for parameter in model.parameters())

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def head_parameters(self) -> int:
        """V x D of the language-model head."""
        return self.config.vocab_size * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """Those that are looked up, not multiplied with; none if the head is the same matrix."""
        return 0 if self.config.tie_word_embeddings else self.head_parameters

    @property
    def attention_width(self) -> int:
        """Query heads x head size."""
        return self.config.num_attention_heads * self._head_size

    @property
    def key_value_width(self) -> int:
        """Key heads x head size, for the keys alone."""
        return self.config.num_key_value_heads * self._head_size

    @property
    def _head_size(self) -> int:
        heads = self.config.num_attention_heads
        return getattr(self.config, "head_dim", None) or self.hidden_size // heads

    @property
    def activation_elements(self) -> int:
        """Kept per token and layer for the backward: inputs of both norms and of both blocks'
        products, queries, keys, values, the attention's output, and the MLP's gate, up, product."""
        attention = 2 * self.attention_width + 2 * self.key_value_width
        return 4 * self.hidden_size + attention + 3 * self.config.intermediate_size

    def cache_bytes(self, element_bytes: int = 2) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.key_value_width * element_bytes

    def forward_flops(self, context: float) -> float:
        """Of one token that attends to `context` others: 2 per weight, 4 per attended element."""
        products = 2 * (self.num_parameters - self.embedding_parameters)
        return products + 4 * self.num_layers * self.attention_width * context
