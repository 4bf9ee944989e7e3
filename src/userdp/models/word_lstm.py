"""The word-level LSTM of McMahan et al. 2018, App. B, as a Hugging Face model.

A word becomes an embedding of length 1 in 96 dimensions. The LSTM has a state of 256 and emits an
output embedding of 96 dimensions, which is compared with the embedding of every word. Input and
output share their embeddings. With 10,000 words the model has 1,346,144 parameters in 11 vectors:
the embeddings, a weight and a bias for each of the four gates, and those of the output layer.

Importing this module makes the model known to `transformers` under its own type.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class WordLSTMConfig(PreTrainedConfig):
    """Sizes of the model; the defaults are the paper's."""

    model_type = "userdp_word_lstm"

    def __init__(
        self,
        vocab_size: int = 10_000,
        embedding_size: int = 96,
        state_size: int = 256,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.embedding_size = embedding_size
        self.state_size = state_size
        super().__init__(**kwargs)

    @property
    def hidden_size(self) -> int:
        """The width that learning rates are chosen by."""
        return self.state_size


class WordLSTM(PreTrainedModel):
    """Predicts the next word from the words before it."""

    config_class = WordLSTMConfig
    base_model_prefix = "word_lstm"
    # Rows of the embedding table with a smaller norm are divided by this instead.
    smallest_length = 1e-12

    def __init__(self, config: WordLSTMConfig) -> None:
        super().__init__(config)
        wide = config.embedding_size + config.state_size
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.input_gate = nn.Linear(wide, config.state_size)
        self.forget_gate = nn.Linear(wide, config.state_size)
        self.cell_gate = nn.Linear(wide, config.state_size)
        self.output_gate = nn.Linear(wide, config.state_size)
        self.output_embedding = nn.Linear(config.state_size, config.embedding_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            bound = module.in_features**-0.5
            nn.init.uniform_(module.weight, -bound, bound)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        """The table of words."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Exchange the table of words."""
        assert isinstance(value, nn.Embedding)
        self.embedding = value

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        """The logits of every position, (rows, words, vocabulary)."""
        size = self.config.state_size
        # The table is brought to length 1 where it is used, so that every step of an optimizer
        # keeps this property.
        words = self.embedding.weight / self.embedding.weight.norm(dim=1, keepdim=True).clamp(
            min=self.smallest_length
        )
        embedded = F.embedding(input_ids, words)
        gates = (self.input_gate, self.forget_gate, self.cell_gate, self.output_gate)
        weight = torch.cat([gate.weight for gate in gates])
        bias = torch.cat([gate.bias for gate in gates])
        split = self.config.embedding_size
        # What the words contribute needs no state, so it is one product for all positions.
        of_words = F.linear(embedded, weight[:, :split], bias)
        of_state = weight[:, split:].T
        state = embedded.new_zeros(input_ids.shape[0], size)
        cell = embedded.new_zeros(input_ids.shape[0], size)
        states: list[Tensor] = []
        for position in range(input_ids.shape[1]):
            enter, keep, new, leave = (of_words[:, position] + state @ of_state).split(size, dim=1)
            cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
            state = torch.sigmoid(leave) * torch.tanh(cell)
            states.append(state)
        out = self.output_embedding(torch.stack(states, dim=1))
        logits: Any = F.linear(out, words)
        return CausalLMOutput(logits=logits)


AutoConfig.register(WordLSTMConfig.model_type, WordLSTMConfig)
AutoModelForCausalLM.register(WordLSTMConfig, WordLSTM)
