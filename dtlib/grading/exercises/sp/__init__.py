"""The exercises of the chapter `sp`."""
