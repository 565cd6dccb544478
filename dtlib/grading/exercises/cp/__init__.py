"""The exercises of the chapter `cp`."""
