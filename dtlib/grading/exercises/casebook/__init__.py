"""The exercises of the chapter `casebook`."""
