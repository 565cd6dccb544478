"""The exercises of the chapter `activations`."""
