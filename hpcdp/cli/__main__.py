"""``python -m hpcdp.cli``: what the command ``hpcdp`` runs."""

import sys

from . import main

sys.exit(main())
