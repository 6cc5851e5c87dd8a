"""``thor-spec eval``."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thor_spec.cli.engine_options import KvCache
from thor_spec.cli.grouped import grouped
from thor_spec.cli.notes import note

if TYPE_CHECKING:
    from thor_spec.eval.study import Study

EXAMPLE = "Example: thor-spec eval ppl ./my-model --rope yarn --rope drope --length 65536 --out ./yarn"


def register(app: typer.Typer) -> None:
    """Add the group of commands."""
    group = typer.Typer(name="eval", help="See what a rope type does to a model at length.", no_args_is_help=True)
    meta = "[OPTIONS]"
    group.command("ppl", options_metavar=meta, epilog=EXAMPLE)(ppl)
    group.command(
        "longppl",
        options_metavar=meta,
        epilog="Example: thor-spec eval longppl ./my-model --evaluator ./llama --rope yarn --length 65536 --out ./l",
    )(longppl)
    group.command(
        "niah",
        options_metavar=meta,
        epilog="Example: thor-spec eval niah ./my-model --rope nope --length 8192 --length 65536 --out ./needles",
    )(niah)
    group.command(
        "ruler",
        options_metavar=meta,
        epilog="Example: thor-spec eval ruler ./my-model --rope yarn --length 65536 --task vt --task cwe --out ./ruler",
    )(ruler)
    app.add_typer(group)


Model = Annotated[
    str, typer.Argument(metavar="MODEL [-- VLLM_ARGS...]", help="Checkpoint folder, or name in the local cache.")
]
Length = Annotated[list[int], typer.Option(help="Tokens of a text; more than one compares.", metavar="N")]
Out = Annotated[Path, typer.Option(help="Folder of the evaluation; the same command goes on with it.", metavar="DIR")]
Ropes = Annotated[
    list[str] | None,
    typer.Option(help="Rope type to compare with default, which always runs.", metavar="TYPE", show_default="none"),
]
Native = Annotated[
    int | None, typer.Option(help="Context of the training.", metavar="N", show_default="the checkpoint's")
]
Factor = Annotated[
    float | None,
    typer.Option(help="Times the native context.", metavar="F", show_default="as the longest text needs"),
]
Factors = Annotated[Path | None, typer.Option(help="JSON list of LongRoPE's factors.", metavar="FILE")]
Corpus = Annotated[str, typer.Option(help="Text, jsonl, parquet, or a folder of them.", metavar="PATH|synthetic")]
Samples = Annotated[int, typer.Option(help="Texts, or questions for each cell.", min=1)]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Plots = Annotated[bool, typer.Option("--plots", help="Write plots (SVG) beside the record; needs matplotlib.")]


@dataclass(kw_only=True, frozen=True)
class Asked:
    """What every evaluation is told."""

    model: Model
    length: Length
    out: Out
    rope: Ropes = None
    rope_native: Native = None
    rope_factor: Factor = None
    rope_factors: Factors = None
    corpus: Corpus = "synthetic"
    seed: Seed = 0
    kv_cache_memory: KvCache = None
    plots: Plots = False

    def study(self, context: typer.Context, samples: int) -> "Study":
        """Return the evaluation to run or to go on with."""
        from thor_spec.eval.study import Study

        options = {
            "vllm_args": context.obj.rest or None,
            "rope_factors": self.rope_factors,
            "kv_cache_memory": self.kv_cache_memory,
        }
        return Study(
            model=self.model,
            ropes=self.rope or [],
            native=self.rope_native,
            factor=self.rope_factor,
            lengths=sorted(set(self.length)),
            corpus=self.corpus,
            samples=samples,
            seed=self.seed,
            out=self.out,
            options={name: value for name, value in options.items() if value is not None},
            tell=note,
        )


@grouped
def ppl(context: typer.Context, *, asked: Asked, samples: Samples = 4) -> None:
    """Perplexity by distance, within and beyond the native context."""
    from thor_spec.eval import study

    _report(study.ppl(asked.study(context, samples)), asked.plots)


@grouped
def longppl(
    context: typer.Context,
    *,
    asked: Asked,
    evaluator: Annotated[str, typer.Option(help="Model that finds the key tokens; not the tested one.")],
    evaluator_context: Annotated[int | None, typer.Option(help="Longest text of the evaluator.", metavar="N")] = None,
    samples: Samples = 1,
) -> None:
    """Perplexity of the tokens that only the far past tells (LongPPL), and of those beyond the native context."""
    from thor_spec.eval import study

    judge = {"context": evaluator_context, "kv_cache_memory": asked.kv_cache_memory}
    given = {name: value for name, value in judge.items() if value is not None}
    _report(study.long_ppl(asked.study(context, samples), evaluator, given), asked.plots)


@grouped
def niah(
    context: typer.Context,
    *,
    asked: Asked,
    depth: Annotated[
        list[float] | None, typer.Option(help="Where the needle is, 0 to 1.", show_default="0, 0.25, 0.5, 0.75, 1")
    ] = None,
    choice: Annotated[
        bool,
        typer.Option("--choice", help="Found if likelier than a decoy, for models that cannot answer; chance is 1/2."),
    ] = False,
    samples: Samples = 16,
) -> None:
    """Needles in haystacks by depth and length, always with plain RoPE as a control."""
    from thor_spec.eval import study

    depths = depth or [0.0, 0.25, 0.5, 0.75, 1.0]
    _report(study.needles(asked.study(context, samples), depths, choice=choice), asked.plots)


@grouped
def ruler(
    context: typer.Context,
    *,
    asked: Asked,
    task: Annotated[
        list[str] | None, typer.Option(help="Task of RULER's thirteen.", show_default="all that can be asked")
    ] = None,
    qa_1: Annotated[Path | None, typer.Option(help="Questions (jsonl) of qa_1.", metavar="FILE")] = None,
    qa_2: Annotated[Path | None, typer.Option(help="Questions (jsonl) of qa_2.", metavar="FILE")] = None,
    samples: Samples = 16,
) -> None:
    """RULER's tasks: needles of eight kinds, variables, word counts, and questions from a file."""
    from thor_spec.eval import study

    qa = {name: path for name, path in (("qa_1", qa_1), ("qa_2", qa_2)) if path}
    _report(study.ruler_tasks(asked.study(context, samples), task or [], qa), asked.plots)


def _report(path: Path, plots: bool) -> None:
    from thor_spec import record
    from thor_spec.eval import plots as drawing

    content = record.read(path).content
    for head, rows in drawing.tables(content):
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        for row in [head, *rows]:
            print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    if plots:
        drawing.save(content, path.parent)
    print(path)
