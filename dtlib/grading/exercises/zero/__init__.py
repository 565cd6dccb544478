"""The exercises of the chapter `zero`."""
