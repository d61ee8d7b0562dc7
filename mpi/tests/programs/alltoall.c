// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Exchanges buffers between all ranks without end, or as often as the argument says. Rank 0 says "turns" after the first time. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>

#define BYTES 8192

int main(int argc, char **argv)
{
	long turns = argc > 1 ? atol(argv[1]) : -1;
	int rank, ranks;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	char *out = calloc(ranks, BYTES), *in = calloc(ranks, BYTES);
	for (long turn = 0; turn != turns; turn++) {
		MPI_Alltoall(out, BYTES, MPI_CHAR, in, BYTES, MPI_CHAR, MPI_COMM_WORLD);
		if (turn == 0 && rank == 0) {
			printf("turns\n");
			fflush(stdout);
		}
	}
	MPI_Finalize();
	return 0;
}
