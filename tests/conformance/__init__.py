"""The CNI protocol, row by row, for every executable: start a process, then check its documents
and the kernel.

`subject` says what is tested, `node` where it runs and how it is called, `expect` what a call
must answer, `rows` which row of the tables a test is. No test here imports a plugin's code, so
that the same suite holds for any build: PODFABRIC_TEST_BIN names the directory of executables.

The rows are those of the CNI conformance tables A to N: environment, standard input, versions,
VERSION, later verbs, namespaces, results, chains, DEL, failed ADDs, delegation, CNI_ARGS,
processes, and what the kernel shows.
"""
