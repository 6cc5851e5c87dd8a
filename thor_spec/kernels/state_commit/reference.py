"""Definition of the commit of all layers. Shapes as in ``plan``."""

from collections.abc import Sequence

import torch

from thor_spec.kernels.conv_tree.reference import conv_commit
from thor_spec.kernels.gdn_verify.reference import advance
from thor_spec.kernels.state_commit.plan import Layers, Plan, Step


def plan_commit(plan: Plan, step: Step, tables: Sequence[torch.Tensor], *, block_size: int) -> None:
    """Write, per row, how many tokens its sequence has gained, and where its states lie.

    Args:
        plan: gets the first R entries of each buffer.
        tables: block table of each group [S, columns], by request slot.
        block_size: tokens per block; 0: a sequence has one block. With blocks the state lies in the one of the last
            scheduled token, and the state at a boundary belongs into the one before the boundary.

    A boundary that is reached exactly is not cut: the state there is the one that is left.
    """
    for r, slot in enumerate(step.idx_mapping.tolist()):
        plan.accepted[r] = plan.cut[r] = 0
        plan.slots[:, r] = plan.cut_slots[:, r] = 0
        if slot < 0 or not bool(step.verified[r]):
            continue
        before = int(step.seq_lens[r] - step.query_start_loc[r + 1] + step.query_start_loc[r])
        after = int(step.computed[slot])
        accepted = plan.accepted[r] = max(after - before, 0)
        column = max(int(step.seq_lens[r]) - 1, 0) // block_size if block_size else 0
        boundary = after // block_size * block_size if block_size else 0
        cut = boundary - before if before < boundary < after else 0
        plan.cut[r] = cut
        for g, table in enumerate(tables):
            plan.slots[g, r] = table[slot, column] if int(accepted) else 0
            plan.cut_slots[g, r] = table[slot, boundary // block_size - 1] if cut else 0


def commit_states(layers: Layers, plan: Plan, *, rows: int, path: torch.Tensor | None = None) -> None:
    """Advance the state of each of the first ``rows`` rows over its accepted rows of the record, in every layer.

    The state after ``cut`` rows goes to the cut slot, rounded once like the last one. ``path`` as in ``Step``.
    """
    for layer in layers.layers:
        for r in range(rows):
            slot, accepted, cut = int(plan.slots[layer.group, r]), int(plan.accepted[r]), int(plan.cut[r])
            if slot <= 0 or accepted <= 0:
                continue
            real = torch.float64 if layer.state.dtype == torch.float64 else torch.float32
            start = layer.state[slot].to(real)
            nodes = _nodes(path, r, accepted)
            at_cut = advance(start, layer.record, r, nodes[:cut])
            if cut and (target := int(plan.cut_slots[layer.group, r])) > 0:
                layer.state[target] = at_cut.to(layer.state.dtype)
            layer.state[slot] = advance(at_cut, layer.record, r, nodes[cut:]).to(layer.state.dtype)


def commit_windows(layers: Layers, plan: Plan, *, rows: int, path: torch.Tensor | None = None) -> None:
    """Shift the windows likewise; the window at the cut goes to the cut slot."""
    for layer in layers.layers:
        for r in range(rows):
            slot, accepted, cut = int(plan.slots[layer.group, r]), int(plan.accepted[r]), int(plan.cut[r])
            if slot <= 0 or accepted <= 0:
                continue
            if cut and (target := int(plan.cut_slots[layer.group, r])) > 0:
                layer.window[target] = layer.window[slot]
                _shift(layer.window, target, layer.inputs, r, cut, path)
            _shift(layer.window, slot, layer.inputs, r, accepted, path)


def _nodes(path: torch.Tensor | None, row: int, count: int) -> list[int]:
    return list(range(count)) if path is None else path[row, :count].tolist()


def _shift(
    window: torch.Tensor, slot: int, inputs: torch.Tensor, row: int, count: int, path: torch.Tensor | None
) -> None:
    one = {"device": window.device}
    own = None if path is None else path[row : row + 1]
    conv_commit(
        window, torch.tensor([slot], **one), inputs, torch.tensor([row], **one), own, torch.tensor([count], **one)
    )
