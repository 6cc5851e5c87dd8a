"""A target as the drafter's training sees it: embedding, head, features of some layers, and the text it writes."""

from typing import Any, Protocol

import torch
from torch import Tensor

from thor_spec.errors import ConfigError
from thor_spec.nano import fit
from thor_spec.train.hybrid import Cache, Hybrid


class Target(Protocol):
    """A frozen causal model."""

    hidden: int
    layers: int
    embedding: Tensor
    """[V, D]."""
    head: Tensor
    """[V, D]."""
    products: int | None
    """Multiply-adds a token, where they are known."""

    def features(self, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        """Return the outputs of the layers, side by side: [B, T, len(layer_ids) * D]."""
        ...

    def logits(self, ids: Tensor) -> Tensor:
        """Return [B, T, V]."""
        ...

    def write(self, prompts: Tensor, new: int, temperature: float, seed: int) -> Tensor:
        """Return ``prompts`` [B, P] with ``new`` tokens after each; the end of a text does not stop it."""
        ...

    def write_rows(self, rows: list[list[int]], new: int, temperature: float, seed: int) -> Tensor:
        """Return [B, S]: at least ``new`` tokens after each of ``rows``, which may differ in length."""
        ...


def choose(logits: Tensor, temperature: float, dice: torch.Generator) -> Tensor:
    """Return one token id per row of ``logits`` [B, V]: the likeliest, or a sample."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    # The Gumbel trick with exponential noise: one pass, no sorting, no normalization.
    noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=dice)
    return ((logits.float() / temperature).softmax(dim=-1) / noise).argmax(dim=-1)


class HybridTarget:
    """A ``Hybrid``, with its own caches."""

    def __init__(self, model: Hybrid) -> None:
        self.model = model.eval().requires_grad_(False)
        self.hidden, self.layers = model.shape.hidden, model.shape.layers
        self.embedding, self.head = model.embed_tokens.weight, model.lm_head.weight
        self.products: int | None = model.shape.products_per_token()

    def features(self, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            features: Tensor = self.model(ids, taps=layer_ids)[1]
        return features

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            return self.model.logits(ids)

    def write(self, prompts: Tensor, new: int, temperature: float, seed: int) -> Tensor:
        lengths = torch.full(prompts.shape[:1], prompts.shape[1], device=prompts.device)
        return self._write(prompts, lengths, new, temperature, seed)

    def write_rows(self, rows: list[list[int]], new: int, temperature: float, seed: int) -> Tensor:
        where = self.embedding.device
        lengths = torch.tensor([len(row) for row in rows], device=where)
        longest = int(lengths.max())
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=where)
        return self._write(padded, lengths, new, temperature, seed)

    @torch.no_grad()
    def _write(self, prompts: Tensor, lengths: Tensor, new: int, temperature: float, seed: int) -> Tensor:
        """Write from the end of the shortest prompt on; where a longer one still goes on, its tokens are taken."""
        dice = torch.Generator(prompts.device).manual_seed(seed)
        begin, longest = int(lengths.min()), prompts.shape[1]
        cache = Cache(room=longest + new)
        written = [prompts[:, :begin]]
        hidden = self.model(written[0], cache)[0][:, -1:]
        for place in range(begin, longest + new):
            token = choose(self.model.lm_head(hidden)[:, 0], temperature, dice)
            if place < longest:
                token = torch.where(place < lengths, prompts[:, place], token)
            written.append(token[:, None])
            if place < longest + new - 1:
                hidden = self.model(token[:, None], cache)[0]
        return torch.cat(written, dim=1)


class TransformersTarget:
    """Any small causal model that transformers loads."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        text = model.config.get_text_config()
        self.hidden, self.layers = text.hidden_size, text.num_hidden_layers
        self.embedding = model.get_input_embeddings().weight
        self.head = model.get_output_embeddings().weight
        self.products: int | None = None

    def features(self, ids: Tensor, layer_ids: tuple[int, ...]) -> Tensor:
        return fit.tap(self.model, ids, layer_ids)

    def logits(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.model(ids, use_cache=False).logits
        return logits

    def write(self, prompts: Tensor, new: int, temperature: float, seed: int) -> Tensor:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        devices = [prompts.device] if prompts.is_cuda else []
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            out: Tensor = self.model.generate(
                prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=new, min_new_tokens=new, **sampled
            )
        return out

    def write_rows(self, rows: list[list[int]], new: int, temperature: float, seed: int) -> Tensor:
        longest = max(map(len, rows))
        lines = [
            self.write(
                torch.tensor([row], device=self.embedding.device), new + longest - len(row), temperature, seed + i
            )
            for i, row in enumerate(rows)
        ]
        return torch.cat(lines)


def open_target(directory: Any, device: str) -> Target:
    """Return the model in ``directory``: our own hybrid where it fits, transformers' otherwise."""
    from thor_spec.train import hybrid

    try:
        return HybridTarget(hybrid.load(directory).to(device))
    except (KeyError, ValueError, OSError):  # another architecture, or weights in several files
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        try:
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(
                f"transformers cannot load {directory} ({str(error).splitlines()[0]}), and training needs it to. "
                "Take a target that this version of transformers knows."
            ) from error
        return TransformersTarget(model.to(device))
