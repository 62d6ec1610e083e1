"""`proteus doctor`: is this machine fit for it?"""

from __future__ import annotations

from proteus_lm.cli.common import app


@app.command
def doctor() -> int:
    """Versions, devices, which backend each operation would use and why, and a check of every operation on this machine.

    Each operation is compared with the token-by-token reference on each device: output, final state and gradients.
    The exit code is 1 when a check fails.
    """
    from proteus_lm.doctor import doctor as examine

    return examine()
