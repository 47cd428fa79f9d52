"""Hypothesis profiles, chosen by ``DASC_HYPOTHESIS``: ``ci`` (default), ``dev`` or ``nightly``."""

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("dev", deadline=None, max_examples=100)
settings.register_profile(
    "nightly",
    deadline=None,
    max_examples=5000,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile(os.environ.get("DASC_HYPOTHESIS", "ci"))
# pytest-xdist runs one process a core; threads of torch beside them only get in each other's way.
torch.set_num_threads(1)
