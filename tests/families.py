"""Small models of many Hugging Face families: what the neighbour probe is tried on.

Each is built from its configuration, with random weights large enough that users differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 37
POSITIONS = 48
LENGTH = 20

_USUAL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_GROUPED = {"num_key_value_heads": 2}


def _family(name: str, kind: str = "ForCausalLM", **changes: Any) -> nn.Module:
    settings = {key: value for key, value in (_USUAL | changes).items() if value is not None}
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, name + kind)(config)


def _own_names(name: str, kind: str = "ForCausalLM", **settings: Any) -> nn.Module:
    """A family whose configuration has names of its own."""
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **settings)
    return getattr(transformers, name + kind)(config)


def _llama(**rotation: Any) -> nn.Module:
    return _family("Llama", **_GROUPED, rope_parameters={"rope_theta": 10_000.0} | rotation)


def _gemma3() -> nn.Module:
    settings = _USUAL | _GROUPED | {"head_dim": 4, "sliding_window": 8}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**settings))


_LONG = {"short_factor": [1.0, 1.0], "long_factor": [8.0, 8.0], "factor": 4.0}
_HEADS = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}

# Decoders: the probe finds nothing, on either path.
SAFE: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _own_names("GPT2", "LMHeadModel", **_HEADS, bos_token_id=0, eos_token_id=0),
    "gpt-neo": lambda: _family(
        "GPTNeo",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        num_hidden_layers=None,
        num_attention_heads=None,
    ),
    "gpt-j": lambda: _own_names("GPTJ", **_HEADS, rotary_dim=4, bos_token_id=0, eos_token_id=0),
    "codegen": lambda: _own_names(
        "CodeGen",
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        rotary_dim=4,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "gpt-neox": lambda: _family("GPTNeoX"),
    "opt": lambda: _family("OPT", ffn_dim=24, word_embed_proj_dim=16, dropout=0.0),
    "bloom": lambda: _own_names("Bloom", hidden_size=16, n_layer=2, n_head=4),
    "falcon": lambda: _family("Falcon", new_decoder_architecture=False, alibi=False),
    "mpt": lambda: _own_names("Mpt", d_model=16, n_heads=4, n_layers=2, max_seq_len=POSITIONS),
    "llama": lambda: _family("Llama", **_GROUPED),
    "llama, linear rotation": lambda: _llama(rope_type="linear", factor=2.0),
    "llama, yarn rotation": lambda: _llama(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=24
    ),
    "llama 3 rotation": lambda: _llama(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "mistral": lambda: _family("Mistral", **_GROUPED, sliding_window=None),
    "mistral, window": lambda: _family("Mistral", **_GROUPED, sliding_window=8),
    "qwen2": lambda: _family("Qwen2", **_GROUPED),
    "qwen3": lambda: _family("Qwen3", **_GROUPED, head_dim=4),
    "gemma": lambda: _family("Gemma", **_GROUPED, head_dim=4),
    "gemma2": lambda: _family("Gemma2", **_GROUPED, head_dim=4, sliding_window=8),
    "gemma3": lambda: _gemma3(),
    "phi": lambda: _family("Phi"),
    "phi3": lambda: _family("Phi3", **_GROUPED),
    "stablelm": lambda: _family("StableLm", **_GROUPED),
    "starcoder2": lambda: _family("Starcoder2", **_GROUPED),
    "olmo": lambda: _family("Olmo", **_GROUPED),
    "olmo2": lambda: _family("Olmo2", **_GROUPED),
    "cohere": lambda: _family("Cohere", **_GROUPED),
    "granite": lambda: _family("Granite", **_GROUPED),
    "smollm3": lambda: _family("SmolLM3", **_GROUPED),
    "nemotron": lambda: _family("Nemotron", **_GROUPED),
    "bert decoder": lambda: _family("Bert", "LMHeadModel", is_decoder=True),
    "mamba": lambda: _family("Mamba", state_size=4, num_attention_heads=None),
    "mamba2": lambda: _family(
        "Mamba2",
        state_size=4,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        expand=2,
        chunk_size=8,
    ),
    "xlstm": lambda: _own_names(
        "xLSTM",
        hidden_size=16,
        num_blocks=2,
        num_heads=4,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
    ),
}
# Refused on the fast path; each user alone, on the plain path, they are safe.
PLAIN_ONLY: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: _family("Bert", "LMHeadModel"),
    "bert, masked": lambda: _family("Bert", "ForMaskedLM"),
    "roberta": lambda: _family("Roberta", max_position_embeddings=POSITIONS + 2, pad_token_id=1),
    "electra": lambda: _family("Electra", embedding_size=8),
    "albert": lambda: _family("Albert", "ForMaskedLM", embedding_size=8),
    "xlnet": lambda: _own_names(
        "XLNet",
        "LMHeadModel",
        d_model=16,
        n_layer=2,
        n_head=4,
        d_inner=24,
        bos_token_id=0,
    ),
    "llama, dynamic rotation": lambda: _family(
        "Llama",
        **_GROUPED,
        max_position_embeddings=12,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "dynamic", "factor": 4.0},
    ),
    "llama, long rotation": lambda: _llama(
        rope_type="longrope", original_max_position_embeddings=12, **_LONG
    ),
    "biogpt": lambda: _family("BioGpt"),
    "bart decoder": lambda: _own_names(
        "Bart",
        d_model=16,
        decoder_layers=2,
        encoder_layers=1,
        decoder_attention_heads=4,
        encoder_attention_heads=4,
        decoder_ffn_dim=24,
        encoder_ffn_dim=24,
        max_position_embeddings=POSITIONS,
        is_decoder=True,
        is_encoder_decoder=False,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "recurrent gemma": lambda: _family(
        "RecurrentGemma",
        **_GROUPED,
        head_dim=4,
        lru_width=16,
        attention_window_size=8,
        num_hidden_layers=3,
    ),
}
# Refused on both paths: one writes into its weights, the other needs two texts.
REFUSED: dict[str, Callable[[], nn.Module]] = {
    "rwkv": lambda: _own_names(
        "Rwkv",
        hidden_size=16,
        num_hidden_layers=2,
        attention_hidden_size=16,
        intermediate_size=24,
        context_length=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
    ),
    "t5": lambda: _own_names(
        "T5",
        "ForConditionalGeneration",
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=4,
    ),
}
# Refused by name.
MIXTURES: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: _family("Mixtral", **_GROUPED, num_local_experts=4),
    "qwen2 moe": lambda: _family("Qwen2Moe", **_GROUPED, num_experts=4, moe_intermediate_size=8),
    "olmoe": lambda: _family("Olmoe", **_GROUPED, num_experts=4),
    "dbrx": lambda: _own_names(
        "Dbrx",
        d_model=16,
        n_heads=2,
        n_layers=1,
        max_seq_len=POSITIONS,
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10_000.0},
    ),
    "gpt-oss": lambda: _family("GptOss", **_GROUPED, head_dim=4, num_local_experts=4),
}


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The model, the same for the same seed, with weights off their zeros and ones."""
    torch.manual_seed(seed)
    model = make().float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model
