"""The exercises of the chapter `reliability`."""
