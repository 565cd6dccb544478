"""The exercises of the chapter `batch`."""
