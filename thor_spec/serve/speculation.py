"""What drafts, and how much: the drafter, K or the shape of trees, and what vLLM is told of them."""

from collections.abc import Callable
from typing import Any

from thor_spec.config import DEFAULT_DRAFT_TOKENS, Resolved, ServeConfig
from thor_spec.ddtree.shape import TreeShape
from thor_spec.dflash.drafter import Drafter
from thor_spec.dflash.length import arms
from thor_spec.errors import ConfigError
from thor_spec.nano import checkpoints as nano
from thor_spec.nano import shipped
from thor_spec.serve.checkpoint import Checkpoint
from thor_spec.serve.named import open_named


def own_drafter(model: str) -> str | None:
    """Return the drafter that a bundled model brings along; None for any other."""
    return nano.PAIRS.get(model) or shipped.drafter_of(model)


def default_draft_tokens(most: int, *, gpu: bool) -> int:
    """Return K where none was given: as many as the drafter has, or few on a CPU."""
    return most if gpu else min(DEFAULT_DRAFT_TOKENS, most)


def choose(
    resolved: Resolved, target: Checkpoint, note: Callable[[str], None] | None, *, gpu: bool
) -> tuple[Checkpoint | None, int]:
    """Return the drafter and the drafts of a step; None and 0 without. Raises: ConfigError."""
    config = resolved.config
    name = config.draft or own_drafter(config.model) or "none"
    if name == "none":
        asked = (
            "--draft-tokens" if config.draft_tokens is not None
            else "--adaptive-drafts" if config.adaptive_drafts
            else "--tree" if tree(config) is not None  # says so itself, if drafting was switched off
            else None
        )  # fmt: skip
        if asked:
            raise ConfigError(f"{asked} needs a drafter, and {config.model} has none of its own. Name it: --draft.")
        return None, 0
    checkpoint = open_named(name, "--draft", resolved.origins["draft"], note)
    drafter = Drafter.parse(name, checkpoint.config)
    draft_tokens = config.draft_tokens or default_draft_tokens(drafter.max_draft_tokens, gpu=gpu)
    if (shape := tree(config)) is not None:
        drafter.require_fit(target.target_shape(), shape.deep(drafter.max_draft_tokens))
        return checkpoint, shape.nodes
    drafter.require_fit(target.target_shape(), draft_tokens)
    return checkpoint, draft_tokens


def tree(config: ServeConfig) -> TreeShape | None:
    """Return the shape of draft trees; None: chains. Raises: ConfigError, also for what trees do not go with."""
    if config.tree is None or (shape := TreeShape.parse(config.tree)) is None:
        return None
    clashes = {
        "--draft none": config.draft == "none",
        "--draft-tokens: the tree says how many nodes there are": config.draft_tokens is not None,
        "--adaptive-drafts: it chooses the length of chains": config.adaptive_drafts,
        "--state snapshot: a tree is committed from one state and its record": config.state == "snapshot",
        "synthetic acceptance": config.synthetic_acceptance is not None,
    }
    if why := next((why for why, applies in clashes.items() if applies), None):
        raise ConfigError(f"--tree {config.tree} does not go with {why}. Leave one of them out.")
    return shape


def argument(config: ServeConfig, drafter: Checkpoint, draft_tokens: int, *, gpu: bool, stock: bool) -> dict[str, Any]:
    """Return the value of ``--speculative-config``. Raises: ConfigError."""
    speculation: dict[str, Any] = {
        "method": "dflash",
        "model": str(drafter.path),
        "num_speculative_tokens": draft_tokens,
    }
    if config.synthetic_acceptance is not None:
        speculation |= {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": config.synthetic_acceptance,
        }
    if config.adaptive_drafts and not stock:
        speculation["num_speculative_tokens_per_batch_size"] = _lengths(config, draft_tokens, gpu=gpu)
    return speculation


def _lengths(config: ServeConfig, draft_tokens: int, *, gpu: bool) -> list[tuple[int, int, int]]:
    """Return the numbers of drafts to choose from as vLLM's schedule by batch, so that it captures graphs of each.

    Raises: ConfigError, where it would not: it looks no further than the largest batch.
    """
    if gpu and config.max_seqs < 2:
        raise ConfigError(
            f"--adaptive-drafts needs --max-seqs 2 or more, not {config.max_seqs}: vLLM captures graphs of as many "
            "numbers of drafts as there are batch sizes. Raise it, or leave --adaptive-drafts out."
        )
    found = arms(draft_tokens, config.max_seqs if gpu else draft_tokens)
    last = len(found)
    return [(i, i if i < last else max(last, config.max_seqs), length) for i, length in enumerate(found, start=1)]
