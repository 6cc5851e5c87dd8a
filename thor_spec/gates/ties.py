"""When two tokens are equally likely, as far as bf16 can tell.

A verify step runs K + 1 tokens at once and a plain step one, through other operators, so the last bits of a bf16 logit
may differ. Greedy decoding then may take either of two tokens; nothing else may differ.
"""

import math

# On its way to the logits a value is rounded to bf16 about this often per layer: norms, projections, activations,
# mixer, gate, experts and residual sums, twice each.
ROUNDINGS_PER_LAYER = 10
UNIT_ROUNDOFF = 2.0**-9
SIGMAS = 4


def tie_bound(spread: float, layers: int) -> float:
    """Return the gap of two logits below which two ways of computing them in bf16 may order them differently.

    Roundings add up like a random walk, relative to the spread of the logits; a gap has two logits of two computations
    each, hence the factor 2 on its standard deviation.

    Args:
        spread: standard deviation of the logits at one place, over the vocabulary.
        layers: of the target.
    """
    return SIGMAS * 2 * UNIT_ROUNDOFF * math.sqrt(ROUNDINGS_PER_LAYER * layers) * spread
