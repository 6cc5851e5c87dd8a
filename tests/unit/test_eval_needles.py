"""Questions are what they say they are, and needles are not reported without their control."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thor_spec.errors import ConfigError
from thor_spec.eval import haystack, niah, plots, ruler
from thor_spec.eval.run import Answers
from thor_spec.eval.text import Tokenizer
from thor_spec.nano import shipped

pytestmark = pytest.mark.skipif(shipped.find(shipped.TARGET) is None, reason="not run: nano-hybrid is not shipped here")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    folder = shipped.find(shipped.TARGET)
    assert folder is not None
    return Tokenizer(folder)


def said(folder: Path, arm: str, words: dict[str, str], tokenizer: Tokenizer) -> Answers:
    (folder / arm).mkdir()
    for name, text in words.items():
        (folder / arm / f"{name}.json").write_text(json.dumps(tokenizer.encode(text).ids))
    return Answers(folder / arm, {})


def test_a_needle_lies_at_its_depth_in_a_text_of_its_length(tokenizer: Tokenizer) -> None:
    depths = [0.0, 0.3, 1.0]
    questions = niah.needles(tokenizer, "synthetic", [600, 1200], depths, 2, seed=3)
    assert len({q.id for q in questions}) == 2 * 3 * 2
    for question in questions:
        assert question.length - 90 < len(question.prompt) + niah.MAX_TOKENS <= question.length
        text = tokenizer.decode(question.prompt)
        assert text.count(question.answer) == 1
        body = text[text.index("\n") : text.rindex("\nWhat is")]
        assert body.index("The special magic") / len(body) == pytest.approx(question.depth, abs=0.08)
    again = niah.needles(tokenizer, "synthetic", [600, 1200], depths, 2, seed=3)
    assert again == questions
    assert niah.needles(tokenizer, "synthetic", [600], depths, 2, seed=4) != again[:6]


def test_hits_by_cell_and_against_the_control(tokenizer: Tokenizer, tmp_path: Path) -> None:
    questions = niah.needles(tokenizer, "synthetic", [400], [0.0, 1.0], 3, seed=0)
    right = {q.id: f" {q.answer}. The" for q in questions}
    wrong = {q.id: " 1234567." for q in questions}
    mixed = {q.id: right[q.id] if q.depth else wrong[q.id] for q in questions}
    answers = {arm: said(tmp_path, arm, words, tokenizer) for arm, words in {"default": mixed, "yarn": right}.items()}
    found = niah.instances(questions, answers, tokenizer)
    summary = niah.summary(found)
    assert [(c["depth"], c["hits"], c["n"]) for c in summary["cells"]["default"]] == [(0.0, 0, 3), (1.0, 3, 3)]
    (row,) = summary["by_length"]["yarn"]
    assert (row["hits"], row["n"], row["only_this"], row["only_control"], row["p"]) == (6, 6, 3, 0, 0.25)
    record = {"name": "eval-niah", "summary": summary}
    assert len(plots.of_record(record)) == 2
    assert plots.save(record, tmp_path) == ["plot-0.svg", "plot-1.svg"]
    assert "3/3" in (tmp_path / "plot-0.svg").read_text()


def test_a_choice_is_between_number_and_decoy(tokenizer: Tokenizer, tmp_path: Path) -> None:
    questions = niah.needles(tokenizer, "synthetic", [400], [0.5], 2, seed=0)
    asked = niah.requests(questions, tokenizer, choice=True)
    for request in asked:
        assert len(request.tokens) <= 400
        needle = next(q for q in questions if request.id.startswith(q.id))
        number = needle.answer if request.id.endswith("answer") else needle.decoy
        assert tokenizer.decode(request.tokens[request.first :]).strip() == f"{number}."
        assert tokenizer.decode(needle.prompt).count(number) == int(request.id.endswith("answer"))
        likely = request.id in (f"{questions[0].id}-answer", f"{questions[1].id}-decoy")
        np.save(tmp_path / f"{request.id}.npy", np.float32([-1.0, -2.0 if likely else -4.5]))
    found = niah.instances(questions, {"default": Answers(tmp_path, {})}, tokenizer, choice=True)
    assert [(i["said"], i["hit"]) for i in found] == [
        ({"default": 2.5}, {"default": True}),
        ({"default": -2.5}, {"default": False}),
    ]


def test_needles_without_a_control_are_not_reported(tokenizer: Tokenizer, tmp_path: Path) -> None:
    questions = niah.needles(tokenizer, "synthetic", [400], [0.5], 2, seed=0)
    answers = {"yarn": said(tmp_path, "yarn", {q.id: q.answer for q in questions}, tokenizer)}
    found = niah.instances(questions, answers, tokenizer)
    with pytest.raises(ConfigError, match="without the default rope as a control"):
        niah.summary(found)
    cells: dict[str, Any] = {"cells": {"yarn": []}, "by_length": {"yarn": []}}
    for render in (plots.of_record, plots.tables):
        with pytest.raises(ConfigError, match="without the default rope as a control"):
            render({"name": "eval-niah", "summary": cells})


QA = [{"question": f"Who is {i}?", "context": f"Number {i} is Ada.", "answers": ["Ada", "A."]} for i in range(40)]


@pytest.mark.parametrize("name", ruler.TASKS)
def test_each_task_fits_and_holds_what_it_asks_for(name: str, tokenizer: Tokenizer) -> None:
    short = 4096 if name == "cwe" else 1024
    asked = ruler.questions(tokenizer, "synthetic", [name], [short, 2 * short], 2, 0, {"qa_1": QA, "qa_2": QA})
    task = ruler.TASKS[name]
    for question in asked:
        assert len(question.prompt) + task.max_tokens <= question.length
        if not name.startswith("qa"):  # there are only so many documents
            assert len(question.prompt) + task.max_tokens > 0.8 * question.length
        text = tokenizer.decode(question.prompt)
        found = [want in text for want in question.wanted]
        assert any(found) if question.any_will_do else all(found)
        assert question.score(" and ".join(question.wanted).upper()) == 1.0
        assert question.score("nothing") == 0.0
        if len(question.wanted) > 1:
            part = question.score(question.wanted[0])
            assert part == (1.0 if question.any_will_do else pytest.approx(1 / len(question.wanted)))
    assert asked == ruler.questions(tokenizer, "synthetic", [name], [short, 2 * short], 2, 0, {"qa_1": QA, "qa_2": QA})


def test_variables_are_set_before_they_are_read(tokenizer: Tokenizer) -> None:
    for question in ruler.questions(tokenizer, "synthetic", ["vt"], [1024], 8, 0, {}):
        text = tokenizer.decode(question.prompt)
        places = [text.index(f"VAR {name} =") for name in question.wanted]
        assert places == sorted(places)


def test_frequent_words_are_the_most_frequent(tokenizer: Tokenizer) -> None:
    for name, share in (("fwe", 3), ("cwe", 10)):
        (question,) = ruler.questions(tokenizer, "synthetic", [name], [8192], 1, 0, {})
        text = tokenizer.decode(question.prompt)
        body = text[: text.index("Question:")].split()
        counts = {word: body.count(word) for word in set(body) if word.strip("0123456789.") and word not in "the"}
        found = sorted(counts, key=lambda word: -counts[word])[:share]
        assert set(found) == set(question.wanted)


def test_questions_come_from_a_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="needs questions"):
        ruler.questions(tokenizer, "synthetic", ["qa_1"], [512], 1, 0, {})
    file = tmp_path / "qa.jsonl"
    file.write_text("\n".join(map(json.dumps, QA)))
    assert ruler.read_questions(file) == QA
    file.write_text('{"question": "?"}\n')
    with pytest.raises(ConfigError, match=r"qa.jsonl:1 needs"):
        ruler.read_questions(file)


def test_needles_are_put_where_they_belong() -> None:
    straw = [str(i) for i in range(10)]
    assert haystack.hidden(straw, ["x", "y"], [0.5, 0.0]) == "y 0 1 2 3 4 x 5 6 7 8 9"
    assert haystack.hidden(straw, ["x"], [1.0]).endswith("9 x")
    assert len(set(haystack.words(random.Random(0), 500))) == 500


def test_a_corpus_without_text_is_refused_and_not_read_for_ever(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n\t\n" * 40)
    with pytest.raises(ConfigError, match="no text to hide needles in"):
        next(haystack.sentences(str(tmp_path), 0))
