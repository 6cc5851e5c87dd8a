"""Definition of which drafts relaxed acceptance takes, and how a sampler is told.

Shapes: L rows of logits of all requests together, V vocabulary, S request slots.
"""

import torch

COUNTED = ("drafted", "accepted", "relaxed", "rejected")
"""Drafts judged, taken, and taken because a threshold allowed it; requests that drew another token in a place."""
CERTAIN = 3e38
"""A logit beside which no other counts. Finite, so that differences of logits are."""


def lift(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    eps: torch.Tensor,
    delta: torch.Tensor,
    saved: torch.Tensor,
) -> torch.Tensor:
    """Raise, in place, the logit of every draft d that its row's p takes: ``p(d) >= min(eps, delta exp(-H(p)))``.

    A sampler that accepts d with probability min(1, p(d) / q(d)) then accepts it for sure. All other rows keep their
    distribution, so what is drawn after a rejection, and the token after the last draft, follow p exactly.

    Args:
        logits: after the whole sampling pipeline, temperature included [L, V], float32; ``-inf`` removes a token.
        drafts: ``drafts[i + 1]`` is the draft that row i judges, if both rows are of one request; negative: none [L].
        slots: request slot of each row; a request's rows follow one another [L].
        temperature: 0 marks a greedy request, which is never relaxed [S].
        eps: the highest threshold; 0 or less: no relaxation [S].
        delta: factor of the threshold that falls with the entropy H, in nats; infinite: ``eps`` alone; 0 or less: no
            relaxation [S].
        saved: the raised logits' own values, NaN in rows left alone; written [L], float32.

    Returns: p(d) of each row that was raised, else NaN [L], in the dtype that this is computed in.
    Source: arXiv:2401.10774, whose rule is ``>`` and takes the arg max besides.
    """
    saved.fill_(torch.nan)
    taken = torch.full_like(logits[:, 0], torch.nan)
    for row in range(len(logits) - 1):
        slot, draft = int(slots[row]), int(drafts[row + 1])
        if int(slots[row + 1]) != slot or draft < 0:
            continue
        if temperature[slot] == 0 or not (eps[slot] > 0 and delta[slot] > 0):
            continue
        log_p = logits[row].log_softmax(0)
        entropy = -(log_p.exp() * log_p).nan_to_num(nan=0.0).sum()
        p = log_p[draft].exp()
        if p > 0 and p >= torch.minimum(eps[slot].to(p.dtype), delta[slot].to(p.dtype) * torch.exp(-entropy)):
            taken[row], saved[row] = p, logits[row, draft]
            logits[row, draft] = CERTAIN
    return taken


def settle(
    logits: torch.Tensor,
    drafts: torch.Tensor,
    saved: torch.Tensor,
    cu_rows: torch.Tensor,
    slots: torch.Tensor,
    kinds: torch.Tensor,
    sampled: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    """Undo ``lift``, bit for bit, and count what became of the drafts.

    Args:
        logits, drafts, saved: as ``lift`` left them.
        cu_rows: first row of each request, and the number of rows [R + 1].
        slots: request slot of each request [R].
        kinds: number of each slot's rule [S].
        sampled: tokens that each request emits: its accepted drafts and one more [R].
        counts: added to; per rule, and per place in the draft, what ``COUNTED`` names [rules, 4, K], int64.
    """
    for r in range(len(slots)):
        first, last = int(cu_rows[r]), int(cu_rows[r + 1])
        drafted = 0
        while drafted < last - first - 1 and int(drafts[first + drafted + 1]) >= 0:
            drafted += 1
        accepted = min(int(sampled[r]) - 1, drafted)
        mine = counts[int(kinds[int(slots[r])])]
        mine[0, :drafted] += 1
        mine[1, : max(accepted, 0)] += 1
        for place in range(last - first - 1):
            if not saved[first + place].isnan():
                logits[first + place, int(drafts[first + place + 1])] = saved[first + place]
                mine[2, place] += place < accepted
        if 0 <= accepted < drafted:
            mine[3, accepted] += 1
