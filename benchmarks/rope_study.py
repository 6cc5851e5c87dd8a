"""What each rope type does to nano-hybrid at 1, 2, 4 and 8 times its native context, and a record of it.

    python benchmarks/rope_study.py --out out/rope --corpus /usr/lib/python3.11

Perplexity by distance and needles by depth, every type beside the `default` control on the same tokens. An interrupted
study goes on where it was. Verdicts on two hypotheses: H7, a rope type helps beyond the native context (far perplexity
below the control's, the 95 % interval of the ratio below 1); H8, identity beyond native finds far needles, and more of
them than the control does (exact McNemar test).
"""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from record import write

from thor_spec import record as records
from thor_spec.eval import niah, perplexity, plots, study
from thor_spec.eval.run import ask
from thor_spec.nano import shipped

TYPES = ("yarn", "longrope", "linear", "identity_beyond_native", "nope")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
CACHE_BYTES = 2 << 30


def main() -> None:
    options = parse()
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(shipped.find(shipped.TARGET)))
    parser.add_argument("--native", type=int, default=8192)
    parser.add_argument("--factors", type=float, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--parts", nargs="+", default=["ppl", "niah"], choices=["ppl", "niah"])
    parser.add_argument("--corpus", default="synthetic", help="text, jsonl, parquet, or a folder of them")
    parser.add_argument("--samples", type=int, default=8, help="texts of each length")
    parser.add_argument("--needles", type=int, default=16, help="needles at each depth")
    parser.add_argument("--choice", action="store_true", help="needles by likelihood: for models that cannot answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out/rope"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
