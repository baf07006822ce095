"""The store of one node: reservations and leased blocks, in SQLite under a file lock.

`sqlite_store` has the operations, `address_choice` chooses addresses, `tables` and `database` keep
them. `store_files` opens the files, and `repair` rebuilds a damaged store.
"""
