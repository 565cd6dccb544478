"""The exercises of the chapter `collectives`."""
