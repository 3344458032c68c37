"""Every command line: Ctrl-C, closed and broken outputs, and unavailable storage end in one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT

PROGRAM = """
import sys
from resolute.console import guard_process, run_main
guard_process()
{imports}
def main():
    {body}
    return 0
run_main(main)
"""
FORK_SERVER = """
import signal
from resolute.fork_server import fork_server

def blocked(pipe):
    pipe.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))

if __name__ == "__main__":
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    context = fork_server()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    ours, theirs = context.Pipe()
    process = context.Process(target=blocked, args=(theirs,))
    process.start()
    print(ours.recv())
    process.join()
"""


def start(body: str, *, imports: str = "", **words: object) -> subprocess.Popen[str]:
    code = PROGRAM.format(body=body, imports=imports)
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **words}
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **words)  # type: ignore[call-overload]


def ended(process: subprocess.Popen[str], *, interrupt_after: str = "") -> tuple[int, str]:
    """Status and stderr of a process; with `interrupt_after`, of one that gets Ctrl-C after this line of output."""
    if interrupt_after:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{interrupt_after}\n"
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=25)
    return process.returncode, errors


def test_a_closed_stdout_reader_does_not_stop_the_work(tmp_path: Path) -> None:
    body = f"[print('line', i, flush=True) for i in range(9999)]; open({str(tmp_path / 'done')!r}, 'w').close()"
    with start(body) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert (tmp_path / "done").exists()


def test_a_full_stdout_is_reported_in_one_line_with_status_2() -> None:
    with Path("/dev/full").open("w") as full:
        status, errors = ended(start("print('result')", stdout=full))
    assert (status, errors.count("\n")) == (2, 1)
    assert "No space left on device" in errors


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_are_never_replaced_by_opened_files(tmp_path: Path, closed: str) -> None:
    body = f"print('out'); print('err', file=sys.stderr); open({str(tmp_path / 'f')!r}, 'w').write('data')"
    code = PROGRAM.format(body=body, imports="")
    done = subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == "data"


@pytest.mark.parametrize("where", ["imports", "body"])
def test_ctrl_c_prints_no_traceback_and_gives_status_130(where: str) -> None:
    wait = "print('ready', flush=True); import time; time.sleep(30)"
    status, errors = ended(start(**{"body": "pass", where: wait}), interrupt_after="ready")
    assert status == 130
    assert "Traceback" not in errors


def test_ctrl_c_during_exit_or_in_a_finaliser_is_neither_lost_nor_printed() -> None:
    leave = "import atexit, time; atexit.register(lambda: [print('leaving', flush=True), time.sleep(30)])"
    assert ended(start("return 7", imports=leave), interrupt_after="leaving") == (7, "")
    late = "import signal, time\nclass Late:\n    def __del__(self): signal.raise_signal(signal.SIGINT); time.sleep(0)"
    assert ended(start("late = Late(); del late; time.sleep(30)", imports=late)) == (130, "")


def test_an_exit_without_teardown_keeps_status_output_and_exit_handlers() -> None:
    code = PROGRAM.format(
        imports="import atexit; atexit.register(lambda: print('handler', file=sys.stderr))\n"
        "class Late:\n    def __del__(self): print('teardown')\n"
        "late = Late()",
        body="print('result'); return 7",
    ).replace("run_main(main)", "run_main(main, teardown=False)")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "result\n", "handler\n")


@pytest.mark.parametrize("error", ["errno.EIO, 'Input/output error'", "errno.ENOENT, 'No such file', '/p/gone.jpg'"])
def test_unavailable_storage_is_reported_in_one_line_with_status_2(error: str) -> None:
    status, errors = ended(start(f"raise OSError({error})", imports="import errno"))
    assert (status, errors.count("\n")) == (2, 1)
    assert "expected a file system that answers" in errors
    assert ("/p/gone.jpg" in errors) == ("gone" in error)


@pytest.mark.parametrize("error", ["errno.EBADF, 'Bad file descriptor'", "errno.ENOENT, 'no file is named'"])
def test_other_os_errors_keep_their_traceback(error: str) -> None:
    status, errors = ended(start(f"raise OSError({error})", imports="import errno"))
    assert status == 1
    assert "Traceback" in errors


def test_workers_start_with_ctrl_c_blocked_and_their_parent_does_not(tmp_path: Path) -> None:
    """Else Ctrl-C could reach a worker before it ignores it."""
    (tmp_path / "program.py").write_text(FORK_SERVER)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("True\n", "")
