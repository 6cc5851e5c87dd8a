"""The decoding of LLaDA2, one block after the other, as its definition: what is fast must agree with this.

A block holds ``block`` tokens, masks at first; the end of a prompt that fills no whole block shares the first one, and
is never edited. Logit i is about position i. In each step, with the likeliest token v_i of each position and its
probability c_i::

    every mask with c_i > threshold becomes v_i; if there is none, the mask with the greatest c_i does
    every token that was no mask, is not the prompt's and differs from v_i, becomes v_i if c_i > edit_threshold

A block is settled after a step that began without masks and edited nothing, after more than 16 steps that began without
masks, and after ``max_steps`` steps, the last of which fills what is left. The keys and values that later blocks see
are those of the settled tokens: if the last step changed any, one more forward stores them. A text ends with the first
end token of a settled block. Sources: arXiv:2602.08676, arXiv:2512.15745.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from thor_spec.diffusion.settings import MAX_QUIET_STEPS, Denoising

if TYPE_CHECKING:
    import torch


class Model(Protocol):
    """A model at the end of one text."""

    def __call__(self, block: Sequence[int]) -> "torch.Tensor":
        """Return logits [len(block), V] of a block behind the settled ones."""

    def keep(self) -> None:
        """Settle the block of the last call: later blocks see its keys and values."""


Choose = Callable[["torch.Tensor"], tuple[list[int], list[float]]]
"""From logits [n, V] to each position's token and its probability."""


@dataclass(slots=True)
class Block:
    """A block on its way from masks to tokens."""

    tokens: list[int]
    prompt: int
    """How many of the first tokens are the prompt's."""
    mask: int
    steps: int = 0
    quiet: int = 0
    """Steps that began without masks."""
    edits: int = 0
    stopped: bool = False
    """No further step; the tokens may still have to be stored."""
    stored: bool = False
    """The last forward saw the tokens as they are."""

    def step(self, choices: Sequence[int], sure: Sequence[float], settings: Denoising) -> None:
        """Take one step, given each position's likeliest token and its probability under the tokens as they are."""
        before = list(self.tokens)
        masks = [i for i, token in enumerate(before) if token == self.mask]
        fill = [i for i in masks if sure[i] > settings.threshold]
        if masks and not fill:
            fill = [max(masks, key=lambda i: (sure[i], -i))]
        self.steps += 1
        if is_last := self.steps >= settings.max_steps:
            fill = masks
        edit = [
            i
            for i in range(self.prompt, len(before))
            if before[i] != self.mask and choices[i] != before[i] and sure[i] > settings.edit_bound
        ]
        for i in (*fill, *edit):
            self.tokens[i] = choices[i]
        self.edits += len(edit)
        self.quiet += not masks
        self.stopped = is_last or (not masks and not edit) or self.quiet > MAX_QUIET_STEPS
        self.stored = self.tokens == before


@dataclass(slots=True)
class Decoded:
    """An answer, and what it took."""

    tokens: list[int] = field(default_factory=list)
    forwards: int = 0
    blocks: int = 0
    edits: int = 0


def decode(
    model: Model,
    prompt: Sequence[int],
    *,
    most: int,
    block: int,
    mask: int,
    ends: Collection[int] = (),
    settings: Denoising | None = None,
    choose: Choose | None = None,
) -> Decoded:
    """Return at most ``most`` tokens after ``prompt``, up to and including the first of ``ends``.

    Args:
        block: tokens of a block.
        mask: the mask's id, which is never chosen.
        choose: greedy, if not given.
    """
    settings, choose = settings or Denoising(), choose or (lambda logits: greedy(logits, mask))
    done = Decoded()
    whole = len(prompt) // block * block
    for start in range(0, whole, block):
        model(prompt[start : start + block])
        model.keep()
    tail = list(prompt[whole:])
    while True:
        now = Block([*tail, *[mask] * (block - len(tail))], len(tail), mask)
        while not now.stopped:
            now.step(*choose(model(now.tokens)), settings)
            done.forwards += 1
        if not now.stored:
            model(now.tokens)
            done.forwards += 1
        model.keep()
        done.blocks += 1
        done.edits += now.edits
        for token in now.tokens[len(tail) :]:
            done.tokens.append(token)
            if token in ends or len(done.tokens) == most:
                return done
        tail = []


def greedy(logits: "torch.Tensor", mask: int) -> tuple[list[int], list[float]]:
    """Return the likeliest token of each row of ``logits`` [n, V] and its probability, the mask being excluded."""
    without = logits.float().clone()
    without[:, mask] = -float("inf")
    sure, choices = without.softmax(dim=-1).max(dim=-1)
    return choices.tolist(), sure.tolist()
