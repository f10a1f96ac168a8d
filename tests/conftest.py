"""Settings of the whole suite."""

import os

import torch
from hypothesis import settings


# Nothing here depends on time, on chance, or on a network
settings.register_profile("lze", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lze")
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
