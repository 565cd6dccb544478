"""lab.run does what it says when nothing goes wrong."""

import dataclasses
import functools
import mmap
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from dtlib import lab


@dataclasses.dataclass
class Point:
    x: int


def helper(x):
    return Point(x + dist.get_rank())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_results_come_in_rank_order_from_a_ready_group(world_size):
    def main(offset):
        total = torch.ones(3)
        dist.all_reduce(total)
        return dist.get_rank() + offset, dist.get_world_size(), total.tolist()

    expected = [(rank + 10, world_size, [world_size] * 3) for rank in range(world_size)]
    assert lab.run(main, world_size, args=(10,)) == expected


def test_the_default_is_four_ranks():
    assert lab.run(lambda: dist.get_rank()) == [0, 1, 2, 3]


def test_closures_over_tensors_and_numpy_integers_as_world_size():
    weight = torch.arange(4.0, requires_grad=True)
    results = lab.run(lambda: (weight * 2).sum().item(), np.int64(2))
    assert results == [12.0, 12.0]


def test_functions_and_classes_of_this_file_travel_by_value_and_come_home():
    points = lab.run(lambda x: helper(x), 2, args=[5])
    assert points == [Point(5), Point(6)]
    assert type(points[0]) is Point


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


class Square:
    def __init__(self, side):
        self.side = side

    @functools.cached_property
    def area(self):
        return self.side**2


def test_what_functools_caches_travels_like_any_function():
    assert lab.run(fibonacci, 2, args=(30,)) == [832040, 832040]
    assert lab.run(lambda: (fibonacci(9), Square(dist.get_rank()).area), 2) == [(34, 0), (34, 1)]


def test_names_that_torch_has_as_modules_of_its_own_kind_travel():
    class Options:
        ops, classes = 3, 2

    assert lab.run(lambda: Options.ops + Options.classes + int(torch.ones(1)), 1) == [6]
    assert lab.run(lambda: torch.ops.aten.add(torch.ones(1), 1).item(), 1) == [2.0]


def test_tensors_keep_type_shape_and_gradient_flag():
    def main():
        return (
            torch.ones(2, 3, dtype=torch.bfloat16),
            torch.zeros(1, requires_grad=True),
            torch.arange(6).view(2, 3).t(),
        )

    bf16, leaf, strided = lab.run(main, 1)[0]
    assert (bf16.dtype, bf16.shape, leaf.requires_grad, strided.tolist()) == (
        torch.bfloat16,
        (2, 3),
        True,
        [[0, 3], [1, 4], [2, 5]],
    )


def test_a_result_of_200_mb_arrives_whole():
    result = lab.run(lambda: np.arange(25 * 10**6), 1)[0]
    assert result.nbytes == 200 * 10**6
    assert np.array_equal(result, np.arange(25 * 10**6))


def test_prints_appear_in_rank_order_each_line_marked(capsys):
    def main():
        print(f"first of {dist.get_rank()}\nsecond")
        os.system("echo from a child")

    lab.run(main, 2)
    assert capsys.readouterr().out.splitlines() == [
        f"[rank {rank}] {line}" for rank in (0, 1) for line in (f"first of {rank}", "second", "from a child")
    ]


def test_ten_megabytes_of_prints_arrive_whole(capsys):
    def main():
        for number in range(100_000):
            print(f"{number:06d} " + "x" * 93)

    lab.run(main, 1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 100_000
    assert lines[99_999] == "[rank 0] 099999 " + "x" * 93


def test_a_rank_has_the_readers_directory_environment_and_path(tmp_path, monkeypatch):
    (tmp_path / "readers_module.py").write_text("answer = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DTLIB_TEST_VARIABLE", "seen")
    monkeypatch.syspath_prepend(str(tmp_path))

    def main():
        import readers_module

        return os.getcwd(), os.environ["DTLIB_TEST_VARIABLE"], readers_module.answer, torch.get_num_threads()

    assert lab.run(main, 1, threads_per_rank=2) == [(str(tmp_path), "seen", 42, 2)]


def test_each_rank_draws_its_own_random_numbers():
    drawn = lab.run(lambda: float(np.random.rand()), 4)  # noqa: NPY002
    assert len(set(drawn)) == 4


def test_a_rank_that_returns_early_does_not_disturb_one_that_still_works():
    def main():
        if dist.get_rank() == 0:
            import time

            time.sleep(0.5)
            group = dist.new_group([0], use_local_synchronization=True)
            value = torch.ones(1)
            dist.all_reduce(value, group=group)
            return value.item()
        return 1.0

    assert lab.run(main, 3) == [1.0] * 3


def test_the_readers_multiprocessing_is_untouched():
    code = """
import multiprocessing, sys
from dtlib import lab
before = multiprocessing.get_start_method(allow_none=True)
lab.run(lambda: 1, 2)
assert multiprocessing.get_start_method(allow_none=True) == before
from multiprocessing import forkserver, resource_tracker
assert forkserver._forkserver._forkserver_pid is None, "the standard library's fork server was started"
assert resource_tracker._resource_tracker._fd is None, "the resource tracker was started"
for method in multiprocessing.get_all_start_methods():
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(abs, [-1, 2]) == [1, 2]
print("untouched", lab.run(lambda: 2, 2))
"""
    file = "if __name__ == '__main__':\n" + "\n".join("    " + line for line in code.splitlines())
    done = subprocess.run([sys.executable, "-c", file], capture_output=True, text=True, timeout=120)
    assert done.stdout == "untouched [2, 2]\n", done.stderr


def test_data_loader_workers_and_pools_run_inside_a_rank():
    def main():
        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=4, num_workers=2)
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return [batch.tolist() for batch in loader], pool.map(abs, [-1, 2])

    assert lab.run(main, 2) == [([[0, 1, 2, 3], [4, 5, 6, 7]], [1, 2])] * 2


def test_no_main_guard_is_needed(tmp_path):
    """Of a script; of ``python -c``: test_cluster and test_run_leaves_nothing."""
    script = tmp_path / "script.py"
    script.write_text("from dtlib import lab\ndef f(x):\n    return x * 2\nprint(lab.run(f, 2, args=(21,)))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("[42, 42]\n", "")


def test_ranks_share_memory_in_huge_pages_where_the_kernel_makes_them(lacking):
    """With small ones each fork copies a table of 50,000 entries."""

    def in_huge_pages(pid):
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("AnonHugePages"))

    own = mmap.mmap(-1, 8 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    own[:] = bytes([1]) * len(own)
    try:
        if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
            lacking("this machine wants no huge pages")
        own.madvise(25)  # MADV_COLLAPSE, Linux 6.1
    except OSError as refused:
        lacking(f"no huge page on demand: {refused}")
    assert lab.run(lambda: in_huge_pages("self"), 1)[0] > 64 * 1024  # KiB


def test_where_forking_is_unsafe_ranks_are_spawned_and_the_reader_is_told(monkeypatch):
    monkeypatch.setenv("DTLIB_START_METHOD", "spawn")

    def main():
        with lab.wire() as wire:
            total = torch.ones(1)
            dist.all_reduce(total)
        return total.item(), wire.method

    with pytest.warns(UserWarning, match="spawns its ranks"):
        results = lab.run(main, 2)
    assert results[0][0] == 2.0
    assert "share the machine's network" in results[0][1]


@pytest.mark.gpu
def test_with_a_gpu_for_each_rank_the_group_speaks_nccl():
    def main():
        total = torch.ones(4, device="cuda")
        dist.all_reduce(total)
        return total.tolist(), dist.get_backend(), torch.cuda.current_device()

    results = lab.run(main, torch.cuda.device_count())
    assert results == [([len(results)] * 4, "cpu:gloo,cuda:nccl", rank) for rank in range(len(results))]
