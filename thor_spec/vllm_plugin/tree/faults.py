"""Violations of the invariants, to be planted: a gate that does not see them says nothing."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from thor_spec.vllm_plugin.one_state import recorded as _recorded
from thor_spec.vllm_plugin.one_state import unrolled

recorded: Any = _recorded  # a function of it is replaced


class Intact:
    """An engine as it was before it was broken and watched."""

    def __init__(self, runner: Any) -> None:
        state = runner.model_state
        scratches = [layer.scratch for layer in _layers(runner)]
        objects = [state, state.trees, state.topology, state.steps, state.steps.committer, runner.speculator]
        self._kept = [(it, type(it), dict(vars(it))) for it in (*objects, *scratches, *_layers(runner))]
        self._buffers = state.trees.buffers, list(state.trees.buffers)
        self._functions = unrolled.convolve, recorded.conv_tree

    def restore(self) -> None:
        """Take out what was planted, and whoever watched it."""
        for it, kind, attributes in self._kept:
            it.__class__ = kind
            vars(it).clear()
            vars(it).update(attributes)
        self._buffers[0][:] = self._buffers[1]
        unrolled.convolve, recorded.conv_tree = self._functions


def plant(fault: str, runner: Any) -> None:
    """Break the engine of ``runner`` in one way, before it is watched. Raises: KeyError, for an unknown fault."""
    FAULTS[fault](runner)


def _layers(runner: Any) -> list[Any]:
    return [layer for layer in runner.model.modules() if getattr(layer, "scratch", None) is not None]


def _after_verify(runner: Any, change: Callable[[Any, Any], None]) -> None:
    for layer in _layers(runner):
        own = type(layer.scratch)

        def verify(self: Any, at: Any, *args: Any, own: Any = own) -> None:
            own.verify(self, at, *args)
            change(at, args[-1].spec_rows[: args[-1].num_spec_decodes].long())

        layer.scratch.__class__ = type("Faulty", (type(layer.scratch),), {"verify": verify})


def _first(runner: Any, change: Callable[[Any, Any], None]) -> None:
    first = _layers(runner)[0]
    _after_verify(runner, lambda layer, rows: change(layer, rows) if layer is first else None)


def _share_rows(layer: Any, rows: torch.Tensor) -> None:
    for row in rows.tolist() if layer.topology is not None else ():
        parents = layer.topology.row_parents[row].tolist()
        for node, parent in enumerate(parents):
            if parent >= 0 and parent in parents[:node]:
                older = parents.index(parent)
                layer.scratch.inputs[row, node] = layer.scratch.inputs[row, older]


def _no_root_update(layer: Any, rows: torch.Tensor) -> None:
    layer.scratch.record.u[rows, 0] = 0


def _nudge_chains(layer: Any, rows: torch.Tensor) -> None:
    """Have chains come out with other last bits than by the code that knows no trees."""
    if layer.topology is None:
        return
    parents, u = layer.topology.row_parents[rows], layer.scratch.record.u
    is_chain = ((parents < 0) | (parents == _a_chain(parents))).all(1)  # padding has no parent
    u[rows[is_chain]] = torch.nextafter(u[rows[is_chain]], u.new_tensor(torch.inf))


def _write_state(layer: Any, _: torch.Tensor) -> None:
    step = 4 * torch.finfo(layer.state.dtype).eps  # whatever the states are kept in, it changes their bits
    layer.state[layer.state.abs().flatten(1).sum(1) > 0] *= 1 + step


def _leak(runner: Any) -> None:
    """Have every node's output depend on the inputs of all."""
    for layer in _layers(runner):
        own = type(layer.scratch)

        def verify(self: Any, at: Any, x: Any, b: Any, a: Any, out: Any, on: Any, own: Any = own) -> None:
            own.verify(self, at, x, b, a, out, on)
            starts = on.spec_query_start_loc[: on.num_spec_decodes + 1].tolist()
            for start, end in pairwise(starts):
                out[start:end] += 0.1 * x[start:end].float().mean().to(out.dtype)

        layer.scratch.__class__ = type("Faulty", (type(layer.scratch),), {"verify": verify})


def _flat(_: Any) -> None:
    unrolled.convolve = _in_a_line(unrolled.convolve, 4, _a_chain)
    recorded.conv_tree = _in_a_line(recorded.conv_tree, 5, lambda _: None)


def _in_a_line(own: Any, place: int, chain: Callable[[Any], Any]) -> Any:
    def convolve(*args: Any, **kwargs: Any) -> Any:
        return own(*args[:place], chain(args[place]), *args[place + 1 :], **kwargs)

    return convolve


def _a_chain(parents: torch.Tensor) -> torch.Tensor:
    return torch.arange(-1, parents.shape[1] - 1, device=parents.device).expand_as(parents)


def _one_layer(runner: Any) -> None:
    commit = runner.model_state.steps.committer
    every = commit.layers
    commit.layers = type(every)(every.layers[:1], every.alignment, every.table[:1].contiguous())


def _linear(runner: Any) -> None:
    steps = runner.model_state.steps
    own = steps.commit
    steps.commit = lambda slots, computed, *_: own(slots, computed, None)


def _no_compaction(runner: Any) -> None:
    runner.model_state.trees.buffers.clear()


def _late_positions(runner: Any) -> None:
    topology = runner.model_state.topology
    own = topology.prepare

    def prepare(*args: Any) -> None:
        own(*args)
        topology.positions[topology.offsets < 0] += 1

    topology.prepare = prepare


def _padding(runner: Any) -> None:
    """Have the sampler report one node more than it has accepted."""
    topology = runner.model_state.topology
    commit = runner.model_state.trees.commit

    def longer(rows: int) -> None:
        counts = runner.model_state.trees.step[0].query_start_loc[: rows + 1].diff()
        accepted = topology.accepted[:rows]
        topology.accepted[:rows] = torch.minimum(accepted + (accepted > 0).int(), counts)
        commit(rows)

    runner.model_state.trees.commit = longer


def _swallowed(runner: Any) -> None:
    """Have a commit fail before it starts, and go on."""
    runner.model_state.steps.commit = lambda *_: None


def _old_features(runner: Any) -> None:
    topology = runner.model_state.topology
    topology.of_path = lambda batch: torch.arange(batch.num_tokens, device=topology.device)


FAULTS: dict[str, Callable[[Any], None]] = {
    "siblings share a row": lambda runner: _first(runner, _share_rows),
    "the root's update is lost": lambda runner: _first(runner, _no_root_update),
    "the convolution takes nodes in a line": _flat,
    "positions are one too far": _late_positions,
    "verification writes the state": lambda runner: _first(runner, _write_state),
    "branches see each other": _leak,
    "one layer is committed": _one_layer,
    "the first nodes are committed": _linear,
    "keys and values stay where they are": _no_compaction,
    "padding is accepted": _padding,
    "a failed commit is swallowed": _swallowed,
    "the drafter is fed in a line": _old_features,
    "a chain comes out otherwise": lambda runner: _first(runner, _nudge_chains),
}
"""What to plant; ``gates.tree`` says which invariant must see it."""
