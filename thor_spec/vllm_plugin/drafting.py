"""How many tokens a step drafts, chosen anew for every step: between vLLM's scheduler and ``dflash.length``.

vLLM can draft fewer tokens than the most it was started with, by the batch: its scheduler looks a number up, and says
it to the workers with every step. We write the number there. Every step verifies what the one before it drafted, so
only steps that verify and draft alike are judged, and only where no prompt ran beside them.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from thor_spec import env
from thor_spec.dflash.length import Lengths, Situation, least_depth, situation
from thor_spec.errors import ConfigError
from thor_spec.vllm_plugin import tables
from thor_spec.vllm_plugin.options import PluginOptions

DEPTHS = 12
"""Classes of depth that are counted apart; the last one has no end."""
WHAT = {
    "steps": "Steps by the tokens that a sequence drafted, and by the depth of their sequences.",
    "tokens": "Tokens that a sequence gained in them.",
    "seconds": "Time that they took.",
}
AHEAD = 64
"""Steps that are scheduled before the first of them ends, at most."""
_SUFFIX = ".lengths.npy"
_SCALE = 1e6  # microseconds, and millionths of a token
_UNASKED = object()


@dataclass(slots=True)
class _Step:
    where: Situation
    length: int
    can_be_judged: bool


class Drafting:
    """What one scheduler chooses, and what came of it."""

    def __init__(self, lengths: Lengths, most: int, path: Path | None = None) -> None:
        """``most`` is the length of vLLM's lookup, by batch; into ``path`` goes what ``/metrics`` tells."""
        self._lengths = lengths
        self._lookup = most + 1
        self._chosen = lengths.arms[-1]
        self._where: Situation = (0, 1)
        self._before: int | None = None
        self._running: dict[int, _Step] = {}
        self._updated = time.monotonic()
        self._table = tables.create(path, (DEPTHS, lengths.arms[-1] + 1, len(WHAT)))

    @classmethod
    def of(cls, scheduler: Any) -> "Self | None":
        """Return a scheduler's choices; None where it was not told to make any."""
        found = vars(scheduler).get("thor_spec_drafting", _UNASKED)
        if found is _UNASKED:
            found = scheduler.thor_spec_drafting = cls._asked(scheduler.vllm_config)
        return found  # type: ignore[no-any-return]

    @classmethod
    def _asked(cls, vllm_config: Any) -> "Self | None":
        if (arms := lengths_of(vllm_config)) is None:
            return None
        folder = env.receipts_dir()
        path = folder / f"{os.getpid()}{_SUFFIX}" if folder else None
        return cls(Lengths(arms), vllm_config.scheduler_config.max_num_seqs, path)

    def choose(self, running: Any) -> list[int]:
        """Return vLLM's lookup by batch for the coming step, given the requests that run."""
        if running:
            depth = sum(request.num_computed_tokens for request in running) / len(running)
            self._where = situation(depth, len(running))
            self._chosen = self._lengths.choose(self._where)
        return [self._chosen] * self._lookup

    def scheduled(self, output: Any) -> None:
        """Note what a step is."""
        drafts = output.scheduled_spec_decode_tokens
        no_prompt = not output.scheduled_new_reqs and all(
            count == 1 + len(drafts.get(request, ())) for request, count in output.num_scheduled_tokens.items()
        )
        length = output.num_spec_tokens_to_schedule
        alike = self._before == length and bool(output.num_scheduled_tokens)
        self._before = length
        if len(self._running) > AHEAD:  # steps that failed never end
            self._running.clear()
        self._running[id(output)] = _Step(self._where, length, no_prompt and alike)

    def updated(self, output: Any, sampled: Any) -> None:
        """Learn from a step that ended: ``sampled`` are the tokens of each request."""
        began, self._updated = self._updated, time.monotonic()
        step = self._running.pop(id(output), None)
        if step is None or not step.can_be_judged or not sampled:
            return
        tokens = sum(len(row) for row in sampled) / len(sampled)
        seconds = self._updated - began
        self._lengths.observe(step.where, step.length, tokens, seconds)
        row = self._table[min(step.where[0], DEPTHS - 1), step.length]
        row += (1, round(tokens * _SCALE), round(seconds * _SCALE))


def lengths_of(vllm_config: Any) -> tuple[int, ...] | None:
    """Return the numbers of drafts that an engine chooses from; None where it drafts as many in every step.

    Raises: ConfigError, where it was told to choose and cannot.
    """
    if not PluginOptions.parse(vllm_config.additional_config).adaptive_drafts:
        return None
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    refused = {
        "without a drafter": speculation is None,
        "with pipeline parallelism: a step's time is not its own": parallel.pipeline_parallel_size > 1,
        "with data parallelism: engines that step together would draft differently": parallel.data_parallel_size > 1,
    }
    if why := next((why for why, applies in refused.items() if applies), None):
        raise ConfigError(f"--adaptive-drafts does not work {why}. Leave it out.")
    schedule = speculation.num_speculative_tokens_per_batch_size
    if not schedule:
        raise ConfigError(
            "thor_spec.adaptive_drafts needs num_speculative_tokens_per_batch_size in the speculative config, for "
            "which vLLM captures its graphs. `thor-spec serve --adaptive-drafts` sets both."
        )
    return tuple(sorted({min(int(entry[2]), speculation.num_speculative_tokens) for entry in schedule}))


def chosen(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Scheduler.schedule``, which drafts as many tokens as were chosen."""

    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafting = Drafting.of(self)
        if drafting is None:
            return stock(self, *args, **kwargs)
        self.dynamic_sd_lookup = drafting.choose(self.running)
        output = stock(self, *args, **kwargs)
        drafting.scheduled(output)
        return output

    return schedule


def observed(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Scheduler.update_from_output``, which tells what a step brought."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        found = stock(self, scheduler_output, model_runner_output)
        if (drafting := Drafting.of(self)) is not None:
            drafting.updated(scheduler_output, model_runner_output.sampled_token_ids)
        return found

    return update_from_output


def counted(folder: Path | None) -> Iterator[tuple[str, int, int, float]]:
    """Yield what was counted, the length, the least depth of its class, and the figure, where there is any."""
    total: Any = sum(tables.read(folder, _SUFFIX))
    if isinstance(total, int):
        return
    for depth, length in zip(*total[:, :, 0].nonzero(), strict=True):
        for i, name in enumerate(WHAT):
            figure = float(total[depth, length, i])
            yield name, int(length), least_depth(int(depth)), figure if name == "steps" else figure / _SCALE
