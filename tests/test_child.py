"""The child protocol: streams of events, limits, deaths told in one sentence, no child without a parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from engines import ENVIRONMENT, ROOT
from processes import alive, descendants, until

from planner.errors import AtsplanError, EngineProblem, InputError, MachineError
from runtime.child import process
from runtime.child.ask import Died, Limits, Relayed, TimeIsUp, ask, stream
from runtime.child.pool import share_out

Make = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Writes a module that children can import, and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(code: str) -> str:
        (tmp_path / "made_child.py").write_text(code)
        return "made_child"

    return make


SERVE = "import os, signal, subprocess, time\nfrom runtime.child.serve import serve_events, serve_lines\n"


def working(*lines: str) -> str:
    """A child whose `work(request, emit)` has these lines."""
    return "\n    ".join((f"{SERVE}def work(request, emit):", *lines)) + "\nserve_events(work)\n"


def test_events_come_as_they_happen_and_the_answer_last(module: Make) -> None:
    name = module(
        working(
            "for number in range(request['n']):",
            "    emit({'number': number})",
            "return {'sum': sum(range(request['n']))}",
        )
    )
    heard: list[int] = []
    assert ask(name, {"n": 4}, "test", on_event=lambda event: heard.append(event["number"])) == {"sum": 6}
    assert heard == [0, 1, 2, 3]


def test_an_event_is_there_before_the_next_one(module: Make, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    wait = f"while not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    name = module(working("emit({'n': 1})", wait, "return {}"))
    with closing(stream(name, {}, "test", Limits(60))) as events:
        assert next(events) == {"n": 1}  # or else both wait for ever
        flag.touch()
        assert list(events) == []


def test_lines_are_events_too_and_an_engine_may_print(module: Make) -> None:
    lines = (
        "os.write(1, b'the engine prints {}')",
        "print('so does Python')",
        "yield {'a': 1}",
        "yield {'b': 2}",
    )
    name = module("\n    ".join((f"{SERVE}def lines(request):", *lines)) + "\nserve_lines(lines)\n")
    with closing(stream(name, {}, "test")) as events:
        assert list(events) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("kind", [InputError, MachineError, EngineProblem, AtsplanError])
def test_problems_arrive_as_one_line_with_their_exit_code(kind: type[AtsplanError], module: Make) -> None:
    arguments = "'b1', 'no such thing'" if kind is EngineProblem else "'no such thing'"
    name = module(working(f"from planner.errors import {kind.__name__} as Kind", f"raise Kind({arguments})"))
    with pytest.raises(AtsplanError) as caught:
        ask(name, {}, "test")
    assert str(caught.value) == ("engine b1: no such thing" if kind is EngineProblem else "no such thing")
    assert isinstance(caught.value, Relayed) == (kind in (MachineError, EngineProblem))
    assert caught.value.exit_code == kind.exit_code


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended by SIGSEGV, without a message"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "ended by SIGKILL, as the system does to whom has taken"),
        ("os.kill(os.getpid(), signal.SIGILL)", "ended by SIGILL: this build uses instructions that this"),
        ("os._exit(7)", "ended with status 7, without a message"),
        ("raise KeyError('no such key')", r"KeyError: 'no such key' \(ended with status 1\)"),
        ("os.write(2, b'/x/ggml.c:7: out of bounds\\n'); os.abort()", r"out of bounds \(ended by SIGABRT\)"),
        ("os.closerange(3, 64); os._exit(0)", "ended with status 0, without a message"),
    ],
)
def test_a_death_is_told_in_one_sentence(code: str, sentence: str, module: Make) -> None:
    name = module(working("emit({'n': 1})", code))
    with (
        pytest.raises(Died, match=f"^engine test: {sentence}") as caught,
        closing(stream(name, {}, "test")) as events,
    ):
        assert list(events) == [{"n": 1}]
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


def test_half_a_message_is_a_death(module: Make) -> None:
    name = module('import os, sys\nsys.stdin.readline()\nos.write(1, b\'{"n": 1}\\n{"answ\')\nos.abort()\n')
    with pytest.raises(Died, match="ended by SIGABRT"), closing(stream(name, {}, "test")) as events:
        assert list(events) == [{"n": 1}]


def test_an_event_names_the_build_that_later_problems_are_of(module: Make) -> None:
    name = module(working("emit({'engine': 'b7'})", "os.abort()"))
    with pytest.raises(Died, match=r"^engine b7: "):
        ask(name, {}, "test")


def test_a_child_may_take_so_long_and_no_longer(module: Make) -> None:
    name = module(working("while True:", "    emit({})", "    time.sleep(0.01)"))
    with pytest.raises(TimeIsUp, match="no answer within 1 s"):
        ask(name, {}, "test", timeout_s=1)


def test_a_child_may_be_silent_so_long_and_no_longer(module: Make) -> None:
    name = module(working("emit({'n': 1})", "emit({'n': 2})", "time.sleep(600)"))
    heard = []
    with (
        pytest.raises(Died, match="said nothing for 3 s") as caught,
        closing(stream(name, {}, "test", Limits(silence_s=3))) as events,
    ):
        for event in events:
            heard.append(event["n"])
            time.sleep(4)  # silence counts only while somebody listens
    assert heard == [1, 2]
    assert not isinstance(caught.value, TimeIsUp)


def test_a_child_that_does_not_listen_is_ended_too(module: Make) -> None:
    name = module("import time\ntime.sleep(600)\n")
    with pytest.raises(TimeIsUp):
        ask(name, {"text": "x" * 10**7}, "test", timeout_s=1)


def test_a_log_without_end_takes_no_memory(module: Make) -> None:
    name = module(working("for _ in range(300):", "    os.write(2, b'x' * 10**6)", "os.abort()"))
    with pytest.raises(Died) as caught:
        ask(name, {}, "test")
    assert sum(map(len, caught.value.lines)) <= 10 * 2**16


def test_who_stops_listening_leaves_no_child(module: Make) -> None:
    name = module(working("while True:", "    emit({})"))
    before = descendants(os.getpid())
    with closing(stream(name, {}, "test", Limits(600))) as events:
        next(events)
        children = descendants(os.getpid()) - before
        assert children
    assert not alive(children)


def test_what_a_child_has_started_ends_with_it(module: Make) -> None:
    start = "emit({'pid': subprocess.Popen(['sleep', '600']).pid})"
    with closing(stream(module(working(start, "time.sleep(600)")), {}, "test")) as events:
        pid = next(events)["pid"]
        assert alive({pid})
    assert until(lambda: not alive({pid}))


ASKS = """
import sys
sys.path.insert(0, sys.argv[1])
from runtime.child.ask import ask
ask("made_child", {}, "test", on_event=lambda event: print(event["pid"], flush=True))
"""
# With its tie to the parent cut, a child is left with the end of its standard input.
CUT = "__import__('ctypes').CDLL(None).prctl(1, 0, 0, 0, 0)"


@pytest.mark.parametrize("cut", ["pass", CUT])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_child_does_not_outlive_its_parent(
    number: signal.Signals, cut: str, module: Make, tmp_path: Path
) -> None:
    module(working(cut, "emit({'pid': os.getpid()})", "time.sleep(600)"))
    command = [sys.executable, "-c", ASKS, str(tmp_path)]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(number)
        parent.wait(30)
        assert until(lambda: not alive({pid}))


def test_a_program_does_not_outlive_its_parent_either() -> None:
    code = (
        "from runtime.child import process\nprint(process.start(['sleep', '600']).pid, flush=True)\ninput()\n"
    )
    command = [sys.executable, "-c", code]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive({pid})
        parent.kill()
        parent.wait(30)
        assert until(lambda: not alive({pid}))


def test_a_process_that_does_not_hear_is_ended_all_the_same() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    started = process.start([sys.executable, "-c", deaf])
    assert started.stdout is not None and started.stdout.readline()
    process.end(started, 0.2)
    assert started.returncode == -signal.SIGKILL
    for pipe in (started.stdout, started.stderr):
        assert pipe is not None
        pipe.close()


def test_work_is_shared_out(tmp_path: Path) -> None:
    with share_out(len, ["a" * n for n in range(20)], 2) as results:
        assert sorted(results) == list(range(20))
    with pytest.raises(ValueError), share_out(int, ["1", "a"], 2) as numbers:
        list(numbers)


def test_the_end_of_a_process_at_work_is_told_in_a_line() -> None:
    """As the system ends one that has taken the last memory."""
    with (
        pytest.raises(MachineError, match="a process at work was ended"),
        share_out(os._exit, [9, 9], 2) as results,
    ):
        list(results)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they begin anew")
def test_processes_at_work_have_what_is_there_already() -> None:
    code = (
        "from runtime.child.pool import share_out\nhere = [1]\n"
        "def work(part):\n    return here + [part]\n"
        "here.append(2)\n"
        "with share_out(work, [3], 1) as results:\n    print(*results)\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[1, 2, 3]\n"
