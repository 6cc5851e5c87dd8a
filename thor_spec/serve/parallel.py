"""One engine over several devices or nodes, by vLLM's own distributed engine; thor-spec only passes it on, checked."""

from thor_spec.config import ServeConfig
from thor_spec.errors import ConfigError

FLAGS = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
    "nnodes": "--nnodes",
    "node_rank": "--node-rank",
    "master_addr": "--master-addr",
    "executor": "--distributed-executor-backend",
}
EXECUTORS = ("mp", "ray")


def arguments(config: ServeConfig) -> dict[str, str]:
    """Return vLLM's flags with their values, for what was asked. Raises: ConfigError."""
    if config.executor is not None and config.executor not in EXECUTORS:
        raise ConfigError(f"--executor {config.executor} is not one of {', '.join(EXECUTORS)}.")
    nodes = config.nnodes or 1
    if config.executor == "ray" and nodes > 1:
        raise ConfigError("--nnodes is for --executor mp; with ray the cluster knows its nodes. Leave one of them out.")
    if nodes > 1 and config.master_addr is None:
        raise ConfigError(f"--nnodes {nodes} needs --master-addr, the address of node 0 that the others can reach.")
    if (config.node_rank or 0) >= nodes:
        raise ConfigError(f"--node-rank {config.node_rank} must lie in 0..{nodes - 1}, below --nnodes.")
    if (count := workers(config)) % nodes:
        raise ConfigError(
            f"{count} workers (tensor times pipeline times data parallel) cannot be shared out over {nodes} nodes."
        )
    return {flag: str(value) for name, flag in FLAGS.items() if (value := getattr(config, name)) is not None}


def workers(config: ServeConfig) -> int:
    """Return how many devices compute."""
    return (config.tensor_parallel or 1) * (config.pipeline_parallel or 1) * (config.data_parallel or 1)


def is_headless(config: ServeConfig) -> bool:
    """Return whether this node only works for node 0, and has no API to watch."""
    return bool(config.node_rank)
