"""What each rope type does to nano-hybrid at 1, 2, 4 and 8 times its native context, and a record of it.

    python benchmarks/rope_study.py --out out/rope --corpus /usr/lib/python3.11

Perplexity by distance and needles by depth, every type beside the `default` control on the same tokens; then whether
`default` through the plugin is as fast as vLLM without it, turn about in one run. An interrupted study goes on where it
was. Verdicts on two hypotheses: H7, a rope type helps beyond the native context (far perplexity below the control's,
the 95 % interval of the ratio below 1); H8, identity beyond native finds far needles, and more of them than the control
does (exact McNemar test). Speed says something on a GPU alone: without one, vLLM's own kernels are interpreted.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_process import Engine, serve, share_processors
from quiet import Machine
from record import paired_ratio, write

from thor_spec import record as records
from thor_spec.bench import dummy
from thor_spec.bench.turns import turns
from thor_spec.config import resolve
from thor_spec.eval import niah, perplexity, plots, study
from thor_spec.eval.run import ask
from thor_spec.nano import shipped
from thor_spec.serve.plan import make_plan
from thor_spec.sizes import parse_size
from thor_spec.vllm_plugin import compat, scoring

TYPES = ("yarn", "longrope", "linear", "identity_beyond_native", "nope")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROUNDS = 5
CACHE_BYTES = 2 << 30
PROMPT, ANSWER = 2048, 128  # tokens of a request whose speed is measured; each answer has one that the prompt gives


def main() -> None:
    options = parse()
    if options.speed is not None:
        serve(speeds(options.speed, options.at_once))
    found: dict[str, Any] = {"ppl": {}, "niah": {}}
    for factor in options.factors:
        length = int(options.native * factor)
        common = {
            "model": options.model,
            "ropes": TYPES,
            "native": options.native,
            "factor": float(factor),
            "lengths": [length],
            "corpus": options.corpus,
            "seed": options.seed,
            # Prompts are not captured anyway.
            "options": {"vllm_args": ("--enforce-eager",), "kv_cache_memory": CACHE_BYTES},
            "tell": lambda line: print(line, file=sys.stderr, flush=True),
        }
        where = options.out / f"{factor:g}x"
        texts = study.Study(**common, samples=options.samples, out=where / "ppl")
        needles = study.Study(**common, samples=options.needles, out=where / "niah")
        if {"ppl", "niah"} <= set(options.parts):
            ask_at_once(texts, needles, where, choice=options.choice)
        if "ppl" in options.parts:
            found["ppl"][f"{factor:g}"] = content_of(study.ppl(texts))["summary"]
        if "niah" in options.parts:
            path = study.needles(needles, DEPTHS, choice=options.choice)
            found["niah"][f"{factor:g}"] = content_of(path)["summary"]["by_length"]
    if "speed" in options.parts:
        found["speed"] = speed(options)
    found["verdicts"] = verdicts(found)
    print(json.dumps(found["verdicts"], indent=1))
    corpus = Path(options.corpus).name
    facts = {"model": options.model, "native": options.native, "corpus": corpus, "samples": options.samples}
    print(
        write(
            "rope-study",
            {**facts, "needles": options.needles, "choice": options.choice, **found},
            seeds={"texts": options.seed},
        )
    )


def ask_at_once(texts: study.Study, needles: study.Study, where: Path, *, choice: bool) -> None:
    """Ask what both want of one engine for each type, and lay the answers where both look for them."""
    arms = texts.arms()
    tokenizer = texts.tokenizer(arms)
    hidden = niah.needles(tokenizer, needles.corpus, needles.lengths, DEPTHS, needles.samples, needles.seed)
    requests = [
        *perplexity.requests(texts.corpus, tokenizer, texts.lengths, texts.samples, texts.seed),
        *niah.requests(hidden, tokenizer, choice=choice),
    ]
    ask(arms, requests, where / "asked", tell=texts.tell)
    for each in (texts, needles):
        shutil.copytree(where / "asked" / "arms", each.out / "arms", dirs_exist_ok=True)


def content_of(path: Path) -> Any:
    """Return a record's content, its plots drawn beside it where matplotlib is."""
    content = records.read(path).content
    try:
        plots.save(content, path.parent)
    except Exception as error:  # noqa: BLE001  # a picture is not worth a study
        print(f"no plots: {error}", file=sys.stderr)
    return content


def verdicts(found: Any) -> dict[str, Any]:
    """Return, by hypothesis, type and factor, what the figures say."""
    said: dict[str, Any] = {"H7": {}, "H8": {}}
    for factor, arms in found["ppl"].items():
        for arm, lengths in arms.items():
            (row,) = lengths.values()
            if arm != study.CONTROL and row["far"]:
                said["H7"].setdefault(arm, {})[factor] = helps(row["far"]["ratio"], row["far"]["ratio95"])
    for factor, arms in found["niah"].items():
        (control,), (ours,) = arms[study.CONTROL], arms["identity_beyond_native"]
        better = ours["p"] < 0.05 and ours["only_this"] > ours["only_control"]
        said["H8"][factor] = (
            f"{ours['hits']}/{ours['n']} found, control {control['hits']}/{control['n']}: "
            f"{'more than' if better else 'not more than'} the control (p = {ours['p']:.3g})"
        )
    return said


def helps(ratio: float, bounds: list[float] | None) -> str:
    """Return what a far perplexity's ratio to the control's says."""
    if bounds is None:
        return f"undecided: {ratio:.3f}, too few blocks for an interval"
    word = "helps" if bounds[1] < 1 else "hurts" if bounds[0] > 1 else "undecided"
    return f"{word}: {ratio:.3f} ({bounds[0]:.3f} to {bounds[1]:.3f})"


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of vLLM without the plugin and of ``default`` through it, in pairs, turn about."""
    runs: dict[str, list[dict[str, float]]] = {"stock": [], "default": []}
    machine = Machine()
    share_processors()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = of_real_dims(options.layers, Path(folder)) if options.layers else {"model": options.model}
        engines = {}
        for arm in runs:
            flags = {**model, "draft": "none", "max_seqs": options.at_once, "kv_cache_memory": options.kv_cache_memory}
            plan = make_plan(resolve(flags | ({"rope": "default"} if arm == "default" else {})))
            argv, variables = scoring.engine_flags(plan.argv), plan.child_environment()
            if arm == "stock":
                variables["VLLM_PLUGINS"] = ""
                at = argv.index("--additional-config") + 1
                argv[at] = json.dumps({k: v for k, v in json.loads(argv[at]).items() if k != "thor_spec"})
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            asked = ("--speed", json.dumps(argv), "--at-once", str(options.at_once))
            process = Engine(*asked, what=arm, log=Path(folder) / arm, over=variables)
            engines[arm] = stack.enter_context(process)
        for process in engines.values():
            process.ready()
        stack.enter_context(machine.alone())
        for turn, arm in turns(runs, options.rounds + 1):  # the first warms up
            found = engines[arm].ask(turn)
            if turn:
                runs[arm].append(found)
            print(f"speed {turn}/{options.rounds} {arm}: {found}", file=sys.stderr, flush=True)
    return {
        "runs": runs,
        **{
            what: paired_ratio([run[what] for run in runs["default"]], [run[what] for run in runs["stock"]])
            for what in ("prefill_tok_s", "decode_tok_s", "tok_s")
        },
    }


def of_real_dims(layers: int, folder: Path) -> dict[str, Any]:
    """Return the options of a model with the first layers of Qwen3.5-35B-A3B's dimensions and random weights."""
    target, _ = dummy.make("qwen3.5-35b-a3b", folder)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    config["layer_types"] = config["layer_types"][:layers]
    path.write_text(json.dumps(config), encoding="utf-8")
    return {"model": str(target), "dummy_weights": True, "context": 8192}


def speeds(argv: list[str], at_once: int) -> Callable[[int], dict[str, float]]:
    """Start an engine; return what measures it: so many prompts at once, each continued.

    Of fewer than 16, the median of five.
    """
    arguments = compat.ENGINE_ARGUMENTS.resolve()
    parser = arguments.__self__.add_cli_args(compat.ARGUMENT_PARSER.resolve()())
    engine = compat.OFFLINE_ENGINE.resolve()(arguments(parser.parse_args([*argv, "--no-enable-prefix-caching"])))
    params = compat.SAMPLING_PARAMS.resolve()
    times = 1 if at_once >= 16 else 5

    def seconds(first: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [300 + (7 * i + n) % 3000 for i in range(PROMPT)]}
            for n in range(first, first + at_once)
        ]
        settings = params(max_tokens=tokens, temperature=0, ignore_eos=True)
        began = time.perf_counter()
        engine.generate(prompts, settings, use_tqdm=False)
        return time.perf_counter() - began

    def measure(turn: int) -> dict[str, float]:
        first, whole = (
            statistics.median(seconds(5 * turn + n * at_once, tokens) for n in range(times))
            for tokens in (1, ANSWER + 1)
        )
        return {
            "prefill_tok_s": PROMPT * at_once / first,
            "decode_tok_s": ANSWER * at_once / (whole - first),
            "tok_s": (PROMPT + ANSWER + 1) * at_once / whole,
        }

    return measure


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(shipped.find(shipped.TARGET)))
    parser.add_argument("--native", type=int, default=8192)
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parts", nargs="+", default=["ppl", "niah", "speed"], choices=["ppl", "niah", "speed"])
    parser.add_argument("--corpus", default="synthetic", help="text, jsonl, parquet, or a folder of them")
    parser.add_argument("--samples", type=int, default=8, help="texts of each length")
    parser.add_argument("--needles", type=int, default=16, help="needles at each depth")
    parser.add_argument("--choice", action="store_true", help="needles by likelihood: for models that cannot answer")
    parser.add_argument(
        "--layers", type=int, help="speed with so many of Qwen3.5-35B-A3B's: nano-hybrid's steps are the host's time"
    )
    parser.add_argument("--at-once", type=int, default=1, help="requests of the speeds")
    parser.add_argument("--kv-cache-memory", type=parse_size, default=CACHE_BYTES, help="of the speeds")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns in which the speeds are compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/rope"))
    parser.add_argument("--speed", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
