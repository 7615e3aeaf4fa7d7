"""Running programs on several ranks: placement, sharding, collectives, the engine, and the processes."""
