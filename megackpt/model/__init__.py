"""GPT: blocks as chains of named steps.  The model names its values; the plan decides about them."""

from megackpt.model.gpt import GPTChunk, build_chunk, compile_steps

__all__ = ["GPTChunk", "build_chunk", "compile_steps"]
