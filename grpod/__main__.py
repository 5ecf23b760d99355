"""The command `grpod`: parses, runs, and ends with the exit code. Imports little, so that `--help` is quick."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from grpod.cli.app import app
from grpod.errors import GrpodError


def main() -> NoReturn:
    _leave(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        code = app.main(args=list(argv), prog_name="grpod", standalone_mode=False)
    except click.ClickException as error:  # bad usage: 2
        error.show()
        return error.exit_code
    except GrpodError as error:
        text = "\n  ".join(str(error).splitlines())
        click.echo(f"grpod: {type(error).__name__} (exit {error.exit_code}): {text}", err=True)
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # `grpod status … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return code if isinstance(code, int) else 0


def _leave(code: int) -> NoReturn:
    """Not through the interpreter's own end: it would wait for threads that nothing can end (a step that was given up, an
    import), and take seconds to take torch apart."""
    for signum in (signal.SIGINT, signal.SIGTERM):  # it is over: a signal now is no other end
        signal.signal(signum, lambda signum, frame: os._exit(code))
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(timeout=1)
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # of a reader that has left
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
