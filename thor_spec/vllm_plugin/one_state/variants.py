"""What belongs to a kernel: the scratch of a layer, and the commit that knows this scratch."""

from typing import Any, NamedTuple

from thor_spec.vllm_plugin.one_state.choice import Kernel
from thor_spec.vllm_plugin.one_state.native import NativeCommit, NativeScratch
from thor_spec.vllm_plugin.one_state.recorded import RecordCommit, RecordScratch
from thor_spec.vllm_plugin.one_state.unrolled import TorchCommit, TorchScratch


class Variant(NamedTuple):
    """Made with (layer, rows), and with (layers, groups, tables, rows)."""

    scratch: Any
    commit: Any


VARIANTS: dict[Kernel, Variant] = {
    "replay": Variant(RecordScratch, RecordCommit),
    "wy": Variant(RecordScratch, RecordCommit),
    "native": Variant(NativeScratch, NativeCommit),
    "torch": Variant(TorchScratch, TorchCommit),
}
