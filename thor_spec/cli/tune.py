"""``thor-spec tune``."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from thor_spec.cli.notes import note

EXAMPLE = "Example: thor-spec tune moe ./LLaDA2.1-mini --out ./moe-configs --resume"


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(help="Find launch configurations for this device.", no_args_is_help=True, epilog=EXAMPLE)
    group.command(epilog=EXAMPLE)(moe)
    group.callback()(_group)
    app.add_typer(group, name="tune")


def _group() -> None:
    """Find launch configurations for this device."""  # a group of one command would otherwise be that command


def moe(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a name as for serve.", metavar="MODEL")],
    out: Annotated[Path, typer.Option(help="Folder for the journal and vLLM's file.")],
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Batch size in tokens; may be repeated.", metavar="N", show_default="1, 2, 4 … 2048"),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share each layer.", metavar="N")] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that timing a configuration may take.", metavar="S")] = 3.0,
    compile_timeout: Annotated[float, typer.Option(help="Seconds that compiling it may take.", metavar="S")] = 30.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the journal of an earlier search.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Time vLLM's fused-expert kernel for a model's experts, and write the file that vLLM reads.

    A configuration that hangs is given up after --timeout; what was measured is kept. Serve with the result by setting
    VLLM_TUNED_CONFIG_FOLDER to the folder. Holds no lock: run it under
    `thor-spec run --`.
    """
    from thor_spec import record
    from thor_spec.device import board, ptxas
    from thor_spec.errors import ConfigError
    from thor_spec.serve.checkpoint import open_checkpoint
    from thor_spec.serve.locate import locate
    from thor_spec.tune.search import Limits, Worker, search
    from thor_spec.tune.space import TOKENS, Problem, launches

    if timeout <= 0 or compile_timeout <= 0 or tensor_parallel < 1 or min(tokens or [1]) < 1:
        raise ConfigError("--timeout, --compile-timeout, --tensor-parallel and --tokens must be positive.")
    problem = Problem.of(open_checkpoint(model, locate(model)).config, tensor_parallel)
    record.require_folder(out)
    argv = (sys.executable, "-m", "thor_spec.vllm_plugin.expert_timing")

    variables = ptxas.variables_for(board.detect(Path("/"), None).kind, note=note)
    worker = Worker(argv, problem, Limits(compile_s=compile_timeout, measure_s=timeout), variables)

    try:
        file = search(worker, sorted(set(tokens or TOKENS)), launches, out, resume=resume, say=note)
    finally:
        worker.close()
    print(json.dumps({"file": str(file)}) if as_json else f"VLLM_TUNED_CONFIG_FOLDER={out.resolve()}")
