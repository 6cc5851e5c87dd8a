"""One recurrent state per sequence against one per draft position: what fits, and how fast it is, side by side.

    python benchmarks/state.py --arms snapshot reconstruct --drafts 15 --utilization 0.75
    python benchmarks/state.py --tiny --arms snapshot reconstruct        # on a CPU: does it run?

Dummy weights with the dimensions of Qwen3.5-35B-A3B and a DFlash drafter of five layers; drafts are accepted by chance
(``synthetic_acceptance_length``). Each arm is an engine in a process of its own, and a start takes minutes: choose arms
so that a command fits the time there is. Arms that earlier commands measured are taken from ``--merge`` for the table.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine_process import run_again
from record import write

from thor_spec.vllm_plugin.options import NAME as PLUGIN

ARMS = {
    "none": None,
    "snapshot": {"state": "snapshot"},
    "reconstruct": {"state": "reconstruct", "gdn_kernel": "replay"},
    "reconstruct-wy": {"state": "reconstruct", "gdn_kernel": "wy"},
}
BLOCK = 16
VOCABULARY, MASK = 248320, 248070
TARGET = {  # the dimensions of Qwen3.5-35B-A3B are the defaults of this model type
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "max_position_embeddings": 262144,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "mamba_ssm_dtype": "float32",
    "dtype": "bfloat16",
}


def drafter(options: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration of a drafter: ``--drafter-window`` slides all its layers but the last."""
    layers = 5
    slides = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": options.drafter_kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "layer_types": slides if options.drafter_window else ["full_attention"] * layers,
        **({"sliding_window": options.drafter_window, "use_sliding_window": True} if options.drafter_window else {}),
        "block_size": BLOCK,
        "num_target_layers": 40,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 10, 19, 28, 37]},
        "dtype": "bfloat16",
    }


def main() -> None:
    options = parse()
    if options.one:
        print(json.dumps(measure(options, options.one, options.one_drafts)))
        return
    before = json.loads(options.merge.read_text())["runs"] if options.merge else {}
    runs = dict(before)
    with tempfile.TemporaryDirectory() as folder:
        for drafts in options.drafts:
            for arm in options.arms:
                started = time.time()
                runs[f"{arm} K={drafts}"] = in_a_process(arm, drafts, Path(folder))
                print(f"{arm} K={drafts}: {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    settings = {name: value for name, value in vars(options).items() if name not in ("one", "one_drafts", "merge")}
    result = {"settings": settings, "runs": runs, "ratios": ratios(runs)}
    print(write("state", result, seeds={"sampling": 0}))
    print(table(runs, result["ratios"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["snapshot", "reconstruct"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[15], metavar="K")
    parser.add_argument("--utilization", type=float, default=0.75, help="gpu_memory_utilization")
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--sequences", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--requests", type=int, default=256, help="sent at once; 0: do not load the engine")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each of them")
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--single", type=int, default=512, help="tokens answered to one request alone; 0: none")
    parser.add_argument("--acceptance", type=float, default=5.84, help="tokens per step, where K allows")
    parser.add_argument("--repetitions", type=int, default=3, help="of the single request")
    parser.add_argument("--caching", action="store_true", help="prefix caching, in align mode")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no compilation and no graphs: a quick start")
    parser.add_argument("--drafter-kv-heads", type=int, default=4)
    parser.add_argument("--drafter-window", type=int, default=2048, help="0: all layers look at everything")
    parser.add_argument("--tiny", action="store_true", help="tiny-hybrid instead of the 35B, and little of everything")
    parser.add_argument("--merge", type=Path, help="record of an earlier command")
    parser.add_argument("--one", choices=list(ARMS), help=argparse.SUPPRESS)
    parser.add_argument("--one-drafts", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.context, options.sequences, options.requests, options.prompt, options.answer = 1024, 4, 6, 40, 8
        options.single, options.repetitions, options.eager, options.drafts = 16, 2, True, [7]
    return options


def in_a_process(arm: str, drafts: int, folder: Path) -> dict[str, Any]:
    """Return what ``measure`` returns, from a process of its own."""
    return run_again(
        "--one", arm, "--one-drafts", str(drafts), what=f"{arm} with K = {drafts}", log=folder / f"{arm}-{drafts}.log"
    )  # fmt: skip


def engine(options: argparse.Namespace, arm: str, drafts: int, folder: Path) -> Any:
    from vllm import LLM

    from thor_spec.vllm_plugin.seam import has_gpu_build

    gpu = has_gpu_build()
    state = ARMS[arm]
    if options.tiny:
        from thor_spec.nano import checkpoints

        target, draft = (str(checkpoints.ensure(name)) for name in ("tiny-hybrid", checkpoints.PAIRS["tiny-hybrid"]))
    else:
        for name, config in (("target", TARGET), ("drafter", drafter(options))):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        target, draft = str(folder / "target"), str(folder / "drafter")
    speculation = {
        "method": "dflash",
        "model": draft,
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": min(options.acceptance, 0.8 * drafts + 1),
    }
    ours: dict[str, Any] = {**({} if gpu else {"runner_kernels": "torch"}), **(state or {})}
    if not gpu:
        ours.pop("gdn_kernel", None)  # interpreted kernels would take hours
    return LLM(
        target,
        max_model_len=options.context,
        max_num_seqs=options.sequences,
        skip_tokenizer_init=True,
        enable_prefix_caching=options.caching,
        enforce_eager=options.eager,
        disable_log_stats=False,
        tensor_parallel_size=options.tp,
        seed=0,
        speculative_config=speculation if state else None,
        additional_config={PLUGIN: ours, **({"gdn_prefill_backend": "triton"} if gpu else {})},
        **({} if options.tiny else {"load_format": "dummy"}),
        **({"gpu_memory_utilization": options.utilization} if gpu else {"kv_cache_memory_bytes": 256 << 20}),
    )


def measure(options: argparse.Namespace, arm: str, drafts: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        llm = engine(options, arm, drafts, Path(folder))
        found = {"start_s": round(time.time() - started, 1), **capacity(llm)}
        generate(llm, 1, 64, 16, seed=99)  # warms what only a real step compiles
        if options.single:
            runs = [generate(llm, 1, 128, options.single, seed=i) for i in range(options.repetitions)]
            found["single"] = {
                "tokens_per_s": round(statistics.median(run["tokens_per_s"] for run in runs), 2),
                "step_ms": round(statistics.median(run["step_ms"] for run in runs), 4),
                "runs": runs,
            }
        if options.requests:
            found["load"] = generate(llm, options.requests, options.prompt, options.answer, seed=7)
    return found


def capacity(llm: Any) -> dict[str, Any]:
    """Return how many sequences of full length fit, as vLLM counts them."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    core = llm.llm_engine.engine_core.engine_core
    cache = core.scheduler.kv_cache_config
    sequences = get_max_concurrency_for_kv_cache_config(core.vllm_config, cache)
    return {
        "sequences": round(sequences, 2),
        "tokens": int(sequences * core.vllm_config.model_config.max_model_len),
        "blocks": cache.num_blocks,
        "groups": len(cache.kv_cache_groups),
    }


def generate(llm: Any, requests: int, prompt: int, answer: int, *, seed: int) -> dict[str, Any]:
    """Send ``requests`` at once; return throughput, time per step, and what users wait for."""
    import random

    from vllm import SamplingParams

    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(256) for _ in range(prompt)]} for _ in range(requests)]
    params = [
        SamplingParams(temperature=0.7, seed=i, max_tokens=answer, ignore_eos=True, detokenize=False)
        for i in range(requests)
    ]
    before = steps(llm)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    first = sorted(output.metrics.first_token_latency for output in outputs)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    drafted = steps(llm) - before or tokens  # without drafts a step of a request is a token
    decoding = seconds - first[0] if requests == 1 else seconds
    return {
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2),
        "step_ms": round(1e3 * decoding / max(drafted / requests, 1), 4),
        "tokens_per_step": round(tokens / drafted, 3),
        "ttft_p50_s": round(first[len(first) // 2], 3),
        "ttft_p99_s": round(first[min(len(first) - 1, int(0.99 * len(first)))], 3),
    }


def steps(llm: Any) -> int:
    """Return the verified steps of all requests so far."""
    return int(sum(m.value for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_drafts"))


def ratios(runs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return every arm against snapshot at the same K: sequences, tokens per second, TTFT, and time per step."""
    found = {}
    for name, run in runs.items():
        arm, _, drafts = name.partition(" ")
        base = runs.get(f"snapshot {drafts}")
        if arm == "snapshot" or base is None:
            continue
        found[name] = {"sequences": round(run["sequences"] / base["sequences"], 3)}
        if "load" in run and "load" in base:
            found[name]["load_tokens_per_s"] = round(run["load"]["tokens_per_s"] / base["load"]["tokens_per_s"], 3)
            found[name]["load_ttft_p99_better"] = round(base["load"]["ttft_p99_s"] / run["load"]["ttft_p99_s"], 3)
        if "single" in run and "single" in base:
            found[name]["single_step_time"] = round(run["single"]["step_ms"] / base["single"]["step_ms"], 4)
    return found


def table(runs: dict[str, Any], compared: dict[str, dict[str, float]]) -> str:
    lines = [f"{'':22} {'fit':>7} {'b1 ms':>8} {'b1 tok/s':>9} {'load tok/s':>11} {'p99 TTFT':>9}"]
    for name, run in runs.items():
        single, load = run.get("single", {}), run.get("load", {})
        lines.append(
            f"{name:22} {run['sequences']:7.2f} {single.get('step_ms', 0):8.3f} {single.get('tokens_per_s', 0):9.1f} "
            f"{load.get('tokens_per_s', 0):11.1f} {load.get('ttft_p99_s', 0):9.2f}"
        )
    return "\n".join([*lines, *(f"{name}: {json.dumps(found)}" for name, found in compared.items())])


if __name__ == "__main__":
    main()
