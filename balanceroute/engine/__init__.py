"""A pure model of the serving engine: step time, slots, KV blocks, the barrier."""
