"""Runs Gluon kernels for Hopper on the CPU, which Triton's interpreter cannot: partitions of warps are threads that take turns.

A kernel's module is executed as it stands, with stand-ins for what it imports of Gluon; numbers are torch tensors. What a GPU may
do in any order happens in an order drawn from a seed: which partition goes on, and when a copy that was asked for arrives. Besides
wrong results, which a test sees, these raise `EmulationError` in whatever order things happen: an access to shared memory that no
barrier orders behind another it conflicts with, tensor cores that read what no fence showed them, a product used before it was
waited for, shared memory read before it was written, a barrier that nobody completes, an address outside its tensor, an element of
global memory that a launch stores twice.

Not emulated: layouts (the compiler checks them), alignment, rounding inside a product, and what happens among the warps of one
partition, which go as one.
"""

from __future__ import annotations

import builtins
import operator
import random
import threading
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

NOBODY = -1


class EmulationError(AssertionError):
    """A kernel did what a GPU would not forgive."""


class Aborted(BaseException):
    """Ends the other partitions once one has failed."""


# ---- numbers


class Value:
    """A tile or a scalar in registers; `product` is the one whose result it is, until that is waited for."""

    def __init__(self, data: Any, dtype: torch.dtype | None = None, product: Product | None = None) -> None:
        self.data = torch.as_tensor(data, dtype=dtype)
        self.product = product

    @property
    def tensor(self) -> Tensor:
        if self.product is not None:
            raise EmulationError("a product is used before warpgroup_mma_wait returned it")
        return self.data

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.tensor.to(dtype))

    def __getitem__(self, index: Any) -> Value:
        return Value(self.tensor[index])

    def __bool__(self) -> bool:
        return bool(self.tensor.item())

    def __index__(self) -> int:
        return int(self.tensor.item())

    def __neg__(self) -> Value:
        return Value(-self.tensor)


def plain(x: Any) -> Any:
    return x.tensor if isinstance(x, Value) else x


def wider(a: Any, b: Any) -> tuple[Any, Any]:
    """As Triton widens: a scalar in a register counts like a tile, a Python number does not."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        dtype = torch.promote_types(a.dtype, b.dtype)
        return a.to(dtype), b.to(dtype)
    return a, b


def _divide(a: Any, b: Any) -> Tensor:
    if (torch.as_tensor(a) < 0).any():
        raise EmulationError("// and % of a negative number: Triton rounds towards zero, Python down")
    return torch.div(a, b, rounding_mode="floor")


def _modulo(a: Any, b: Any) -> Tensor:
    return a - _divide(a, b) * b


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
NAMES = (*("add", "sub", "mul", "truediv", "and_", "or_", "xor", "lshift", "rshift"), *COMPARISONS)
BINARY = {name: getattr(operator, name) for name in NAMES}
BINARY |= {"floordiv": _divide, "mod": _modulo}


def _install(name: str, act: Callable) -> None:
    def forwards(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(act(*wider(self.tensor, plain(other))))

    def backwards(self: Value, other: Any) -> Value:
        return Value(act(*wider(plain(other), self.tensor)))

    word = name.strip("_")
    setattr(Value, f"__{word}__", forwards)
    if word not in COMPARISONS:
        setattr(Value, f"__r{word}__", backwards)


for _name, _act in BINARY.items():
    _install(_name, _act)


class Pointer:
    """Addresses in a tensor of global memory: the tensor, flat, and offsets."""

    def __init__(self, memory: Tensor, stored: Tensor, offset: Any = 0) -> None:
        self.memory, self.stored, self.offset = memory, stored, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.stored, plain(other) + self.offset)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.stored, self.offset - plain(other))

    def reach(self, mask: Any) -> tuple[Tensor, Tensor]:
        """Offsets and mask of an access, broadcast; within the tensor where the mask is true."""
        at, mask = torch.broadcast_tensors(torch.as_tensor(self.offset), torch.as_tensor(True if mask is None else plain(mask)))
        wrong = at[mask & ((at < 0) | (at >= self.memory.numel()))]
        if wrong.numel():
            raise EmulationError(f"address {wrong[0].item()} of a tensor of {self.memory.numel()} elements")
        return torch.where(mask, at, 0), mask

    def load(self, mask: Any, other: Any) -> Tensor:
        at, mask = self.reach(mask)
        if not mask.any():
            return torch.full(at.shape, other, dtype=self.memory.dtype)
        return torch.where(mask, self.memory[at], torch.as_tensor(other, dtype=self.memory.dtype))


# ---- partitions, barriers and shared memory

Clock = tuple[int, ...]  # for each partition, how much of its work


def latest(a: Clock, b: Clock) -> Clock:
    return tuple(map(max, zip_longest(a, b, fillvalue=0)))


class Machine:
    """The program that runs: partitions 0, 1, ... and, for each, one more that stands for its copies on their way.

    `seen[p][t]`: how much of t's work is ordered before p's next access; `shown[p][t]`: how much of it a fence showed tensor cores.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.program, self.programs = 0, 1
        self.start(1)

    def start(self, partitions: int) -> None:
        every = 2 * partitions
        self.partitions, self.now = partitions, 0
        self.seen = [tuple(int(p == t) for t in range(every)) for p in range(every)]
        self.shown: list[Clock] = [(0,) * every for _ in range(every)]
        self.copies: list[list[Callable[[], None]]] = [[] for _ in range(partitions)]
        self.products: list[list[Product]] = [[] for _ in range(partitions)]

    def step(self, p: int) -> None:
        self.seen[p] = (*self.seen[p][:p], self.seen[p][p] + 1, *self.seen[p][p + 1 :])

    def order(self, p: int, seen: Clock, shown: Clock) -> None:
        """What others had seen and shown is ordered before p's next access."""
        self.seen[p], self.shown[p] = latest(self.seen[p], seen), latest(self.shown[p], shown)

    def run(self, partitions: list[Callable[[], None]]) -> None:
        """All partitions to their ends, one at a time."""
        self.start(len(partitions))
        self.turn = [threading.Semaphore(0) for _ in partitions]
        self.back = threading.Semaphore(0)
        self.waits: list[Callable[[], bool] | None] = [None for _ in partitions]
        self.failure: BaseException | None = None
        left = set(range(len(partitions)))

        def work(p: int) -> None:
            self.turn[p].acquire()
            try:
                if self.failure is None:
                    partitions[p]()
                    if self.products[p]:
                        raise EmulationError(f"partition {p} ends with products it did not wait for")
            except Aborted:
                pass
            except BaseException as raised:
                self.failure = self.failure or raised
            left.discard(p)
            self.back.release()

        threads = [threading.Thread(target=work, args=(p,), daemon=True) for p in left]
        for thread in threads:
            thread.start()
        while left:
            ready = [p for p in left if self.waits[p] is None or self.waits[p]()]
            coming = [p for p, copies in enumerate(self.copies) if copies]
            if self.failure is None and coming and (not ready or self.random.random() < 0.3):
                try:
                    self.copies[self.random.choice(coming)].pop(0)()
                    continue
                except EmulationError as raised:
                    self.failure = raised
            if self.failure is None and not ready:
                self.failure = EmulationError(f"deadlock: partitions {sorted(left)} wait for barriers that nobody completes")
            p = self.random.choice(sorted(left) if self.failure else ready)
            self.now, self.waits[p] = p, None
            self.turn[p].release()
            self.back.acquire()
        for thread in threads:
            thread.join()
        if self.failure is None and any(self.copies):
            self.failure = EmulationError("a program ends with copies on their way")
        if self.failure is not None:
            raise self.failure

    def pause(self, until: Callable[[], bool] | None = None) -> None:
        """Let others go on; come back once `until` holds."""
        if self.partitions == 1:
            return
        p = self.now
        self.waits[p] = until
        self.back.release()
        self.turn[p].acquire()
        if self.failure is not None:
            raise Aborted


class Barrier:
    """An mbarrier."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.count = machine, 0

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.phases = 0
        self.gathered = self.released = ((), ())  # what those who arrived had seen and shown: in this phase, and up to the last

    def arrive(self, p: int, count: int) -> None:
        if count > self.pending:
            raise EmulationError(f"{count} arrivals at a barrier that waits for {self.pending}")
        self.gathered = latest(self.gathered[0], self.machine.seen[p]), latest(self.gathered[1], self.machine.shown[p])
        self.machine.step(p)
        self.pending -= count
        if self.pending == 0:
            self.released, self.pending = self.gathered, self.count
            self.phases += 1

    def wait(self, parity: int) -> None:
        if parity not in (0, 1):
            raise EmulationError(f"a barrier's parity is {parity}")
        self.machine.pause(lambda: self.phases % 2 != parity)
        self.machine.order(self.machine.now, *self.released)


class Barriers:
    def __init__(self, machine: Machine, count: int) -> None:
        self.each = [Barrier(machine) for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        return self.each[i]


class Buffer:
    """Shared memory, or a view of it, with who wrote and read each element when."""

    def __init__(self, machine: Machine, parts: dict[str, Tensor]) -> None:
        self.machine, self.parts = machine, parts

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parts["data"].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts["data"].dtype

    def view(self, change: Callable[[Tensor], Tensor]) -> Buffer:
        return Buffer(self.machine, {name: change(x) for name, x in self.parts.items()})

    def index(self, i: Any) -> Buffer:
        i = operator.index(i)
        if not 0 <= i < self.shape[0]:
            raise EmulationError(f"place {i} of {self.shape[0]} in shared memory")
        return self.view(lambda x: x[i])

    def slice(self, start: int, length: int, dim: int = 0) -> Buffer:
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise EmulationError(f"elements {start} to {start + length} of {self.shape[dim]} in shared memory")
        return self.view(lambda x: x.narrow(dim, start, length))

    def permute(self, order: tuple[int, ...]) -> Buffer:
        return self.view(lambda x: x.permute(order))

    def late(self, clock: Clock) -> Tensor:
        """Which elements were written after a clock."""
        return self.parts["wrote"] > torch.tensor((*clock, 0), dtype=torch.int32)[self.parts["who"].long()]

    def ordered(self, p: int, what: str, name: str) -> None:
        """Raise unless all accesses of a kind (`wrote`, or `read t`) are ordered before p's next."""
        if name == "wrote":
            late = self.late(self.machine.seen[p])
            by = self.parts["who"][late].unique().tolist()
        else:
            late = self.parts[name] > self.machine.seen[p][int(name[5:])]
            by = [int(name[5:])] if late.any() else []
        if late.any():
            raise EmulationError(
                f"race: partition {p} {what} shared memory that {by} accesses ({name}), and no barrier orders them"
            )

    def read(self, by_tensor_cores: bool = False) -> Tensor:
        p = self.machine.now
        if (self.parts["who"] == NOBODY).any():
            raise EmulationError("shared memory is read before it was written")
        self.ordered(p, "reads", "wrote")
        if by_tensor_cores and self.late(self.machine.shown[p]).any():
            raise EmulationError("tensor cores read what was written behind the last fence_async_shared")
        self.note_read()
        return self.parts["data"].clone()

    def note_read(self) -> None:
        self.parts[f"read {self.machine.now}"].fill_(self.machine.seen[self.machine.now][self.machine.now])

    def write(self, p: int, data: Tensor) -> None:
        self.ordered(p, "writes", "wrote")
        for name in self.parts:
            if name.startswith("read "):
                self.ordered(p, "writes", name)
        if tuple(data.shape) != self.shape or data.dtype != self.dtype:
            raise EmulationError(f"a tile {tuple(data.shape)} of {data.dtype} is stored to {self.shape} of {self.dtype}")
        self.parts["data"].copy_(data)
        self.parts["who"].fill_(p)
        self.parts["wrote"].fill_(self.machine.seen[p][p])

    def load(self, _layout: Any) -> Value:
        self.machine.pause()
        return Value(self.read())

    def store(self, value: Value) -> None:
        self.machine.pause()
        self.write(self.machine.now, value.tensor)


class Product:
    """One that tensor cores work on: it may read its operands until it is waited for."""

    def __init__(self, operands: list[Any]) -> None:
        self.buffers = [x for x in operands if isinstance(x, Buffer)]


# ---- what kernels import


class Kernel:
    """A function under gluon.jit: called from kernels, launched with a grid."""

    def __init__(self, function: Callable, machine: Machine) -> None:
        self.function, self.machine = function, machine
        self.__name__ = function.__name__

    def __call__(self, *arguments: Any, **constants: Any) -> Any:
        return self.function(*arguments, **constants)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            options = ("num_warps", "maxnreg")
            constants = {name: x for name, x in constants.items() if name not in options}
            memory: dict[tuple[int, int], Pointer] = {}  # two arguments can be one tensor

            def given(x: Any) -> Any:
                if not isinstance(x, Tensor):
                    return x
                if not x.is_contiguous():
                    raise EmulationError("a kernel is given a tensor that is not contiguous")
                flat = x.detach().view(-1)
                return memory.setdefault((x.data_ptr(), x.numel()), Pointer(flat, torch.zeros(flat.numel(), dtype=torch.bool)))

            pointers = [given(x) for x in arguments]
            self.machine.programs = grid[0]
            for program in range(grid[0]):
                self.machine.program = program
                self.machine.start(1)
                self.function(*pointers, **constants)

        return launch


class Gluon:
    """Stand-ins for triton.experimental.gluon and its parts."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        layout = lambda *_, **__: None  # noqa: E731
        self.language = SimpleNamespace(
            constexpr=lambda x: x,
            float32=torch.float32, int32=torch.int32, int64=torch.int64,
            NVMMASharedLayout=layout, SwizzledSharedLayout=layout, BlockedLayout=layout, NVMMADistributedLayout=layout,
            DotOperandLayout=layout, SliceLayout=layout,
            arange=lambda a, b, _layout=None: Value(torch.arange(a, b, dtype=torch.int32)),
            zeros=lambda shape, dtype, _layout=None: Value(torch.zeros(*shape, dtype=dtype)),
            exp=lambda x: Value(plain(x).exp()),
            abs=lambda x: Value(plain(x).abs()),
            where=lambda c, a, b: Value(torch.where(plain(c), *wider(plain(a), plain(b)))),
            sum=lambda x, axis: Value(plain(x).sum(axis, dtype=x.dtype)),
            reduce=lambda xs, axis, act: self.fold(xs, axis, act),
            associative_scan=lambda x, axis, act, reverse=False: self.scanned(x, axis, act, reverse),
            convert_layout=lambda x, _layout: Value(plain(x)),
            static_range=range,
            program_id=lambda axis: Value(machine.program, torch.int32),
            num_programs=lambda axis=0: Value(machine.programs, torch.int32),
            load=lambda at, mask=None, other=0: Value(at.load(mask, other)),
            store=self.store,
            allocate_shared_memory=self.allocate,
            warp_specialize=self.warp_specialize,
        )  # fmt: skip
        self.hopper = SimpleNamespace(
            async_copy=SimpleNamespace(async_copy_global_to_shared=self.copy, mbarrier_arrive=self.arrive_with_copies),
            fence_async_shared=self.fence,
            mbarrier=SimpleNamespace(
                MBarrierLayout=lambda: "barriers",
                init=lambda bar, count: bar.init(count),
                wait=lambda bar, parity: bar.wait(operator.index(parity)),
                arrive=self.arrive,
            ),
            warpgroup_mma=self.multiply,
            warpgroup_mma_wait=self.wait,
        )

    def jit(self, function: Callable) -> Kernel:
        return Kernel(function, self.machine)

    def fold(self, xs: tuple[Value, ...], axis: int, act: Callable) -> tuple[Value, ...]:
        parts = [[Value(x.tensor.select(axis, i)) for x in xs] for i in range(xs[0].shape[axis])]
        total = parts[0]
        for part in parts[1:]:
            total = act(*total, *part)
        return tuple(total)

    def scanned(self, x: Value, axis: int, act: Callable, reverse: bool) -> Value:
        parts = [Value(part) for part in x.tensor.unbind(axis)][:: -1 if reverse else 1]
        for i in range(1, len(parts)):
            parts[i] = act(parts[i - 1], parts[i])
        return Value(torch.stack([part.tensor for part in parts[:: -1 if reverse else 1]], axis))

    def store(self, at: Pointer, value: Value, mask: Any = None) -> None:
        offset, mask = at.reach(mask)
        data = torch.broadcast_to(value.tensor, torch.broadcast_shapes(offset.shape, value.shape)).to(at.memory.dtype)
        offset, mask = torch.broadcast_to(offset, data.shape)[mask], mask
        if at.stored[offset].any() or len(offset.unique()) < len(offset):
            raise EmulationError("an element of global memory is stored twice in one launch")
        at.stored[offset] = True
        at.memory[offset] = data[mask]

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Buffer | Barriers:
        if layout == "barriers":
            return Barriers(self.machine, shape[0])
        parts = {"data": torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)}
        parts["who"] = torch.full(shape, NOBODY, dtype=torch.int8)
        parts |= {name: torch.zeros(shape, dtype=torch.int32) for name in ("wrote", *(f"read {p}" for p in range(4)))}
        return Buffer(self.machine, parts)

    def warp_specialize(self, partitions: list[tuple[Kernel, tuple]], warps: list[int], registers: list[int]) -> None:
        if not len(partitions) - 1 == len(warps) == len(registers):
            raise EmulationError(f"{len(partitions)} partitions, warps for {len(warps)} and registers for {len(registers)} workers")
        self.machine.run([lambda f=f, given=given: f(*given) for f, given in partitions])

    def copy(self, buffer: Buffer, at: Pointer, mask: Any = None) -> None:
        machine, p = self.machine, self.machine.now
        machine.pause()
        seen, shown = machine.seen[p], machine.shown[p]
        offset, mask = at.reach(mask)
        mask = torch.broadcast_to(mask, buffer.shape)
        where = Pointer(at.memory, at.stored, offset)

        def arrives() -> None:
            machine.order(machine.partitions + p, seen, shown)
            buffer.write(machine.partitions + p, torch.broadcast_to(where.load(Value(mask), 0), buffer.shape))

        machine.copies[p].append(arrives)

    def arrive_with_copies(self, bar: Barrier, increment_count: bool) -> None:
        """Of the 128 threads that copy, each once its own copies have arrived."""
        if increment_count:
            raise EmulationError("mbarrier_arrive that increments the count is not emulated")
        machine, p = self.machine, self.machine.now
        seen, shown = machine.seen[p], machine.shown[p]
        machine.step(p)

        def arrives() -> None:
            machine.order(machine.partitions + p, seen, shown)
            bar.arrive(machine.partitions + p, 128)

        machine.copies[p].append(arrives)
        machine.pause()

    def arrive(self, bar: Barrier, count: int = 1) -> None:
        self.machine.pause()
        bar.arrive(self.machine.now, count)

    def fence(self) -> None:
        p = self.machine.now
        self.machine.shown[p] = latest(self.machine.shown[p], self.machine.seen[p])
        self.machine.step(p)

    def multiply(
        self, a: Any, b: Buffer, acc: Value, use_acc: bool = True, precision: Any = None, max_num_imprecise_acc: Any = None,
        is_async: bool = False,
    ) -> Value:  # fmt: skip
        self.machine.pause()
        left, right = (x.read(by_tensor_cores=True) if isinstance(x, Buffer) else x.tensor for x in (a, b))
        if left.dtype != right.dtype or acc.dtype != torch.float32:
            raise EmulationError(f"product of {left.dtype} and {right.dtype} added to {acc.dtype}")
        product = Product([a, b])
        # What is added to may be on its way itself: products of one partition end in order.
        data = left.float() @ right.float() + (acc.data if use_acc else 0.0)
        if data.shape != acc.data.shape:
            raise EmulationError(f"product {tuple(data.shape)} added to {acc.shape}")
        self.machine.products[self.machine.now].append(product)
        made = Value(data, product=product)
        return made if is_async else self.wait(0, deps=[made])

    def wait(self, left: int, deps: list[Value]) -> Any:
        self.machine.pause()
        going = self.machine.products[self.machine.now]
        while len(going) > left:
            for buffer in going.pop(0).buffers:
                buffer.note_read()
        found = tuple(Value(x.data, product=x.product if x.product in going else None) for x in deps)
        return found if len(found) > 1 else found[0]


class Modules:
    """Kernel modules of a folder, executed with the stand-ins.

    Args:
        edits: (module, old text, new text): what to change in a source first, for tests that something wrong is found.
    """

    def __init__(self, folder: Path, seed: int = 0, edits: tuple[tuple[str, str, str], ...] = ()) -> None:
        self.folder, self.edits = folder, edits
        self.gluon = Gluon(Machine(seed))
        self.done: dict[str, SimpleNamespace] = {}

    def load(self, name: str) -> SimpleNamespace:
        if name not in self.done:
            path = self.folder / f"{name}.py"
            text = path.read_text()
            for module, old, new in self.edits:
                if module == name:
                    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
                    text = text.replace(old, new)
            names: dict[str, Any] = {
                "__name__": name,
                "__builtins__": {**vars(builtins), "__import__": self.find, "range": self.range},
            }
            exec(compile(text, str(path), "exec"), names)
            self.done[name] = SimpleNamespace(**names)
        return self.done[name]

    def find(self, name: str, *_: Any) -> Any:
        """Instead of __import__."""
        if name == "__future__":
            return builtins.__import__(name)
        stands_for = {
            "triton.experimental": SimpleNamespace(gluon=self.gluon),
            "triton.experimental.gluon": self.gluon,
            "triton.experimental.gluon.language.nvidia.hopper": self.gluon.hopper,
        }
        return stands_for[name] if name in stands_for else self.load(name.rsplit(".", 1)[-1])

    @staticmethod
    def range(*bounds: Any) -> Iterator[Value]:
        """A loop's counter is a number in a register."""
        return (Value(i, torch.int32) for i in range(*map(operator.index, bounds)))
