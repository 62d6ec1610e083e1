"""The C kernel, compiled by the system's compiler at first use and kept in the user's cache folder.

The library's name holds a hash of the source, the compiler, its flags and the processor, so a new version or another machine with
the same home folder builds its own. It is written beside its place and renamed, so that processes that build at once do no harm,
and loaded only with the digest that stands beside it: to load half a library can end the process.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

SOURCE = Path(__file__).with_name("titans.c")
COMPILERS = ("cc", "gcc", "clang")
# Neither flag changes a result: no code here reads errno or the floating-point traps.
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
SECONDS = 120  # a build takes about 3


class Unavailable(RuntimeError):
    """The kernel cannot be had on this machine; the message says why."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernel, built if need be. What failed once in a process is not tried again: see `why_not`.

    Raises:
        Unavailable: without a compiler, or where it fails, or where there is no place for the result.
    """
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if os.name != "posix":
        raise Unavailable(f"the C kernel is built on POSIX systems, and this is {platform.system()}")
    if compiler is None:
        raise Unavailable(f"no C compiler ({', '.join(COMPILERS)}) is on the PATH; install one for the C kernel")
    place = folder() / f"titans-{_key(compiler)}.so"
    if not _whole(place):
        _build(compiler, place)
    try:
        return _loaded(place)
    except OSError as error:
        raise Unavailable(f"the library that {compiler} built does not load: {error}") from error


@lru_cache(maxsize=1)
def why_not() -> str:
    """Why there is no kernel on this machine, or nothing. Builds it at the first call."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return ""


def folder() -> Path:
    """Where the library is kept: `proteus-lm` in the user's cache folder (XDG_CACHE_HOME, or ~/.cache)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "proteus-lm"


def _whole(place: Path) -> bool:
    """Whether the library is there, byte by byte as it was built."""
    try:
        return place.with_suffix(".sha256").read_text() == hashlib.sha256(place.read_bytes()).hexdigest()
    except (OSError, UnicodeDecodeError):
        return False


def _loaded(place: Path) -> ctypes.CDLL:
    """The library in a file, its functions typed."""
    loaded = ctypes.CDLL(str(place))
    loaded.titans_room.restype = ctypes.c_int64
    for function in (loaded.titans_room, loaded.titans_forward, loaded.titans_backward):
        function.argtypes = [ctypes.c_void_p]
    return loaded


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=SECONDS).stdout
    parts = [SOURCE.read_text(), compiler, version, " ".join(FLAGS), platform.machine(), platform.system(), _processor()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What -march=native looks at: the model and its instruction sets, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "Features", "CPU part", "stepping")))


def _build(compiler: str, place: Path) -> None:
    """Compile into `place`, and write the digest beside it, each atomically.

    Raises:
        Unavailable: where the compiler fails, or the folder cannot be written.
    """
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        work = tempfile.TemporaryDirectory(dir=place.parent, prefix="build-")
    except OSError as error:
        raise Unavailable(
            f"cannot write the C kernel to {place.parent}: {error}; set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with work as folder_:
        made, digest = Path(folder_) / "titans.so", Path(folder_) / "titans.sha256"
        try:
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
            if done.returncode:
                said = " ".join((done.stderr or done.stdout).split())[:300]
                raise Unavailable(f"{compiler} failed on the C kernel (exit {done.returncode}): {said}")
            digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            made.replace(place)
            digest.replace(place.with_suffix(".sha256"))
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(f"the C kernel was not built by {compiler}: {error}") from error
