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
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import paired_ratio, write

from thor_spec import record as records
from thor_spec.config import resolve
from thor_spec.eval import plots, study
from thor_spec.nano import shipped
from thor_spec.serve.plan import make_plan
from thor_spec.vllm_plugin import scoring

TYPES = ("yarn", "longrope", "linear", "identity_beyond_native", "nope")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROUNDS = 5


def main() -> None:
    options = parse()
    if options.speed is not None:
        print(json.dumps(measured(options.speed)))
        return
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
            "tell": lambda line: print(line, file=sys.stderr, flush=True),
        }
        where = options.out / f"{factor:g}x"
        if "ppl" in options.parts:
            path = study.ppl(study.Study(**common, samples=options.samples, out=where / "ppl"))
            found["ppl"][f"{factor:g}"] = content_of(path)["summary"]
        if "niah" in options.parts:
            path = study.needles(
                study.Study(**common, samples=options.needles, out=where / "niah"), DEPTHS, choice=options.choice
            )
            found["niah"][f"{factor:g}"] = content_of(path)["summary"]["by_length"]
    if "speed" in options.parts:
        found["speed"] = speed(options)
    found["verdicts"] = verdicts(found)
    print(json.dumps(found["verdicts"], indent=1))
    facts = {"model": options.model, "native": options.native, "corpus": options.corpus, "samples": options.samples}
    print(
        write(
            "rope-study",
            {**facts, "needles": options.needles, "choice": options.choice, **found},
            seeds={"texts": options.seed},
        )
    )


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
    plain = make_plan(resolve({"model": options.model, "draft": "none", "max_seqs": 1}))
    roped = make_plan(resolve({"model": options.model, "draft": "none", "max_seqs": 1, "rope": "default"}))
    speeds: dict[str, list[dict[str, float]]] = {"stock": [], "default": []}
    for turn in range(options.rounds):
        for arm in ("stock", "default") if turn % 2 == 0 else ("default", "stock"):
            plan = roped if arm == "default" else plain
            argv = scoring.engine_flags(plan.argv)
            variables = plan.child_environment()
            if arm == "stock":
                variables["VLLM_PLUGINS"] = ""
                at = argv.index("--additional-config") + 1
                argv[at] = json.dumps({k: v for k, v in json.loads(argv[at]).items() if k != "thor_spec"})
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            command = [sys.executable, __file__, "--speed", json.dumps(argv)]
            ended = subprocess.run(
                command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
            )
            speeds[arm].append(json.loads(ended.stdout.splitlines()[-1]))
            print(f"speed {turn + 1}/{options.rounds} {arm}: {speeds[arm][-1]}", file=sys.stderr, flush=True)
    return {
        "runs": speeds,
        **{
            what: paired_ratio([run[what] for run in speeds["default"]], [run[what] for run in speeds["stock"]])
            for what in ("prefill_tok_s", "decode_tok_s")
        },
    }


def measured(argv: list[str]) -> dict[str, float]:
    """Return the speed of one engine: the median of five prompts of 4096 tokens, each continued by 128."""
    import statistics

    from thor_spec.vllm_plugin import compat

    arguments = compat.ENGINE_ARGUMENTS.resolve()
    parser = arguments.__self__.add_cli_args(compat.ARGUMENT_PARSER.resolve()())
    engine = compat.OFFLINE_ENGINE.resolve()(arguments(parser.parse_args([*argv, "--no-enable-prefix-caching"])))
    params = compat.SAMPLING_PARAMS.resolve()
    times: dict[int, list[float]] = {1: [], 129: []}
    for turn in range(6):
        for tokens in times:
            prompt = {"prompt_token_ids": [300 + (i * 7 + turn) % 3000 for i in range(4096)]}
            began = time.perf_counter()
            engine.generate([prompt], params(max_tokens=tokens, temperature=0, ignore_eos=True), use_tqdm=False)
            if turn:  # the first warms up
                times[tokens].append(time.perf_counter() - began)
    first, whole = statistics.median(times[1]), statistics.median(times[129])
    return {"prefill_tok_s": 4096 / first, "decode_tok_s": 128 / (whole - first)}


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
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs of engines whose speed is compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/rope"))
    parser.add_argument("--speed", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
