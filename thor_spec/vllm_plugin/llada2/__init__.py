"""LLaDA2 in vLLM's V2 runner.

A block that is being denoised travels as vLLM's diffusion models' canvases do: as draft tokens, of which a step takes
all or none. Three things differ from vLLM's own diffusion model:

- A prompt's end that fills no block is computed once with the prompt and *given back*: the runner's count of computed
  tokens goes back to the block's start, and every later step computes the whole block. The scheduler's count stays, so
  that it sees a decode of ``block`` tokens each time, which is what a captured graph replays.
- Attention takes a prompt apart into rows of one block each, none of them causal, every row ending where its block
  ends. So one kernel call serves prompts and blocks, and no flag varies between replays of a graph.
- The step that finds nothing to change has stored the keys and values that stay, and so commits at once.
"""
