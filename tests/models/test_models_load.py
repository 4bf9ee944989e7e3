"""Loading and saving: no pickle, no foreign code, and models survive the round trip."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import models_zoo
from tiny import make_model
from userdp.errors import InputError
from userdp.models.adapters import Lora, add_lora
from userdp.models.checks import trainable_parameters
from userdp.models.load import load_adapter, load_model, load_tokenizer, save_model
from userdp.models.smollm2 import find_smollm2

PROMPT = torch.tensor([[1, 2, 3]])


class Trap:
    """What a malicious checkpoint contains: unpickling it leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.mark,))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=PROMPT).logits


@pytest.fixture
def checkpoint(base_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base_model, tmp_path / "checkpoint"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model.pth"])
def test_pickle_only_checkpoint_is_refused_and_nothing_runs(checkpoint: Path, name: str) -> None:
    mark = checkpoint.parent / "ran"
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    (checkpoint / name).write_bytes(pickle.dumps(Trap(mark)))
    with pytest.raises(InputError, match="pickle"):
        load_model(checkpoint)
    assert not mark.exists()


def test_pickle_beside_safetensors_is_not_read(checkpoint: Path) -> None:
    mark = checkpoint.parent / "ran"
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    load_model(checkpoint)
    assert not mark.exists()


def test_pickled_adapter_is_refused_and_nothing_runs(base_model: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(base_model, lora=Lora(rank=2))
    save_model(model, tokenizer, tmp_path / "adapter", card="")
    for path in (tmp_path / "adapter").glob("*.safetensors"):
        path.unlink()
    mark = tmp_path / "ran"
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps(Trap(mark)))
    base, _ = load_model(base_model)
    with pytest.raises(InputError, match="pickle"):
        load_adapter(base, tmp_path / "adapter")
    assert not mark.exists()


@pytest.mark.parametrize("model_type", ["my-own-model", "gpt2"])
def test_remote_code_never_runs(checkpoint: Path, model_type: str) -> None:
    mark = checkpoint.parent / "ran"
    (checkpoint / "modeling.py").write_text(f"open({str(mark)!r}, 'w')\nclass Model: pass\n")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {
        "model_type": model_type,
        "auto_map": {
            "AutoConfig": "modeling.Model",
            "AutoModelForCausalLM": "modeling.Model",
        },
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    if model_type == "gpt2":
        # A type transformers has itself: its own class is used, the file beside it ignored.
        load_model(checkpoint)
    else:
        with pytest.raises(InputError, match="could not be loaded"):
            load_model(checkpoint)
    assert not mark.exists()


def test_truncated_weights_are_refused(checkpoint: Path) -> None:
    (weights,) = checkpoint.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(InputError, match="could not be loaded"):
        load_model(checkpoint)


def test_broken_model_configuration_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(InputError, match="could not be loaded"):
        load_model(checkpoint)


def test_missing_tokenizer_is_refused(checkpoint: Path) -> None:
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(InputError, match="tokenizer"):
        load_model(checkpoint)


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"it holds no model\. Name a directory that"):
        load_model(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that transformers is asked for; it finds none, and no network is touched."""
    names: list[str] = []

    def ask(source: str, **options: object) -> None:
        names.append(source)
        raise OSError("not on the hub")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", ask)
    monkeypatch.setattr("userdp.models.hub._answers", lambda: True)
    return names


@pytest.mark.parametrize(
    "path",
    [
        "./nowhere",
        "../nowhere",
        "/no/nowhere",
        "~/nowhere",
        "a/b/nowhere",
        "there/nowhere",
        "./a b",
    ],
)
def test_a_mistyped_path_is_refused_without_asking_the_hub(
    path: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for load in (load_model, load_tokenizer):
        with pytest.raises(InputError, match="no such directory") as refused:
            load(path)
        assert repr(path) in str(refused.value)
    assert asked == []


@pytest.mark.parametrize("name", ["nowhere", "org/name", "org/name-1.5"])
def test_a_name_of_the_hub_is_asked_for(
    name: str, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="not on the hub"):
        load_model(name)
    assert asked == [name]


def test_an_adapter_whose_base_is_gone_is_refused_without_asking_the_hub(
    tmp_path: Path, asked: list[str]
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"base_model_name_or_path": str(tmp_path / "gone")}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"gone.*no such directory"):
        load_model(adapter)
    (adapter / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        load_model(adapter)
    assert asked == []


def test_vocabulary_larger_than_the_embedding_is_refused(checkpoint: Path) -> None:
    words = tuple(f"x{number}" for number in range(50))
    models_zoo.word_tokenizer(words).save_pretrained(checkpoint)
    with pytest.raises(InputError, match=r"the tokenizer has 51 tokens and the model .* 23"):
        load_model(checkpoint)


@pytest.mark.parametrize("targets", ["nothing_of_this_name", ["q_proj", "no_such"], []])
def test_lora_target_that_matches_nothing_is_refused(targets: str | list[str]) -> None:
    with pytest.raises(InputError, match="LoRA targets"):
        add_lora(models_zoo.gpt2(), Lora(targets=targets))


def test_lora_that_peft_refuses_for_a_model_says_what_its_layers_are_called() -> None:
    config = transformers.MambaConfig(
        vocab_size=11, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(InputError, match=r"layers are called dt_proj, in_proj, .*out_proj, x_proj"):
        add_lora(model, Lora())
    add_lora(transformers.MambaForCausalLM(config), Lora(targets=["in_proj", "x_proj"]))


@pytest.mark.parametrize("targets", ["all-linear", ["c_attn"]])
def test_lora_starts_as_the_base_model(base_model: Path, targets: str | list[str]) -> None:
    base, _ = load_model(base_model)
    adapted, _ = load_model(base_model, lora=Lora(rank=2, targets=targets))
    torch.testing.assert_close(logits(adapted), logits(base))
    assert 0 < sum(p.requires_grad for p in adapted.parameters()) < len(list(adapted.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_frozen_factor_is_the_same_whenever_it_is_drawn(
    base_model: Path, dtype: torch.dtype
) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, _ = load_model(base_model, lora=Lora(rank=3, freeze_a=True), dtype=dtype)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained
        assert all("lora_B" in name for name in trained)
        found.append({n: p.detach() for n, p in model.named_parameters() if "lora_A" in n})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(a, found[1][name]) for name, a in found[0].items())
    # Every layer has its own, of the size that peft draws.
    assert len({a.double().sum().item() for a in found[0].values()}) == len(found[0])
    for a in found[0].values():
        assert float(a.abs().max()) <= a.shape[1] ** -0.5 * 1.01
        assert float(a.float().std()) == pytest.approx((3 * a.shape[1]) ** -0.5, rel=0.4)


def test_a_frozen_factor_of_an_embedding_is_refused() -> None:
    lora = Lora(rank=2, freeze_a=True, targets=["embed_tokens", "q_proj"])
    with pytest.raises(InputError, match="begins with A = 0"):
        add_lora(models_zoo.build("llama"), lora)


def test_full_model_survives_the_round_trip_and_still_generates(
    base_model: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(base_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    save_model(model, tokenizer, tmp_path / "saved", card="")
    assert not list((tmp_path / "saved").glob("*.bin"))
    again, same_tokenizer = load_model(tmp_path / "saved")
    assert torch.equal(logits(model), logits(again))
    assert same_tokenizer.get_vocab() == tokenizer.get_vocab()
    out = again.generate(PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert out.shape[1] <= 7


def test_adapter_survives_the_round_trip_and_still_generates(
    base_model: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(base_model, lora=Lora(rank=2))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_model(model, tokenizer, tmp_path / "saved", card="")
    size = (tmp_path / "saved" / "adapter_model.safetensors").stat().st_size
    assert size < sum(p.numel() * 4 for p in model.parameters())
    base, _ = load_model(base_model)
    untouched = logits(base).clone()
    again = load_adapter(base, tmp_path / "saved")
    assert torch.equal(logits(model), logits(again))
    assert not torch.equal(logits(again), untouched)
    # By its folder it is loaded to be trained on, and not to be replaced.
    trained, _ = load_model(tmp_path / "saved")
    assert torch.equal(logits(model), logits(trained))
    assert all("lora_" in name for name in trainable_parameters(trained))
    assert trainable_parameters(trained)
    with pytest.raises(InputError, match="has a trained adapter already"):
        load_model(tmp_path / "saved", lora=Lora(rank=2))
    again.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False, pad_token_id=0)


def test_model_is_loaded_in_the_dtype_asked_for(base_model: Path) -> None:
    model, _ = load_model(base_model, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_missing_smollm2_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("userdp.models.smollm2.files", lambda name: [])
    with pytest.raises(InputError, match="make demo-llm"):
        find_smollm2()


def test_a_model_that_claims_to_be_quantised_is_saved_as_the_floats_it_is(tmp_path: Path) -> None:
    # As transformers leaves a model that it read from GGUF.
    model, tokenizer = make_model(tmp_path / "model")
    claimed = SimpleNamespace(quant_method="gguf")
    model.hf_quantizer = SimpleNamespace(quantization_config=claimed)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "refused")
    save_model(model, tokenizer, tmp_path / "saved", card="")
    again, _ = load_model(tmp_path / "saved")
    for name, weight in model.named_parameters():
        assert torch.equal(weight, again.get_parameter(name)), name


def test_a_tokenizers_own_files_are_read_before_a_gguf_file(base_model: Path) -> None:
    own = load_tokenizer(str(base_model))
    beside = load_tokenizer(str(base_model), gguf_file="weights.gguf")
    assert beside.get_vocab() == own.get_vocab()
    assert beside.eos_token == own.eos_token


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("tiny.gguf", "give gguf_file='tiny.gguf'"), ("model.safetensors", "Name the directory")],
)
def test_a_file_for_a_model_says_what_to_name_instead(
    tmp_path: Path, name: str, way_out: str
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"this is a file.*{way_out}") as caught:
        load_model(tmp_path / name)
    assert str(tmp_path) in str(caught.value)
