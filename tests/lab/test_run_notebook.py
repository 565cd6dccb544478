"""lab.run and %%ranks in a real Jupyter kernel: functions typed into cells, errors with their source, interruption."""

import time

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

DEFINE = """
import time, pathlib, os
import torch, torch.distributed as dist
from dtlib import lab
weight = torch.ones(3)
class Answer:
    def __init__(self, value): self.value = value
def cell_function(x):
    print("in rank", dist.get_rank())
    return Answer((weight * x).sum().item())
"""


@pytest.fixture(scope="module")
def kernel():
    manager, client = start_new_kernel(kernel_name="python3")
    run(client, DEFINE)
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client, code, during=None, shown=None):
    """Execute `code`; its printed text and, when it failed, the error's name and text. `shown` gets its traceback."""
    text, errors = [], []

    def collect(message):
        content = message["content"]
        if message["msg_type"] == "stream":
            text.append(content["text"])
        elif message["msg_type"] == "error":
            errors.append((content["ename"], content["evalue"]))
            if shown is not None:
                shown.append("\n".join(content["traceback"]))
        elif during is not None and content.get("execution_state") == "busy":
            during()

    client.execute_interactive(code, timeout=60, output_hook=collect)
    return "".join(text), errors


def test_a_function_of_a_cell_runs_and_its_class_comes_home(kernel):
    code = "answers = lab.run(cell_function, 2, args=(2,)); print([type(a) is Answer and a.value for a in answers])"
    assert run(kernel[1], code) == ("[rank 0] in rank 0\n[rank 1] in rank 1\n[6.0, 6.0]\n", [])


def test_the_source_of_the_cell_is_in_the_traceback(kernel):
    code = "def broken():\n    return 1 / 0  # look here\nlab.run(broken, 2)"
    ((name, text),) = run(kernel[1], code)[1]
    assert name == "RankError"
    assert "return 1 / 0  # look here" in text


def test_the_source_of_the_cell_is_in_the_stack_of_a_hang(kernel):
    code = "def hang():\n    dist.recv(weight, 1 - dist.get_rank())  # both wait\nlab.run(hang, 2, timeout_s=1)"
    ((name, text),) = run(kernel[1], code)[1]
    assert name == "RankTimeout"
    assert text.count("# both wait") == 2


def test_interrupting_the_cell_ends_the_ranks_and_spares_the_kernel(kernel, tmp_path):
    manager, client = kernel
    started = []

    def interrupt_when_ranks_are_up():
        if not started:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.05)
            started.extend(int(file.name) for file in tmp_path.iterdir())
            manager.interrupt_kernel()

    code = (
        f"def forever():\n    pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n    time.sleep(600)\n"
        "lab.run(forever, 2, timeout_s=600)"
    )
    _, ((name, said),) = run(client, code, during=interrupt_when_ranks_are_up)
    assert name == "KeyboardInterrupt"
    assert said.startswith("interrupted: ranks 0 and 1 had not returned. Where each one was")
    assert said.count("in forever\n    time.sleep(600)") == 2
    assert len(started) == 2
    assert not any(psutil.pid_exists(pid) for pid in started)
    assert run(client, "print(lab.run(lambda: weight.sum().item(), 2))") == ("[3.0, 3.0]\n", [])


def test_a_cell_runs_on_ranks_that_stay(kernel):
    client = kernel[1]
    assert run(client, "%%ranks 2\nx = torch.ones(2) * rank\nx") == (
        "[rank 0] tensor([0., 0.])\n[rank 1] tensor([1., 1.])\n",
        [],
    )
    assert run(client, "%%ranks\ndist.all_reduce(x)\nx") == ("[all 2 ranks] tensor([1., 1.])\n", [])
    assert run(client, "%%ranks\nprint(rank) if rank else None") == ("[rank 1] 1\n", [])
    text, errors = run(client, "%%ranks 3\nrank;")
    assert (text, errors) == (
        "The 2 ranks of before end here. These are new: they know nothing of earlier cells.\n",
        [],
    )
    text, ((name, said),) = run(client, "%%ranks\nx")
    assert (text, name) == ("", "RankError")
    assert said.startswith("rank 0 of 3 raised NameError: name 'x' is not defined")
    (((name, said),)) = run(client, "%%ranks timeout_s=1\nif rank == 1:\n    dist.recv(torch.ones(1), 0)")[1]
    assert (name, said[:18]) == ("RankTimeout", "after 1 s rank 1 h")
    text, errors = run(client, "%%ranks\nrank")
    assert text.startswith(
        "The 3 ranks of before have ended. These are new: they know nothing of earlier cells.\n[rank 0] 0\n"
    )
    for number in (0, 500):
        assert run(client, f"%%ranks {number}\nrank")[1] == [
            ("ValueError", f"world_size must be a whole number from 1 to 128, not {number}")
        ]
    assert run(client, "%%ranks 3\nrank + 1 if rank == 2 else None") == ("[rank 2] 3\n", [])
    (((name, said),)) = run(client, "%%ranks four\nrank")[1]
    assert (name, said) == (
        "ValueError",
        "%%ranks must be followed by a number, timeout_s=…, or nothing, not by 'four'",
    )


def test_an_interrupt_ends_ranks_that_stay_and_spares_the_kernel(kernel, tmp_path):
    manager, client = kernel
    pids = []

    def interrupt_when_ranks_are_up():
        deadline = time.monotonic() + 30
        while not pids and time.monotonic() < deadline:
            time.sleep(0.05)
            if len(list(tmp_path.iterdir())) == 2:
                pids.extend(int(file.name) for file in tmp_path.iterdir())
                manager.interrupt_kernel()

    code = "%%ranks 2\nimport os, pathlib, time\n"
    code += f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\ntime.sleep(50)"
    shown = []
    _, ((name, said),) = run(client, code, during=interrupt_when_ranks_are_up, shown=shown)
    assert name == "KeyboardInterrupt"
    assert said.startswith("interrupted: ranks 0 and 1 had not returned. Where each one was")
    assert said.count("time.sleep(50)") == 2
    assert shown == [f"KeyboardInterrupt: {said}"], "nothing of the way through the machinery"
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))
    assert run(client, "print(weight.sum().item())") == ("3.0\n", [])
