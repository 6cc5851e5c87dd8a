"""The fault matrix of docs/guard.md and the tests' names say the same."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "guard.md"
ROWS = range(1, 31)


@cache
def matrix() -> dict[int, list[str]]:
    """Return the files that the page names for each row; a pattern must be that of the row it stands in."""
    rows: dict[int, list[str]] = {}
    for number, tests in re.findall(r"^\| (\d+) \|.*\| ([^|]*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        named = re.findall(r"`([\w/]+\.py)::test_row(\d\d)_\*`", tests)
        assert int(number) not in rows, f"row {number} stands twice"
        assert named, f"row {number} names no test"
        assert {int(row) for _, row in named} == {int(number)}
        rows[int(number)] = [file for file, _ in named]
    return rows


@cache
def written() -> dict[int, set[str]]:
    """Return the files that hold a test of each row, by the names of their test functions."""
    rows: dict[int, set[str]] = {}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (row := re.match(r"test_row(\d\d)_", node.name)):
                rows.setdefault(int(row[1]), set()).add(str(path.relative_to(TESTS)))
    return rows


@pytest.mark.parametrize("row", ROWS)
def test_the_page_names_the_tests_of_each_row(row: int) -> None:
    assert set(matrix()[row]) == written()[row]


def test_there_is_no_other_row() -> None:
    assert sorted(matrix()) == sorted(written()) == list(ROWS)
