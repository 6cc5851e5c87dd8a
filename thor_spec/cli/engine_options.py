"""Options of commands that start an engine for a while."""

from pathlib import Path
from typing import Annotated

import typer

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
KvCache = Annotated[int | None, typer.Option(help="Bytes of KV cache.", metavar="BYTES")]
Profile = Annotated[Path | None, typer.Option(help="YAML file of serve's options; flags win over it.", metavar="FILE")]
