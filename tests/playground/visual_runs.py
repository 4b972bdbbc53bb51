"""Made-up runs that obey the trace's invariants, for tests of what is shown. No model, no randomness but a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from decoder import metrics
from decoder.request import GenerationRequest, SamplingParams
from decoder.trace import DraftToken, Emitted, FinishReason, Run, Source, Step, TopToken, Verdict

ANSWER = (
    "The sky is blue because of a process called Rayleigh scattering, where light encounters tiny molecules of air. "
    "Blue light has a shorter wavelength than red light, so it is scattered far more strongly in all directions.\n\n"
    "That is why, wherever you look, some of the blue light reaches your eyes."
)
WRONG = (" the", " way", " light", " is", " which", " from", " particles", " that", " very", " many", "attering", " sc")
HOSTILE = (
    "<script>window.HACKED=1</script>",
    "${window.HACKED=2}",
    "`",
    "{{constructor}}",
    "{% if %}",
    "\\u0041",
    "a\x00b",
    "\x1b[31mred\x1b[0m",
    "\u202eoverride\u202c",
    "\u2067isolate",
    "\u200b",
    "z\u200dz",
    "e" + "\u0301" * 40,
    "</div></section>",
    '" onmouseover="window.HACKED=3',
    "<img src=x onerror=window.HACKED=4>",
    "شكرا",
    "\r\n",
    "\t\t",
    "W" * 10_000,
)

Piece = str | tuple[str, ...]
"""A token's text, or a character over several tokens: their labels, the last one is the character itself."""


def pieces_of(text: str) -> list[Piece]:
    """Split text into word-like tokens with their leading space."""
    return list(re.findall(r"\n+| ?[^\W_]{1,7}|[^\w\s]|\s|_", text))


def _id(text: str) -> int:
    return sum((n + 1) * ord(c) for n, c in enumerate(text[:40])) % 49_000 + 7


def _top(rng: random.Random, first: str, probability: float, also: str | None = None) -> tuple[TopToken, ...]:
    words = [first, *([also] if also else []), *rng.sample(WRONG, 6)]
    unique = list(dict.fromkeys(words))[:5]
    left, found = 1.0 - probability, [TopToken(_id(first), first, round(probability, 6))]
    for word in unique[1:]:
        share = left * rng.uniform(0.25, 0.5)
        left -= share
        found.append(TopToken(_id(word), word, round(share, 6)))
    return tuple(sorted(found, key=lambda t: -t.probability))


def make_run(
    pieces: Sequence[Piece] | None = None,
    *,
    run_id: str = "r00000000synth",
    temperature: float = 0.7,
    proposer: str = "draft-model",
    k: int = 4,
    seed: int = 7,
    accept: float = 0.72,
    finish: FinishReason | None = FinishReason.EOS,
    error: str | None = None,
    not_speculating: str | None = None,
    slow: float = 1.0,
    prompt: str = "Explain in three sentences why the sky is blue.",
) -> Run:
    """A chain run whose output is ``pieces``. ``accept`` is the chance that a draft token is right."""
    rng = random.Random(seed)
    pieces = list(pieces_of(ANSWER) if pieces is None else pieces)
    labels: list[str] = []
    texts: list[str] = []
    for piece in pieces:
        parts = (piece,) if isinstance(piece, str) else piece
        labels.extend(parts)
        texts.extend(["" for _ in parts[:-1]] + [parts[-1]])
    greedy = temperature == 0
    one_hot = proposer in ("ngram", "prediction")
    steps = [Step(0, k, (), (Emitted(_id(labels[0]), texts[0], Source.TARGET, 0.83),), (), 0.0, 0.0, 0.0)]
    at = 1
    while at < len(labels):
        quiet = proposer == "none" or not_speculating or (one_hot and rng.random() < 0.3)
        step = _plain(rng, len(steps), k, labels, texts, at, slow) if quiet else None
        step = step or _drafted(rng, len(steps), k, labels, texts, at, accept, greedy, one_hot, slow)
        steps.append(step)
        at += len(step.emitted)
    output = tuple(e.id for s in steps for e in s.emitted)
    request = GenerationRequest(
        prompt=prompt, proposer=proposer, k=k, sampling=SamplingParams(temperature=temperature, seed=seed)
    )
    return Run(
        id=run_id,
        request=request.to_json(),
        target="smollm2-135m",
        proposer=proposer,
        draft="smollm2-draft" if proposer == "draft-model" else None,
        k=k,
        seed=seed,
        dtype="bfloat16",
        device="cpu",
        versions={"redline": "0.1.0"},
        fingerprint="0" * 16,
        prompt_ids=tuple(range(1, 21)),
        output_ids=output,
        text="".join(texts),
        finish_reason=finish,
        error=error,
        steps=tuple(steps),
        prefill_ms=61.0,
        ttft_ms=71.0,
        decode_ms=sum(s.draft_ms + s.verify_ms + s.overhead_ms for s in steps),
        metrics=metrics.derive(steps, not_speculating=not_speculating),
    )


def _plain(rng: random.Random, index: int, k: int, labels: list[str], texts: list[str], at: int, slow: float) -> Step:
    token = Emitted(_id(labels[at]), texts[at], Source.TARGET, round(rng.uniform(0.3, 0.99), 4))
    return Step(index, k, (), (token,), (), 0.0, round(rng.uniform(22.0, 25.0), 3), round(0.4 * slow, 3))


def _drafted(
    rng: random.Random,
    index: int,
    k: int,
    labels: list[str],
    texts: list[str],
    at: int,
    accept: float,
    greedy: bool,
    one_hot: bool,
    slow: float,
) -> Step:
    right = 0
    while right < k and at + right < len(labels) and rng.random() < accept:
        right += 1
    left = len(labels) - at
    drafts: list[DraftToken] = []
    emitted: list[Emitted] = []
    residual: tuple[TopToken, ...] = ()
    for n in range(k):
        parent = n - 1 if n else None
        if n < right:
            q, p = (1.0 if one_hot else rng.uniform(0.4, 0.9)), rng.uniform(0.45, 0.95)
            chance = 1.0 if greedy else min(1.0, p / q)
            u = None if greedy else round(rng.uniform(0, chance), 4)
            label = labels[at + n]
            tops = (_top(rng, label, p), () if one_hot else _top(rng, label, q))
            drafts.append(DraftToken(_id(label), label, parent, p, q, chance, u, Verdict.ACCEPTED, *tops))
            emitted.append(Emitted(_id(label), texts[at + n], Source.ACCEPTED, p))
        elif n == right and right < left:
            truth = labels[at + n]
            word = next(w for w in rng.sample(WRONG, len(WRONG)) if w != truth)
            q, p = (1.0 if one_hot else rng.uniform(0.4, 0.8)), rng.uniform(0.01, 0.2)
            chance = 0.0 if greedy else min(1.0, p / q)
            u = None if greedy else round(rng.uniform(chance, 1), 4)
            tops = (_top(rng, truth, 0.58, word), () if one_hot else _top(rng, word, q, truth))
            drafts.append(DraftToken(_id(word), word, parent, p, q, chance, u, Verdict.REJECTED, *tops))
            residual = () if greedy else _top(rng, truth, 0.79)
        else:
            word = rng.choice(WRONG)
            q = 1.0 if one_hot else rng.uniform(0.2, 0.7)
            tops = ((), () if one_hot else _top(rng, word, q))
            drafts.append(DraftToken(_id(word), word, parent, None, q, None, None, Verdict.UNTESTED, *tops))
    if right < left:
        source = Source.BONUS if right == k else Source.CORRECTED
        own = labels[at + right]
        emitted.append(Emitted(_id(own), texts[at + right], source, 0.58 if source is Source.CORRECTED else 0.34))
    times = (1.7 * k * slow * rng.uniform(0.95, 1.05), 28.0 * rng.uniform(0.97, 1.08), 0.8 * rng.uniform(0.8, 1.3))
    draft_ms = 0.2 if one_hot else times[0]
    return Step(
        index, k, tuple(drafts), tuple(emitted), residual, round(draft_ms, 3), round(times[1], 3), round(times[2], 3)
    )


def baseline_of(run: Run, run_id: str = "r00000000plain") -> Run:
    """The same text, decoded plainly."""
    texts = [e for s in run.steps for e in s.emitted]
    rng = random.Random(3)
    steps = [Step(0, run.k, (), (Emitted(texts[0].id, texts[0].text, Source.TARGET, 0.8),), (), 0.0, 0.0, 0.0)]
    for n, token in enumerate(texts[1:], start=1):
        own = Emitted(token.id, token.text, Source.TARGET, token.p)
        steps.append(Step(n, run.k, (), (own,), (), 0.0, round(rng.uniform(22.5, 24.2), 3), 0.3))
    return run.replace(
        id=run_id,
        proposer="none",
        draft=None,
        steps=tuple(steps),
        decode_ms=sum(s.verify_ms + s.overhead_ms for s in steps),
        metrics=metrics.derive(steps),
    )


def emoji_run() -> Run:
    """Characters of two to four tokens, some split over steps, and CJK."""
    smile: Piece = ("\\xF0\\x9F", "\\x99", "🙂")
    cake: Piece = ("\\xF0\\x9F", "🎂")
    kanji: Piece = ("\\xE7\\xA9", "空")
    words: list[Piece] = [
        *pieces_of("The sky "),
        kanji,
        "は",
        "青",
        "い",
        "。",
        smile,
        " So",
        " much",
        " blue",
        " ",
        cake,
        "!",
    ]
    return make_run(words * 2, run_id="r0000000emoji", accept=0.8)


def hostile_run() -> Run:
    """Tokens that would break a careless page."""
    pieces: list[Piece] = ["Hello"]
    for text in HOSTILE:
        pieces += [text, " and"]
    return make_run(pieces, run_id="r000000hostile", temperature=0.0)


def long_run(tokens: int = 2000) -> Run:
    """About ``tokens`` tokens."""
    words = pieces_of(ANSWER + " ")
    return make_run((words * (tokens // len(words) + 1))[:tokens], run_id="r00000000long", finish=FinishReason.LENGTH)


def tree_run() -> Run:
    """Two steps whose drafts branch, among plain chains."""
    run = make_run(run_id="r00000000tree", temperature=0.0)

    def draft(text: str, parent: int | None, verdict: Verdict, p: float | None = 0.5) -> DraftToken:
        tested = verdict is not Verdict.UNTESTED
        chance = float(verdict is Verdict.ACCEPTED) if tested else None
        return DraftToken(_id(text), text, parent, p if tested else None, 0.4, chance, None, verdict)

    words = [e.text for e in run.steps[1].emitted]
    first, second = words[0], " brightly"
    drafts = (
        draft(first, None, Verdict.ACCEPTED, 0.7),
        draft(" pale", None, Verdict.REJECTED, 0.1),
        draft(second, 0, Verdict.ACCEPTED, 0.6),
        draft(" dark", 0, Verdict.REJECTED, 0.2),
        draft(" today", 2, Verdict.REJECTED, 0.2),
        draft(" now", 3, Verdict.UNTESTED),
        draft(" grey", 1, Verdict.UNTESTED),
        draft(" and", 4, Verdict.UNTESTED),
    )
    emitted = (
        Emitted(_id(first), first, Source.ACCEPTED, 0.7),
        Emitted(_id(second), second, Source.ACCEPTED, 0.6),
        Emitted(_id(" because"), " because", Source.CORRECTED, 0.6),
    )
    old = run.steps[1]
    tree = Step(1, 8, drafts, emitted, (), old.draft_ms, old.verify_ms, old.overhead_ms)
    steps = (run.steps[0], tree, *run.steps[2:])
    ids = tuple(e.id for s in steps for e in s.emitted)
    text = "".join(e.text for s in steps for e in s.emitted)
    return run.replace(steps=steps, output_ids=ids, text=text, metrics=metrics.derive(steps))
