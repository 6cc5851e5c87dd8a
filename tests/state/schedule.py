"""A random schedule of requests for one engine, the same for the same seed whatever the engine keeps.

What happens between steps depends on the seed and on the tokens alone: requests of all lengths and samplings, prompts
that go on where an earlier answer ended, aborts, preemptions of single requests and of all, and drafts cut to any
length.
"""

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from thor_spec.nano.corpus import TEXT

VOCABULARY = 256  # bytes
TOKENS = list(TEXT.encode())


@dataclass
class Ran:
    """What came out."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    drafts: Counter[int] = field(default_factory=Counter)
    """Verified rows by number of drafts."""
    rows: Counter[int] = field(default_factory=Counter)
    """Steps by number of rows."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    seed: int
    steps: int
    """After these, no more requests come, and those there are run to their end."""
    drafts: int
    longest_prompt: int
    shortest_prompt: int = 2
    """vLLM's snapshots are wrong for a prompt of one token beside decodes, so that nothing can equal them there."""
    longest_answer: int
    block_size: int
    """Tokens per state block with prefix caching: prompts then tend to end before a boundary. 0: without."""


def run(engine: Any, schedule: Schedule, after_step: Callable[[], None] = lambda: None) -> Ran:
    """Run ``schedule`` on an in-process ``LLMEngine``; ``after_step`` may look into it."""
    rng, ran = random.Random(schedule.seed), Ran()
    scheduler = engine.engine_core.engine_core.scheduler
    finished: list[list[int]] = []
    prompts: dict[str, list[int]] = {}
    load = 1
    for number in range(10 * schedule.steps):
        waiting = len(scheduler.waiting)
        running = list(scheduler.running)
        if number < schedule.steps:
            if number % 30 == 0:
                load = rng.choice([1, 2, 4, 8, 8])
            for _ in range(min(rng.randint(0, 3), load - len(running) - waiting)):
                name = f"r{ran.counts['requests']:03d}"
                prompts[name] = _prompt(rng, schedule, finished)
                engine.add_request(name, {"prompt_token_ids": prompts[name]}, _sampling(rng, schedule))
                ran.counts["requests"] += 1
            if running and rng.random() < 0.01:
                victim = rng.choice(running).request_id
                engine.abort_request([victim], internal=True)
                ran.counts["aborts"] += 1
            if len(running) > 1 and rng.random() < 0.02:
                _preempt(scheduler, rng.choice(running))
                ran.counts["preemptions"] += 1
        elif not engine.has_unfinished_requests():
            break
        for request in scheduler.running:
            if rng.random() < 0.5:
                request.spec_token_ids = request.spec_token_ids[: rng.randint(0, schedule.drafts)]
        before = {r.request_id: len(r.spec_token_ids) for r in scheduler.running}
        ended = 0
        for output in engine.step():
            ended += output.finished
            answer = output.outputs[0]
            ran.tokens[output.request_id] = list(answer.token_ids)
            ran.logprobs[output.request_id] = [
                {token: entry.logprob for token, entry in place.items()} for place in answer.logprobs or ()
            ]
            if output.finished and answer.finish_reason != "abort":
                finished.append(prompts[output.request_id] + list(answer.token_ids))
            if output.finished and output.num_cached_tokens:
                ran.counts["hits"] += 1
        ran.counts["steps"] += 1
        ran.rows[len(scheduler.running) + ended] += 1
        ran.drafts.update(before.values())
        after_step()
    assert not engine.has_unfinished_requests()
    return ran


def _prompt(rng: random.Random, schedule: Schedule, finished: list[list[int]]) -> list[int]:
    block = schedule.block_size
    read_again = [whole for whole in finished[-16:] if block and len(whole) > block]
    if read_again and rng.random() < 0.5:  # what was written while decoding is read again
        whole = rng.choice(read_again)
        if len(whole) + schedule.longest_answer < 3 * block:
            return whole + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
    length = rng.randint(schedule.shortest_prompt, schedule.longest_prompt)
    if block and rng.random() < 0.7:
        length = block - rng.randint(-1, schedule.longest_answer)
    start = rng.randrange(len(TOKENS))
    return (TOKENS[start:] + TOKENS * (1 + length // len(TOKENS)))[:length]


def _sampling(rng: random.Random, schedule: Schedule) -> Any:
    from vllm import SamplingParams

    greedy = rng.random() < 0.4
    return SamplingParams(
        temperature=0.0 if greedy else rng.choice([0.6, 1.0]),
        top_k=0 if greedy else rng.choice([0, 20]),
        seed=rng.randrange(1 << 30),
        max_tokens=rng.randint(1, schedule.longest_answer),
        ignore_eos=True,
        logprobs=2,
        detokenize=False,
    )


def _preempt(scheduler: Any, request: Any) -> None:
    """Take a running request's blocks away, as the scheduler does when there are too few."""
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
