"""Walls around a submission: what runs a learner's code, and what keeps it from everything else.

A job runs like this. The grader's fork server forks a *warden*, which takes namespaces of its own (processes, network,
files), becomes process 1 of them, and forks the ranks, here called *inmates*. An inmate gives up every privilege, then
executes the learner's cells and the harness. The warden is never in the hands of the learner: it hands out what a rank
is to know, piece by piece, counts the traffic and the memory, ends what takes too long, and reports plain data. When it
ends, the kernel kills everything inside.

Which walls a machine grants is tried out, never assumed: `dtlib.grading.sandbox.runner.Sandbox.walls`.
"""

MEANING = {
    "processes": "a submission sees and signals its own processes alone; when its time is up they are all killed",
    "network": "it has a network of its own, on which its bytes are counted from outside; it reaches nobody else",
    "files": "it reads the system and the library, no checks, solutions or submissions; its home is thrown away",
    "limits": "memory, processes, files, output and time are bounded",
    "syscalls": "calls of the kernel that no exercise needs are refused",
    "environment": "it gets none of the grader's variables, so none of its secrets",
}
WALLS = tuple(MEANING)
