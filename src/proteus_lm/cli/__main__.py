"""`python -m proteus_lm.cli`."""

import sys

from proteus_lm.cli import main

sys.exit(main())
