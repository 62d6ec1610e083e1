"""How the GPU benchmarks take a time: medians of CUDA events, a call as a CUDA graph, and the kernels it is made of."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def median_ms(work: Callable[[], Any], repeats: int, warm: int = 0) -> float:
    """Median milliseconds of `repeats` calls, after `warm` that are not counted."""
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(work: Callable[[], Any]) -> Callable[[], None]:
    """The replay of `work` as a CUDA graph. Raises what the capture raises."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def replayed_ms(work: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds of a replay of `work` as a CUDA graph, after calls that compile and tune it. Raises what it raises."""
    for _ in range(2):
        work()
    return median_ms(captured(work), repeats, 3)


def kernels_ms(work: Callable[[], Any], repeats: int = 5, most: int = 6) -> dict[str, float]:
    """Milliseconds a call that each kernel takes, the longest first, at most `most` of them."""
    from torch.profiler import ProfilerActivity, profile

    work()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    events = [(e.key[:60], e.device_time_total / repeats / 1e3) for e in trace.key_averages() if e.device_time_total > 0]
    return {name: round(ms, 4) for name, ms in sorted(events, key=lambda x: -x[1])[:most]}
