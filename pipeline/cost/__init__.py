"""The cost model: how long one step of the engine takes on a GPU, and why."""
