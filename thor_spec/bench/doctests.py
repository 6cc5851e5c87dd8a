"""Whether a written function passes its doctest. What a model wrote is run in a process that can do little.

It gets no environment, an empty folder, two seconds of CPU, 512 MiB, and may neither write files nor start processes
where the limits of Linux hold. That stops accidents, not attacks: grade only models that you would run.
"""

import ast
import resource
import subprocess
import sys
import tempfile
from typing import NamedTuple

CPU_S = 2
WALL_S = 10
MEMORY_BYTES = 512 << 20
_RUNNER = """
import doctest, sys
source = sys.stdin.read()
space = {"__name__": "task"}
exec(compile(source, "task", "exec"), space)
found = doctest.DocTestFinder().find(space[sys.argv[1]], sys.argv[1], globs=space, module=False)
runner = doctest.DocTestRunner(verbose=False)
for each in found:
    runner.run(each, out=lambda text: None)
tried, failed = runner.summarize(verbose=False)[::-1]
sys.exit(0 if tried and not failed else 1)
"""


class Grade(NamedTuple):
    """What became of one answer."""

    parses: bool
    passes: bool


def function_text(head: str, answer: str) -> str:
    """Return ``head`` with the body that ``answer`` begins with: the lines up to the next unindented one."""
    body = []
    for line in answer.split("\n"):
        if line.strip() and not line.startswith((" ", "\t")):
            break
        body.append(line)
    return head + "\n".join(body).rstrip() + "\n"


def grade(name: str, head: str, answer: str) -> Grade:
    """Return whether the function parses with a body of its own, and whether its doctest passes."""
    source = function_text(head, answer)
    try:
        (function, *_) = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Grade(False, False)
    if not isinstance(function, ast.FunctionDef) or len(function.body) < 2:  # the docstring alone is no body
        return Grade(False, False)
    return Grade(True, _passes(name, source))


def _passes(name: str, source: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER, name],
                input=source,
                text=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=WALL_S,
                cwd=folder,
                env={},
                preexec_fn=_limit,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.returncode == 0


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
