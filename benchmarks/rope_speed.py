"""Whether ``default`` through the plugin is as fast as vLLM without it: two engines, turn about, in one run.

    python benchmarks/rope_speed.py --rounds 41

As many layers of Qwen3.5-35B-A3B's dimensions, with random weights, as fit twice, and the steps of many requests: then
the device decides. A step of a dozen layers, or of one request, is the host's time, and that differs by a tenth from
turn to turn. Decoding is measured behind short prompts: behind long ones the first to finish would decode beside the
others' prompts. And it is long, so that how a turn begins does not matter.
Without a GPU the ratio says nothing: what vLLM has no CPU code for, the engine without our plugin interprets.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_process import Engine, decoding_in_graphs, serve, share_processors
from quiet import Machine
from record import paired_ratio, summary, write

from thor_spec.bench import dummy
from thor_spec.bench.turns import turns
from thor_spec.config import resolve
from thor_spec.serve.plan import make_plan
from thor_spec.sizes import parse_size
from thor_spec.vllm_plugin import compat, scoring
from thor_spec.vllm_plugin.seam import has_gpu_build

ARMS = ("stock", "default")
LIMIT = 0.99
SHORT = 16  # tokens of the prompts behind which decoding is measured


def main() -> None:
    options = parse()
    if options.engine is not None:
        serve(measured(options.engine, options))
    runs: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    machine = Machine()
    share_processors()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        argv = {arm: flags(options, arm, Path(folder)) for arm in ARMS}
        engines = {
            arm: stack.enter_context(
                Engine(
                    "--engine", json.dumps(argv[arm][0]), what=arm, log=Path(folder, f"{arm}.log"), over=argv[arm][1]
                )
            )
            for arm in ARMS
        }
        for engine in engines.values():
            engine.ready()
        stack.enter_context(machine.alone())
        for turn, arm in turns(ARMS, options.rounds + 1):  # the first warms up
            found = engines[arm].ask(turn)
            if turn:
                runs[arm].append(found)
            print(f"{turn}/{options.rounds} {arm}: {found}", file=sys.stderr, flush=True)
    what = ("prefill_tok_s", "decode_tok_s")
    ratios = {each: paired_ratio(*([run[each] for run in runs[arm]] for arm in reversed(ARMS))) for each in what}
    tokens_s = {arm: {each: summary([run[each] for run in runs[arm]]) for each in what} for arm in ARMS}
    print(json.dumps({"limit": LIMIT, "default over stock": ratios, "tokens a second": tokens_s}, indent=1))
    asked = {key: value for key, value in vars(options).items() if key != "engine"}
    print(write("rope-speed", {"options": asked, "limit": LIMIT, "ratios": ratios, "summary": tokens_s, "runs": runs}))


def flags(options: argparse.Namespace, arm: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the engine's flags and what it needs in its environment; ``stock`` is without the plugin."""
    settings: dict[str, Any] = {
        **(of_real_dims(options.layers, folder / arm) if options.model is None else {"model": options.model}),
        "draft": "none",
        "context": 4096,
        "max_seqs": options.at_once,
        "kv_cache_memory": options.kv_cache_memory,
    }
    if has_gpu_build():  # what would be compiled is the same in both, and takes minutes
        settings["vllm_args"] = ("--compilation-config", json.dumps(decoding_in_graphs([options.at_once])))
    plan = make_plan(resolve(settings | ({"rope": "default"} if arm == "default" else {})))
    argv, variables = [*scoring.engine_flags(plan.argv), "--no-enable-prefix-caching"], plan.child_environment()
    if arm == "stock":
        variables["VLLM_PLUGINS"] = ""
        at = argv.index("--additional-config") + 1
        argv[at] = json.dumps({key: value for key, value in json.loads(argv[at]).items() if key != "thor_spec"})
    return argv, variables | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def of_real_dims(layers: int, folder: Path) -> dict[str, Any]:
    """Return the options of a model with the first layers of Qwen3.5-35B-A3B's dimensions and random weights."""
    target, _ = dummy.make("qwen3.5-35b-a3b", folder)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    config["layer_types"] = config["layer_types"][:layers]
    path.write_text(json.dumps(config), encoding="utf-8")
    return {"model": str(target), "dummy_weights": True}


def measured(argv: list[str], options: argparse.Namespace) -> Callable[[int], dict[str, float]]:
    """Start an engine; return what measures one turn: tokens a second of prompts, and of decoding alone."""
    engine = scoring.offline(argv)
    params = compat.SAMPLING_PARAMS.resolve()

    def seconds(turn: int, prompt: int, tokens: int) -> float:
        first = turn * options.at_once
        prompts = [
            {"prompt_token_ids": [300 + (7 * i + n) % 3000 for i in range(prompt)]}
            for n in range(first, first + options.at_once)
        ]
        settings = params(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate(prompts, settings, use_tqdm=False)
        return time.perf_counter() - began

    def measure(turn: int) -> dict[str, float]:
        whole, first = (seconds(turn, SHORT, tokens) for tokens in (options.steps + 1, 1))
        return {
            "prefill_tok_s": options.prompt * options.at_once / seconds(turn, options.prompt, 1),
            "decode_tok_s": options.steps * options.at_once / (whole - first),
        }

    return measure


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="of Qwen3.5-35B-A3B's; two engines of 61 GiB at 30")
    parser.add_argument("--model", help="instead: a checkpoint")
    parser.add_argument("--at-once", type=int, default=64, help="requests")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt whose speed is measured")
    parser.add_argument("--steps", type=int, default=256, help="of decoding, of each request")
    parser.add_argument("--kv-cache-memory", type=parse_size, default=8 << 30)
    parser.add_argument("--rounds", type=int, default=41, help="turns of both")
    parser.add_argument("--engine", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
