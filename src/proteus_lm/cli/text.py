"""`proteus generate`: text from a prompt."""

from __future__ import annotations

import math
import sys

from proteus_lm.cli.common import Device, Run, app, check_seed, choose_device, no_bars
from proteus_lm.cli.memory import MemoryContext, MemoryPolicy, spread


@app.command
def generate(
    run: Run,
    /,
    *,
    prompt: str,
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    num_beams: int = 1,
    step: int | None = None,
    device: Device = "auto",
    memory_policy: MemoryPolicy | None = None,
    memory_context: MemoryContext = None,
) -> None:
    """Let a run go on from a prompt. The text goes to standard output, without the prompt.

    Example: proteus generate runs/e8 --prompt "The memory of" --temperature 0

    Args:
        run: Folder that proteus train wrote.
        prompt: Text to go on from; - reads it from standard input.
        max_new_tokens: Write at most so many tokens; the end of the document stops earlier.
        temperature: 0 takes the likeliest token each time; 1 draws as the model says.
        top_k: Draw among so many likeliest tokens only.
        top_p: Draw among the likeliest tokens that hold this probability together.
        seed: Of the draw: the same seed gives the same text.
        num_beams: Beams of a beam search; needs --temperature 0.
        step: Checkpoint to use; by default the newest.
        device: auto (CUDA where there is one), cpu, cuda, cuda:1 ...
        memory_policy: stretch opens the blocks of a trained memory over another length than in training, --memory-context.
        memory_context: That length in tokens, such as 16K; by default the blocks open as in training.
    """
    from proteus_lm.generate import Sampling
    from proteus_lm.generate import generate as generate_text
    from proteus_lm.run import Run as OpenRun

    # fp32 logits go up to some 1e4: divided by less than this they would overflow.
    if not (temperature == 0 or 1e-30 <= temperature < math.inf):
        raise ValueError(f"temperature is {temperature}; it must be 0 (the likeliest token), or a number from 1e-30 on")
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, check_seed(seed), num_beams)
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise ValueError("the prompt is empty and gives no token; give at least one character to go on from")
    no_bars()
    opened = OpenRun.open(run)
    model = opened.load_model(step, device=choose_device(device))
    spread(model, memory_policy, memory_context)
    print(generate_text(model, opened.tokenizer, text, sampling))
