"""Frozen bases in 4 and 8 bits: what they compute, what a run is bound to, what is refused."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comparing
import peft
import pytest
import torch
import transformers
from torch import nn

import models_zoo
from cli_runner import userdp as command
from userdp.clipping.rules import FlatClip
from userdp.digests.of_runs import weights_digest
from userdp.errors import InputError, MixedExamplesError
from userdp.ledger.book import Ledger
from userdp.models.adapters import Lora
from userdp.models.checks import BufferGuard, refuse_mixing, trainable_parameters
from userdp.models.load import load_model
from userdp.names.quantisation import Quantisation
from userdp.probe import verify as probe

needs_library = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install 'userdp[quantized]'",
)
each_width = pytest.mark.parametrize("bits", ["4bit", "8bit"])


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model, wide enough for blocks of 64 weights: one with biases, one without."""
    path = tmp_path_factory.mktemp("quantised") / request.param
    tokenizer = models_zoo.word_tokenizer()
    torch.manual_seed(3)
    if request.param == "gpt2":
        model: Any = models_zoo.gpt2(vocabulary=len(tokenizer))
    else:
        model = models_zoo.llama(tied=False)
        model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def with_adapters(base: Path, bits: Quantisation | None) -> nn.Module:
    """A loaded model whose adapters do something: fresh ones add zero."""
    model, _ = load_model(base, lora=Lora(rank=2), quantize=bits)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@needs_library
@each_width
def test_fast_path_on_a_quantised_base_equals_the_plain_loop(base: Path, bits: Any) -> None:
    model = with_adapters(base, bits)
    before, guard = weights_digest(model), BufferGuard(model)
    comparing.assert_same_as_plain(model, comparing.cohort(comparing.RAGGED))
    assert weights_digest(model) == before
    assert not guard.changed()


@needs_library
@each_width
def test_layers_multiply_by_the_weights_that_the_library_turns_back(base: Path, bits: Any) -> None:
    """The oracle: transformers loads it, turns it back, and runs an ordinary float model."""
    quantised, _ = load_model(base, quantize=bits)
    how: dict[str, Any] = {"load_in_8bit": True}
    if bits == "4bit":
        how = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        how["load_in_4bit"] = True
    theirs: Any = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=transformers.BitsAndBytesConfig(**how), dtype=torch.float32
    )
    oracle = theirs.dequantize(torch.float32)
    assert {type(m).__name__ for m in oracle.modules()}.isdisjoint({"Linear4bit", "Linear8bitLt"})
    ids = torch.arange(12)[None] % 20
    with torch.no_grad():
        ours, expected = (m.eval()(input_ids=ids).logits for m in (quantised, oracle))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@needs_library
@each_width
def test_biases_of_quantised_layers_can_be_trained(bits: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = transformers.Qwen2Config(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    models_zoo.word_tokenizer().save_pretrained(tmp_path)
    base, _ = load_model(tmp_path, quantize=bits)
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], bias="lora_only")
    model = peft.get_peft_model(base, adapter)  # pyright: ignore[reportArgumentType]
    model(input_ids=torch.arange(6)[None]).logits.square().sum().backward()
    biases = [p for name, p in model.named_parameters() if name.endswith("v_proj.base_layer.bias")]
    assert len(biases) == 1
    assert biases[0].grad is not None
    assert float(biases[0].grad.abs().sum()) > 0


@needs_library
@each_width
def test_neighbours_move_a_quantised_model_by_at_most_the_clip_norm(base: Path, bits: Any) -> None:
    found = probe.verify(
        with_adapters(base, bits),
        None,
        sequence_length=12,
        group_size=2,
        clip=FlatClip(clip_norm=1),
    )
    assert found.safe, found.cause
    assert found.largest_movement <= 1 + 1e-5


@needs_library
def test_outliers_of_the_whole_batch_are_refused(base: Path) -> None:
    settings = transformers.BitsAndBytesConfig(load_in_8bit=True)
    assert settings.llm_int8_threshold > 0
    model = transformers.AutoModelForCausalLM.from_pretrained(base, quantization_config=settings)
    with pytest.raises(MixedExamplesError, match=r"outliers in the whole batch.*quantize="):
        refuse_mixing(model)


@needs_library
def test_scales_of_quantised_weights_are_part_of_the_digest(base: Path) -> None:
    """Twice the weights have the same codes: only their scales differ."""
    for bits, scale in (("8bit", "SCB"), ("4bit", "absmax")):
        model = with_adapters(base, bits)  # pyright: ignore[reportArgumentType]
        before, guard = weights_digest(model), BufferGuard(model)
        layer: Any = next(m for m in model.modules() if hasattr(getattr(m, "weight", None), scale))
        (layer.weight.SCB if bits == "8bit" else layer.weight.quant_state.offset).mul_(2)
        assert weights_digest(model) != before
        assert guard.changed()


@needs_library
@each_width
def test_run_on_a_quantised_base_is_bound_to_it(
    config_file: Callable[..., Path], held_out_store: Path, tmp_path: Path, bits: Any
) -> None:
    lora = "\n[model.lora]\nrank = 2\n"
    path = config_file(model=f'quantize = "{bits}"{lora}')
    assert command("train", path, "--out", tmp_path / "run").code == 0
    # Another base than the one in the ledger would be refused.
    assert command("evaluate", tmp_path / "run", held_out_store).code == 0
    other = config_file(model=lora, name="other.toml")
    refused = command("train", other, "--out", tmp_path / "run", "--resume")
    assert refused.code == 2
    merged = command(
        "export", tmp_path / "run", "--out", tmp_path / "out", "--merged", "--base", "org/base"
    )
    assert merged.code == 2
    assert f"a base in {bits[0]} bits" in merged.err
    bound = Ledger.read(tmp_path / "run" / "ledger.jsonl").bound_to
    assert command("train", other, "--out", tmp_path / "whole").code == 0
    whole = Ledger.read(tmp_path / "whole" / "ledger.jsonl").bound_to
    assert bound["model"] != whole["model"]
    assert bound["initial_weights"] != whole["initial_weights"]


@needs_library
def test_quantised_model_without_adapters_cannot_be_trained(base: Path) -> None:
    model, _ = load_model(base, quantize="4bit")
    with pytest.raises(InputError, match="no trainable parameter"):
        trainable_parameters(model)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    with pytest.raises(InputError, match=r"frozen in 4 bits.*add LoRA"):
        trainable_parameters(model)


def test_full_fine_tuning_of_a_quantised_base_is_refused(
    config_file: Callable[..., Path], tmp_path: Path
) -> None:
    refused = command("train", config_file(model='quantize = "4bit"'), "--out", tmp_path / "run")
    assert refused.code == 2
    assert "add [model.lora], or leave quantize out" in refused.err


def test_missing_library_is_named_with_its_extra(
    base_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"bitsandbytes, which is not installed.*\[quantized\]"):
        load_model(base_model, lora=Lora(rank=2), quantize="8bit")


def test_gguf_file_is_not_quantised_again(base_model: Path) -> None:
    with pytest.raises(InputError, match="quantize has no meaning"):
        load_model(base_model, lora=Lora(rank=2), quantize="8bit", gguf_file="model.gguf")
