"""The exercises of the chapter `compression`."""
