"""Whether prefixes are cached: where drafts meet recurrent state, only after the gate was green for the same start.

Upstream reports wrong answers and lost hits for that combination, each on some machine. So this machine is asked:
``thor-spec verify prefix-cache`` leaves a note when it is green, and a start of the same models, engine and options
finds it.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thor_spec import __version__, env, sysfs
from thor_spec.config import ServeConfig
from thor_spec.serve import passthrough
from thor_spec.serve.checkpoint import Checkpoint
from thor_spec.vllm_plugin.seam import version

FLAG = "--enable-prefix-caching"
# States of prompts only. Those of answers come out of verify steps, which round otherwise than a prompt does, so that a
# request that goes on from one would not get the bits that it gets without the cache.
EXACT = ("--prefix-cache-retention-interval", "0")
TELL = "--enable-prompt-tokens-details"
_ENGINE_FLAGS = frozenset(
    {"--attention-backend", "--block-size", "--enforce-eager", "--kv-cache-dtype", "--mamba-block-size",
     "--mamba-ssm-cache-dtype", "--max-num-batched-tokens", "--moe-backend", "--quantization", "--tensor-parallel-size"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether to cache, and why."""

    on: bool | None
    """None leaves it to vLLM."""
    why: str = ""

    @property
    def described(self) -> str:
        """Return it in words."""
        return "as vLLM decides" if self.on is None else f"{'on' if self.on else 'off'} ({self.why})"


def decide(config: ServeConfig, target: Checkpoint, drafter: Checkpoint | None, draft_tokens: int) -> Decision:
    """Decide for a start."""
    if passthrough.mentions(config.vllm_args, FLAG):
        given = any(flag == FLAG for flag, _ in passthrough.flags(config.vllm_args))
        return Decision(given, "asked for" if given else "declined")
    if drafter is None or not target.is_hybrid:
        return Decision(None)
    if config.allow_controls:
        return Decision(False, "corruption may be planted")
    note = _note(config, target, drafter, draft_tokens)
    try:
        found: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Decision(False, "not checked here for these models and options: `thor-spec verify prefix-cache`")
    if not found.get("passed"):
        return Decision(False, f"`verify prefix-cache` was red on {found.get('utc', '?')}")
    return Decision(True, f"`verify prefix-cache` was green on {found.get('utc', '?')}")


def arguments(decision: Decision, passed: Sequence[str], *, hybrid: bool) -> list[str]:
    """Return vLLM's arguments for a decision, as far as ``passed`` says nothing else."""
    if decision.on is None:
        return []
    if not decision.on:
        return [] if passthrough.mentions(passed, FLAG) else [FLAG.replace("--", "--no-", 1)]
    wanted = [(FLAG,), *([EXACT] if hybrid else []), (TELL,)]
    return [part for flag in wanted if not passthrough.mentions(passed, flag[0]) for part in flag]


def remember(
    config: ServeConfig, target: Checkpoint, drafter: Checkpoint, draft_tokens: int, *, passed: bool, utc: str
) -> Path:
    """Note what the gate said about a start, and return the file."""
    note = _note(config, target, drafter, draft_tokens)
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(json.dumps({"passed": passed, "utc": utc, "target": target.name, "drafter": drafter.name}) + "\n")
    return note


def _note(config: ServeConfig, target: Checkpoint, drafter: Checkpoint, draft_tokens: int) -> Path:
    known = {
        "machine": sysfs.text(Path("/etc/machine-id")),
        "versions": [version(), __version__],
        "target": _files(target),
        "drafter": _files(drafter),
        "drafts": [draft_tokens, config.tree, config.adaptive_drafts],
        "rope": [config.rope, config.rope_native, config.rope_factor, str(config.rope_factors), config.rope_drafter],
        "state": [config.state, config.gdn_kernel],
        "drafter_window": config.drafter_window,
        "parallel": [config.tensor_parallel, config.pipeline_parallel, config.data_parallel],
        "engine": sorted((f, v) for f, v in passthrough.flags(config.vllm_args) if f in _ENGINE_FLAGS),
        "environment": sorted((n, v) for n, v in config.environment.items() if n.startswith("VLLM_")),
    }
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]
    return env.state_dir() / "prefix-cache" / f"{digest}.json"


def _files(checkpoint: Checkpoint) -> list[Any]:
    """Return what tells one checkpoint from another without reading its weights."""
    weights = sorted((file.name, file.stat().st_size) for file in checkpoint.path.glob("*.safetensors"))
    return [hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest(), weights]
