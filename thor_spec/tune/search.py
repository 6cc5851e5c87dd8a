"""Trying configurations one after the other, in a process that may hang: each has a time of its own, none is lost.

The worker answers in lines of JSON, first with what it measures on, then ``{"compiled": true}`` and ``{"us": …}`` for
each configuration that it is sent. One that keeps silent is killed, one that says ``"last"`` has broken its device, and
the next configuration gets a new one. What is measured is appended to a journal at once, and an interrupted search goes
on from there.
"""

import json
import queue
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thor_spec import env, whole_file
from thor_spec.errors import ConfigError, PlatformError, StuckInKernelError
from thor_spec.tune.space import Launch, Problem

JOURNAL = "journal.jsonl"
KILL_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds after which a worker counts as hung."""

    start_s: float = 120.0
    compile_s: float = 30.0
    measure_s: float = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration at one batch size."""

    tokens: int
    launch: Launch
    us: float | None
    """Microseconds of one call; None if it failed."""
    problem: str = ""
    """Why there is no time: it hung, or what the kernel said."""


class _Silent(Exception):
    """The worker said nothing in time, or ended."""


class Worker:
    """A measuring process, started again when it hangs or dies."""

    def __init__(
        self, argv: Sequence[str], problem: Problem, limits: Limits, variables: Mapping[str, str] | None = None
    ) -> None:
        """``variables`` are added to its environment."""
        self._argv, self._limits = [*argv, json.dumps(problem.as_dict())], limits
        self._environment = env.child_environment(variables or {})
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    def hello(self) -> dict[str, Any]:
        """Return what the worker measures on: ``file``, vLLM's name for it, and ``capability``.

        Raises: PlatformError, with what it said instead.
        """
        if self._process is None:
            self._lines = queue.Queue()
            self._process = subprocess.Popen(
                self._argv,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            threading.Thread(target=_forward, args=(self._process.stdout, self._lines), daemon=True).start()
            try:
                self._greeting = self._answer(self._limits.start_s)
            except _Silent as silent:
                raise PlatformError(
                    f"Nothing can be measured here: the worker {silent}. See its words above."
                ) from None
        if "error" in self._greeting:
            raise PlatformError(f"Nothing can be measured here: {self._greeting['error']}")
        return self._greeting

    def measure(self, tokens: int, launch: Launch) -> Trial:
        """Time one configuration."""
        self.hello()
        assert self._process
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps({"tokens": tokens, "launch": dict(launch)}) + "\n")
            self._process.stdin.flush()
            answer = self._answer(self._limits.compile_s)
            if "compiled" in answer:
                answer = self._answer(self._limits.measure_s)
        except (_Silent, OSError) as silent:
            self.close()
            return Trial(tokens=tokens, launch=launch, us=None, problem=str(silent) or "the worker ended")
        if answer.get("last"):
            self.close()
        return Trial(tokens=tokens, launch=launch, us=answer.get("us"), problem=answer.get("error", ""))

    def close(self) -> None:
        """End the process, hung or not. Raises: StuckInKernelError, if it cannot be killed."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            try:
                process.wait(KILL_WAIT_S)
            except subprocess.TimeoutExpired:
                raise StuckInKernelError(
                    f"Process {process.pid} does not end after SIGKILL: it hangs in the GPU's driver. What was "
                    "measured is in the journal. Reboot, and go on with --resume."
                ) from None

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise _Silent(f"was silent for {seconds:g} s") from None
        if line is None:
            raise _Silent("ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _forward(stream: Any, lines: "queue.Queue[str | None]") -> None:
    for line in stream:
        if line.startswith("{"):  # libraries print as well
            lines.put(line)
    lines.put(None)


def search(
    worker: Worker,
    batches: Sequence[int],
    launches: Callable[[int, Sequence[int]], Iterable[Launch]],
    out: Path,
    *,
    resume: bool,
    say: Callable[[str], None],
) -> Path:
    """Try everything, and return the file that vLLM reads; it is rewritten after every batch size.

    Raises: ConfigError, where a journal lies already and ``resume`` was not asked for, or belongs to something else;
        PlatformError, where nothing can be measured.
    """
    hello = worker.hello()
    journal, target = out / JOURNAL, out / str(hello["file"])
    out.mkdir(parents=True, exist_ok=True)
    if journal.exists() and not resume:
        raise ConfigError(f"{journal} holds an earlier search. Go on with --resume, or name another folder.")
    known = {(trial.tokens, _key(trial.launch)): trial for trial in _read(journal, hello["file"])}
    with journal.open("a", encoding="utf-8") as file:
        if file.tell() and not journal.read_bytes().endswith(b"\n"):
            file.write("\n")  # its last line was cut off
        if not file.tell():
            file.write(json.dumps({"file": hello["file"]}) + "\n")
        for tokens in batches:
            trials = []
            for launch in launches(tokens, hello["capability"]):
                trial = known.get((tokens, _key(launch)))
                if trial is None:
                    trial = worker.measure(tokens, launch)
                    fields = {"tokens": tokens, "launch": dict(launch), "us": trial.us, "problem": trial.problem}
                    file.write(json.dumps(fields) + "\n")
                    file.flush()
                trials.append(trial)
            say(_summary(tokens, trials))
            _write(target, tokens, trials)
    return target


def best(trials: Iterable[Trial]) -> Trial | None:
    """Return the fastest trial, if any has a time."""
    return min((trial for trial in trials if trial.us is not None), key=lambda trial: trial.us or 0.0, default=None)


def _summary(tokens: int, trials: Sequence[Trial]) -> str:
    failed = sum(trial.us is None for trial in trials)
    fastest = best(trials)
    found = f"{fastest.us:.1f} us, {dict(fastest.launch)}" if fastest else "nothing ran"
    return f"{tokens:5d} tokens: {found}; {len(trials)} tried, {failed} of them failed"


def _write(target: Path, tokens: int, trials: Sequence[Trial]) -> None:
    if (fastest := best(trials)) is None:
        return
    content = json.loads(target.read_text(encoding="utf-8")) if target.exists() else {}
    content[str(tokens)] = dict(fastest.launch)
    ordered = {key: content[key] for key in sorted(content, key=int)}
    whole_file.write(target, json.dumps(ordered, indent=4) + "\n")


def _read(journal: Path, file: str) -> Iterator[Trial]:
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    for number, line in enumerate(lines):
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by whatever ended the search
            continue
        if number == 0 and entry.get("file") != file:
            raise ConfigError(f"{journal} is about {entry.get('file')}, not {file}. Name another folder.")
        if "launch" in entry:
            yield Trial(tokens=entry["tokens"], launch=entry["launch"], us=entry["us"], problem=entry["problem"])


def _key(launch: Launch) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(launch.items()))
