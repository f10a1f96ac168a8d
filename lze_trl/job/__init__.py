"""The job around the trainer: recipes, the command, training, the demo and the Hub."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


CHECKOUT = Path(__file__).resolve().parents[2]
"""Root of the clone of the repository, where there is one."""


@contextmanager
def reported_errors(*expected: type[Exception]) -> Iterator[None]:
    """
    End the process with one line where the message of an error says what to do, as those of this package and of trackers do,
    and with a traceback for other errors, unless they are `expected`.
    """
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if not (type(error).__module__.startswith(("lze_trl.", "wandb.errors")) or isinstance(error, expected)):
            raise
        sys.exit(f"error: {error}")
