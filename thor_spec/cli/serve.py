"""``thor-spec serve``."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from thor_spec.cli.engine_options import KvCache, size_option
from thor_spec.cli.notes import note
from thor_spec.config import DEFAULT_MODEL
from thor_spec.errors import ConfigError

if TYPE_CHECKING:
    from thor_spec.serve.events import Ready


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(
        options_metavar="[OPTIONS]",
        epilog="Example: thor-spec serve ./Qwen3.6-35B-A3B --draft ./Qwen3.6-35B-A3B-DFlash --context 32768",
    )(serve)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL] [-- VLLM_ARGS...]",
            help="Checkpoint folder, name in the local Hugging Face cache, or bundled model.",
            show_default="nano-hybrid where it is shipped, else tiny-hybrid",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="DFlash drafter, named like MODEL; 'none' serves without speculation.", metavar="DRAFTER"),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted per step; at most the drafter's block size - 1.", metavar="K")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.", show_default="8000")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Key that clients must show; --api-key-file keeps it out of `ps`.", metavar="KEY")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key, which nobody else may read.", metavar="FILE")
    ] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Let others in without a key, and vLLM log prompts.")
    ] = None,
    max_request_bytes: Annotated[int | None, size_option("Longest body of a request.", show_default="8 MiB")] = None,
    context_length: Annotated[
        int | None,
        typer.Option("--context", help="Longest request in tokens, prompt and answer.", metavar="N"),
    ] = None,
    max_seqs: Annotated[int | None, typer.Option(help="Requests served at once.", show_default="8")] = None,
    kv_cache_memory: KvCache = None,
    accept: Annotated[
        str | None,
        typer.Option(
            help="How drafts are taken, unless a request says; only exact is lossless.",
            metavar="exact|threshold|typical",
            show_default="exact",
        ),
    ] = None,
    accept_eps: Annotated[
        float | None, typer.Option(help="Probability from which a draft is taken.", metavar="P", show_default="0.09")
    ] = None,
    accept_delta: Annotated[
        float | None,
        typer.Option(help="With typical: lowers it to P exp(-entropy), if less.", metavar="P", show_default="0.3"),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Recurrent states of a sequence: one, or one per draft.",
            metavar="reconstruct|snapshot",
            show_default="reconstruct where it can be",
        ),
    ] = None,
    gdn_kernel: Annotated[
        str | None,
        typer.Option(
            help="How drafts meet the recurrent state; wy is not bit-identical.",
            metavar="auto|replay|wy",
            show_default="auto",
        ),
    ] = None,
    drafter_window: Annotated[
        int | None,
        typer.Option(
            help="The drafter attends to the last N tokens, and keeps no more; acceptance may fall.",
            metavar="N",
            show_default="all",
        ),
    ] = None,
    adaptive_drafts: Annotated[
        bool | None,
        typer.Option("--adaptive-drafts", help="Draft as many tokens, up to K, as pay at each depth and batch."),
    ] = None,
    tree: Annotated[
        str | None,
        typer.Option(
            help=(
                "Draft trees: as many nodes as pay in each step (auto), N likeliest nodes, N,DEPTH, or a fixed width "
                "per level such as 3,3,3."
            ),
            metavar="off|auto[,N]|N[,DEPTH]|WIDTHS",
            show_default="off",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="How a block-diffusion model denoises, unless a request says.",
            metavar="quality|speed|2.0",
            show_default="quality",
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(help="Probability above which it fills a mask.", metavar="P", show_default="the mode's"),
    ] = None,
    edit_threshold: Annotated[
        float | None,
        typer.Option(
            help="Probability above which it replaces a token; 1: never.", metavar="P", show_default="the mode's"
        ),
    ] = None,
    max_denoise_steps: Annotated[
        int | None, typer.Option(help="Steps after which it fills the whole block.", metavar="N", show_default="64")
    ] = None,
    rope: Annotated[
        str | None,
        typer.Option(
            help="How positions are told apart.",
            metavar="default|yarn|longrope|linear|identity_beyond_native|nope",
            show_default="the checkpoint's",
        ),
    ] = None,
    rope_native: Annotated[
        int | None,
        typer.Option(help="With --rope: context of the training.", metavar="N", show_default="the checkpoint's"),
    ] = None,
    rope_factor: Annotated[
        float | None, typer.Option(help="With --rope: times the native context.", metavar="F", show_default="1")
    ] = None,
    rope_factors: Annotated[
        Path | None,
        typer.Option(
            help="JSON list of LongRoPE's factors.", metavar="FILE", show_default="the checkpoint's, or a step"
        ),
    ] = None,
    rope_drafter: Annotated[
        str | None,
        typer.Option(help="With --rope: what the drafter does.", metavar="same|default", show_default="same"),
    ] = None,
    canary: Annotated[
        str | None,
        typer.Option(
            help="What must be answered before READY.", metavar="quick|full", show_default="full on a GPU, else quick"
        ),
    ] = None,
    acceptance_floor: Annotated[
        float | None, typer.Option(help="Least tokens per verify step in the canary.", metavar="TOKENS")
    ] = None,
    golden: Annotated[
        Path | None, typer.Option(help="JSON list of prompts and greedy answers for the canary.", metavar="FILE")
    ] = None,
    allow_controls: Annotated[
        bool | None,
        typer.Option(
            "--allow-controls", help="Let requests ask for planted corruption, on which `verify` proves itself."
        ),
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Write chat requests down for `bench agent`, texts hidden.", metavar="FILE")
    ] = None,
    record_contents: Annotated[bool | None, typer.Option("--record-contents", help="With their texts.")] = None,
    log_file: Annotated[
        Path | None, typer.Option(help="Engine log, appended to.", show_default="below ~/.cache/thor-spec/logs")
    ] = None,
    memory_floor: Annotated[
        int | None,
        size_option(
            "MemAvailable below which the engine is killed, e.g. 6GiB.",
            show_default="4 GiB, or 3 % of all memory if more",
        ),
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Devices that share each layer.", metavar="N")] = None,
    pipeline_parallel: Annotated[int | None, typer.Option(help="Devices that share the layers.", metavar="N")] = None,
    data_parallel: Annotated[int | None, typer.Option(help="Copies of the engine behind one API.", metavar="N")] = None,
    nnodes: Annotated[int | None, typer.Option(help="Machines that share one engine.", metavar="N")] = None,
    node_rank: Annotated[
        int | None, typer.Option(help="Which of them this is; all but 0 with --dry-run or --exec.", metavar="R")
    ] = None,
    master_addr: Annotated[str | None, typer.Option(help="Address of node 0.", metavar="HOST")] = None,
    executor: Annotated[str | None, typer.Option(help="How vLLM reaches its workers.", metavar="mp|ray")] = None,
    wait: Annotated[
        bool | None, typer.Option("--wait/--no-wait", help="Wait while another job holds the device.")
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            help="A profile, or a YAML file of these options; flags win over it. Of several the last wins.",
            metavar="NAME|FILE",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be started, and start nothing.")] = False,
    become: Annotated[
        bool, typer.Option("--exec", help="Become the engine, unsupervised: in a container whose entry point locks.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Report as JSON.")] = False,
) -> None:
    """Serve a model over the OpenAI API, with DFlash speculation.

    READY is printed once the engine has answered a canary set: plain, streamed, repeated and tool-call requests, with
    drafts accepted on the way; the full set adds eight prompts at once and a long one twice. Ctrl-C stops; twice, at
    once. Arguments after -- go to vLLM untouched.
    """
    from thor_spec.cli.progress import progress
    from thor_spec.config import resolve
    from thor_spec.nano import shipped
    from thor_spec.profiles import catalogue
    from thor_spec.serve.plan import make_plan
    from thor_spec.serve.supervisor import serve as supervise

    flags = {
        "model": model,
        "draft": draft,
        "draft_tokens": draft_tokens,
        "host": host,
        "port": port,
        "api_key": api_key,
        "api_key_file": api_key_file,
        "insecure": insecure,
        "max_request_bytes": max_request_bytes,
        "context": context_length,
        "max_seqs": max_seqs,
        "kv_cache_memory": kv_cache_memory,
        "memory_floor": memory_floor,
        "accept": accept,
        "accept_eps": accept_eps,
        "accept_delta": accept_delta,
        "state": state,
        "gdn_kernel": gdn_kernel,
        "drafter_window": drafter_window,
        "adaptive_drafts": adaptive_drafts,
        "tree": tree,
        "mode": mode,
        "threshold": threshold,
        "edit_threshold": edit_threshold,
        "max_denoise_steps": max_denoise_steps,
        "rope": rope,
        "rope_native": rope_native,
        "rope_factor": rope_factor,
        "rope_factors": rope_factors,
        "rope_drafter": rope_drafter,
        "canary": canary,
        "acceptance_floor": acceptance_floor,
        "golden": golden,
        "allow_controls": allow_controls,
        "record": record,
        "record_contents": record_contents,
        "log_file": log_file,
        "tensor_parallel": tensor_parallel,
        "pipeline_parallel": pipeline_parallel,
        "data_parallel": data_parallel,
        "nnodes": nnodes,
        "node_rank": node_rank,
        "master_addr": master_addr,
        "executor": executor,
        "wait": wait,
        "vllm_args": context.obj.rest or None,
    }
    defaults = {"model": shipped.default_model(DEFAULT_MODEL)}
    named = catalogue.layered(profile or ())
    plan = make_plan(resolve(flags, named, defaults), note=note)
    if dry_run:
        print(json.dumps(plan.as_dict(), indent=2) if as_json else plan.as_shell())
        return
    if become:
        plan.become()
    if plan.resolved.config.node_rank:
        raise ConfigError(
            f"Node {plan.resolved.config.node_rank} has no API to watch. Run what --dry-run prints under "
            "`thor-spec run`, or use --exec in a container."
        )

    def report(ready: "Ready") -> None:
        print(json.dumps(ready.as_dict()) if as_json else _ready_text(ready), flush=True)

    with progress(report) as events:
        supervise(plan, events)


def _ready_text(ready: "Ready") -> str:
    capacity = (
        f"{ready.kv.tokens:,} tokens, {ready.kv.sequences:.1f} sequences of {ready.context:,}" if ready.kv else "?"
    )
    how = f"  denoise  {ready.denoise}" if ready.denoise else f"  drafter  {_speculation(ready)}"
    message = {"role": "user", "content": "Say hello."}
    body = json.dumps({"model": ready.model, "messages": [message], "max_tokens": 64})
    return "\n".join(
        [
            f"READY in {ready.seconds:.1f} s: {ready.url}",
            f"  model    {ready.model}",
            how,
            f"  KV cache {capacity}",
            *([f"  state    {ready.recurrent_state}"] if ready.recurrent_state else []),
            f"  prefixes {ready.prefix_caching}",
            f"  canary   {', '.join(ready.checks)}",
            f"  margin   {_margin_text(ready)}",
            f"  log      {ready.log_file}",
            f"  try      curl {ready.url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        ]
    )


def _speculation(ready: "Ready") -> str:
    lossy = "" if ready.accept == "exact" else f", accept {ready.accept} (lossy)"
    chains = f"K <= {ready.draft_tokens}, as many as pay" if ready.adaptive_drafts else f"K = {ready.draft_tokens}"
    drafts = f"tree {ready.tree}" if ready.tree else chains
    window = f", window {ready.drafter_window:,}" if ready.drafter_window else ""
    return f"{ready.drafter}, {drafts}{window}{lossy}" if ready.drafter else "none"


def _margin_text(ready: "Ready") -> str:
    if ready.margin_bytes is None:
        return "? (the watchdog has not read memory yet)"
    return f"{ready.margin_bytes / (1 << 30):.2f} GiB of memory above the floor"
