"""LLaDA2 served against the plain torch model with its cache, captured against eager, and steps against their tokens.

    python benchmarks/diffusion.py [--model nano-llada|mini] [--requests 1 8] [--tokens 256] [--sweep] [--smoke]

``mini`` has LLaDA2.1-mini's dims and made-up weights; a threshold that nothing passes then fills one token a step, on
both sides. Every engine runs in a process of its own. Fails when captured answers differ from those of the same
compiled code without graphs, or, on a CPU, where float32 is exact enough, when any differs from the plain model's.
"""

import argparse
import hashlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from capacity import environment
from record import write

from thor_spec.device import cuda
from thor_spec.diffusion import decoding, layout
from thor_spec.diffusion.dense import Dense
from thor_spec.diffusion.settings import Denoising
from thor_spec.nano import shipped
from thor_spec.vllm_plugin.options import NAME

MINI: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "vocab_size": 157184, "hidden_size": 2048,
    "intermediate_size": 5120, "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "hidden_act": "silu", "use_bias": False, "use_qkv_bias": False, "use_qk_norm": True,
    "norm_head": False, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "rope_theta": 600000, "rope_scaling": None, "partial_rotary_factor": 0.5, "num_experts": 256,
    "num_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 512,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True, "norm_topk_prob": True, "router_dtype": "fp32", "eos_token_id": 156892,
    "pad_token_id": 156892, "mask_token_id": 156895, "dtype": "bfloat16",
}  # fmt: skip
ALONE = {"threshold": 1.0, "edit_threshold": 1.0}  # one token a step
MODES: tuple[dict[str, Any], ...] = ({"mode": "quality"}, {"mode": "speed"}, {"mode": "2.0"})
SWEEP = tuple({"threshold": t, "edit_threshold": e} for t in (0.3, 0.5, 0.7, 0.9, 0.95) for e in (0.0, 0.5, 1.0))
EXPERT_TOKENS = (1, 8, 16, 32, 64, 128, 256)
GPU = cuda.probe() is not None


def main() -> None:
    """Run what was asked for, write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["nano-llada", "mini"], default="nano-llada")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", help="default: float32 for nano-llada, bfloat16 for mini")
    parser.add_argument("--sweep", action="store_true", help="thresholds, with quality beside speed")
    parser.add_argument("--smoke", action="store_true", help="few tokens, for a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print("REPORT", json.dumps(engine(json.loads(asked.child))), flush=True)
        return
    if asked.smoke:
        asked.requests, asked.tokens, asked.repeats = [1, 2], 40, 1
    asked.dtype = asked.dtype or ("float32" if asked.model == "nano-llada" else "bfloat16")
    with tempfile.TemporaryDirectory() as temporary:
        result = measured(asked, Path(temporary))
    print(write(f"diffusion-{asked.model}{'-smoke' if asked.smoke else ''}", result))
    sys.exit(0 if result["good"] else 1)


def measured(asked: argparse.Namespace, temporary: Path) -> dict[str, Any]:
    """Return the record's content."""
    folder = checkpoint(asked.model, temporary)
    config = json.loads((folder / "config.json").read_text())
    prompts = texts(max(asked.requests), config["vocab_size"], layout.mask_of(config))
    ways = SWEEP if asked.sweep else MODES if asked.model == "nano-llada" else (ALONE,)
    job = {
        "model": str(folder), "dtype": asked.dtype, "dummy": asked.model == "mini", "prompts": prompts, "ways": ways,
        "requests": asked.requests, "tokens": asked.tokens, "repeats": asked.repeats, "scores": asked.sweep,
    }  # fmt: skip
    result: dict[str, Any] = {"asked": vars(asked), "good": True}
    engines = ("eager", "compiled", "captured") if GPU else ("eager",)
    for name in engines:
        result[name] = run({**job, "kind": name})
        print(name, json.dumps(result[name]["runs"]), flush=True)
    result["plain torch"] = plain(folder, config, asked, prompts[0], ways)
    for number, one in enumerate(result["plain torch"]):
        for name in engines:
            first = result[name]["runs"][number * len(asked.requests)]
            alike = sum(a == b for a, b in zip(first["first answer"], one["answer"], strict=True))
            one[f"tokens equal, {name}"] = alike
            one[f"{name} over this"] = round(first["tokens/s"] / one["tokens/s"], 3)
            if not GPU:
                result["good"] &= alike == len(one["answer"])
        print(json.dumps({key: value for key, value in one.items() if key != "answer"}), flush=True)
    if GPU:
        eager, compiled, captured = (result[name]["runs"] for name in engines)
        result["captured over eager"] = [
            round(a["tokens/s"] / b["tokens/s"], 3) for a, b in zip(captured, eager, strict=True)
        ]
        same = [a["answers"] == b["answers"] for a, b in zip(captured, compiled, strict=True)]
        result["captured equals compiled"] = same
        result["good"] &= all(same)
        print(result["captured over eager"], same, flush=True)
    if GPU and asked.model == "mini":
        result["experts"] = experts()
    return result


def checkpoint(model: str, temporary: Path) -> Path:
    """Return a folder with a configuration, and weights if there are any."""
    if model == "mini":
        (temporary / "config.json").write_text(json.dumps(MINI))
        return temporary
    if (found := shipped.find(model)) is None:
        sys.exit(f"{model} is not shipped here")
    return found


def texts(count: int, vocabulary: int, mask: int) -> list[list[int]]:
    """Return prompts of 100 tokens and a few."""
    from tokenizers import Tokenizer

    found = shipped.find(shipped.DIFFUSION)
    source = inspect.getsource(textwrap)
    ids = Tokenizer.from_file(str(found / "tokenizer.json")).encode(source).ids if found else list(source.encode())
    return [[i % min(vocabulary, mask) for i in ids[100 * n : 100 * n + 100 + n]] for n in range(count)]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine in a process of its own reports."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(job)],
        env={**os.environ, **environment(GPU)},
        capture_output=True,
        text=True,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("REPORT ")), None)
    if line is None:
        sys.exit(f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(line.removeprefix("REPORT "))
    return found


def engine(job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine; generate in every way, with every number of requests at once."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"load_format": "dummy"} if job["dummy"] else {}
    if job["kind"] == "compiled":
        options["compilation_config"] = {"cudagraph_mode": "NONE"}
    if not GPU:
        options |= {"kv_cache_memory_bytes": 64 << 20, "additional_config": {NAME: {"runner_kernels": "torch"}}}
    llm = LLM(
        job["model"], dtype=job["dtype"], max_model_len=2048, max_num_seqs=max(job["requests"]),
        enforce_eager=job["kind"] == "eager", enable_prefix_caching=False, skip_tokenizer_init=True, **options,
    )  # fmt: skip
    core: Any = llm.llm_engine
    runner = core.model_executor.driver_worker.worker.model_runner
    runs = []
    for way in job["ways"]:
        extra = {f"thor_spec_{name}": value for name, value in way.items()}
        params = SamplingParams(
            temperature=0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False, extra_args=extra,
            logprobs=0 if job["scores"] else None,
        )  # fmt: skip
        for count in job["requests"]:
            prompts = [{"prompt_token_ids": ids} for ids in job["prompts"][:count]]
            llm.generate(prompts, params, use_tqdm=False)  # warm
            before, seconds = runner.sampler.count.counts.tolist(), []
            for _ in range(job["repeats"]):
                began = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                seconds.append(time.perf_counter() - began)
            spent = [b - a for a, b in zip(before, runner.sampler.count.counts.tolist(), strict=True)]
            runs.append(report(way, count, job, seconds, spent, outputs))
    return {"runs": runs}


def report(
    way: dict[str, Any], count: int, job: dict[str, Any], seconds: list[float], spent: list[int], outputs: list[Any]
) -> dict[str, Any]:
    """Return the figures of one way and number of requests."""
    median = statistics.median(seconds)
    forwards, blocks, tokens, _, edits = (number / job["repeats"] for number in spent)
    scores = [
        step[token].logprob
        for output in outputs
        if output.outputs[0].logprobs
        for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]
    return {
        "way": way,
        "requests": count,
        "tokens/s": round(count * job["tokens"] / median, 2),
        "seconds": [round(s, 4) for s in seconds],
        "tokens a forward": round(tokens / forwards, 3),
        "forwards a block": round(forwards / blocks, 3),
        "edits": edits,
        "ms a step": round(1000 * median * count / forwards, 4),
        "us a token of a step": round(1e6 * median / forwards / 32, 3),
        **({"mean log probability": round(statistics.fmean(scores), 4)} if scores else {}),
        "first answer": list(outputs[0].outputs[0].token_ids),
        "answers": hashlib.sha256(str([list(o.outputs[0].token_ids) for o in outputs]).encode()).hexdigest(),
    }


def plain(
    folder: Path, config: dict[str, Any], asked: argparse.Namespace, prompt: list[int], ways: Any
) -> list[dict[str, Any]]:
    """Return the plain model's figures, one request at a time, keys and values cached."""
    device, dtype = "cuda" if GPU else "cpu", getattr(torch, asked.dtype)
    if asked.model == "mini":
        dice = torch.Generator(device=device).manual_seed(0)
        tensors = {
            name: torch.randn(shape, device=device, generator=dice, dtype=dtype) * shape[-1] ** -0.5
            for name, shape in layout.tensor_shapes(config)
        }
        model = Dense(config, tensors)
    else:
        model = Dense.load(folder, dtype, device)
    found = []
    for way in ways:
        seconds = []
        for repeat in range(asked.repeats + 1):
            began = time.perf_counter()
            done = decoding.decode(
                model.decoder(), prompt, most=asked.tokens, block=model.block, mask=model.mask,
                settings=Denoising().of_request(way),
            )  # fmt: skip
            if repeat:  # the first one warms
                seconds.append(time.perf_counter() - began)
        found.append(
            {
                "way": way,
                "tokens/s": round(asked.tokens / statistics.median(seconds), 2),
                "tokens a forward": round((done.blocks * model.block - len(prompt) % model.block) / done.forwards, 3),
                "edits": done.edits,
                "answer": done.tokens,
            }
        )
    return found


def experts() -> list[dict[str, float]]:
    """Return the time of one layer's routed experts, by tokens, at vLLM's configuration for them."""
    from thor_spec.tune.space import Problem
    from thor_spec.vllm_plugin.expert_timing import Bench

    bench = Bench(**Problem.of(MINI).as_dict())
    times = {tokens: bench.measure(tokens, {}) for tokens in EXPERT_TOKENS}
    return [{"tokens": n, "us": round(us, 2), "us a token": round(us / n, 3)} for n, us in times.items()]


if __name__ == "__main__":
    main()
