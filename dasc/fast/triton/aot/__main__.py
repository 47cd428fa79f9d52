"""``python -m dasc.fast.triton.aot``."""

import sys

from dasc.fast.triton.aot import main

sys.exit(main(sys.argv[1:]))
