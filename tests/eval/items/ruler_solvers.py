"""Readers of RULER prompts that know the wording and nothing else."""

import re
from collections import Counter
from collections.abc import Callable

PEOPLE = (
    (r"In which town was (.+) born\?", r"{} was born in (\w+) "),
    (r"Who gave (.+) a first lesson in arithmetic\?", r"{} was born .*? arithmetic came from (\w+ \w+),"),
    (r"By which river did (.+) spend later years\?", r"{} was born .*? by the river (\w+),"),
    (r"Which town is the birthplace of (.+)\?", r"The birthplace of {} is (\w+),"),
    (r"With whom did (.+) serve an apprenticeship\?", r"The birthplace of {} .*? an apprenticeship with (\w+ \w+)\."),
    (r"On which river did (.+) have an accident\?", r"The birthplace of {} .*? accident on the river (\w+)\."),
)
THINGS = (
    (r"Who founded the (\w+) Observatory\?", r"The {} Observatory was founded by (\w+ \w+) "),
    (r"Above which river does the (\w+) Observatory stand\?", r"The {} Observatory .*? above the river (\w+)\."),
    (r"In which town was the largest telescope of the (\w+) Obs", r"The {} Observatory .*? was ground in (\w+)\."),
    (r"In which town was the ship (\w+) built\?", r"sailing ship {} was built in the yards of (\w+) "),
    (r"Who was the first captain of the ship (\w+)\?", r"sailing ship {} .*? captain was (\w+ \w+),"),
    (r"In which strait was the ship (\w+) lost\?", r"sailing ship {} .*? Strait of (\w+)\."),
    (r"Who was the first to reach the summit of Mount (\w+)\?", r"Mount {} rises .*?\. (\w+ \w+) was the first"),
    (r"In which town does the usual way up Mount (\w+) begin\?", r"Mount {} rises .*? church of (\w+)\."),
    (r"Above the valley of which river does Mount (\w+) rise\?", r"Mount {} rises .*? valley of the (\w+)\."),
    (r"Who wrote the opera (\w+)\?", r"The opera {} was written by (\w+ \w+) "),
    (r"In which town was the opera (\w+) first sung\?", r"The opera {} .*? first sung in (\w+),"),
    (r"In which river is the heroine of the opera (\w+) drowned\?", r"The opera {} .*? drowned in the river (\w+)\."),
    (r"Who designed the (\w+) bridge\?", r"The {} bridge .*? designed by (\w+ \w+) "),
    (r"Which river does the (\w+) bridge cross\?", r"The {} bridge .*? across the river (\w+)\."),
    (r"From which town does the road over the (\w+) bridge come\?", r"The {} bridge carries the road from (\w+) "),
    (r"Who opened the (\w+) school of weaving\?", r"The {} school of weaving .*? by (\w+ \w+)\."),
    (r"In which town was the (\w+) school of weaving opened\?", r"The {} school of weaving was opened in (\w+) "),
    (r"Down which river did the dyes of the (\w+) school", r"The {} school of weaving .*? down the river (\w+) on"),
)
PEOPLE_BY_THING = (
    r"the founder of the (\w+) Observatory",
    r"the first captain of the ship (\w+)",
    r"the first person on the summit of Mount (\w+)",
    r"the composer of the opera (\w+)",
    r"the designer of the (\w+) bridge",
    r"the person who opened the (\w+) school of weaving",
)
LINKS = tuple(zip(PEOPLE_BY_THING, (said for asked, said in THINGS if asked.startswith("Who ")), strict=True))


def needles(prompt: str) -> list[tuple[str, str]]:
    return re.findall(r"The secret \w+ of (\S+) is: (\S+)\.", prompt)


def asked_keys(prompt: str) -> list[str]:
    (asked,) = re.findall(r"secret \w+ of (.+) that the text above tells\?\n", prompt)
    return re.split(", | and ", asked)


def solve_niah(prompt: str) -> list[str]:
    return [value for key, value in needles(prompt) if key in asked_keys(prompt)]


def solve_vt(prompt: str) -> list[str]:
    text = prompt.split("Now the text that counts.")[1]
    (wanted,) = re.findall(r"Which variables .* have the value (\d+)\?", text)
    values: dict[str, str] = {}
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        values[name] = values.get(source, source)
    return [name for name, value in values.items() if value == wanted]


def listed_words(prompt: str) -> Counter[str]:
    return Counter(re.findall(r"\d+\. ([a-z-]+)", prompt.split("Now the list that counts.")[1]))


def solve_cwe(prompt: str) -> list[str]:
    return [word for word, _ in listed_words(prompt).most_common(10)]


def coded_words(prompt: str) -> Counter[str]:
    return Counter(word for word in prompt.split("\n\n")[1].split("\n")[0].split(" ") if word != "...")


def solve_fwe(prompt: str) -> list[str]:
    return [word for word, _ in coded_words(prompt).most_common(3)]


def documents(prompt: str) -> list[str]:
    return re.findall(r"Document \d+:\n(.+)\n", prompt)


def _look_up(prompt: str, question: str, patterns: tuple[tuple[str, str], ...]) -> str | None:
    for asked, said in patterns:
        if match := re.search(asked, question):
            found = [m[1] for d in documents(prompt) if (m := re.search(said.format(re.escape(match[1])), d))]
            assert len(found) == 1, (question, found)
            return found[0]
    return None


def solve_qa_1(prompt: str) -> list[str]:
    (question,) = re.findall(r"\nQuestion: (.+)\n", prompt)
    return [_look_up(prompt, question, THINGS + PEOPLE) or ""]


def solve_qa_2(prompt: str) -> list[str]:
    (question,) = re.findall(r"\nQuestion: (.+)\n", prompt)
    person = _look_up(prompt, question, LINKS)
    for link, _ in LINKS:
        question = re.sub(link, person or "", question)
    return [_look_up(prompt, question, PEOPLE) or ""]


SOLVERS: dict[str, Callable[[str], list[str]]] = {
    "vt": solve_vt,
    "cwe": solve_cwe,
    "fwe": solve_fwe,
    "qa_1": solve_qa_1,
    "qa_2": solve_qa_2,
}


def solve(subtask: str, prompt: str) -> list[str]:
    return SOLVERS.get(subtask, solve_niah)(prompt)
