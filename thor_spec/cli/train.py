"""``thor-spec train``."""

import json
from importlib import util
from pathlib import Path
from typing import Annotated

import typer

from thor_spec.cli.notes import note

EXAMPLE = "Example: thor-spec train drafter ./my-model --text ./prompts --out ./my-model-dflash --minutes 60"


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(help="Train what serving needs.", no_args_is_help=True, epilog=EXAMPLE)
    group.command(epilog=EXAMPLE)(drafter)
    group.callback()(_group)
    app.add_typer(group, name="train")


def _group() -> None:
    """Train what serving needs."""  # a group of one command would otherwise be that command


def drafter(
    target: Annotated[str, typer.Argument(help="Checkpoint folder of the target, or name in the local cache.")],
    text: Annotated[
        Path, typer.Option(help="Text file, or folder of them, that the target is to continue.", exists=True)
    ],
    out: Annotated[Path, typer.Option(help="Folder for the drafter.")],
    minutes: Annotated[float | None, typer.Option(help="Time for everything.", show_default="60")] = None,
    steps: Annotated[int | None, typer.Option(help="Train exactly so many steps instead.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers of the drafter.", show_default="by size")] = None,
    block: Annotated[int, typer.Option(help="Block size: one more than the most tokens drafted.")] = 16,
    sequences: Annotated[int | None, typer.Option(help="Continuations to train on.", show_default="by size")] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each.", show_default="320")] = 320,
    mask_token_id: Annotated[int | None, typer.Option(help="Id that stands for a token to be drafted.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="cuda where there is one")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from what an interrupted run left.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Train a DFlash drafter: the target writes, the drafter learns to guess it.

    Serve the result with --draft. The target is loaded by transformers and must fit the device beside the drafter.
    """
    from thor_spec import record
    from thor_spec.errors import PlatformError
    from thor_spec.nano.checkpoints import PACKAGES
    from thor_spec.serve.checkpoint import open_checkpoint
    from thor_spec.serve.locate import locate
    from thor_spec.train.request import Request

    if missing := [package for package in PACKAGES if util.find_spec(package) is None]:
        raise PlatformError(
            f"Training needs {', '.join(missing)}, which this Python does not have. "
            "Install the engine: pip install 'thor-spec[cpu]' or 'thor-spec[cuda]'."
        )

    request = Request(
        target=locate(target, note),
        text=text,
        out=out,
        minutes=minutes,
        steps=steps,
        layers=layers,
        block=block,
        sequences=sequences,
        new_tokens=new_tokens,
        mask_token_id=mask_token_id,
        seed=seed,
        device=device,
        resume=resume,
    )
    open_checkpoint(target, request.target)
    record.require_folder(out)
    from thor_spec.train.user import train_drafter  # takes seconds, which a mistake need not wait for

    report = train_drafter(request, say=note)
    if as_json:
        print(json.dumps(report))
    else:
        print(f"{out}: {report['steps']} steps, tokens per step on held-out text: {report['tau']}")
