"""The atsplan command: a click group that loads each command when it is called, and the exit codes.

0 fine, 1 the answer is no, 2 the input is wrong, 3 the engine or the machine failed, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import time
from typing import Any, NoReturn

import click

# name -> (module, one line for --help); modules load on use, so that `atsplan --help` stays fast
COMMANDS = {
    "inventory": ("commands.inventory", "What a model file holds: tensors, layers, bytes by role."),
    "fit": ("commands.fit.fit", "Does a model fit a machine, how fast, and what to type."),
    "machines": ("commands.fit.machines", "Machines and cards that are known by name."),
    "profile": (
        "commands.profile.profile",
        "Measure this machine for a model: operators, links, whole-model runs.",
    ),
    "heat": ("commands.heat.heat", "Expert routing: trace, import, merge, report, export."),
    "simulate": ("commands.heat.simulate", "Replay a routing trace against expert caches."),
    "solve": ("commands.solve.solve", "Place every tensor under a memory budget and write the plan."),
    "sweep": ("commands.solve.sweep", "Budget against predicted speed, as a table and a picture."),
    "explain": (
        "commands.explain.explain",
        "Where the time goes, what limits the plan, what more memory would buy.",
    ),
    "check": ("commands.check.check", "Check plan files without model or GPU; for CI."),
    "diff": ("commands.diff", "What moved between two plans, and what it costs."),
    "fmt": ("commands.fmt", "Rewrite plan files in canonical form."),
    "rewrite": ("commands.rewrite", "Compile a GGUF file to match a plan."),
    "verify": ("commands.verify", "Prove a rewritten file against its source and plan."),
    "run": ("commands.run", "Load a model by its plan and generate text."),
    "bench": ("commands.bench", "Measure a plan against baselines at equal memory."),
    "serve": ("commands.serve", "An OpenAI-compatible server for a plan."),
    "refine": ("commands.refine", "Measured times into the calibration, and to a faster plan."),
    "export": ("commands.export", "Command lines for stock tools that realise a plan."),
    "doctor": ("commands.doctor", "Engine, devices, and what is possible on this machine."),
    "demo": ("commands.demo", "The whole way on a small generated model."),
}


def _end_politely() -> list[int]:
    """A polite kill ends like Ctrl-C: what was half written is taken away first. Tells what came."""
    heard: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Ctrl-C, a kill, a closed terminal
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup goes on
            signal.signal(number, interrupt)
    return heard


def _interrupted() -> NoReturn:
    with contextlib.suppress(OSError):  # the terminal may be gone
        click.echo("atsplan: interrupted", err=True)
    sys.exit(130)


def _open_streams() -> None:
    """Where a standard stream is closed (`>&-`), one that leads nowhere: else a file that is opened would get
    its number, and what an engine prints.
    """
    for name in ("stdin", "stdout", "stderr"):  # in this order: the lowest number that is free is taken
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(handle, "r" if name == "stdin" else "w"))


def _leave_the_current_folder() -> None:
    """Begin again without search paths that lead to code in the current folder, if there are any.

    The loader of libraries has read them already: only a new process is without.
    """
    from runtime.child.environment import cleaned, import_path

    variables, sentences = cleaned(os.environ)
    if variables != dict(os.environ):
        for sentence in sentences:
            _say(f"note: {sentence}")
        if os.name == "posix" and sys.executable:
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)
    sys.path[:] = import_path()


def _say(text: str) -> None:
    from commands.shared.console import say

    say(text)


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, and whose errors become exit codes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _open_streams()
        _leave_the_current_folder()
        return super().__call__(*args, **kwargs)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(COMMANDS[cmd_name][0])
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in COMMANDS or name.startswith("-"):
            return super().resolve_command(ctx, args)
        near = difflib.get_close_matches(name, COMMANDS, n=3, cutoff=0.5)
        meant = f"Did you mean {' or '.join(near)}?" if near else f"There are {', '.join(COMMANDS)}"
        raise click.UsageError(f"No such command '{name}'. {meant}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        from planner.errors import AtsplanError

        heard = _end_politely()
        ctx.meta["atsplan.began"] = time.monotonic()
        try:
            return super().invoke(ctx)
        except AtsplanError as problem:
            if ctx.params.get("debug"):
                raise
            _say(f"atsplan: {problem}")
            sys.exit(problem.exit_code)
        except click.UsageError as problem:
            path = problem.ctx.command_path if problem.ctx else "atsplan"
            if type(problem).__name__ == "NoArgsIsHelpError":  # a group alone shows its help
                raise
            _say(f"{path}: {' '.join(problem.format_message().split())} ({path} --help)")
            sys.exit(2)
        except (KeyboardInterrupt, click.Abort):
            _interrupted()
        except ImportError:
            if heard:  # libraries say so of an interrupt while they are loaded
                _interrupted()
            raise
        except BrokenPipeError:
            # The reader of the output went away (`| head`): no error of this program.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as problem:
            if ctx.params.get("debug"):
                raise
            _say(f"atsplan: {problem.filename or 'system'}: {problem.strerror or problem}")
            sys.exit(3 if problem.errno == errno.ENOMEM else 2)
        except MemoryError:
            if ctx.params.get("debug"):
                raise
            click.echo("atsplan: no memory is left", err=True)
            sys.exit(3)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Words such as heat, stripe, site, unit, gap and bound: docs/glossary.md",
)
@click.version_option(package_name="atsplan")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def main(debug: bool) -> None:
    """Plan where every tensor of a GGUF model lives, rewrite the file to match, load it with llama.cpp."""


if __name__ == "__main__":
    main()
