"""What counts as a right answer, and above all what does not."""

import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.eval.items import SCORERS, Ask, Item
from dasc.eval.items.choice import chosen_letter
from dasc.eval.items.final_answer import number, same_answer, stated_answer

LETTERS = tuple("ABCDEFGHIJ")


def score(scorer: str, answer, *references, choices=()) -> float:
    ids = not isinstance(references[0], str)
    prompt = (1, 2) if ids else "prompt"
    ask = Ask(prompt, references)
    return SCORERS[scorer](Item("1", "task", prompt, (ask,), scorer, 8, choices), ask, answer)


@pytest.mark.parametrize(
    ("answer", "reference", "right"),
    [
        ((7, 8, 9), (7, 8), True),
        ((7,), (7, 8), False),
        ((), (7,), False),
        ((8, 7, 8), (7, 8), False),
        (" The  Cat\n", "the cat", True),
        ("the cat sat", "the cat", False),
        ("", "the cat", False),
    ],
)
def test_exact_takes_the_first_tokens_or_the_whole_text(answer, reference, right: bool):
    assert score("exact", answer, reference) == right


def test_any_of_several_references_is_right():
    assert score("exact", (3,), (1,), (3,)) == 1
    assert score("exact", "c", "a", "c") == 1
    assert score("token_f1", "red car", "blue house", "red car") == 1
    assert score("final_answer", "\\boxed{5}", "4", "5") == 1


def test_string_match_all_is_the_share_of_references_found_and_part_any_of_them():
    assert score("string_match_all", "It is ALPHA and beta.", "alpha", "beta", "gamma", "delta") == 0.5
    assert score("string_match_part", "It is ALPHA.", "alpha", "beta") == 1
    assert score("string_match_part", "It is gamma.", "alpha", "beta") == 0
    assert score("string_match_all", "", "alpha") == 0


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("The cat, a Cat!", "cat cat", 1.0),
        ("the big cat", "cat", 2 / 3),
        ("cat cat cat", "cat", 0.5),  # each word of the reference counts once
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "a", 1.0),
        ("7 May 2023", "May 7, 2023", 1.0),
    ],
)
def test_token_f1_is_that_of_words_without_articles_case_and_punctuation(answer: str, reference: str, f1: float):
    assert score("token_f1", answer, reference) == pytest.approx(f1)


@given(st.lists(st.sampled_from(["red", "green", "blue", "the"])), st.lists(st.sampled_from(["red", "green", "blue"])))
def test_token_f1_is_symmetric_and_1_only_for_the_same_words(said, reference):
    reference = [*reference, "red"]
    f1 = score("token_f1", " ".join(said) or " ", " ".join(reference))
    assert f1 == pytest.approx(score("token_f1", " ".join(reference), " ".join(said) or " "))
    assert (f1 == 1) == (sorted(w for w in said if w != "the") == sorted(reference))


@pytest.mark.parametrize(
    "answer",
    [
        "The answer is (B).",
        "The answer is B",
        "the answer is: b.",
        "Answer: B",
        "**Answer:** B",
        "**Answer: B**",
        "ANSWER: **(B)**",
        "Answer: $B$",
        "Final answer: B) 42",
        "The correct answer is option B.",
        "The correct option is B because A is wrong.",
        "The answer is B, I think.",
        "The answer is B and C is wrong.",
        "The answer is B or so I think.",
        "The best choice is (B), not (C).",
        "The answer is\n\n(B)",
        "\\boxed{B}",
        "So it is $\\boxed{\\text{B}}$.",
        "\\boxed{\\textbf{(B)}}",
        "\\boxed{(B) 42}",
        "The answer is \\boxed{B}",
        "B",
        "(B)",
        " **B** ",
        "B.",
        "$\\boxed{\\mathrm{B}}$",
        "B) Paris",
        "(B) Paris",
        "Some thoughts about A.\nB",
        "First I thought the answer is (A). No: the answer is (B).",
        "The answer is (A)... wait. \\boxed{B}",
        "\\boxed{C} was too quick. The answer is B.",
        "\\boxed{42}, therefore the answer is (B)",
    ],
)
def test_a_letter_is_found_in_every_usual_form_and_the_last_statement_wins(answer: str):
    assert chosen_letter(answer, LETTERS) == "B"
    assert score("choice", answer, "B", choices=LETTERS) == 1
    assert score("choice", answer, "C", choices=LETTERS) == 0


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "I think that A or B may be right.",
        "The answer is a matter of taste.",
        "The answer is I'm not sure",
        "The answer is I think unclear",
        "The answer is A-type plasma",
        "The answer is B or C.",
        "The answer is (A) or (B)",
        "The answer is (A), or perhaps B.",
        "The answer is B or maybe C.",
        "The answer is B and C.",
        "The answer is **(B)** and **(C)**",
        "\\boxed{(A) or (B)}",
        "\\boxed{A, B}",
        "\\boxed{\\text{A or B}}",
        "Answer: A, B, C",
        "Answer: A/B",
        "The answer is not B.",
        "Option B is wrong.",
        "If B is true, it is hot.",
        "A bird sings.",
        "A. one\nB. two\nC. three",
        "The answer is 42",
        "\\boxed{Barium}",
        "\\boxed{42}",
        "The answer is (K).",
        "Answer: Because",
        "The answer is (B). On reflection, the answer is (A) or (C).",
    ],
)
def test_no_letter_is_picked_out_of_running_text_nor_of_two(answer: str):
    assert chosen_letter(answer, LETTERS) is None


def test_a_letter_that_the_question_does_not_have_is_none():
    assert chosen_letter("The answer is (E).", LETTERS[:4]) is None
    assert chosen_letter("The answer is (D).", LETTERS[:4]) == "D"


@pytest.mark.parametrize("letter", LETTERS)
def test_every_letter_is_found_alike(letter: str):
    for form in ("The answer is ({}).", "Answer: {}", "\\boxed{{{}}}", "{}", "The answer is {} because it is."):
        assert chosen_letter(form.format(letter), LETTERS) == letter


@pytest.mark.parametrize(
    ("answer", "stated"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} but then \\boxed{2}", "2"),
        ("$\\boxed{ \\{1, 2\\} }$", "\\{1, 2\\}"),
        ("\\fbox{7}", "7"),
        ("{ \\boxed{\\boxed{7}} }", "7"),
        ("\\boxed{1\n}", "1"),
        ("\\\\{\\boxed{\\}}", "\\}"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{5}. The answer is verified.", "5"),
        ("The answer is 42. It follows from 7.", "42"),
        ("**Answer:** 3.5", "3.5"),
        ("The answer is 3. No, the answer is 4", "4"),
        ("42", "42"),
        ("It takes 12 steps\nand 42 more", None),
        ("", None),
    ],
)
def test_the_stated_answer_is_the_last_box_or_statement_and_never_a_number_of_running_text(answer: str, stated):
    assert stated_answer(answer) == stated


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("042", "42"),
        ("$42$", "42"),
        ("42.", "42"),
        ("42.0", "42"),
        ("x = 42", "42"),
        ("1,234", "1234"),
        ("−3", "-3"),
        ("0.5", "\\frac{1}{2}"),
        ("\\dfrac{2}{4}", "1/2"),
        ("-\\frac12", "-0.5"),
        ("90^\\circ", "90"),
        ("\\left( 1, 2 \\right)", "(1,2)"),
        ("\\text{No}", "No"),
        ("2\\sqrt{3}", "2 \\sqrt{3}"),
        ("2^{1012}", "2^{1012}"),
    ],
)
def test_the_same_answer_in_other_clothes(given: str, reference: str):
    assert same_answer(given, reference)
    assert same_answer(reference, given)


@pytest.mark.parametrize(
    ("given", "reference"),
    [
        ("0.333", "1/3"),
        ("42", "420"),
        ("4", "42"),
        ("-42", "42"),
        ("12", "1,2"),
        ("1,2", "12"),
        ("(1,2)", "(2,1)"),
        ("\\frac{1}{0}", "1"),
        ("n", "N"),
        ("the sum is 42", "42"),
        ("\\frac{12}{3}", "\\frac{1}{23}"),
        ("", "0"),
    ],
)
def test_other_answers_are_not_the_same(given: str, reference: str):
    assert not same_answer(given, reference)
    assert not same_answer(reference, given)


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_number_is_the_same_however_it_is_written(top: int, bottom: int):
    forms = [f"{top}/{bottom}", f"{'-' * (top < 0)}\\frac{{{abs(top)}}}{{{bottom}}}"]
    assert len({number(form) for form in forms}) == 1
    assert number(f"{top:,}") == number(str(top)) == number(f"{top}.0") == top


def test_what_is_far_too_long_is_no_answer_and_no_error():
    assert stated_answer(f"\\boxed{{{'7' * 1000}}}") == "7" * 1000
    assert stated_answer(f"\\boxed{{{'7' * 1001}}}") is None
    assert score("final_answer", "7", "7" * 5000) == 0
    assert score("final_answer", f"\\boxed{{{'7' * 5000}}}", "7") == 0


@pytest.mark.parametrize(
    "loop",
    [
        "\\boxed{",
        "answer ",
        "answer is ",
        "the answer is A",
        "the correct answer is option ",
        "\\text{",
        "* ",
        "A ",
        "(A)",
        ", ",
        "} {",
        "answer is" + " " * 99,
    ],
)
def test_an_endless_answer_is_scored_at_once(loop: str):
    start = time.process_time()
    for end in ("", "}" * 50_000):
        answer = loop * (200_000 // len(loop)) + end
        chosen_letter(answer, LETTERS)
        stated = stated_answer(answer)
        assert stated is None or not same_answer(stated, "3")
    assert time.process_time() - start < 5  # well below a second when nobody else computes


def test_a_final_answer_of_another_value_scores_nothing():
    assert score("final_answer", "Thus \\boxed{204}.", "204") == 1
    assert score("final_answer", "We have 204 cases.\nThus \\boxed{205}.", "204") == 0
    assert score("final_answer", "We have 204 cases.\nI do not know.", "204") == 0
    assert score("final_answer", "\\boxed{\\frac{9}{\\sqrt{23}}}", "\\frac{9\\sqrt{23}}{23}") == 0


def test_expressions_are_equal_by_value():
    assert score("expression", "\\boxed{\\frac{9}{\\sqrt{23}}}", "\\frac{9\\sqrt{23}}{23}") == 1
    assert score("expression", "\\boxed{(x+1)^2}", "x^2+2x+1") == 1
    assert score("expression", "\\boxed{3, 4}", "4, 3") == 1
    assert score("expression", "\\boxed{042}", "42") == 1
    for wrong in ("\\boxed{3,4}", "\\boxed{0.3333}", "\\boxed{3 \\text{ or } 1/3}", "\\boxed{}", "1/3 is a guess\nno"):
        assert score("expression", wrong, "\\frac13") == 0


def test_expressions_need_math_verify_and_say_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"pip install 'dasc\[math\]'"):
        score("expression", "\\boxed{1}", "1")


def test_expressions_outside_the_main_thread_are_refused():
    errors = []

    def run() -> None:
        try:
            score("expression", "\\boxed{x}", "y")
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]


@pytest.mark.parametrize("scorer", sorted(set(SCORERS) - {"exact"}))
def test_scorers_of_text_refuse_token_ids(scorer: str):
    with pytest.raises(ValueError, match="must be text"):
        score(scorer, (1, 2), "1", choices=LETTERS)
    with pytest.raises(ValueError, match="must be text"):
        score(scorer, "\\boxed{A}", (1, 2), choices=LETTERS)


def test_exact_refuses_text_for_token_ids_and_the_other_way_round():
    with pytest.raises(ValueError, match="must be token ids"):
        score("exact", "1", (1,))
    with pytest.raises(ValueError, match="must be text"):
        score("exact", (1,), "1")


def test_choice_needs_to_know_the_letters():
    with pytest.raises(ValueError, match="choices"):
        score("choice", "B", "B")


@given(st.text(), st.sampled_from(sorted(SCORERS)))
def test_scores_lie_between_0_and_1_for_any_text(answer: str, scorer: str):
    assert 0 <= score(scorer, answer, "B", choices=LETTERS) <= 1
