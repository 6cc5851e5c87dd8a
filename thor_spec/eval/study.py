"""Whole evaluations: from a model and its arms to a record."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thor_spec import record
from thor_spec.config import resolve
from thor_spec.errors import ConfigError
from thor_spec.eval import longppl, niah, perplexity, ruler
from thor_spec.eval.run import Answers, Request, ask, keep
from thor_spec.eval.text import Tokenizer
from thor_spec.rope.scheme import ALIASES, NAMES
from thor_spec.serve.plan import Plan, make_plan

CONTROL = "default"
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What all evaluations have in common."""

    model: str
    ropes: Sequence[str]
    """Rope types to compare; ``default`` joins them, first."""
    native: int | None = None
    factor: float | None = None
    """None takes what the longest text needs."""
    lengths: Sequence[int]
    """Lengths of the texts, in tokens."""
    corpus: str
    samples: int
    seed: int = 0
    out: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """More options of ``thor-spec serve``, by field name."""
    tell: Tell = print

    def __post_init__(self) -> None:
        if unknown := [rope for rope in self.ropes if rope not in NAMES]:
            raise ConfigError(f"--rope {unknown[0]} is not one of {', '.join(NAMES)}.")
        if not self.lengths or min(self.lengths) < 64:
            raise ConfigError(f"--length {min(self.lengths, default=0)} must be at least 64 tokens.")
        if self.samples < 1:
            raise ConfigError(f"--samples {self.samples} must be at least 1.")

    def arms(self) -> dict[str, Plan]:
        """Return the engines, by rope type, the control first. Raises: ConfigError, and what ``make_plan`` raises."""
        longest = max(self.lengths)
        native = self.native or _native(self._plan(CONTROL, rope_factor=1.0))
        shape = {"rope_native": native, "rope_factor": self.factor or max(longest / native, 1.0), "context": longest}
        names = dict.fromkeys([CONTROL, *(ALIASES.get(rope, rope) for rope in self.ropes)])
        return {name: self._plan(name, **shape) for name in names}

    def _plan(self, rope: str, **shape: Any) -> Plan:
        arguments = (*self.options.get("vllm_args", ()), "--no-enable-prefix-caching")
        base = {"model": self.model, "draft": "none", "max_seqs": 1, **self.options, "vllm_args": arguments}
        if rope != "longrope":
            base.pop("rope_factors", None)
        return make_plan(resolve({**base, "rope": rope, **shape}), note=self.tell)

    def facts(self, arms: Mapping[str, Plan], answers: Mapping[str, Answers]) -> dict[str, Any]:
        """Return what every record says."""
        return {
            "model": self.model,
            "native": _native(arms[CONTROL]),
            "lengths": list(self.lengths),
            "samples": self.samples,
            "corpus": self.corpus,
            "arms": {
                name: {"asked": plan.as_dict(), "effective": dict(answers[name].rope)} for name, plan in arms.items()
            },
        }

    def tokenizer(self, arms: Mapping[str, Plan]) -> Tokenizer:
        """Return the model's tokenizer."""
        return Tokenizer(arms[CONTROL].target.path)


def _native(plan: Plan) -> int:
    if plan.rope is None:
        raise ConfigError("An arm of an evaluation has no rope type.")
    return plan.rope.native


def ppl(study: Study) -> Path:
    """Evaluate perplexity by distance; return the record."""
    arms = study.arms()
    requests = perplexity.requests(study.corpus, study.tokenizer(arms), study.lengths, study.samples, study.seed)
    answers = ask(arms, requests, study.out, tell=study.tell)
    rows = {
        arm: {
            length: [answer.logprobs(f"ppl-{length}-{sample}") for sample in range(study.samples)]
            for length in study.lengths
        }
        for arm, answer in answers.items()
    }
    facts = study.facts(arms, answers)
    instances = [
        {"id": f"ppl-{length}-{i}", "arm": arm, "tokens": len(row) + 1, "mean_logprob": float(row.mean())}
        for arm, lengths in rows.items()
        for length, texts in lengths.items()
        for i, row in enumerate(texts)
    ]
    return _finish("eval-ppl", study, {**facts, "summary": perplexity.summary(rows, facts["native"])}, instances)


def long_ppl(study: Study, evaluator: str, evaluator_options: Mapping[str, Any]) -> Path:
    """Evaluate LongPPL with the key tokens that ``evaluator`` finds; return the record."""
    if len(study.lengths) != 1:
        raise ConfigError("LongPPL takes one --length.")
    arms = study.arms()
    tokenizer = study.tokenizer(arms)
    (length,) = study.lengths
    texts = list(perplexity.sequences(study.corpus, tokenizer, length - 1, study.samples, study.seed))
    judge = make_plan(
        resolve(
            {
                "model": evaluator,
                "draft": "none",
                "max_seqs": 1,
                **evaluator_options,
                "vllm_args": (*evaluator_options.get("vllm_args", ()), "--no-enable-prefix-caching"),
            }
        ),
        note=study.tell,
    )
    theirs = Tokenizer(judge.target.path)
    judged = [theirs.encode(text) for text, _ in texts]
    if (longest := max(len(encoded.ids) for encoded in judged) + 1) > judge.context:
        raise ConfigError(
            f"A text has {longest} tokens for the evaluator {evaluator}, which takes {judge.context}. Lower --length, "
            "or take an evaluator with a longer context."
        )
    asked = [r for i, encoded in enumerate(judged) for r in longppl.evaluator_requests(i, encoded.ids)]
    found = ask({"evaluator": judge}, asked, study.out / "evaluator", tell=study.tell)["evaluator"]
    keyed: dict[int, list[int]] = {}
    for i, ((text, ids), encoded) in enumerate(zip(texts, judged, strict=True)):
        spans = longppl.merged([encoded.spans[p] for p in longppl.keys(found, i, len(encoded.ids))])
        keyed[i] = longppl.positions(tokenizer.encode(text).spans[: len(ids)], spans)
    answers = ask(
        arms, [Request(id=longppl.full(i), tokens=ids) for i, (_, ids) in enumerate(texts)], study.out, tell=study.tell
    )
    facts = study.facts(arms, answers)
    rows = {arm: {i: answer.logprobs(longppl.full(i)) for i in keyed} for arm, answer in answers.items()}
    content = {
        **facts,
        "evaluator": {"model": evaluator, "is_tested_model": evaluator == study.model, "asked": judge.as_dict()},
        "rule": {"alpha": longppl.ALPHA, "beta": longppl.BETA, "short": longppl.SHORT, "window": longppl.WINDOW},
        "summary": {arm: longppl.score(row, keyed, facts["native"]) for arm, row in rows.items()},
    }
    instances = [
        {
            "id": longppl.full(i),
            "arm": arm,
            **longppl.score({i: row[i]}, {i: keyed[i]}, facts["native"]),
            "keys": keyed[i],
        }
        for arm, row in rows.items()
        for i in keyed
    ]
    return _finish("eval-longppl", study, content, instances)


def needles(study: Study, depths: Sequence[float], *, choice: bool = False) -> Path:
    """Evaluate needles by depth and length, with the control; return the record.

    Args:
        choice: whether the number is likelier than a decoy, in the place of whether it is said; by chance, half are.
    """
    arms = study.arms()
    tokenizer = study.tokenizer(arms)
    asked = niah.needles(tokenizer, study.corpus, study.lengths, depths, study.samples, study.seed)
    answers = ask(arms, niah.requests(asked, tokenizer, choice=choice), study.out, tell=study.tell)
    found = niah.instances(asked, answers, tokenizer, choice=choice)
    facts = {**study.facts(arms, answers), "depths": list(depths), "score": "choice" if choice else "said"}
    content = {**facts, "summary": niah.summary(found)}
    return _finish("eval-niah", study, content, found)


def ruler_tasks(study: Study, names: Sequence[str], qa: Mapping[str, Path]) -> Path:
    """Evaluate RULER's tasks; return the record. Tasks without their questions are named as not executed."""
    arms = study.arms()
    tokenizer = study.tokenizer(arms)
    entries = {name: ruler.read_questions(path) for name, path in qa.items()}
    wanted = list(names) or [name for name in ruler.TASKS if not name.startswith("qa") or name in entries]
    asked = ruler.questions(tokenizer, study.corpus, wanted, study.lengths, study.samples, study.seed, entries)
    answers = ask(arms, ruler.requests(asked), study.out, tell=study.tell)
    found = ruler.instances(asked, answers, tokenizer)
    missing = sorted(set(ruler.TASKS) - set(wanted))
    content = {**study.facts(arms, answers), "not_executed": missing, "summary": ruler.summary(found)}
    return _finish("eval-ruler", study, content, found)


def _finish(name: str, study: Study, content: Mapping[str, Any], instances: Sequence[Mapping[str, Any]]) -> Path:
    """Write the record with its instances beside it, anew if an earlier run wrote one; return its path."""
    lines = "".join(f"{json.dumps(instance)}\n" for instance in instances)
    keep(study.out / "instances.jsonl", lines)
    path = study.out / record.FILE
    path.unlink(missing_ok=True)
    content = {**content, "instances": "instances.jsonl"}
    record.write(name, content, folder=study.out, seeds={"texts": study.seed})
    return path
