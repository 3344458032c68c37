"""Every command line: Ctrl-C, closed and broken outputs, and unavailable storage end in one line."""

from __future__ import annotations

import ast
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resolute import console
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


@pytest.mark.parametrize("closed", ["2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_are_never_replaced_by_opened_files(tmp_path: Path, closed: str) -> None:
    body = f"print('out'); print('err', file=sys.stderr); open({str(tmp_path / 'f')!r}, 'w').write('data')"
    code = PROGRAM.format(body=body, imports="")
    done = subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], cwd=ROOT, check=False)
    assert done.returncode == 0
    assert (tmp_path / "f").read_text() == "data"


def test_ctrl_c_prints_no_traceback_and_gives_status_130() -> None:
    wait = "print('ready', flush=True); import time; time.sleep(30)"
    status, errors = ended(start(wait), interrupt_after="ready")
    assert status == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize("error", ["errno.EIO, 'Input/output error'", "errno.ENOENT, 'No such file', '/p/gone.jpg'"])
def test_unavailable_storage_is_reported_in_one_line_with_status_2(error: str) -> None:
    status, errors = ended(start(f"raise OSError({error})", imports="import errno"))
    assert (status, errors.count("\n")) == (2, 1)
    assert "expected a file system that answers" in errors
    assert ("/p/gone.jpg" in errors) == ("gone" in error)


def test_what_the_library_logs_begins_with_the_command_as_errors_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_program", "")
    for _ in range(2):
        console.set_program("resolute train")
    logging.getLogger("resolute").warning("skipped, sample %d in its place:\n%s", 3, "damaged")
    console.say("got 1, expected 2")
    assert capsys.readouterr().err.splitlines() == [
        "resolute train: skipped, sample 3 in its place: damaged",
        "resolute train: got 1, expected 2",
    ]


def test_only_say_writes_to_stderr_and_no_line_on_stdout_begins_with_the_command() -> None:
    # why these: the line of progress on a terminal; the messages of `make env`, which is no command of ours
    others = {"benchmarks/cli.py", "resolute/cuda_stack.py"}
    wrong = []
    for folder in ("resolute", "pipeline", "prep", "train", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            place = str(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.Call):
                    continue
                text = ast.unparse(node)
                is_print = ast.unparse(node.func) in ("print", "tqdm.write")
                to_stderr = "sys.stderr" in text if is_print else text.startswith(("sys.stderr.write", "warnings.warn"))
                named = is_print and text.partition("(")[2].lstrip("f\"'").startswith("resolute")
                if (to_stderr and place not in others | {"resolute/console.py"}) or named:
                    wrong.append((place, text))
    assert wrong == []
