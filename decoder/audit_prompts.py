"""Eight prompts of different kinds for the greedy half of the audit."""

from __future__ import annotations

from decoder.request import GenerationRequest

_CODE = '''def moving_average(values, window):
    """Return the moving average of a list of numbers."""
    result = []
    for i in range(len(values) - window + 1):
        result.append(sum(values[i:i + window]) / window)
    return result
'''

_FACTS = (
    "The lighthouse at {n} stands {h} metres tall and was built in {y}.",
    "Its keeper counted {n} ships in the month of the storm, and {h} in the month after.",
    "In {y} the lamp was changed from oil to gas, and its light reached {h} miles.",
    "The path from the village has {n} steps; every spring some of them are repaired.",
)


def long_text(sentences: int) -> str:
    """A plain text of ``sentences`` numbered sentences (about 22 tokens each), no two of them the same."""
    return " ".join(
        _FACTS[i % len(_FACTS)].format(n=i + 3, h=(7 * i) % 90 + 10, y=1800 + (13 * i) % 190) for i in range(sentences)
    )


def audit_prompts() -> list[tuple[str, GenerationRequest]]:
    """(kind, request) pairs; target, proposer and lengths are filled in by the audit."""
    return [
        ("chat", GenerationRequest("Why do cats purr? Give three reasons.")),
        ("code", GenerationRequest("Write a Python function that checks whether a string is a palindrome.")),
        ("edit", GenerationRequest(f"Rename the argument `values` to `numbers` in this code:\n\n{_CODE}")),
        ("long", GenerationRequest(f"Summarise this report in five sentences.\n\n{long_text(70)}")),
        ("non-English", GenerationRequest("Erkläre auf Deutsch, was ein Leuchtturm ist. 灯塔是什么？")),
        ("emoji", GenerationRequest("Continue this pattern for a long time: 🦊🐻 🦊🐻🐼 🦊🐻🐼🐸 👩‍🚀🇨🇭 🦊🐻")),
        ("empty system prompt", GenerationRequest("List ten animals and their sounds.", system_prompt="")),
        ("raw text", GenerationRequest("Once upon a time, in a village by the sea, there lived", chat=False)),
    ]
