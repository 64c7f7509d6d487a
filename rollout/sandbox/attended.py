"""Runs one program to its end, and no process of it longer: `python -I -S attended.py LIFELINE COMMAND...`.

Standard library only. The program has this process's streams. Once it has ended, or the other end of the pipe LIFELINE is
closed (its starter gave up, or died), everything that it started is killed, whatever session it went to.
"""

import os
import select
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import jail  # type: ignore[import-not-found]  # beside this file, which is run by its path

NOT_STARTED = 127


def main() -> int:
    """The program's status, as a shell would tell it."""
    lifeline, command = int(sys.argv[1]), sys.argv[2:]
    jail.LIBC.prctl(jail.PR_SET_SUBREAPER, 1, 0, 0, 0)
    try:
        program = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        print(f"{command[0]} could not be started: {error}", file=sys.stderr)
        return NOT_STARTED
    try:
        ends = select.poll()  # unlike `select`, for descriptors of any number
        for descriptor in (lifeline, os.pidfd_open(program.pid)):
            ends.register(descriptor, select.POLLIN)
        ends.poll()
        status = program.poll()
    finally:
        jail.kill_all(program.pid)
    if status is None:
        return 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
