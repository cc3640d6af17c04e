import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import reduction
from pathlib import Path

import cloudpickle
import pytest

import outrider
from outrider.processes import dumps, ensure_server, loads, start_process

# The child cannot import this file: what it defines travels by value, as from a script.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SCRIPT = """
import multiprocessing, os, sys
from outrider.processes import start_process

class Adder:
    def __init__(self, k):
        self.k = k
    def __call__(self, x):
        return x + self.k

def child(conn, adder, function):
    conn.send((adder(1), function(3), type(adder).__name__, os.path.basename(globals().get("__file__", "-"))))

receiver, sender = multiprocessing.Pipe(False)
process = start_process(child, (sender, Adder(41), lambda x: x * Adder(0)(7)), "kid")
sender.close()
print(*receiver.recv())
process.join()
print(process.exitcode, process.name)
"""


def run_python(*args: str, stdin: str = "", cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=cwd,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(outrider.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("how", ["script", "module", "stdin"])
def test_a_main_module_without_guard_starts_processes_with_its_own_classes_and_lambdas(how: str, tmp_path: Path):
    (tmp_path / "unguarded.py").write_text(SCRIPT)
    if how == "stdin":
        out = run_python("-", stdin=SCRIPT)
    elif how == "module":
        out = run_python("-m", "unguarded", cwd=tmp_path)
    else:
        out = run_python(str(tmp_path / "unguarded.py"))
    assert out.splitlines()[0].startswith("42 21 Adder")
    assert out.splitlines()[1] == "0 kid"


def test_functions_of_a_script_still_know_its_file(tmp_path: Path):
    script = tmp_path / "where.py"
    script.write_text(
        "import multiprocessing\nfrom outrider.processes import start_process\n"
        "def child(conn):\n    conn.send(__file__)\n"
        "receiver, sender = multiprocessing.Pipe(False)\nstart_process(child, (sender,))\n"
        "print(receiver.recv() == __file__, __spec__)\n"
    )
    assert run_python(str(script)).strip() == "True None"


def test_a_process_has_one_compute_thread_and_the_caller_keeps_its_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    receiver, sender = multiprocessing.Pipe(False)
    process = start_process(lambda conn: conn.send(dict(os.environ)), (sender,))
    sender.close()
    environment = receiver.recv()
    process.join()
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "MKL_NUM_THREADS" not in os.environ


def test_starting_a_process_leaves_the_main_module_as_it_was():
    main = sys.modules["__main__"]
    before = (getattr(main, "__file__", None), main.__spec__)
    process = start_process(os.getpid)
    process.join()
    assert (getattr(main, "__file__", None), main.__spec__) == before
    with pytest.raises(TypeError, match="pickle"):
        start_process(print, (sys._getframe(),))
    assert (getattr(main, "__file__", None), main.__spec__) == before


class Memory:
    """An object that hands a file descriptor over, as shared memory does."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self):
        return open_memory, (reduction.DupFd(self.fd),)


def open_memory(dup) -> Memory:
    return Memory(dup.detach())


def test_locks_descriptors_and_pipes_can_be_handed_over():
    def child(semaphore, parts, conn) -> None:
        os.write(parts["memory"].fd, b"hello")
        conn.send(("done", loads(dumps(lambda: 5))()))
        semaphore.release()

    semaphore = multiprocessing.get_context("spawn").Semaphore(0)
    fd = os.memfd_create("test")
    receiver, sender = multiprocessing.Pipe(False)
    process = start_process(child, (semaphore, {"memory": Memory(fd)}, sender))
    assert receiver.recv() == ("done", 5)
    assert semaphore.acquire(timeout=10)
    process.join()
    assert os.pread(fd, 5, 0) == b"hello"
    os.close(fd)


def test_a_process_is_not_daemonic_and_may_have_children():
    def child(conn) -> None:
        grandchild = start_process(conn.send, ("from below",))
        grandchild.join()

    receiver, sender = multiprocessing.Pipe(False)
    process = start_process(child, (sender,))
    assert not process.daemon
    assert receiver.recv() == "from below"
    process.join()
    assert process.exitcode == 0


def test_the_exit_code_tells_the_signal():
    process = start_process(lambda: os.kill(os.getpid(), signal.SIGSEGV))
    process.join()
    assert process.exitcode == -signal.SIGSEGV


def test_ensure_server_can_be_called_again_and_again():
    ensure_server()
    ensure_server()
    process = start_process(os.getpid)
    process.join()
    assert process.exitcode == 0


def test_ctrl_c_while_the_server_starts_ends_neither_the_server_nor_its_processes(tmp_path: Path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import multiprocessing, os, signal\nfrom multiprocessing import forkserver\n"
        "from outrider.processes import ensure_server, start_process\n"
        "def child(conn):\n    os.kill(os.getpid(), signal.SIGINT)\n    conn.send('alive')\n"
        "ensure_server()\nos.kill(forkserver._forkserver._forkserver_pid, signal.SIGINT)\n"
        "receiver, sender = multiprocessing.Pipe(False)\nstart_process(child, (sender,))\nprint(receiver.recv())\n"
        "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    assert run_python(str(script)).split() == ["alive", "True"]


def test_the_server_outlives_a_sigterm_to_the_group_and_tells_how_its_processes_ended_which_the_signal_ends(
    tmp_path: Path,
):
    script = tmp_path / "terminated.py"
    script.write_text(
        "import multiprocessing, os, signal, time\nfrom multiprocessing import forkserver\n"
        "from outrider.processes import ensure_server, start_process\n"
        "def child(conn):\n    conn.send(os.getpid())\n    time.sleep(30)\n"
        "receiver, sender = multiprocessing.Pipe(False)\nprocess = start_process(child, (sender,))\nreceiver.recv()\n"
        "os.kill(forkserver._forkserver._forkserver_pid, signal.SIGTERM)\n"
        "process.terminate()\nprocess.join()\nprint(process.exitcode)\n"
    )
    assert run_python(str(script)).split() == ["-15"]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ties the processes together on Linux only")
@pytest.mark.parametrize("stuck", ["while True: pass", "os.kill(os.getpid(), signal.SIGSTOP)"])
def test_killing_the_parent_kills_its_processes_even_stopped_ones(stuck: str, tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, signal, time\nfrom outrider.processes import start_process\n"
        f"def child(conn):\n    conn.send(os.getpid())\n    {stuck}\n"
        "receiver, sender = multiprocessing.Pipe(False)\nstart_process(child, (sender,))\n"
        "print(receiver.recv(), flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        assert multiprocessing.connection.wait([child], timeout=10), "the child outlived its parent"
    finally:
        os.close(child)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_process_whose_parent_is_already_dead_ends_at_once(tmp_path: Path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal\nimport time\nfrom outrider.processes import start_process, loads\n"
        "class Slow:\n    def __reduce__(self):\n        return time.sleep, (1.0,)\n"
        f"def child(_):\n    open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "print(start_process(child, (Slow(),)).pid, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30.0
    while os.path.exists(f"/proc/{done.stdout.strip()}"):
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)
    assert not (tmp_path / "ran").exists()
