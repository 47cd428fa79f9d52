"""Each question is scored as if it alone came after the prefix."""

import pytest
import torch

from dasc.eval.states import ask, prefixes
from dasc.models.tasks import Question
from tests.cache.engine_runs import greedy
from tests.eval.states.runs import contexts, model_of, prefixes_of, questions
from tests.models.hybrid_runs import MODELS, assert_close, isolated


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_log_probabilities_are_those_of_isolated_runs(kind: str, gate: str):
    answers = ask(prefixes_of(kind, gate), questions(), keep_logits=True)
    expected_logits, expected_sums = [], []
    for context, group in zip(contexts(), questions()):
        for question in group:
            logits = isolated(model_of(kind, gate), torch.tensor((*context, *question.prompt, *question.answer)))[0]
            rows = logits[-len(question.answer) - 1 : -1]
            expected_logits.append(rows)
            log_probs = rows.log_softmax(dim=-1)
            expected_sums.append(sum(log_probs[i, token] for i, token in enumerate(question.answer)))
    assert_close(answers.logits, torch.cat(expected_logits))
    assert_close(answers.log_prob, torch.stack(expected_sums))
    assert answers.owner.tolist() == [0, 0, 1, 3, 3, 3]
    assert answers.token_counts == (1, 3, 2, 1, 1, 4)


def test_right_is_what_the_model_says_greedily():
    """Answers taken from free generation are right; with any one token changed they are wrong."""
    model, prompt = model_of("kda"), (3, 4)
    said = [greedy(model, (*context, *prompt), 3) for context in contexts()]
    assert ask(prefixes_of("kda"), [[Question(prompt, answer)] for answer in said]).right.all()
    for place in range(3):
        changed = [(*answer[:place], (answer[place] + 1) % 97, *answer[place + 1 :]) for answer in said]
        answers = ask(prefixes_of("kda"), [[Question(prompt, answer)] for answer in changed])
        assert not answers.right.any()
        assert not answers.token_right.view(-1, 3)[:, place].any()
        assert answers.token_right.view(-1, 3)[:, :place].all()


def test_scores_do_not_depend_on_what_else_is_asked(monkeypatch: pytest.MonkeyPatch):
    whole = ask(prefixes_of("gdn"), questions())
    monkeypatch.setattr(prefixes, "_BATCH_TOKENS", 1)
    assert_close(ask(prefixes_of("gdn"), questions()).token_log_prob, whole.token_log_prob)


def test_logits_are_kept_only_when_asked_for():
    assert ask(prefixes_of("gdn"), questions()).logits is None


def test_wrong_questions_are_refused():
    held = prefixes_of("kda")
    with pytest.raises(ValueError, match="questions must be of each of the 4 prefixes, got 1"):
        ask(held, [[]])
    with pytest.raises(ValueError, match="questions must hold a question, got none"):
        ask(held, [[]] * 4)
