"""`accelerate launch` without its list of defaults, and letting the job finish after a Ctrl-C, to say how to resume."""

import logging
import signal
import sys
from collections.abc import Sequence

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.commands.launch import main as launch
from torch.distributed.elastic.multiprocessing.api import SignalException


_logger = logging.getLogger("accelerate.commands.launch")
# Without a configuration, accelerate warns at each launch about the flags whose defaults it uses
_logger.addFilter(lambda record: "not passed to `accelerate launch`" not in record.getMessage())


def num_processes(arguments: Sequence[str]) -> int:
    """Number of processes that `accelerate launch` would start on all machines."""
    launch, *_ = _validate_launch_command(launch_command_parser().parse_args(arguments))
    is_distributed = (
        launch.multi_gpu or launch.use_deepspeed or launch.use_fsdp or launch.use_megatron_lm or launch.tpu
    )
    return int(launch.num_processes) if is_distributed else 1


def main():
    """Entry point of `python -m lze_trl.job.launcher`, with the arguments of `accelerate launch`."""
    stopped = False

    def stop(number, frame):
        # The job got the signal as well, from the terminal; a second one ends the launcher too
        nonlocal stopped
        stopped = True
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, stop)
    try:
        launch()
    except SignalException as received:  # by torchrun, which forwards signals itself
        sys.exit(128 + received.sigval)
    except SystemExit:
        if stopped:
            sys.exit(128 + signal.SIGINT)
        raise


if __name__ == "__main__":
    main()
