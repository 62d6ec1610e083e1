"""How the GPU benchmarks of Titans take a time: medians of CUDA events, and a call as a CUDA graph."""

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
