"""RULER's thirteen tasks (arXiv:2404.06654): needles of eight kinds, variables, word counts, questions.

Numbers, templates and scores are the paper's. Words are made up here, because its word lists are not to be had offline;
the questions of ``qa`` come from a file of the user's. Scores are therefore comparable among each other only.
"""

import itertools
import random
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from thor_spec import json_text
from thor_spec.errors import ConfigError
from thor_spec.eval import haystack, wilson
from thor_spec.eval.run import Answers, Request
from thor_spec.eval.text import Tokenizer

CONTROL = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and the strings that its answer must hold: all of them, or any."""

    id: str
    task: str
    length: int
    prompt: tuple[int, ...]
    max_tokens: int
    wanted: tuple[str, ...]
    any_will_do: bool = False

    def score(self, said: str) -> float:
        """Return the share of the wanted strings that ``said`` holds, without regard to case; 1 or 0 where any does."""
        hits = [want.lower() in said.lower() for want in self.wanted]
        return float(any(hits)) if self.any_will_do else sum(hits) / len(hits)


Built = tuple[Callable[[int], str], Sequence[str]]
"""A text of any size, and what its answer must hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a task is made from."""

    rng: random.Random
    source: str
    budget: int
    qa: Sequence[Mapping[str, Any]] = ()


def _words_of(setting: Setting) -> list[str]:
    """Return sentences enough for the budget: no sentence is shorter than two tokens."""
    stream = haystack.sentences(setting.source, setting.rng.randrange(1 << 30))
    return list(islice(stream, setting.budget // 2 + 8))


def _noise(setting: Setting) -> list[str]:
    return [haystack.NOISE] * (setting.budget // 8 + 8)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(1_000_000, 10_000_000))


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _needles(
    setting: Setting,
    *,
    straw: str = "essay",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    kind: str = "numbers",
    key_of: Callable[[random.Random], str] | None = None,
) -> Built:
    rng = setting.rng
    make = _uuid if kind == "uuids" else _number
    names = [key_of(rng) for _ in range(keys)] if key_of else haystack.words(rng, keys)
    held = {name: [make(rng) for _ in range(values)] for name in names}
    asked = names[:queries]
    lines = [f"One of the special magic {kind} for {name} is: {value}." for name in names for value in held[name]]
    depths = [rng.random() for _ in lines]
    if straw == "needles":  # the haystack is made of needles for other keys
        other = key_of or haystack.word
        taken = set(names)
        hay = [
            f"One of the special magic {kind} for {name} is: {make(rng)}."
            for name in (other(rng) for _ in range(setting.budget // 8 + 8))
            if name not in taken
        ]
    else:
        hay = _noise(setting) if straw == "noise" else _words_of(setting)
    query = ", ".join(asked[:-1]) + f", and {asked[-1]}" if len(asked) > 1 else asked[0]

    def build(count: int) -> str:
        text = haystack.hidden(hay[:count], lines, depths)
        return (
            f"Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz "
            f"you about the {kind} afterwards.\n{text}\nWhat are all the special magic {kind} for {query} mentioned in "
            f"the provided text? The special magic {kind} for {query} mentioned in the provided text are"
        )

    return build, [value for name in asked for value in held[name]]


def _variables(setting: Setting, hops: int = 4) -> Built:
    rng = setting.rng
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(hops + 1)]
    value = str(rng.randrange(10_000, 100_000))
    lines = [f"VAR {names[0]} = {value}"] + [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
    depths = sorted(rng.random() for _ in lines)  # a variable is set before it is read
    hay = _noise(setting)

    def build(count: int) -> str:
        return (
            "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
            f"{haystack.hidden(hay[:count], lines, depths)}\nQuestion: Find all variables that are assigned the value "
            f"{value} in the text above. Answer: According to the chain(s) of variable assignment in the text above, "
            f"{hops + 1} variables are assigned the value {value}, they are: "
        )

    return build, names


def _common_words(setting: Setting, common: int = 10, often: int = 30, seldom: int = 3) -> Built:
    rng = setting.rng
    pool = haystack.words(rng, common) + _coded_words(rng, setting.budget // (4 * seldom) + 1)
    order = rng.random()

    def build(count: int) -> str:
        listed = pool[:common] * often + pool[common : common + count] * seldom
        random.Random(order).shuffle(listed)
        numbered = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
        return (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            f"that appear most often.\n{numbered}\nQuestion: What are the 10 most common words in the above list? "
            "Answer: The top 10 words that appear most often in the list are:"
        )

    return build, pool[:common]


def _frequent_words(setting: Setting, alpha: float = 2.0) -> Built:
    rng = setting.rng
    pool = _coded_words(rng, 2000)
    order = rng.random()
    whole = sum(rank**-alpha for rank in range(1, len(pool) + 1))

    def build(count: int) -> str:
        drawn = [word for rank, word in enumerate(pool, 1) for _ in range(round((count + 20) * rank**-alpha / whole))]
        random.Random(order).shuffle(drawn)
        text = " ".join(f"... {word}" if i % 7 == 0 else word for i, word in enumerate(drawn))
        return (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            f"appeared coded words. {text}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
            "What are the three most frequently appeared words in the above coded text? Answer: According to the coded "
            "text above, the three most frequently appeared words are:"
        )

    return build, pool[:3]


def _coded_words(rng: random.Random, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    return list(found)


def _question(setting: Setting) -> Built:
    rng = setting.rng
    chosen = rng.randrange(len(setting.qa))
    entry = setting.qa[chosen]
    others = [str(other["context"]) for i, other in enumerate(setting.qa) if i != chosen]
    others = list(dict.fromkeys(text for text in others if text != entry["context"]))
    rng.shuffle(others)
    place = rng.random()

    def build(count: int) -> str:
        documents = others[:count]
        documents.insert(round(place * len(documents)), str(entry["context"]))
        text = "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(documents, 1))
        return (
            "Answer the question based on the given documents. Only give me the answer and do not output any other "
            f"words.\n\nThe following are given documents.\n\n{text}\n\nAnswer the question based on the given "
            f"documents. Only give me the answer and do not output any other words.\n\nQuestion: "
            f"{entry['question']} Answer:"
        )

    return build, [str(answer) for answer in entry["answers"]]


@dataclass(frozen=True, slots=True)
class Task:
    """How one task is made, and how long its answer may be."""

    build: Callable[[Setting], Built]
    max_tokens: int
    any_will_do: bool = False


TASKS: Mapping[str, Task] = {
    "niah_single_1": Task(lambda s: _needles(s, straw="noise"), 128),
    "niah_single_2": Task(_needles, 128),
    "niah_single_3": Task(lambda s: _needles(s, kind="uuids"), 128),
    "niah_multikey_1": Task(lambda s: _needles(s, keys=4), 128),
    "niah_multikey_2": Task(lambda s: _needles(s, straw="needles"), 128),
    "niah_multikey_3": Task(lambda s: _needles(s, straw="needles", kind="uuids", key_of=_uuid), 128),
    "niah_multivalue": Task(lambda s: _needles(s, values=4), 128),
    "niah_multiquery": Task(lambda s: _needles(s, keys=4, queries=4), 128),
    "vt": Task(_variables, 30),
    "cwe": Task(_common_words, 120),
    "fwe": Task(_frequent_words, 50),
    "qa_1": Task(_question, 32, any_will_do=True),
    "qa_2": Task(_question, 32, any_will_do=True),
}


def questions(
    tokenizer: Tokenizer,
    source: str,
    names: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int,
    qa: Mapping[str, Sequence[Mapping[str, Any]]],
) -> list[Question]:
    """Return ``samples`` questions of each task and length, answer included in the length.

    Args:
        qa: entries with ``question``, ``context`` and ``answers`` by task, for ``qa_1`` and ``qa_2``.

    Raises: ConfigError, on an unknown task, and on one that a length does not hold.
    """
    found = []
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"--task {name} is not one of {', '.join(TASKS)}.")
        if name.startswith("qa") and not qa.get(name):
            raise ConfigError(
                f"{name} needs questions: --qa FILE, jsonl with question, context and answers. Or leave it out."
            )
        task = TASKS[name]
        for length in lengths:
            budget = length - task.max_tokens
            for sample in range(samples):
                rng = random.Random(f"{seed}:{name}:{length}:{sample}")
                setting = Setting(rng=rng, source=source, budget=budget, qa=qa.get(name, ()))
                build, wanted = task.build(setting)
                try:
                    text = haystack.fitted(build, tokenizer, budget, max(budget // 64, 1))
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from error
                found.append(
                    Question(
                        id=f"{name}-{length}-{sample}",
                        task=name,
                        length=length,
                        prompt=tuple(tokenizer.encode(text).ids),
                        max_tokens=task.max_tokens,
                        wanted=tuple(wanted),
                        any_will_do=task.any_will_do,
                    )
                )
    return found


def read_questions(path: Path) -> list[Mapping[str, Any]]:
    """Return the entries of a jsonl file. Raises: ConfigError, naming the line."""
    found: list[Mapping[str, Any]] = []
    try:
        lines = json_text.lines(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The questions {path} cannot be read: {getattr(error, 'strerror', error)}.") from error
    for number, line in enumerate(lines, 1):
        try:
            entry = json_text.loads(line)
            asked = {"question": entry["question"], "context": entry["context"], "answers": list(entry["answers"])}
            found.append(json_text.whole(asked))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}:{number} needs question, context and answers ({error}).") from error
    return found


def requests(asked: Sequence[Question]) -> list[Request]:
    """Return what the engine is asked."""
    return [Request(id=q.id, tokens=q.prompt, max_tokens=q.max_tokens) for q in asked]


def instances(asked: Sequence[Question], answers: Mapping[str, Answers], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return every question with each arm's words and score."""
    found = []
    for question in asked:
        said = {arm: tokenizer.decode(answer.generated(question.id)) for arm, answer in answers.items()}
        found.append(
            {
                "id": question.id,
                "task": question.task,
                "length": question.length,
                "prompt_tokens": len(question.prompt),
                "wanted": list(question.wanted),
                "said": said,
                "score": {arm: question.score(words) for arm, words in said.items()},
            }
        )
    return found


def summary(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean score by arm, task and length, with Wilson's interval of the questions answered in full."""
    rows = []
    keys = sorted({(arm, i["task"], i["length"]) for i in found for arm in i["score"]})
    for arm, task, length in keys:
        scores = [i["score"][arm] for i in found if (i["task"], i["length"]) == (task, length)]
        whole = sum(score == 1.0 for score in scores)
        rows.append(
            {
                "arm": arm,
                "task": task,
                "length": length,
                "score": sum(scores) / len(scores),
                "n": len(scores),
                "in_full": whole,
                "wilson95": list(wilson.interval(whole, len(scores))),
            }
        )
    return rows
