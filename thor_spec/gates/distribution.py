"""Gate: above temperature 0, exact rules draw tokens as the target would.

Each drawn token has a law of its own: the target's distribution after all tokens before it, which the target states
when it is handed the answer as a prompt. Under that law the token at place i has rank r (by falling probability) with
chance p_ir, whatever came before; so over all places the counts of ranks are near ``sum_i p_ir``, with covariance
``sum_i diag(p_i) - p_i p_i^T``, and the squared distance in that metric is a chi-square. A rule that takes drafts too
readily makes the likely ranks too frequent; a broken state makes them too rare.

With ``top_k`` the law is known from that many log-probabilities, at any temperature and of any vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any

from thor_spec.gates import prompts
from thor_spec.gates.gate import Options
from thor_spec.gates.lossless import accepted_drafts, planted
from thor_spec.gates.verdict import Verdict
from thor_spec.serve.client import Forced, Server

NAME = "distribution"
ALPHA = 1e-4
"""Chance of red on an engine that is right. Seeds are fixed, so a verdict repeats."""
TOKENS = 24
PROMPTS = 12
AT_ONCE = 4
TOP_K = 20  # as many log-probabilities as servers give by default
TEMPERATURES = (1.0, 0.6)
BANDS = ((0, 1), (1, 2), (2, 3), (3, 5), (5, 8), (8, TOP_K))
"""Ranks that are counted together, from the likeliest."""
MOST_OUTSIDE = 0.01
"""Share of tokens that ties at the last rank of top_k may put outside."""
RELAXED = {"accept": "threshold", "accept_eps": 0.01}


def law(step: Forced, temperature: float) -> tuple[int | None, list[float]]:
    """Return the drawn token's rank and the chances of all ranks; None for a token that top_k excludes."""
    top = step.top[:TOP_K]
    weights = [math.exp((value - top[0][1]) / temperature) for _, value in top]
    total = sum(weights)
    tokens = [token for token, _ in top]
    return (tokens.index(step.token) if step.token in tokens else None), [weight / total for weight in weights]


def chi_square(places: Sequence[tuple[int, Sequence[float]]]) -> tuple[float, int, list[float], list[float]]:
    """Return statistic, degrees of freedom, observed and expected counts by band, over ranks with their laws."""
    import torch  # here: it takes a second, and most commands judge nothing

    chances = torch.tensor(
        [[sum(masses[first:last]) for first, last in BANDS] for _, masses in places], dtype=torch.float64
    )
    observed = torch.zeros(len(BANDS), dtype=torch.float64)
    for rank, _ in places:
        observed[next(i for i, (first, last) in enumerate(BANDS) if first <= rank < last)] += 1
    expected = chances.sum(0)
    covariance = torch.diag(expected) - chances.T @ chances
    # A band that hardly occurs has no normal count; the last one follows from the others.
    kept = [i for i in range(len(BANDS)) if covariance[i, i] >= 5]
    kept = kept if len(kept) < len(BANDS) else kept[:-1]
    if not kept:
        return 0.0, 0, observed.tolist(), expected.tolist()
    off = (observed - expected)[kept]
    statistic = float(off @ torch.linalg.solve(covariance[kept][:, kept], off))
    return statistic, len(kept), observed.tolist(), expected.tolist()


def upper_tail(statistic: float, degrees: int) -> float:
    """Return the chance of a larger chi-square: the regularized upper incomplete gamma function at half of both."""
    import torch

    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


class Distribution:
    """The gate."""

    name = NAME
    wants_references = False
    wants_caching = False

    def candidate(self, server: Server, options: Options) -> Verdict:
        """Draw answers, hand them back, and test the law of what was drawn."""
        return _judge(server, options)

    def reference(self, name: str, server: Server, state: Verdict, options: Options) -> None:
        """Need none."""

    def verdict(self, state: Verdict, options: Options) -> Verdict:  # noqa: ARG002
        """Return what was concluded."""
        return state


def _judge(server: Server, options: Options) -> Verdict:
    extra: dict[str, Any] = {"thor_spec": RELAXED} if options.control == "relaxed" else planted(options.control)
    figures: dict[str, Any] = {}
    findings = []
    before = accepted_drafts(server)
    for temperature in TEMPERATURES:
        name = f"T={temperature:g}"
        asked = [(prompt, seed) for prompt in prompts.read()[:PROMPTS] for seed in range(options.seeds)]
        pipeline = {"temperature": temperature, "top_k": TOP_K}
        answers = server.drawn_all(asked, at_once=AT_ONCE, max_tokens=TOKENS, **pipeline, **extra)
        # The first token comes from the prompt's own step, which judges no draft.
        steps = [step for forced in server.forced_all(answers, at_once=AT_ONCE, top=TOP_K) for step in forced[1:]]
        laws = [law(step, temperature) for step in steps]
        places = [(rank, masses) for rank, masses in laws if rank is not None]
        statistic, degrees, observed, expected = chi_square(places)
        p = upper_tail(statistic, degrees) if degrees else 0.0
        outside = len(laws) - len(places)
        figures[name] = {
            "tokens": len(laws),
            "chi_square": round(statistic, 2),
            "degrees": degrees,
            "p": p,
            "observed_by_rank": [round(count) for count in observed],
            "expected_by_rank": [round(count, 1) for count in expected],
            "outside_top_k": outside,
        }
        options.say(f"{name}: chi-square {statistic:.1f} on {degrees} degrees, p {p:.2g}, {outside} outside top_k")
        if not degrees:
            findings.append(
                f"{name}: nothing was tested: {len(laws)} tokens left no degree of freedom, because the target is too "
                "certain or there were too few. Ask more with --seeds."
            )
        elif p < ALPHA:
            findings.append(
                f"wrong: {name}: {len(laws)} tokens are not drawn from the target's law: chi-square {statistic:.1f} on "
                f"{degrees} degrees, p {p:.1g} < {ALPHA:g}"
            )
        if outside > len(laws) * MOST_OUTSIDE:
            findings.append(f"wrong: {name}: {outside} of {len(laws)} tokens are none of the {TOP_K} likeliest")
    figures["accepted_drafts"] = accepted = accepted_drafts(server) - before
    if not accepted:
        findings.append("wrong: no draft was accepted, so nothing was tested")
    shown = ", ".join(f"T={t:g} p {figures[f'T={t:g}']['p']:.2g}" for t in TEMPERATURES)
    summary = f"{2 * len(asked)} answers, {shown} (red below {ALPHA:g})"
    return Verdict(gate=NAME, passed=not findings, summary=summary, figures=figures, findings=tuple(findings))
