"""``python -m dtlib.cli``."""

from . import main

main()
