"""The CNI protocol, row by row, for every executable: start a process, then check its documents
and the kernel.

`subject` names the tested executables, `node` is the machine and the calls, `expect` is the answer
of a call, and `rows` maps tests to rows of the tables. No test here imports a plugin's code, so the
same suite tests any build: PODFABRIC_TEST_BIN names the directory of executables.

The rows are those of the CNI conformance tables A to N: environment, standard input, versions,
VERSION, later verbs, namespaces, results, chains, DEL, failed ADDs, delegation, CNI_ARGS,
processes, and what the kernel shows.
"""
