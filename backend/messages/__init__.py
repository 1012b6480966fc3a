"""The message store (SAMZA-552): `layout` chooses the key, `keys` builds it, `rows` stores, reads and expires."""
