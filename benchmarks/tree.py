"""Draft trees against chains: tokens per step, tokens per second and the cost of a step, side by side in one run.

    python benchmarks/tree.py --pair nano --arms chain:15 tree:auto tree:15 tree:32 tree:63 tree:3x3x3
    python benchmarks/tree.py --dummy --arms chain:15 tree:15 tree:auto chain:12 tree:3x3  # 35B dimensions: costs
    python benchmarks/tree.py --pair tiny --arms chain:7 tree:12,7 --prompts 2 --answer 16      # on a CPU: does it run?

An arm is ``chain:K`` or ``tree:SHAPE``, an engine in a process of its own, captured in graphs unless ``--eager``. All
engines of a pair wait side by side and are measured turn about, ``--rounds`` times, every other time in reverse order,
all on the same processors; with ``--dummy`` only one fits at a time, and drafts are replaced by random tokens: made-up
drafters repeat one token in a chain, which reaches few experts, and vary it in a tree. With trees, the phases of a step
are written as well, and of ``auto`` the numbers of nodes that it chose, and what it takes steps to cost and drafts to
bring. Greedy answers of all arms are compared with those of the first: a difference is a tie of two logits, or a fault,
and ``thor-spec verify lossless`` tells which.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import qwen35
from engine_process import Engine, runner_of, serve, share_processors
from quiet import Machine
from record import paired_ratio, write
from state import steps as steps_of

from thor_spec.bench.turns import turns
from thor_spec.ddtree.shape import TreeShape
from thor_spec.vllm_plugin.counters import PHASES_OF_TREES
from thor_spec.vllm_plugin.options import NAME as PLUGIN

ROOT = Path(__file__).parent.parent
PAIRS = {"tiny": "tiny-hybrid", "nano": "nano-hybrid"}


def main() -> None:
    options = parse()
    if options.one:
        serve(measure(options, options.one))
    share_processors()
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in options.arms}
    together = [[arm] for arm in options.arms] if options.dummy else [options.arms]
    settings = {name: value for name, value in vars(options).items() if name != "one"}
    record: Path | None = None  # written after every turn of all, so that what is cut short keeps what it has
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for arms in together:
            for arm, measured in turn_about(arms, options.rounds, Path(folder)):
                runs[arm].append(measured)
                if len({len(rounds) for rounds in runs.values()}) == 1:
                    found = summary(options, runs)
                    kept = {arm: [without_tokens(turn) for turn in turns] for arm, turns in runs.items()}
                    result = {"settings": settings, "runs": kept, "summary": found}
                    record = write("tree", result, seeds={"sampling": 0}, instead_of=record)
    print(record)
    print(table(found))


def turn_about(arms: list[str], rounds: int, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Start an engine for each arm, all at once; yield what they measure, one at a time."""
    machine = Machine()
    started = time.monotonic()
    with ExitStack() as stack:
        engines = {arm: stack.enter_context(Engine("--one", arm, what=arm, log=folder / f"{arm}.log")) for arm in arms}
        for arm, engine in engines.items():
            engine.ready()
            print(f"{arm}: ready after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        stack.enter_context(machine.alone())
        for number, arm in turns(arms, rounds):
            yield arm, engines[arm].ask()
            print(f"round {number + 1}, {arm}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--arms", nargs="+", default=["chain:15", "tree:auto", "tree:15", "tree:32", "tree:63"])
    parser.add_argument("--pair", choices=list(PAIRS), default="nano")
    parser.add_argument("--dummy", action="store_true", help="random weights with the dimensions of Qwen3.5-35B-A3B")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="requests at once")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--kernel", default="auto", help="gdn_kernel")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--utilization", type=float, help="gpu_memory_utilization of each engine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.utilization = options.utilization or (0.6 if options.dummy else 0.06)
    return options


def engine(options: argparse.Namespace, arm: str, folder: Path) -> Any:
    from vllm import LLM

    from thor_spec.nano import checkpoints, shipped
    from thor_spec.serve.locate import locate
    from thor_spec.vllm_plugin.seam import has_gpu_build

    gpu = has_gpu_build()
    kind, _, shape = arm.partition(":")
    tree = TreeShape.parse(shape) if kind == "tree" else None
    if options.dummy:
        for name, config in (("target", qwen35.target()), ("drafter", qwen35.drafter(5, 8, None))):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        target, draft = str(folder / "target"), str(folder / "drafter")
    else:
        name = PAIRS[options.pair]
        drafter = checkpoints.PAIRS.get(name) or shipped.drafter_of(name)
        target, draft = (str(locate(str(one), print)) for one in (name, drafter))
    ours = {**({} if gpu else {"runner_kernels": "torch"}), "gdn_kernel": options.kernel}
    if tree is not None:
        ours["tree"] = shape
    return LLM(
        target,
        max_model_len=options.context,
        max_num_seqs=max(options.batch, 2),
        skip_tokenizer_init=options.dummy,
        enable_prefix_caching=False,
        enforce_eager=options.eager or not gpu,
        disable_log_stats=False,
        seed=0,
        speculative_config={
            "method": "dflash",
            "model": draft,
            "num_speculative_tokens": tree.nodes if tree is not None else int(shape),
        },
        additional_config={PLUGIN: ours, **({"gdn_prefill_backend": "triton"} if gpu else {})},
        **({"load_format": "dummy"} if options.dummy else {}),
        gpu_memory_utilization=options.utilization,
        # A size that is given is not found by looking at what others take from the GPU at that moment.
        **({} if options.dummy else {"kv_cache_memory_bytes": (1024 if gpu else 256) << 20}),
    )


def measure(options: argparse.Namespace, arm: str) -> Callable[[Any], dict[str, Any]]:
    """Start an engine; return what measures: by temperature, what came out and how long it took."""
    from thor_spec.gates import prompts

    with tempfile.TemporaryDirectory() as folder:
        llm = engine(options, arm, Path(folder))
    if options.dummy:
        draft_at_random(llm)
        asked: list[Any] = [
            {"prompt_token_ids": [(7 * i + j) % 1000 for j in range(128)]} for i in range(options.prompts)
        ]
    else:
        asked = [text for text in (prompts.read() * 9)[: options.prompts]]
    for temperature in options.temperatures:  # warms what only a real step compiles
        answer(llm, asked[: options.batch], temperature, 32, options.batch)

    def answers(_: Any) -> dict[str, Any]:
        found = {f"{t:g}": answer(llm, asked, t, options.answer, options.batch) for t in options.temperatures}
        return found | ({"known": known} if (known := known_of(llm)) else {})

    return answers


def draft_at_random(llm: Any) -> None:
    """Replace what is drafted, in chains and in trees alike."""
    import torch

    speculator = runner_of(llm).speculator
    stock, words = speculator.propose, speculator.vocab_size
    generator = torch.Generator(speculator.device).manual_seed(0)

    def propose(*args: Any, **kwargs: Any) -> Any:
        return stock(*args, **kwargs).random_(0, words, generator=generator)

    speculator.propose = propose


def answer(llm: Any, asked: list[Any], temperature: float, tokens: int, batch: int) -> dict[str, Any]:
    """Send prompts, ``batch`` at once; return tokens per step and per second."""
    from vllm import SamplingParams

    before, counted, seconds, out = steps_of(llm), host_counts(llm), 0.0, []
    for first in range(0, len(asked), batch):
        params = [
            SamplingParams(
                temperature=temperature, seed=first + i, max_tokens=tokens, ignore_eos=True, detokenize=False
            )
            for i in range(len(asked[first : first + batch]))
        ]
        started = time.perf_counter()
        outputs = llm.generate(asked[first : first + batch], params, use_tqdm=False)
        waited = [output.metrics.first_token_latency for output in outputs]
        seconds += time.perf_counter() - started - min(waited)
        out += [list(output.outputs[0].token_ids) for output in outputs]
    steps = steps_of(llm) - before
    since = {name: after - counted[name] for name, after in host_counts(llm).items()}
    count = sum(len(ids) - 1 for ids in out)  # the first token comes from the prompt
    return {
        "tokens_per_step": round(count / steps, 4),
        "tokens_per_s": round(count / seconds, 2),
        "step_ms": round(1e3 * seconds * batch / steps, 4),
        **({"phases_ms": phases(since["phases"])} if "phases" in since else {}),
        **({"budgets": chosen(since["budgets"])} if "budgets" in since else {}),
        "tokens": out,
    }


def trees_of(llm: Any) -> Any:
    return getattr(runner_of(llm).model_state, "trees", None)


def known_of(llm: Any) -> dict[str, Any] | None:
    """Return what ``auto`` takes steps to cost and drafts to bring by now; None for other arms."""
    budget = getattr(trees_of(llm), "budget", None)
    return budget.known() if budget is not None else None


def host_counts(llm: Any) -> dict[str, Any]:
    """Return what an engine with trees has counted so far: nanoseconds by phase, and steps by chosen nodes."""
    if (trees := trees_of(llm)) is None:
        return {}
    found = {"phases": trees.clock.counted.counts.copy()}
    return found | ({"budgets": trees.budget.counted.counts.copy()} if trees.budget is not None else {})


def phases(counts: Any) -> dict[str, float]:
    return {
        name: round(int(total) / 1e6 / max(int(counts[-1]), 1), 4)
        for name, total in zip(PHASES_OF_TREES, counts, strict=False)
    }


def chosen(counts: Any) -> dict[str, int]:
    return {
        f"{shape} {nodes}": int(steps)
        for shape, row in zip(("tree", "chain"), counts, strict=True)
        for nodes, steps in enumerate(row)
        if steps
    }


def summary(options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians, ratios to the first arm, and greedy answers that differ from its."""
    first, found = options.arms[0], {}
    for arm, rounds in runs.items():
        for t in (name for name in rounds[0] if name != "known"):
            of: dict[str, Any] = {
                key: statistics.median(r[t][key] for r in rounds)
                for key in ("tokens_per_step", "tokens_per_s", "step_ms")
            }
            pairs = zip(rounds[0][t]["tokens"], runs[first][0][t]["tokens"], strict=True)
            of |= {
                f"{key}_ratio": paired_ratio([r[t][key] for r in rounds], [r[t][key] for r in runs[first]])
                for key in of
            }
            of["answers_that_differ"] = sum(a != b for a, b in pairs) if t == "0" else None
            found[f"{arm} T={t}"] = of
    return found


def table(found: dict[str, Any]) -> str:
    lines = [f"{'arm':24} {'tok/step':>9} {'tok/s':>9} {'step ms':>9} {'tok/s ratio':>20} {'step ratio':>20} differ"]
    for name, of in found.items():
        lines.append(
            f"{name:24} {of['tokens_per_step']:9.3f} {of['tokens_per_s']:9.1f} {of['step_ms']:9.3f} "
            f"{ratio(of['tokens_per_s_ratio']):>20} {ratio(of['step_ms_ratio']):>20} {of['answers_that_differ']}"
        )
    return "\n".join(lines)


def without_tokens(turn: dict[str, Any]) -> dict[str, Any]:
    return {t: {name: value for name, value in of.items() if name != "tokens"} for t, of in turn.items()}


def ratio(found: dict[str, float]) -> str:
    return f"{found['median']:.3f} ({found['low95']:.3f}-{found['high95']:.3f})"


if __name__ == "__main__":
    main()
