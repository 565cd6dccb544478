"""The exercises of the chapter `tp`."""
