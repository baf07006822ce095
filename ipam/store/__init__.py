"""The store of one node has reservations and leased blocks, in SQLite under a file lock.

`sqlite_store` has the operations, and `address_choice` chooses addresses. `tables` and `database`
read and write SQLite. `store_files` opens the files, and `repair` rebuilds a damaged store.
"""
