"""Tokenizing batches of texts in several processes, results in the order of the batches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import numpy as np

from proteus_lm.data.tokenizer import Tokenizer

_AHEAD = 3  # batches for each worker that are read before their turn: enough to keep it busy, little memory
_tokenizer: Tokenizer | None = None  # of a worker process
Label = TypeVar("Label")


def tokenized(
    batches: Iterable[tuple[Label, list[str]]], tokenizer: Tokenizer, workers: int
) -> Generator[tuple[Label, list[str], list[np.ndarray]], None, None]:
    """(label, texts, ids of each text: integers (tokens,)) in the order of the batches, whatever the workers.

    Args:
        batches: (label, texts), read a little ahead of the work, not all at once; a label stays in this process.
        workers: processes (spawned, so they are safe beside threads and CUDA); 0 works in this one.

    Raises:
        RuntimeError: if a worker dies.
    """
    if workers == 0:
        for label, texts in batches:
            yield label, texts, tokenizer.encode_batch(texts)
        return
    context = multiprocessing.get_context("spawn")
    arguments = (tokenizer.definition, tokenizer.eos, tokenizer.name)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=arguments)
    waiting: deque[tuple[Label, list[str], Future[list[np.ndarray]]]] = deque()
    try:
        for label, texts in batches:
            waiting.append((label, texts, pool.submit(_encode, texts)))
            if len(waiting) >= workers * _AHEAD:
                ready = waiting.popleft()
                yield ready[0], ready[1], ready[2].result()
        while waiting:
            ready = waiting.popleft()
            yield ready[0], ready[1], ready[2].result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "a worker process died: too little memory for this many workers, or a script without "
            "`if __name__ == '__main__':` around its call; use fewer workers, or workers=0"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(definition: str, eos: str, name: str) -> None:
    """Make a worker ready; it ends with its parent, however that ends, and leaves Ctrl-C to it."""
    global _tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _tokenizer = Tokenizer(definition, eos, name)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(texts: Sequence[str]) -> list[np.ndarray]:
    if _tokenizer is None:
        raise RuntimeError("a worker works before it was started")
    return [ids.astype(np.uint32) for ids in _tokenizer.encode_batch(texts)]
