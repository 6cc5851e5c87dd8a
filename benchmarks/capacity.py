"""What `thor-spec plan` says against what vLLM reports, each engine in a process of its own.

    python benchmarks/capacity.py [--k 0 3 15] [--utilization 0.6 0.75 0.9] [--state snapshot] [--smoke]

Weights are made up, with the dims of Qwen3.5-35B-A3B and its usual drafter, as Qwen3-Next, whose layers are the same.
``--smoke`` takes the bundled model and a cache of given size: on a CPU the figures must be equal. Exits 1 when a case
is off by more than 3 %.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_process import run_again, serve
from qwen35 import DIMS, DRAFTER_DIMS
from record import write

from thor_spec.capacity.plan import Request, make
from thor_spec.capacity.shape import ModelShape
from thor_spec.device import cuda
from thor_spec.nano import checkpoints
from thor_spec.vllm_plugin.options import NAME

LIMIT = 0.03


def main() -> None:
    """Run every case, write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--k", type=int, nargs="+", default=[0, 3, 15])
    parser.add_argument("--utilization", type=float, nargs="+", default=[0.75])
    parser.add_argument("--max-seqs", type=int, default=256)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--state", choices=["reconstruct", "snapshot"], default="reconstruct")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        serve(lambda _: report(json.loads(asked.child), asked.state))
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = models(Path(folder), smoke=asked.smoke)
        for utilization in [None] if asked.smoke else asked.utilization:
            for k in [0, 7] if asked.smoke else asked.k:
                cases.append(case(target, drafter, k, utilization, asked))
                print(json.dumps(cases[-1]), flush=True)
    good = all(one["off_by"] <= (0 if asked.smoke else LIMIT) for one in cases)
    print(write("capacity-smoke" if asked.smoke else "capacity", {"cases": cases, "limit": LIMIT, "good": good}))
    sys.exit(0 if good else 1)


def models(folder: Path, *, smoke: bool) -> tuple[Path, Path]:
    """Return folders with a target's and a drafter's configuration: the bundled ones, or grown to a 35B's."""
    bundled = (checkpoints.ensure("tiny-hybrid"), checkpoints.ensure("tiny-hybrid-dflash"))
    if smoke:
        return bundled
    grown = []
    for source, dims in zip(bundled, (DIMS, DRAFTER_DIMS), strict=True):
        path = folder / source.name
        path.mkdir()
        config = {**json.loads((source / "config.json").read_text()), **dims}
        (path / "config.json").write_text(json.dumps(config))
        grown.append(path)
    return grown[0], grown[1]


def case(target: Path, drafter: Path, k: int, utilization: float | None, asked: argparse.Namespace) -> dict[str, Any]:
    """Return one comparison."""
    gpu = cuda.probe()
    context = 8192 if asked.smoke else asked.context
    options: dict[str, Any] = {
        "model": str(target),
        "max_model_len": context,
        "max_num_seqs": 8 if asked.smoke else asked.max_seqs,
        "enable_prefix_caching": False,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "mamba_ssm_cache_dtype": "float32",
    }
    if asked.smoke:
        options |= {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True}
    else:
        options["gpu_memory_utilization"] = utilization
    if k:
        speculation = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": k}
        options["speculative_config"] = speculation
    with tempfile.TemporaryDirectory() as folder:
        found = run_again("--child", json.dumps(options), what=f"K = {k}", log=Path(folder) / "log")
    request = Request(
        memory=found["memory"] or (8 << 30),
        utilization=utilization,
        kv_cache_memory=options.get("kv_cache_memory_bytes"),
        context=context,
        max_seqs=options["max_num_seqs"],
        draft_tokens=k,
        state=asked.state,
        state_dtype="float32",
        engine="cuda" if gpu else "cpu",
    )
    shapes = [ModelShape.parse(path.name, json.loads((path / "config.json").read_text())) for path in (target, drafter)]
    plan = make(request, shapes[0], shapes[1] if k else None)
    off = abs(plan.tokens / found["tokens"] - 1)
    return {"k": k, "utilization": utilization, "plan": plan.tokens, "vllm": found, "off_by": round(off, 4)}


def report(options: dict[str, Any], state: str) -> dict[str, Any]:
    """Start an engine and return what it reports."""
    from vllm import LLM

    gpu = cuda.probe()
    ours = {"state": state} if "speculative_config" in options else {}
    additional: dict[str, Any] = {NAME: ours if gpu else {"runner_kernels": "torch", **ours}}
    additional |= {"gdn_prefill_backend": "triton"} if gpu else {}
    engine = LLM(**options, additional_config=additional).llm_engine
    cache = engine.vllm_config.cache_config
    return {
        "tokens": cache.kv_cache_size_tokens,
        "sequences": cache.kv_cache_max_concurrency,
        "blocks": cache.num_gpu_blocks,
        "memory": gpu.total_bytes if gpu else None,
    }


if __name__ == "__main__":
    main()
