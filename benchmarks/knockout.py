"""What binds the Hopper kernels of the linear memories: their time with one part of their work left out. On one Hopper GPU.

    python benchmarks/knockout.py                                   # a table to the screen
    python benchmarks/knockout.py --rules comba --parts none loads  # one rule, some parts
    python benchmarks/knockout.py --out times.json

Parts: `none` (the kernels as they are), `loads` (what is copied to shared memory), `stores` (tiles of results), `both`, which
leaves products, their waits and the barriers: the chain that no memory could make faster. A row is one rule, gate and part; its
results are wrong on purpose, and only times are read (milliseconds a call in the profiler, mean of 5; B 4, T 8192, H 16,
K = V = 128, bf16).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ops_right import GATES, RULES, gate, inputs
from proteus_lm.ops import triton as ours
from proteus_lm.ops.triton import hopper
from timing import kernels_ms

SIZE, CONTEXT = (4, 8192, 16, 128, 128), 8192
FOLDER = Path(hopper.__file__).parent
KERNELS = ("prepare", "scan", "reverse", "gradients")
MODULES = ("_tiles", "_walks", "_gradients")
# part -> (text of _tiles.py, what stands there instead)
LOADS = (
    ("    copy(buffer, at, (r < rows)[:, None] & (c < columns)[None, :])\n", "    pass\n"),
    ("    copy(buffer, x + start + (r[:, None] * C + c[None, :]))\n", "    pass\n"),
    ("    copy(buffer, x + i)\n", "    pass\n"),
)
STORES = (("    gl.store(at, buffer.load(ROWS), mask=(r < rows)[:, None] & (c < columns)[None, :])\n", "    pass\n"),)
PARTS: dict[str, tuple[tuple[str, str], ...]] = {"none": (), "loads": LOADS, "stores": STORES, "both": LOADS + STORES}


def sources(part: str, package: str) -> dict[str, str]:
    """{module: source} of the kernels without a part, as modules of `package`."""
    texts = {name: (FOLDER / f"{name}.py").read_text() for name in MODULES}
    for old, new in PARTS[part]:
        if texts["_tiles"].count(old) != 1:
            raise ValueError(f"{old!r} stands {texts['_tiles'].count(old)} times in {FOLDER / '_tiles.py'}, not once")
        texts["_tiles"] = texts["_tiles"].replace(old, new)
    return {name: text.replace("proteus_lm.ops.triton.hopper._tiles", f"{package}._tiles") for name, text in texts.items()}


def load(part: str, root: Path) -> list[ModuleType]:
    """The walks and the gradients without a part, as a package under `root` (which Gluon reads their source from)."""
    package = f"without_{part}"
    (root / package).mkdir()
    for name, text in {"__init__": "", **sources(part, package)}.items():
        (root / package / f"{name}.py").write_text(text)
    return [importlib.import_module(f"{package}.{name}") for name in MODULES[1:]]


def both_ways(rule: str, blocks: int, axis: str) -> Callable[[], Any]:
    """A forward + backward."""
    tensors, activation = inputs(rule, SIZE), gate(SIZE, blocks, axis, CONTEXT)
    upstream = torch.randn_like(tensors["v"])

    def work() -> Any:
        out = getattr(ours, rule)(**tensors, activation=activation, axis=axis)[0]
        return torch.autograd.grad(out, list(tensors.values()), upstream)

    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rules", nargs="+", choices=RULES, default=["gated_delta_rule"])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    reason = hopper.refuse()
    if reason is not None:
        sys.exit(f"the Hopper kernels do not run here: {reason}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, folder)
        for part in arguments.parts:
            walks, gradients = load(part, Path(folder))
            hopper._kernels = lambda k=(walks.scan, walks.reverse, gradients.gradients): k  # pyright: ignore
            for rule in arguments.rules:
                calls = [both_ways(rule, *gate) for gate in GATES]
                with ThreadPoolExecutor(len(calls)) as pool:  # compile beside each other
                    list(pool.map(lambda call: call(), calls))
                for (blocks, axis), call in zip(GATES, calls):
                    ms = {name: ms for name, ms in kernels_ms(call).items() if name in KERNELS}
                    rows.append({"part": part, "rule": rule, "E": blocks, "axis": axis, "ms": ms})
                    print(json.dumps(rows[-1]), flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
