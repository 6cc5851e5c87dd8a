"""The random numbers of the runner's sampling kernels, bit for bit, and the sampling that they serve.

vLLM draws them from a request's seed and a token's position, not from a stream: the same request gives the same
tokens whatever else is in the batch, and whichever implementation draws.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from thor_spec.vllm_plugin.runner_kernels.arrays import in_blocks, max_and_argmax

_LOW = 0xFFFFFFFF
_PHILOX_FACTORS = np.array([[0xCD9E8D57], [0xD2511F53]], dtype=np.uint64)
_PHILOX_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_PHILOX_ROUNDS = 10
_SMALLEST_UNIFORM = np.float32(4.6566127342e-10)
_DRAFT_POSITION_OFFSET = 1 << 30
_HIGH_WORD_DOMAIN = 0x9E3779B9


def philox_uniform(seeds: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return what ``tl.rand`` gives for each (seed, offset), [n] in [0, 1), raised to its smallest non-zero value.

    Source: Philox4x32-10, Salmon et al. 2011; of the four words, Triton takes the first.
    """
    seed, offset = seeds.astype(np.uint64), offsets.astype(np.uint64)
    keys = np.stack((seed & _LOW, seed >> 32))
    zero = np.zeros_like(offset)
    crossed = np.stack((zero, offset & _LOW))  # words 2 and 0, in the order in which they are multiplied
    kept = np.stack((offset >> 32, zero))  # words 1 and 3
    for _ in range(_PHILOX_ROUNDS):
        product = crossed * _PHILOX_FACTORS
        crossed = ((product >> 32) ^ kept ^ keys)[::-1]
        kept = product & _LOW
        keys = (keys + _PHILOX_KEY_STEPS) & _LOW
    word = crossed[1].astype(np.uint32).view(np.int32)
    uniform: NDArray[np.float32] = np.where(word < 0, ~word, word).astype(np.float32) * _SMALLEST_UNIFORM
    return np.maximum(uniform, _SMALLEST_UNIFORM)


def murmur_hash(
    seeds: NDArray[np.int64], positions: NDArray[np.int64], keys: NDArray[np.uint32], domain: int = 0
) -> NDArray[np.uint32]:
    """Return MurmurHash3 of each seed and position [n] with each key [v], uint32 [n, v].

    Source: MurmurHash3_x86_32, Appleby, over (seed low, seed high, position low, key).
    """
    hashed = np.full((len(seeds), 1), domain, dtype=np.uint32)
    for word in (seeds & _LOW, (seeds >> 32) & _LOW, positions & _LOW):
        hashed = _murmur_mix(hashed, word.astype(np.uint32)[:, None])
    hashed = _murmur_mix(hashed, keys[None, :])
    hashed ^= 16  # the length hashed, in bytes
    hashed ^= hashed >> 16
    hashed *= np.uint32(0x85EBCA6B)
    hashed ^= hashed >> 13
    hashed *= np.uint32(0xC2B2AE35)
    hashed ^= hashed >> 16
    return hashed


def _murmur_mix(hashed: NDArray[np.uint32], word: NDArray[np.uint32]) -> NDArray[np.uint32]:
    word = _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(hashed ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _rotated(word: NDArray[np.uint32], left: int) -> NDArray[np.uint32]:
    return (word << np.uint32(left)) | (word >> np.uint32(32 - left))


def gumbel_noise(seeds: NDArray[np.int64], positions: NDArray[np.int64], count: int, *, fp64: bool) -> NDArray[Any]:
    """Return Gumbel noise for tokens 0..count-1 of each row, [n, count] in float32 or float64."""
    keys = np.arange(count, dtype=np.uint32)
    low = murmur_hash(seeds, positions, keys)
    if fp64:
        high = murmur_hash(seeds, positions, keys, _HIGH_WORD_DOMAIN)
        mantissa = ((high.astype(np.uint64) << 32) | low) >> 11
        uniform64 = np.minimum((mantissa.astype(np.float64) + 0.5) * 2.0**-53, np.nextafter(1.0, 0.0))
        noise64: NDArray[np.float64] = -np.log(-np.log(uniform64))
        return noise64
    uniform = (low >> 16).astype(np.float32) * 2.0**-16 + ((low & 0xFFFF).astype(np.float32) + 0.5) * 2.0**-32
    return -np.log(-_log_of_complement(uniform))


def _log_of_complement(u: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log(1 - u), by the kernel's own series where u < 1/4: the sampled token hangs on its rounding."""
    series = 1.0 / 7.0 + u * (1.0 / 8.0)
    for power in range(6, 0, -1):
        series = 1.0 / power + u * series
    return np.where(u < 0.25, -u * series, np.log(np.maximum(1.0 - u, np.float32(2.0**-24))))


def sample_in_blocks(
    logits: NDArray[np.float32],
    temperatures: NDArray[np.float32],
    seeds: NDArray[np.int64],
    positions: NDArray[np.int64],
    block_size: int,
    *,
    fp64: bool,
    drafting: bool = False,
    divide: bool = False,
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Sample a token from each block of each row of ``logits`` [n, v], by the Gumbel-max trick.

    Args:
        temperatures: [n]; rows at 0 are not noised, so that their largest logit wins.
        drafting: draw the drafter's noise, which is independent of the target's.
        divide: divide by the temperature; otherwise the logits are divided already.

    Returns: the winning values, float32 or float64, and the tokens, both [n, ceil(v / block_size)].
    """
    random = temperatures != 0.0
    scores: NDArray[Any] = logits
    if random.any():
        everyone = bool(random.all())
        chosen = logits if everyone else logits[random]
        if divide:
            chosen = chosen / temperatures[random][:, None]
        drawn_at = positions[random].astype(np.int64) + (_DRAFT_POSITION_OFFSET if drafting else 0)
        noised = chosen + gumbel_noise(seeds[random], drawn_at, logits.shape[1], fp64=fp64)
        if everyone:
            scores = noised
        else:
            scores = logits.astype(noised.dtype)
            scores[random] = noised
    value, index = max_and_argmax(in_blocks(scores, block_size))
    return value, index + np.arange(index.shape[1]) * block_size
