"""What every training loop here shares: the course of the learning rate, and which rows a step sees."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class Schedule(Protocol):
    """The part of a training plan that decides both."""

    @property
    def steps(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def warmup(self) -> int: ...
    @property
    def decay(self) -> float: ...
    @property
    def seed(self) -> int: ...


def learning_rate(plan: Schedule, step: int) -> float:
    """Factor on the learning rates: a linear warm-up, a plateau, a linear fall to zero."""
    fall = plan.steps * plan.decay
    return min(1.0, (step + 1) / plan.warmup, (plan.steps - step) / max(fall, 1))


def batch_rows(plan: Schedule, step: int, train: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Row indices of ``step``: every epoch is a new permutation, a function of seed and step alone."""
    slots = np.arange(step * plan.batch, (step + 1) * plan.batch)
    epochs = slots // len(train)
    orders = {epoch: np.random.default_rng((plan.seed, epoch)).permutation(train) for epoch in set(epochs.tolist())}
    return np.array([orders[int(e)][s] for e, s in zip(epochs, slots % len(train), strict=True)])
