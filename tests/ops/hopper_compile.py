"""A program that compiles the Hopper kernels of the linear memories for sm_90: `python hopper_compile.py quick` (or `all`).

No GPU is needed, but Triton without its interpreter, hence a process of its own. The package's own operations are called, on CPU
tensors, with kernels that note what they are launched with and do nothing: what is compiled is what a GPU would be asked for,
constants, types and registers. One line of JSON a kernel.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from tests.ops.triton_linear_cases import NAMES, inputs


class Variant(NamedTuple):
    """One call: blocks and axis of the gate, sizes, type, whether a state comes in and goes out, whether gradients are wanted."""

    rule: str
    blocks: int = 1
    axis: str = "key"
    keys: int = 128
    values: int = 128
    dtype: str = "bfloat16"
    initial: bool = False
    final: bool = False
    save: bool = True

    @property
    def name(self) -> str:
        gate = f"E {self.blocks} {self.axis}" if self.blocks > 1 else "no gate"
        states = "".join(f", {text}" for text, there in (("state in", self.initial), ("state out", self.final)) if there)
        return f"{self.rule}, {gate}, K {self.keys}, V {self.values}, {self.dtype}{states}{'' if self.save else ', no gradients'}"


# Every rule and kernel, most at their widest, for that takes most shared memory; gates, states, types and K 64 spread over them.
QUICK = (
    Variant("comba", 16, "key", initial=True, final=True),
    Variant("comba", values=192, dtype="float16", save=False),
    Variant("gated_delta_rule", 16, "value", initial=True),
    Variant("delta_rule", keys=64, values=64, dtype="float16"),
    Variant("retention", 4, "value", keys=64, final=True),
    Variant("swla", 4, "key", dtype="float16"),
)


def every() -> list[Variant]:
    """Each rule, gate and size with states in and out and without, in either type by turns; V 192 takes the walks alone."""
    gates = ((1, "key"), (8, "key"), (8, "value"))
    sizes = ((64, 64, "bfloat16"), (64, 128, "float16"), (128, 64, "float16"), (128, 128, "bfloat16"))
    found = [
        Variant(rule, *gate, *size, initial=carried, final=carried)
        for rule, gate, size, carried in product(NAMES, gates, sizes, (False, True))
        if not (rule == "swla" and carried)  # its walks are Triton's
    ]
    found += [Variant(rule, *gate, 128, 192, save=False) for rule, gate in product(NAMES, gates) if rule != "swla"]
    return [*QUICK, *found]


Calls = list[tuple[Any, tuple, dict[str, Any]]]


class Recorder:
    """Stands for a kernel: notes what it is launched with."""

    def __init__(self, kernel: Any, calls: Calls) -> None:
        self.kernel, self.calls = kernel, calls

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.calls.append((self.kernel, arguments, constants))


def replace_kernels() -> Calls:
    """Put recorders in the place of all kernels, as on a Hopper GPU of 132 multiprocessors; the list they write to."""
    from proteus_lm.ops.triton import hopper, linear

    calls: Calls = []
    recorders = tuple(Recorder(kernel, calls) for kernel in hopper._kernels())
    for name in ("_PREPARE", "_SCAN", "_REVERSE", "_GRADIENTS", "_REOPENED"):
        setattr(linear, name, Recorder(None, []))  # Triton's: not looked at
    linear._stages = lambda *_: 2  # pyright: ignore[reportAttributeAccessIssue] - asks the GPU
    hopper._kernels = lambda: recorders  # pyright: ignore[reportAttributeAccessIssue]
    hopper._refuse = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=132)  # pyright: ignore
    return calls


def launches(variant: Variant, calls: Calls) -> Calls:
    """(kernel, arguments, constants and options) of all Hopper kernels that one call and its gradients launch."""
    from proteus_lm import ActivationSchedule
    from proteus_lm.ops import triton as ours

    calls.clear()
    size = (2, 128, 2, variant.keys, variant.values)
    dtype = getattr(torch, variant.dtype)
    tensors = {n: x.to(dtype) if n in "qkpv" else x for n, x in inputs(variant.rule, size).items()}
    tensors = {n: x.requires_grad_(variant.save) for n, x in tensors.items()}
    dim = variant.keys if variant.axis == "key" else variant.values
    gate = ActivationSchedule(variant.blocks, 128).activation(dim, 128) if variant.blocks > 1 else None
    initial = torch.zeros(2, 2, *size[3:], requires_grad=variant.save) if variant.initial else None
    keywords = {"initial_state": initial, "output_final_state": variant.final}
    out, state = getattr(ours, variant.rule)(**tensors, activation=gate, axis=variant.axis, **keywords)
    if variant.save:
        (out.float().sum() + (state.sum() if variant.final else 0.0)).backward()
    return calls[:]


def request(kernel: Any, arguments: tuple, given: dict[str, Any]) -> tuple[dict, dict, dict, dict[str, Any]]:
    """Signature, constants, attributes and options of a launch, as Triton's launcher makes them."""
    names = kernel.arg_names
    values = dict(zip(names, arguments)) | {n: x for n, x in given.items() if n in names}
    assert set(values) == set(names), f"{kernel.__name__} takes {names} and was given {list(values)}"
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32"}
    for at, name in enumerate(names):
        value = values[name]
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + kinds[value.dtype]
            attributes[at,] = [["tt.divisibility", 16]]
        elif at >= len(arguments) or value is None or (type(value) is int and value == 1):
            signature[name], constants[at,] = "constexpr", value
        else:
            signature[name] = "i32" if isinstance(value, int) else "fp32"
    return signature, constants, attributes, {n: x for n, x in given.items() if n not in names}


def compile_all(variants: tuple[Variant, ...] | list[Variant]) -> None:
    """Print a line for each kernel of each variant; the same kernel is compiled once."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    calls = replace_kernels()
    done: dict[str, dict[str, Any]] = {}
    for variant in variants:
        for kernel, arguments, given in launches(variant, calls):
            asked = request(kernel, arguments, given)
            key = f"{kernel.__name__} {asked}"
            if key not in done:
                *source, options = asked
                try:
                    made: Any = triton.compile(GluonASTSource(kernel, *source), target=GPUTarget("cuda", 90, 32), options=options)
                    done[key] = {"shared": made.metadata.shared}
                except Exception as raised:  # what a compiler raises is the finding
                    done[key] = {"raised": f"{type(raised).__name__}: {raised}"[:2000]}
            print(json.dumps({"variant": variant.name, "kernel": kernel.__name__, **done[key]}), flush=True)


if __name__ == "__main__":
    compile_all(QUICK if sys.argv[1:] == ["quick"] else every())
