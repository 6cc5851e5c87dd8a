"""The step of each block in vLLM's runner, in the place of its sampler."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from thor_spec.diffusion import batched
from thor_spec.vllm_plugin import compat, counters
from thor_spec.vllm_plugin.llada2.canvases import Canvases
from thor_spec.vllm_plugin.transfer import to_device

_NO_PENALTIES = SimpleNamespace(output_bin_counts=None)


class BlockSampler:
    """Offers what the runner asks of a sampler; see ``vllm_plugin.llada2`` for how steps are reported."""

    def __init__(self, sampler: Any, canvases: Canvases, context: int, parallel: Any) -> None:
        self._sampler, self._canvases, self._context = sampler, canvases, context
        self._output = compat.SAMPLER_OUTPUT.resolve()
        self._draw = compat.GUMBEL_SAMPLE.resolve()
        self._scores = compat.LOGPROBS.resolve()
        self.count = counters.Writer.open(
            (len(counters.DENOISING_COUNTS),), canvases.device, counters.DENOISING, parallel
        )
        self.sampling_states = sampler.sampling_states
        self.penalties_state = _NO_PENALTIES
        self.compute_nans = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def add_request(self, req_idx: int, sampling_params: Any) -> None:
        """Learn temperature, seed and log probabilities; the settings of denoising come with the model state."""
        self.sampling_states.add_request(req_idx, sampling_params)

    def apply_staged_writes(self) -> None:
        """Bring what was learned to the device."""
        self.sampling_states.apply_staged_writes()

    def __call__(self, logits: Tensor, input_batch: Any, draft_logits: Tensor | None = None) -> Any:
        """Step every block whose logits are here: [block] rows each; prompts have none."""
        del draft_logits
        block, device = self._canvases.block, self._canvases.device
        rows, states = input_batch.num_reqs, self.sampling_states
        logit_counts = np.diff(input_batch.cu_num_logits_np[: rows + 1])
        stepping = np.flatnonzero(logit_counts)
        sampled = torch.zeros((rows, block), dtype=torch.int32, device=device)
        num_sampled = torch.zeros(rows, dtype=torch.int32, device=device)
        num_rejected = _on(device, self._given_back(input_batch, logit_counts), torch.int32)
        logprobs = None
        if len(stepping):
            places = _on(device, stepping, torch.int64)
            slots_np = input_batch.idx_mapping_np[stepping]
            slots = _on(device, slots_np, torch.int64)
            logits = self._whole_blocks(logits, logit_counts[stepping])
            choices, sure = self._choose(logits, slots, slots_np, input_batch)
            before, rules = self._canvases.take(slots)
            done = batched.step(before, choices.view(-1, block), sure.view(-1, block), rules, self._canvases.mask)
            self._canvases.put(slots, done.blocks, done.settled)
            tokens, new = self._emitted(before)
            sampled[places] = tokens.int()
            num_sampled[places] = torch.where(done.settled, new, 0).int()
            num_rejected[places] *= ~done.settled
            self._count_step(done, new)
            if (asked := int(states.max_num_logprobs(slots_np))) >= 0:
                logprobs = self._logprobs(logits, asked, before, num_sampled, stepping)
        everyone = input_batch.idx_mapping[:rows]
        self._sampler.req_states.draft_tokens[everyone, :block] = self._canvases.blocks.tokens[everyone]
        return self._output(
            sampled_token_ids=sampled,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _given_back(self, input_batch: Any, logit_counts: np.ndarray) -> np.ndarray:
        """Return how many tokens of each row are to be computed again, if its block is not settled now [R].

        A block as a whole; of a prompt that is complete, the end that fills no block.
        """
        rows = input_batch.num_reqs
        scheduled = input_batch.num_scheduled_tokens[:rows]
        known = input_batch.prefill_len_np[:rows]
        computed = input_batch.num_computed_tokens_np[:rows] + scheduled
        prompt_end = np.where(computed >= known, known % self._canvases.block, 0)
        return np.where(logit_counts > 0, scheduled, np.minimum(prompt_end, scheduled))

    def _whole_blocks(self, logits: Tensor, counts: np.ndarray) -> Tensor:
        """Return [R * block, V]; rows are missing only in the runner's rehearsals, whose results nobody reads."""
        block = self._canvases.block
        if (counts == block).all():
            return logits
        starts = np.cumsum(counts) - counts
        index = np.minimum(starts[:, None] + np.arange(block), logits.shape[0] - 1)
        return logits[_on(logits.device, index.ravel(), torch.int64)]

    def _choose(self, logits: Tensor, slots: Tensor, slots_np: np.ndarray, input_batch: Any) -> tuple[Tensor, Tensor]:
        """Return each row's token and its probability: the likeliest, or one drawn as the request's settings say."""
        logits[:, self._canvases.mask] = -float("inf")
        states, block = self.sampling_states, self._canvases.block
        if not (states.temperature.np[slots_np] > 0).any():
            return batched.likeliest(logits)
        by_row = slots.repeat_interleave(block)
        heat = states.temperature.gpu[by_row][:, None]
        warm = logits.float() / torch.where(heat > 0, heat, 1.0)
        warm = states.apply_top_k_top_p(warm, by_row, slots_np.repeat(block))
        # A position draws anew in each step, and the same whatever else is in the batch.
        starts = input_batch.positions[input_batch.logits_indices]
        if len(starts) != len(by_row):
            starts = torch.zeros_like(by_row)
        draw = starts + self._canvases.blocks.steps[by_row].long() * self._context
        drawn = self._draw(
            warm, by_row, states.temperature.gpu, states.seeds.gpu, draw, apply_temperature=False, is_drafting=False
        )
        best, sure = batched.likeliest(warm)
        drawn = torch.where(heat[:, 0] > 0, drawn, best)
        chance = (warm.gather(1, drawn[:, None])[:, 0] - warm.logsumexp(dim=-1)).exp()
        return drawn, torch.where(heat[:, 0] > 0, chance, sure)

    def _emitted(self, before: batched.Blocks) -> tuple[Tensor, Tensor]:
        """Return the tokens of blocks behind the prompt's [R, block], and how many they are [R]; the rest is filler."""
        block = self._canvases.block
        index = (torch.arange(block, device=before.tokens.device) + before.prompt[:, None]).clamp_max(block - 1)
        return before.tokens.gather(1, index), block - before.prompt

    def _count_step(self, done: batched.Stepped, new: Tensor) -> None:
        settled = done.settled
        numbers = (torch.ones_like(new), settled, settled * new, done.filled, done.edited)
        self.count.counts += torch.stack([number.sum().long() for number in numbers])
        self.count.publish()

    def _logprobs(
        self, logits: Tensor, asked: int, before: batched.Blocks, num_sampled: Tensor, stepping: np.ndarray
    ) -> Any:
        """Return the scores of settled tokens under the forward that stored them; None if no block was settled."""
        block = self._canvases.block
        emitted, prompt = num_sampled.cpu().numpy(), before.prompt.cpu().numpy()  # who asks for these, waits for them
        at = {int(row): place for place, row in enumerate(stepping)}
        index = [at[row] * block + np.arange(prompt[at[row]], block) for row in np.flatnonzero(emitted)]
        if not index:
            return None
        rows = _on(logits.device, np.concatenate(index), torch.int64)
        firsts = (np.cumsum(emitted) - emitted).tolist()
        return self._scores(logits[rows], asked, before.tokens.reshape(-1)[rows], firsts)


def _on(device: torch.device, values: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Return ``values`` on ``device``, copied without waiting."""
    return to_device(torch.from_numpy(np.ascontiguousarray(values)).to(dtype), device)
