"""Walls around a submission: what runs a learner's code, and what keeps it from everything else.

A case runs like this. The grader's fork server forks a *warden*, which takes namespaces of its own (processes, network,
files), becomes process 1 of them, and forks the ranks, here called *inmates*. An inmate gives up every privilege, then
executes the learner's cells and the harness. The warden is never in the hands of the learner: it counts the traffic
and the memory, ends what takes too long, and reports plain data. When it ends, the kernel kills everything inside.

Which walls a machine grants is tried out, never assumed: `dtlib.grading.sandbox.Sandbox.walls`.
"""

MEANING = {
    "processes": "sees and signals no process outside; nothing outlives its case",
    "network": "reaches no network; its traffic is read from outside",
    "files": "reads the libraries alone, without checks and solutions; writes to a throw-away home alone",
    "limits": "a user of its own; memory, processes, files and output are bounded",
    "syscalls": "no privileges to regain; no way into other processes, mounts or uncounted memory",
    "environment": "no variable of the grader's environment",
}
WALLS = tuple(MEANING)
