"""How processes are started, talk, and are kept apart: what others run on them is theirs. Nothing here needs torch."""
