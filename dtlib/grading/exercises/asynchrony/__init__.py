"""The exercises of the chapter `asynchrony`."""
