"""
Side-by-side benchmark of data selection against plain TRL: `python -m benchmarks`.

`tasks` and `strategies` say what is run, `run` makes one run in a process of its own with the instruments of `meter` and
`evaluation`, `suite` makes all of them, and `comparison`, `tables` and `plots` say what came out. `parts`, `sampling`,
`gradients`, `stress` and `sync_memory` are measurements with commands of their own.
"""

import logging


logging.getLogger(__name__).setLevel(logging.INFO)
