"""The exercises of the chapter `planner`."""
