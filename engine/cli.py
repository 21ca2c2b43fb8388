"""The command line: arguments to subcommands, errors to one line and an exit code. No model code.

Exit codes: 0 done; 1 doctor found a problem, bench --compare a drop, or the output could not be written; 2 the input,
an option or a file is wrong; 130 interrupted; 141 the reader of stdout went away.
"""

import errno
import os
import sys

import click

from . import __version__
from .commands import _output
from .commands.bench import bench
from .commands.chat import chat
from .commands.convert import convert
from .commands.doctor import doctor
from .commands.generate import generate
from .commands.inspect import inspect
from .commands.kernels import kernels
from .commands.perplexity import perplexity
from .commands.plan import plan
from .commands.tune import tune
from .errors import EngineError

EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="millstream")
def cli():
    """A CPU engine for Mixture-of-Experts language models."""


for command in (generate, chat, perplexity, convert, inspect, doctor, kernels, bench, tune, plan):
    cli.add_command(command)


def _usage_error(error: click.ClickException) -> str:
    """A wrong option in one line, with where to read more."""
    context = getattr(error, "ctx", None)
    where = f"; see `{context.command_path} --help`" if context else ""
    return f"error: {' '.join(error.format_message().split()).rstrip('.')}{where}"


def _run(args: list[str] | None) -> int:
    try:
        status = cli.main(args, prog_name="millstream", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:  # the help, on stderr
        error.show()
        return error.exit_code
    except click.ClickException as error:
        _output.note(_usage_error(error))
        return error.exit_code
    except EngineError as error:
        _output.note(f"error: {error}")
        return error.exit_code
    except MemoryError:
        _output.note("error: out of memory; free some, or choose a smaller model, --ctx or format")
        return EngineError.exit_code
    except (KeyboardInterrupt, click.Abort):
        _output.note("interrupted")
        return EXIT_INTERRUPTED
    except _output.ReaderGone:
        return EXIT_BROKEN_PIPE
    except OSError as error:  # click's own output, --version and --help
        if error.filename is not None or error.errno not in _WRITE_ERRORS:
            raise
        _output.note(f"error: stdout: cannot be written: {error.strerror}")
        return _output.OutputError.exit_code


def main(args: list[str] | None = None) -> None:
    """Run `millstream` and exit the process with its code. Unexpected exceptions keep their traceback."""
    # numpy computes nothing here that needs threads, and a pool of them costs memory and start-up time.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if sys.stdout is None:  # the first file opened would take its place
        _output.note("error: stdout: it is closed, so the result has nowhere to go")
        sys.exit(_output.OutputError.exit_code)
    if hasattr(sys.stdout, "reconfigure"):
        # Text models write UTF-8, whatever the locale says; a file name that is none is shown escaped.
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    status = _run(args)
    if status in (EXIT_BROKEN_PIPE, _output.OutputError.exit_code):
        _output.silence(sys.stdout)
    sys.exit(status)
