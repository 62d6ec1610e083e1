"""GatedAdamW against torch.optim.AdamW(foreach=True) on the parameters of one Hope-Attention model.

    python benchmarks/optimizer.py [--device cpu] [--threads 1] [--rounds 40] [--out benchmarks/results]

Both step on equal tensors with equal gradients, in turn, in many short rounds; a round starts with the one side, the next with the
other. The median over rounds of the two sides' ratio in a round, and the ratio of the fastest steps: on a machine that others use,
the second is the steadier. Before it is timed, the ungated form is found equal to AdamW.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from proteus_lm import ProteusConfig, ProteusForCausalLM
from proteus_lm.hope import update_gates
from proteus_lm.optim import GatedAdamW

STEPS = 1600
PERIODS = (1, 2, 4, 8)
SIZES = {"hidden_size": 512, "num_heads": 8, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 32000}
# Name -> periods, update blocks, the step at which it is timed.
CASES = {
    "no gate": ((1, 1, 1, 1), 1, 900),
    "16 blocks, 9 of them open": ((1, 1, 1, 1), 16, 850),
    "16 blocks, the last just opened": ((1, 1, 1, 1), 16, 1505),
    "16 blocks, open for long": ((1, 1, 1, 1), 16, 9000),
    "periods 1, 2, 4, 8": (PERIODS, 1, 904),
    "16 blocks, 9 open, periods 1, 2, 4, 8": (PERIODS, 16, 848),
}


def sides(periods: tuple[int, ...], blocks: int, device: str) -> tuple[GatedAdamW, torch.optim.AdamW, int]:
    """The two optimisers on their own copies of one model's parameters with gradients, and the number of parameters."""
    config = ProteusConfig(mixer="attention", channel="chain", chain_periods=periods, update_blocks=blocks, **SIZES)
    optimizers: list[Any] = []
    for kind in (GatedAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = ProteusForCausalLM(config)
        parameters = list(model.to_empty(device=device).parameters())
        for p in parameters:
            torch.nn.init.uniform_(p, -0.1, 0.1)
            p.grad = torch.rand_like(p) - 0.5
        if kind is GatedAdamW:
            masks, gaps = update_gates(model, config, STEPS)
            optimizers.append(GatedAdamW(parameters, 1e-3, masks=masks, periods=gaps))
        else:
            optimizers.append(torch.optim.AdamW(parameters, 1e-3, (0.9, 0.95), 1e-8, 0.1, foreach=True))
    return optimizers[0], optimizers[1], sum(p.numel() for p in parameters)


def check(device: str) -> None:
    """Refuse to time what does not do AdamW's work: three steps, equal within the rounding of fp32."""
    ours, right, _ = sides((1, 1, 1, 1), 1, device)
    for _ in range(3):
        ours.step()
        right.step()
    for a, b in zip(ours.param_groups[0]["params"], right.param_groups[0]["params"]):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def timed(optimizer: torch.optim.Optimizer, steps: int, device: str) -> float:
    """Seconds a step, mean over `steps` of them."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def compare(name: str, rounds: int, device: str) -> dict[str, Any]:
    """One row: milliseconds of both sides and their ratios. A round is one whole period of the slowest level."""
    periods, blocks, start = CASES[name]
    ours, right, count = sides(periods, blocks, device)
    length = max(periods) if device == "cpu" else 8
    for optimizer in (ours, right):
        timed(optimizer, 1, device)
    seconds: list[list[float]] = [[], []]
    for number in range(max(4, rounds // length)):
        order = ((0, ours), (1, right)) if number % 2 else ((1, right), (0, ours))
        for side, optimizer in order:
            if side == 0:
                ours.steps = start  # the same place of the schedule each time
            seconds[side].append(timed(optimizer, length, device))
    middle, best = ([f(s) for s in seconds] for f in (statistics.median, min))
    row = {"case": name, "parameters": count, "tensors": len(ours.param_groups[0]["params"])}
    row |= {"gated_ms": 1e3 * middle[0], "adamw_ms": 1e3 * middle[1], "ratio": statistics.median(a / b for a, b in zip(*seconds))}
    return row | {"ratio_of_fastest": best[0] / best[1]}


def write(rows: list[dict[str, Any]], facts: dict[str, Any], out: Path) -> None:
    """JSON for programs, Markdown for readers."""
    out.mkdir(parents=True, exist_ok=True)
    name = f"optimizer-{facts['device']}"
    (out / f"{name}.json").write_text(json.dumps({"facts": facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"# GatedAdamW against torch.optim.AdamW(foreach=True), {facts['device']}",
        "",
        f"`python benchmarks/optimizer.py --device {facts['device']} --threads {facts['threads']} --rounds {facts['rounds']}`: "
        f"{rows[0]['parameters']:,} parameters in {rows[0]['tensors']} tensors (Hope-Attention), fp32; {facts['machine']}, "
        f"torch {facts['torch']}. A step's time, both sides in turn in one run.",
        "Blocks that are open for long take the code of no gate: how far these two rows differ is noise.",
        "",
        "| case | gated, ms | AdamW, ms | ratio, median of rounds | ratio of fastest |",
        "| --- | ---: | ---: | ---: | ---: |",
        *(
            f"| {r['case']} | {r['gated_ms']:.2f} | {r['adamw_ms']:.2f} | {r['ratio']:.2f} | {r['ratio_of_fastest']:.2f} |"
            for r in rows
        ),
    ]
    (out / f"{name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40, help="of one step; those of a whole period are fewer")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    check(arguments.device)
    rows = []
    for name in CASES:
        rows.append(compare(name, arguments.rounds, arguments.device))
        print(f"{name}: {rows[-1]['ratio']:.2f}, fastest {rows[-1]['ratio_of_fastest']:.2f}", flush=True)
    machine = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or platform.machine()
    facts = {"device": arguments.device, "machine": machine, "threads": arguments.threads, "rounds": arguments.rounds}
    write(rows, facts | {"torch": torch.__version__}, arguments.out)


if __name__ == "__main__":
    main()
