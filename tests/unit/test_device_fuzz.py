"""10,000 damaged inputs: every parser gives values or None, and never raises."""

import random
from collections.abc import Callable, Iterator

import pytest

from tests.thor_tree import FIXTURES, fixture
from thor_spec.device import board, l4t, memory, nvml, power, smi, tegrastats, torch_build
from thor_spec.guard.memory import parse_full_avg10
from thor_spec.known import log_lines

INPUTS = 10_000
PARSERS: tuple[Callable[[str], object], ...] = (
    board.compatible,
    l4t.parse_release,
    l4t.parse_jetson_release,
    memory.parse,
    nvml.parse,
    parse_full_avg10,
    power.parse_mode,
    power.refusal,
    log_lines.find,
    smi.parse_query,
    smi.parse_soc,
    smi.parse_table,
    tegrastats.parse,
    torch_build.parse,
)
_SPECIAL = ("", "\0", "-", "@", "[", "]", "%", "NaN", "9" * 40, "\u0663", "\u00b2", "\n", "\r", "{}", "1e309", "\ud7ff")


def texts() -> list[str]:
    files = [path.name for path in sorted(FIXTURES.iterdir()) if path.suffix in (".txt", ".csv")]
    binary = [(FIXTURES / name).read_bytes().decode() for name in ("proc_device_tree_model.bin",)]
    return [fixture(name) for name in files] + binary + ['{"name": "x", "celsius": 1}']


def damaged(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    sources = texts()
    while True:
        text = list(rng.choice(sources))
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(text) + 1)
            match rng.randrange(5):
                case 0:
                    text[at : at + rng.randint(1, 40)] = []
                case 1:
                    text[at:at] = rng.choice(_SPECIAL)
                case 2:
                    text[at : at + 1] = chr(rng.randrange(1, 0xD7FF))
                case 3:
                    other = rng.choice(sources)
                    cut = rng.randrange(len(other) + 1)
                    text[at : at + 20] = other[cut : cut + 60]
                case _:
                    text[at:at] = text[at : at + 30] * rng.randint(1, 3)
        yield "".join(text)


@pytest.mark.parametrize(
    "parse", PARSERS, ids=lambda parser: f"{parser.__module__.rpartition('.')[2]}.{parser.__name__}"
)
def test_damaged_inputs(parse: Callable[[str], object]) -> None:
    source = damaged(7)
    for _ in range(INPUTS):
        parse(next(source))
