"""``thor-spec verify``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from thor_spec import record
from thor_spec.cli import judged
from thor_spec.cli.engine_options import Draft, Engine, KvCache, Model, Profile
from thor_spec.cli.grouped import grouped
from thor_spec.cli.notes import note
from thor_spec.gates import prompts as stored

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
Prompts = Annotated[int, typer.Option(help="Prompts of greedy answers.", min=1, max=stored.COUNT)]
Tokens = Annotated[int, typer.Option(help="Tokens of each greedy answer.", min=2)]
Seeds = Annotated[int, typer.Option(help="Answers drawn from each prompt.", min=1)]
Conversations = Annotated[int, typer.Option(help="Conversations over the prefix cache.", min=1)]
Out = Annotated[
    Path | None, typer.Option(help="Folder for the record.", metavar="DIR", show_default="evidence/<time>-verify-…")
]
Json = Annotated[bool, typer.Option("--json", help="Print the record's verdicts as JSON.")]

CONVERSATIONS = 20
TREE = "8"
ROWS = 2000
BATCH = 4
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


@dataclass(kw_only=True, frozen=True)
class Judged(Engine):
    """An engine to start, or a running server; and where the record goes."""

    url: Annotated[str | None, typer.Option(help="Judge a running server instead.", metavar="URL")] = None
    context_length: Context = CONTEXT
    out: Out = None
    as_json: Json = False

    def servers(self, context: typer.Context, **more: Any) -> judged.Servers:
        """Return the servers that are judged, and those that they are compared with."""
        flags = {**self.flags(), "context": self.context_length}
        return judged.Servers(flags, self.profile, context.obj.rest, url=self.url, **more)

    def run(self, name: str, servers: judged.Servers, asked: dict[str, Any]) -> None:
        """Run one gate to its end."""
        record.reserve(self.out)
        verdicts = judged.judge((name,), servers, asked)
        judged.conclude(name, verdicts, servers.asked(asked), self.out, as_json=self.as_json)


@grouped
def lossless(
    context: typer.Context,
    *,
    reference_url: Reference = None,
    stock: Stock = False,
    control: Control = None,
    tie_gap: TieGap = None,
    prompts: Prompts = stored.USUAL,
    tokens: Tokens = 64,
    engine: Judged,
) -> None:
    """Compare greedy answers with those without speculation, token by token; differences must be ties.

    Every token, behind a first difference too, must be the likeliest to the target itself, or tie with it, when the
    answer is handed to it as a prompt. With --url alone that is what is asked.
    """
    servers = engine.servers(context, reference_url=reference_url, stock=stock)
    asked = {"count": prompts, "tokens": tokens, "tie_gap": tie_gap, "control": control or ""}
    engine.run("lossless", servers, asked)


@grouped
def distribution(context: typer.Context, *, control: Control = None, seeds: Seeds = 12, engine: Judged) -> None:
    """Test with chi-square that tokens above temperature 0 are drawn from the target's own law, by their rank in it."""
    engine.run("distribution", engine.servers(context), {"seeds": seeds, "control": control or ""})


@grouped
def controls(
    context: typer.Context,
    *,
    tie_gap: TieGap = None,
    prompts: Prompts = 6,
    tokens: Tokens = 64,
    seeds: Seeds = 12,
    engine: Judged,
) -> None:
    """Plant every corruption in turn, and see that the gates turn red. A server must run with --allow-controls."""
    asked = {"count": prompts, "tokens": tokens, "seeds": seeds, "tie_gap": tie_gap}
    engine.run("controls", engine.servers(context), asked)


@grouped
def prefix_cache(
    context: typer.Context,
    *,
    control: Control = None,
    tie_gap: TieGap = None,
    conversations: Conversations = CONVERSATIONS,
    engine: Judged,
) -> None:
    """Compare answers from the prefix cache with the same ones without it, bit by bit; and see corruption of the cache.

    Repeats, shared beginnings, branches and agents' traces: alone, together, after aborts, in odd chunks, and with a
    cache that is too small. A green verdict lets `thor-spec serve` cache prefixes for the same models and options.
    """
    asked = {"conversations": conversations, "tie_gap": tie_gap, "control": control or ""}
    engine.run("prefix-cache", engine.servers(context), asked)


def tree(
    context: typer.Context,
    model: Model = None,
    draft: Draft = None,
    shape: Annotated[
        str, typer.Option("--tree", help="Shape of the trees, as serve takes it.", metavar="SHAPE")
    ] = TREE,
    gdn_kernel: Annotated[str | None, typer.Option(help="As serve takes it.", metavar="auto|replay|wy")] = None,
    kv_cache_memory: KvCache = None,
    profile: Profile = None,
    rows: Annotated[int, typer.Option(help="Rows to verify, trees and chains.", min=1)] = ROWS,
    batch: Annotated[int, typer.Option(help="Requests at once.", min=1)] = BATCH,
    plant: Annotated[
        bool, typer.Option("--plant", help="Then plant every violation in turn; each must be seen.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the schedule.")] = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Count violations of the branch-state invariants in an engine that drafts trees, on every recurrent layer."""
    wanted = {
        "model": model, "draft": draft, "tree": shape, "gdn_kernel": gdn_kernel, "kv_cache_memory": kv_cache_memory,
        "context": CONTEXT, "max_seqs": batch, "vllm_args": tuple(context.obj.rest),
    }  # fmt: skip
    record.reserve(out)
    verdict = judged.trees(wanted, profile, rows=rows, plant=plant, seed=seed)
    options = {**wanted, "rows": rows, "plant": plant, "seed": seed}
    judged.conclude("tree", [verdict], options, out, as_json=as_json)


@grouped
def every(
    context: typer.Context,
    *,
    reference_url: Reference = None,
    stock: Stock = False,
    tie_gap: TieGap = None,
    prompts: Prompts = stored.USUAL,
    tokens: Tokens = 64,
    seeds: Seeds = 12,
    conversations: Conversations = CONVERSATIONS,
    engine: Judged,
) -> None:
    """Run every gate there is, and print one table.

    What cannot be judged is named: a running server either caches prefixes or lets corruption be planted anywhere, and
    trees are looked at from within an engine that is started here.
    """
    from thor_spec.gates.registry import GATES

    asked = {
        "count": prompts, "tokens": tokens, "seeds": seeds, "conversations": conversations, "tie_gap": tie_gap,
    }  # fmt: skip
    servers = engine.servers(context, reference_url=reference_url, stock=stock)
    record.reserve(engine.out)
    not_judged = servers.left_out()
    verdicts = judged.judge(tuple(name for name in GATES if name not in not_judged), servers, asked)
    if "tree" not in not_judged:
        wanted = {**servers.flags, "draft_tokens": None, "tree": TREE, "max_seqs": BATCH, "vllm_args": servers.rest}
        verdicts.append(judged.trees(wanted, engine.profile, rows=ROWS))
    for name, why in not_judged.items():
        note(f"not judged: {name}: {why}")
    options = {**servers.asked(asked), "not_judged": not_judged}
    judged.conclude("all", verdicts, options, engine.out, as_json=engine.as_json)
