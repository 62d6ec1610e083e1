"""Titans' layers, models and decoding on one GPU, beside titans-pytorch: tokens/s of forward + backward, time of a decoding step.

    python benchmarks/layers.py --out benchmarks/results         # needs a CUDA device; `pip install titans-pytorch`
    python benchmarks/layers.py --no-peers --only decode

bf16 autocast, T = 8192, chunk 64, random data, gradients of the input and of every parameter; medians of CUDA events after warm-up,
eager and, where it can be captured, as a replayed CUDA graph. The kernels' correctness is `benchmarks/titans.py`; the decoding step
is checked here against the fp64 step before it is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from proteus_lm import ActivationSchedule, ProteusConfig, ProteusForCausalLM
from proteus_lm.mixers import registry
from proteus_lm.ops.deep_step import titans_step
from proteus_lm.ops.state import TitansState
from proteus_lm.sequence import TokenSequence
from timing import captured, median_ms

LENGTH = 8192
Work = Callable[[], Any]


def timed(work: Work, repeats: int = 7) -> dict[str, Any]:
    """Eager and graph medians in ms, and the peak memory of one call in GiB."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30, "ms": median_ms(work, repeats)}
    try:
        torch.cuda.reset_peak_memory_stats()
        replay = captured(work)
        row |= {"graph_peak_gib": torch.cuda.max_memory_allocated() / 2**30, "graph_ms": median_ms(replay, repeats)}
    except Exception as error:  # the eager time stands; say why there is no other
        torch.cuda.synchronize()
        row["no_graph"] = f"{type(error).__name__}: {error}"[:160]
    return row


def config(**fields: Any) -> ProteusConfig:
    scheduled = {"memory_context": LENGTH} if "memory_blocks" in fields else {}
    return ProteusConfig(mixer="titans", head_dim=64, chunk_size=64, **scheduled, **fields)


def backward_of(loss: Callable[[], Tensor], leaves: list[Tensor]) -> Work:
    def work() -> tuple[Tensor, tuple[Tensor, ...]]:
        with torch.autocast("cuda", torch.bfloat16):
            value = loss()
        return value.detach(), torch.autograd.grad(value, leaves, allow_unused=True)

    return work


def our_layer(rows: int, width: int, expansion: int, blocks: int, compiled: bool = False) -> Work:
    """The LMM mixer: projections, convolution, gates, memory, output norm and gate."""
    c = config(
        hidden_size=width, num_heads=width // 64, memory_expansion=expansion, **({"memory_blocks": blocks} if blocks > 1 else {})
    )
    mixer = registry["titans"](c)
    for module in [*mixer.modules()][::-1]:
        if hasattr(module, "init_weights"):
            module.init_weights()  # pyright: ignore[reportCallIssue]
    mixer.cuda()
    x = torch.randn(rows, LENGTH, width, device="cuda", requires_grad=True)
    sequence = TokenSequence(c.schedule, rows, LENGTH, device="cuda")
    forward = torch.compile(mixer) if compiled else mixer
    return backward_of(lambda: forward(x, sequence)[0].float().sum(), [x, *mixer.parameters()])


def our_mac(rows: int, wave: int = 0, compiled: bool = False) -> Work:
    """Four layers, each with its memory; theirs has memory in two. `wave`: pieces of the sequence, as `proteus_lm.wave`.

    The loss by pieces, as training has it."""
    fields = {"titans_variant": "mac", "segment_length": 128, "persistent_tokens": 4, "memory_expansion": 2}
    model = ProteusForCausalLM(config(vocab_size=32000, hidden_size=768, num_heads=12, num_hidden_layers=4, **fields)).cuda()
    model.wave = wave
    forward = torch.compile(model) if compiled else model
    ids = torch.randint(0, 32000, (rows, LENGTH), device="cuda")
    return backward_of(lambda: forward(ids, labels=ids, skip_logits=True).loss, list(model.parameters()))


def their_memory(rows: int, width: int) -> Work:
    from titans_pytorch import NeuralMemory

    memory = NeuralMemory(dim=width, dim_head=64, heads=width // 64, chunk_size=64, batch_size=128).cuda()
    x = torch.randn(rows, LENGTH, width, device="cuda", requires_grad=True)
    return backward_of(lambda: memory(x)[0].float().sum(), [x, *memory.parameters()])


def their_mac(rows: int) -> Work:
    from titans_pytorch import MemoryAsContextTransformer, MemoryMLP

    model = MemoryAsContextTransformer(
        num_tokens=32000, dim=768, depth=4, segment_len=128, num_persist_mem_tokens=4, num_longterm_mem_tokens=16,
        neural_memory_layers=(2, 4), neural_memory_segment_len=64, neural_memory_batch_size=128, heads=12, dim_head=64,
        neural_memory_model=MemoryMLP(dim=64, depth=2), neural_memory_kwargs={"dim_head": 64, "heads": 12},
        use_flex_attn=False, sliding_window_attn=True,
    ).cuda()  # fmt: skip
    ids = torch.randint(0, 32000, (rows, LENGTH + 1), device="cuda")
    return backward_of(lambda: model(ids, return_loss=True), [p for p in model.parameters() if p.requires_grad])


def layer_rows(only: str, peers: bool) -> list[dict[str, Any]]:
    cases: list[tuple[str, int, bool, Callable[[], Work]]] = [
        ("lmm d1536 B4 E1", 4, False, lambda: our_layer(4, 1536, 4, 1)),
        ("lmm d1536 B4 E16", 4, False, lambda: our_layer(4, 1536, 4, 16)),
        ("lmm d1536 B4 E1 compiled", 4, False, lambda: our_layer(4, 1536, 4, 1, compiled=True)),
        ("lmm d1536 B4 E16 compiled", 4, False, lambda: our_layer(4, 1536, 4, 16, compiled=True)),
        ("memory d768 B1 compiled", 1, False, lambda: our_layer(1, 768, 2, 1, compiled=True)),
        ("memory d768 B1", 1, False, lambda: our_layer(1, 768, 2, 1)),
        ("mac d768 depth4 B1", 1, False, lambda: our_mac(1)),
        ("mac d768 depth4 B8", 8, False, lambda: our_mac(8)),
        ("mac d768 depth4 B1 wave8", 1, False, lambda: our_mac(1, 8)),
        ("mac d768 depth4 B8 wave8", 8, False, lambda: our_mac(8, 8)),
        ("mac d768 depth4 B1 compiled", 1, False, lambda: our_mac(1, 0, True)),
        ("mac d768 depth4 B1 wave8 compiled", 1, False, lambda: our_mac(1, 8, True)),
        ("mac d768 depth4 B8 wave8 compiled", 8, False, lambda: our_mac(8, 8, True)),
        ("titans-pytorch memory d768 B1", 1, True, lambda: their_memory(1, 768)),
        ("titans-pytorch mac d768 depth4 B1", 1, True, lambda: their_mac(1)),
        ("titans-pytorch mac d768 depth4 B8", 8, True, lambda: their_mac(8)),
    ]
    rows = []
    for name, count, theirs, make in cases:
        if not name.removeprefix("titans-pytorch ").startswith(only) or (theirs and not peers):
            continue
        torch.cuda.empty_cache()
        try:
            row = {"case": name, **timed(make(), 2 if theirs else 7)}
            row["ktok_s"] = count * LENGTH / row["ms"]
            if "graph_ms" in row:
                row["graph_ktok_s"] = count * LENGTH / row["graph_ms"]
        except Exception as error:  # a failing peer is a result
            row = {"case": name, "error": f"{type(error).__name__}: {error}"[:300]}
        print(row, flush=True)
        rows.append(row)
    return rows


def decode_state(
    blocks: int, rows: int = 64, heads: int = 12, dim: int = 64, hidden: int = 256, start: int = 4096
) -> dict[str, Any]:
    """Rows at one position in the middle of the window, at the start of an inner chunk."""
    g = torch.Generator("cuda").manual_seed(0)
    rand = lambda *shape: torch.randn(*shape, generator=g, device="cuda")  # noqa: E731
    weights = tuple(rand(rows, heads, a, b) / a**0.5 for a, b in ((dim, hidden), (hidden, dim)))
    momentum = tuple(0.01 * torch.randn_like(w) for w in weights)
    vectors, gates = torch.zeros(rows, 64, heads, dim, device="cuda"), torch.zeros(rows, 64, heads, device="cuda")
    slots = torch.zeros(rows, 64, dtype=torch.int64, device="cuda")
    position = torch.full((rows,), start, device="cuda")
    state = TitansState(weights, momentum, vectors, vectors.clone(), gates, gates.clone(), gates.clone(), slots, position)
    plan = ActivationSchedule(blocks, LENGTH)
    tokens = [nn.functional.normalize(rand(64, rows, heads, dim), dim=-1).bfloat16() for _ in range(3)]
    eta = 0.9 * rand(64, rows, heads).sigmoid()
    tokens += [rand(64, rows, heads).sigmoid() * (1 - eta) / 64, 0.02 * rand(64, rows, heads).sigmoid(), eta]
    opened = int(plan.active(hidden, position)[0]) if blocks > 1 else hidden
    return {"state": state, "tokens": tokens, "plan": plan, "blocks": blocks, "open": opened, "hidden": hidden}


def check_decode(case: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Worst relative error over 70 steps, over the end of a chunk, against the fp64 step: y; weights and momentum."""
    state, plan = case["state"], case["plan"]
    tokens = [t.to(dtype) for t in case["tokens"][:3]] + case["tokens"][3:]
    exact = TitansState._make(
        [tuple(t.double() for t in x) if isinstance(x, tuple) else x.double() if x.is_floating_point() else x for x in state]
    )
    mine, errors = state, []
    for i in range(70):
        now = [t[i % 64] for t in tokens]
        active = plan.active(case["hidden"], mine.position) if case["blocks"] > 1 else None
        y, mine = titans_step(*now, mine, active=active, backend="triton")
        right, exact = titans_step(*[t.double() for t in now], exact, active=active, backend="chunk")
        errors.append(((y.double() - right).norm() / right.norm()).item())
    moved = [
        ((a.double() - b).norm() / b.norm()).item()
        for a, b in zip((*mine.weights, *mine.momentum), (*exact.weights, *exact.momentum))
    ]
    worst = lambda values: max(values, key=lambda x: x if x == x else float("inf"))  # noqa: E731 -- NaN is the worst
    return {"y": worst(errors), "state": worst(moved)}


def decode_work(blocks: int, dtype: torch.dtype, **options: Any) -> Work:
    """64 steps at consecutive positions, one of them the end of a chunk. The open units are worked out before: a model does so once
    a token for all its layers."""
    case = decode_state(blocks)
    now, held = [t[0].to(dtype) for t in case["tokens"][:3]] + [t[0].clone() for t in case["tokens"][3:]], [case["state"]]
    places = case["state"].position[0] + torch.arange(64, device="cuda")
    widths = case["plan"].active(case["hidden"], places)[:, None].expand(64, len(now[0])).contiguous()

    def work() -> None:
        for width in widths:
            _, held[0] = titans_step(*now, held[0], active=None if blocks == 1 else width, **options)

    return work


def decode_rows(peers: bool) -> list[dict[str, Any]]:
    """The step in place, giving a new state, and in PyTorch; checked first. Floor: the open weights and momentum read once."""
    rows = []
    ours = [("in place", {"inplace": True, "backend": "triton"}), ("new state", {"backend": "triton"})]
    kinds = [*ours, ("PyTorch", {"backend": "chunk"})] if peers else ours
    for blocks in (1, 16):
        for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float32, 1e-3)):
            case = decode_state(blocks)
            name = {"case": f"decode B64 H12 d64 hidden256 E{blocks}", "tokens": str(dtype)[6:], "open": case["open"]}
            floor = sum(w.numel() * 4 for w in (*case["state"].weights, *case["state"].momentum)) * case["open"] / case["hidden"]
            with torch.no_grad():
                errors = check_decode(case, dtype)
                if not all(x <= limit for x in errors.values()):
                    rows.append({**name, "errors": errors, "wrong": True})
                    print(rows[-1], flush=True)
                    continue
                for who, options in kinds if dtype == torch.bfloat16 else kinds[:1]:
                    row = {**name, "who": who, "errors": errors}
                    times = timed(decode_work(blocks, dtype, **options), 3)
                    row |= {f"{k.removesuffix('ms')}us": v / 64 * 1e3 for k, v in times.items() if k in ("ms", "graph_ms")}
                    row["floor_us_at_4.29_TB_s"] = floor / 4.29e6
                    rows.append(row)
                    print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for layers-<card>.json")
    parser.add_argument("--only", default="", help="cases whose name starts so: lmm, memory, mac, decode")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    import triton

    card = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(card, flush=True)
    report: dict[str, Any] = {**card, "command": " ".join(sys.argv)}
    if "decode".startswith(options.only) or options.only.startswith("decode"):
        report["decode"] = decode_rows(not options.no_peers)
    report["layers"] = layer_rows(options.only, not options.no_peers)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        target = options.out / f"layers-{card['card'].replace(' ', '-')}.json"
        scratch = target.with_suffix(".tmp")
        scratch.write_text(json.dumps(report, indent=1))
        scratch.replace(target)


if __name__ == "__main__":
    main()
