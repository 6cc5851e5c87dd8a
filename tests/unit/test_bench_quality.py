"""The quality of answers: functions that are run, variety, perplexity."""

from typing import Any

import pytest

from thor_spec.bench import quality
from thor_spec.bench.doctests import function_text, grade
from thor_spec.errors import ConfigError
from thor_spec.serve.client import Answer, Forced


@pytest.mark.parametrize(
    ("body", "parses", "passes"),
    [
        ("    return a + b\n\nprint('more')", True, True),
        ("    return a - b\n", True, False),
        ("    return a +\n", False, False),
        ("\n\nother = 3\n", False, False),
        ("    while True:\n        pass\n", True, False),
        ("    with open('x', 'w') as f:\n        f.write('much')\n    return a + b\n", True, False),
    ],
)
def test_functions_are_graded(body: str, parses: bool, passes: bool) -> None:
    task = quality.tasks()[0]
    assert task["name"] == "add"
    assert grade(task["name"], task["head"], body) == (parses, passes)


def test_each_task_can_be_passed_and_only_by_a_body() -> None:
    solutions = {
        "add": "a + b", "double": "2 * n", "is_even": "n % 2 == 0", "first": "items[0]", "last": "items[-1]",
        "length": "len(text)", "reverse": "text[::-1]", "upper": "text.upper()", "join_words": "' '.join(words)",
        "total": "sum(values)", "largest": "max(values)", "strip": "text.strip()", "absolute": "abs(n)",
        "contains": "item in items", "square": "n * n", "split_lines": "text.split(chr(10))",
    }  # fmt: skip
    for task in quality.tasks():
        assert grade(task["name"], task["head"], f"    return {solutions[task['name']]}\n") == (True, True), task
        assert not grade(task["name"], task["head"], "").parses
    assert function_text("def f():\n", "    return 1\n\n\ndef g():\n    return 2\n") == "def f():\n    return 1\n"


def test_variety_counts_different_pieces() -> None:
    assert quality.distinct([[1, 1, 1, 1]], 1) == 0.25
    assert quality.distinct([[1, 2, 3], [1, 1, 1]], 2) == 0.75
    assert quality.distinct([[1]], 2) == 0.0


def test_quality_is_measured_over_all_tasks_and_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Writing:
        """Answers ``add`` rightly with even seeds, and nothing that parses otherwise."""

        def drawn_all(self, asked: Any, *, at_once: int, **options: Any) -> list[Answer]:
            assert options["temperature"] == 0.7
            return [
                Answer(
                    prompt=(1,),
                    tokens=(1, 2, 1, 2),
                    text="    return a + b" if "def add" in head and seed % 2 == 0 else "    return (",
                    finish="length",
                    rule="",
                )
                for head, seed in asked
            ]

        def forced_all(self, answers: Any, *, at_once: int) -> Any:
            return [[Forced(token, self.logprob, ()) for token in answer.tokens] for answer in answers]

        logprob, url = -0.5, "u"

    two = quality.tasks()[:2]
    monkeypatch.setattr(quality, "tasks", lambda: two)
    found = quality.measure(Writing(), {"temperature": 0.7}, seeds=2)  # type: ignore[arg-type]
    assert (found.answers, found.parses, found.passes) == (4, 0.25, 0.25)
    assert found.perplexity == pytest.approx(2.71828**0.5, rel=1e-4)
    assert found.distinct == (0.5, pytest.approx(2 / 3), 1.0)
    Writing.logprob = 3.0
    with pytest.raises(ConfigError, match="tells logits where log-probabilities belong"):
        quality.measure(Writing(), {"temperature": 0.7}, seeds=2)  # type: ignore[arg-type]
