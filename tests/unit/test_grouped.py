"""A dataclass of options means the same as its fields written out."""

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
import typer.testing

from thor_spec.cli.grouped import grouped


@dataclass(kw_only=True, frozen=True)
class Size:
    """Two options, one of them required."""

    width: Annotated[int, typer.Option(help="Wide.", min=1)]
    height: Annotated[int, typer.Option("--high", help="High.")] = 7


@dataclass(kw_only=True, frozen=True)
class Box(Size):
    """With one more."""

    lid: Annotated[bool, typer.Option("--lid")] = False


SEEN: list[Any] = []


@grouped
def make(name: Annotated[str, typer.Argument()], *, box: Box, often: Annotated[int, typer.Option()] = 1) -> None:
    """Make boxes."""
    SEEN.append((name, box, often))


def call(*argv: str) -> Any:
    app = typer.Typer()
    app.command()(make)
    return typer.testing.CliRunner().invoke(app, list(argv))


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (("x", "--width", "2"), ("x", Box(width=2), 1)),
        (("x", "--width", "2", "--high", "3", "--lid", "--often", "4"), ("x", Box(width=2, height=3, lid=True), 4)),
    ],
)
def test_fields_are_options(argv: tuple[str, ...], given: Any) -> None:
    assert call(*argv).exit_code == 0
    assert SEEN.pop() == given


@pytest.mark.parametrize("argv", [("x",), ("x", "--width", "0"), ("x", "--width", "2", "--height", "3")])
def test_what_a_field_demands_is_demanded(argv: tuple[str, ...]) -> None:
    assert call(*argv).exit_code == 2
    assert not SEEN


def test_help_is_the_command_s_own() -> None:
    text = call("--help").output
    assert all(part in text for part in ("Make boxes.", "Wide.", "--high", "--lid", "--often"))
