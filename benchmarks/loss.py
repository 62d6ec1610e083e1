"""The loss of a language model by pieces beside that of whole logits, on one GPU: right against fp64, then time and memory.

    python benchmarks/loss.py --out benchmarks/results

65,536 tokens of width 768, 32,000 words, bf16 autocast, forward and backward to hidden states and weight; medians of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from proteus_lm.ops.cross_entropy import linear_cross_entropy
from timing import captured, median_ms

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
SIZES = ((1037, 256, 32000), (77, 64, 257), (513, 64, 32001))  # tokens, width, words: odd ones, every third token not scored
LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-3}
LARGE = (65536, 768, 32000)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same from all logits."""
    logits = linear(hidden, weight)
    return cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), targets, reduction="sum")


def inputs(tokens: int, width: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states and weight, fp32 and wanting gradients, and targets."""
    hidden, weight = torch.randn(tokens, width, device="cuda"), 2 * torch.randn(words, width, device="cuda") / width**0.5
    targets = torch.randint(0, words, (tokens,), device="cuda")
    targets[::3] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def results(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Mean loss a token, and its gradients."""
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        value = loss(hidden, weight, targets) / len(targets)
    return [value, *torch.autograd.grad(value, (hidden, weight))]


def check(size: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Relative errors (root mean square) of the loss, and of the gradients of hidden states and weight, against fp64."""
    hidden, weight, targets = inputs(*size)
    found = results(linear_cross_entropy, hidden, weight, targets, dtype)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    right = results(whole, exact[0], exact[1], targets, torch.float64)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)]
    return {"size": size, "type": str(dtype)[6:], "errors": errors, "right": all(e <= LIMITS[dtype] for e in errors)}


def measure(name: str, loss: Loss) -> dict[str, Any]:
    """Milliseconds, eager and as a CUDA graph, and the peak memory above the inputs in GiB."""
    hidden, weight, targets = inputs(*LARGE)

    def work() -> list[Tensor]:
        return results(loss, hidden, weight, targets, torch.bfloat16)

    work()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {"loss": name, "ms": median_ms(work, 7, 2), "graph_ms": median_ms(captured(work), 7, 2), "peak_gib": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for loss-<card>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device; this benchmark times a GPU", file=sys.stderr)
        return 2
    import triton

    card = torch.cuda.get_device_name()
    report: dict[str, Any] = {"card": card, "torch": torch.__version__, "triton": triton.__version__, "command": " ".join(sys.argv)}
    report["checks"] = [check(size, dtype) for size in SIZES for dtype in LIMITS]
    print(*report["checks"], sep="\n", flush=True)
    if not all(row["right"] for row in report["checks"]):
        return 1
    report["times"] = [measure(name, loss) for name, loss in (("whole logits", whole), ("by pieces", linear_cross_entropy))]
    print(*report["times"], sep="\n", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        target = options.out / f"loss-{card.replace(' ', '-')}.json"
        scratch = target.with_suffix(".tmp")
        scratch.write_text(json.dumps(report, indent=1))
        scratch.replace(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
