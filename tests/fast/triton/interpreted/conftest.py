"""These tests interpret the kernels; ``tests/fast/triton/test_interpreted.py`` runs them, in processes of their own."""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
