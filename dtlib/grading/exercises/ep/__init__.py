"""The exercises of the chapter `ep`."""
