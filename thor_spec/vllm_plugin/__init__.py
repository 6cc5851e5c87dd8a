"""The out-of-tree vLLM plugin. Nothing here changes vLLM until a configuration names ``thor_spec``.

This module stays trivial: vLLM only logs a plugin that fails to *import*, but lets an error raised by
:func:`register` stop the start.
"""


def register() -> None:
    """Activate the plugin in this process; vLLM calls this in every process it starts."""
    from thor_spec.vllm_plugin import activation

    activation.activate()
