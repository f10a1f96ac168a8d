"""Settings of the whole suite."""

import os
import signal

import torch
from hypothesis import settings


# Nothing here depends on time, on chance, or on a network
settings.register_profile("lze", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("lze")
torch.set_num_threads(1)
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# A suite that was started in the background ignores Ctrl-C, and so would the runs that tests interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)
