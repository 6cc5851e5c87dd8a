"""The training loop: bounded by steps or by the clock, logged, resumable.

Bounded by steps, a run is a function of its seed: on one CPU thread the same seed gives the same bytes, interrupted or
not. Bounded by the clock, the learning rate follows the share of time that has passed, so a budget is used to its end
on any machine; how many steps fit differs from run to run, and with it the weights.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from thor_spec.errors import ConfigError
from thor_spec.train import kept

STARTING_STEPS = 2  # a drafter compiles for one block size in the first, for another in the second

Say = Callable[[str], None]
Losses = Callable[[int, float], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """How long to train: exactly one of the two is set."""

    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            raise ConfigError("A training is bounded by steps or by time: pass exactly one of --steps and --minutes.")
        if (self.steps or self.seconds or 0) <= 0:
            raise ConfigError("A training's budget must be positive. Pass a larger --minutes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Learning rate over the budget: linear warm-up, then level and linear decay, or a cosine."""

    peak: float
    warm_up: float = 0.02
    decay_from: float | None = 0.4
    """Share of the budget after which the rate falls linearly; None takes a cosine."""
    floor: float = 0.02

    def at(self, progress: float) -> float:
        """Return the rate at ``progress`` in [0, 1]."""
        if progress < self.warm_up:
            return self.peak * max(progress, 1e-4) / self.warm_up
        if self.decay_from is None:
            share = (progress - self.warm_up) / (1 - self.warm_up)
            return self.peak * (self.floor + (1 - self.floor) * (0.5 + 0.5 * math.cos(math.pi * share)))
        if progress < self.decay_from:
            return self.peak
        return self.peak * max(self.floor, (1 - progress) / (1 - self.decay_from))


@dataclass
class Run:
    """What is known of a training so far."""

    step: int = 0
    seconds: float = 0.0
    seconds_before: float = 0.0
    """Spent by the runs that this one goes on from; the budget is on top of them."""
    starting: float = 0.0
    """Of ``seconds``, what first steps took, which wait for a compiler: the rate must not skip its warm-up for them."""
    tokens: int = 0
    history: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One training."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    rate: Rate
    budget: Budget
    losses: Losses
    """From step and progress to named losses, whose sum is minimized; names starting with # are only shown."""
    tokens_per_step: Callable[[float], int]
    state_file: Path
    say: Say
    clip: float = 1.0
    log_seconds: float = 10.0
    save_seconds: float = 60.0
    after_step: Callable[[], None] | None = None

    def train(self, *, resume: bool = False, stop_after: int | None = None) -> Run:
        """Train to the end of the budget, or for ``stop_after`` steps more, and leave the state for a resumption."""
        run = self._restore() if resume else Run()
        run.seconds_before = run.seconds
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        begun, before = time.monotonic(), run.seconds
        logged = saved = begun
        first, since = run.step, run.step
        while (progress := self._progress(run)) < 1 and (stop_after is None or run.step - first < stop_after):
            rate = self.rate.at(progress)
            for each in self.optimizers:
                for group in each.param_groups:
                    group["lr"] = rate
            parts = self.losses(run.step, progress)
            total = sum(value for name, value in parts.items() if not name.startswith("#"))
            for each in self.optimizers:
                each.zero_grad(set_to_none=True)
            total.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, self.clip)
            for each in self.optimizers:
                each.step()
            if self.after_step:
                self.after_step()
            run.tokens += self.tokens_per_step(progress)
            run.step += 1
            now = time.monotonic()
            if run.step - first <= STARTING_STEPS:
                run.starting += before + now - begun - run.seconds
            run.seconds = before + now - begun
            last = self._progress(run) >= 1
            if now - logged >= self.log_seconds or last or run.step == first + 1:
                shown = {name.lstrip("#"): round(value.item(), 4) for name, value in parts.items()}
                speed = (run.step - since) / max(now - logged, 1e-9)
                shown |= {
                    "step": run.step,
                    "seconds": round(run.seconds, 1),
                    "rate": rate,
                    "norm": round(norm.item(), 3),
                }
                run.history.append(shown)
                self.say(_line(shown, self._progress(run), speed * self.tokens_per_step(progress)))
                if not math.isfinite(sum(shown.values())):
                    raise FloatingPointError(f"the loss is no number any more after step {run.step}: {shown}")
                logged, since = now, run.step
            if now - saved >= self.save_seconds:
                self._keep(run)
                saved = now
        self._keep(run)
        return run

    def _progress(self, run: Run) -> float:
        if self.budget.steps is not None:
            return run.step / self.budget.steps
        left = run.seconds_before + (self.budget.seconds or 0) - run.starting
        return (run.seconds - run.starting) / left if left > 0 else 1.0

    def _keep(self, run: Run) -> None:
        state = {
            "model": self.model.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "run": asdict(run),
        }
        kept.write(state, self.state_file)

    def _restore(self) -> Run:
        if not self.state_file.is_file():
            return Run()
        state = kept.read(self.state_file)
        self.model.load_state_dict(state["model"])
        for each, found in zip(self.optimizers, state["optimizers"], strict=True):
            each.load_state_dict(found)
        return Run(**state["run"])


def optimizers(model: nn.Module, rate: float, *, muon: bool, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Return AdamW for everything, or Muon for the hidden matrices and AdamW for the rest.

    Embedding, head, norms, router and single vectors stay with AdamW, and without decay where they are vectors.
    """
    fused = next(model.parameters()).is_cuda
    hidden: list[Tensor] = []
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim == 2 and not any(part in name for part in ("embed", "lm_head", "gate.weight")):
            hidden.append(parameter)
        else:
            (matrices if parameter.ndim == 2 else vectors).append(parameter)
    groups = [{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 0.01}]
    if not muon:
        groups.append({"params": hidden, "weight_decay": weight_decay})
    chosen: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=(0.9, 0.95), fused=fused)
    ]
    if muon:
        # Its updates are scaled to the size of AdamW's, so one rate serves both.
        chosen.append(torch.optim.Muon(hidden, lr=rate, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    return chosen


def _line(shown: dict[str, float], progress: float, tokens_per_second: float) -> str:
    filled = round(20 * min(progress, 1))
    bar = "#" * filled + "." * (20 - filled)
    losses = " ".join(f"{k} {v:.4g}" for k, v in shown.items() if k not in ("step", "seconds"))
    return f"[{bar}] step {shown['step']} {shown['seconds']:.0f} s {tokens_per_second / 1e3:.0f}k tok/s {losses}"


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Write ``metrics`` as JSON."""
    path.write_text(json.dumps(metrics, indent=1) + "\n", encoding="utf-8")
