"""``thor-spec profiles``."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from thor_spec.errors import ConfigError

if TYPE_CHECKING:
    from thor_spec.profiles.profile import Profile


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(name="profiles", help="What is known about serving a model.", no_args_is_help=True)
    group.command("list", epilog="Example: thor-spec profiles list")(show_all)
    group.command("show", epilog="Example: thor-spec profiles show qwen3.6-35b-a3b")(show)
    group.command("check", epilog="Example: thor-spec profiles check ./mine.yaml")(check)
    app.add_typer(group)


Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def show_all(as_json: Json = False) -> None:
    """List the profiles: bundled ones, and yours in ~/.config/thor-spec/profiles, which win."""
    from thor_spec.profiles import catalogue

    found = catalogue.load_all()
    if as_json:
        print(json.dumps([{"name": p.name, "title": p.title, "path": str(p.path)} for p in found]))
        return
    width = max(len(profile.name) for profile in found)
    for profile in found:
        own = "" if profile.path.parent == catalogue.BUNDLED else f"  ({profile.path})"
        print(f"{profile.name:<{width}}  {profile.title}{own}")


def show(name: Annotated[str, typer.Argument(help="Name, or path of a file.")], as_json: Json = False) -> None:
    """Show a profile's values, how sure each is, and where it comes from."""
    from thor_spec.profiles import catalogue

    profile = catalogue.get(name)
    values = list(profile.values())
    if as_json:
        content = {"name": profile.name, "title": profile.title, "values": [value._asdict() for value in values]}
        print(json.dumps(content))
        return
    print(f"{profile.name}: {profile.title}\n{profile.path}\n")
    width = max(len(value.field) for value in values)
    for value in values:
        text = "(empty)" if value.value is None else str(value.value)
        print(f"{value.field:<{width}}  {text}\n{'':<{width}}    {value.confidence}: {value.source}")


def check(names: Annotated[list[str], typer.Argument(help="Names, or paths of files.")], as_json: Json = False) -> None:
    """Check profiles: form, options, and memory plan. Each mistake names file, line and field. Exits 2 on any."""
    from thor_spec.profiles import catalogue

    results: dict[str, list[str]] = {}
    for name in names:
        try:
            results[name] = _mistakes(catalogue.get(name))
        except ConfigError as error:
            results[name] = str(error).splitlines()
    if as_json:
        print(json.dumps(results))
    else:
        for name, mistakes in results.items():
            print("\n".join(mistakes) if mistakes else f"{name}: good")
    if any(results.values()):
        raise typer.Exit(ConfigError.exit_code)


def _mistakes(profile: "Profile") -> list[str]:
    from thor_spec.capacity.shape import ModelShape
    from thor_spec.capacity.weights import weight_bytes
    from thor_spec.config import ServeConfig

    found = []
    try:
        ServeConfig(**profile.options())
    except ConfigError as error:
        found.append(f"{profile.document.where(['serve'])} {error}")
    for which in ("target", "drafter"):
        if config := profile.shape(which):
            try:
                weight_bytes(ModelShape.parse(profile.name, config))
            except ConfigError as error:
                found.append(f"{profile.document.where(['plan', which, 'config'])} {error}")
    return found
