"""Keys of ``dist_async`` and who keeps them: each part has a server, a worker or a process of its own.

- `placement`, `table`, `cell`: which server keeps which part; all keys as every process knows them; one part.
- `transfer`, `state_transfer`: how pushes and pulls, and whole states, reach all parts of a key.
- `server`, `requests`, `wire`: requests and answers between nodes; how one is met; their bytes.
- `delay`: the bound of staleness; `replay`: seeded schedules; `together`: what workers and servers do together.
"""
