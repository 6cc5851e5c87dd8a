"""The three trainings, from options to a checkpoint folder with its metrics and its card."""

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from thor_spec import provenance
from thor_spec.nano import drafter as stored
from thor_spec.train import card, data, denoising, device, diffusion, drafting, language, loop, targets
from thor_spec.train import hybrid as hybrid_model
from thor_spec.train.shapes import DiffusionShape, HybridShape

DEFAULT_MINUTES = 9.0
SMOKE_STEPS = 30


@dataclass(frozen=True, slots=True)
class Job:
    """One command: its options, its folder, and when it began."""

    options: argparse.Namespace
    folder: Path
    started: float
    reserve: float

    @property
    def device(self) -> str:
        """Return where to train."""
        return str(self.options.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def state_file(self) -> Path:
        """Return where the training keeps what a resumption needs: large, and no part of the result."""
        return Path(self.options.state) / f"{self.folder.name}.state"

    @property
    def compiled(self) -> bool:
        """Return whether layers are compiled: on a GPU, unless told otherwise."""
        return self.device.startswith("cuda") and not self.options.no_compile

    def deadline(self) -> float | None:
        """Return when the training must end, on the monotonic clock; None when steps are counted."""
        if self.options.steps or (self.options.smoke and not self.options.minutes):
            return None
        return self.started + 60 * (self.options.minutes or DEFAULT_MINUTES) - self.reserve

    def budget(self) -> loop.Budget:
        """Return what is left for the training."""
        if (deadline := self.deadline()) is None:
            return loop.Budget(steps=self.options.steps or SMOKE_STEPS)
        return loop.Budget(seconds=max(5.0, deadline - time.monotonic()))

    def open(self) -> data.Corpus:
        """Prepare device and folder, and return the corpus."""
        device.prepare(self.device)
        for folder in (self.folder, self.state_file.parent):
            folder.mkdir(parents=True, exist_ok=True)
        return data.load(self.options.data)

    def adjusted(self, recipe: Any) -> Any:
        """Return ``recipe`` with the numbers given on the command line."""
        changes: dict[str, Any] = {}
        if self.options.rate:
            changes["rate"] = self.options.rate
        if self.options.tokens and hasattr(recipe, "tokens"):
            changes["tokens"] = self.options.tokens
        if self.options.adamw and hasattr(recipe, "muon"):
            changes["muon"] = False
        for name in ("layers", "sequences"):
            if value := getattr(self.options, name, None):
                changes[name] = value
        return dataclasses.replace(recipe, **changes)

    def finish(
        self, model: Any, corpus: data.Corpus, run: loop.Run, described: dict[str, Any], found: dict[str, Any]
    ) -> None:
        """Write metrics and card beside the weights."""
        metrics = {
            "schema": 1,
            "name": self.folder.name,
            "seed": self.options.seed,
            "smoke": self.options.smoke,
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps": run.step,
            "tokens": run.tokens,
            "training_seconds": round(run.seconds, 1),
            "command_seconds": round(time.monotonic() - self.started, 1),
            "device": torch.cuda.get_device_name() if self.device.startswith("cuda") else "cpu",
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.device.startswith("cuda") else None,
            "corpus": {key: corpus.manifest[key] for key in ("segments", "bytes", "baselines", "files")},
            **described,
            **found,
            "history": run.history,
            "provenance": provenance.collect({"seed": self.options.seed}).as_dict(),
        }
        loop.write_metrics(self.folder / "metrics.json", metrics)
        (self.folder / "README.md").write_text(card.render(metrics, corpus.manifest), encoding="utf-8")
        for path in self.folder.iterdir():
            path.chmod(0o644)  # the writer of weights grants nothing to others
        say(f"written to {self.folder} after {metrics['command_seconds']} s")


def say(text: str) -> None:
    """Print a line at once: a command that is stopped must have said how far it came."""
    print(text, flush=True)


def hybrid(job: Job) -> None:
    """Train nano-hybrid."""
    corpus = job.open()
    recipe = job.adjusted(language.SMOKE if job.options.smoke else language.LanguageRecipe())
    shape = HybridShape(vocabulary=corpus.vocabulary, **(language.SMOKE_SHAPE if job.options.smoke else {}))
    where = torch.device(job.device)
    model, run = language.train(
        corpus, shape, recipe, job.budget(), where, job.options.seed, job.state_file, say,
        resume=job.options.resume, compiled=job.compiled,
    )  # fmt: skip
    model.save(job.folder, corpus.marks())
    corpus.copy_tokenizer(job.folder)
    say("evaluating what was written, in the precision it was written in")
    final = hybrid_model.load(job.folder).to(where)
    found = {
        "bits_per_byte": language.bits_per_byte(final, corpus, most=2048 if job.options.smoke else 400_000),
        "nats_by_position": {} if job.options.smoke else language.nats_by_position(final, corpus),
        "samples": samples(targets.HybridTarget(final), corpus, 8 if job.options.smoke else 96),
    }
    job.finish(final, corpus, run, language.describe(shape, recipe), found)


def samples(target: targets.Target, corpus: data.Corpus, new: int) -> dict[str, list[str]]:
    """Return greedy continuations of the first held-out prompts of each kind, as text."""
    tokenizer = corpus.tokenizer()
    return {
        kind: [
            tokenizer.decode(row[: len(asked) + new].tolist(), False) for row, asked in zip(written, rows, strict=True)
        ]
        for kind, rows in ((kind, rows[:3]) for kind, rows in corpus.prompts().items())
        for written in [target.write_rows(rows, new, 0.0, 0)]
    }


SMOKE_DRAFT: dict[str, Any] = {
    "sequences": 8,
    "prompt": 24,
    "new": 40,
    "writing_batch": 4,
    "batch": 4,
    "anchors": 4,
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "intermediate": 32,
    "taps": 2,
}


def dflash(job: Job) -> None:
    """Train nano-dflash."""
    corpus = job.open()
    target = targets.open_target(job.options.target, job.device)
    recipe = job.adjusted(drafting.DraftRecipe(**(SMOKE_DRAFT if job.options.smoke else {})))
    shape = drafting.shape_for(target, recipe, mask_token_id=corpus.marks().mask, max_length=8192)
    deadline = job.deadline()
    until = None if deadline is None else time.monotonic() + recipe.writing_share * (deadline - time.monotonic())
    kept = job.state_file.with_suffix(".pool")
    if job.options.resume and kept.is_file():
        pool = torch.load(kept, weights_only=True)
    else:
        with device.autocast(torch.device(job.device)):
            pool = drafting.write_pool(target, corpus.segment("train"), recipe, job.options.seed, until, say)
        torch.save(pool, kept)
    drafter, run = drafting.train(
        target, pool, shape, recipe, job.budget(), job.options.seed, job.state_file, say,
        resume=job.options.resume, compiled=job.compiled,
    )  # fmt: skip
    drafter.save(job.folder)
    final = stored.load(job.folder).to(job.device)
    new, count = (24, 2) if job.options.smoke else (256, 32)
    found = {
        "sequences": len(pool),
        "target_products_per_token": target.products,
        "acceptance": drafting.acceptance_table(target, final, corpus.prompts(), count=count, new=new),
    }
    job.finish(final, corpus, run, drafting.describe(shape, recipe), found)


def llada(job: Job) -> None:
    """Train nano-llada."""
    corpus = job.open()
    recipe = job.adjusted(denoising.SMOKE if job.options.smoke else denoising.DenoisingRecipe())
    shape = DiffusionShape(vocabulary=corpus.vocabulary, **(denoising.SMOKE_SHAPE if job.options.smoke else {}))
    where = torch.device(job.device)
    model, run = denoising.train(
        corpus, shape, recipe, job.budget(), where, job.options.seed, job.state_file, say,
        resume=job.options.resume, compiled=job.compiled,
    )  # fmt: skip
    model.save(job.folder, corpus.marks())
    corpus.copy_tokenizer(job.folder)
    final = diffusion.load(job.folder).to(where)
    size = {"length": 64, "most": 2048} if job.options.smoke else {}
    found = {"denoising": denoising.evaluate(final, corpus, **size)}
    job.finish(final, corpus, run, denoising.describe(shape, recipe), found)
