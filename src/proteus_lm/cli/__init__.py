"""The command `proteus`: one file a group of commands, which import what they need when they run.

Errors a user can do something about are one line on standard error and exit code 2; Ctrl-C exits with 130.
`--debug` anywhere on the line, or PROTEUS_DEBUG=1, shows the traceback instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import tyro

from proteus_lm.cli.ablation import ablate
from proteus_lm.cli.checking import doctor
from proteus_lm.cli.common import app, remember, say
from proteus_lm.cli.data import prepare
from proteus_lm.cli.evaluation import evaluate
from proteus_lm.cli.inspection import examine
from proteus_lm.cli.reporting import report
from proteus_lm.cli.synthesis import synthesize
from proteus_lm.cli.text import generate
from proteus_lm.cli.training import train

__all__ = ["ablate", "app", "doctor", "evaluate", "examine", "generate", "main", "prepare", "report", "synthesize", "train"]

# What the library raises for reasons outside the program; anything else is a defect of ours and keeps its traceback.
USER_ERRORS = (ValueError, OSError, ArithmeticError, ImportError, NotImplementedError, RuntimeError)

DESCRIPTION = """Train, study and run language models whose memory is opened on a schedule (Proteus).

First steps: make demo, or
  proteus prepare --source pydoc --tokenizer byte --out runs/demo/data
  proteus train recipes/demo-titans-e8.yaml --out runs/demo/titans-e8
  proteus eval runs/demo/titans-e8 --context 1x 2x
  proteus generate runs/demo/titans-e8 --prompt "A list is"

--debug on any command shows the traceback of an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments or os.environ.get("PROTEUS_DEBUG", "") not in ("", "0")
    arguments = [a for a in arguments if a != "--debug"]
    remember(arguments)
    try:
        code = app.cli(args=arguments, prog="proteus", description=DESCRIPTION, config=(tyro.conf.FlagCreatePairsOff,))
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except SystemExit as leaving:
        if isinstance(getattr(leaving, "message", None), str):  # training that a signal stopped says where
            say(leaving.message)  # pyright: ignore[reportAttributeAccessIssue]
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BrokenPipeError:
        # The reader of a pipe has gone: nobody is there to be told. Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except USER_ERRORS as error:
        if debug:
            raise
        text = " ".join(str(error).split()) or type(error).__name__
        if not isinstance(error, ValueError | OSError | ImportError | ArithmeticError):
            text = f"{type(error).__name__}: {text} (--debug shows where)"
        say(f"error: {text}")
        return 2
