import gc
import mmap
import os
import pickle
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from children_transport import LAYOUT, refuse_inheritable

from outrider import shared_memory
from outrider.channel import item_channel
from outrider.errors import ResourceError
from outrider.flags import InitGuard, StopFlag
from outrider.model_sync import model_channel
from outrider.shared_memory import Arena, Fence, LocalArena, available_bytes, require_memory


def n_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_an_arena_is_zeroed_writable_and_page_aligned() -> None:
    for arena in (Arena(10_000), LocalArena(10_000)):
        view = np.frombuffer(arena.buf, np.uint8)
        assert len(view) == arena.nbytes == 10_000
        assert not view.any()
        assert view.ctypes.data % mmap.PAGESIZE == 0
        view[:] = 7
        del view
        arena.close()
        arena.close()


def test_an_interrupted_fence_works_again() -> None:
    fence = Fence()
    fence()
    fence._release()  # a signal handler raised between the two calls
    fence()
    fence()
    with pytest.raises(RuntimeError):
        (fence._release(), fence._release())


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_what_a_child_starts_does_not_inherit_the_memory(method: str) -> None:
    process = get_context(method).Process(target=refuse_inheritable, args=([Arena(64), StopFlag(), InitGuard()],))
    process.start()
    process.join(20)
    assert process.exitcode == 0


def test_a_closed_arena_keeps_the_views_that_exist_valid() -> None:
    for arena in (Arena(64), LocalArena(64)):
        view = memoryview(arena.buf).cast("Q")
        arena.close()
        view[3] = 5
        assert view[3] == 5


def test_nothing_leaves_descriptors_or_names_behind() -> None:
    names = set(os.listdir("/dev/shm"))
    before = n_descriptors()
    for _ in range(50):
        kept = [Arena(4096), StopFlag(), InitGuard()]
        sender, receiver = item_channel()
        sender.bind(LAYOUT, n_actors=3)
        model_sender, model_receiver = model_channel()
        model_sender.bind({"w": np.zeros(5)})
        model_receiver.open()
        receiver.drain(lambda message: None)
        for end in (sender, receiver, model_sender, model_receiver):
            end.close()
        del kept, sender, receiver, model_sender, model_receiver, end
    assert n_descriptors() == before
    assert set(os.listdir("/dev/shm")) <= names


def test_closing_both_ends_frees_the_descriptor_even_while_they_are_referenced() -> None:
    before = n_descriptors()
    sender, receiver = item_channel()
    sender.bind(LAYOUT, n_actors=3)
    receiver.pending()
    sender.close()
    receiver.close()
    assert n_descriptors() == before


def test_where_memfd_is_refused_a_file_without_a_name_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> int:
        raise PermissionError("vm.memfd_noexec")

    monkeypatch.setattr(os, "memfd_create", refused)
    names = set(os.listdir("/dev/shm"))
    before = n_descriptors()
    arena = Arena(8192)
    np.frombuffer(arena.buf, np.uint8)[:] = 3
    assert set(os.listdir("/dev/shm")) == names
    arena.close()
    assert n_descriptors() == before


def test_what_cannot_be_reserved_is_an_error_and_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(28, "No space left on device")

    before = n_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceError, match=r"needs 1\.00 GB.*No space left"):
        Arena(10**9)
    assert n_descriptors() == before


def test_an_arena_travels_only_to_a_process_that_is_being_started() -> None:
    with pytest.raises(RuntimeError, match="inheritance"):
        pickle.dumps(Arena(64))
    with pytest.raises(TypeError, match="threads back end"):
        pickle.dumps(LocalArena(64))


def test_a_closed_arena_is_not_handed_to_a_process() -> None:
    arena = Arena(64)
    arena.close()
    process = get_context("spawn").Process(target=print, args=(arena,))
    with pytest.raises(ValueError, match="got a closed one"):
        process.start()


def test_too_much_memory_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "available_bytes", lambda: 2 * 10**9)
    require_memory(10**9, "nothing much")
    with pytest.raises(ResourceError, match=r"^replay: needs 3\.00 GB of memory, 2\.00 GB are free$"):
        require_memory(3 * 10**9, "replay")
    sender, _ = item_channel()
    monkeypatch.setattr(shared_memory, "nameless_file", lambda nbytes: pytest.fail("allocated"))
    with pytest.raises(ResourceError, match=r"item channel \(100000 actors, 8 slots of 64 rows"):
        sender.bind(LAYOUT, n_actors=100_000)
    assert not sender.bound


def proc(tmp_path: Path, available_kb: int, cgroup: str) -> Path:
    root = tmp_path / "proc"
    (root / "self").mkdir(parents=True)
    (root / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable: {available_kb} kB\nBuffers: 1 kB\n")
    (root / "self/cgroup").write_text(cgroup)
    return root


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (path / name.replace("__", ".")).write_text(f"{value}\n")


def test_available_memory_is_what_the_kernel_says_without_a_limit(tmp_path: Path) -> None:
    assert available_bytes(proc(tmp_path, 1000, "0::/a\n"), tmp_path / "cg") == 1000 * 1024
    assert available_bytes(tmp_path / "no proc", tmp_path / "cg") > 2**60
    assert 0 < available_bytes() < 2**50


def test_available_memory_is_what_any_cgroup_of_the_second_version_leaves(tmp_path: Path) -> None:
    root = proc(tmp_path, 10**6, "0::/pod/me\n")
    cg = tmp_path / "cg"
    group(cg / "pod/me", memory__max="max", memory__current=500, memory__stat="anon 1\ninactive_file 100")
    assert available_bytes(root, cg) == 10**6 * 1024
    group(cg / "pod", memory__max=1000, memory__current=500, memory__stat="anon 1\ninactive_file 100")
    assert available_bytes(root, cg) == 600
    group(cg / "pod/me", memory__max=510)
    assert available_bytes(root, cg) == 110
    group(cg / "pod/me", memory__max=10)
    assert available_bytes(root, cg) == 0


def test_available_memory_is_what_a_cgroup_of_the_first_version_leaves(tmp_path: Path) -> None:
    root = proc(tmp_path, 10**6, "4:cpu:/x\n3:hugetlb,memory:/invisible/here\n0::/\n")
    # Inside a container the path of the host does not exist, and the root of the mount is the own group.
    group(
        tmp_path / "cg/memory",
        memory__limit_in_bytes=5000,
        memory__usage_in_bytes=1000,
        memory__stat="total_inactive_file 7",
    )
    assert available_bytes(root, tmp_path / "cg") == 4007
