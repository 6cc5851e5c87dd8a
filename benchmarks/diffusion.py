"""LLaDA2 served against the plain torch model with its cache, captured against eager, and steps against their tokens.

    python benchmarks/diffusion.py [--model nano-llada|mini] [--requests 1 8] [--tokens 256] [--sweep] [--smoke]
    python benchmarks/diffusion.py --prompts 50   # and compares so many answers with the plain model's, token by token

Every engine runs in a process of its own; all wait side by side and are measured turn about, the plain model among
them. Fails when captured answers differ from those of the same compiled code without graphs, or, on a CPU, where
float32 is exact enough, when any differs from the plain model's. ``mini`` has LLaDA2.1-mini's dims and made-up weights,
eager and captured only: no threshold is ever passed, so ``max_denoise_steps`` says how many tokens a forward fills.
"""

import argparse
import hashlib
import inspect
import json
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from engine_process import Engine, runner_of, serve, share_processors
from quiet import Machine
from record import paired_ratio, write

from thor_spec.bench.turns import turns
from thor_spec.device import cuda
from thor_spec.diffusion import decoding, layout
from thor_spec.diffusion.dense import Dense
from thor_spec.diffusion.settings import Denoising
from thor_spec.nano import shipped
from thor_spec.vllm_plugin.options import NAME

Runs = dict[str, list[dict[str, Any]]]
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
ALONE = tuple({"threshold": 1.0, "edit_threshold": 1.0, "max_denoise_steps": steps} for steps in (32, 8, 2))
MODES: tuple[dict[str, Any], ...] = ({"mode": "quality"}, {"mode": "speed"}, {"mode": "2.0"})
SWEEP = tuple({"threshold": t, "edit_threshold": e} for t in (0.3, 0.5, 0.7, 0.9, 0.95) for e in (0.0, 0.5, 1.0))
# Triton multiplies float32 as TF32 unless told otherwise, and torch does not: answers could differ by that alone.
FULL_PRECISION = {"TRITON_F32_DEFAULT": "ieee"}
CHECKED = 64  # tokens of answers that are compared with the plain model's
EXPERT_TOKENS = (1, 8, 16, 32, 64, 128, 256)
GPU = cuda.probe() is not None


def main() -> None:
    """Run what was asked for, write the record."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["nano-llada", "mini"], default="nano-llada")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=0, help="answers to compare with the plain model's")
    parser.add_argument("--dtype", help="default: float32 for nano-llada, bfloat16 for mini")
    parser.add_argument("--attention-backend", help="vLLM's name; default: its choice")
    parser.add_argument("--sweep", action="store_true", help="thresholds, with quality beside speed")
    parser.add_argument("--smoke", action="store_true", help="few tokens, for a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        serve(engine(json.loads(asked.child)))
    if asked.smoke:
        asked.requests, asked.tokens, asked.repeats = [1, 2], 40, 1
    share_processors()
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
    job = {
        "model": str(folder), "dtype": asked.dtype, "dummy": asked.model == "mini",
        "most": max(asked.requests), "scores": asked.sweep, "attention": asked.attention_backend,
    }  # fmt: skip
    real = asked.model == "nano-llada"
    names = ("eager", *(("compiled",) if real else ()), "captured") if GPU else ("eager",)
    result: dict[str, Any] = {"asked": vars(asked), "good": True, "cells": []}
    machine = Machine()
    with ExitStack() as stack:
        children = {
            name: stack.enter_context(
                Engine(
                    "--child",
                    json.dumps({**job, "kind": name}),
                    what=name,
                    log=temporary / f"{name}.log",
                    environment=FULL_PRECISION if asked.dtype == "float32" else None,
                )
            )
            for name in names
        }
        engines: dict[str, Callable[[Any], dict[str, Any]]] = {name: child.ask for name, child in children.items()}
        alone = {"plain torch": plain(folder, asked)} if real else {}
        if real and asked.prompts:
            result["like the plain model"] = alike(engines, alone["plain torch"], asked, config)
        for child in children.values():
            child.ready()
        stack.enter_context(machine.alone())
        for way in SWEEP if asked.sweep else MODES if real else ALONE:
            for count in asked.requests:
                question = {"way": way, "prompts": prompts[:count], "tokens": asked.tokens, "together": True}
                runs = turn_about({**engines, **(alone if count == 1 else {})}, question, asked.repeats)
                cell = {"way": way, "requests": count, **compared(runs, count, asked.tokens)}
                result["cells"].append(cell)
                result["good"] &= all(cell["equal"].values())
                print(json.dumps(cell), flush=True)
        if GPU and not real:
            result["experts"] = experts()
    return result


def turn_about(sides: dict[str, Callable[[Any], dict[str, Any]]], question: Any, repeats: int) -> Runs:
    """Return what each side answered, repeat by repeat; the first one warms and is left out."""
    runs: Runs = {name: [] for name in sides}
    for number, name in turns(sides, repeats + 1):
        found = sides[name](question)
        if number:
            runs[name].append(found)
    return runs


def alike(
    engines: dict[str, Callable[[Any], dict[str, Any]]],
    theirs: Callable[[Any], dict[str, Any]],
    asked: argparse.Namespace,
    config: dict[str, Any],
) -> list[dict[str, Any]]:
    """Return, by way and engine, how many answers are the plain model's, asked alone and all at once."""
    prompts, found = texts(asked.prompts, config["vocab_size"], layout.mask_of(config)), []
    for way in MODES:
        question = {"way": way, "prompts": prompts, "tokens": CHECKED, "together": False}
        wanted = theirs(question)
        for name, ask in engines.items():
            row = {"way": way, "engine": name, "answers": len(prompts), "edits": wanted["edits"]}
            for how, together in (("alone", False), ("together", True)):
                got = ask({**question, "together": together})
                same = [a == b for a, b in zip(got["answers"], wanted["answers"], strict=True)]
                row |= {how: sum(same), f"edits {how}": got["edits"]}
            found.append(row)
            print(json.dumps(row), flush=True)
    return found


def compared(runs: Runs, count: int, tokens: int) -> dict[str, Any]:
    """Return speeds, what is equal, and time against the other sides, pair by pair."""
    seconds = {name: [run["seconds"] for run in of] for name, of in runs.items()}
    sides = {
        name: {
            "tokens/s": round(count * tokens / statistics.median(seconds[name]), 2),
            "seconds": [round(s, 4) for s in seconds[name]],
            **{key: value for key, value in of[-1].items() if key not in ("seconds", "answers")},
            "ms a step": round(1000 * statistics.median(seconds[name]) * count / of[-1]["forwards"], 4),
        }
        for name, of in runs.items()
    }
    first = {name: of[-1]["answers"] for name, of in runs.items()}
    equal, ratios = {}, {}
    if GPU:
        if "compiled" in first:
            equal["captured, compiled"] = first["captured"] == first["compiled"]
        ratios["captured over eager"] = paired_ratio(seconds["eager"], seconds["captured"])
    if "plain torch" in first:
        best = "captured" if GPU else "eager"
        ratios[f"{best} over plain torch"] = paired_ratio(seconds["plain torch"], seconds[best])
        alike = sum(a == b for a, b in zip(first[best][0], first["plain torch"][0], strict=True))
        sides["plain torch"][f"tokens equal, {best}"] = alike
        if not GPU:
            equal["eager, plain torch"] = alike == tokens
    return {"sides": sides, "speed": ratios, "equal": equal, "answers": hashlib.sha256(str(first).encode()).hexdigest()}


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
    source = inspect.getsource(textwrap) + inspect.getsource(argparse)
    ids = Tokenizer.from_file(str(found / "tokenizer.json")).encode(source).ids if found else list(source.encode())
    return [[i % min(vocabulary, mask) for i in ids[100 * n : 100 * n + 100 + n]] for n in range(count)]


def engine(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """Start an engine; return what generates in a way, with a number of requests at once."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"load_format": "dummy"} if job["dummy"] else {}
    if job["kind"] == "compiled":
        options["compilation_config"] = {"cudagraph_mode": "NONE"}
    if not GPU:
        options["additional_config"] = {NAME: {"runner_kernels": "torch"}}
    llm = LLM(
        job["model"], dtype=job["dtype"], max_model_len=2048, max_num_seqs=job["most"],
        enforce_eager=job["kind"] == "eager", enable_prefix_caching=False, skip_tokenizer_init=True,
        gpu_memory_utilization=0.05, kv_cache_memory_bytes=(1024 if GPU else 64) << 20,
        attention_backend=job["attention"], **options,
    )  # fmt: skip
    counted = runner_of(llm).sampler.count.counts

    def generate(question: Any) -> dict[str, Any]:
        extra = {f"thor_spec_{name}": value for name, value in question["way"].items()}
        params = SamplingParams(
            temperature=0, max_tokens=question["tokens"], ignore_eos=True, detokenize=False, extra_args=extra,
            logprobs=0 if job["scores"] else None,
        )  # fmt: skip
        prompts = [{"prompt_token_ids": ids} for ids in question["prompts"]]
        at_once = [prompts] if question["together"] else [[prompt] for prompt in prompts]
        before, began = counted.tolist(), time.perf_counter()
        outputs = [output for some in at_once for output in llm.generate(some, params, use_tqdm=False)]
        seconds = time.perf_counter() - began
        forwards, blocks, tokens, _, edits = (b - a for a, b in zip(before, counted.tolist(), strict=True))
        scores = [
            step[token].logprob
            for output in outputs
            if output.outputs[0].logprobs
            for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
        ]
        return {
            "seconds": seconds,
            "forwards": forwards,
            "tokens a forward": round(tokens / forwards, 3),
            "forwards a block": round(forwards / blocks, 3),
            "edits": edits,
            **({"mean log probability": round(statistics.fmean(scores), 4)} if scores else {}),
            "answers": [list(output.outputs[0].token_ids) for output in outputs],
        }

    return generate


def plain(folder: Path, asked: argparse.Namespace) -> Callable[[Any], dict[str, Any]]:
    """Return what generates with the plain model, one request after the other, keys and values cached."""
    model = Dense.load(folder, getattr(torch, asked.dtype), "cuda" if GPU else "cpu")

    def generate(question: Any) -> dict[str, Any]:
        began = time.perf_counter()
        done = [
            decoding.decode(
                model.decoder(), prompt, most=question["tokens"], block=model.block, mask=model.mask,
                settings=Denoising().of_request(question["way"]),
            )
            for prompt in question["prompts"]
        ]  # fmt: skip
        forwards, blocks = sum(one.forwards for one in done), sum(one.blocks for one in done)
        filled = blocks * model.block - sum(len(prompt) % model.block for prompt in question["prompts"])
        return {
            "seconds": time.perf_counter() - began,
            "forwards": forwards,
            "tokens a forward": round(filled / forwards, 3),
            "edits": sum(one.edits for one in done),
            "answers": [one.tokens for one in done],
        }

    return generate


def experts() -> list[dict[str, float]]:
    """Return the time of one layer's routed experts, by tokens, at vLLM's configuration for them."""
    from thor_spec.tune.space import Problem
    from thor_spec.vllm_plugin.expert_timing import Bench

    bench = Bench(**Problem.of(MINI).as_dict())
    times = {tokens: bench.measure(tokens, {}) for tokens in EXPERT_TOKENS}
    return [{"tokens": n, "us": round(us, 2), "us a token": round(us / n, 3)} for n, us in times.items()]


if __name__ == "__main__":
    main()
