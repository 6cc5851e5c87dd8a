"""Options of commands that start an engine for a while."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thor_spec.sizes import parse_size


def size_option(text: str, **more: Any) -> Any:
    """Return an option that takes bytes, or a size with its unit."""
    return typer.Option(help=text, parser=parse_size, metavar="SIZE", **more)


Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL] [-- VLLM_ARGS...]",
        help="Checkpoint to serve for this, as `thor-spec serve` takes it.",
        show_default="as `thor-spec serve`",
    ),
]
Draft = Annotated[str | None, typer.Option(help="DFlash drafter, named like MODEL.", metavar="DRAFTER")]
DraftTokens = Annotated[int | None, typer.Option(help="Tokens drafted per step.", metavar="K")]
KvCache = Annotated[
    int | None, size_option("Size of the KV cache, e.g. 4GiB; without it vLLM decides, or 1 GiB on a CPU.")
]
Profile = Annotated[Path | None, typer.Option(help="YAML file of serve's options; flags win over it.", metavar="FILE")]


@dataclass(kw_only=True, frozen=True)
class Engine:
    """An engine to start for a while."""

    model: Model = None
    draft: Draft = None
    draft_tokens: DraftTokens = None
    kv_cache_memory: KvCache = None
    profile: Profile = None

    def flags(self) -> dict[str, Any]:
        """Return the options of ``thor-spec serve`` that start it."""
        return {
            "model": self.model,
            "draft": self.draft,
            "draft_tokens": self.draft_tokens,
            "kv_cache_memory": self.kv_cache_memory,
        }
