"""Where we touch vLLM for vLLM as one piece: its engine for use in one process, its load generator."""

from thor_spec.vllm_plugin.seam import Seam

BENCH_SERVE_ARGS = Seam(
    target="vllm.benchmarks.serve:add_cli_args",
    signature=("parser",),
    why="measure serving with vLLM's own load generator",
    drop_when="the CPU build's `vllm bench serve` finds its own metadata",
)
BENCH_SERVE = Seam(
    target="vllm.benchmarks.serve:main",
    signature=("args",),
    why="measure serving with vLLM's own load generator",
    drop_when="the CPU build's `vllm bench serve` finds its own metadata",
)
LLM = Seam(
    target="vllm.entrypoints.llm:LLM",
    signature=None,
    why="look into an engine of one's own process",
    drop_when="never: it is vLLM's public interface for offline use",
)
OFFLINE_ENGINE = Seam(
    target="vllm.entrypoints.llm:LLM.from_engine_args",
    signature=("cls", "engine_args"),
    why="evaluate in one process with the engine that is served",
    drop_when="never: it is vLLM's public interface for offline use",
)
ENGINE_ARGUMENTS = Seam(
    target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
    signature=("cls", "args"),
    why="evaluate with the very command line that is served",
    drop_when="never: it is vLLM's public interface for offline use",
)
ARGUMENT_PARSER = Seam(
    target="vllm.utils.argparse_utils:FlexibleArgumentParser",
    signature=None,
    why="evaluate with the very command line that is served",
    drop_when="never: it is vLLM's public interface for offline use",
)
SAMPLING_PARAMS = Seam(
    target="vllm.sampling_params:SamplingParams",
    signature=None,
    why="ask for the log-probabilities of a prompt",
    drop_when="never: it is vLLM's public interface for offline use",
)
