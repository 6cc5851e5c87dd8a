"""The two short trainings: a target learns a page of prose, then a drafter learns to guess that target.

Both use stock transformers modules, in float32 and on one thread, so that a seed gives the same bytes on one machine.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from thor_spec.nano import corpus, tokenizer
from thor_spec.nano.drafter import Drafter, block_mask
from thor_spec.nano.recipes import DrafterPlan, TargetRecipe


@contextlib.contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch, record gradients and compute on one thread; on leaving, all three are as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def _optimize(parameters: list[Tensor], losses: Iterator[Tensor], steps: int, learning_rate: float) -> list[float]:
    """Take one AdamW step per loss: linear warm-up, then cosine to a tenth, gradients clipped at norm 1."""
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm_up = max(1, steps // 10)
    history = []
    for step, loss in zip(range(steps), losses, strict=False):
        progress = step / steps
        factor = min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * factor
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        history.append(loss.item())
    return history


def fit_target(model: Any, recipe: TargetRecipe) -> list[float]:
    """Train a causal language model, in place, on windows of the corpus; return the losses in nats per byte."""

    def losses() -> Iterator[Tensor]:
        while True:
            ids = windows(recipe.batch, recipe.window + 1)
            logits = model(ids[:, :-1], use_cache=False).logits
            yield functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    with reproducible(recipe.seed):
        model.train()
        history = _optimize(list(model.parameters()), losses(), recipe.steps, recipe.learning_rate)
        model.eval()
    return history


def windows(count: int, length: int) -> Tensor:
    """Return [count, length] int64: random windows of the corpus."""
    text = torch.tensor(list(corpus.TEXT.encode()))
    starts = torch.randint(0, len(text) - length + 1, (count, 1))
    return text[starts + torch.arange(length)]


def prompts(count: int, length: int) -> Tensor:
    """Return [count, length] int64: windows of the corpus, every third one as the user's turn of a chat."""
    text = list(corpus.TEXT.encode())
    start, end = tokenizer.MARK_IDS[tokenizer.IM_START], tokenizer.MARK_IDS[tokenizer.IM_END]
    opening, closing = [start, *b"user\n"], [end, *b"\n", start, *b"assistant\n"]
    rows = []
    for index in range(count):
        is_chat = index % 3 == 2
        size = length - (len(opening) + len(closing) if is_chat else 0)
        begin = int(torch.randint(0, len(text) - size, ()))
        window = text[begin : begin + size]
        rows.append([*opening, *window, *closing] if is_chat else window)
    return torch.tensor(rows)


def tap(model: Any, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
    """Return the outputs of the named layers for ``ids`` [B, S], concatenated: [B, S, F].

    Hooks, not ``output_hidden_states``: the last entry of the latter has passed the final norm.
    """
    taken: dict[int, Tensor] = {}

    def keeper(layer: int) -> Callable[[Any, Any, Any], None]:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            taken[layer] = output[0] if isinstance(output, tuple) else output

        return keep

    handles = [model.model.layers[layer].register_forward_hook(keeper(layer)) for layer in layer_ids]
    try:
        with torch.no_grad():
            model(ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([taken[layer] for layer in layer_ids], dim=-1)


def continuations(model: Any, ids: Tensor, new: int) -> Tensor:
    """Return ``ids`` [B, S] followed by ``new`` greedy tokens each; an early end of text is passed over."""
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, min_new_tokens=new
        )
    return out


def draft_logits(model: Any, drafter: Drafter, ids: Tensor, features: Tensor, anchors: Tensor, block: int) -> Tensor:
    """Return the drafter's logits [B, A, block - 1, V] for the tokens after each of ``anchors`` [B, A] in ``ids``."""
    batch, count = anchors.shape
    positions = anchors[..., None] + torch.arange(block)
    slots = torch.full_like(positions, drafter.shape.mask_token_id)
    slots[..., 0] = ids.gather(1, anchors)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(slots.flatten(1))
    seen = torch.arange(ids.shape[1]).expand(batch, -1)
    hidden = drafter(embedded, positions.flatten(1), features, seen, block_mask(anchors, block, ids.shape[1]))
    hidden = hidden.unflatten(1, (count, block))[:, :, 1:]
    return functional.linear(hidden, model.get_output_embeddings().weight.detach())


def fit_drafter(model: Any, drafter: Drafter, plan: DrafterPlan) -> list[float]:
    """Train ``drafter``, in place, on text that ``model`` writes or knows; return the losses.

    Loss: cross-entropy of slot k against token a + k, weighted by exp(-(k - 1) / gamma) (arXiv:2602.06036). Half the
    steps use half blocks: an engine that asks for fewer tokens sends fewer masks, which changes what the slots see.
    """
    with reproducible(plan.seed):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        written = continuations(model, prompts(plan.generated, plan.prompt), plan.new)
        ids = torch.cat([written, windows(plan.quoted, plan.prompt + plan.new)])
        features = tap(model, ids, drafter.shape.target_layer_ids)

        def losses() -> Iterator[Tensor]:
            step = 0
            while True:
                block = drafter.shape.block_size // (1 + step % 2)
                rows = torch.randint(0, len(ids), (plan.batch,))
                anchors = torch.randint(plan.prompt // 2, ids.shape[1] - block, (plan.batch, plan.anchors))
                logits = draft_logits(model, drafter, ids[rows], features[rows], anchors, block)
                offsets = torch.arange(1, block)
                wanted = ids[rows].gather(1, (anchors[..., None] + offsets).flatten(1)).flatten()
                weights = torch.exp(-(offsets - 1) / plan.gamma).expand((*anchors.shape, -1)).flatten()
                entropy = functional.cross_entropy(logits.flatten(0, 2), wanted, reduction="none")
                yield (weights * entropy).sum() / weights.sum()
                step += 1

        return _optimize(list(drafter.parameters()), losses(), plan.steps, plan.learning_rate)
