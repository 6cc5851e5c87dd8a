"""Entry point: reads the command line, and turns errors into one or two lines and an exit code."""

import sys
import traceback
from typing import Annotated

import typer

from thor_spec.cli import (
    bench,
    doctor,
    eval,
    job,
    plan,
    profiles,
    reap,
    report,
    serve,
    service,
    top,
    train,
    tune,
    verify,
    version,
)
from thor_spec.cli.context import Context
from thor_spec.cli.notes import note
from thor_spec.errors import ThorSpecError

app = typer.Typer(
    name="thor-spec",
    help="Serve a hybrid language model with DFlash speculation on one device.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    serve, verify, bench, eval, report, train, tune, job, top, reap, plan, profiles, doctor, service, version,
):  # fmt: skip
    module.register(app)


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with every error.")] = False,
) -> None:
    context.ensure_object(Context).debug = debug


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit: 0, or the code of the error's class."""
    argv = sys.argv[1:] if argv is None else argv
    # What follows "--" belongs to another program; Typer must not look at it.
    split = argv.index("--") if "--" in argv else len(argv)
    context = Context(rest=tuple(argv[split + 1 :]), has_rest=split < len(argv))
    try:
        app(args=argv[:split], prog_name="thor-spec", obj=context)
    except ThorSpecError as error:
        if context.debug:
            traceback.print_exc()
        else:
            note("\n".join([f"thor-spec: {error}", *getattr(error, "__notes__", ())]))
        sys.exit(error.exit_code)
