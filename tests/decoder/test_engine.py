"""The engine on tiny real transformers: equal to ``generate()``, whoever proposes; cancelled and refused properly."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from decoder.errors import ModelError, RequestError
from decoder.proposers.draft_model import DraftModelProposer, EarlyExitProposer
from decoder.proposers.ngram import NgramProposer
from decoder.proposers.prediction import PredictionProposer
from decoder.request import GenerationRequest, SamplingParams
from decoder.trace import violations
from tests.tiny import PATHS, runner, tiny_decoder, tiny_llama, tiny_tokenizer

PROMPTS = {
    "text": "The quick brown fox",
    "code": "def f(x): return",
    "emoji": "🦊🐻 🦊🐻 灯塔",
    "long": "The lazy dog jumps over the quick brown fox. " * 40,
}


def generate(prompt: str, n: int) -> list[int]:
    """transformers' own greedy output."""
    ids = torch.tensor([tiny_tokenizer()(prompt)["input_ids"]])
    config = GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=0, pad_token_id=0)
    with torch.inference_mode():
        full = tiny_llama().generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    return full[0, ids.shape[1] :].tolist()


def decoders(path: str):
    target = runner(path=path)
    yield "none", tiny_decoder(None, target)
    yield "ngram", tiny_decoder(NgramProposer(), target)
    yield "early-exit", tiny_decoder(EarlyExitProposer(target, 3, 2), target)
    yield "draft-model", tiny_decoder(DraftModelProposer(runner(seed=1, layers=1, path=path)), target)
    yield "draft-model", tiny_decoder(DraftModelProposer(runner(path=path)), target)
    encode = lambda t: tiny_tokenizer()(t)["input_ids"]  # noqa: E731
    yield "prediction", tiny_decoder(PredictionProposer(encode), target)


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("k", [1, 4, 32])
@pytest.mark.parametrize("path", PATHS)
def test_greedy_equals_generate_for_every_proposer(kind: str, k: int, path: str) -> None:
    prompt = PROMPTS[kind]
    expected = generate(prompt, 60)
    guess = tiny_tokenizer().decode(expected[3:40]) or "x"
    for name, decoder in decoders(path):
        run = decoder.run(
            GenerationRequest(prompt, chat=False, proposer=name, k=k, max_new_tokens=60, prediction=guess)
        )
        assert list(run.output_ids) == expected, name
        assert violations(run) == []


def test_a_copy_of_the_target_is_accepted_throughout() -> None:
    decoder = tiny_decoder(DraftModelProposer(runner()))
    for temperature in (0.0, 1.0):
        request = GenerationRequest(
            "The quick", chat=False, proposer="draft-model", max_new_tokens=100, ignore_eos=True,
            sampling=SamplingParams(temperature=temperature, top_p=0.9, seed=3),
        )  # fmt: skip
        run = decoder.run(request)
        assert run.metrics["draft_acceptance_rate"] > 0.99


def test_all_emitted_text_joins_to_the_answer_and_hostile_text_survives() -> None:
    decoder = tiny_decoder(NgramProposer())
    run = decoder.run(GenerationRequest(PROMPTS["emoji"], chat=False, proposer="ngram", max_new_tokens=80))
    visible = [e.text for s in run.steps for e in s.emitted]
    if run.finish_reason == "eos":
        visible = visible[:-1]
    assert "".join(visible) == run.text
    ids = [i for i in run.output_ids if i != 0]
    assert run.text == tiny_tokenizer().decode(ids)


def test_closing_stops_within_a_step_and_keeps_the_steps() -> None:
    stream = tiny_decoder().stream(GenerationRequest("The quick", chat=False, max_new_tokens=50, ignore_eos=True))
    for _ in range(5):
        next(stream)
    stream.close()
    assert next(stream, None) is None
    run = stream.run
    assert run.finish_reason == "cancelled"
    assert len(run.steps) == 5
    assert violations(run) == []
    stream.close()
    assert stream.run == run


def test_what_the_caller_does_before_the_first_step_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("decoder.clock.time.perf_counter", lambda: now[0])
    stream = tiny_decoder().stream(GenerationRequest("The", chat=False, max_new_tokens=3))
    now[0] = 100.0
    next(stream)
    assert stream.run.ttft_ms == stream.run.prefill_ms == 0


def test_an_interrupt_from_the_keyboard_keeps_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = tiny_decoder()
    stream = decoder.stream(GenerationRequest("The", chat=False, max_new_tokens=30, ignore_eos=True))
    next(stream)
    next(stream)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decoder.target.runner, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert stream.run.finish_reason == "cancelled"
    assert len(stream.run.steps) == 2


def test_closing_a_finished_run_changes_nothing() -> None:
    stream = tiny_decoder().stream(GenerationRequest("The", chat=False, max_new_tokens=3, ignore_eos=True))
    list(stream)
    stream.close()
    assert stream.run.finish_reason == "length"


def test_a_prompt_longer_than_the_context_says_by_how_much() -> None:
    decoder = tiny_decoder(target=runner(context=64))
    n = len(tiny_tokenizer()(PROMPTS["long"])["input_ids"])
    with pytest.raises(RequestError, match=f"has {n:,} tokens.*at most 63.*shorten it by {n - 63:,} tokens"):
        decoder.stream(GenerationRequest(PROMPTS["long"], chat=False))


def test_a_prompt_that_just_fits_gives_one_token() -> None:
    ids = tiny_tokenizer()(PROMPTS["text"])["input_ids"]
    decoder = tiny_decoder(NgramProposer(), target=runner(context=len(ids) + 1))
    run = decoder.run(GenerationRequest(PROMPTS["text"], chat=False, proposer="ngram", ignore_eos=True))
    assert len(run.output_ids) == 1


def test_a_model_without_chat_template_says_so_in_chat_mode() -> None:
    decoder = tiny_decoder()
    decoder.target.tokenizer.chat_template, kept = None, decoder.target.tokenizer.chat_template
    try:
        with pytest.raises(ModelError, match="no chat template"):
            decoder.stream(GenerationRequest("hello"))
    finally:
        decoder.target.tokenizer.chat_template = kept


def test_a_full_draft_context_ends_drafting_not_the_run() -> None:
    decoder = tiny_decoder(DraftModelProposer(runner(context=30)))
    run = decoder.run(
        GenerationRequest("The quick", chat=False, proposer="draft-model", max_new_tokens=60, ignore_eos=True)
    )
    assert len(run.output_ids) == 60
    assert run.metrics["num_spec_steps"] > 0
    assert run.metrics["num_plain_steps"] > 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "  \n"}, "prompt is empty"),
        ({"k": 0}, "between 1 and 64"),
        ({"k": 10_000}, "between 1 and 64"),
        ({"k": 2.5}, "whole number"),
        ({"max_new_tokens": 0}, "max new tokens"),
        ({"proposer": "magic"}, "unknown proposer"),
        ({"proposer": "prediction"}, "text that you expect"),
        ({"sampling": SamplingParams(temperature=-1)}, "temperature"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature"),
        ({"sampling": SamplingParams(top_p=0.0)}, "top-p"),
        ({"sampling": SamplingParams(seed=-1)}, "seed"),
        ({"stop": ("",)}, "stop string"),
        ({"ngram_min": 5, "ngram_max": 2}, "n-gram maximum"),
        ({"dtype": "int3"}, "dtype"),
        ({"target": 5}, "target must be text"),
        ({"prompt": None}, "prompt must be text"),
        ({"draft": 7}, "draft must be text"),
        ({"prediction": 5}, "prediction must be text"),
        ({"chat": "no"}, "chat must be true or false"),
        ({"stop_ids": (-1,)}, "stop id"),
        ({"stop_ids": ({},)}, "stop id"),
    ],
)
def test_bad_requests_are_refused_with_a_sentence(changes: dict, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tiny_decoder().stream(GenerationRequest("x", chat=False).replace(**changes))


def test_a_request_is_json_and_back() -> None:
    request = GenerationRequest(
        "x", stop=("a", "b"), stop_ids=(3,), sampling=SamplingParams(temperature=0.5, logit_bias=((1, 2.0),))
    )
    assert GenerationRequest.from_json(request.to_json()) == request
    for bad in ({}, {"prompt": "x", "evil": 1}, {"prompt": "x", "sampling": {"hot": 1}}, {"prompt": "x", "stop": 3}):
        with pytest.raises(RequestError):
            GenerationRequest.from_json(bad)
