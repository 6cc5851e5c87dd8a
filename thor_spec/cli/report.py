"""``thor-spec report``."""

from pathlib import Path
from typing import Annotated

import typer

from thor_spec.errors import ConfigError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: thor-spec report evidence")(report)


def report(
    folder: Annotated[Path, typer.Argument(help="Folder with records, in it or below it.", metavar="DIR", exists=True)],
    out: Annotated[Path | None, typer.Option(help="The page.", metavar="FILE", show_default="DIR/report.html")] = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables instead.")] = False,
) -> None:
    """Render records as one self-contained HTML page, or as Markdown tables."""
    from thor_spec import record
    from thor_spec.bench import report as page

    records = record.find(folder)
    if as_markdown:
        print(page.markdown(records), end="")
        return
    path = out or folder / "report.html"
    try:
        path.write_text(page.html(records), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Name another file with --out.") from error
    print(path)
