"""The exercises of the chapter `dp`."""
