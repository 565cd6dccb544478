"""The exercises of the chapter `memory`."""
