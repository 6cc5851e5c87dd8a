#!/usr/bin/env python3
"""Compile the GDN kernels for GPUs that are not here, and print registers, spills and shared memory as JSON.

    python tools/kernel_aot.py [--arch 90 --arch 110] [--only REGEX] [--keep FOLDER]

The launchers run as they are; only Triton's driver is replaced by one that names the target and launches nothing, so
what is compiled is what they would launch. ptxas is the one that comes with Triton.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # an interpreted function has nothing to compile
os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp(prefix="kernel-aot-"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks import path_layers, record, upstream
from benchmarks.path_layers import PathLayer
from thor_spec.kernels.gdn_commit import kernel as commit
from thor_spec.kernels.gdn_common.record import Record, rows_needed
from thor_spec.kernels.gdn_verify import kernel as verify
from thor_spec.kernels.gdn_verify.tiles import Tiles, commit_tiles, replay_tiles, wy_tiles
from thor_spec.kernels.state_commit import kernel as state_commit
from thor_spec.kernels.state_commit.plan import Layer, Layers, Plan, Step
from thor_spec.kernels.tree_attention import kernel as tree_attention
from thor_spec.kernels.tree_attention.tiles import Tiles as Attention
from thor_spec.kernels.tree_build import kernel as tree_build
from thor_spec.kernels.tree_build.reference import Layout
from thor_spec.kernels.tree_paths import kernel as tree_paths
from thor_spec.kernels.tree_paths.reference import allocate
from thor_spec.kernels.tree_rows import kernel as tree_rows
from thor_spec.kernels.tree_rows.reference import Rows
from thor_spec.kernels.tree_sums import kernel as tree_sums
from thor_spec.kernels.tree_walk import kernel as tree_walk
from thor_spec.kernels.tree_walk.reference import Trees

PROCESSORS = {90: 132, 110: 20}
HEADS, VALUE_HEADS, DIM = 16, 32, 128


class Compiler:
    """Stands in for Triton's driver: knows a target, has no device, and collects what is compiled."""

    def __init__(self, arch: int) -> None:
        self.arch = arch
        self.compiled: list[Any] = []

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # Triton caches by device: another architecture must be another one

    def get_current_stream(self, device: int) -> int:  # noqa: ARG002
        return 0


def ptxas(arch: int) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return str(folder / ("ptxas" if arch < 100 else "ptxas-blackwell"))


def resources(arch: int, ptx: str) -> dict[str, int]:
    """Return registers, spilled bytes and shared memory, as ptxas reports them."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        done = subprocess.run(
            [ptxas(arch), "-v", f"--gpu-name=sm_{arch}a", str(source), "-o", str(Path(folder) / "kernel.cubin")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"ptxas refused the kernel for sm_{arch}a:\n{done.stderr}")

    def number(pattern: str) -> int:
        found = re.search(pattern, done.stderr)
        return int(found[1]) if found else 0

    return {
        "registers": number(r"Used (\d+) registers"),
        "spill_stores": number(r"(\d+) bytes spill stores"),
        "spill_loads": number(r"(\d+) bytes spill loads"),
        "stack": number(r"(\d+) bytes stack frame"),
    }


def sums(ttgir: str, ptx: str) -> dict[str, list[Any]]:
    """Return what decides the order of a sum.

    That is the layouts that are summed over, runs of fused multiply-adds, and which of a thread's first two products
    is the fused one: with some compilers not the same one in all of its rows.
    """
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S.*)$", ttgir, re.MULTILINE))
    summed = re.findall(r"tt\.reduce\"(?:.|\n)*?\}\) : \(tensor<\S+, (#\w+)>\)", ttgir)
    operations = re.findall(r"^\s*((?:fma\.rn|mul|add|sub|shfl\S*|bar)\.\S*)", ptx, re.MULTILINE)
    runs = [len(list(run)) for kind, run in itertools.groupby(operations) if kind == "fma.rn.f32"]
    products = {d: (x, y) for d, x, y in re.findall(r"^\s*mul\.f32\s+(%r\d+), (%r\d+), (%r\d+);", ptx, re.MULTILINE)}
    fused = re.findall(r"^\s*fma\.rn\.f32\s+%r\d+, (%r\d+), (%r\d+), (%r\d+);", ptx, re.MULTILINE)
    firsts = [(products[z][0], x) for x, _, z in fused if z in products]
    swapped = sum((x, z) in set(firsts) for z, x in firsts)
    return {
        "swapped_first_products": [swapped],
        "summed_over": sorted({layouts[name] for name in summed}),
        "fused_runs": [n for n in runs if n > 3],
    }


def layer(
    requests: int, nodes: int, *, tree: bool, deferred: bool, state: torch.dtype, inputs: torch.dtype
) -> dict[str, Any]:
    """Return the arguments of ``gdn_verify`` at the head dims of Qwen3.5-35B; few slots, since nothing runs."""
    tokens = requests * nodes
    wide = torch.empty(tokens, 2 * HEADS * DIM + VALUE_HEADS * DIM, dtype=inputs)
    q, k, v = wide.split([HEADS * DIM, HEADS * DIM, VALUE_HEADS * DIM], dim=1)
    buffers = Record.allocate(
        slots=1, rows=rows_needed(nodes, path=nodes, period=1 if deferred else None), heads=HEADS,
        value_heads=VALUE_HEADS, key_dim=DIM, value_dim=DIM, dtype=inputs, device="cpu", deferred=deferred,
    )  # fmt: skip
    parents = torch.zeros(requests, nodes, dtype=torch.int32)
    return {
        "q": q.unflatten(1, (HEADS, DIM)), "k": k.unflatten(1, (HEADS, DIM)), "v": v.unflatten(1, (VALUE_HEADS, DIM)),
        "a": torch.empty(tokens, VALUE_HEADS, dtype=inputs), "b": torch.empty(tokens, VALUE_HEADS, dtype=inputs),
        "A_log": torch.empty(VALUE_HEADS), "dt_bias": torch.empty(VALUE_HEADS),
        "state": torch.empty(2, VALUE_HEADS, DIM, DIM, dtype=state),
        "state_indices": torch.ones(requests, dtype=torch.int32),
        "cu_nodes": torch.zeros(requests + 1, dtype=torch.int32),
        "record": buffers, "record_indices": torch.zeros(requests, dtype=torch.int32),
        "paths": allocate(requests, nodes, "cpu") if tree else None,
        "parents": parents,
    }  # fmt: skip


def configurations(arch: int) -> list[tuple[str, Any]]:
    """Return a name and a launch for every default configuration that the tables can choose."""
    sms = PROCESSORS[arch]
    f32, bf16 = torch.float32, torch.bfloat16
    launches: list[tuple[str, Any]] = []
    seen = set()

    def add(name: str, launch: Any) -> None:
        if name not in seen:
            seen.add(name)
            launches.append((name, launch))

    for requests in (1, 8, 64):
        heads = requests * VALUE_HEADS
        for tree in (False, True):
            for deferred in (False, True):
                kind = f"{'tree' if tree else 'chain'}{' deferred' if deferred else ''}"
                for state in (f32, bf16):
                    tiles = replay_tiles(heads=heads, value_dim=DIM, tree=tree, deferred=deferred, sms=sms)
                    x = layer(1, 16, tree=tree, deferred=deferred, state=state, inputs=bf16)
                    x.pop("parents")
                    name = f"replay {kind} {str(state)[6:]} state, BV {tiles.block_v}, walkers {tiles.walkers}"
                    add(name, lambda x=x, tiles=tiles: verify.gdn_verify(**x, variant="replay", tiles=tiles))
                for nodes in (16, 32, 64):
                    wide = wy_tiles(heads=heads, value_dim=DIM, block=nodes, sms=sms)
                    for state, inputs in ((f32, bf16), (bf16, bf16), (f32, f32)):
                        x = layer(1, nodes, tree=tree, deferred=deferred, state=state, inputs=inputs)
                        x.pop("parents")
                        name = (
                            f"wy {kind} {str(state)[6:]} state, {str(inputs)[6:]} inputs, "
                            f"N {nodes}, BV {wide.block_v}, warps {wide.warps}, parts {wide.parts}"
                        )
                        width = None if tree else nodes
                        add(name, lambda x=x, w=width, t=wide: verify.gdn_verify(**x, variant="wy", width=w, tiles=t))
        for method, state, deferred in itertools.product(("replay", "product"), (f32, bf16), (False, True)):
            for path in (None, torch.zeros(1, 16, dtype=torch.int32)):
                tiles = commit_tiles(heads=heads, value_dim=DIM, sms=sms)
                x = layer(1, 16, tree=True, deferred=deferred, state=state, inputs=bf16)
                accepted = torch.ones(1, dtype=torch.int32)
                kind = f"{'chain' if path is None else 'tree'}{' deferred' if deferred else ''}"
                add(
                    f"commit {method} {kind} {str(state)[6:]} state, BV {tiles.block_v}",
                    lambda x=x, path=path, accepted=accepted, method=method, tiles=tiles: commit.gdn_commit(
                        x["state"],
                        x["state_indices"],
                        x["record"],
                        x["record_indices"],
                        path,
                        accepted,
                        method=method,
                        tiles=tiles,
                    ),
                )
    snapshot, _ = upstream.load()
    for state in (f32, bf16):
        if snapshot is None:
            break
        x = layer(1, 16, tree=False, deferred=False, state=state, inputs=bf16)
        q, k, v = (x[name].contiguous()[None] for name in "qkv")
        add(
            f"vllm {str(state)[6:]} state",
            lambda x=x, q=q, k=k, v=v, snapshot=snapshot: snapshot(
                A_log=x["A_log"], a=x["a"], b=x["b"], dt_bias=x["dt_bias"], q=q, k=k, v=v, initial_state=x["state"],
                cu_seqlens=x["cu_nodes"], ssm_state_indices=torch.ones(1, 16, dtype=torch.int32),
                num_accepted_tokens=torch.ones(1, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
            ),
        )  # fmt: skip
        x = layer(1, 16, tree=False, deferred=False, state=state, inputs=bf16)
        x.pop("parents")
        add(
            f"replay like vllm {str(state)[6:]} state",
            lambda x=x: verify.gdn_verify(**x, variant="replay", tiles=Tiles(block_v=32, warps=4)),
        )
    x = layer(1, 64, tree=True, deferred=True, state=f32, inputs=bf16)
    path, accepted = torch.zeros(1, 16, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for requests, nodes in ((1, 1), (1, 4), (1, 16), (64, 1), (64, 4), (64, 64)):
        one = PathLayer(
            dims=path_layers.Dims(full_layers=1), requests=1, parents=tuple(range(-1, nodes - 1)), context=16,
            device="cpu", sms=sms,
        )  # fmt: skip
        cut = Attention.choose(width=nodes, group=8, requests=requests, kv_heads=2, max_slots=32768, sms=sms)
        add(f"paths attention N {nodes}, {requests} requests", one.attend(cut))
        if (requests, nodes) == (1, 16):
            add("paths convolution", one.convolve())
            add("paths window", one.commit_window())
            add("paths cache", one.compact())
    for state in (f32, bf16):
        x16 = layer(1, 16, tree=False, deferred=False, state=state, inputs=bf16)
        channels = 2 * HEADS * DIM + VALUE_HEADS * DIM
        window = torch.empty(2, 3, channels, dtype=bf16).transpose(1, 2)
        inputs = torch.empty(1, 16, channels, dtype=bf16)
        all_layers = Layers.of([Layer(state=x16["state"], window=window, record=x16["record"], inputs=inputs, group=0)])
        plan = Plan.allocate(groups=1, rows=1, device="cpu")
        add(f"all states {str(state)[6:]}", lambda a=all_layers, p=plan: state_commit.commit_states(a, p, rows=1))
    add("all windows", lambda: state_commit.commit_windows(all_layers, plan, rows=1))
    one_row = torch.zeros(1, dtype=torch.int32)
    step = Step(
        idx_mapping=one_row, verified=torch.ones(1, dtype=torch.bool), seq_lens=one_row,
        query_start_loc=torch.zeros(2, dtype=torch.int32), computed=one_row,
    )  # fmt: skip
    tables = torch.zeros(3, dtype=torch.int64)
    for block_size in (0, 1056):
        add(
            f"all plan, blocks of {block_size}",
            lambda b=block_size: state_commit.plan_commit(
                Plan.allocate(groups=3, rows=1, device="cpu"), step, tables, stride=8, block_size=b
            ),
        )
    add("tree_paths", lambda: tree_paths.tree_paths(x["parents"], x["cu_nodes"]))
    launches += steps_of_trees(width=33)
    add("compact", lambda: commit.gdn_compact(x["record"], x["state_indices"], x["record_indices"], path, accepted))
    add("advance", lambda: commit.gdn_advance(x["record"], x["state_indices"], x["record_indices"], accepted, period=8))
    return launches


def steps_of_trees(width: int) -> list[tuple[str, Any]]:
    """Return the launches around a pass over trees: building, laying out, walking."""
    i32, one = torch.int32, torch.zeros(1, dtype=torch.int32)
    slots = torch.zeros(2, width, dtype=i32)
    trees = Trees(
        parents=slots, depths=slots, path=slots, accepted=torch.zeros(2, dtype=i32),
        counts=torch.zeros(3, width, dtype=torch.int64),
    )  # fmt: skip
    rows = Rows(
        row_parents=slots, lengths=trees.accepted, offsets=torch.zeros(64, dtype=torch.int64), path=slots,
        positions=torch.zeros(64, dtype=torch.int64), accepted=trees.accepted, paths=allocate(2, width, "cpu"),
    )  # fmt: skip
    layout = Layout(*(torch.zeros(width, dtype=i32),) * 3)
    tokens, starts, first = torch.zeros(width, dtype=torch.int64), torch.zeros(2, dtype=i32), one.long()
    likely, yes = torch.zeros(1, width), torch.ones(1, dtype=torch.bool)
    scores = torch.zeros(1, 15, 16)
    return [
        ("tree_build", lambda: tree_build.build_trees(scores, scores.long(), yes, nodes=width - 1, slots=one)),
        ("tree_build widths", lambda: tree_build.lay_widths(layout, scores.long(), yes, slots=one)),
        ("tree_rows", lambda: tree_rows.lay_rows(rows, slots, slots, one, yes, starts, one, tokens)),
        ("tree_rows order", lambda: tree_rows.path_order(tokens, slots[:1], trees.accepted, starts)),
        ("tree_walk", lambda: tree_walk.tree_walk(trees, tokens, tokens, starts, first)),
        ("tree_sums", lambda: tree_sums.tree_sums(likely, scores, one, trees.accepted)),
        ("tree_walk relaxed", lambda: tree_walk.tree_walk(trees, tokens, tokens, starts, first, likely)),
    ]


def compile_only(arch: int) -> Compiler:
    """Make every launch compile for ``arch`` and go no further; return the collector."""
    compiler = Compiler(arch)
    triton.runtime.driver.set_active(compiler)
    for module in (verify, tree_attention):
        setattr(module, "launches_early", lambda device: True)  # noqa: ARG005, B010
    original = getattr(JITFunction, "run_and_launch", JITFunction.run)
    JITFunction.run_and_launch = original

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:  # noqa: ARG001
        kernel = original(self, *args, grid=grid, warmup=True, **kwargs)
        compiler.compiled.append(kernel)
        return kernel

    JITFunction.run = run
    return compiler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, action="append", choices=sorted(PROCESSORS))
    parser.add_argument("--only", default="", help="compile configurations whose name matches this")
    parser.add_argument("--record", action="store_true", help="also write evidence/…-kernel-aot/record.json")
    parser.add_argument("--keep", type=Path, help="write PTX and TTGIR here")
    options = parser.parse_args()
    rows = []
    for arch in options.arch or sorted(PROCESSORS):
        compiler = compile_only(arch)
        for name, launch in configurations(arch):
            if not re.search(options.only, name):
                continue
            compiler.compiled.clear()
            launch()
            for kernel in compiler.compiled:
                row = {"arch": f"sm_{arch}a", "configuration": name, "kernel": kernel.metadata.name}
                row |= {"shared": kernel.metadata.shared, **resources(arch, kernel.asm["ptx"])}
                row |= sums(kernel.asm["ttgir"], kernel.asm["ptx"]) if re.match("vllm|replay", name) else {}
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
                if options.keep:
                    options.keep.mkdir(parents=True, exist_ok=True)
                    stem = re.sub(r"\W+", "-", f"sm{arch} {name} {kernel.metadata.name}")
                    for kind in ("ptx", "ttgir"):
                        (options.keep / f"{stem}.{kind}").write_text(kernel.asm[kind], encoding="utf-8")
    result = {"triton": triton.__version__, "kernels": rows}
    if options.record:
        print(record.write("kernel-aot", result), file=sys.stderr)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
