"""``thor-spec verify``."""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thor_spec.cli.engine_options import Draft, DraftTokens, KvCache, Model, Profile
from thor_spec.errors import ConfigError, GateError

if TYPE_CHECKING:
    from thor_spec.gates.judging import Planned, Subject
    from thor_spec.gates.verdict import Verdict
    from thor_spec.serve.plan import Plan

Url = Annotated[str | None, typer.Option(help="Judge a running server instead.", metavar="URL")]
Context = Annotated[int, typer.Option("--context", help="Longest request in tokens.", metavar="N")]
Reference = Annotated[
    str | None, typer.Option(help="A running server without speculation, to compare with.", metavar="URL")
]
Stock = Annotated[bool, typer.Option("--stock", help="Compare with stock DFlash, without our plugin, too. On a GPU.")]
Control = Annotated[str | None, typer.Option(help="Plant this corruption; the gate must turn red.", metavar="KIND")]
TieGap = Annotated[
    float | None,
    typer.Option(help="Gap of two logits that counts as a tie.", metavar="NATS", show_default="what bf16 explains"),
]
Prompts = Annotated[int, typer.Option(help="Prompts of greedy answers.", min=1, max=20)]
Tokens = Annotated[int, typer.Option(help="Tokens of each greedy answer.", min=2)]
Seeds = Annotated[int, typer.Option(help="Answers drawn from each prompt.", min=1)]
Conversations = Annotated[int, typer.Option(help="Conversations over the prefix cache.", min=1)]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the record.", metavar="DIR", show_default="evidence/<time>-verify-…")
]
Json = Annotated[bool, typer.Option("--json", help="Print the record's verdicts as JSON.")]

CONVERSATIONS = 20
CONTEXT = 2048  # the longest prompt and answer of a gate are far below


def register(app: typer.Typer) -> None:
    """Add the commands."""
    group = typer.Typer(help="Ask whether a speculating server may be believed. Exits 0 when green, 1 when red.")
    for command in (lossless, distribution, controls, prefix_cache):
        name = command.__name__.replace("_", "-")
        group.command(name, epilog=f"Example: thor-spec verify {name} --url http://127.0.0.1:8000")(command)
    group.command(epilog="Example: thor-spec verify tree ./target --draft ./drafter --tree 16,7 --plant")(tree)
    group.command("all", epilog="Example: thor-spec verify all ./Qwen3.6-35B-A3B --draft ./Qwen3.6-35B-A3B-DFlash")(
        every
    )
    app.add_typer(group, name="verify")


def lossless(
    context: typer.Context,
    model: Model = None,
    url: Url = None,
    reference_url: Reference = None,
    stock: Stock = False,
    draft: Draft = None,
    draft_tokens: DraftTokens = None,
    context_length: Context = CONTEXT,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    control: Control = None,
    tie_gap: TieGap = None,
    prompts: Prompts = 20,
    tokens: Tokens = 64,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare greedy answers with those without speculation, token by token; differences must be ties.

    Every token, behind a first difference too, must be the likeliest to the target itself, or tie with it, when the
    answer is handed to it as a prompt. With --url alone that is what is asked.
    """
    flags = _flags(model, draft, draft_tokens, context_length, kv_cache_memory)
    asked = {"count": prompts, "tokens": tokens, "tie_gap": tie_gap, "control": control or ""}
    servers = _Servers(flags, profile, context.obj.rest, url=url, reference_url=reference_url, stock=stock)
    _run(("lossless",), servers, asked, out, as_json=as_json)


def distribution(
    context: typer.Context,
    model: Model = None,
    url: Url = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = None,
    context_length: Context = CONTEXT,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    control: Control = None,
    seeds: Seeds = 12,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Test with chi-square that tokens above temperature 0 are drawn from the target's own law, by their rank in it."""
    flags = _flags(model, draft, draft_tokens, context_length, kv_cache_memory)
    servers = _Servers(flags, profile, context.obj.rest, url=url)
    _run(("distribution",), servers, {"seeds": seeds, "control": control or ""}, out, as_json=as_json)


def controls(
    context: typer.Context,
    model: Model = None,
    url: Url = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = None,
    context_length: Context = CONTEXT,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    tie_gap: TieGap = None,
    prompts: Prompts = 6,
    tokens: Tokens = 64,
    seeds: Seeds = 12,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Plant every corruption in turn, and see that the gates turn red. A server must run with --allow-controls."""
    flags = _flags(model, draft, draft_tokens, context_length, kv_cache_memory)
    asked = {"count": prompts, "tokens": tokens, "seeds": seeds, "tie_gap": tie_gap}
    servers = _Servers(flags, profile, context.obj.rest, url=url)
    _run(("controls",), servers, asked, out, as_json=as_json)


def prefix_cache(
    context: typer.Context,
    model: Model = None,
    url: Url = None,
    draft: Draft = None,
    draft_tokens: DraftTokens = None,
    context_length: Context = CONTEXT,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    control: Control = None,
    tie_gap: TieGap = None,
    conversations: Conversations = CONVERSATIONS,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Compare answers from the prefix cache with the same ones without it, bit by bit; and see corruption of the cache.

    Repeats, shared beginnings, branches and agents' traces: alone, together, after aborts, in odd chunks, and with a
    cache that is too small. A green verdict lets `thor-spec serve` cache prefixes for the same models and options.
    """
    flags = _flags(model, draft, draft_tokens, context_length, kv_cache_memory)
    servers = _Servers(flags, profile, context.obj.rest, url=url)
    asked = {"conversations": conversations, "tie_gap": tie_gap, "control": control or ""}
    _run(("prefix-cache",), servers, asked, out, as_json=as_json)


def tree(
    context: typer.Context,
    model: Model = None,
    draft: Draft = None,
    shape: Annotated[str, typer.Option("--tree", help="Shape of the trees, as serve takes it.", metavar="SHAPE")] = "8",
    gdn_kernel: Annotated[str | None, typer.Option(help="As serve takes it.", metavar="auto|replay|wy")] = None,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    rows: Annotated[int, typer.Option(help="Rows to verify, trees and chains.", min=1)] = 2000,
    batch: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 4,
    plant: Annotated[
        bool, typer.Option("--plant", help="Then plant every violation in turn; each must be seen.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the schedule.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count violations of the branch-state invariants in an engine that drafts trees, on every recurrent layer."""
    from thor_spec import env, record
    from thor_spec.cli.starting import planned
    from thor_spec.gates import tree as gate

    flags = {"model": model, "draft": draft, "tree": shape, "gdn_kernel": gdn_kernel, "context": CONTEXT}
    wanted = {**flags, "kv_cache_memory": kv_cache_memory, "max_seqs": batch, "vllm_args": tuple(context.obj.rest)}
    plan = planned(wanted, profile).plan
    given = gate.job(plan, rows=batch, verified_rows=rows, faults=plant, seed=seed)
    log = env.cache_dir() / "logs" / "verify-tree.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    found = gate.verdict(gate.run(plan, given, log=log))
    asked = {"rows": rows, "batch": batch, "plant": plant, "seed": seed, "vllm_args": list(context.obj.rest)}
    result = {"options": {**flags, **asked}, "verdicts": [found.as_dict()], "passed": found.passed}
    path = record.write("verify-tree", result, folder=out)
    print(json.dumps({**result, "record": str(path)}) if as_json else _table([found], path))
    _exit([found])


def every(
    context: typer.Context,
    model: Model = None,
    url: Url = None,
    reference_url: Reference = None,
    stock: Stock = False,
    draft: Draft = None,
    draft_tokens: DraftTokens = None,
    context_length: Context = CONTEXT,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    tie_gap: TieGap = None,
    prompts: Prompts = 20,
    tokens: Tokens = 64,
    seeds: Seeds = 12,
    conversations: Conversations = CONVERSATIONS,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Run every gate there is, and print one table.

    A running server either caches prefixes or lets corruption be planted anywhere: one gate is left out then.
    """
    from thor_spec.gates.registry import GATES

    flags = _flags(model, draft, draft_tokens, context_length, kv_cache_memory)
    asked = {
        "count": prompts, "tokens": tokens, "seeds": seeds, "conversations": conversations, "tie_gap": tie_gap,
    }  # fmt: skip
    servers = _Servers(flags, profile, context.obj.rest, url=url, reference_url=reference_url, stock=stock)
    left_out = servers.left_out()
    _run(tuple(name for name in GATES if name != left_out), servers, asked, out, as_json=as_json, title="all")


def _flags(
    model: str | None, draft: str | None, draft_tokens: int | None, context: int, kv_cache_memory: int | None
) -> dict[str, Any]:
    return {
        "model": model,
        "draft": draft,
        "draft_tokens": draft_tokens,
        "context": context,
        "kv_cache_memory": kv_cache_memory,
    }


class _Servers:
    """Which servers to judge, from the options of a command."""

    def __init__(
        self,
        flags: dict[str, Any],
        profile: Path | None,
        rest: Sequence[str],
        *,
        url: str | None,
        reference_url: str | None = None,
        stock: bool = False,
    ) -> None:
        self.flags = flags
        self.profile = profile
        self.rest = tuple(rest)
        self.url = url
        self.reference_url = reference_url
        self.stock = stock
        given = [name for name in ("model", "draft", "draft_tokens", "kv_cache_memory") if flags[name] is not None]
        if url and (given or rest or stock):
            raise ConfigError(
                f"--url names a running server; {', '.join(given) or '-- or --stock'} is for one to start."
            )
        if reference_url and not url:
            raise ConfigError("--reference-url goes with --url; without it both servers are started here.")

    def subject(self) -> "Subject":
        """Return candidate and references."""
        from thor_spec.gates.judging import Running, Subject

        if self.url:
            references = {"plain": Running(self.reference_url)} if self.reference_url else {}
            return Subject(candidate=Running(self.url), references=references)
        servers = {"plain": self.planned({"draft": "none", "draft_tokens": None})}
        if self.stock:
            servers["stock"] = self.planned({}, stock=True)
        return Subject(candidate=self.planned({"allow_controls": True}), references=servers)

    def left_out(self) -> str:
        """Return the gate that a running server cannot take: it caches prefixes, or not; empty where we start it."""
        if not self.url:
            return ""
        from thor_spec.gates.prefix_cache import caches
        from thor_spec.serve.client import Server

        with Server(self.url) as server:
            return "controls" if caches(server) else "prefix-cache"

    def caching(self, *, alone: bool) -> "Subject":
        """Return a candidate that caches prefixes; unless ``alone``, one with odd chunks and one with a small cache."""
        from thor_spec.gates.judging import Derived, Running, Subject
        from thor_spec.gates.prefix_cache import ODD, SMALL, odd_chunks, small_cache

        if self.url:
            return Subject(candidate=Running(self.url), references={})

        def caching(more: tuple[str, ...] = ()) -> "Planned":
            return self.planned({"allow_controls": True}, more=("--enable-prefix-caching", *more))

        references = {
            ODD: Derived(lambda told: caching(odd_chunks(told))),
            SMALL: Derived(lambda told: caching(small_cache(told))),
        }
        return Subject(candidate=caching(), references={} if alone else references)

    def planned(self, changes: dict[str, Any], *, stock: bool = False, more: tuple[str, ...] = ()) -> "Planned":
        """Return one engine to start: the same but for ``changes``, and with ``more`` arguments for vLLM."""
        from thor_spec.cli.starting import planned
        from thor_spec.serve.passthrough import mentions

        # Ties are recognized by the spread of all logits; and states are kept in the same mode on both sides.
        rest = (*self.rest, *more)
        rest = rest if mentions(rest, "--max-logprobs") else (*rest, "--max-logprobs", "-1")
        rest = rest if mentions(rest, "--enable-prefix-caching") else (*rest, "--no-enable-prefix-caching")
        return planned({**self.flags, **changes, "vllm_args": rest}, self.profile, stock=stock)


def _run(
    names: tuple[str, ...],
    servers: _Servers,
    asked: dict[str, Any],
    out: Path | None,
    *,
    as_json: bool,
    title: str = "",
) -> None:
    from thor_spec import record
    from thor_spec.config import CACHED_CONTROLS
    from thor_spec.gates.controls import KINDS
    from thor_spec.gates.gate import Options
    from thor_spec.gates.judging import judge
    from thor_spec.gates.registry import named

    kinds = tuple(CACHED_CONTROLS) if names == ("prefix-cache",) else KINDS
    if (control := asked.get("control")) and control not in kinds:
        raise ConfigError(f"--control {control} is not one of {', '.join(kinds)}.")
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    options = Options(say=say, **asked)
    gates = named(names)
    verdicts = []
    if plain := [gate for gate in gates if not gate.wants_caching]:
        verdicts += judge(plain, servers.subject(), options)
    if caching := [gate for gate in gates if gate.wants_caching]:
        verdicts += judge(caching, servers.caching(alone=bool(control)), options)
        if not servers.url and not control:
            _remember(servers.planned({}).plan, passed=verdicts[-1].passed)
    result = {
        "options": {**servers.flags, **asked, "url": servers.url, "vllm_args": list(servers.rest)},
        "verdicts": [verdict.as_dict() for verdict in verdicts],
        "passed": all(verdict.passed for verdict in verdicts),
    }
    path = record.write(f"verify-{title or names[0]}", result, folder=out)
    print(json.dumps({**result, "record": str(path)}) if as_json else _table(verdicts, path))
    _exit(verdicts)


def _remember(plan: "Plan", *, passed: bool) -> None:
    """Let later starts know what the gate over the cache said."""
    from thor_spec import provenance
    from thor_spec.serve import prefix_caching

    if plan.drafter is not None:
        utc = provenance.collect().utc
        config = plan.resolved.config
        prefix_caching.remember(config, plan.target, plan.drafter, plan.draft_tokens, passed=passed, utc=utc)


def _table(verdicts: "Sequence[Verdict]", path: Path) -> str:
    return "\n".join([*(verdict.as_text() for verdict in verdicts), f"record {path}"])


def _exit(verdicts: "Sequence[Verdict]") -> None:
    if red := [verdict.gate for verdict in verdicts if not verdict.passed]:
        raise GateError(f"{', '.join(red)} is red: these answers are not those of the model alone. See the record.")
