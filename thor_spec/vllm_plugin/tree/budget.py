"""``--tree auto``: how many nodes a step verifies, and whether they are a tree or a chain.

Every step drafts the largest tree, and the scheduler makes room for it; a prefix of it is verified, one of the sizes
that graphs were captured for. Nothing waits: what is known are the marginals and the accepted drafts of the last step
whose numbers have arrived, usually the one before the last. Trees are lossless, whatever is chosen.
"""

import copy
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from thor_spec.ddtree.budget import Choice, Trust, blend, choose, tree_or_chain
from thor_spec.ddtree.cost_table import CostTable
from thor_spec.ddtree.shape import TreeShape
from thor_spec.kernels.tree_build.reference import Trees
from thor_spec.kernels.tree_sums import kernel, reference
from thor_spec.vllm_plugin import counters

RING = 4  # steps whose numbers may be on their way
DECIDE = 4  # steps from one decision between trees and chains to the next
TRIALS = 4  # steps after which a size is known
TRY = 8  # steps at least from one that tries a size to the next
LEARNING, WATCHING = 25, 100  # steps for each step's worth that a trial costs: while sizes are unknown, and later


@dataclass(slots=True)
class _News:
    """Numbers of one step on their way to the host; see ``tell``."""

    numbers: torch.Tensor
    arrived: Any
    drafted: "_Drafted"
    verified: "_Verified | None"


@dataclass(frozen=True, slots=True)
class _Drafted:
    number: int
    chain: bool


@dataclass(frozen=True, slots=True)
class _Verified:
    drafted: _Drafted
    nodes: int


class Budget:
    """Decides on the host, from what has arrived."""

    def __init__(self, shape: TreeShape, positions: int, device: torch.device, parallel: Any) -> None:
        self._offer(shape.sizes(positions))
        self.is_ready = False
        """Whether engines are past their warm-up, and steps may be trimmed."""
        self.label: tuple[int, int, int] | None = None
        """Rows, context and nodes of this step, where these say what it costs."""
        self.is_wanted = False
        """Whether to time this step: too little is known of what such ones cost, or it was long ago."""
        self.described = ""
        """What the start-up has measured, in words."""
        self.counted = counters.HostWriter.open((2, shape.nodes + 1), counters.BUDGETS, parallel)
        self._positions, self._nodes = positions, shape.nodes
        self._wait = TRY  # steps until one tries a size
        self._trust = Trust(), Trust()
        self._tree: list[float] = []
        self._chain: list[float] = []
        self._expected: dict[int, list[float]] = {}  # of drafts that were not judged yet, by their number
        self._drafted, self._is_decided = _Drafted(0, chain=True), False
        self._verified: _Verified | None = None
        self._kept: dict[str, tuple[int, int]] = {}
        self._under_way: deque[_News] = deque()
        on_gpu = device.type == "cuda"
        columns = shape.nodes + positions + 2
        self._sums = torch.zeros(columns, device=device)
        self._buffers = [torch.zeros(columns, pin_memory=on_gpu) for _ in range(RING)]
        self._events = [torch.cuda.Event() if on_gpu else None for _ in range(RING)]
        self._told = 0
        self._at = (1, 0)  # rows and context of the last step

    def limit(self, sizes: Collection[int]) -> None:
        """Learn which sizes have graphs: others are dear, and no choice. The largest is vLLM's own, and stays."""
        self._offer(tuple(size for size in self.sizes if size in sizes or size == self._nodes))

    def _offer(self, sizes: tuple[int, ...]) -> None:
        self.sizes, self.table = sizes, CostTable(sizes)
        self._turns, self._trials = deque(sizes), deque(sizes[::-1] * TRIALS)

    def seeded(self, described: str = "") -> None:
        """Learn that the start-up has measured what passes cost: the first steps need not try all sizes out."""
        self._trials.clear()
        self.described = described

    def draft(self) -> bool:
        """Return whether the coming drafts are to be chains."""
        self._listen()
        number, chain = self._drafted.number + 1, self._drafted.chain
        if not self._is_decided or number % DECIDE == 0:  # costs the host more than it can change in between
            chain = not self._tree or self._better().chain
            self._is_decided = bool(self._tree)
        self._drafted = _Drafted(number, chain=chain)
        return chain

    def _better(self) -> Choice:
        trust = self._trust[0].ratio, self._trust[1].ratio
        return tree_or_chain(self._tree, self._chain, self.table.at(*self._at), trust=trust, fewest=self.sizes[0])

    def tell(self, trees: Trees, scores: torch.Tensor, sampled: torch.Tensor, accepted: torch.Tensor) -> None:
        """Start the numbers of a step on their way; arguments as those of ``kernels.tree_sums``.

        ``trees`` are the likeliest prefixes, whatever shape is drafted.
        """
        verified, self._verified = self._verified, None
        if len(self._under_way) == RING:
            return
        place = self._told % RING
        self._told += 1
        buffer, event = self._buffers[place], self._events[place]
        add = kernel.tree_sums if scores.is_cuda else reference.tree_sums
        buffer.copy_(add(trees.scores, scores, sampled, accepted, out=self._sums), non_blocking=True)
        if event is not None:
            event.record()
        self._under_way.append(_News(buffer, event, self._drafted, verified))

    def _listen(self) -> None:
        """Take in what has arrived."""
        while self._under_way and (self._under_way[0].arrived is None or self._under_way[0].arrived.query()):
            news = self._under_way.popleft()
            *numbers, accepted, rows = news.numbers.tolist()
            if rows == 0:
                continue
            means = [number / rows for number in numbers]
            tree, chain = means[: self._nodes], means[self._nodes :]
            self._tree, self._chain = blend(self._tree, tree), blend(self._chain, chain)
            self._expected[news.drafted.number] = chain if news.drafted.chain else tree
            for trust in self._trust:
                trust.fade()
            if news.verified is not None and (known := self._expected.get(news.verified.drafted.number)) is not None:
                nodes = news.verified.nodes
                self._trust[int(news.verified.drafted.chain)].add(sum(known[:nodes]), accepted / rows)
            for old in [number for number in self._expected if number < news.drafted.number - RING]:
                del self._expected[old]

    def trimmed(self, output: Any) -> Any:
        """Return a scheduler's output with as many drafts as this step is to verify; the given one stays as it is.

        To the scheduler, drafts that were not verified are rejected ones.
        """
        drafts = output.scheduled_spec_decode_tokens
        self.label, self.is_wanted, self._kept, self._verified = None, False, {}, None
        if not self.is_ready or not drafts:
            return output
        self._listen()
        contexts = output.scheduled_cached_reqs.num_computed_tokens
        self._at = len(drafts), sum(contexts) // max(len(contexts), 1)
        nodes = self._fitting()
        self._kept = {name: (len(tokens), min(len(tokens), nodes)) for name, tokens in drafts.items()}
        self.counted.counts[int(self._drafted.chain), nodes] += 1
        self._verified = _Verified(self._drafted, nodes)
        if len(output.num_scheduled_tokens) == len(drafts) and all(kept == nodes for _, kept in self._kept.values()):
            self.label = (*self._at, nodes)
            self.is_wanted |= self.table.count(*self.label) < TRIALS
        less = {name: had - kept for name, (had, kept) in self._kept.items() if had > kept}
        if not less:
            return output
        found = copy.copy(output)
        found.scheduled_spec_decode_tokens = {name: tokens[: self._kept[name][1]] for name, tokens in drafts.items()}
        found.num_scheduled_tokens = {
            name: count - less.get(name, 0) for name, count in output.num_scheduled_tokens.items()
        }
        found.total_num_scheduled_tokens = output.total_num_scheduled_tokens - sum(less.values())
        return found

    def _fitting(self) -> int:
        """Return the nodes to verify of what has been drafted."""
        chain = self._drafted.chain
        useful = [size for size in self.sizes if not chain or size <= self._positions] or [self.sizes[0]]
        if self._trials:  # nothing is known yet about some sizes
            trial = self._trials.popleft()
            return max((size for size in useful if size <= trial), default=useful[0])
        known = self._chain if chain else self._tree
        if not known:
            return max((size for size in useful if size <= self._positions), default=useful[0])
        costs, trust = self.table.at(*self._at), self._trust[int(chain)].ratio
        best = choose(known, costs, trust=trust, fewest=self.sizes[0])
        self._wait -= 1
        if self._wait > 0:
            return next(size for size in self.sizes if size >= best.nodes)
        size, share = self._to_try(useful)
        lost = costs.of(size) - (1 + trust * sum(known[:size])) / best.rate  # seconds, for the tokens that it brings
        self._wait, self.is_wanted = max(TRY, round(share * lost / costs.of(best.nodes))), True
        return size

    def _to_try(self, useful: list[int]) -> tuple[int, int]:
        """Return a size that is to be tried now, so that what was once dear is not left for ever, and how to go on.

        Passes measured at start-up may have met a busy machine, and do not say what the host hides.
        """
        steps = dict(zip(self.sizes, self.table.counts(), strict=True))
        least = min(useful, key=lambda size: (steps[size], -size))
        if steps[least] < TRIALS:
            return least, LEARNING
        self._turns.rotate()
        return min(self._turns[0], useful[-1]), WATCHING

    def trimmed_grammar(self, grammar: Any) -> Any:
        """Return a step's masks without those of drafts that are not verified; they stand request after request."""
        if grammar is None or not self._kept:
            return grammar
        rows: list[int] = []
        at = 0
        for name in grammar.structured_output_request_ids:
            had, kept = self._kept.get(name, (0, 0))
            rows += range(at, at + kept + 1)
            at += had + 1
        if len(rows) == len(grammar.grammar_bitmask):
            return grammar
        return replace(grammar, grammar_bitmask=grammar.grammar_bitmask[rows])

    def known(self) -> dict[str, Any]:
        """Return what choices are made from by now, for records."""
        return {
            "start_up": self.described,
            "sizes": self.sizes,
            "steps": self.table.known(),
            "expected": {"tree": self._tree, "chain": self._chain},  # prefix probabilities, as the drafter sees them
            "trust": {"tree": self._trust[0].ratio, "chain": self._trust[1].ratio},
        }

    def heard(self, label: tuple[int, int, int] | None, following: tuple[int, int, int] | None, seconds: float) -> None:
        """Take what a step took until the next began; where that one was of another kind, there may be a pause between.

        See ``clock.Clock``.
        """
        if label is not None and following is not None and following[0] == label[0]:
            self.table.learn(*label, seconds)
