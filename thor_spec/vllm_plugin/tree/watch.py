"""The six branch-state invariants, looked at in a running engine: every verified row, every Gated-DeltaNet layer.

| | holds |
|---|---|
| I1 | every node has a record row of its own, outside the states; siblings with different tokens have different rows |
| I2 | each node's output, position and recorded state are those of decoding its path token by token |
| I3 | verification writes no state and no window of any request |
| I4 | another input at a node changes it and its descendants, and no byte of another node (``wy``: but for rounding) |
| I5 | after the commit state, window, keys, values and drafter features are those of the accepted path, in all layers |
| I6 | of a tree of width 1, outputs, record, committed state and window have the bits of the code that knows no trees |

The engine must run eagerly: what a graph replays cannot be looked at in between.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from thor_spec.kernels.gdn_verify.reference import advance
from thor_spec.vllm_plugin.one_state.unrolled import unroll
from thor_spec.vllm_plugin.tree import attention
from thor_spec.vllm_plugin.tree.verified_row import VerifiedRow

KEPT = 4  # violations of each invariant that are told in words
ROUNDED = 1e-2
"""Largest relative distance of an output in bfloat16 from the definition."""
CLOSE = 1e-4
"""Of what is kept in float32."""
TURNED = 2**-8
"""Of states kept in bfloat16, and of what follows from such a convolution, to the definition's, rounded likewise: on a
GPU some elements round the other way, and a state of few tokens is made of few. All of them would make this much; what
is planted is off by 0.1 and more."""
JOINED = 1e-3
"""Of outputs where another branch's input was changed, if ``wy`` computes them: it multiplies all nodes of a row at
once in halves of float16, which share a power of two, so that the size of one moves last digits of the others."""


class Watch:
    """Counts what was looked at and what did not hold, by invariant."""

    def __init__(self, runner: Any, *, every: int = 8, seed: int = 0) -> None:
        self.checked: Counter[str] = Counter()
        self.violated: Counter[str] = Counter()
        self.told: list[str] = []
        self.steps: Counter[str] = Counter()
        """Verified rows by shape: ``chain``, ``tree``, ``accepted`` with more than the root."""
        self._runner, self._state, self._every = runner, runner.model_state, every
        self._trees = self._state.trees
        self._generator = torch.Generator().manual_seed(seed)
        self._layers = [layer for layer in runner.model.modules() if getattr(layer, "scratch", None) is not None]
        self._given: dict[str, tuple[torch.Tensor, ...]] = {}
        self._rows: list[VerifiedRow] = []
        self._linear: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._is_looking = False
        self._tap()

    @property
    def layers(self) -> list[Any]:
        """The Gated-DeltaNet layers that are looked at."""
        return self._layers

    def rows_of(self, kind: str) -> int:
        """Return how many rows of a kind were verified; see ``steps``."""
        return self.steps[kind]

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """What ran, as JSON."""
        return {"checked": dict(self.checked), "violated": dict(self.violated), "rows": dict(self.steps)}

    def _tap(self) -> None:
        state, speculator = self._state, self._runner.speculator
        for layer in self._layers:

            def verify(at: Any, x: Any, b: Any, a: Any, out: Any, on: Any, own: Any = layer.scratch.verify) -> None:
                own(at, x, b, a, out, on)
                self._given[at.prefix] = (x.clone(), b.clone(), a.clone(), out.clone(), on)

            layer.scratch.verify = verify
        prepare_attn, prepare_inputs = state.prepare_attn, state.prepare_inputs
        postprocess, propose, commit = state.postprocess_state, speculator.propose, state.steps.commit

        def attn(batch: Any, *args: Any, **kwargs: Any) -> Any:
            metadata = prepare_attn(batch, *args, **kwargs)
            self._before(batch, args[2], metadata)
            return metadata

        def inputs(batch: Any, req_states: Any) -> Any:
            found = prepare_inputs(batch, req_states)
            self._positions(found["positions"])
            return found

        def committed(slots: Any, computed: Any, *path: Any) -> None:  # comes first after the pass and the walk
            self._after_forward()
            if self._is_looking:
                self._commit_in_a_line(lambda: commit(slots, computed, None))
            commit(slots, computed, *path)

        def post(slots: Any, num_sampled: Any, computed: Any = None) -> None:
            postprocess(slots, num_sampled, computed)
            self._after_commit()

        def proposed(batch: Any, metadata: Any, mappings: Any, last: Any, aux: Any, *args: Any, **kwargs: Any) -> Any:
            drafts = propose(batch, metadata, mappings, last, aux, *args, **kwargs)
            self._features(last, aux)
            return drafts

        state.prepare_attn, state.prepare_inputs, state.steps.commit = attn, inputs, committed
        state.postprocess_state, speculator.propose = post, proposed

    def _hold(self, invariant: str, what: bool, where: str) -> None:
        self.checked[invariant] += 1
        if not what:
            self.violated[invariant] += 1
            if self.violated[invariant] <= KEPT:
                self.told.append(f"{invariant}: {where}")

    # Before the pass: which rows there are, and what must not change.
    def _before(self, batch: Any, slot_mappings: torch.Tensor, metadata: dict[str, Any]) -> None:
        self._rows, self._given = [], {}
        on = metadata[self._layers[0].prefix]
        if on.spec_sequence_masks is None or self._trees.step is None:
            return
        starts, topology = batch.query_start_loc.tolist(), self._trees.topology
        lengths = batch.seq_lens.tolist()
        for row in on.spec_rows[: on.num_spec_decodes].tolist():
            slot = int(batch.idx_mapping[row])
            count = starts[row + 1] - starts[row]
            parents = topology.parents[slot, :count].tolist()
            self._rows.append(VerifiedRow(row, slot, starts[row], count, lengths[row] - count, parents))
        self._mappings = slot_mappings
        self._canonical = {
            layer.prefix: metadata[layer.prefix].spec_state_indices_tensor[: on.num_spec_decodes, 0].long().clone()
            for layer in self._layers
        }
        self._owned = {}
        for layer in self._layers:
            slots = self._of_everybody(layer)
            self._owned[layer.prefix] = slots, layer.state[slots].clone(), layer.window[slots].clone()
        for own in self._rows:
            self.steps["chain" if own.is_chain else "tree"] += 1

    def _of_everybody(self, layer: Any) -> torch.Tensor:
        tables = self._state.steps.tables[self._state.steps.groups[self._state.steps.layers.index(layer)]]
        live = list(self._runner.req_states.req_id_to_index.values())
        verified = self._canonical[layer.prefix]
        prompts = {int(r) for r in tables[live, 0].tolist()} - {0}
        mine = set(verified.tolist())
        busy = self._prefilling(tables)
        return torch.tensor(sorted((prompts | mine) - busy - {0}), dtype=torch.int64, device=layer.state.device)

    def _prefilling(self, tables: torch.Tensor) -> set[int]:
        batch = self._trees.step[0]
        verified = {own.row for own in self._rows}
        slots = [int(batch.idx_mapping[r]) for r in range(batch.num_reqs) if r not in verified]
        return {int(block) for slot in slots for block in tables[slot].tolist()}

    def _positions(self, positions: torch.Tensor) -> None:
        for own in self._rows:
            want = [own.context + depth for depth in own.depths]
            got = positions[..., own.start : own.start + own.count].reshape(-1, own.count)[0].tolist()
            self._hold("I2", got == want, f"positions {got} of nodes at {want}")

    # Between the pass and the commit.
    def _after_forward(self) -> None:
        if not self._rows or not self._given:
            return
        for layer in self._layers:
            slots, states, windows = self._owned[layer.prefix]
            same = torch.equal(layer.state[slots], states) and torch.equal(layer.window[slots], windows)
            self._hold("I3", same, f"{layer.prefix}: verification wrote a state or a window")
            self._records(layer)
            self._paths(layer)
        self._is_looking = False
        if self.checked["I3"] // len(self._layers) % self._every == 0:
            for layer in self._layers:
                self._branches(layer)
                self._width_1(layer)
        self._kept = [
            (attention.split(self._trees.layers[name].kv_cache), group)
            for group, names in self._groups()
            for name in names
        ]
        self._entries = [
            [half[self._place(group, own, half)].clone() for half in halves]
            for halves, group in self._kept
            for own in self._rows
        ]

    def _groups(self) -> list[tuple[int, list[str]]]:
        groups = self._runner.kv_cache_config.kv_cache_groups
        return [(i, [n for n in g.layer_names if n in self._trees.layers]) for i, g in enumerate(groups)]

    def _place(self, group: int, own: VerifiedRow, half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self._mappings[group][own.start : own.start + own.count].long()
        return slots // half.shape[1], slots % half.shape[1]

    def _records(self, layer: Any) -> None:
        record, state = layer.scratch.record, layer.state
        places = [(own.row, node) for own in self._rows for node in range(own.count)]
        first, last = state.data_ptr(), state.data_ptr() + state.numel() * state.element_size()
        inside = any(first <= t.data_ptr() < last for t in (record.k, record.u, record.log_decay))
        self._hold("I1", len(set(places)) == len(places) and not inside, f"{layer.prefix}: records share memory")
        for own in self._rows:
            tokens = self._runner.input_buffers.input_ids[own.start : own.start + own.count].tolist()
            for a, b in own.siblings():
                differs = not torch.equal(layer.scratch.inputs[own.row, a], layer.scratch.inputs[own.row, b])
                self._hold("I1", differs or tokens[a] == tokens[b], f"{layer.prefix}: siblings {a} and {b} are one")

    def _paths(self, layer: Any) -> None:
        """Decode every root-to-leaf path by itself, all of them side by side."""
        x, b, a, out, on = self._given[layer.prefix]
        starts = on.spec_query_start_loc.tolist()
        jobs = [(i, own, path) for i, own in enumerate(self._rows) for path in own.leaves()]
        longest = max(len(path) for _, _, path in jobs)
        at = torch.tensor([[starts[i] + n for n in path] + [starts[i]] * (longest - len(path)) for i, _, path in jobs])
        at = at.to(x.device)
        slots = self._canonical[layer.prefix][[i for i, _, _ in jobs]]
        chain = torch.arange(-1, longest - 1, device=x.device).repeat(len(jobs), 1)
        alone = unroll(layer, x[at], b[at], a[at], layer.window[slots], layer.state[slots], chain)
        bound = CLOSE if out.dtype == torch.float32 else ROUNDED
        kept = CLOSE if x.dtype == torch.float32 else TURNED
        for j, (i, own, path) in enumerate(jobs):
            got = out[[starts[i] + n for n in path]].float()
            want = alone.out[j, : len(path)].to(out.dtype).float()
            error = _distance(got, want)
            self._hold("I2", error <= bound, f"{layer.prefix}: outputs of path {path} are off by {error:.2e}")
            start = layer.state[slots[j]].float()
            folded = advance(start, layer.scratch.record, own.row, path)
            error = _distance(folded, alone.states[j, len(path)])
            self._hold("I2", error <= kept, f"{layer.prefix}: the record of path {path} is off by {error:.2e}")
            for depth, node in enumerate(path):
                own.states[layer.prefix, node] = alone.states[j, depth + 1].clone()

    def _branches(self, layer: Any) -> None:
        x, b, a, out, on = self._given[layer.prefix]
        i = int(torch.randint(len(self._rows), (1,), generator=self._generator))
        own, start = self._rows[i], int(on.spec_query_start_loc[i])
        node = int(torch.randint(own.count, (1,), generator=self._generator))
        changed, again = x.clone(), torch.empty_like(out)
        changed[start + node] += 1
        stock = type(layer.scratch).verify
        stock(layer.scratch, layer, changed, b, a, again, on)
        touched = [n for n in range(own.count) if node in own.path(n)]
        others = [n for n in range(len(out)) if n - start not in touched]
        reach = _distance(again[others].float(), out[others].float())
        apart = reach <= JOINED if layer.variant == "wy" else torch.equal(again[others], out[others])
        self._hold("I4", apart, f"{layer.prefix}: node {node} reaches beyond its own, by {reach:.2e}")
        moved = not torch.equal(again[start + node], out[start + node])
        self._hold("I4", moved, f"{layer.prefix}: node {node} does not see its own input")
        stock(layer.scratch, layer, x, b, a, again, on)
        self._hold("I4", torch.equal(again, out), f"{layer.prefix}: verification is not repeatable")

    @property
    def _chains(self) -> list[tuple[int, VerifiedRow]]:
        return [(i, own) for i, own in enumerate(self._rows) if own.is_chain and own.run > 1]

    def _width_1(self, layer: Any) -> None:
        """Verify once more, by the code that knows no trees: chains must not have noticed the difference."""
        if not (chains := self._chains):
            return
        x, b, a, out, on = self._given[layer.prefix]
        scratch, again = layer.scratch, torch.empty_like(out)
        starts = on.spec_query_start_loc.tolist()

        def kept() -> list[torch.Tensor]:
            record = scratch.record
            return [t.clone() for t in (record.k, record.k_scale, record.u, record.log_decay, scratch.inputs)]

        ours, topology = kept(), layer.topology
        layer.topology = None
        try:
            type(scratch).verify(scratch, layer, x, b, a, again, on)
            theirs = kept()
        finally:
            layer.topology = topology
        type(scratch).verify(scratch, layer, x, b, a, torch.empty_like(out), on)  # the record of trees
        for i, own in chains:
            rows = slice(starts[i], starts[i] + own.run)
            same = torch.equal(out[rows], again[rows])
            self._hold("I6", same, f"{layer.prefix}: outputs of a chain of {own.run} are not those without trees")
            same = all(
                torch.equal(t[own.row, : own.run], s[own.row, : own.run]) for t, s in zip(ours, theirs, strict=True)
            )
            self._hold("I6", same, f"{layer.prefix}: the record of a chain of {own.run} is not that without trees")
        self._is_looking = True

    def _commit_in_a_line(self, commit: Callable[[], None]) -> None:
        """Commit by counts alone, keep what came out, and take it back."""
        pending = self._state.steps.pending
        commit()
        for layer in self._layers:
            slots, states, windows = self._owned[layer.prefix]
            mine = self._canonical[layer.prefix]
            self._linear[layer.prefix] = layer.state[mine].clone(), layer.window[mine].clone()
            layer.state[slots], layer.window[slots] = states, windows
        self._state.steps.pending = pending

    def _check_chains(self) -> None:
        for i, own in self._chains if self._is_looking else ():
            run = list(range(len(own.accepted)))
            self._hold("I6", own.accepted == run, f"of a chain, {own.accepted} were accepted")
            for layer in self._layers:
                state, window = self._linear[layer.prefix]
                slot = self._canonical[layer.prefix][i]
                same = torch.equal(layer.state[slot], state[i]) and torch.equal(layer.window[slot], window[i])
                self._hold("I6", same, f"{layer.prefix}: a chain's commit is not that without trees")

    # After the commit.
    def _after_commit(self) -> None:
        if not self._rows or not self._given:
            return
        topology = self._trees.topology
        for own in self._rows:
            own.accepted = topology.path[own.row, : max(int(topology.accepted[own.row]), 1)].tolist()
            own.accepted = [n for n in own.accepted if n < own.count]
            real = own.accepted == own.path(own.accepted[-1])
            self._hold("I5", real, f"accepted {own.accepted}, which is no path of {own.parents}")
            self.steps["accepted"] += len(own.accepted) > 1
        for layer in self._layers:
            x = self._given[layer.prefix][0]
            starts = self._given[layer.prefix][4].spec_query_start_loc.tolist()
            for i, own in enumerate(self._rows):
                slot = int(self._canonical[layer.prefix][i])
                want = own.states.get((layer.prefix, own.accepted[-1]))
                if want is None or self._ended(own):
                    continue
                state = layer.state[slot]
                error = _distance(state.float(), want.to(state.dtype).float())
                bound = CLOSE if state.dtype == torch.float32 else TURNED
                self._hold("I5", error <= bound, f"{layer.prefix}: the committed state is off by {error:.2e}")
                slots, _, windows = self._owned[layer.prefix]
                old = windows[(slots == slot).nonzero()[0, 0]].T
                joined = torch.cat([old, x[[starts[i] + n for n in own.accepted]].to(old.dtype)])
                same = torch.equal(layer.window[slot].T, joined[len(joined) - len(old) :])
                self._hold("I5", same, f"{layer.prefix}: the window is not that of the path")
        self._check_chains()
        entries = iter(self._entries)
        for halves, group in self._kept:
            for own in self._rows:
                before, path = next(entries), own.accepted
                after = [half[self._place(group, own, half)] for half in halves]
                same = all(torch.equal(new[: len(path)], old[path]) for new, old in zip(after, before, strict=True))
                self._hold("I5", same, "keys or values are not those of the path")

    def _ended(self, own: VerifiedRow) -> bool:
        """Whether the step left the row short: the last token of a prompt with placeholder drafts."""
        return int(self._runner.req_states.num_computed_tokens.gpu[own.slot]) != own.context + len(own.accepted)

    def _features(self, last: torch.Tensor, aux: list[torch.Tensor] | None) -> None:
        speculator = self._runner.speculator
        if not self._rows or not self._given:
            return
        own_features = speculator.model.combine_hidden_states(torch.cat(aux, dim=-1)) if aux else last
        for own in self._rows:
            want = own_features[[own.start + n for n in own.accepted]]
            got = speculator.hidden_states[own.start : own.start + len(own.accepted)]
            error = _distance(got.float(), want.float())
            self._hold("I5", error <= ROUNDED, f"drafter features of {own.accepted} are off by {error:.2e}")


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-6))
