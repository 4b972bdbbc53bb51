"""Loading and pairing: local folders, what is refused, and why. No network."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from decoder import catalog, compat, loading
from decoder.engine import SpeculativeDecoder
from decoder.errors import IncompatibleError, ModelError
from decoder.request import GenerationRequest, SamplingParams
from tests.spellings import letters, word_pieces
from tests.tiny import save_tiny, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"))


def swapped_tokenizer(a: int, b: int) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with two entries of its vocabulary exchanged."""
    raw = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    vocabulary = raw["model"]["vocab"]
    names = {i: token for token, i in vocabulary.items()}
    vocabulary[names[a]], vocabulary[names[b]] = b, a
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(raw)), eos_token="<|end|>")


def test_a_local_folder_is_loaded_and_identified(folder: Path) -> None:
    model = loading.load(str(folder), "float32", "cpu")
    assert (model.dtype, model.device, model.family) == ("float32", "cpu", "llama")
    assert model.vocab_size == 384
    assert model.eos_ids == {0}
    assert loading.load(str(folder), "float32", "cpu") is model
    assert len(model.fingerprint) == 16


def test_other_weights_have_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", seed=1)
    assert (
        loading.load(str(other), "float32", "cpu").fingerprint
        != loading.load(str(folder), "float32", "cpu").fingerprint
    )


def test_both_models_of_a_pair_run_from_folders(folder: Path, tmp_path: Path) -> None:
    draft = save_tiny(tmp_path / "draft", seed=1)
    request = GenerationRequest(
        "The quick", chat=False, target=str(folder), proposer="draft-model", draft=str(draft), dtype="float32",
        max_new_tokens=20, ignore_eos=True,
    )  # fmt: skip
    run = SpeculativeDecoder.load(request).run(request)
    plain = request.replace(proposer="none", draft=None)
    assert run.output_ids == SpeculativeDecoder.load(plain).run(plain).output_ids
    assert run.metrics["num_draft_tokens"] > 0
    assert run.versions["draft_family"] == "llama"
    assert run.draft == str(draft)


def test_swapped_tokens_are_named_with_id_and_both_strings_and_drafted_across(folder: Path, tmp_path: Path) -> None:
    draft = save_tiny(tmp_path / "draft", seed=1, tokenizer=swapped_tokenizer(300, 301))
    names = {i: t for t, i in tiny_tokenizer().get_vocab().items()}
    found = compat.pairing(str(folder), str(draft))
    assert len(found.reasons) == 1
    for part in ("id 300", repr(names[300]), repr(names[301]), f"2 of {len(names)}"):
        assert part in found.reasons[0]
        assert part in found.sentence
    assert found.fits
    assert found.across == f"other vocabulary: {len(names)} of {len(names)} tokens shared"


@pytest.mark.parametrize(
    ("temperature", "way"), [(0.0, "re-encoding with look-behind"), (1.0, "token-level intersection")]
)
def test_a_draft_with_another_vocabulary_drafts_across_and_the_run_says_so(
    folder: Path, tmp_path: Path, temperature: float, way: str
) -> None:
    small = tiny_tokenizer(300)
    draft = save_tiny(tmp_path / "draft", tokenizer=small, vocab_size=320)
    found = compat.pairing(str(folder), str(draft))
    assert any(f"{len(tiny_tokenizer())} and {len(small)} entries" in reason for reason in found.reasons)
    assert compat.check_pair(str(folder), str(draft)) == []
    request = GenerationRequest(
        "The quick", chat=False, target=str(folder), proposer="draft-model", draft=str(draft), dtype="float32",
        max_new_tokens=20, ignore_eos=True, sampling=SamplingParams(temperature=temperature, seed=4),
    )  # fmt: skip
    run = SpeculativeDecoder.load(request).run(request)
    assert run.versions["draft_vocabulary"] == f"{found.across}; {way}"
    assert run.metrics["num_draft_tokens"] > 0
    if temperature == 0:
        plain = request.replace(proposer="none", draft=None)
        assert run.output_ids == SpeculativeDecoder.load(plain).run(plain).output_ids


def test_a_draft_that_shares_too_little_is_refused_with_numbers(folder: Path, tmp_path: Path) -> None:
    draft = save_tiny(tmp_path / "draft", tokenizer=letters(["a", *(chr(0x250 + i) for i in range(50))]))
    reasons = compat.check_pair(str(folder), str(draft))
    assert any("entries" in reason for reason in reasons), "why not token for token"
    assert "across vocabularies: only 1 of the draft's 51 tokens" in reasons[-1]
    request = GenerationRequest("x", target=str(folder), proposer="draft-model", draft=str(draft), dtype="float32")
    with pytest.raises(IncompatibleError, match="only 1 of the draft's 51 tokens"):
        SpeculativeDecoder.load(request)
    pieces = save_tiny(tmp_path / "pieces", tokenizer=word_pieces())
    assert "byte by byte (WordPiece)" in compat.check_pair(str(folder), str(pieces))[-1]


def test_other_special_tokens_are_named(folder: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer().backend_tokenizer, eos_token="the")
    draft = save_tiny(tmp_path / "draft", tokenizer=tokenizer)
    assert any("eos_token" in reason for reason in compat.pairing(str(folder), str(draft)).reasons)


def test_padded_heads_of_other_sizes_fit(folder: Path, tmp_path: Path) -> None:
    wide = save_tiny(tmp_path / "wide", seed=2, vocab_size=448)
    assert compat.check_pair(str(folder), str(wide)) == []
    for target, draft in ((folder, wide), (wide, folder)):
        for temperature in (0.0, 1.0):
            request = GenerationRequest(
                "The quick", chat=False, target=str(target), proposer="draft-model", draft=str(draft),
                dtype="float32", max_new_tokens=25, ignore_eos=True,
            )  # fmt: skip
            request = request.replace(sampling=request.sampling.__class__(temperature=temperature, seed=1))
            run = SpeculativeDecoder.load(request).run(request)
            assert len(run.output_ids) == 25
            assert run.metrics["num_draft_tokens"] > 0


def test_a_head_smaller_than_the_vocabulary_is_refused() -> None:
    n = len(tiny_tokenizer())
    assert compat.compare_heads(tiny_tokenizer(), n, n) == []
    assert compat.compare_heads(tiny_tokenizer(), n, 200) == [
        f"the draft's head has 200 rows, fewer than the {n} entries of the vocabulary"
    ]


def test_a_head_smaller_than_its_own_vocabulary_is_not_used_across_vocabularies(folder: Path, tmp_path: Path) -> None:
    narrow = save_tiny(tmp_path / "narrow", seed=2)
    config = json.loads((narrow / "config.json").read_text()) | {"vocab_size": 200}
    (narrow / "config.json").write_text(json.dumps(config))
    reasons = compat.check_pair(str(folder), str(narrow))
    assert "head has 200 rows" in reasons[0]
    assert "lacks" in reasons[-1]


def refused(name: str, role: str = "target") -> str:
    with pytest.raises(ModelError) as error:
        loading.load(name, "float32", "cpu", role=role)
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def test_what_cannot_be_loaded_says_why(folder: Path, tmp_path: Path) -> None:
    assert "smollm2-135m" in refused("nonsense")
    assert "does not exist" in refused("./nowhere")
    assert "does not exist" in refused("model.gguf")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refused(str(empty))
    no_weights = tmp_path / "no-weights"
    shutil.copytree(folder, no_weights)
    (no_weights / "model.safetensors").unlink()
    assert "no .safetensors" in refused(str(no_weights))
    torch.save({}, no_weights / "pytorch_model.bin")
    assert "a pickle, which Redline never loads" in refused(str(no_weights))
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    assert "cannot load the draft" in refused(str(broken), "draft")
    not_json = tmp_path / "not-json"
    shutil.copytree(folder, not_json)
    (not_json / "config.json").write_text("{")
    assert "cannot load" in refused(str(not_json))
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF" + b"\x00" * 64)
    assert "cannot load" in refused(str(gguf))
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert "not a .gguf" in refused(str(text))


def test_code_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    custom = tmp_path / "custom"
    shutil.copytree(folder, custom)
    config = json.loads((custom / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (custom / "config.json").write_text(json.dumps(config))
    (custom / "evil.py").write_text("raise SystemExit('ran')")
    assert "code of its own" in refused(str(custom))


def test_the_hub_out_of_reach_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "Hub cannot be reached" in refused("nobody/never-heard-of-it")


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ModelError, match="no cuda device"):
        loading.pick_device("cuda")
    with pytest.raises(ModelError, match="unknown device"):
        loading.pick_device("abacus")


def test_a_sliding_window_limits_the_context(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, sliding_window=40, eos_token_id=0,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    model = loading.load(str(tmp_path), "float32", "cpu")
    assert model.context == 40
    request = GenerationRequest("The quick brown fox " * 20, chat=False, target=str(tmp_path), dtype="float32")
    with pytest.raises(ValueError, match="sliding window"):
        SpeculativeDecoder.load(request).stream(request)


def test_no_draft_that_fits_means_plain_decoding_with_the_reason(folder: Path) -> None:
    request = GenerationRequest(
        "The quick", chat=False, target=str(folder), proposer="draft-model", dtype="float32", max_new_tokens=10
    )
    run = SpeculativeDecoder.load(request).run(request)
    assert run.metrics["not_speculating"] == f"no draft that is here was made for {folder}"
    assert run.metrics["draft_acceptance_rate"] is None


def test_an_unreadable_shipped_draft_means_plain_decoding_with_the_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "broken-draft"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").write_bytes(b"\x00" * 100)
    entry = catalog.ModelEntry("broken-draft", "draft", "llama", "x", 1, True, "", "", path=broken, fits=str(folder))
    monkeypatch.setattr(catalog, "drafts", lambda: [entry])
    request = GenerationRequest(
        "The quick", chat=False, target=str(folder), proposer="draft-model", dtype="float32", max_new_tokens=10
    )
    run = SpeculativeDecoder.load(request).run(request)
    assert "cannot load the draft broken-draft" in run.metrics["not_speculating"]
    with pytest.raises(ModelError, match="cannot load the draft"):
        SpeculativeDecoder.load(request.replace(draft="broken-draft"))


def test_the_catalog_names_kind_licence_and_way_to_get() -> None:
    for entry in (*catalog.targets(), *catalog.drafts()):
        assert entry.kind in ("target", "draft")
        assert entry.licence
        assert entry.present or entry.how_to_get
    assert catalog.targets()[0].name == "smollm2-135m"


def test_only_a_few_models_stay_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Visitors may name any model: the oldest goes, with its runner, and comes back when it is asked for."""
    from decoder import assemble

    monkeypatch.setattr(loading, "_models", {})
    monkeypatch.setattr(loading, "KEPT", 2)
    first = loading.load(str(folder), "float32", "cpu")
    assemble.runner_of(first)
    for n in (1, 2):
        copy = tmp_path / str(n)
        shutil.copytree(folder, copy)
        other = loading.load(str(copy), "float32", "cpu")
        assemble.runner_of(other)
    assert first not in loading.in_memory()
    assert len(loading.in_memory()) == 2
    assert id(first) not in {model for model, _ in assemble._runners}
    assert loading.load(str(folder), "float32", "cpu") is not first
