"""Arms of an evaluation: each asks its own engine the same requests; what is answered stays answered."""

import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_spec import env, record, whole_file
from thor_spec.errors import ConfigError, EngineStartError, InterruptedJobError, PlatformError
from thor_spec.guard.guarded import GuardedJob, Settings
from thor_spec.serve import failure, log
from thor_spec.serve.plan import Plan
from thor_spec.serve.stop_requests import StopRequests
from thor_spec.vllm_plugin import receipt, scoring

POLL_S = 0.2
REQUESTS, RUN = "requests.jsonl", "run.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One thing to ask: a prompt's log-probabilities from position ``first`` on, or a greedy continuation."""

    id: str
    tokens: Sequence[int]
    first: int = 1
    max_tokens: int = 0
    """0 asks for log-probabilities."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as the engine's process reads it."""
        base = {"id": self.id, "tokens": list(self.tokens)}
        if self.max_tokens:
            return base | {"kind": "generate", "max_tokens": self.max_tokens}
        return base | {"kind": "logprobs", "first": self.first}


@dataclass(frozen=True, slots=True)
class Answers:
    """What one arm answered, and what its engine rotated by."""

    folder: Path
    rope: Mapping[str, Any]

    def logprobs(self, name: str) -> NDArray[np.float32]:
        """Return the log-probabilities (nats) of a request's tokens, from its ``first`` on."""
        file = self.folder / f"{name}.npy"
        try:
            found: NDArray[np.float32] = np.load(file)
        except (OSError, ValueError, EOFError) as error:
            raise _broken(file, file, error) from error
        return found

    def generated(self, name: str) -> list[int]:
        """Return the token ids of a request's continuation."""
        file = self.folder / f"{name}.json"
        try:
            ids: list[int] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _broken(file, file, error) from error
        return ids


def ask(
    arms: Mapping[str, Plan],
    requests: Sequence[Request],
    out: Path,
    *,
    tell: Callable[[str], None],
    settings: Settings | None = None,
    wait: bool = False,
) -> dict[str, Answers]:
    """Return every arm's answers to every request, asking only for those that ``out`` does not hold yet.

    Args:
        arms: engines by name, one after the other.
        out: folder of the evaluation; it belongs to these requests and engines.
        tell: hears of progress, line by line.

    Raises: ConfigError, where ``out`` holds another evaluation; InterruptedJobError, when asked to stop: the same call
        goes on from there; EngineStartError, PlatformError, and what the guard raises.
    """
    if len({request.id for request in requests}) != len(requests):
        raise ConfigError("Two requests of an evaluation have the same name.")
    lines = [json.dumps(request.as_dict()) for request in requests]
    claim(out, {"requests": hashlib.sha256("\n".join(lines).encode()).hexdigest(), **_identity(arms)})
    keep(out / REQUESTS, "".join(f"{line}\n" for line in lines))
    sizes = {request.id: len(request.tokens) + request.max_tokens for request in requests}
    answers = {}
    for name, plan in arms.items():
        folder = out / "arms" / name
        folder.mkdir(parents=True, exist_ok=True)
        if not all(scoring.done(folder, request.as_dict()) for request in requests):
            _fill(name, plan, out, folder, sizes, tell, settings, wait)
        answers[name] = Answers(folder, _effective(name, plan, folder))
    return answers


def claim(out: Path, identity: Mapping[str, Any]) -> None:
    """Make ``out`` the folder of one evaluation, or see that it is. Raises: ConfigError."""
    wanted = json.loads(json.dumps(identity))
    record.require_folder(out)
    if (out / record.FILE).exists() and not (out / RUN).exists():
        raise ConfigError(f"{out / record.FILE} is there already, of no evaluation. Name another folder with --out.")
    if not (out / RUN).exists():
        keep(out / RUN, json.dumps(wanted, indent=1))
        return
    try:
        found = json.loads((out / RUN).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{out / RUN} cannot be read ({error}). Name another folder with --out.") from error
    if found != wanted:
        other = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise ConfigError(
            f"{out} holds another evaluation ({', '.join(other)} differ). Name another folder with --out, or "
            "repeat the command that began it."
        )


def keep(file: Path, text: str) -> None:
    """Write a file of the evaluation, whole or not at all. Raises: ConfigError."""
    try:
        whole_file.write(file, text)
    except OSError as error:
        raise ConfigError(f"{file.parent} cannot be written ({error.strerror}). Name a folder with --out.") from error


def _broken(file: Path, remove: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{file} cannot be read ({error}). Remove {remove}, and repeat the command: it asks again.")


def _identity(arms: Mapping[str, Plan]) -> dict[str, Any]:
    return {"arms": {name: scoring.engine_flags(plan.argv) for name, plan in arms.items()}}


def _fill(
    name: str,
    plan: Plan,
    out: Path,
    folder: Path,
    sizes: Mapping[str, int],
    tell: Callable[[str], None],
    settings: Settings | None,
    wait: bool,
) -> None:
    log_file = log.open_path(out / f"{name}.log")
    argv = (sys.executable, "-m", scoring.__name__, str(out / REQUESTS), str(folder), json.dumps(list(plan.argv)))
    with log.Tail(log_file) as tail, _receipts() as receipts, StopRequests() as stop:
        environment = {**plan.child_environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        environment[env.RECEIPTS_VARIABLE] = str(receipts)
        with GuardedJob.start(
            argv,
            settings=settings or Settings(),
            notice=tell,
            env=environment,
            output=log_file,
            title=f"eval {name}",
            wait=wait,
            give_up=lambda: stop.any,
        ) as guarded:
            guarded.note_phase("running")
            progress = Progress(name, sizes, folder, tell)
            while (code := guarded.job.wait(POLL_S)) is None and not stop.any:
                guarded.check()
                progress.look()
            if code is None:
                guarded.stop(skip_grace=stop.urgent)
                raise InterruptedJobError(
                    f"Stopped. What was answered is in {out}; the same command goes on from there."
                )
            guarded.check()
            progress.look()
            if code:
                receipt.require_none_failed(receipts)
                lines = [line for line in tail.all_lines() if line.strip()]
                odd = failure.first_odd_line(lines) or (lines[-1] if lines else "it wrote nothing")
                raise EngineStartError(f"The engine of {name} ended with {code}: {failure.told(odd, log_file)}")
            guarded.cause = f"evaluated {name}"


def _effective(name: str, plan: Plan, folder: Path) -> Mapping[str, Any]:
    """Return what the engine rotated by. Raises: PlatformError, if that is not what was asked for."""
    try:
        found: Mapping[str, Any] = json.loads(scoring.rope_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken(scoring.rope_path(folder), folder, error) from error
    wanted = plan.rope.as_dict() if plan.rope else {}
    rotated = found.get("target", {})
    if any(rotated.get(field) != value for field, value in wanted.items()):
        raise PlatformError(f"{name} was asked for {wanted}, and rotated by {dict(rotated) or 'its own'}: {folder}.")
    return found


class Progress:
    """Tells how far an arm is, and how long the rest will take, by the tokens that are through."""

    def __init__(
        self,
        name: str,
        sizes: Mapping[str, int],
        folder: Path,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._sizes, self._folder, self._tell, self._clock = name, sizes, folder, tell, clock
        self._seen = self._answered()
        self._first: tuple[float, int] | None = None

    def look(self) -> None:
        """Tell, if an answer came since the last look."""
        answered = self._answered()
        if answered == self._seen:
            return
        self._seen = answered
        now, through = self._clock(), sum(self._sizes[request] for request in answered)
        line = f"{self._name}: {len(answered)}/{len(self._sizes)} requests"
        if self._first is None:  # the start of the engine is in its time, and says nothing of the rest
            self._first = now, through
        else:
            began, before = self._first
            rest = (now - began) * (sum(self._sizes.values()) - through) / (through - before)
            line += f", {_spoken(rest)} to go"
        self._tell(line)

    def _answered(self) -> set[str]:
        return {path.stem for path in self._folder.glob("*.*") if path.suffix in (".npy", ".json")} & set(self._sizes)


def _spoken(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {rest:02} s"


@contextmanager
def _receipts() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="thor-spec-receipts-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
