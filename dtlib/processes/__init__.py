"""How processes are started, talk, and are kept apart: what `lab` and `grading` build on. Nothing here needs torch."""
