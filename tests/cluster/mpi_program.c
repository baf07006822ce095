/*
 * mpi_program [BYTES]: prints the latency between ranks 0 and 1, and the time of a sum over all
 * ranks of BYTES of doubles (65536 by default). Fails if the sum is wrong.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define ROUNDS 20

static double latency(int rank)
{
    char byte = 0;
    double began = MPI_Wtime();

    for (int i = 0; i < ROUNDS; i++) {
        if (rank == 0)
            MPI_Send(&byte, 1, MPI_CHAR, 1, 0, MPI_COMM_WORLD);
        if (rank < 2)
            MPI_Recv(&byte, 1, MPI_CHAR, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1)
            MPI_Send(&byte, 1, MPI_CHAR, 0, 0, MPI_COMM_WORLD);
    }
    return (MPI_Wtime() - began) / (2 * ROUNDS);
}

int main(int count, char **words)
{
    int bytes = count > 1 ? atoi(words[1]) : 65536, number = bytes / (int)sizeof(double);
    int rank, ranks, length;
    char host[MPI_MAX_PROCESSOR_NAME];
    double *own = malloc(bytes), *sum = malloc(bytes);

    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Get_processor_name(host, &length);
    printf("rank %d of %d on %s\n", rank, ranks, host);
    if (own == NULL || sum == NULL || ranks < 2)
        MPI_Abort(MPI_COMM_WORLD, 1);
    for (int i = 0; i < number; i++)
        own[i] = rank + i;
    latency(rank); /* connects */
    double each = latency(rank);
    MPI_Barrier(MPI_COMM_WORLD);
    double began = MPI_Wtime();
    MPI_Allreduce(own, sum, number, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    double took = MPI_Wtime() - began;
    for (int i = 0; i < number; i++)
        if (sum[i] != ranks * (double)i + ranks * (ranks - 1) / 2) {
            fprintf(stderr, "rank %d: element %d of the sum is %g\n", rank, i, sum[i]);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    if (rank == 0)
        printf("latency %.1f us\nall-reduce of %d bytes %.1f us, the sum is right\n", each * 1e6,
               bytes, took * 1e6);
    MPI_Finalize();
    return 0;
}
