"""``thor-spec plan``."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from thor_spec.cli.engine_options import size_option
from thor_spec.errors import ConfigError

if TYPE_CHECKING:
    from thor_spec.capacity.plan import MemoryPlan, Request

BAR_WIDTH = 44
GIB = 1 << 30
VLLM_UTILIZATION = 0.92  # its default


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        epilog="Example: thor-spec plan qwen3.6-35b-a3b --memory 122GiB --what-if K=3 --what-if state=snapshot"
    )(plan)


def plan(
    model: Annotated[str, typer.Argument(metavar="MODEL|PROFILE", help="Folder with a config.json, or a profile.")],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Drafter, a folder; 'none' plans without.", metavar="DRAFTER", show_default="a bundled model's own"
        ),
    ] = None,
    draft_tokens: Annotated[int | None, typer.Option(help="Tokens drafted per step.", metavar="K")] = None,
    tree: Annotated[
        str | None,
        typer.Option(help="Draft trees, as of serve.", metavar="off|auto[,N]|N[,DEPTH]|WIDTHS", show_default="off"),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Longest request in tokens.", metavar="N", show_default="the model's own")
    ] = None,
    max_seqs: Annotated[int | None, typer.Option(help="Requests served at once.", show_default="8")] = None,
    batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step, vLLM's --max-num-batched-tokens.", show_default="8192")
    ] = None,
    drafter_window: Annotated[
        int | None, typer.Option(help="Last tokens that the drafter attends to.", metavar="N", show_default="all")
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="How drafts are verified: a state per token, or one and a record.",
            metavar="snapshot|reconstruct",
            show_default="reconstruct",
        ),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of the KV cache.", metavar="DTYPE", show_default="auto")] = None,
    state_dtype: Annotated[
        str | None, typer.Option(help="Of recurrent state.", metavar="DTYPE", show_default="what the model names")
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--prefix-caching/--no-prefix-caching",
            help="Keep a state at block boundaries.",
            show_default="as serve does: only without drafts",
        ),
    ] = None,
    kv_cache_memory: Annotated[int | None, size_option("Size of the cache.", show_default="what is left")] = None,
    memory: Annotated[
        int | None,
        size_option("Plan for this much memory on a CUDA device, e.g. 122GiB.", show_default="this machine's"),
    ] = None,
    floor: Annotated[int | None, size_option("What must stay available.", show_default="4 GiB, or 3 % if more")] = None,
    utilization: Annotated[
        float | None, typer.Option(help="vLLM's share of the memory, instead of a floor.", metavar="SHARE")
    ] = None,
    weights: Annotated[int | None, size_option("Size of the weights.", show_default="computed")] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(help="Compare with one value changed; may be repeated.", metavar="NAME=VALUE"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show where the memory would go, and how many sequences of which length fit. Exits 12 when not even one does.

    Computed from config.json alone: no weights are read, and nothing is started. See docs/plan.md.
    """
    subject = _Subject(model, draft)
    options = {
        "draft_tokens": draft_tokens,
        "context": context,
        "max_seqs": max_seqs,
        "batched_tokens": batched_tokens,
        "drafter_window": drafter_window,
        "state": state,
        "kv_dtype": kv_dtype,
        "state_dtype": state_dtype,
        "prefix_caching": prefix_caching,
        "utilization": utilization,
        "kv_cache_memory": kv_cache_memory,
        "weights": weights,
    }
    request = subject.request(
        {name: value for name, value in options.items() if value is not None},
        tree=tree,
        memory=memory,
        floor=floor,
    )
    found = subject.make(request)
    others = {text: subject.make(request.changed(text)) for text in what_if or ()}
    if as_json:
        print(json.dumps({**found.as_dict(), "what_if": {text: other.as_dict() for text, other in others.items()}}))
    else:
        print("\n".join(_lines(subject, found, others)))
    found.require_fit()


class _Subject:
    """The models that are planned for, and what their profile says."""

    def __init__(self, model: str, draft: str | None) -> None:
        from thor_spec.capacity.shape import ModelShape
        from thor_spec.dflash.drafter import Drafter
        from thor_spec.profiles import catalogue
        from thor_spec.serve.speculation import own_drafter

        self.options: dict[str, Any] = {}
        self.kv_dtype = "auto"
        drafter: Any = None
        if catalogue.find(model) is not None:
            profile = catalogue.get(model)
            config = profile.shape("target")
            if config is None:
                raise ConfigError(f"The profile {profile.path} has no plan section. Pass the model's folder.")
            self.options, self.kv_dtype, drafter = profile.options(), profile.kv_dtype(), profile.shape("drafter")
        else:
            config, draft = _config(model), draft or own_drafter(model)
        self.target: ModelShape = ModelShape.parse(model, config)
        if draft is not None:
            drafter = None if draft == "none" else _config(draft)
            if drafter is not None:
                Drafter.parse(draft, drafter)  # what serve would refuse is not planned
        self.drafter: ModelShape | None = None if drafter is None else ModelShape.parse("the drafter", drafter)
        self._drafter_name = draft or "of the profile"
        self._block = _block_size(drafter)
        self._nodes: int | None = None
        """Of a tree, which may have more of them than a block has drafts."""

    def make(self, request: "Request") -> "MemoryPlan":
        """Return the plan. Raises: ConfigError, also for more drafts than the drafter has."""
        from thor_spec.capacity.plan import make
        from thor_spec.dflash.drafter import require_draft_tokens

        if self.drafter is not None and request.draft_tokens != self._nodes:
            require_draft_tokens(self._drafter_name, self._block, request.draft_tokens)
        return make(request, self.target, self.drafter)

    def drafts(self, request: "Request") -> str:
        """Return how is drafted, for a headline."""
        return f"trees of {self._nodes}" if request.draft_tokens == self._nodes else f"K = {request.draft_tokens}"

    def request(self, given: dict[str, Any], *, tree: str | None, memory: int | None, floor: int | None) -> "Request":
        from thor_spec.capacity.plan import Request
        from thor_spec.ddtree.shape import TreeShape
        from thor_spec.serve.speculation import default_draft_tokens

        names = ("context", "max_seqs", "draft_tokens", "drafter_window", "kv_cache_memory")
        asked = {name: self.options[name] for name in names if name in self.options}
        asked |= {"context": self.target.context} if "context" not in asked else {}
        asked["kv_dtype"] = self.kv_dtype
        if self.drafter is None:
            asked.pop("draft_tokens", None)
            asked.pop("drafter_window", None)
        here = _machine(memory, floor, given)
        shape = TreeShape.parse(tree or self.options.get("tree") or "off")
        if shape is not None:
            if self.drafter is None or "draft_tokens" in given:
                why = "needs a drafter" if self.drafter is None else "says how many are drafted, not --draft-tokens"
                raise ConfigError(f"--tree {why}. Leave one of them out, or name a drafter: --draft.")
            shape.deep(self._block - 1)
            asked["draft_tokens"] = self._nodes = shape.nodes
        elif self.drafter is not None and "draft_tokens" not in asked:
            asked["draft_tokens"] = default_draft_tokens(self._block - 1, gpu=here.get("engine") != "cpu")
        asked["prefix_caching"] = not given.get("draft_tokens", asked.get("draft_tokens"))
        return Request(**{**asked, **here, **given})


def _machine(memory: int | None, floor: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """Return what may be used: the memory that was named, a GPU's own, or what this machine has available."""
    from thor_spec.device import board, cuda
    from thor_spec.guard.memory import ProcMemory, default_floor_bytes

    found: dict[str, Any] = {}
    if memory is None:
        gpu, here = cuda.probe(), ProcMemory().read()
        if gpu is not None and not gpu.integrated and not board.detect(Path("/"), gpu).is_unified:
            found = {"memory": gpu.total_bytes}
            return found if floor is not None or "utilization" in given else {**found, "utilization": VLLM_UTILIZATION}
        found = {"memory": here.available_bytes, "floor": default_floor_bytes(here.total_bytes)}
        if gpu is None:
            found |= {"engine": "cpu", "kv_cache_memory": GIB}
    else:
        found = {"memory": memory, "floor": default_floor_bytes(memory)}
    return found if floor is None else {**found, "floor": floor}


def _config(name: str) -> Any:
    from thor_spec.capacity.source import read_config
    from thor_spec.serve.locate import locate

    return read_config(Path(name) if os.path.isfile(name) else locate(name))  # Path.is_file may be refused


def _block_size(drafter: Any) -> int:
    size = (drafter or {}).get("block_size") or ((drafter or {}).get("dflash_config") or {}).get("block_size")
    return size if isinstance(size, int) and size > 1 else 16


def _lines(subject: _Subject, found: "MemoryPlan", others: "dict[str, MemoryPlan]") -> list[str]:
    request = found.request
    lines = [
        f"{subject.target.name}: {_gib(request.memory)} of memory, context {request.context:,}, "
        f"{subject.drafts(request)}, {request.state}",
        "",
    ]
    cache = f"{found.tokens:,} tokens, {found.sequences:.2f} sequences of {request.context:,}"
    rows = [(item.name, item.bytes, f"{item.detail}{' (estimate)' if item.estimated else ''}") for item in found.items]
    left = request.memory - sum(item.bytes for item in found.items) - found.kv_bytes
    rows.insert(-1, ("KV cache", found.kv_bytes, cache))
    if left > 0:
        rows.insert(-1, ("free", left, "beyond the cache that was asked for"))
    for name, size, detail in rows:
        cells = max(0, round(BAR_WIDTH * size / request.memory))
        bar = "█" * min(cells, BAR_WIDTH)
        lines.append(f"{name:<12} {_gib(size):>11}  {bar:<{BAR_WIDTH}}  {detail}")
    lines += ["", *(f"{_fact(name):<42} {_bytes(value, name)}" for name, value in found.facts.items())]
    lines += ["", "sequences at once, by context"]
    lines += [f"  {'context':>10}  {'snapshot':>10}  {'reconstruct':>12}"]
    for context, counts in _by_context(subject, request):
        lines.append(f"  {context:>10,}  {counts[0]:>10.1f}  {counts[1]:>12.1f}")
    if others:
        lines += ["", f"  {'what if':<28} {'KV cache':>11}  {'tokens':>12}  {'sequences':>10}"]
        for text, plan_ in {"as above": found, **others}.items():
            lines.append(f"  {text:<28} {_gib(plan_.kv_bytes):>11}  {plan_.tokens:>12,}  {plan_.sequences:>10.2f}")
    return lines


def _by_context(subject: _Subject, request: "Request") -> "list[tuple[int, list[float]]]":
    from thor_spec.capacity.plan import CONTEXTS

    rows = []
    for context in sorted({*(c for c in CONTEXTS if c <= subject.target.context), request.context}):
        asked = [replace(request, context=context, state=kind) for kind in ("snapshot", "reconstruct")]
        rows.append((context, [subject.make(one).sequences for one in asked]))
    return rows


def _fact(name: str) -> str:
    return name.replace("_bytes", "").replace("_", " ").replace("kv", "KV")


def _bytes(value: int, name: str) -> str:
    if "bytes" not in name:
        return str(value)
    return f"{value / 1024:,.1f} KiB" if value < 1 << 20 else f"{value / (1 << 20):,.1f} MiB"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
