"""The exercises of the chapter `pp`."""
