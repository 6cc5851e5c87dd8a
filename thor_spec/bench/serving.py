"""``bench serving``: a sweep over concurrency and request rates, with vLLM's own load generator."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from thor_spec import env
from thor_spec.bench.meter import Meter
from thor_spec.errors import ThorSpecError

TIMEOUT_S = 3600
_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors", "start_times", "latencies")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is asked of the server at one point of the sweep."""

    input_tokens: int = 512
    output_tokens: int = 128
    prompts: int = 64
    concurrency: int | None = None
    """Requests at once; None: as many as arrive."""
    request_rate: float | None = None
    """Requests per second, Poisson; None: all at once."""
    seed: int = 0

    def argv(self, url: str, model: str, tokenizer: str, result: Path) -> list[str]:
        """Return the command line of the load generator."""
        options: dict[str, Any] = {
            "base-url": url,
            "model": model,
            "tokenizer": tokenizer,
            "dataset-name": "random",
            "random-input-len": self.input_tokens,
            "random-output-len": self.output_tokens,
            "num-prompts": self.prompts,
            "num-warmups": min(4, self.prompts),
            "request-rate": "inf" if self.request_rate is None else self.request_rate,
            "seed": self.seed,
            "temperature": 0,
            "result-dir": result.parent,
            "result-filename": result.name,
            "percentile-metrics": "ttft,tpot,itl,e2el",
            "metric-percentiles": "50,90,99",
        }
        if self.concurrency is not None:
            options["max-concurrency"] = self.concurrency
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        module = "thor_spec.vllm_plugin.bench_serve"
        return [sys.executable, "-m", module, *flags, "--ignore-eos", "--save-result", "--disable-tqdm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What came of one load."""

    concurrency: int | None
    request_rate: float | None
    result: dict[str, Any]
    joules: float | None
    throttling: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields, JSON-ready."""
        return asdict(self)


def sweep(
    url: str, model: str, tokenizer: str, loads: Sequence[Load], say: Callable[[str], None] = lambda _: None
) -> list[Point]:
    """Measure one load after the other. Raises: ThorSpecError, with the generator's last words."""
    points = []
    for load in loads:
        point = measure(url, model, tokenizer, load)
        points.append(point)
        found = point.result
        say(
            f"concurrency {load.concurrency or '∞'}, rate {load.request_rate or '∞'}: "
            f"{found['output_throughput']:.1f} tok/s, TTFT {found['median_ttft_ms']:.0f} ms, "
            f"TPOT {found['median_tpot_ms']:.2f} ms, {found['completed']} of {load.prompts}"
        )
    return points


def measure(url: str, model: str, tokenizer: str, load: Load) -> Point:
    """Run one load."""
    with tempfile.TemporaryDirectory() as folder, Meter() as meter:
        result = Path(folder) / "result.json"
        variables = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_PLUGINS": ""}
        try:
            done = subprocess.run(
                load.argv(url, model, tokenizer, result),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                env=env.child_environment(variables),
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as error:
            raise ThorSpecError(f"The load {load} was not through after {TIMEOUT_S} s. Ask for less.") from error
        if done.returncode or not result.is_file():
            last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise ThorSpecError(f"The load generator ended with status {done.returncode}:\n{last}")
        found = json.loads(result.read_text(encoding="utf-8"))
    kept = {key: value for key, value in found.items() if key not in (*_LISTS, "date", "tokenizer_id")}
    return Point(
        concurrency=load.concurrency,
        request_rate=load.request_rate,
        result=kept,
        joules=meter.joules,
        throttling=meter.throttling,
    )


def refusals(points: Sequence[Point]) -> list[str]:
    """Return why a sweep may not be reported; empty if it may."""
    found = [f"the machine throttled at one point: {p.throttling}" for p in points if p.throttling]
    failed = sum(int(p.result.get("failed") or 0) for p in points)  # vLLM's generator counts them and goes on
    return [*found, *([f"{failed} requests failed"] if failed else [])]
