"""What the cheaper products of ``wy`` cost in accuracy, emulated on the CPU, against float64.

    python -m benchmarks.wy_rounding [--steps 1000] [--only REGEX]

Triton's interpreter multiplies in float32 what ``tf32x3`` rounds first, and adds up in float32, so tests there see the
products of float16, but neither that nor a tensor core's sums; and it cuts bfloat16 off where a GPU rounds, so that two
parts of a state look twice as coarse. Here every operand is rounded as by the compiled kernel, and sums are cut off,
not rounded, after each step of a tensor core (16 terms, tf32: 8), the worst that is known of one. Exponents and factors
are taken as exact: they are the same in all variants. ``bf16x3`` is Triton's: two parts of each operand, rounded,
without the product of the lower ones.

Shapes: HV value heads, one key head for all of them; N nodes; K = V = 128.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks.record import write
from tests.kernels.cases import Parents, chain, comb, path_to, random_tree, star

HEADS, DIM = 2, 128
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rounding:
    """How a variant multiplies; see ``gdn_verify.tiles.Tiles``."""

    solve: str
    main: str
    parts: int

    def __str__(self) -> str:
        return f"{self.solve}, {self.main}, {self.parts}"


PAIRS = [*itertools.product(("tf32x3", "bf16x3"), repeat=2), ("fp16x3", "bf16x3"), ("fp16x3", "fp16x3")]
VARIANTS = [Rounding(*pair, parts) for pair in PAIRS for parts in (3, 2)]
GAUSS = {"a": lambda x: x, "b": lambda x: x, "k": lambda x: x}


@dataclass(frozen=True)
class Inputs:
    """How a case draws its inputs: each function gets standard normal numbers."""

    parents: Parents
    a: Callable[[torch.Tensor], torch.Tensor] = GAUSS["a"]
    b: Callable[[torch.Tensor], torch.Tensor] = GAUSS["b"]
    k: Callable[[torch.Tensor], torch.Tensor] = GAUSS["k"]


def alike(x: torch.Tensor) -> torch.Tensor:
    """Keys around one direction: cosines of about 0.9."""
    return x * 0.33 + torch.linspace(-1.7, 1.7, x.shape[-1])


def equal(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand_as(x)


CASES = {
    "chain 16": Inputs(chain(16)),
    "chain 64": Inputs(chain(64)),
    "tree 64": Inputs(random_tree(64, 7)),
    "comb 33": Inputs(comb(33)),
    "star 17": Inputs(star(17)),
    "chain 64, alike keys": Inputs(chain(64), k=alike),
    "tree 64, alike keys": Inputs(random_tree(64, 7), k=alike),
    "chain 64, equal keys": Inputs(chain(64), k=equal),
    "chain 64, alike keys, never forgets, beta 1": Inputs(
        chain(64), k=alike, a=lambda x: x * 0 - 60, b=lambda x: x * 0 + 200
    ),
    "chain 64, equal keys, never forgets, beta 1": Inputs(
        chain(64), k=equal, a=lambda x: x * 0 - 60, b=lambda x: x * 0 + 200
    ),
    "tree 64, forgets at once": Inputs(random_tree(64, 7), a=lambda x: x * 0 + 60),
    "tree 64, never forgets": Inputs(random_tree(64, 7), a=lambda x: x * 0 - 60),
    "chain 64, now and then": Inputs(chain(64), a=lambda x: torch.where(x > 0.5, 60.0, -5.0)),
    "chain 64, beta 0": Inputs(chain(64), b=lambda x: x * 0 - 200),
    "tree 64, beta 1": Inputs(random_tree(64, 7), b=lambda x: x * 0 + 200),
}
LONG = ["chain 16", "tree 64", "tree 64, alike keys", "tree 64, never forgets"]
"""Those that are decoded for many steps."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="of decoding, in the cases that are long")
    parser.add_argument("--only", default="", help="cases whose name matches this")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    marks = sorted({1, min(100, options.steps), options.steps})
    rows = []
    for name, inputs in CASES.items():
        if re.search(options.only, name):
            for row in errors(inputs, VARIANTS, marks if name in LONG else [1]):
                rows.append({"case": name, **row})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    print(write("wy-rounding", {"marks": marks, "errors": rows}, seeds={"inputs": 0}))


def table(rows: list[dict[str, object]]) -> str:
    """Return the largest error of each variant in 1e-6: over all cases at step 1, and at later steps."""
    steps = sorted({int(str(row["step"])) for row in rows})
    heads = [f"{what}, step {step}" for step in steps for what in ("output", "u", "state")]
    lines = ["| solve, main, parts | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for variant in VARIANTS:
        cells = []
        for step, what in itertools.product(steps, ("output", "u", "state")):
            seen = [float(str(r[what])) for r in rows if r["variant"] == str(variant) and r["step"] == step]
            cells.append(f"{max(seen) * 1e6:.2f}")
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def errors(inputs: Inputs, variants: list[Rounding], marks: list[int]) -> Iterator[dict[str, object]]:
    """Yield relative RMS errors of outputs, pseudo-values and committed states after ``marks`` steps of decoding.

    Every step verifies fresh inputs and commits the path to a random node, at most 16 of it. Each variant goes on with
    its own state, the reference with its own in float64.
    """
    g = torch.Generator().manual_seed(0)
    start = torch.randn(HEADS, DIM, DIM, generator=g)
    states = {variant: start for variant in variants}
    exact = start.double()
    rates = torch.randn(HEADS, generator=g), torch.randn(HEADS, generator=g)
    for step in range(1, marks[-1] + 1):
        x = Drawn.of(inputs, g, *rates)
        node = int(torch.randint(len(inputs.parents), (1,), generator=g))
        path = path_to(inputs.parents, node)[:16]
        want = exactly(x, exact)
        exact = x.committed(exact, want[1], path)
        for variant in variants:
            out, u = rounded(x, states[variant], variant)
            states[variant] = folded(x, states[variant], u, path)
            if step in marks:
                found = (out, u, states[variant])
                names = ("output", "u", "state")
                relative = {n: rms(w, f) for n, w, f in zip(names, (*want, exact), found, strict=True)}
                yield {"variant": str(variant), "step": step, **relative}


def rms(want: torch.Tensor, got: torch.Tensor) -> float:
    """Return the relative RMS error; infinite where something is not finite."""
    if not got.isfinite().all():
        return float("inf")
    size = max(float(want.square().mean().sqrt()), 1e-30)
    return float((got.double() - want).square().mean().sqrt()) / size


@dataclass(frozen=True)
class Drawn:
    """One step's inputs: q, k [N, K] and v [N, HV, V] in bfloat16's values; the rest in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    """[HV, N]"""
    g: torch.Tensor
    """log decays [HV, N]"""
    above: torch.Tensor
    """[N, N] booleans: whether column i lies on the path of row t, t included."""

    @classmethod
    def of(cls, inputs: Inputs, g: torch.Generator, A_log: torch.Tensor, dt_bias: torch.Tensor) -> "Drawn":
        n = len(inputs.parents)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=g)

        q, k = normal(n, DIM), inputs.k(normal(n, DIM))
        v, a, b = normal(n, HEADS, DIM), inputs.a(normal(HEADS, n)), inputs.b(normal(HEADS, n))
        above = torch.zeros(n, n, dtype=torch.bool)
        for t in range(n):
            above[t, path_to(inputs.parents, t)] = True
        rate = -(A_log.double() * 0.5).exp()[:, None]
        softplus = torch.nn.functional.softplus(a.double() + dt_bias.double()[:, None])
        return cls(
            q=q.bfloat16().double(), k=k.bfloat16().double(), v=v.bfloat16().double(),
            beta=torch.sigmoid(b.double()), g=rate * softplus, above=above,
        )  # fmt: skip

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Factors that normalize queries and keys, [N] each."""
        q, k = (torch.rsqrt(z.square().sum(-1) + 1e-6) for z in (self.q, self.k))
        return q * DIM**-0.5, k

    @property
    def gamma(self) -> torch.Tensor:
        return torch.einsum("ti,hi->ht", self.above.double(), self.g)

    @property
    def between(self) -> torch.Tensor:
        """D [HV, N, N]."""
        exponent = self.gamma[:, :, None] - self.gamma[:, None, :]
        return exponent.masked_fill(~self.above, -torch.inf).exp()

    def committed(self, state: torch.Tensor, u: torch.Tensor, path: list[int]) -> torch.Tensor:
        """Return the state [HV, V, K] after the nodes of ``path``, in float64. u: [HV, V, N]."""
        keys = self.k * self.scales[1][:, None]
        for t in path:
            state = state * self.g[:, t].exp()[:, None, None] + u[:, :, t, None] * keys[t]
        return state


def exactly(x: Drawn, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and pseudo-values [HV, V, N] in float64."""
    q_scale, k_scale = x.scales
    q, k = x.q * q_scale[:, None], x.k * k_scale[:, None]
    fade, between = x.gamma.exp(), x.between
    r = x.v.permute(1, 2, 0) - (state @ k.T) * fade[:, None, :]
    lower = torch.tril(between * (k @ k.T), -1) * x.beta[:, :, None] + torch.eye(len(q), dtype=torch.float64)
    u = torch.linalg.solve_triangular(lower, (r * x.beta[:, None, :]).mT, upper=False, unitriangular=True).mT
    return (state @ q.T) * fade[:, None, :] + u @ (between * (q @ k.T)).mT, u


def rounded(x: Drawn, state: torch.Tensor, rounding: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``wy_solve`` and ``wy`` compute, [HV, V, N] in float32, for a float32 state [HV, V, K]."""
    n = len(x.q)
    block = next(size for size in (16, 32, 64) if n <= size)
    q, k, v = (torch.nn.functional.pad(z, (0, 0) * (z.dim() - 1) + (0, block - n)).float() for z in (x.q, x.k, x.v))
    beta, fade = (torch.nn.functional.pad(z, (0, block - n)).float() for z in (x.beta, x.gamma.exp()))
    q_scale, k_scale = (torch.nn.functional.pad(z, (0, block - n)).float() for z in x.scales)
    between = torch.nn.functional.pad(x.between, (0, block - n, 0, block - n)).float()
    solve, main = (PRODUCT[name] for name in (rounding.solve, rounding.main))
    D = between * k_scale
    seen = summed((q, k.T)) * D * (q_scale * DIM**0.5)[:, None]
    A = torch.tril(summed((k, k.T)) * D * (beta * k_scale)[:, :, None], -1)
    X = inverse(A, solve)
    T, Y = X * beta[:, None, :], solve(seen, X) * beta[:, None, :]
    parts = split(state, rounding.parts)
    r = v.permute(1, 2, 0) - summed(*((part, k.T) for part in parts)) * (fade * k_scale)[:, None, :]
    o = summed(*((part, q.T) for part in parts)) * (fade * q_scale)[:, None, :]
    size = 2.0 ** r.abs().amax(2, keepdim=True).clamp(min=1e-30).log2().floor()
    u = main(r / size, T.mT) * size
    return (o + main(r / size, Y.mT) * size * DIM**-0.5)[:, :, :n], u[:, :, :n]


def inverse(A: torch.Tensor, product: Product) -> torch.Tensor:
    """Return the inverse of I + A [HV, N, N] as ``wy_solve`` finds it."""
    n = A.shape[-1]
    X = torch.zeros_like(A)
    rest = A.clone()
    for b in range(0, n, 16):
        block = slice(b, b + 16)
        T = torch.eye(16).expand(len(A), 16, 16).clone()
        for i in range(15):
            T = T - A[:, block, b + i, None] * T[:, None, i]
        X[:, block, block] = T
        rest[:, block, block] = 0
    if n > 16:
        M = product(X, rest)
        X = X - product(M, X)
        if n > 32:
            X = X + product(product(M, M), X)
    return X


def folded(x: Drawn, state: torch.Tensor, u: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Return the float32 state after ``path``, at most 16 nodes, as one product in three parts."""
    after = x.g[:, path].flip(1).cumsum(1).flip(1) - x.g[:, path]
    weights = u[:, :, path] * (after.exp() * x.scales[1][path]).float()[:, None, :]
    state = state * x.g[:, path].sum(1).exp().float()[:, None, None]
    return summed(*((part, x.k[path].float()) for part in split(weights, 3)), start=state)


def summed(
    *terms: tuple[torch.Tensor, torch.Tensor], start: torch.Tensor | float = 0.0, at_once: int = 16
) -> torch.Tensor:
    """Return the sum of products as a tensor core adds them up: exactly within a step, then cut off to float32."""
    total: torch.Tensor | None = None
    for x, y in terms:
        for i in range(0, x.shape[-1], at_once):
            part = x[..., i : i + at_once].double() @ y[..., i : i + at_once, :].double()
            total = cut_off(part + (start if total is None else total))
    assert total is not None
    return total.float()


def cut_off(x: torch.Tensor) -> torch.Tensor:
    """Round float64 to float32's values, towards zero."""
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), torch.nextafter(near, torch.zeros(())), near).double()


def kept(x: torch.Tensor, bits: int, *, nearest: bool) -> torch.Tensor:
    """Return float32 x to its upper ``bits``, by integer operations; halves go away from zero."""
    low = 32 - bits
    return ((x.view(torch.int32) + (nearest << low >> 1)) & -(1 << low)).view(torch.float32)


def split(x: torch.Tensor, parts: int) -> list[torch.Tensor]:
    """Return bfloat16's numbers that a float32 of the state is multiplied as, smallest first."""
    high = kept(x, 16, nearest=parts == 2)
    middle = x - high
    if parts == 2:
        return [middle.bfloat16().float(), high]
    return [(middle - kept(middle, 16, nearest=False)).bfloat16().float(), kept(middle, 16, nearest=False), high]


def bf16x3(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    (x_low, x_high), (y_low, y_high) = split(x.contiguous(), 2), split(y.contiguous(), 2)
    return summed((x_low, y_high), (x_high, y_low), (x_high, y_high))


def tf32x3(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The upper parts are rounded, the lower ones cut off by the tensor core, which ignores the last 13 bits."""
    (x_high, x_low), (y_high, y_low) = (
        (kept(z, 19, nearest=True), kept(z - kept(z, 19, nearest=True), 19, nearest=False))
        for z in (x.contiguous(), y.contiguous())
    )
    return summed((x_low, y_high), (x_high, y_low), (x_high, y_high), at_once=8)


def fp16x3(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """For operands of about 1 at most: float16 has no small exponents, so that errors are relative to 1."""
    (x_high, x_low), (y_high, y_low) = (
        (high.half().float(), (z - high).half().float())
        for z, high in ((z, kept(z, 19, nearest=True)) for z in (x.contiguous(), y.contiguous()))
    )
    return summed((x_low, y_high), (x_high, y_low), (x_high, y_high))


PRODUCT: dict[str, Product] = {"tf32x3": tf32x3, "bf16x3": bf16x3, "fp16x3": fp16x3}

if __name__ == "__main__":
    main()
