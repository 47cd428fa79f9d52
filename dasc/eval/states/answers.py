"""Questions after cached prefixes, and how well the model answers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dasc.eval.states.prefixes import Prefixes, continued
from dasc.models.tasks import Question

Measure = Literal["accuracy", "log_prob"]
"""Of answers: share that is right in every token; log-probability of a whole right answer, nats."""


@dataclass(frozen=True, eq=False)
class Answers:
    """Scores of ``Q`` questions with ``T`` answer tokens in all.

    Each answer token is scored after the prefix, the question and the right tokens before it. A question is right
    when all its tokens are: exactly when the model, asked to go on greedily, says the answer.

    Attributes:
        owner: ``[Q]`` int64, number of the prefix of each question, ascending.
        token_right: ``[T]`` bool, the likeliest token is the right one.
        token_log_prob: ``[T]`` float64, log-probability of the right token, nats.
        token_counts: answer tokens of each question.
        logits: ``[T, vocab]`` behind the scores, if they were asked for.
    """

    owner: Tensor
    token_right: Tensor
    token_log_prob: Tensor
    token_counts: tuple[int, ...]
    logits: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """``[Q]`` bool: the answer is right in every token."""
        return torch.stack([part.all() for part in torch.split(self.token_right, list(self.token_counts))])

    @property
    def log_prob(self) -> Tensor:
        """``[Q]`` float64: log-probability of the whole answer, nats."""
        return torch.stack([part.sum() for part in torch.split(self.token_log_prob, list(self.token_counts))])

    def by_prefix(self) -> dict[Measure, list[float]]:
        """Each measure of each prefix, mean over its questions; every prefix must have been asked some."""
        count = torch.bincount(self.owner)
        return {
            "accuracy": (torch.bincount(self.owner, self.right.double()) / count).tolist(),
            "log_prob": (torch.bincount(self.owner, self.log_prob) / count).tolist(),
        }


def ask(prefixes: Prefixes, questions: Sequence[Sequence[Question]], *, keep_logits: bool = False) -> Answers:
    """Ask each prefix its questions, every one by itself right after the prefix.

    Args:
        prefixes: are not changed.
        questions: of each prefix.
        keep_logits: keep the logits of all answer tokens.

    Raises:
        ValueError: for other than one list of questions a prefix, no questions at all, or unknown token ids.
    """
    if len(questions) != len(prefixes):
        raise ValueError(f"questions must be of each of the {len(prefixes)} prefixes, got {len(questions)}")
    asked = [(owner, question) for owner, group in enumerate(questions) for question in group]
    if not asked:
        raise ValueError("questions must hold a question, got none")
    fed = [(owner, (*question.prompt, *question.answer[:-1])) for owner, question in asked]
    right, log_prob, kept = [], [], []
    for part in continued(prefixes, fed):
        here = [question for _, question in asked[part.first : part.first + part.temporal.shape[1]]]
        wanted = torch.tensor([token for question in here for token in question.answer])
        logits = part.logits[_scored_rows(here)]
        right.append(logits.argmax(dim=-1) == wanted)
        log_prob.append(logits.double().log_softmax(dim=-1).gather(1, wanted[:, None])[:, 0])
        if keep_logits:
            kept.append(logits)
    return Answers(
        owner=torch.tensor([owner for owner, _ in asked]),
        token_right=torch.cat(right),
        token_log_prob=torch.cat(log_prob),
        token_counts=tuple(len(question.answer) for _, question in asked),
        logits=torch.cat(kept) if keep_logits else None,
    )


def _scored_rows(questions: Sequence[Question]) -> Tensor:
    """Rows of the logits after which an answer token is due: from the last of the prompt on."""
    rows: list[int] = []
    end = 0
    for question in questions:
        end += len(question.prompt) + len(question.answer) - 1
        rows += range(end - len(question.answer), end)
    return torch.tensor(rows)
