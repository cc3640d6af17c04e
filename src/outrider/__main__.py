"""``python -m outrider`` is the command ``outrider``."""

import sys

from outrider.cli import main

sys.exit(main())
