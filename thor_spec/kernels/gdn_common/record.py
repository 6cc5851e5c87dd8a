"""The record of a verification: what is needed to commit any path of it, about 1 % of the states themselves.

Shapes: S request slots, C rows per slot, H key heads, HV value heads, K key dim, V value dim.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from thor_spec.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Persistent buffers of one layer, by request slot.

    With deferred commits the rows of a slot are a ring: from row ``start`` on, ``pending`` rows are accepted and not
    yet in the state, and the next verification writes behind them. So a chain's accepted rows never move.

    A state advances over a row as ``S = exp(log_decay) * S + u (k * k_scale)^T``, whichever variant wrote the row.
    """

    k: torch.Tensor
    """Keys as they came, before L2 normalization [S, C, H, K]; half the bytes of normalized float32 ones."""
    k_scale: torch.Tensor
    """Factor that normalizes a key [S, C, H], float32."""
    u: torch.Tensor
    """Pseudo-values: what the delta rule adds along the normalized key [S, C, HV, V], float32."""
    log_decay: torch.Tensor
    """[S, C, HV], or [S, C, HV, K] where every channel decays by itself; float32."""
    start: torch.Tensor | None = None
    """Row of the first pending token [S], int32."""
    pending: torch.Tensor | None = None
    """Accepted rows that the state does not contain yet [S], int32; None: the state always contains them."""
    flush: torch.Tensor | None = None
    """Non-zero: the next verification writes the pending rows into the state [S], int32."""

    @classmethod
    def allocate(
        cls,
        *,
        slots: int,
        rows: int,
        heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        per_channel: bool = False,
        deferred: bool = False,
        accumulate: torch.dtype = torch.float32,
    ) -> "Record":
        """Return buffers for ``rows`` rows per request slot; see ``rows_needed``.

        Args:
            dtype: of the keys.
            deferred: also keep counters of pending rows. Layers of one model may share those of the first
                (``dataclasses.replace``), since they accept the same tokens.
            accumulate: float32, or float64 for the reference.
        """

        def new(*shape: int, dtype: torch.dtype = accumulate) -> torch.Tensor:
            return torch.empty(slots, *shape, dtype=dtype, device=device)

        def counters() -> torch.Tensor:
            return torch.zeros(slots, dtype=torch.int32, device=device)

        decay = (rows, value_heads, key_dim) if per_channel else (rows, value_heads)
        return cls(
            k=new(rows, heads, key_dim, dtype=dtype),
            k_scale=new(rows, heads),
            u=new(rows, value_heads, value_dim),
            log_decay=new(*decay),
            start=counters() if deferred else None,
            pending=counters() if deferred else None,
            flush=counters() if deferred else None,
        )

    def __post_init__(self) -> None:
        slots, rows, value_heads, _ = self.u.shape
        fits = (
            self.k.shape[:2] == (slots, rows)
            and self.k_scale.shape == self.k.shape[:3]
            and self.log_decay.shape[:3] == (slots, rows, value_heads)
            and (self.pending is None) == (self.flush is None) == (self.start is None)
        )
        if not fits:
            raise ConfigError(
                f"The record's buffers disagree: k {tuple(self.k.shape)}, k_scale {tuple(self.k_scale.shape)}, "
                f"u {tuple(self.u.shape)}, log_decay {tuple(self.log_decay.shape)}; start, pending, flush all or none. "
                "Use Record.allocate."
            )
        if not all(t.is_contiguous() for t in (self.k, self.k_scale, self.u, self.log_decay)):
            raise ConfigError("The record's buffers must be contiguous: kernels compute addresses from shapes.")

    @property
    def rows(self) -> int:
        """Rows per request slot."""
        return int(self.u.shape[1])

    def ring(self, rec: int, offsets: Iterable[int]) -> list[int]:
        """Return the rows at ``offsets`` from a slot's first pending one."""
        first = 0 if self.start is None else int(self.start[rec])
        return [(first + offset) % self.rows for offset in offsets]

    @property
    def per_channel(self) -> bool:
        """Whether every channel of a key decays by itself."""
        return bool(self.log_decay.dim() == 4)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one request holds in this layer."""
        return sum(t[0].numel() * t.element_size() for t in (self.k, self.k_scale, self.u, self.log_decay))


def rows_needed(nodes: int, *, path: int, period: int | None = None) -> int:
    """Return the rows per slot for trees of up to ``nodes`` nodes.

    Args:
        path: nodes on the longest path that can be accepted (``nodes`` for a chain).
        period: accepted tokens after which the state is written; None: each step commits on its own.

    New rows never take the place of pending ones, even when those are written to the state in the same launch: other
    programs may still be reading them.
    """
    if not 1 <= path <= nodes or (period is not None and period < 1):
        raise ConfigError(f"path={path} must lie in 1..nodes={nodes} and period={period} be at least 1.")
    return nodes if period is None else period - 1 + path + nodes
