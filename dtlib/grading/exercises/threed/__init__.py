"""The exercises of the chapter `threed`."""
