"""The models that we serve, and the stock classes that ours derive from."""

from thor_spec.vllm_plugin.seam import Seam

# Architecture -> the stock class that ours derives from. Both stay under the stock name: vLLM keeps tables by it.
TARGETS = {
    "Qwen3ForCausalLM": "vllm.model_executor.models.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "vllm.model_executor.models.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "vllm.model_executor.models.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "vllm.model_executor.models.qwen3_5:Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration": "vllm.model_executor.models.qwen3_5:Qwen3_5MoeForConditionalGeneration",
}
DRAFTERS = {"DFlashDraftModel": "vllm.model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM"}
MODELS = {**TARGETS, **DRAFTERS}

LLADA2 = "LLaDA2MoeModelLM"
"""Which no vLLM knows; registered under its published name."""
OWN_MODELS = {LLADA2: "thor_spec.vllm_plugin.llada2.model:LLaDA2MoeModelLM"}
SERVED = (*TARGETS, *OWN_MODELS)


def model_seam(architecture: str) -> Seam:
    """Return the seam of the stock class for ``architecture``. Raises: KeyError."""
    return Seam(
        target=MODELS[architecture],
        signature=("self", "*", "vllm_config", "prefix"),
        why=f"derive our {architecture}",
        drop_when="model states become selectable by configuration",
    )
